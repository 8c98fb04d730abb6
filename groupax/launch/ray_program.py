"""A program on the hosts of a Ray cluster: on each of them a process under the actor that is there."""

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
)
from groupax.launch.ray_functions import execute as on_hosts
from groupax.launch.ray_hosts import connect
from groupax.launch.retries import Retries

LAST_LINES_S = 1.0  # until what the hosts printed last is here


@dataclass(frozen=True, kw_only=True)
class Ray:
    """Start a program on the hosts of a Ray cluster: groupax launch ray --tpu v4-64 -- train ..."""

    tpu: str | None = None
    """Type of a TPU slice, as v4-64, v5e-32, v6e-16; it says how many hosts there are."""
    hosts: int = 1
    """Without --tpu: how many nodes."""
    gpus: int = 0
    """Without --tpu: GPUs of each node."""
    cpus: int = 1
    """Cores that are asked for on each host."""
    address: str | None = None
    """Of the cluster; by default RAY_ADDRESS, the one this machine belongs to, or a new one here."""
    env: tuple[str, ...] = ()
    """Variables of the processes, each NAME=VALUE, or NAME for the value here."""
    pip: tuple[str, ...] = ()
    """Packages to install for them."""
    working_dir: Path | None = None
    """A folder that is copied to all hosts and is where they run."""
    restarts: int = 3
    """Most times that all are started again after one failed."""
    preemptions: int = 1000
    """The same after one was preempted or its machine was lost."""
    backoff_s: float = 1.0
    """Before the first such start; doubled each further time, up to a minute."""
    grace_s: float = 60.0
    """When a host has failed the others are asked to stop, and killed after so long."""


def run_program(words: Sequence[str], grace_s: float) -> None:
    """Run a program and wait for its end; a request to stop is passed on.

    Raises:
        PreemptedError: it saved its state, to be started again.
        ValueError: it ended with the status of a user's mistake.
        RunError: it failed.
    """
    with Stop() as stop:
        outcome = attempt(program_of(words), [{}], [""], stop, grace_s)
    if outcome.ending == "preempted" or stop.signals:
        raise PreemptedError(outcome.why)
    if outcome.ending == "mistake":
        raise ValueError(outcome.why)
    if outcome.ending != "done":
        raise RunError(outcome.why)


def launch_on_ray(command: Ray, words: Sequence[str], tell: Callable[[str], None]) -> int:
    """`groupax launch ray`; the exit status.

    Raises:
        ValueError: an option cannot be, or ray is not installed.
        RunError: a host failed, and was not started again.
    """
    config = config_of(command)
    program_of(words)
    retries = Retries(command.restarts, command.preemptions, command.backoff_s)
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # what several hosts say alike is shown of each
    connect(command.address, command.working_dir)
    import ray

    try:
        on_hosts(config, retries=retries, grace_s=command.grace_s, tell=tell)(run_program)(list(words), command.grace_s)
    finally:
        time.sleep(LAST_LINES_S)
        ray.shutdown()
    return 0


def config_of(command: Ray) -> AcceleratorConfig:
    """The hosts that a command asks for.

    Raises:
        ValueError: a variable is not set, or the options exclude each other.
    """
    variables = {}
    for text in command.env:
        name, equals, value = text.partition("=")
        if not equals and name not in os.environ:
            raise ValueError(f"--env {name}: it is not set here; give {name}=VALUE")
        variables[name] = value if equals else os.environ[name]
    environment: dict[str, Any] = {"env_vars": variables} if variables else {}
    if command.pip:
        environment["pip"] = list(command.pip)
    if command.tpu is not None:
        if command.gpus or command.hosts != 1:
            raise ValueError("--tpu says how many hosts there are; leave out --hosts and --gpus")
        return TpuAcceleratorConfig(command.tpu, environment, command.cpus)
    if command.gpus:
        return GpuAcceleratorConfig(command.hosts, command.gpus, execution_env=environment, cpus_per_host=command.cpus)
    return CpuAcceleratorConfig(command.hosts, command.cpus, environment)
