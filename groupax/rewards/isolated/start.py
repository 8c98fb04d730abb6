"""The start of a process in the sandbox: it reads its order, sets its limits and closes its standard streams."""

from __future__ import annotations

import marshal
import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

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
