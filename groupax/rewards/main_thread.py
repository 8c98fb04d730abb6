"""Reward functions that set signal handlers, which Python allows in the main thread only.

    daemon thread:  the function calls signal.signal ──► NeedsMainThreadError ──► it is called again in the main thread
    main thread:    run_until(calls are done) calls the functions that wait; a signal interrupts one that times out

The time limits of math-verify are an example. Imports no jax.
"""

import asyncio
import contextlib
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from groupax.parallel.preemption import RolloutCancelled, is_raised
from groupax.rewards.calls import as_exception

INTERRUPT = signal.SIGVTALRM  # rarely used otherwise; reward functions themselves use SIGALRM
AGAIN_S = 0.2  # between interruptions of a function that does not end
REFUSAL = "signal only works in main thread"  # the text of CPython's ValueError

_watched = threading.local()
_set_handler = signal.signal
_lock = threading.Lock()
_num_watching = 0


class NeedsMainThreadError(Exception):
    """A function that was called in another thread has tried to set a signal handler."""


class _SignalRequested(BaseException):
    """Leaves a function that calls `signal.signal`. No Exception, so that `except Exception` does not catch it."""


class _Interrupted(BaseException):
    """Leaves a function in the main thread whose time is over."""


@contextlib.contextmanager
def signal_requests_noticed() -> Iterator[None]:
    """Replaces `signal.signal`, in this context, by one that `call_noticing` relies on."""
    global _num_watching
    with _lock:
        _num_watching += 1
        signal.signal = _signal  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        with _lock:
            _num_watching -= 1
            if not _num_watching:
                signal.signal = _set_handler


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
    _watched.active, _watched.requested = True, False
    try:
        returned = function(*args)
    except BaseException as error:
        if _watched.requested or _was_refused(error):
            raise NeedsMainThreadError from None
        raise
    finally:
        _watched.active = False
    if _watched.requested:
        raise NeedsMainThreadError
    return returned


def _was_refused(error: BaseException | None) -> bool:
    while error is not None:
        if REFUSAL in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@dataclass
class _Job:
    function: Callable[[], Any]
    on_start: Callable[[], object]
    future: "Future[Any]" = field(default_factory=Future)


class MainThread:
    """A queue of calls for the main thread, the current one of which can be interrupted.

    Attributes:
        needed_by: Names of the reward functions that have to be called here.
    """

    def __init__(self) -> None:
        self.needed_by: set[str] = set()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._current: _Job | None = None
        self._previous_handler: Any = None

    async def call(self, function: Callable[[], Any], on_start: Callable[[], None]) -> Any:
        """Has the main thread call a function. Cancelling interrupts it.

        Args:
            function: The function to call.
            on_start: Called on the current event loop when the main thread starts the function.
        """
        loop = asyncio.get_running_loop()
        job = _Job(function, lambda: loop.call_soon_threadsafe(on_start))
        self._jobs.put(job)
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            while self._current is job:  # a destructor or the function's own `except` may drop what is raised
                signal.pthread_kill(threading.main_thread().ident or 0, INTERRUPT)
                await asyncio.sleep(AGAIN_S)
            raise

    def run_until(self, calls: Sequence["Future[Any]"]) -> None:
        """Calls all waiting functions until these calls are done."""
        for call in calls:
            call.add_done_callback(lambda _: self._jobs.put(None))
        while not all(call.done() for call in calls):
            job = self._jobs.get()
            if job is not None:
                self._run(job)

    def close(self) -> None:
        """Restores the signal's handler. Functions that still wait are not called."""
        if self._previous_handler is not None and _is_main_thread():
            _set_handler(INTERRUPT, self._previous_handler)
            self._previous_handler = None

    def _run(self, job: _Job) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            result = self._interruptible(job)
        except _Interrupted:  # also if it came at the last moment
            self._current = None
            job.future.set_exception(TimeoutError("interrupted in the main thread"))
        except (KeyboardInterrupt, RolloutCancelled):  # meant for this thread, not for the function
            raise
        except BaseException as error:  # noqa: BLE001 - passed to the waiting thread
            job.future.set_exception(as_exception(error))
        else:
            job.future.set_result(result)

    def _interruptible(self, job: _Job) -> Any:
        if not _is_main_thread():
            raise RuntimeError(
                "the function sets a signal handler, which is possible in the main thread only, and training runs in "
                "another thread; set reward_workers, or have the function limit its time in another way"
            )
        if self._previous_handler is None:
            self._previous_handler = _set_handler(INTERRUPT, self._interrupt) or signal.SIG_DFL
        try:
            self._current = job
            job.on_start()
            return job.function()
        finally:
            self._current = None

    def _interrupt(self, *_: object) -> None:
        if self._current is not None and not is_raised(_Interrupted):
            raise _Interrupted


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
