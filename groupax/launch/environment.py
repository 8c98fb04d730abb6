"""What a process is told of its place among the others: three environment variables."""

import socket

from groupax.settings import environment as env


def environment_of(process: int, num_processes: int, coordinator: str) -> dict[str, str]:
    """What one process gets.

    Args:
        process: which one, from 0.
        num_processes: how many there are.
        coordinator: host:port at which process 0 waits for the others.
    """
    return {
        env.COORDINATOR: coordinator,
        env.NUM_PROCESSES: str(num_processes),
        env.PROCESS_INDEX: str(process),
    }


def free_port(host: str = "") -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as taken:
        taken.bind((host, 0))
        return taken.getsockname()[1]
