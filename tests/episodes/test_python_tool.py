"""The Python tool: what it keeps, what limits it, and code that wants more than it may, as root or as another user."""

import shutil

import pytest

from groupax import python_tool
from groupax.rewards.interpreter import PythonError

from .test_episodes import call, played

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

# Code -> what its result contains.
ATTACKS = {
    "import os\nos._exit(0)": "the interpreter has ended",
    "while True: pass": "timed out after 1 s",
    "while True: print('x' * 10000)": "timed out after 1 s",
    "import os\nos.fork()": "Operation not permitted",
    "import subprocess\nsubprocess.run(['true'])": "Error",
    "import socket\nsocket.socket()": "Address family not supported",
    "print(open('/etc/passwd').read())": "No such file",
    "import os\nprint(sorted(os.environ))": "['LC_CTYPE', 'PATH', 'PWD', 'PYTHONHASHSEED']",
    "x = [0] * 10**9": "MemoryError",
    "open('/tmp/big', 'w').write('x' * 10**8)": "File too large",
    "import os\nfor i in range(10**6): open(f'/tmp/{i}', 'w').close()": "timed out after 1 s",
    "import os\nfor fd in range(20):\n    try: os.write(fd, b'x' * 100)\n    except OSError: pass": "has ended",
    "class E(Exception):\n    def __str__(self): raise E\nraise E": "str() failed",
    "def f(): return f()\nf()": "RecursionError",
    "import sys\nsys.exit(3)": "SystemExit: 3",
    "print(chr(0xD800), '\\x00')": "\x00",
}
STATEFUL = ["x = 6", "def f(y):\n    return x * y", "print('so')\nf(7)", "1 / 0", "x", "x +* 1", "None"]
REPLIES = ["", "", "so\n42\n", "ZeroDivisionError", "6\n", "SyntaxError", ""]
RANDOM = "import random\nprint(random.random(), hash('abc'))"


def run(interpreter, code):
    """What the model reads."""
    try:
        return interpreter.run(code)
    except PythonError as error:
        return str(error)


@pytest.fixture
def interpreter(request):
    with_settings = getattr(request, "param", {})
    interpreter = python_tool(**with_settings).open(7)
    yield interpreter
    interpreter.close()


@needs_bubblewrap
def test_variables_are_kept_and_errors_are_read(interpreter):
    for code, expected in zip(STATEFUL, REPLIES, strict=True):
        reply = interpreter.run(code)
        assert expected in reply if expected else reply == ""
    assert 'File "<python>", line 1, in <module>' in interpreter.run("1 / 0")


@needs_bubblewrap
def test_hashes_and_random_numbers_are_seeded(interpreter):
    others = [python_tool().open(seed) for seed in (7, 8)]
    first, same, other = (each.run(RANDOM) for each in (interpreter, *others))
    assert first == same != other
    for each in others:
        each.close()


@needs_bubblewrap
@pytest.mark.parametrize("interpreter", [{"output_kb": 0.2}], indirect=True)
def test_long_output_loses_its_middle(interpreter):
    reply = interpreter.run("for i in range(1000): print(i)")
    assert reply.startswith("0\n1\n2\n")
    assert reply.endswith("998\n999\n")
    assert "characters left out" in reply
    assert len(reply) < 300


@needs_bubblewrap
@pytest.mark.heavy
@pytest.mark.parametrize("interpreter", [{"timeout_s": 1, "memory_mb": 256}], indirect=True)
def test_hostile_code_reaches_nothing(interpreter):
    for code, expected in ATTACKS.items():
        assert expected in run(interpreter, code), code
        assert run(interpreter, "'still there'") in ("'still there'\n",), code


@needs_bubblewrap
def test_an_interpreter_that_has_ended_is_replaced_as_the_model_reads(interpreter):
    interpreter.run("x = 1")
    with pytest.raises(PythonError, match=r"has ended, .* its variables are lost"):
        interpreter.run("import os\nos._exit(0)")
    assert "NameError" in interpreter.run("x")
    with pytest.raises(PythonError, match="more than 1,048,576 bytes"):
        interpreter.run("#" * 2**20 + "#")


def test_each_episode_has_its_own_interpreter():
    def answer(text, sample, turn):
        codes = [f"x = {sample}", "x = x + 10", "x", "while True: pass", "x"]
        return call("python", code=codes[turn]) if turn < 5 else "done"

    [group], _ = played(answer, [python_tool(sandbox="none", timeout_s=0.5)], max_result_kb=0.5)
    for row in group:
        replies = [record.result for turn in row.turns for record in turn.calls]
        assert replies[:3] == ["", "", f"{10 + row.sample_index}\n"]
        assert "timed out after 0.5 s; the interpreter was restarted" in replies[3]
        assert "NameError" in replies[4]
        assert row.finish_reason == "stop"


def test_without_a_sandbox_it_runs_as_this_user(tmp_path):
    tool = python_tool(sandbox="none", timeout_s=20)
    interpreter = tool.open(7)
    file = tmp_path / "file.txt"
    assert interpreter.run(f"with open({str(file)!r}, 'w') as file: print(file.write('x'))") == "1\n"
    assert interpreter.run(RANDOM) == interpreter.run(f"random.seed(7)\n{RANDOM}")
    interpreter.close()
    assert file.read_text() == "x"
