"""Places where sync reward functions run other than threads: processes, and the main thread.

Python allows signal handlers, with which math-verify limits its time, in the main thread only:

    daemon thread:  the function calls signal.signal ──► NeedsMainThreadError ──► it is called again in the main thread
    main thread:    run_until(calls are done) calls the functions that wait

Imports no jax.
"""

import asyncio
import multiprocessing
import pickle
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from groupax.parallel.preemption import RolloutCancelled
from groupax.rewards.contract import Reward


def start_workers(num_workers: int) -> tuple[Callable[..., "Future[Any]"], Callable[[], None]]:
    """Starts worker processes.

    Returns:
        A function that calls a function with arguments in a worker, which is killed if the future is cancelled; and one
        that kills all workers.
    """
    from pebble import ProcessPool

    pool = ProcessPool(max_workers=num_workers, context=multiprocessing.get_context("spawn"))

    def stop() -> None:
        pool.stop()
        pool.join(timeout=5.0)

    return lambda *call: pool.schedule(call[0], args=call[1:]), stop


def check_sendable(rewards: Iterable[Reward]) -> None:
    """Checks that reward functions can be sent to workers.

    Raises:
        ValueError: One of them cannot be pickled.
    """
    for reward in rewards:
        try:
            pickle.dumps(reward.function)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"reward_workers is set, but the reward function {reward.name!r} cannot be sent to another process "
                f"({error}); define it at the top level of a module, or set reward_workers=0"
            ) from error


def as_exception(error: BaseException) -> Exception:
    """Returns an exception that a future accepts and that stops no event loop, for anything that a function raises."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(": ".join(filter(None, (f"raised {type(error).__name__}", str(error)))))


# -- the main thread

REFUSAL = "signal only works in main thread"  # the text of CPython's ValueError

_watched = threading.local()
_set_handler = signal.signal


class NeedsMainThreadError(Exception):
    """A function that was called in another thread has tried to set a signal handler."""


class _SignalRequested(BaseException):
    """Leaves a function that calls `signal.signal`. No Exception, so that `except Exception` does not catch it."""


def _signal(signalnum: int, handler: Any) -> Any:
    if getattr(_watched, "active", False):
        _watched.requested = True
        raise _SignalRequested
    return _set_handler(signalnum, handler)


def call_noticing(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function in the current thread, which is not the main thread.

    Raises:
        NeedsMainThreadError: It has tried to set a signal handler, even if it caught the refusal.
    """
    signal.signal = _signal  # pyright: ignore[reportAttributeAccessIssue] - the same for all other threads
    _watched.active, _watched.requested = True, False
    try:
        returned = function(*args)
    except BaseException as error:
        if _watched.requested or REFUSAL in f"{error}{error.__cause__}{error.__context__}":
            raise NeedsMainThreadError from None
        raise
    finally:
        _watched.active = False
    if _watched.requested:
        raise NeedsMainThreadError
    return returned


class MainThread:
    """A queue of calls for the main thread.

    Attributes:
        needed_by: Names of the reward functions that have to be called here.
    """

    def __init__(self) -> None:
        self.needed_by: set[str] = set()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()

    async def call(self, function: Callable[[], Any]) -> Any:
        """Has the main thread call a function, for which there is no time limit."""
        future: Future[Any] = Future()
        self._jobs.put((function, future))
        return await asyncio.wrap_future(future)

    def run_until(self, calls: Sequence["Future[Any]"]) -> None:
        """Calls all waiting functions until these calls are done."""
        for call in calls:
            call.add_done_callback(lambda _: self._jobs.put(None))
        while not all(call.done() for call in calls):
            job = self._jobs.get()
            if job is not None and job[1].set_running_or_notify_cancel():
                _run(*job)


def _run(function: Callable[[], Any], future: "Future[Any]") -> None:
    try:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "the function sets a signal handler, which is possible in the main thread only, and training runs in "
                "another thread; set reward_workers, or have the function limit its time in another way"
            )
        future.set_result(function())
    except (KeyboardInterrupt, RolloutCancelled):  # meant for this thread, not for the function
        raise
    except BaseException as error:  # noqa: BLE001 - passed to the waiting thread
        future.set_exception(as_exception(error))
