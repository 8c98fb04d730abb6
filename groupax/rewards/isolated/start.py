"""The start of a process in the sandbox: it reads its order, sets its limits and closes its standard streams.

As a process of its own, this module is the trusted guard of an interpreter's sandbox: it starts the interpreter and
ends with it. The interpreter has the standard streams of the guard, and with them the connection to the trainer.
"""

from __future__ import annotations

import json
import marshal
import os
import resource
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_FILES = 10_000  # in /tmp: empty files take memory that its size limit does not count
PAUSE_S = 0.05
MAX_FRAME_BYTES = 32 << 20

# The program for `python -c`: it reads an order, creates the order's modules and calls `main` of the last one.
BOOTSTRAP = """
import marshal, os, sys
def read(size):
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part: raise SystemExit(1)
        data += part
    return data
order = marshal.loads(read(int.from_bytes(read(8), "little")))
for name, code in order["modules"]:
    module = type(sys)(name)
    sys.modules[name] = module
    exec(code, module.__dict__)
sys.modules[name].main(order)
"""


def serialize_order(order: dict[str, Any]) -> bytes:
    """Returns an order in the form that `BOOTSTRAP` reads."""
    data = marshal.dumps(order)
    return len(data).to_bytes(8, "little") + data


def send(writer: int, data: bytes) -> None:
    """Writes all of some bytes."""
    view = memoryview(data)
    while view:
        view = view[os.write(writer, view) :]


def send_frame(writer: int, frame: Any) -> None:
    """Writes the length of a frame, and its JSON."""
    data = json.dumps(frame).encode()
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(data)} bytes is too large; at most {MAX_FRAME_BYTES} can be sent")
    send(writer, len(data).to_bytes(8, "little") + data)


def receive_frame(reader: int) -> Any:
    """Returns the next frame; raises EOFError if there is none, and ValueError if it is too large or no JSON."""

    def read(size: int) -> bytes:
        parts = []
        while size:
            part = os.read(reader, min(size, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    size = int.from_bytes(read(8), "little")
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {size} bytes")
    return json.loads(read(size))


def take_over_streams() -> tuple[int, int]:
    """Returns duplicates of standard input and output, and redirects these and standard error to /dev/null."""
    reader, writer = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    return reader, writer


def apply_limits(order: dict[str, Any]) -> None:
    """Drops the privileges of root, if the order names a user, and sets the limits."""
    if order["user"]:
        os.setgroups([])
        os.setgid(order["user"])
        os.setuid(order["user"])
    limits = {
        resource.RLIMIT_CPU: order["cpu_seconds"],
        resource.RLIMIT_AS: order["memory_bytes"],
        resource.RLIMIT_FSIZE: order["file_bytes"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: order["num_files"],
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 64,
    }
    if order["num_processes"]:
        limits[resource.RLIMIT_NPROC] = order["num_processes"]
    for name, value in limits.items():
        highest = resource.getrlimit(name)[1]
        value = value if highest == resource.RLIM_INFINITY else min(value, highest)
        resource.setrlimit(name, (value, value))
    sys.path += [path for path in order["paths"] if os.path.isdir(path)]  # noqa: PTH112 - pathlib is slow to import


def spawn_untrusted(order: dict[str, Any], reader: int, writer: int, errors: int) -> None:
    """Starts the process of the order's command, which installs the order's filter of system calls."""
    actions: list[Any] = [(os.POSIX_SPAWN_DUP2, each, place) for place, each in enumerate((reader, writer, errors))]
    if order["filter"]:
        program, filled = os.pipe()
        os.write(filled, order["filter"])
        os.close(filled)
        actions.append((os.POSIX_SPAWN_DUP2, program, order["filter_descriptor"]))
    command, environment = [*order["command"], "-c", BOOTSTRAP], {"PATH": "/usr/bin:/bin", **order["environment"]}
    os.posix_spawn(command[0], command, environment, file_actions=actions)
    if order["filter"]:
        os.close(program)


def inner_order(order: dict[str, Any], *more: str) -> bytes:
    """Returns the order of the untrusted process, with the limits and these further fields of this process's order."""
    limits = ("user", "cpu_seconds", "memory_bytes", "file_bytes", "num_files", "num_processes", "paths")
    return serialize_order({name: order[name] for name in (*limits, *more)} | {"modules": order["inner_modules"]})


def has_too_many_files() -> bool:
    """Returns whether /tmp has more than `MAX_FILES` files."""
    disk = os.statvfs("/tmp")
    return disk.f_files - disk.f_ffree > MAX_FILES


def main(order: dict[str, Any]) -> None:
    """Starts an interpreter and waits for its end; one with too many files is ended too."""
    spawn_untrusted(order, 0, 1, os.open(os.devnull, os.O_RDWR))
    for descriptor in take_over_streams():
        os.close(descriptor)  # or the trainer would not notice that the interpreter has ended
    apply_limits(order)
    while not os.waitpid(-1, os.WNOHANG)[0] and not (order["is_watched"] and has_too_many_files()):
        time.sleep(PAUSE_S)
    os._exit(0)
