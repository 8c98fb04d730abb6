"""A decorator that runs a function on all hosts of a TPU slice, or on GPU or CPU nodes, of a Ray cluster.

    @execute(TpuAcceleratorConfig("v4-64", execution_env={"pip": ["math-verify"]}))
    def main(): ...

    main()  # runs on 8 hosts at once, and returns a list of what they returned

Each host runs an actor with the host's resources and the variables by which groupax finds the other processes. Imports
ray where it is used.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from groupax.errors import RunError
from groupax.launch.ray_hosts import Call, Reserved, attempt_on_hosts, connect
from groupax.launch.retries import Outcome, Retries, run_with_retries
from groupax.parallel.accelerators import Slice, tpu_slice

RAY_KINDS = {"v5e": "v5litepod"}  # kinds of TPUs with another name in Ray
PATIENCE_S = 10.0  # after which a line says what is awaited


@dataclass(frozen=True)
class TpuAcceleratorConfig:
    """All hosts of one TPU slice.

    Args:
        accelerator: Name of the slice, e.g. v4-64, v5e-32, v5p-128 or v6e-16, which determines its hosts and chips.
        execution_env: Ray's runtime environment of the hosts: `env_vars`, `pip` and so on. To copy a folder of this
            machine to the cluster, pass it as `working_dir` to `ray.init` or `ray job submit` instead.
        cpus_per_host: CPU cores per host.
        wait_s: Longest time to wait for a free slice.
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
        """The slice."""
        return tpu_slice(self.accelerator)

    @property
    def num_hosts(self) -> int:
        """Number of hosts of the slice."""
        return self.slice.num_hosts

    @contextlib.contextmanager
    def reserved(self) -> Iterator[Reserved]:
        """Reserves a slice until the end of the context.

        Raises:
            TimeoutError: No slice was free in time.
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
    """Several nodes with GPUs; one process drives all GPUs that it reserves on a node.

    Args:
        num_hosts: Number of nodes.
        gpus_per_host: GPUs per node.
        gpu_model: Ray's name of the GPU, e.g. H100 or A100; None for any.
        execution_env, cpus_per_host, wait_s: The same as for TPUs.
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
        """Reserves the nodes until the end of the context.

        Raises:
            TimeoutError: The nodes were not free in time.
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
        num_hosts: Number of nodes.
        cpus_per_host: CPU cores per node.
        execution_env, wait_s: The same as for TPUs.
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
        """Reserves the nodes until the end of the context.

        Raises:
            TimeoutError: The nodes were not free in time.
        """
        with _nodes({"CPU": float(self.cpus_per_host)}, self.num_hosts, self.wait_s) as reserved:
            yield reserved


AcceleratorConfig = TpuAcceleratorConfig | GpuAcceleratorConfig | CpuAcceleratorConfig


def execute(
    config: AcceleratorConfig,
    *,
    retries: Retries = Retries(),  # noqa: B008 - frozen
    grace_s: float = 60.0,
    log: Callable[[str], None] | None = None,
) -> Callable[[Any], Callable[..., list[Any]]]:
    """Returns a decorator that runs a function on all hosts at once when the driver calls it.

    It also takes functions with `@ray.remote`. The first host that fails stops all, and all are restarted while
    `retries` allow it: a run of groupax then resumes from its last checkpoint. A call returns a list of what the hosts
    returned.

    Args:
        config: The hosts.
        retries: Numbers of restarts after failures, and after preemptions or losses of nodes.
        grace_s: Time that the other hosts have to stop (SIGTERM) after one has failed, before they are killed.
        log: Receives a line for each restart; None prints it.

    Raises:
        TypeError: The decorated object is not a function, or is a remote one with options.
        RunError: (in a call) A host failed and was not restarted; the message has its traceback.
        TimeoutError: (in a call) No such hosts were free in time.
        ValueError: (in a call) ray is not installed.
    """

    def decorated(function: Any) -> Callable[..., list[Any]]:
        plain = _plain(function)

        @functools.wraps(plain)
        def on_all_hosts(*args: Any, **kwargs: Any) -> list[Any]:
            connect()
            call = Call(config.reserved, config.execution_env, config.num_hosts, grace_s)
            outcome: Outcome[list[Any]] = run_with_retries(
                lambda: attempt_on_hosts(call, plain, args, kwargs), retries, log or _print, _pause
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
            raise TimeoutError(f"{what} were not free within {wait_s:g} s; `ray status` lists the cluster's resources")
    return group


def _plain(function: Any) -> Callable[..., Any]:
    """Returns the function inside a remote one, or the function itself."""
    inner = getattr(function, "_function", None)
    if inner is not None and hasattr(function, "remote"):
        options = {name: value for name, value in function._default_options.items() if value is not None}
        if options:
            raise TypeError(
                f"@ray.remote({', '.join(options)}) under @execute: the config states what hosts have; leave these out"
            )
        return inner
    if not callable(function) or isinstance(function, type) or hasattr(function, "remote"):
        raise TypeError(f"@execute takes a function, or one with @ray.remote, got {function!r}")
    return function


def _check_environment(environment: Mapping[str, Any]) -> None:
    for name, value in environment.get("env_vars", {}).items():
        if not isinstance(value, str):
            raise ValueError(f"env_vars must be strings, {name} is {value!r}")
    folder = str(environment.get("working_dir", "://"))
    if "://" not in folder:
        raise ValueError(
            f"working_dir={folder!r} in execution_env must be a URI such as gs://...; pass a folder of this machine "
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
