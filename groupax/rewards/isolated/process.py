"""The start of a process in the sandbox: frames on its pipes, its limits, and its filter of system calls.

A frame is a length of 8 bytes, followed by JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing `typing` would slow down the start of each process
    from typing import Any

MAX_FRAME_BYTES = 32 << 20
SET_NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER_MODE = 38, 22, 2  # constants of prctl


def send_frame(writer: int, frame: Any) -> None:
    """Writes the length of a frame, and its JSON."""
    data = json.dumps(frame).encode()
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(data)} bytes is too large; at most {MAX_FRAME_BYTES} can be sent")
    view = memoryview(len(data).to_bytes(8, "little") + data)
    while view:
        view = view[os.write(writer, view) :]


def receive_frame(reader: int) -> Any:
    """Returns the next frame, and reads nothing after it.

    Raises:
        EOFError: There is none.
        ValueError: It is too large, or no JSON.
    """

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


def silence(*descriptors: int) -> None:
    """Redirects these standard streams to /dev/null."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nothing, descriptor)
    os.close(nothing)


def apply_limits(limits: dict[str, Any]) -> None:
    """Drops the privileges of root, if the limits name a user, and sets the limits of this process."""
    if limits["user"]:
        os.setgroups([])
        os.setgid(limits["user"])
        os.setuid(limits["user"])
    values = {
        resource.RLIMIT_CPU: limits["cpu_seconds"],
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: limits["num_files"],
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 64,
    }
    if limits["num_processes"]:
        values[resource.RLIMIT_NPROC] = limits["num_processes"]
    for name, value in values.items():
        highest = resource.getrlimit(name)[1]
        value = value if highest == resource.RLIM_INFINITY else min(value, highest)
        resource.setrlimit(name, (value, value))
    sys.path += [path for path in limits["paths"] if os.path.isdir(path)]  # noqa: PTH112 - pathlib is slow to import


class Filter(ctypes.Structure):
    """The kernel's `struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_ushort), ("program", ctypes.c_char_p)]


def install_filter(limits: dict[str, Any]) -> None:
    """Installs the filter of system calls, if there is one, in this process, which cannot remove it.

    Raises:
        OSError: The kernel refuses it.
    """
    program = bytes.fromhex(limits["filter"])
    if not program:
        return
    prctl, zero = ctypes.CDLL(None, use_errno=True).prctl, ctypes.c_ulong(0)
    prctl(SET_NO_NEW_PRIVILEGES, ctypes.c_ulong(1), zero, zero, zero)
    installed = Filter(len(program) // 8, program)
    if prctl(SET_SECCOMP, ctypes.c_ulong(FILTER_MODE), ctypes.byref(installed), zero, zero):
        raise OSError(ctypes.get_errno(), "the filter of system calls cannot be installed")
