"""A function on the hosts of a Ray cluster, in an actor on each. Imports ray where it is used."""

import contextlib
import functools
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupax.errors import PREEMPTED, require
from groupax.launch.environment import free_port, process_environment
from groupax.launch.retries import Ending, Outcome

WORKER_ID = "ray.io/tpu-worker-id"  # label of a slice's hosts
POLL_S = 0.5
ANSWER_S = 30.0  # a node that exists answers sooner


@dataclass(frozen=True)
class Reserved:
    """Reserved nodes.

    Attributes:
        group: Ray's placement group, with a bundle for each host.
        resources: Resources of a host, by Ray's names.
    """

    group: Any
    resources: dict[str, float]


@dataclass(frozen=True)
class Call:
    """A call to make on all hosts of a reservation.

    Attributes:
        reservation: Creates the reservation.
        runtime_env: Ray's runtime environment of the hosts.
        num_hosts: Number of hosts that the reservation must have.
        grace_s: Time between SIGTERM and the end of hosts that still run when another one has failed.
    """

    reservation: Callable[[], AbstractContextManager[Reserved]]
    runtime_env: Mapping[str, Any]
    num_hosts: int
    grace_s: float


def connect(address: str | None = None, working_dir: Path | None = None) -> None:
    """Connects to a cluster as a driver, unless this process is connected.

    Args:
        address: Address of the cluster; None for the cluster of this machine, or a new one on it.
        working_dir: Folder that is copied to all hosts.

    Raises:
        ValueError: ray is not installed.
    """
    require("ray", "running on a cluster of ray")
    import ray

    if not ray.is_initialized():
        runtime_env = None if working_dir is None else {"working_dir": str(working_dir)}
        ray.init(address=address, runtime_env=runtime_env)


@dataclass(frozen=True)
class _Ended:
    """The end of the function on one host; `value` is what it returned, or a traceback."""

    ending: Ending
    why: str
    value: Any


class _Host:
    """An actor. Ray prints its name before each of its lines."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"host {self.index}"

    def pid_and_port(self) -> tuple[int, int]:
        """Returns the process id and a free port."""
        return os.getpid(), free_port()

    def run(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], environment: dict[str, str]
    ) -> _Ended:
        """Calls the function in the main thread, where it can handle signals."""
        import ray

        own_cluster = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}  # for programs that are started here
        os.environ.update(own_cluster | environment)
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
        except BaseException as error:  # noqa: BLE001 - reported to the driver
            return _Ended("failed", f"failed: {type(error).__name__}: {error}", traceback.format_exc())


def attempt_on_hosts(
    call: Call, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Outcome[list[Any]]:
    """Runs a function once on all hosts; the outcome's value has what each returned, or a traceback."""
    import ray.exceptions
    from ray.util.placement_group import placement_group_table

    with call.reservation() as reserved:
        nodes = {node["NodeID"]: node for node in ray.nodes()}
        node_of: dict[int, str] = placement_group_table(reserved.group)["bundles_to_node_id"]
        labels = {bundle: nodes[node].get("Labels", {}) for bundle, node in node_of.items() if node in nodes}
        bundles = _in_order(labels)
        if len(bundles) != call.num_hosts:
            return Outcome("preempted", "a host was lost before the start", [])
        hosts = _create_hosts(reserved, bundles, call.runtime_env)
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
                host.run.remote(function, args, kwargs, process_environment(index, len(hosts), coordinator))
                for index, host in enumerate(hosts)
            ]
            return _outcome(_wait_for_all(runs, own_nodes, pids, call.grace_s), len(hosts))
        finally:
            for host in hosts:
                ray.kill(host)


def _create_hosts(reserved: Reserved, bundles: Sequence[int], runtime_env: Mapping[str, Any]) -> list[Any]:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    host = ray.remote(max_restarts=0, max_task_retries=0)(_Host)
    return [
        host.options(
            num_cpus=reserved.resources["CPU"],
            num_gpus=reserved.resources.get("GPU", 0),
            resources={name: value for name, value in reserved.resources.items() if name not in ("CPU", "GPU")},
            runtime_env=dict(runtime_env) or None,
            scheduling_strategy=PlacementGroupSchedulingStrategy(reserved.group, placement_group_bundle_index=bundle),
        ).remote(index)
        for index, bundle in enumerate(bundles)
    ]


def _wait_for_all(runs: Sequence[Any], nodes: Sequence[str], pids: Sequence[int], grace_s: float) -> dict[int, _Ended]:
    """Returns the ends of all runs in their order, without those that were killed after the grace period."""
    import ray

    def ask_to_stop(index: int) -> None:
        _start_on(nodes[index], _terminate, pids[index])

    running = {run: index for index, run in enumerate(runs)}
    endings: dict[int, _Ended] = {}
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


def _ending(run: Any, answers: Callable[[], bool]) -> _Ended:
    """Returns the end of one host. If its process is gone, its node's answer tells whether the host is lost."""
    import ray.exceptions

    try:
        return ray.get(run)
    except ray.exceptions.RayTaskError as error:  # raised by Ray about arguments or results
        return _Ended("mistake", f"failed: {error}", "")
    except ray.exceptions.RayError as error:
        why = str(error).splitlines()[0]
        if answers():
            return _Ended("failed", f"failed: its process is gone: {why}", str(error))
        return _Ended("preempted", f"was lost: {why}", "")


def _outcome(endings: Mapping[int, _Ended], num_hosts: int) -> Outcome[list[Any]]:
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
