"""A program on the hosts of a Ray cluster, as a child process of the actor on each host."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupax.errors import PreemptedError, RunError
from groupax.launch.argv import program_of
from groupax.launch.local import Stop, attempt
from groupax.launch.ray_functions import (
    AcceleratorConfig,
    CpuAcceleratorConfig,
    GpuAcceleratorConfig,
    TpuAcceleratorConfig,
    execute,
)
from groupax.launch.ray_hosts import connect
from groupax.launch.retries import RetryOptions

LAST_LINES_S = 1.0  # for the hosts' last lines to arrive


@dataclass(frozen=True, kw_only=True)
class Ray(RetryOptions):
    """Run a program on the hosts of a Ray cluster: groupax launch ray --tpu v4-64 -- train ..."""

    tpu: str | None = None
    """TPU slice, e.g. v4-64, v5e-32 or v6e-16; it determines the number of hosts."""
    hosts: int = 1
    """Number of nodes, without --tpu."""
    gpus: int = 0
    """GPUs per node, without --tpu."""
    cpus: int = 1
    """CPU cores per host."""
    address: str | None = None
    """Address of the cluster; by default RAY_ADDRESS, the cluster of this machine, or a new one on it."""
    env: tuple[str, ...] = ()
    """Environment variables of the processes, each NAME=VALUE, or NAME to copy this machine's value."""
    pip: tuple[str, ...] = ()
    """Packages to install for the processes."""
    working_dir: Path | None = None
    """Folder that is copied to all hosts as their working directory."""


def run_program(argv: Sequence[str], grace_s: float) -> None:
    """Runs a program and waits for its end; requests to stop are passed on.

    Raises:
        PreemptedError: It saved its state and should be started again.
        ValueError: It ended with the status of a mistake of the user.
        RunError: It failed.
    """
    with Stop() as stop:
        outcome = attempt(program_of(argv), [{}], [""], stop, grace_s)
    if outcome.ending == "preempted" or stop.signals:
        raise PreemptedError(outcome.why)
    if outcome.ending == "mistake":
        raise ValueError(outcome.why)
    if outcome.ending != "done":
        raise RunError(outcome.why)


def launch_on_ray(command: Ray, argv: Sequence[str], log: Callable[[str], None]) -> int:
    """Runs `groupax launch ray` and returns its exit status.

    Raises:
        ValueError: An option is invalid, or ray is not installed.
        RunError: A host failed and was not restarted.
    """
    config = config_of(command)
    program_of(argv)
    retries = command.retries
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # show a line that several hosts print for each of them
    connect(command.address, command.working_dir)
    import ray

    try:
        execute(config, retries=retries, grace_s=command.grace_s, log=log)(run_program)(list(argv), command.grace_s)
    finally:
        time.sleep(LAST_LINES_S)
        ray.shutdown()
    return 0


def config_of(command: Ray) -> AcceleratorConfig:
    """Returns the hosts that a command requests.

    Raises:
        ValueError: A variable is not set, or options exclude each other.
    """
    variables = {}
    for text in command.env:
        name, equals, value = text.partition("=")
        if not equals and name not in os.environ:
            raise ValueError(f"--env {name}: the variable is not set here; give {name}=VALUE")
        variables[name] = value if equals else os.environ[name]
    environment: dict[str, Any] = {"env_vars": variables} if variables else {}
    if command.pip:
        environment["pip"] = list(command.pip)
    if command.tpu is not None:
        if command.gpus or command.hosts != 1:
            raise ValueError("--tpu determines the number of hosts; leave out --hosts and --gpus")
        return TpuAcceleratorConfig(command.tpu, environment, command.cpus)
    if command.gpus:
        return GpuAcceleratorConfig(command.hosts, command.gpus, execution_env=environment, cpus_per_host=command.cpus)
    return CpuAcceleratorConfig(command.hosts, command.cpus, environment)
