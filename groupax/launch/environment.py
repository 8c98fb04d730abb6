"""The environment variables by which a process finds the others of its run."""

import socket

from groupax.settings import environment as env


def process_environment(process_index: int, num_processes: int, coordinator: str) -> dict[str, str]:
    """Returns the variables of one process.

    Args:
        process_index: Index of the process.
        num_processes: Number of processes.
        coordinator: host:port on which process 0 waits for the others.
    """
    return {
        env.COORDINATOR: coordinator,
        env.NUM_PROCESSES: str(num_processes),
        env.PROCESS_INDEX: str(process_index),
    }


def free_port(host: str = "") -> int:
    """Returns an unused port of this machine."""
    with socket.socket() as bound:
        bound.bind((host, 0))
        return bound.getsockname()[1]
