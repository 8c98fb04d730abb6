"""A sandbox for Python code that may be hostile: isolated from machine and tests, with limits and a deadline.

It is built on bubblewrap. A run has two processes, which exchange data on two pipes (see `isolated.code_run`):

    bwrap: process of the tests          the harness and the tests
           └─ process of the solution    the solution, with a filter of system calls

The solution sees neither the tests nor the harness nor the channel of the verdict; it receives arguments and returns
data. Neither process has a network, an environment, /proc, or any file of this machine but the system's programs and
the Python installation, both read-only. They share an empty /tmp of `FILE_BYTES`.

The solution's memory is bounded by `memory_bytes` and the size of /tmp: it can start threads but no processes, and the
filter refuses memory that the limits of a process do not count. Kernel bugs are not covered. Imports no jax.
"""

import contextlib
import itertools
import json
import os
import platform
import re
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

from groupax.core.errors import RunError
from groupax.rewards.seccomp import filter_program

Sandbox = Literal["bwrap", "none"]
MAX_OUTPUT_BYTES = 1 << 16
FILE_BYTES = 16 << 20  # size of each file, and of all files in /tmp together
NUM_FILES = 64  # open files of a process
NUM_PROCESSES = 16  # concurrent threads
COUNTS_BY_NAMESPACE = (5, 14)  # the Linux from which on other threads of an ordinary user do not count
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin")
FIRST_USER = 61_184  # nobody assigns user ids above it (systemd's container range); each run has its own
NAMESPACES = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")


@dataclass(frozen=True)
class Limits:
    """The resources that a run may use.

    Attributes:
        seconds: Wall time, and CPU time per process.
        memory_bytes: Address space of the solution's process, and of the tests'.
    """

    seconds: float = 10.0
    memory_bytes: int = 512 << 20


def passes(
    solution: str,
    tests: str,
    limits: Limits,
    sandbox: Sandbox = "bwrap",
    entry_point: str = "",
    stub: Sequence[str] = (),
) -> bool:
    """Returns whether the tests run to their end with the names that the solution defines.

    The output and exit codes of the processes do not matter: a test process that reaches the end of the tests writes a
    random token that was drawn for it.

    Args:
        solution: Untrusted Python source.
        tests: Python source; names that it does not define are the solution's.
        limits: Resources that the run may use.
        sandbox: "none" runs both processes with this process's permissions.
        entry_point: A name that is the solution's even where Python has a built-in one.
        stub: Statements that run before the tests, if they can, so that these see its names, not the solution's.

    Raises:
        RunError: bubblewrap is not installed or cannot work here, and `sandbox` is not "none".
    """
    check_sandbox(sandbox)
    return _run(solution, {"tests": tests, "entry_point": entry_point, "stub": stub}, limits, sandbox)[0]


def check_sandbox(sandbox: Sandbox = "bwrap") -> None:
    """Checks that the sandbox works on this machine.

    Raises:
        RunError: bubblewrap is not installed, or it cannot create the namespaces.
    """
    if sandbox == "bwrap":
        _check_bubblewrap(_bwrap())


@cache
def _check_bubblewrap(_executable: str) -> None:
    """Runs an empty solution, whose error messages can be trusted."""
    works, errors = _run("", {"tests": "", "entry_point": "", "stub": []}, Limits(seconds=30.0), "bwrap")
    if not works:
        raise RunError(f"bubblewrap cannot set up the sandbox of code_tests here: {errors or 'it printed no message'}")


def _run(solution: str, tests: dict[str, Any], limits: Limits, sandbox: Sandbox) -> tuple[bool, str]:
    """Returns whether a solution passes, and the error messages. At the deadline all processes are killed."""
    token = secrets.token_hex(16)
    # files, not pipes, so that the limit on file sizes also limits the output
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        cwd = folder if sandbox == "none" else "/"
        process, order = start_isolated("code_run", limits, sandbox, stdout=out, stderr=err, cwd=cwd)
        try:
            # the solution's process is forked between the two
            process.communicate(frame(order | {"solution": solution}) + frame(tests | {"token": token}), limits.seconds)
        except subprocess.TimeoutExpired:
            return False, "it timed out"
        finally:
            end_isolated(process)
        out.seek(0)
        err.seek(0)
        errors = err.read(MAX_OUTPUT_BYTES).decode(errors="replace").strip()
        return out.read(MAX_OUTPUT_BYTES) == token.encode(), errors


def frame(content: Any) -> bytes:
    """Returns what `isolated.process.receive_frame` reads."""
    data = json.dumps(content).encode()
    return len(data).to_bytes(8, "little") + data


def start_isolated(
    program: str,
    limits: Limits,
    sandbox: Sandbox,
    *,
    stdout: Any = subprocess.PIPE,
    stderr: Any = subprocess.DEVNULL,
    cwd: str = "/",
    hash_seed: str = "random",
) -> tuple["subprocess.Popen[bytes]", dict[str, Any]]:
    """Starts a process in the sandbox.

    Args:
        program: The module of `isolated` whose `main` it calls.
        limits: Its limits.
        sandbox: "none" runs it with this process's permissions.
        stdout: Its standard output.
        stderr: Its error messages.
        cwd: Its folder.
        hash_seed: Seed of its hashes.

    Returns:
        The process, and its limits, which its first frame must hold.
    """
    is_root, is_isolated = os.geteuid() == 0, sandbox == "bwrap"
    kernel = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    python = str(Path(sys.executable).resolve()) if is_isolated else sys.executable  # the sandbox has no venv
    command = [*(_bubblewrap(_bwrap()) if is_isolated else []), python, "-P", "-s", "-S"]
    process = subprocess.Popen(
        [*command, "-c", _program("process", "data", program)],
        stdin=subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": hash_seed},
        start_new_session=True,
        cwd=cwd,
        stdout=stdout,
        stderr=stderr,
    )
    return process, {
        "user": next(_USERS) if is_isolated and is_root else 0,
        "cpu_seconds": max(1, round(limits.seconds)),
        "memory_bytes": limits.memory_bytes,
        "file_bytes": FILE_BYTES,
        "num_files": NUM_FILES,
        "num_processes": NUM_PROCESSES if is_isolated and (is_root or kernel >= COUNTS_BY_NAMESPACE) else 0,
        "paths": site.getsitepackages([sys.base_prefix if is_isolated else sys.prefix]),
        "filter": filter_program(platform.machine()).hex() if is_isolated else "",
    }


def end_isolated(process: "subprocess.Popen[bytes]") -> None:
    """Kills a process of `start_isolated` and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


@cache
def _bubblewrap(executable: str) -> list[str]:
    """Returns the command that creates a sandbox."""
    command = [executable, *NAMESPACES, "--die-with-parent", "--new-session"]
    if os.geteuid() != 0:
        command += ["--unshare-user", "--cap-drop", "ALL"]
    for folder in SYSTEM_FOLDERS:
        if Path(folder).is_symlink():
            command += ["--symlink", str(Path(folder).readlink()), folder]
        elif Path(folder).is_dir():
            command += ["--ro-bind", folder, folder]
    python = Path(sys.base_prefix).resolve()
    if not python.is_relative_to("/usr"):
        for parent in reversed(python.parents[:-1]):
            command += ["--perms", "0755", "--dir", str(parent)]
        command += ["--ro-bind", str(python), str(python)]
    command += ["--dev", "/dev", "--perms", "1777", "--size", str(FILE_BYTES), "--tmpfs", "/tmp"]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--"]


def _bwrap() -> str:
    executable = shutil.which("bwrap")
    if executable is None:
        raise RunError(
            "code_tests runs code in a sandbox of bubblewrap, which is not installed (Debian: apt install bubblewrap); "
            "sandbox='none' runs it with your own permissions, for code that you trust"
        )
    return str(Path(executable).resolve())


@cache
def _program(*names: str) -> str:
    """Returns Python source that makes modules of `isolated` and calls `main` of the last one."""
    folder = Path(__file__).parent / "isolated"
    sources = [(f"groupax.rewards.isolated.{name}", (folder / f"{name}.py").read_text()) for name in names]
    return (
        f"import sys\nfor name, source in {sources!r}:\n"
        "    sys.modules[name] = module = type(sys)(name)\n"
        "    exec(source, module.__dict__)\n"
        "module.main()\n"
    )


_USERS = itertools.cycle(range(FIRST_USER, FIRST_USER + 4096))
