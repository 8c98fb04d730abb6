"""A function on the hosts of a Ray cluster: an actor on each, and how they have ended. Imports ray where it is used."""

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

from groupax.errors import PREEMPTED
from groupax.launch.environment import environment_of, free_port
from groupax.launch.retries import Ending, Outcome

WORKER_ID = "ray.io/tpu-worker-id"  # label of a slice's hosts
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


def connect(address: str | None = None, working_dir: Path | None = None) -> None:
    """Be a driver of a cluster, unless this process is one already.

    Args:
        address: of the cluster; None for the one that is there, or a new one on this machine.
        working_dir: a folder that is copied to all its hosts.

    Raises:
        ValueError: ray is not installed.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ValueError("this needs ray; pip install 'groupax[ray]'") from error
    if not ray.is_initialized():
        of_job = None if working_dir is None else {"working_dir": str(working_dir)}
        ray.init(address=address, runtime_env=of_job)


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
        except BaseException as error:  # noqa: BLE001 - told to the driver
            return _Ended("failed", f"failed: {type(error).__name__}: {error}", traceback.format_exc())


def attempt_on_hosts(
    reservation: Callable[[], AbstractContextManager[Reserved]],
    environment: Mapping[str, Any],
    num_hosts: int,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    grace_s: float,
) -> Outcome[list[Any]]:
    """Run a function once on all hosts of a reservation.

    Args:
        reservation: makes it.
        environment: Ray's runtime environment of the hosts.
        num_hosts: that the reservation must have.
        function, args, kwargs: what to call.
        grace_s: between SIGTERM and the end of those that go on when one has failed.

    Returns:
        The values in the order of the hosts, or a traceback.
    """
    import ray.exceptions
    from ray.util.placement_group import placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    with reservation() as reserved:
        nodes = {node["NodeID"]: node for node in ray.nodes()}
        placed: dict[int, str] = placement_group_table(reserved.group)["bundles_to_node_id"]
        bundles = _in_order({bundle: nodes[node].get("Labels", {}) for bundle, node in placed.items() if node in nodes})
        if len(bundles) != num_hosts:
            return Outcome("preempted", "a host was lost before it began", [])
        host = ray.remote(max_restarts=0, max_task_retries=0)(_Host)
        hosts: list[Any] = [
            host.options(
                num_cpus=reserved.resources["CPU"],
                num_gpus=reserved.resources.get("GPU", 0),
                resources={name: value for name, value in reserved.resources.items() if name not in ("CPU", "GPU")},
                runtime_env=dict(environment) or None,
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


def _in_order(labels: Mapping[int, Mapping[str, str]]) -> list[int]:
    """Bundles in the order of their hosts in the slice, as the chips number them; else in their own."""
    if all(each.get(WORKER_ID, "").isdigit() for each in labels.values()):
        return sorted(labels, key=lambda bundle: int(labels[bundle][WORKER_ID]))
    return sorted(labels)
