"""A function on every host of a TPU slice, or on GPU or CPU nodes, of a Ray cluster. Imports ray where it is used.

    @execute(TpuAcceleratorConfig("v4-64", execution_env={"pip": ["math-verify"]}))
    def main(): ...

    main()  # on 8 hosts at once: it returns what each returned

Each host runs an actor with the host's resources. It gets the variables by which groupax finds the other processes.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from groupax.errors import RunError
from groupax.launch.ray_hosts import Reserved, attempt_on_hosts, connect
from groupax.launch.retries import Outcome, Retries, attempted
from groupax.parallel.accelerators import Slice, tpu_slice

RAY_KINDS = {"v5e": "v5litepod"}  # of TPUs, where Ray has another name
PATIENCE_S = 10.0  # then it is told what is waited for


@dataclass(frozen=True)
class TpuAcceleratorConfig:
    """All hosts of one TPU slice.

    Args:
        accelerator: type of the slice, as v4-64, v5e-32, v5p-128, v6e-16. It says how many hosts and chips there are.
        execution_env: Ray's runtime environment of the hosts: `env_vars`, `pip` and so on. A folder of this machine as
            `working_dir` is given to `ray.init` or `ray job submit`, which bring it to the cluster.
        cpus_per_host: cores that are asked for beside the chips.
        wait_s: longest time until the slice is free.
    """

    accelerator: str
    execution_env: Mapping[str, Any] = field(default_factory=dict)
    cpus_per_host: int = 1
    wait_s: float = 3600.0

    def __post_init__(self) -> None:
        tpu_slice(self.accelerator)
        _check_environment(self.execution_env)

    @property
    def slice(self) -> Slice:
        """The chips."""
        return tpu_slice(self.accelerator)

    @property
    def num_hosts(self) -> int:
        """Machines of the slice."""
        return self.slice.num_hosts

    @contextlib.contextmanager
    def reserved(self) -> Iterator[Reserved]:
        """The slice, until the end of the context. Ray finds one by its head and keeps its hosts together.

        Raises:
            TimeoutError: none was free in time.
        """
        from ray.util.tpu import slice_placement_group

        resources = {"CPU": float(self.cpus_per_host), "TPU": float(self.slice.chips_per_host)}
        group = slice_placement_group(
            "x".join(map(str, self.slice.sides)),
            RAY_KINDS.get(self.slice.kind, self.slice.kind),
            resources_per_bundle=resources,
            chips_per_vm=self.slice.chips_per_host,
            strategy="STRICT_SPREAD",
            head_reservation_timeout_s=self.wait_s,
        )
        try:
            yield Reserved(_ready(group.placement_group, self.wait_s, f"the hosts of {self.accelerator}"), resources)
        finally:
            group.shutdown()


@dataclass(frozen=True)
class GpuAcceleratorConfig:
    """Several nodes with GPUs; one process drives all that it asks for on a node.

    Args:
        num_hosts: nodes.
        gpus_per_host: GPUs of each.
        gpu_model: Ray's name of their kind, as H100 or A100; None takes any.
        execution_env, cpus_per_host, wait_s: as for TPUs.
    """

    num_hosts: int = 1
    gpus_per_host: int = 1
    gpu_model: str | None = None
    execution_env: Mapping[str, Any] = field(default_factory=dict)
    cpus_per_host: int = 1
    wait_s: float = 3600.0

    def __post_init__(self) -> None:
        _check_counts(num_hosts=self.num_hosts, gpus_per_host=self.gpus_per_host)
        _check_environment(self.execution_env)

    @contextlib.contextmanager
    def reserved(self) -> Iterator[Reserved]:
        """The nodes, until the end of the context.

        Raises:
            TimeoutError: they were not free in time.
        """
        resources = {"CPU": float(self.cpus_per_host), "GPU": float(self.gpus_per_host)}
        if self.gpu_model is not None:
            resources[f"accelerator_type:{self.gpu_model}"] = 0.001
        with _nodes(resources, self.num_hosts, self.wait_s) as reserved:
            yield reserved


@dataclass(frozen=True)
class CpuAcceleratorConfig:
    """Several nodes without accelerators.

    Args:
        num_hosts: nodes.
        cpus_per_host: cores of each.
        execution_env, wait_s: as for TPUs.
    """

    num_hosts: int = 1
    cpus_per_host: int = 1
    execution_env: Mapping[str, Any] = field(default_factory=dict)
    wait_s: float = 3600.0

    def __post_init__(self) -> None:
        _check_counts(num_hosts=self.num_hosts, cpus_per_host=self.cpus_per_host)
        _check_environment(self.execution_env)

    @contextlib.contextmanager
    def reserved(self) -> Iterator[Reserved]:
        """The nodes, until the end of the context.

        Raises:
            TimeoutError: they were not free in time.
        """
        with _nodes({"CPU": float(self.cpus_per_host)}, self.num_hosts, self.wait_s) as reserved:
            yield reserved


AcceleratorConfig = TpuAcceleratorConfig | GpuAcceleratorConfig | CpuAcceleratorConfig


def execute(
    config: AcceleratorConfig,
    *,
    retries: Retries = Retries(),  # noqa: B008 - frozen
    grace_s: float = 60.0,
    tell: Callable[[str], None] | None = None,
) -> Callable[[Any], Callable[..., list[Any]]]:
    """A decorator that makes a function run on all hosts at once; one with `@ray.remote` too. The driver calls it.

    The first host that fails stops all, and all are started again as far as `retries` allow: a run of groupax then goes
    on from its last checkpoint. A call returns what the hosts returned, in their order.

    Args:
        config: the hosts.
        retries: how often all are started again after a failure, and after a preemption or the loss of a node.
        grace_s: when a host has failed the others are asked to stop (SIGTERM), and killed after so long.
        tell: gets a line for each restart; by default it is printed.

    Raises:
        TypeError: what is decorated is no function, or a remote one with options of its own.
        RunError: (of a call) a host failed and was not started again; the message has its traceback.
        TimeoutError: (of a call) there were no such hosts in time.
        ValueError: (of a call) ray is not installed.
    """

    def decorated(function: Any) -> Callable[..., list[Any]]:
        plain = _plain(function)

        @functools.wraps(plain)
        def on_all_hosts(*args: Any, **kwargs: Any) -> list[Any]:
            connect()
            hosts = config.reserved, config.execution_env, config.num_hosts
            outcome: Outcome[list[Any]] = attempted(
                lambda: attempt_on_hosts(*hosts, plain, args, kwargs, grace_s), retries, tell or _print, _pause
            )
            if outcome.ending != "done":
                raise RunError("\n".join([outcome.why, *outcome.value]))
            return outcome.value

        return on_all_hosts

    return decorated


@contextlib.contextmanager
def _nodes(resources: dict[str, float], num_hosts: int, wait_s: float) -> Iterator[Reserved]:
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([resources] * num_hosts, strategy="STRICT_SPREAD")
    try:
        needed = ", ".join(f"{value:g} {name}" for name, value in resources.items())
        yield Reserved(_ready(group, wait_s, f"{num_hosts} nodes with {needed}"), resources)
    finally:
        remove_placement_group(group)


def _ready(group: Any, wait_s: float, what: str) -> Any:
    if not group.wait(min(PATIENCE_S, wait_s)):
        _print(f"waiting for {what}")
        if wait_s <= PATIENCE_S or not group.wait(wait_s - PATIENCE_S):
            raise TimeoutError(f"{what} were not free in {wait_s:g} s; `ray status` says what the cluster has")
    return group


def _plain(function: Any) -> Callable[..., Any]:
    """The function inside a remote one, or the function itself."""
    inner = getattr(function, "_function", None)
    if inner is not None and hasattr(function, "remote"):
        options = {name: value for name, value in function._default_options.items() if value is not None}
        if options:
            raise TypeError(
                f"@ray.remote({', '.join(options)}) under @execute: the config says what hosts have; leave these out"
            )
        return inner
    if not callable(function) or isinstance(function, type) or hasattr(function, "remote"):
        raise TypeError(f"@execute takes a function, or one with @ray.remote, got {function!r}")
    return function


def _check_environment(environment: Mapping[str, Any]) -> None:
    for name, value in environment.get("env_vars", {}).items():
        if not isinstance(value, str):
            raise ValueError(f"env_vars must be texts, {name} is {value!r}")
    folder = str(environment.get("working_dir", "://"))
    if "://" not in folder:
        raise ValueError(
            f"working_dir={folder!r} in execution_env must be an address as gs://...; a folder of this machine goes "
            "to ray.init(runtime_env={'working_dir': ...}) or ray job submit --working-dir"
        )


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def _pause(seconds: float) -> bool:
    time.sleep(seconds)
    return True


def _print(text: str) -> None:
    print(f"groupax: {text}", flush=True)
