"""Functions and programs on all hosts of a TPU slice, or on GPU or CPU nodes, of a Ray cluster.

    @execute(TpuAcceleratorConfig("v4-64", execution_env={"pip": ["math-verify"]}))
    def main(): ...

    main()  # runs on 8 hosts at once, and returns a list of what they returned

Each host runs an actor with the host's resources and the variables by which groupax finds the other processes. Imports
ray where it is used.
"""

import contextlib
import functools
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groupax.core.errors import PREEMPTED, PreemptedError, RunError
from groupax.parallel.accelerators import Slice, tpu_slice
from groupax.parallel.processes import connect_to_ray
from groupax.satellites.launch.local import Stop, attempt
from groupax.satellites.launch.program import (
    Outcome,
    Retries,
    free_port,
    process_environment,
    program_of,
    run_with_retries,
)

RAY_KINDS = {"v5e": "v5litepod"}  # kinds of TPUs with another name in Ray
PATIENCE_S = 10.0  # after which a line says what is awaited
WORKER_ID = "ray.io/tpu-worker-id"  # label of a slice's hosts
POLL_S = 0.5
ANSWER_S = 30.0  # a node that exists answers sooner
LAST_LINES_S = 1.0  # for the hosts' last lines to arrive


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
        _check(self.execution_env)

    @property
    def slice(self) -> Slice:
        """The slice."""
        return tpu_slice(self.accelerator)

    @property
    def num_hosts(self) -> int:
        """Number of hosts of the slice."""
        return self.slice.num_hosts


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
        _check(self.execution_env, num_hosts=self.num_hosts, gpus_per_host=self.gpus_per_host)


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
        _check(self.execution_env, num_hosts=self.num_hosts, cpus_per_host=self.cpus_per_host)


AcceleratorConfig = TpuAcceleratorConfig | GpuAcceleratorConfig | CpuAcceleratorConfig


def execute(
    config: AcceleratorConfig,
    *,
    retries: Retries = Retries(),  # noqa: B008 - frozen
    log: Callable[[str], None] | None = None,
) -> Callable[[Any], Callable[..., list[Any]]]:
    """Returns a decorator that runs a function on all hosts at once when the driver calls it.

    It also takes functions with `@ray.remote`. The first host that fails stops all, and all are restarted while
    `retries` allow it: a run of groupax then resumes from its last checkpoint. A call returns a list of what the hosts
    returned.

    Args:
        config: The hosts.
        retries: Numbers of restarts after failures, and after preemptions or losses of nodes, and the time that the
            other hosts have to stop (SIGTERM) after one has failed.
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
            connect_to_ray()
            outcome: Outcome[list[Any]] = run_with_retries(
                lambda: _attempt(config, functools.partial(plain, *args, **kwargs), retries.grace_s),
                retries,
                log or _print,
                lambda seconds: time.sleep(seconds) is None,
            )
            if outcome.ending != "done":
                raise RunError("\n".join([outcome.why, *outcome.value]))
            return outcome.value

        return on_all_hosts

    return decorated


@contextlib.contextmanager
def _reserved(config: AcceleratorConfig) -> Iterator[tuple[Any, dict[str, float]]]:
    """Reserves hosts until the end of the context: a placement group with a bundle for each, and a host's resources.

    Raises:
        TimeoutError: They were not free in time.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    resources = {"CPU": float(config.cpus_per_host)}
    if isinstance(config, TpuAcceleratorConfig):
        from ray.util.tpu import slice_placement_group

        resources["TPU"] = float(config.slice.chips_per_host)
        reserved = slice_placement_group(
            "x".join(map(str, config.slice.sides)),
            RAY_KINDS.get(config.slice.kind, config.slice.kind),
            resources_per_bundle=resources,
            chips_per_vm=config.slice.chips_per_host,
            strategy="STRICT_SPREAD",
            head_reservation_timeout_s=config.wait_s,
        )
        group, free, what = reserved.placement_group, reserved.shutdown, f"the hosts of {config.accelerator}"
    else:
        if isinstance(config, GpuAcceleratorConfig):
            resources["GPU"] = float(config.gpus_per_host)
            if config.gpu_model is not None:
                resources[f"accelerator_type:{config.gpu_model}"] = 0.001
        group = placement_group([resources] * config.num_hosts, strategy="STRICT_SPREAD")
        free = functools.partial(remove_placement_group, group)
        needed = ", ".join(f"{value:g} {name}" for name, value in resources.items())
        what = f"{config.num_hosts} nodes with {needed}"
    try:
        if not group.wait(min(PATIENCE_S, config.wait_s)):
            _print(f"waiting for {what}")
            if config.wait_s <= PATIENCE_S or not group.wait(config.wait_s - PATIENCE_S):
                status = "`ray status` lists the cluster's resources"
                raise TimeoutError(f"{what} were not free within {config.wait_s:g} s; {status}")
        yield group, resources
    finally:
        free()


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


def _check(environment: Mapping[str, Any], **counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    for name, value in environment.get("env_vars", {}).items():
        if not isinstance(value, str):
            raise ValueError(f"env_vars must be strings, {name} is {value!r}")
    folder = str(environment.get("working_dir", "://"))
    if "://" not in folder:
        raise ValueError(
            f"working_dir={folder!r} in execution_env must be a URI such as gs://...; pass a folder of this machine "
            "to ray.init(runtime_env={'working_dir': ...}) or ray job submit --working-dir"
        )


def _print(text: str) -> None:
    print(f"groupax: {text}", flush=True)


class _Host:
    """An actor. Ray prints its name before each of its lines."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"host {self.index}"

    def pid_and_port(self) -> tuple[int, int]:
        """Returns the process id and a free port."""
        return os.getpid(), free_port()

    def run(self, function: Callable[[], Any], environment: dict[str, str]) -> Outcome[Any]:
        """Calls the function in the main thread, where it can handle signals."""
        import ray

        own_cluster = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}  # for programs that are started here
        os.environ.update(own_cluster | environment)
        try:
            return Outcome("done", "", function())
        except SystemExit as error:
            if error.code == PREEMPTED:
                return Outcome("preempted", "was preempted", "")
            if not error.code:
                return Outcome("done", "", None)
            return Outcome("failed", f"exited: {error.code}", "")
        except (ValueError, TypeError, ImportError) as error:
            return Outcome("mistake", f"failed: {type(error).__name__}: {error}", traceback.format_exc())
        except BaseException as error:  # noqa: BLE001 - reported to the driver
            return Outcome("failed", f"failed: {type(error).__name__}: {error}", traceback.format_exc())


def _attempt(config: AcceleratorConfig, function: Callable[[], Any], grace_s: float) -> Outcome[list[Any]]:
    """Runs a function once on all hosts; the outcome's value has what each returned, or a traceback."""
    import ray.exceptions
    from ray.util.placement_group import placement_group_table

    with _reserved(config) as (group, resources):
        nodes = {node["NodeID"]: node for node in ray.nodes()}
        node_of: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
        labels = {bundle: nodes[node].get("Labels", {}) for bundle, node in node_of.items() if node in nodes}
        bundles = _in_order(labels)
        if len(bundles) != config.num_hosts:
            return Outcome("preempted", "a host was lost before the start", [])
        hosts = _create_hosts(group, resources, bundles, config.execution_env)
        try:
            try:
                pids, ports = zip(*ray.get([host.pid_and_port.remote() for host in hosts]), strict=True)
            except ray.exceptions.RuntimeEnvSetupError as error:
                return Outcome("mistake", f"the hosts' environment cannot be set up: {error}", [])
            except ray.exceptions.RayActorError as error:
                return Outcome("preempted", f"a host was lost before the start: {error}", [])
            own_nodes = [node_of[bundle] for bundle in bundles]
            coordinator = f"{nodes[own_nodes[0]]['NodeManagerAddress']}:{ports[0]}"
            runs = [
                host.run.remote(function, process_environment(index, len(hosts), coordinator))
                for index, host in enumerate(hosts)
            ]
            return _outcome(_wait_for_all(runs, own_nodes, pids, grace_s), len(hosts))
        finally:
            for host in hosts:
                ray.kill(host)


def _create_hosts(
    group: Any, resources: Mapping[str, float], bundles: Sequence[int], runtime_env: Mapping[str, Any]
) -> list[Any]:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    host = ray.remote(max_restarts=0, max_task_retries=0)(_Host)
    return [
        host.options(
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            resources={name: value for name, value in resources.items() if name not in ("CPU", "GPU")},
            runtime_env=dict(runtime_env) or None,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        ).remote(index)
        for index, bundle in enumerate(bundles)
    ]


def _wait_for_all(
    runs: Sequence[Any], nodes: Sequence[str], pids: Sequence[int], grace_s: float
) -> dict[int, Outcome[Any]]:
    """Returns the ends of all runs in their order, without those that were killed after the grace period."""
    import ray

    def ask_to_stop(index: int) -> None:
        _start_on(nodes[index], _terminate, pids[index])

    running = {run: index for index, run in enumerate(runs)}
    endings: dict[int, Outcome[Any]] = {}
    deadline_s = float("inf")
    try:
        while running and time.monotonic() < deadline_s:
            for run in ray.wait(list(running), num_returns=1, timeout=POLL_S)[0]:
                index = running.pop(run)
                endings[index] = _ending(run, functools.partial(_answers, nodes[index]))
                if endings[index].ending == "done" or deadline_s < float("inf"):
                    continue
                deadline_s = time.monotonic() + grace_s
                # Hosts that agreed on a preemption are saving their state; a second signal would end them.
                if endings[index].ending != "preempted" or "lost" in endings[index].why:
                    for other in running.values():
                        ask_to_stop(other)
    except BaseException:  # the driver has to stop, and so have the hosts, with their state saved
        for index in running.values():
            ask_to_stop(index)
        ray.wait(list(running), num_returns=len(running), timeout=grace_s)
        raise
    return endings


def _ending(run: Any, answers: Callable[[], bool]) -> Outcome[Any]:
    """Returns the end of one host. If its process is gone, its node's answer tells whether the host is lost."""
    import ray.exceptions

    try:
        return ray.get(run)
    except ray.exceptions.RayTaskError as error:  # raised by Ray about arguments or results
        return Outcome("mistake", f"failed: {error}", "")
    except ray.exceptions.RayError as error:
        why = str(error).splitlines()[0]
        if answers():
            return Outcome("failed", f"failed: its process is gone: {why}", str(error))
        return Outcome("preempted", f"was lost: {why}", "")


def _outcome(endings: Mapping[int, Outcome[Any]], num_hosts: int) -> Outcome[list[Any]]:
    """Combines the ends of all hosts; a lost host explains what the others raised."""
    bad = [(index, ended) for index, ended in endings.items() if ended.ending != "done"]
    if not bad:
        return Outcome("done", "done", [endings[index].value for index in range(num_hosts)])
    index, ended = next(((index, ended) for index, ended in bad if "was lost" in ended.why), bad[0])
    return Outcome(ended.ending, f"host {index} of {num_hosts} {ended.why}", [ended.value] if ended.value else [])


def _yes() -> bool:
    return True


def _terminate(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def _start_on(node: str, function: Callable[..., Any], *args: Any) -> Any:
    """Starts a task on that node and no other."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0, max_retries=0)(function).options(scheduling_strategy=strategy).remote(*args)


def _answers(node: str) -> bool:
    """Returns whether a node runs tasks; the cluster notices a lost node only after some time."""
    import ray.exceptions

    try:
        return ray.get(_start_on(node, _yes), timeout=ANSWER_S)
    except ray.exceptions.RayError:
        return False


def _in_order(labels: Mapping[int, Mapping[str, str]]) -> list[int]:
    """Returns bundles in the order of their hosts in the slice, as the chips number them, or else in their own."""
    if all(each.get(WORKER_ID, "").isdigit() for each in labels.values()):
        return sorted(labels, key=lambda bundle: int(labels[bundle][WORKER_ID]))
    return sorted(labels)


@dataclass(frozen=True, kw_only=True)
class Ray(Retries):
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
    """Runs a program and waits for its end; requests to stop are passed on."""
    with Stop() as stop:
        outcome = attempt(program_of(argv), [{}], [""], stop, grace_s)
    if outcome.ending == "preempted" or stop.signals:
        raise PreemptedError(outcome.why)
    if outcome.ending == "mistake":
        raise ValueError(outcome.why)
    if outcome.ending != "done":
        raise RunError(outcome.why)


def launch_on_ray(command: Ray, argv: Sequence[str], log: Callable[[str], None]) -> int:
    """Runs `groupax launch ray` and returns its exit status."""
    config = config_of(command)
    program_of(argv)
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # show a line that several hosts print for each of them
    connect_to_ray(command.address, command.working_dir)
    import ray

    try:
        execute(config, retries=command, log=log)(run_program)(list(argv), command.grace_s)
    finally:
        time.sleep(LAST_LINES_S)
        ray.shutdown()
    return 0


def config_of(command: Ray) -> AcceleratorConfig:
    """Returns the hosts that a command requests."""
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
