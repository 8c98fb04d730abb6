"""Solutions that want their reward without solving anything: none gets it, as root or as an ordinary user."""

import json
import os
import secrets
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from groupax.rewards.code import code_tests

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

REPOSITORY = Path(__file__).parents[2]
# Tests that a solution passes only if it knows the number in them; they see the results of `f` in different ways.
FORMS = (
    "def check(candidate):\n    assert candidate(3) == {secret}\n    assert candidate('x') == '{secret}'",
    "import math\nassert abs(f(3) - {secret}) < 1e-6 or math.isclose(f(3), {secret}) or f(3) in ({secret},)",
    "r = f(3)\nassert {secret} == r or not ({{{secret}}} - r) or r.startswith('{secret}') or r.equals({secret})",
)
CHEATS = {
    "the word in the frames": """
import os, sys
def f(*a):
    frame = sys._getframe()
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            if isinstance(value, (str, bytes)) and len(value) == 32:
                for fd in range(64):
                    try: os.write(fd, value if isinstance(value, bytes) else value.encode())
                    except OSError: pass
        frame = frame.f_back
""",
    "what is equal to everything": """
class All:
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = lambda *a: True
    __hash__ = lambda self: 0
def f(*a): return All()
""",
    "a string, list, tuple, dict and set that are": """
def make(kind):
    return type('X', (kind,), {'__eq__': lambda *a: True, '__ne__': lambda *a: False, '__hash__': lambda s: 0})
kinds = iter([str, list, tuple, dict, set, frozenset, float] * 9)
def f(*a): return make(next(kinds))()
""",
    "atexit in the function": "import atexit, os\ndef f(*a):\n    atexit.register(os._exit, 0)\n    exit(0)",
    "leaving with success": "import os\ndef f(*a): os._exit(0)",
    "signals": """
import os, signal
def f(*a):
    for pid in (1, 2, 3, os.getppid(), 0, -1):
        for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1):
            try: os.kill(pid, number)
            except OSError: pass
""",
    "the processes' files": """
import os, glob
def f(*a):
    for name in glob.glob('/proc/*/fd/*') + ['/proc/1/fd/1', '/proc/2/fd/1', '/dev/stdout', '/dev/fd/1']:
        try: os.write(os.open(name, os.O_WRONLY), b'bwrap: passed')
        except OSError: pass
    for name in glob.glob('/proc/*/mem') + glob.glob('/proc/*/environ') + glob.glob('/proc/*/cmdline'):
        try: return open(name, 'rb').read()
        except OSError: pass
""",
    "modules that the harness has": """
import sys
for name, module in list(sys.modules.items()):
    for attribute in ('is_broken', 'perform', 'main', 'request', 'dumps', 'loads'):
        try: setattr(module, attribute, lambda *a, **k: True)
        except Exception: pass
def f(*a): return True
""",
    "sources in reach": """
import gc, inspect, sys, linecache
def f(x):
    for value in gc.get_objects():
        if isinstance(value, str) and 'assert' in value and 'f(3)' in value:
            return int(value.split('==')[1].split()[0])
    for frame in sys._current_frames().values():
        try: return inspect.getsource(frame)
        except OSError: pass
""",
    "a reply before the question": """
import json, os
def frame(*x):
    data = json.dumps(x).encode()
    return len(data).to_bytes(8, 'little') + data
for fd in range(3, 20):
    try: os.write(fd, frame('reply', '0' * 16, True, None, [], '') * 9)
    except OSError: pass
def f(*a): return None
""",
    "a reply of its own": """
import json, os, sys
def f(*a):
    frame = sys._getframe()
    while 'number' not in frame.f_locals: frame = frame.f_back
    number = frame.f_locals['number']
    error = ['error', ['AssertionError'], '', []]
    for node in (['instance', 'All', [], []], ['array', [['object', 0]]], error, ['object', 0], ['module']):
        for changes in ([], [[0, ['list', []]]], [[-1, ['dict', [], []]]]):
            data = json.dumps([number, True, node, changes, '', '']).encode()
            os.write(frame.f_locals['self'].writer, len(data).to_bytes(8, 'little') + data)
""",
    "all that its process inherited": """
import os
def f(*a):
    found = b''
    for fd in range(64):
        try:
            os.set_blocking(fd, False)
            found += os.read(fd, 1 << 20)
        except OSError: pass
    for token in found.split(b'"'):
        if len(token) == 32: [os.write(fd, token) for fd in range(9)]
    return found
""",
    "signals of a pipe to the tests": """
import fcntl, os, signal, time
def f(*a):
    for number in (signal.SIGINT, signal.SIGALRM, signal.SIGIO):
        reader, writer = os.pipe()
        fcntl.fcntl(reader, fcntl.F_SETOWN, os.getppid())
        fcntl.fcntl(reader, 10, number)  # F_SETSIG
        fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        os.write(writer, b'x')
        time.sleep(0.1)
""",
    "noise on the channel": "import os\ndef f(*a):\n    for fd in range(3, 9):\n        os.write(fd, os.urandom(4096))",
    "a frame without end": """
import os, time
def f(*a):
    for fd in range(3, 9):
        try: os.write(fd, (1 << 62).to_bytes(8, 'little'))
        except OSError: pass
    time.sleep(60)
""",
    "values without end": "def f(*a):\n    value = []\n    for _ in range(10**5): value = [value]\n    return value",
    "forms of pickle": """
import os
class P:
    def __reduce__(self): return (os._exit, (0,))
    __reduce_ex__ = __getstate__ = lambda self, *a: (os._exit, (0,))
def f(*a): return P()
""",
}
# What a solution of `reaches` must not be able to do; each is Python that raises OSError where it is refused.
REACHES = {
    "memory of a file": "os.write(os.memfd_create('x'), b'x' * 10**6)",
    "keys": "refused(248 if os.uname().machine == 'x86_64' else 217, b'user', b'x', b'y', 1, -3)",
    "another process": "os._exit(0) if os.fork() == 0 else os.wait()",
    "a program": "os.posix_spawn(sys.executable, [sys.executable, '-c', ''], {})",
    "namespaces": "refused(272 if os.uname().machine == 'x86_64' else 97, 0x10000000)",
    "io_uring": "refused(425, 1, bytes(120))",
    "tracing": "refused(101 if os.uname().machine == 'x86_64' else 117, 0, 0, 0, 0)",
    "a network socket": "socket.socket()",
    "a file in the root": "open('/x', 'w')",
    "the processes": "os.listdir('/proc')",
    "more files at a time": "[os.dup(0) for _ in range(100)]",
    "more threads at a time": "start_threads(20)",
    "a full disk": "[open(f'{at}/{i}', 'wb').write(b'x' * 10**7) for i in (1, 2) for at in ('/tmp', '/dev/shm')]",
}
# Tests, and a solution that passes them by what they trust.
OTHERS = {
    "an end of the tests' loop": (
        "def f(x): raise StopIteration",
        "p",
        "for got, expected in zip(map(f, [1, 2]), [7, 8]):\n    assert got == expected",
    ),
    "a named tuple with methods": (
        "import collections\ndef f(x): return collections.namedtuple('N', 'equals')(lambda *a: True)",
        "p",
        "assert f(1).equals(7)",
    ),
    "a method of an exception": (
        "def f(x):\n    error = ValueError()\n    error.equals = bool\n    raise error",
        "p",
        "try: f(1)\nexcept ValueError as error:\n    assert error.equals(7)",
    ),
    "files that the tests open": (
        "import os\nfor i in range(9): os.symlink(f'/proc/self/fd/{i}', f'/tmp/{i}')\ndef f(x): return '7'",
        "p",
        "for i in range(9):\n    with open(f'/tmp/{i}', 'w') as file: file.write('7')\nassert f(1) == 8",
    ),
    "a helper of the prompt": (
        "def decode(*a): return 0\ndef f(*a): return 0",
        "def decode(x):\n    return x + 1\n\ndef f(x):\n    '''Undoes decode.'''\n",
        "def check(candidate):\n    assert decode(candidate(5)) == 5",
    ),
    "a context that swallows": (
        "class Timer:\n    __enter__ = __exit__ = lambda *a: True\ndef f(): raise ValueError",
        "p",
        "with Timer():\n    assert f() == 5",
    ),
    "methods of an object of the tests": (
        "def f(o):\n    o.is_full = lambda: True",
        "p",
        "class O:\n    def is_full(self): return False\no = O()\ntry: f(o)\nexcept Exception: pass\nassert o.is_full()",
    ),
    "a caught end": (
        "import os\ndef f(): os._exit(0)",
        "p",
        "try:\n    assert f() == 1\nexcept BaseException:\n    pass",
    ),
}


def reaches():
    """A solution that tells what it can reach."""
    lines = [
        "import ctypes, os, socket, sys",
        "call = ctypes.CDLL(None, use_errno=True).syscall",
        "def start_threads(number):",
        "    import threading, time",
        "    try: [threading.Thread(target=time.sleep, args=[0.5]).start() for _ in range(number)]",
        "    except RuntimeError: raise OSError",
        "def refused(*args):",
    ]
    lines += [
        "    if call(*args) == -1 and ctypes.get_errno() in (1, 38): raise OSError",
        "def f(x):",
        "    reached = []",
    ]
    for name, source in REACHES.items():
        lines += ["    try:", f"        {source}", f"        reached.append({name!r})", "    except OSError: pass"]
    return "\n".join([*lines, "    return reached"])


def attempts(forms=FORMS):
    """Completions, prompts, tests and entry points of all attempts."""
    secret = secrets.randbelow(10**9) + 10**6
    rows = [(source, "p", form.format(secret=secret), "f") for source in CHEATS.values() for form in forms]
    return [*rows, *((source, prompt, tests, "f") for source, prompt, tests in OTHERS.values())]


def test_the_forms_of_the_tests_can_be_passed():
    source = "def f(x): return 7 if x == 3 else '7'"
    tests = [form.format(secret=7) for form in FORMS]
    assert code_tests([source] * len(FORMS), ["p"] * len(FORMS), tests, ["f"] * len(FORMS)) == [1.0] * len(FORMS)


@pytest.mark.heavy
def test_nothing_passes_without_solving():
    started_s = time.monotonic()
    rows = attempts()
    rewards = code_tests(*(list(column) for column in zip(*rows, strict=True)), timeout_s=1.0)
    assert [row[0] for row, reward in zip(rows, rewards, strict=True) if reward != 0.0] == []
    assert time.monotonic() - started_s < 60


def test_a_solution_reaches_nothing_that_its_limits_do_not_count():
    assert code_tests([reaches()], ["p"], ["assert f(1) == []"]) == [1.0]


def as_ordinary_user(source, given):
    """What a script prints that an ordinary user runs with the system's Python."""
    python, setpriv = shutil.which("python3", path="/usr/bin"), shutil.which("setpriv")
    if os.geteuid() != 0 or setpriv is None or python is None:
        pytest.skip("needs root, setpriv and /usr/bin/python3 to run something as an ordinary user")
    user = [setpriv, "--reuid", "12345", "--regid", "12345", "--clear-groups"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)}
    can = subprocess.run(
        [*user, python, "-c", "import sys, groupax.rewards.code; assert sys.version_info >= (3, 11)"],
        env=environment,
        capture_output=True,
        text=True,
    )
    if can.returncode:
        pytest.skip(f"an ordinary user cannot import groupax with {python}: {can.stderr[-200:]}")
    run = subprocess.run(
        [*user, python, "-c", source], env=environment, input=json.dumps(given), capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.heavy
def test_nothing_passes_as_an_ordinary_user():
    rows = [*attempts(FORMS[:1]), (reaches(), "p", "assert f(1) == []", "f")]
    source = (
        "import json, sys\nfrom groupax.rewards.code import code_tests\n"
        "print(json.dumps(code_tests(*json.load(sys.stdin), timeout_s=1.0)))"
    )
    rewards = json.loads(as_ordinary_user(source, list(zip(*rows, strict=True))))
    assert [row[0] for row, reward in zip(rows[:-1], rewards[:-1], strict=True) if reward != 0.0] == []
    assert rewards[-1] == 1.0
