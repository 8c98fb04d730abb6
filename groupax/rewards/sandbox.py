"""Runs Python that may be hostile: apart from this machine and from its tests, within limits, and never for too long.

Built on bubblewrap. A run has two processes, each in namespaces of its own:

    bwrap: test process          the harness and the tests
      bwrap: solution process    the solution, behind a filter of system calls

The solution sees neither the tests nor the harness nor the channel of the verdict; it gets arguments and returns data
on two pipes (see `rewards.isolated`). Neither process has a network, an environment, or any file of this machine but
the system's programs and the Python installation, both read-only. They share an empty /tmp of `file_bytes`.

The solution's memory is `memory_bytes` and that of /tmp: it can start threads but no processes, and the filter refuses
the memory that a process's limits do not count. Faults of the kernel are not covered. Imports no jax.
"""

import contextlib
import itertools
import os
import platform
import secrets
import shutil
import signal
import site
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from groupax.errors import RunError
from groupax.rewards.isolated.start import BOOTSTRAP, packed
from groupax.rewards.seccomp import filter_program

Sandbox = Literal["bwrap", "none"]
MAX_OUTPUT_BYTES = 1 << 16
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin")
FIRST_USER = 61_184  # users above it are handed out by nobody (systemd's container range); each run is one
FILTER_DESCRIPTOR = 3
NAMESPACES = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")


@dataclass(frozen=True)
class Limits:
    """What a run may use.

    Attributes:
        seconds: Wall time, and CPU time per process.
        memory_bytes: Address space of the solution's process, and of the tests'.
        file_bytes: Size of each file, and of all files in /tmp together.
        num_processes: Threads at a time.
        num_files: Open files of a process.
    """

    seconds: float = 10.0
    memory_bytes: int = 512 << 20
    file_bytes: int = 16 << 20
    num_processes: int = 16
    num_files: int = 64


def passes(
    solution: str,
    tests: str,
    limits: Limits,
    sandbox: Sandbox = "bwrap",
    entry_point: str = "",
    stub: Sequence[tuple[str, Sequence[str]]] = (),
) -> bool:
    """Returns whether the tests run to their end with what the solution defines.

    What the processes print or how they exit does not matter: a test process that reaches the end of the tests tells a
    word that was drawn for it.

    Args:
        solution: Python source, of anyone.
        tests: Python source; the names that it does not define are the solution's.
        limits: What the run may use.
        sandbox: "none" runs both processes with this process's rights.
        entry_point: A name that is the solution's even where Python has a built-in one.
        stub: Statements, with the names that they bind, which the tests see in place of the solution's of these names.

    Raises:
        RunError: There is no bubblewrap or it cannot work here, and `sandbox` is not "none".
    """
    check_sandbox(sandbox)
    word = secrets.token_hex(16).encode()
    order = _order(limits, sandbox) | {
        "solution": solution,
        "tests": tests,
        "stub": [(source, list(names)) for source, names in stub],
        "entry_point": entry_point,
        "word": word,
    }
    return _run(order, limits, sandbox) == (word, "")


def check_sandbox(sandbox: Sandbox = "bwrap") -> None:
    """Checks that code can be run in the sandbox.

    Raises:
        RunError: There is no bubblewrap, or it cannot make the namespaces that are needed.
    """
    if sandbox == "bwrap":
        _try_out(_bwrap())


@cache
def _try_out(_executable: str) -> None:
    """Runs a solution that is not hostile, whose messages can therefore be believed."""
    word, limits = b"works", Limits(seconds=30.0)
    order = _order(limits, "bwrap") | {"solution": "", "tests": "", "stub": [], "entry_point": "", "word": word}
    said, errors = _run(order | {"shows_errors": True}, limits, "bwrap")
    if said != word:
        raise RunError(f"bubblewrap cannot set up the sandbox of code_tests here: {errors or 'it gave no reason'}")


def _order(limits: Limits, sandbox: Sandbox) -> dict[str, Any]:
    """What both processes are to know."""
    is_root, is_apart = os.geteuid() == 0, sandbox == "bwrap"
    python = [_python() if is_apart else sys.executable, "-I", "-S"]
    return {
        "modules": _modules("test_process"),
        "solution_modules": _modules("solution_process"),
        "user": next(_USERS) if is_apart and is_root else 0,
        "cpu_seconds": max(1, round(limits.seconds)),
        "memory_bytes": limits.memory_bytes,
        "file_bytes": limits.file_bytes,
        "num_files": limits.num_files,
        # without a sandbox, what else this user runs would count
        "num_processes": limits.num_processes + (0 if is_root else _num_tasks()) if is_apart else 0,
        "paths": _packages(sys.base_prefix if is_apart else sys.prefix),
        "command": [*_bubblewrap(_bwrap(), ("--bind", "/tmp", "/tmp"), is_inner=True), *python] if is_apart else python,
        "filter": _filter() if is_apart else b"",
        "filter_descriptor": FILTER_DESCRIPTOR,
        "is_watched": is_apart,
        "shows_errors": False,
    }


def _run(order: dict[str, Any], limits: Limits, sandbox: Sandbox) -> tuple[bytes, str]:
    """What the test process wrote as its verdict, nothing at the deadline, and messages of an order that shows them.

    At the deadline all processes are killed.
    """
    with contextlib.ExitStack() as stack:
        folder = "/"
        command = [_python(), "-I", "-S"]
        if sandbox == "none":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            command[0] = sys.executable
        else:
            tmp = ("--perms", "1777", "--size", str(limits.file_bytes), "--tmpfs", "/tmp")
            command = [*_bubblewrap(_bwrap(), tmp, is_inner=False), *command]
        # files, not pipes: the limit on files then also limits what a program can write out
        out = stack.enter_context(tempfile.TemporaryFile())
        err = stack.enter_context(tempfile.TemporaryFile()) if order["shows_errors"] else None
        process = subprocess.Popen(
            [*command, "-c", BOOTSTRAP],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.DEVNULL if err is None else err,
            cwd=folder,
            env={"PATH": "/usr/bin:/bin"},
            start_new_session=True,
        )
        try:
            process.communicate(packed(order), timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            return b"", "it took too long"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        out.seek(0)
        if err is not None:
            err.seek(0)
        message = "" if err is None else err.read(MAX_OUTPUT_BYTES).decode(errors="replace").strip()
        return out.read(MAX_OUTPUT_BYTES), message


@cache
def _bubblewrap(executable: str, tmp: tuple[str, ...], is_inner: bool) -> list[str]:
    """The command that makes a sandbox, with these options for its /tmp."""
    command = [executable, *NAMESPACES, "--die-with-parent", "--new-session", "--clearenv"]
    command += ["--setenv", "PATH", "/usr/bin:/bin"]
    if os.geteuid() != 0:
        command += ["--unshare-user", "--cap-drop", "ALL"]
    for folder in SYSTEM_FOLDERS:
        if Path(folder).is_symlink():
            command += ["--symlink", str(Path(folder).readlink()), folder]
        elif Path(folder).is_dir():
            command += ["--ro-bind", folder, folder]
    others = [Path(sys.base_prefix).resolve()] + ([] if is_inner else [Path(executable)])
    for path in others:
        if not path.is_relative_to("/usr"):
            for parent in reversed(path.parents[:-1]):
                command += ["--perms", "0755", "--dir", str(parent)]
            command += ["--ro-bind", str(path), str(path)]
    command += ["--dev", "/dev", *tmp, "--bind", "/tmp", "/dev/shm"] if is_inner else ["--dev", "/dev", *tmp]
    # only the outer one has a /proc, which the inner bwrap needs
    command += ["--seccomp", str(FILTER_DESCRIPTOR)] if is_inner else ["--proc", "/proc"]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--"]


def _bwrap() -> str:
    executable = shutil.which("bwrap")
    if executable is None:
        raise RunError(
            "code_tests runs code in a sandbox of bubblewrap, which is not installed (Debian: apt install bubblewrap); "
            "sandbox='none' runs it with your own rights, which is for code that you trust"
        )
    return str(Path(executable).resolve())


@cache
def _packages(prefix: str) -> list[str]:
    """Where the packages of an installation are, in place of what `site` would find slowly in each process."""
    return site.getsitepackages([prefix])


@cache
def _filter() -> bytes:
    return filter_program(platform.machine())


@cache
def _modules(main: str) -> list[tuple[str, Any]]:
    """The compiled modules of a process, in the order in which they import each other; the last one starts it."""
    folder, package = Path(__file__).parent / "isolated", "groupax.rewards.isolated"
    names = ("start", "wire", "peer", main)
    return [
        (f"{package}.{name}", compile((folder / f"{name}.py").read_text(), f"{name}.py", "exec", dont_inherit=True))
        for name in names
    ]


@cache
def _python() -> str:
    """The interpreter outside of any virtual environment, whose folder the sandbox does not have."""
    return str(Path(sys.executable).resolve())


def _num_tasks() -> int:
    """Threads of this user, which older kernels count against its limit inside of the sandbox too."""
    user = os.geteuid()
    num_tasks = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if process.stat().st_uid == user:
                num_tasks += len(list((process / "task").iterdir()))
    return num_tasks


_USERS = itertools.cycle(range(FIRST_USER, FIRST_USER + 4096))
