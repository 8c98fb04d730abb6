"""A function on every host of a TPU slice, or on GPU or CPU nodes, of a Ray cluster. Imports ray where it is used.

    @execute(TpuAcceleratorConfig("v4-64", execution_env={"pip": ["math-verify"]}))
    def main(): ...

    main()  # on 8 hosts at once: it returns what each returned

Each host runs an actor with the host's resources. It gets the variables by which groupax finds the other processes.
"""

import contextlib
import functools
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupax.errors import PREEMPTED, RunError
from groupax.launch.place import environment_of, free_port
from groupax.launch.retries import Ending, Outcome, Retries, attempted
from groupax.parallel.accelerators import Slice, tpu_slice

RAY_KINDS = {"v5e": "v5litepod"}  # of TPUs, where Ray has another name
WORKER_ID = "ray.io/tpu-worker-id"  # label of a slice's hosts
PATIENCE_S = 10.0  # then it is told what is waited for
LOOK_S = 0.5
ANSWER_S = 30.0  # a node that is there answers sooner


@dataclass(frozen=True)
class Reserved:
    """Nodes that are ours.

    Attributes:
        group: Ray's placement group, with a bundle for each host.
        resources: of a host, by Ray's names.
    """

    group: Any
    resources: dict[str, float]


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
            try:
                import ray
            except ModuleNotFoundError as error:
                raise ValueError("this needs ray; pip install 'groupax[ray]'") from error
            if not ray.is_initialized():
                ray.init()
            outcome: Outcome[list[Any]] = attempted(
                lambda: _attempt(config, plain, args, kwargs, grace_s), retries, tell or _print, _pause
            )
            if outcome.ending != "done":
                raise RunError("\n".join([outcome.why, *outcome.value]))
            return outcome.value

        return on_all_hosts

    return decorated


@dataclass(frozen=True)
class _Ended:
    """How the function ended on one host: `value` is what it returned, or a traceback."""

    ending: Ending
    why: str
    value: Any


class _Host:
    """The actor. Its name stands before each line that it prints."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"host {self.number}"

    def place(self) -> tuple[int, int]:
        """Process id and a free port."""
        return os.getpid(), free_port()

    def run(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], environment: dict[str, str]
    ) -> _Ended:
        """Call the function, in the main thread, so that it can take signals."""
        os.environ.update(environment)
        try:
            return _Ended("done", "", function(*args, **kwargs))
        except SystemExit as error:
            if error.code == PREEMPTED:
                return _Ended("preempted", "was preempted", "")
            if not error.code:
                return _Ended("done", "", None)
            return _Ended("failed", f"exited: {error.code}", "")
        except (ValueError, TypeError, ImportError) as error:
            return _Ended("mistake", f"failed: {type(error).__name__}: {error}", traceback.format_exc())
        except BaseException as error:  # noqa: BLE001 - told to the driver
            return _Ended("failed", f"failed: {type(error).__name__}: {error}", traceback.format_exc())


def _attempt(
    config: AcceleratorConfig,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    grace_s: float,
) -> Outcome[list[Any]]:
    """Run once on all hosts."""
    import ray.exceptions
    from ray.util.placement_group import placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    with config.reserved() as reserved:
        nodes = {node["NodeID"]: node for node in ray.nodes()}
        placed: dict[int, str] = placement_group_table(reserved.group)["bundles_to_node_id"]
        bundles = _in_order({bundle: nodes[node].get("Labels", {}) for bundle, node in placed.items() if node in nodes})
        if len(bundles) != config.num_hosts:
            return Outcome("preempted", "a host was lost before it began", [])
        host = ray.remote(max_restarts=0, max_task_retries=0)(_Host)
        hosts: list[Any] = [
            host.options(
                num_cpus=reserved.resources["CPU"],
                num_gpus=reserved.resources.get("GPU", 0),
                resources={name: value for name, value in reserved.resources.items() if name not in ("CPU", "GPU")},
                runtime_env=dict(config.execution_env) or None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    reserved.group, placement_group_bundle_index=bundle
                ),
            ).remote(number)
            for number, bundle in enumerate(bundles)
        ]
        try:
            try:
                places = ray.get([each.place.remote() for each in hosts])
            except ray.exceptions.RuntimeEnvSetupError as error:
                return Outcome("mistake", f"the hosts' environment cannot be set up: {error}", [])
            except ray.exceptions.RayActorError as error:
                return Outcome("preempted", f"a host was lost before it began: {error}", [])
            coordinator = f"{nodes[placed[bundles[0]]]['NodeManagerAddress']}:{places[0][1]}"
            runs = [
                each.run.remote(function, args, kwargs, environment_of(number, len(hosts), coordinator))
                for number, each in enumerate(hosts)
            ]

            def ask_to_stop(number: int) -> None:
                _started_on(placed[bundles[number]], _terminate, places[number][0])

            def answers(number: int) -> bool:
                return _answers(placed[bundles[number]])

            return _outcome(_gathered(runs, ask_to_stop, answers, grace_s), len(hosts))
        finally:
            for each in hosts:
                ray.kill(each)


def _gathered(
    runs: Sequence[Any], ask_to_stop: Callable[[int], None], answers: Callable[[int], bool], grace_s: float
) -> dict[int, _Ended]:
    """How all have ended, in the order of their ends; those that were killed at the end of the grace are left out."""
    import ray

    numbers = {run: number for number, run in enumerate(runs)}
    endings: dict[int, _Ended] = {}
    until_s = float("inf")
    try:
        while numbers and time.monotonic() < until_s:
            for run in ray.wait(list(numbers), num_returns=1, timeout=LOOK_S)[0]:
                number = numbers.pop(run)
                endings[number] = _ending(run, functools.partial(answers, number))
                if endings[number].ending == "done" or until_s < float("inf"):
                    continue
                until_s = time.monotonic() + grace_s
                # Those that agreed on a preemption are saving; a second signal would end them.
                if endings[number].ending != "preempted" or "lost" in endings[number].why:
                    for other in numbers.values():
                        ask_to_stop(other)
    except BaseException:  # the driver is to stop: so are the hosts, with their state saved
        for number in numbers.values():
            ask_to_stop(number)
        ray.wait(list(numbers), num_returns=len(numbers), timeout=grace_s)
        raise
    return endings


def _ending(run: Any, answers: Callable[[], bool]) -> _Ended:
    """How one host has ended. If its process is gone it counts whether its node `answers`."""
    import ray.exceptions

    try:
        return ray.get(run)
    except ray.exceptions.RayTaskError as error:  # of Ray's, about what was given or returned
        return _Ended("mistake", f"failed: {error}", "")
    except ray.exceptions.RayError as error:
        why = str(error).splitlines()[0]
        if answers():
            return _Ended("failed", f"failed: its process is gone: {why}", str(error))
        return _Ended("preempted", f"was lost: {why}", "")


def _outcome(endings: Mapping[int, _Ended], num_hosts: int) -> Outcome[list[Any]]:
    """What it comes to: a host that was lost explains what the others raised."""
    bad = [(number, ended) for number, ended in endings.items() if ended.ending != "done"]
    if not bad:
        return Outcome("done", "done", [endings[number].value for number in range(num_hosts)])
    number, ended = next(((number, ended) for number, ended in bad if "was lost" in ended.why), bad[0])
    return Outcome(ended.ending, f"host {number} of {num_hosts} {ended.why}", [ended.value] if ended.value else [])


def _yes() -> bool:
    return True


def _terminate(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def _started_on(node: str, function: Callable[..., Any], *args: Any) -> Any:
    """A task on that node and no other."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0, max_retries=0)(function).options(scheduling_strategy=where).remote(*args)


def _answers(node: str) -> bool:
    """Whether a node does what it is asked; the cluster misses one that is gone only after some time."""
    import ray.exceptions

    try:
        return ray.get(_started_on(node, _yes), timeout=ANSWER_S)
    except ray.exceptions.RayError:
        return False


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


def _in_order(labels: Mapping[int, Mapping[str, str]]) -> list[int]:
    """Bundles in the order of their hosts in the slice, as the chips number them; else in their own."""
    if all(each.get(WORKER_ID, "").isdigit() for each in labels.values()):
        return sorted(labels, key=lambda bundle: int(labels[bundle][WORKER_ID]))
    return sorted(labels)


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
