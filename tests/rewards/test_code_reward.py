"""Programs in a sandbox: right ones pass, wrong ones do not, hostile ones do no harm."""

import shutil
import struct
import time

import pytest

from groupax.core.settings.rollouts import RewardSettings
from groupax.rewards.code import code_tests, program
from groupax.rewards.resolve import resolve_rewards
from groupax.rewards.runner import RewardRunner
from groupax.rewards.sandbox import Limits, passes
from groupax.rewards.seccomp import filter_program

from .test_reward_functions import read_lines

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

ATTACKS = {
    "an endless loop": "while True: pass",
    "a fork bomb": """
import os
while True:
    try: os.fork()
    except OSError: pass
""",
    "ten gigabytes": "x = bytearray(10 * 2**30)",
    "the home directory": """
import glob, os
if not glob.glob(os.path.expanduser("~/*")) + glob.glob("/home/*"): raise OSError
""",
    "killing the parent": "import os\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)",
    "a fake result": "import os\nprint('passed')\nos._exit(0)",
    "a full disk": "for i in range(10**4): open(f'/tmp/{i}', 'wb').write(b'x' * 2**20)",
    "a flood of output": """
import os
for fd in range(50):
    try:
        while True: os.write(fd, b"x" * 65536)
    except OSError: pass
raise SystemExit
""",
}
BEHAVED = """
import json, math, os, tempfile, threading
with open("/tmp/x", "w") as file: file.write("ok")
thread = threading.Thread(target=print)
thread.start()
thread.join()
"""


@needs_bubblewrap
@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_contained(name):
    """Each of these would pass its empty test if it were let through."""
    started_s = time.monotonic()
    assert code_tests([ATTACKS[name]], ["p"], ["pass"], timeout_s=2.0) == [0.0]
    assert time.monotonic() - started_s < 6


@needs_bubblewrap
def test_a_program_that_behaves_passes():
    assert code_tests([BEHAVED], ["p"], ["assert open('/tmp/x').read() == 'ok'"]) == [1.0]


@needs_bubblewrap
@pytest.mark.long
def test_humaneval():
    rows = read_lines("humaneval", "HumanEval.jsonl.gz")
    assert len(rows) == 164
    columns = [[row[name] for row in rows] for name in ("prompt", "test", "entry_point")]
    assert code_tests([row["canonical_solution"] for row in rows], *columns) == [1.0] * 164
    assert code_tests(["    pass\n"] * 164, *columns) == [0.0] * 164


@needs_bubblewrap
def test_tests_as_lists_and_partial_credit():
    source = "```python\ndef f(x):\n    return abs(x)\n```"
    tests = [["assert f(1) == 1", "assert f(-1) == -1"]]
    assert code_tests([source], ["p"], tests) == [0.0]
    assert code_tests([source], ["p"], tests, partial_credit=True) == [0.5]
    assert code_tests([source] * 3, ["p"] * 3, ["assert f(1) == 1", "", []]) == [1.0, None, None]
    assert code_tests([[{"role": "assistant", "content": source}]], [[]], ["assert f(-2) == 2"]) == [1.0]


def test_a_solution_of_the_thinking_alone_is_none():
    completion = f"<think>\n```python\n{SQUARE}```\n</think>\n"
    wrong = f"{completion}```python\ndef f(x): ...\n```\n"
    completions, tests = [completion, wrong, wrong + wrong + f"```python\n{SQUARE}```"], ["assert f(2) == 4"] * 3
    assert code_tests(completions, ["p"] * 3, tests, ["f"] * 3, sandbox="none") == [0.0, 0.0, 1.0]


def test_the_last_block_is_the_program():
    text = "first\n```python\na = 1\n```\nthen\n```\ndef f(): pass\n```\nend"
    assert program(text, "p", "f") == "def f(): pass\n"
    assert program("    return 1", "def f():\n", "f") == "def f():\n    return 1"
    assert program("def f(): return 2", "def f():\n", "f") == "def f(): return 2"
    assert program("x", [{"role": "user", "content": "q"}], "f") == "x"
    assert program(f"```python\n{SQUARE}```\nUse it:\n```python\nprint(f(2))\n```", "p", "") == SQUARE


SQUARE = "def f(x):\n    return x * x\n"


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        (f"```python\n{SQUARE}```\nOutput:\n```\n4\n```", "Write f"),
        (f"```\n{SQUARE}```\nUse it:\n```python\nprint(f(2))\n```", "Write f"),
        ("- do\n\n  ```python\n    def f(x):\n        return x * x\n  ```", "Write f"),
        (
            f"{SQUARE}```\nIt squares.",
            [{"role": "user", "content": "q"}, {"role": "assistant", "content": "```python"}],
        ),
        ("    return x * x\n```\nIt squares.", "Write f\n```python\ndef f(x):\n"),
        (f"```python\n{SQUARE}```", "Complete\n```python\ndef f(x): ...\n```\n"),
    ],
)
def test_a_right_solution_as_models_write_it(text, prompt):
    assert code_tests([text], [prompt], ["assert f(2) == 4"], ["f"], sandbox="none") == [1.0]


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("```bash\npip install x\n```\n\n```python\nok\n```", "ok\n"),
        ("```python\nok\n```\nIt prints\n```text\n3\n```\nRun it:\n```bash\npython f.py\n```", "ok\n"),
        ("``` py title=f.py\nok\n```", "ok\n"),
        ("```python\r\nok\r\n```\r\nend", "ok\r\n"),
        ("````python\nok\n```\nok\n````", "ok\n```\nok\n"),
        ("> ```python\n> ok\n> ```", "ok\n"),
        ("```python\nok\n```\nOutput:\n```\n4\n```", "ok\n"),
        (
            '```python\ndef f():\n    """\n    ```python\n    f()\n    ```\n    """\n```',
            'def f():\n    """\n    ```python\n    f()\n    ```\n    """\n',
        ),
        ("`f` is this: ```python\nok```", "ok"),
        ("Type ```pip install x```.\n```python\nok\n```", "ok\n"),
        ("```python\nok\n```\nFor example\n```python\nprint(f(", "ok\n"),
        ("```markdown\n```python\nok\n```\n```", "ok\n"),
        ("```python\na\nNo:\n```python\nok\n```", "ok\n"),
        ("```{.python .numbered}\nok\n```", "ok\n"),
        ("```python\nok\n```bash\npython f.py\n```", "ok\n"),
    ],
)
def test_fences_pair_whatever_their_language(text, source):
    assert program(text, "p", "") == source


@pytest.mark.parametrize("piece", ["`", "``", "```", "``` ", "```\n", "```a", "a ```", " ", "a", "\n", "``a```b"])
def test_fences_of_long_text_take_no_time(piece):
    started_s = time.process_time()
    program(piece * (50_000 // len(piece)), "p", "f")
    program(piece * (50_000 // len(piece)) + "`", "p", "f")
    assert time.process_time() - started_s < 1


def test_a_completion_of_ten_megabytes_is_no_solution():
    started_s = time.process_time()
    assert code_tests(["```\n" * 2_500_000], ["p"], ["pass"], sandbox="none") == [0.0]
    assert time.process_time() - started_s < 1


def evaluate(program, arch, number, argument=0):
    """What a filter of system calls returns, by the definition of classic BPF."""
    data = struct.pack("<IIQQ", number, arch, 0, argument)
    instructions, accumulator, at = list(struct.iter_unpack("<HBBI", program)), 0, 0
    while True:
        code, if_true, if_false, constant = instructions[at]
        if code == 0x06:
            return constant
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, constant)
            at += 1
            continue
        tests = {0x15: accumulator == constant, 0x35: accumulator >= constant, 0x45: bool(accumulator & constant)}
        at += 1 + (if_true if tests[code] else if_false)


@pytest.mark.parametrize(
    ("machine", "arch", "write", "clone", "memfd_create", "socket"),
    [("x86_64", 0xC000003E, 1, 56, 319, 41), ("aarch64", 0xC00000B7, 64, 220, 279, 198)],
)
def test_the_filter_of_system_calls(machine, arch, write, clone, memfd_create, socket):
    program, allow, refuse = filter_program(machine), 0x7FFF0000, 0x00050001
    assert evaluate(program, arch, write) == allow
    assert evaluate(program, arch, clone, 0x3D0F00) == allow  # a thread, as glibc makes one
    assert evaluate(program, arch, clone, 17) == refuse  # a process
    assert evaluate(program, arch, 435) == 0x00050000 | 38  # clone3
    assert evaluate(program, arch, memfd_create) == refuse
    assert evaluate(program, arch, socket, 1) == allow  # AF_UNIX
    assert evaluate(program, arch, socket, 2) == 0x00050000 | 97  # AF_INET
    assert evaluate(program, 0x40000003, write) == 0x80000000  # i386
    if machine == "x86_64":
        assert evaluate(program, arch, 0x40000000 | write) == refuse  # x32
    with pytest.raises(RuntimeError, match="x86_64 and aarch64, not for 'riscv64'"):
        filter_program("riscv64")


def test_without_bubblewrap_neither_the_trainer_nor_a_call_begins(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="bubblewrap, which is not installed"):
        RewardRunner(resolve_rewards("code_tests(timeout_s=2.0)", ["tests"]), RewardSettings())
    RewardRunner(resolve_rewards('code_tests(sandbox="none")', ["tests"]), RewardSettings())
    with pytest.raises(
        RuntimeError, match=r"bubblewrap, which is not installed .* sandbox='none' runs it with your own"
    ):
        code_tests(["pass"], ["p"], ["pass"])


def test_code_without_a_sandbox_is_limited_in_time():
    assert not passes("import time\ntime.sleep(60)", "pass", Limits(seconds=0.5), sandbox="none")


def test_rows_may_lack_an_entry_point_or_a_test():
    code = ["```python\ndef f():\n    return 1\n```"] * 3
    tests = ["assert f() == 1", [None, "assert f() == 2", " "], [None]]
    assert code_tests(code, ["", "", ""], tests, [None, "f", None], sandbox="none") == [1.0, 0.0, None]
