"""The filter of system calls for untrusted Python: a classic BPF program for Linux on x86-64 and aarch64.

It refuses calls that a solution of a programming task does not need and that would exceed its limits: memory that no
limit of the process counts, new processes and namespaces, large and recent interfaces of the kernel, and access to
other processes. Everything else is allowed. Imports no jax.

Source: the kernel's documentation of seccomp filters, `Documentation/userspace-api/seccomp_filter.rst`; the numbers are
those of `asm/unistd_64.h` (x86-64) and `asm-generic/unistd.h` (aarch64).
"""

import errno
import struct
from functools import cache

from groupax.core.errors import RunError

# Name of a machine -> the column of `REFUSED`, the AUDIT_ARCH_* constant.
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def _numbers(table: str) -> dict[str, tuple[int | None, int | None]]:
    rows = (row.split() for row in table.split(",") if row.strip())
    return {name: (_number(x86_64), _number(aarch64)) for name, x86_64, aarch64 in rows}


def _number(text: str) -> int | None:
    return None if text == "-" else int(text)


# System calls with their numbers on x86-64 and aarch64; - where one does not exist.
REFUSED = _numbers(
    # memory that RLIMIT_AS does not count
    "memfd_create 319 279, memfd_secret 447 447, shmget 29 194, shmat 30 196, shmctl 31 195, semget 64 190, "
    "msgget 68 186, mq_open 240 180, add_key 248 217, request_key 249 218, keyctl 250 219, inotify_init 253 -, "
    "inotify_init1 294 26, fanotify_init 300 262, "
    # new processes; threads are created by `clone`, whose flags are checked below
    "fork 57 -, vfork 58 -, "
    # namespaces; without them, and without privileges, there are no mounts and no administration
    "unshare 272 97, setns 308 268, "
    # other processes
    "ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440, kcmp 312 272, "
    "pidfd_send_signal 424 424, pidfd_open 434 434, pidfd_getfd 438 438, migrate_pages 256 238, "
    "move_pages 279 239, "
    # large interfaces of the kernel
    "io_setup 206 0, io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, bpf 321 280, "
    "perf_event_open 298 241, userfaultfd 323 282, personality 135 92, modify_ldt 154 -, remap_file_pages 216 234"
)
CLONE, CLONE3, SOCKET = (56, 220), (435, 435), (41, 198)
CLONE_THREAD, AF_UNIX, X32_BIT = 0x10000, 1, 0x40000000

# Offsets into struct seccomp_data; both machines are little-endian.
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
LOAD, EQUALS, AT_LEAST, HAS_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000


@cache
def filter_program(machine: str) -> bytes:
    """Returns the program for a machine as `platform.machine()` names it, an array of `struct sock_filter`.

    Raises:
        RunError: There is no program for this machine.
    """
    if machine not in MACHINES:
        raise RunError(
            f"code_tests has a filter of system calls for {' and '.join(MACHINES)}, not for {machine!r}; "
            "sandbox='none' runs code with your own permissions, for code that you trust"
        )
    column, architecture = MACHINES[machine]
    refuse = (RETURN, 0, 0, REFUSE | errno.EPERM)
    # Each instruction: code, steps to skip if true, steps to skip if false, constant.
    program = [(LOAD, 0, 0, ARCHITECTURE), (EQUALS, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    if machine == "x86_64":
        program += [(AT_LEAST, 0, 1, X32_BIT), refuse]
    for numbers in REFUSED.values():
        number = numbers[column]
        if number is not None:
            program += [(EQUALS, 0, 1, number), refuse]
    # glibc falls back to `clone`, whose flags are an argument that a filter can read
    program += [(EQUALS, 0, 1, CLONE3[column]), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]
    program += [(EQUALS, 0, 3, CLONE[column]), (LOAD, 0, 0, FIRST_ARGUMENT), (HAS_BITS, 1, 0, CLONE_THREAD), refuse]
    program += [(LOAD, 0, 0, NUMBER)]
    program += [(EQUALS, 0, 3, SOCKET[column]), (LOAD, 0, 0, FIRST_ARGUMENT), (EQUALS, 1, 0, AF_UNIX)]
    program += [(RETURN, 0, 0, REFUSE | errno.EAFNOSUPPORT), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
