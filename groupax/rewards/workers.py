"""Worker processes for reward functions: of this machine, or tasks of a Ray cluster. Imports no jax."""

import functools
import multiprocessing
import pickle
import signal
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from groupax.errors import require
from groupax.rewards.contract import Reward

NO_ACCELERATOR = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}  # accelerators are the trainers'


@dataclass(frozen=True)
class Workers:
    """Worker processes.

    Attributes:
        schedule: Calls a function with arguments in a worker. Cancelling the future kills the worker.
        stop: Kills all workers.
    """

    schedule: Callable[..., "Future[Any]"]
    stop: Callable[[], None]


def start_workers(kind: str, num_workers: int) -> Workers:
    """Starts worker processes of this machine ("processes"), or connects to a Ray cluster ("ray").

    Raises:
        ValueError: Ray is not installed.
        ConnectionError: There is no cluster at `RAY_ADDRESS`.
    """
    if kind == "ray":
        return _ray_tasks()
    from pebble import ProcessPool

    pool = ProcessPool(max_workers=num_workers, context=multiprocessing.get_context("spawn"))

    def stop() -> None:
        pool.stop()
        pool.join(timeout=5.0)

    return Workers(lambda *call: pool.schedule(call[0], args=call[1:]), stop)


def check_sendable(rewards: Iterable[Reward], kind: str) -> None:
    """Checks that reward functions can be sent to workers.

    Raises:
        ValueError: One of them cannot be pickled, or Ray is not installed.
    """
    dumps, remedy = (
        (_cloudpickled, "keep what cannot be sent out of its globals and closure")
        if kind == "ray"
        else (pickle.dumps, "define it at the top level of a module")
    )
    for reward in rewards:
        try:
            dumps(reward.function)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"reward_workers is set, but the reward function {reward.name!r} cannot be sent to another process "
                f"({error}); {remedy}, or set reward_workers=0"
            ) from error


def _ray_tasks() -> Workers:
    """Returns tasks with one core and no accelerator each, which Ray itself never retries.

    They run on the cluster at `RAY_ADDRESS`, else on this node's, else on a new one on this machine.
    """
    _connect_to_ray()
    import ray

    options = {"num_cpus": 1, "num_gpus": 0, "max_retries": 0, "scheduling_strategy": "SPREAD"}
    task = ray.remote(**options, runtime_env={"env_vars": NO_ACCELERATOR})(_call)
    running: set[Future[Any]] = set()

    def schedule(function: Callable[..., Any], *args: Any) -> "Future[Any]":
        result = task.remote(function, *args)
        future = result.future()
        running.add(future)
        future.add_done_callback(running.discard)
        future.add_done_callback(functools.partial(_kill_if_cancelled, result))
        return future

    def stop() -> None:
        for future in list(running):
            future.cancel()

    return Workers(schedule, stop)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _kill_if_cancelled(result: Any, future: "Future[Any]") -> None:
    if future.cancelled():
        import ray

        ray.cancel(result, force=True)


def _connect_to_ray() -> None:
    """Connects, and restores the handler of SIGTERM, which requests a run to stop and which Ray replaces."""
    from groupax.launch.ray_functions import connect

    handler = signal.getsignal(signal.SIGTERM)
    connect()
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _cloudpickled(function: Any) -> bytes:
    """Returns the function as Ray sends it: by value if workers cannot import it, as lambdas and a notebook's."""
    require("ray", "reward_workers_on='ray'")
    from ray import cloudpickle

    return cloudpickle.dumps(function)  # pyright: ignore[reportPrivateImportUsage]
