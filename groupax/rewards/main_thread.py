"""Runs reward functions that need signals, which Python gives to nothing but the main thread, there.

    a reward's thread:  function asks for a signal ──► SignalWanted ──► the call is begun again in the main thread
    main thread:        run_until(calls are done): takes what waits; a second thread may interrupt it when time is over

math-verify's time limits are such a wish. Imports no jax.
"""

import asyncio
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from groupax.parallel.preemption import RolloutCancelled
from groupax.rewards.calls import as_exception

INTERRUPT = signal.SIGVTALRM  # hardly used by anyone; SIGALRM is what rewards themselves use
REFUSED = "signal only works in main thread"  # the words of CPython's ValueError

_noticing = threading.local()
_set_handler = signal.signal
_hook_lock = threading.Lock()
_num_hooks = 0


class SignalWanted(BaseException):
    """A function in a thread asked for a signal. No Exception, so that `except Exception` does not swallow the wish."""


class Interrupted(BaseException):
    """The time of a function in the main thread is over."""


def hook() -> None:
    """Notice from now on when a thread that is `noticing` asks for a signal handler; undone by `unhook`."""
    global _num_hooks
    with _hook_lock:
        _num_hooks += 1
        signal.signal = _signal  # pyright: ignore[reportAttributeAccessIssue]


def unhook() -> None:
    """Undo one `hook`."""
    global _num_hooks
    with _hook_lock:
        _num_hooks -= 1
        if not _num_hooks:
            signal.signal = _set_handler


def _signal(signalnum: int, handler: Any) -> Any:
    if getattr(_noticing, "active", False):
        _noticing.wanted = True
        raise SignalWanted
    return _set_handler(signalnum, handler)


def call_noticing(function: Callable[[], Any]) -> Any:
    """Call the function in this thread.

    Raises:
        SignalWanted: it asked for a signal, whatever it made of the answer.
    """
    _noticing.active, _noticing.wanted = True, False
    try:
        returned = function()
    except Exception as error:
        if _noticing.wanted or _was_refused(error):
            raise SignalWanted from None
        raise
    finally:
        _noticing.active = False
    if _noticing.wanted:
        raise SignalWanted
    return returned


def _was_refused(error: BaseException | None) -> bool:
    while error is not None:
        if REFUSED in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@dataclass
class _Job:
    function: Callable[[], Any]
    begun: Callable[[], object]
    future: "Future[Any]" = field(default_factory=Future)


class MainThread:
    """What waits for the main thread, and a way to interrupt it."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._current: _Job | None = None
        self._handler_before: Any = None

    async def call(self, function: Callable[[], Any], begun: Callable[[], None]) -> Any:
        """Have the main thread call the function; cancelling interrupts it.

        Args:
            function: what to call.
            begun: called in the current loop when its turn has come.
        """
        loop = asyncio.get_running_loop()
        job = _Job(function, lambda: loop.call_soon_threadsafe(begun))
        self._jobs.put(job)
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            if self._current is job:
                signal.pthread_kill(threading.main_thread().ident or 0, INTERRUPT)
            raise

    def run_until(self, calls: Sequence["Future[Any]"]) -> None:
        """Call what waits until all these calls are done; what others wait for is called too."""
        for call in calls:
            call.add_done_callback(lambda _: self._jobs.put(None))
        while not all(call.done() for call in calls):
            job = self._jobs.get()
            if job is not None:
                self._run(job)

    def _run(self, job: _Job) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        if not _in_main_thread():
            job.future.set_exception(
                RuntimeError(
                    "the function asks for a signal, which only the main thread can have, and training runs in another "
                    "thread; set reward_workers, or have it limit its time in another way"
                )
            )
            return
        if self._handler_before is None:
            self._handler_before = _set_handler(INTERRUPT, self._interrupt) or signal.SIG_DFL
        try:
            try:
                self._current = job
                job.begun()
                outcome: Any = job.function()
            finally:
                self._current = None
        except Interrupted:  # also if it came at the last moment
            self._current = None
            job.future.set_exception(TimeoutError("interrupted in the main thread"))
        except (KeyboardInterrupt, RolloutCancelled):  # of this thread, and not of the function
            raise
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            job.future.set_exception(as_exception(error))
        else:
            job.future.set_result(outcome)

    def _interrupt(self, *_: object) -> None:
        if self._current is not None:
            raise Interrupted

    def close(self) -> None:
        """Give the signal back. What still waits is not called."""
        if self._handler_before is not None and _in_main_thread():
            _set_handler(INTERRUPT, self._handler_before)
            self._handler_before = None


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
