"""Reward functions as tasks of a Ray cluster: at most so many at a time, and one that is cancelled is killed.

    schedule ──► queue ──► one of N threads ──► task on any node with a free core
    Future  ◄── value, exception, or the loss of its worker ◄──┘

Imports ray where it is used, and no jax.
"""

import concurrent.futures
import contextlib
import functools
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from groupax.launch.ray_hosts import connect

NO_ACCELERATOR = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}  # these are the trainers'


class RayWorkers:
    """Calls functions on the cluster that is there (`RAY_ADDRESS`, this node's), or on a new one on this machine.

    A task asks for one core, no accelerator, and is never tried again by Ray itself.

    Args:
        num_workers: tasks at a time.

    Raises:
        ValueError: ray is not installed.
        ConnectionError: there is no cluster at `RAY_ADDRESS`.
    """

    def __init__(self, num_workers: int) -> None:
        _connect_keeping_signals()
        import ray

        self._task = ray.remote(
            num_cpus=1,
            num_gpus=0,
            max_retries=0,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": NO_ACCELERATOR},
        )(_called)
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls: set[concurrent.futures.Future[Any]] = set()
        self._threads = [
            threading.Thread(target=self._work, name="rewards on ray", daemon=True) for _ in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def schedule(self, function: Callable[..., Any], args: Sequence[Any]) -> concurrent.futures.Future[Any]:
        """Call the function on a worker, sent by value if it cannot be imported there.

        Returns:
            What it returns or raises, or Ray's error if its worker is lost. To cancel it kills the worker.
        """
        call: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        self._waiting.put((call, function, args))
        return call

    def stop(self) -> None:
        """Cancel all calls."""
        for call in list(self._calls):
            call.cancel()
        for _ in self._threads:
            self._waiting.put(None)

    def join(self, timeout: float) -> None:
        """Wait until they have ended, for so many seconds at most."""
        until_s = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(until_s - time.monotonic(), 0))

    def _work(self) -> None:
        import ray

        for call, function, args in iter(self._waiting.get, None):
            if call.cancelled():
                continue
            try:
                task = self._task.remote(function, *args)
                call.add_done_callback(functools.partial(_kill_if_cancelled, task))
                settle, outcome = call.set_result, ray.get(task)
            except Exception as error:  # noqa: BLE001 - handed to whoever waits
                settle, outcome = call.set_exception, error
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled
                settle(outcome)


def pickled(function: Any) -> bytes:
    """As functions are sent: those that workers cannot import, as lambdas and a notebook's, by value.

    Raises:
        ValueError: ray is not installed.
        TypeError, pickle.PicklingError: it cannot be sent.
    """
    try:
        from ray import cloudpickle
    except ModuleNotFoundError as error:
        raise ValueError("reward_workers_on='ray' needs ray; pip install 'groupax[ray]'") from error
    return cloudpickle.dumps(function)  # pyright: ignore[reportPrivateImportUsage]


def _called(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _kill_if_cancelled(task: Any, call: concurrent.futures.Future[Any]) -> None:
    if call.cancelled():
        import ray

        ray.cancel(task, force=True)


def _connect_keeping_signals() -> None:
    """Connect; Ray then takes SIGTERM, with which a run is asked to stop."""
    handler = signal.getsignal(signal.SIGTERM)
    connect()
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
