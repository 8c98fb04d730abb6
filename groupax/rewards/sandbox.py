"""A sandbox for Python code that may be hostile: isolated from machine and tests, with limits and a deadline.

It is built on bubblewrap. A run has two processes, each in its own namespaces:

    bwrap: test process          the harness and the tests
      bwrap: solution process    the solution, with a filter of system calls

The solution sees neither the tests nor the harness nor the channel of the verdict; it receives arguments and returns
data on two pipes (see `rewards.isolated`). Neither process has a network, an environment, or any file of this machine
but the system's programs and the Python installation, both read-only. They share an empty /tmp of `file_bytes`.

The solution's memory is bounded by `memory_bytes` and the size of /tmp: it can start threads but no processes, and the
filter refuses memory that the limits of a process do not count. Kernel bugs are not covered. Imports no jax.
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

from groupax.core.errors import RunError
from groupax.rewards.isolated.start import BOOTSTRAP, serialize_order
from groupax.rewards.seccomp import filter_program

Sandbox = Literal["bwrap", "none"]
MAX_OUTPUT_BYTES = 1 << 16
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin")
FIRST_USER = 61_184  # nobody assigns user ids above it (systemd's container range); each run has its own
FILTER_DESCRIPTOR = 3
NAMESPACES = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")


@dataclass(frozen=True)
class Limits:
    """The resources that a run may use.

    Attributes:
        seconds: Wall time, and CPU time per process.
        memory_bytes: Address space of the solution's process, and of the tests'.
        file_bytes: Size of each file, and of all files in /tmp together.
        num_processes: Number of concurrent threads.
        num_files: Number of open files of a process.
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
    """Returns whether the tests run to their end with the names that the solution defines.

    The output and exit codes of the processes do not matter: a test process that reaches the end of the tests writes a
    random token that was drawn for it.

    Args:
        solution: Untrusted Python source.
        tests: Python source; names that it does not define are the solution's.
        limits: Resources that the run may use.
        sandbox: "none" runs both processes with this process's permissions.
        entry_point: A name that is the solution's even where Python has a built-in one.
        stub: Statements with the names that they bind, which the tests see instead of the solution's.

    Raises:
        RunError: bubblewrap is not installed or cannot work here, and `sandbox` is not "none".
    """
    check_sandbox(sandbox)
    token = secrets.token_hex(16).encode()
    order = {
        "solution": solution,
        "tests": tests,
        "stub": [(source, list(names)) for source, names in stub],
        "entry_point": entry_point,
        "token": token,
        "shows_errors": False,
    }
    return _verdict(order, limits, sandbox) == (token, "")


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
    order = {"solution": "", "tests": "", "stub": [], "entry_point": "", "token": b"works", "shows_errors": True}
    written, errors = _verdict(order, Limits(seconds=30.0), "bwrap")
    if written != b"works":
        raise RunError(f"bubblewrap cannot set up the sandbox of code_tests here: {errors or 'it printed no message'}")


def _verdict(order: dict[str, Any], limits: Limits, sandbox: Sandbox) -> tuple[bytes, str]:
    """Runs tests and returns the output of their process, and error messages if the order shows them.

    At the deadline all processes are killed, and the output is empty.
    """
    shows_errors = order["shows_errors"]
    # files, not pipes, so that the limit on file sizes also limits the output
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process, orders = start_isolated(
            ("protocol", "test_process"),
            ("protocol", "solution_process"),
            order,
            limits,
            sandbox,
            stdout=out,
            stderr=err if shows_errors else subprocess.DEVNULL,
            cwd=folder if sandbox == "none" else "/",
        )
        try:
            process.communicate(orders, timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            return b"", "it timed out"
        finally:
            end_isolated(process)
        out.seek(0)
        err.seek(0)
        return out.read(MAX_OUTPUT_BYTES), err.read(MAX_OUTPUT_BYTES).decode(errors="replace").strip()


def start_isolated(
    outer: Sequence[str],
    inner: Sequence[str],
    order: dict[str, Any],
    limits: Limits,
    sandbox: Sandbox,
    cwd: str = "/",
    stdout: Any = subprocess.PIPE,
    stderr: Any = subprocess.DEVNULL,
) -> "tuple[subprocess.Popen[bytes], bytes]":
    """Starts a trusted process in a sandbox, which starts an untrusted one in a sandbox of its own.

    Args:
        outer: Modules of the trusted process, after `isolated.start`; the last one has its `main`.
        inner: Those of the untrusted one.
        order: Further contents of the trusted process's order, which is completed.
        limits: Limits of both processes.
        sandbox: "none" runs both with this process's permissions.
        cwd, stdout, stderr: Folder and streams of the trusted process.

    Returns:
        The process, and what it must be sent first.
    """
    is_root, is_isolated = os.geteuid() == 0, sandbox == "bwrap"
    python = str(Path(sys.executable).resolve()) if is_isolated else sys.executable  # the sandbox has no venv
    command, trusted = [python, "-P", "-s", "-S"], [python, "-I", "-S"]  # -I would ignore the seed of hashes
    if is_isolated:
        tmp = ("--perms", "1777", "--size", str(limits.file_bytes), "--tmpfs", "/tmp")
        trusted = [*_bubblewrap(_bwrap(), tmp, is_inner=False), *trusted]
        command = [*_bubblewrap(_bwrap(), ("--bind", "/tmp", "/tmp"), is_inner=True), *command]
    order |= {
        "environment": order.get("environment", {}),
        "user": next(_USERS) if is_isolated and is_root else 0,
        "cpu_seconds": max(1, round(limits.seconds)),
        "memory_bytes": limits.memory_bytes,
        "file_bytes": limits.file_bytes,
        "num_files": limits.num_files,
        # without a sandbox, other threads of this user would count
        "num_processes": limits.num_processes + (0 if is_root else _num_tasks()) if is_isolated else 0,
        "paths": site.getsitepackages([sys.base_prefix if is_isolated else sys.prefix]),
        "modules": _compiled_modules("start", *outer),
        "inner_modules": _compiled_modules("start", *inner),
        "command": command,
        "filter": filter_program(platform.machine()) if is_isolated else b"",
        "filter_descriptor": FILTER_DESCRIPTOR,
        "is_watched": is_isolated,
    }
    process = subprocess.Popen(
        [*trusted, "-c", BOOTSTRAP],
        stdin=subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin"},
        start_new_session=True,
        cwd=cwd,
        stdout=stdout,
        stderr=stderr,
    )
    return process, serialize_order(order)


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
def _bubblewrap(executable: str, tmp: tuple[str, ...], is_inner: bool) -> list[str]:
    """Returns the command that creates a sandbox, with these options for its /tmp."""
    command = [executable, *NAMESPACES, "--die-with-parent", "--new-session"]
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
    # only the outer sandbox has a /proc, which the inner bwrap needs
    command += ["--seccomp", str(FILTER_DESCRIPTOR)] if is_inner else ["--proc", "/proc"]
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
def _compiled_modules(*names: str) -> list[tuple[str, Any]]:
    """Returns compiled modules of `isolated` in the order of their imports; the last one has the process's `main`."""
    folder, package = Path(__file__).parent / "isolated", "groupax.rewards.isolated"
    return [
        (f"{package}.{name}", compile((folder / f"{name}.py").read_text(), f"{name}.py", "exec", dont_inherit=True))
        for name in names
    ]


def _num_tasks() -> int:
    """Returns the number of threads of this user, which older kernels count against the sandbox's limit too."""
    user = os.geteuid()
    num_tasks = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has exited in the meantime
            if process.stat().st_uid == user:
                num_tasks += len(list((process / "task").iterdir()))
    return num_tasks


_USERS = itertools.cycle(range(FIRST_USER, FIRST_USER + 4096))
