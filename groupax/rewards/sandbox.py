"""Runs Python that may be hostile: apart from this machine, within limits, and never for longer than it may.

Built on bubblewrap. Inside there is no network, no environment, no file of this machine but the system's programs and
the Python installation, both read-only, and an empty /tmp of its own. All processes of a run share a process namespace
and end with it. CPU time, memory per process, file size and the number of processes are limited.

What it does not do: the solution shares an interpreter with its tests, so one that manipulates the interpreter can make
tests pass that should not; faults of the kernel are not covered; and memory is limited per process, so a run can use
`memory_bytes` times `num_processes`. Imports no jax.
"""

import contextlib
import itertools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

Sandbox = Literal["bwrap", "none"]
MAX_OUTPUT_BYTES = 1 << 16
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin")
FIRST_USER = 61_184  # users above it are handed out by nobody (systemd's container range); each run is one


@dataclass(frozen=True)
class Limits:
    """What a run may use.

    Attributes:
        seconds: of wall time, and of CPU time per process.
        memory_bytes: address space of each process.
        file_bytes: of each file, and all files together in /tmp.
        num_processes: threads and processes at a time.
    """

    seconds: float = 10.0
    memory_bytes: int = 512 << 20
    file_bytes: int = 16 << 20
    num_processes: int = 16


def passes(solution: str, tests: str, limits: Limits, sandbox: Sandbox = "bwrap") -> bool:
    """Whether the tests run to their end behind the solution.

    What the program prints or how it exits does not matter: a run that reaches the end of the tests tells a word that
    was drawn for it.

    Raises:
        RuntimeError: there is no bubblewrap, and `sandbox` is not "none".
    """
    word = secrets.token_hex(16)
    order = {
        "solution": solution,
        "tests": tests,
        "word": word,
        "user": next(_USERS) if sandbox == "bwrap" and os.geteuid() == 0 else 0,
        "cpu_seconds": max(1, round(limits.seconds)),
        "memory_bytes": limits.memory_bytes,
        "file_bytes": limits.file_bytes,
        "num_processes": limits.num_processes + (0 if os.geteuid() == 0 else _num_tasks()),
    }
    if sandbox == "none":
        order["num_processes"] = 0  # would count what else this user runs
        with tempfile.TemporaryDirectory() as folder:
            return word in _run([sys.executable, "-I", "-c", HARNESS], order, limits.seconds, folder)
    return word in _run([*_bubblewrap(limits.file_bytes), _python(), "-I", "-c", HARNESS], order, limits.seconds, "/")


# Runs inside. Limits first, then the solution, then the tests; the word leaves by a descriptor that output does not
# use.
HARNESS = """
import json, os, resource, sys

def main():
    order = json.loads(sys.stdin.buffer.read())
    out = os.dup(1)
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    if order["user"]:
        os.setgroups([])
        os.setgid(order["user"])
        os.setuid(order["user"])
    limits = {
        resource.RLIMIT_CPU: order["cpu_seconds"],
        resource.RLIMIT_AS: order["memory_bytes"],
        resource.RLIMIT_FSIZE: order["file_bytes"],
        resource.RLIMIT_CORE: 0,
    }
    if order["num_processes"]:
        limits[resource.RLIMIT_NPROC] = order["num_processes"]
    for name, value in limits.items():
        resource.setrlimit(name, (value, value))
    solution, tests, word, pid = order["solution"], order["tests"], order["word"].encode(), os.getpid()
    write, getpid = os.write, os.getpid
    del order
    namespace = {"__name__": "solution", "__builtins__": __builtins__}
    exec(compile(solution, "solution.py", "exec"), namespace)
    exec(compile(tests, "tests.py", "exec"), namespace)
    if getpid() == pid:
        write(out, word)

main()
"""


def _run(command: list[str], order: dict[str, object], seconds: float, folder: str) -> str:
    """What the program wrote, or what there was of it at the deadline, when all of its processes are killed."""
    # files, not pipes: the limit on files then also limits what a program can write out
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        environment = {"PATH": "/usr/bin:/bin"}
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps(order).encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            return ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        err.seek(0)
        message = err.read(MAX_OUTPUT_BYTES).decode(errors="replace").strip()
        if message.startswith("bwrap:"):
            raise RuntimeError(f"bubblewrap cannot set up the sandbox here: {message}")
        out.seek(0)
        return out.read(MAX_OUTPUT_BYTES).decode(errors="replace")


def _bubblewrap(tmp_bytes: int) -> list[str]:
    executable = shutil.which("bwrap")
    if executable is None:
        raise RuntimeError(
            "code_tests runs code in a sandbox of bubblewrap, which is not installed (Debian: apt install bubblewrap); "
            "sandbox='none' runs it with your own rights, which is for code that you trust"
        )
    command = [executable, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if os.geteuid() != 0:
        command += ["--unshare-user", "--cap-drop", "ALL"]
    command += ["--die-with-parent", "--new-session", "--clearenv", "--setenv", "PATH", "/usr/bin:/bin"]
    for folder in SYSTEM_FOLDERS:
        if Path(folder).is_symlink():
            command += ["--symlink", str(Path(folder).readlink()), folder]
        elif Path(folder).is_dir():
            command += ["--ro-bind", folder, folder]
    prefix = Path(sys.base_prefix).resolve()
    if not prefix.is_relative_to("/usr"):
        for parent in reversed(prefix.parents[:-1]):
            command += ["--perms", "0755", "--dir", str(parent)]
        command += ["--ro-bind", str(prefix), str(prefix)]
    command += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", str(tmp_bytes), "--tmpfs", "/tmp"]
    return [*command, "--chdir", "/tmp", "--"]


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
