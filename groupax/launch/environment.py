"""What a process is told of its place among the others: three environment variables."""

import socket

from groupax.parallel.processes import COORDINATOR, NUM_PROCESSES, PROCESS_ID


def environment_of(process: int, num_processes: int, coordinator: str) -> dict[str, str]:
    """What one process gets.

    Args:
        process: which one, from 0.
        num_processes: how many there are.
        coordinator: host:port at which process 0 waits for the others.
    """
    return {COORDINATOR: coordinator, NUM_PROCESSES: str(num_processes), PROCESS_ID: str(process)}


def free_port(host: str = "") -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as taken:
        taken.bind((host, 0))
        return taken.getsockname()[1]
