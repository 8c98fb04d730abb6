"""Calls of reward functions with a concurrency limit, a timeout and retries, from an event loop in a daemon thread.

    submit ──► semaphore of the reward ──► attempt within the timeout ──► scores, or why there are none
                                             │  └─ failed: retried after a pause
                                             ▼
               the reward's event loop (async) | a worker process | a daemon thread | the main thread (signals)

A thread cannot be killed: one that hangs is abandoned. A process is killed. Python allows signal handlers, with which
math-verify limits its time, in the main thread only: a function that sets one in a daemon thread is called again in the
main thread, which calls the functions that wait for it in `MainThread.run_until`. Imports no jax.
"""

import asyncio
import contextlib
import functools
import itertools
import multiprocessing
import pickle
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from typing import Any

from groupax.core.settings.rollouts import RewardSettings
from groupax.core.terminal.printable import printable, short_repr
from groupax.core.types import Rollout, TrainerState
from groupax.parallel.preemption import RolloutCancelled
from groupax.rewards.contract import ENVIRONMENTS, Reward, Scores, arguments_for, checked_scores, no_scores
from groupax.tools.runner import answers_in_time, start_loop

BACKOFF_S = 0.5  # before the first retry; doubled before each further one
ASYNC_CONCURRENCY = 64  # calls of one async function at a time
MAX_VALUES = 1_000_000  # returned by one call
REFUSAL = "signal only works in main thread"  # the text of CPython's ValueError


@dataclass
class CallLog:
    """The values that a reward function logs during a call, in addition to the rewards that it returns."""

    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def log_extra(self, column: Any, values: Any) -> None:
        """Keeps one value per completion for the rollout log."""
        check_name("log_extra", "column", column)
        if isinstance(values, (str, bytes, Mapping, Set)) or not hasattr(values, "__iter__"):
            raise TypeError(f"log_extra: values must be a list with one value per completion, got {short_repr(values)}")
        self.extra.setdefault(column, []).extend(itertools.islice(values, MAX_VALUES))

    def log_metric(self, name: Any, value: Any) -> None:
        """Keeps a number for the metrics of the step."""
        check_name("log_metric", "name", name)
        try:
            if isinstance(value, (str, bytes)):  # which float reads
                raise TypeError
            self.metrics[name] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # of arrays of several libraries
            given = f"{type(value).__name__} {short_repr(value)}"
            raise TypeError(f"log_metric: the value of {name!r} must be a number, got {given}") from None

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments with this log's methods for those of them that are loggers."""
        loggers = {"log_extra": self.log_extra, "log_metric": self.log_metric}
        return {name: loggers.get(name, value) for name, value in arguments.items()}


def check_name(function: str, argument: str, name: Any) -> None:
    """Checks the name of what user code logs."""
    if not isinstance(name, str):
        raise TypeError(f"{function}: {argument} must be a text, got {type(name).__name__} {short_repr(name)}")


def call_sync(function: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[Any, CallLog]:
    """Calls a sync reward function in the current thread or process.

    Returns:
        The return value of the function, with arrays and generators as lists, and the values that it logged.
    """
    log = CallLog()
    return _as_list(function(**log.bind(arguments))), log


def call_in_worker(*call: Any) -> tuple[Any, CallLog]:
    """Calls `call_sync` in a worker process, and raises nothing but subclasses of Exception."""
    try:
        return call_sync(*call)
    except BaseException as error:
        raise as_exception(error) from error


async def call_async(function: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[Any, CallLog]:
    """Calls an async reward function like `call_sync`."""
    log = CallLog()
    try:
        return _as_list(await function(**log.bind(arguments))), log
    except BaseException as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise as_exception(error) from error  # SystemExit, for one, would stop the event loop


def start_thread(function: Callable[..., Any], *args: Any) -> "Future[Any]":
    """Calls a function in a daemon thread, which does not keep the interpreter from exiting."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            settle, outcome = future.set_result, function(*args)
        except BaseException as error:  # noqa: BLE001 - passed to the waiting thread
            settle, outcome = future.set_exception, as_exception(error)
        with contextlib.suppress(InvalidStateError):  # cancelled in the meantime
            settle(outcome)

    threading.Thread(target=run, name="reward", daemon=True).start()
    return future


def as_exception(error: BaseException) -> Exception:
    """Returns an exception that a future accepts and that stops no event loop, for anything that a function raises."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(": ".join(filter(None, (f"raised {type(error).__name__}", str(error)))))


def _as_list(returned: Any) -> Any:
    """Returns arrays of other libraries, and iterables, as lists, so that they can be sent between processes.

    One that does not end gives more values than there can be completions, which `contract.checked_scores` refuses.
    """
    if hasattr(returned, "tolist"):
        return returned.tolist()
    if isinstance(returned, (str, bytes, Mapping)) or not hasattr(returned, "__iter__"):
        return returned
    return list(itertools.islice(returned, MAX_VALUES))


# -- the main thread

_watched = threading.local()
_set_handler = signal.signal


class NeedsMainThreadError(Exception):
    """A function that was called in another thread has tried to set a signal handler."""


def call_noticing(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function in the current thread, which is not the main thread.

    Raises:
        NeedsMainThreadError: It has tried to set a signal handler, even if it caught the refusal.
    """
    signal.signal = _signal  # pyright: ignore[reportAttributeAccessIssue] - the same for all other threads
    _watched.requested = False
    try:
        returned = function(*args)
    except BaseException as error:
        if _watched.requested or REFUSAL in f"{error}{error.__cause__}{error.__context__}":
            raise NeedsMainThreadError from None
        raise
    if _watched.requested:
        raise NeedsMainThreadError
    return returned


def _signal(signalnum: int, handler: Any) -> Any:
    _watched.requested = True
    return _set_handler(signalnum, handler)  # raises a ValueError if this is not the main thread


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


# -- the calls


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


class Supervisor:
    """Calls reward functions so that none can stop the run."""

    def __init__(self, settings: RewardSettings, main_thread: MainThread, has_workers: bool) -> None:
        self.settings, self._main_thread = settings, main_thread
        self._semaphores: dict[str, asyncio.Semaphore] = {}
        self._free_workers = asyncio.Semaphore(settings.reward_workers)  # all functions share them
        self._workers: Any = None
        if has_workers:
            from pebble import ProcessPool

            context = multiprocessing.get_context("spawn")
            self._workers = ProcessPool(max_workers=settings.reward_workers, context=context)
        self._loop = start_loop("rewards")
        self._async_loops: dict[str, asyncio.AbstractEventLoop] = {}  # one each, as a function may block its own

    def submit(self, reward: Reward, rollouts: list[Rollout], state: TrainerState) -> "Future[Scores]":
        """Starts a call; the future's result is its scores, whatever happens in the call."""
        return asyncio.run_coroutine_threadsafe(self._call_with_retries(reward, rollouts, state), self._loop)

    def close(self) -> None:
        """Cancels all calls: worker processes are killed, threads abandoned."""
        if self._workers is not None:
            self._workers.stop()
            self._workers.join()
        for loop in (self._loop, *self._async_loops.values()):
            loop.call_soon_threadsafe(loop.stop)

    async def _call_with_retries(self, reward: Reward, rollouts: list[Rollout], state: TrainerState) -> Scores:
        settings, error = self.settings, ""
        limit = ASYNC_CONCURRENCY if reward.is_async else settings.reward_workers or settings.reward_concurrency
        async with self._semaphores.setdefault(reward.name, asyncio.Semaphore(limit)):
            for attempt in range(settings.reward_retries + 1):
                if attempt:
                    await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1))
                deadline = asyncio.timeout(None)
                try:
                    async with deadline:
                        returned, log = await self._call(reward, rollouts, state, deadline)
                    return _scores(reward, rollouts, returned, log)
                except Exception as raised:  # noqa: BLE001 - user code may raise anything; it is reported and counted
                    error = printable(_own_traceback(raised))
                    if deadline.expired():  # a function's own TimeoutError keeps its traceback
                        error = (
                            f"the reward function {reward.name!r} did not return within reward_timeout_s = "
                            f"{settings.reward_timeout_s} on {len(rollouts)} completions"
                        )
                        loop = self._async_loops.get(reward.name)
                        if loop and not await answers_in_time(loop) and self._async_loops.get(reward.name) is loop:
                            del self._async_loops[reward.name]  # blocked; further calls start a new one
        return no_scores(rollouts, error)

    async def _call(
        self, reward: Reward, rollouts: list[Rollout], state: TrainerState, deadline: asyncio.Timeout
    ) -> tuple[Any, CallLog]:
        """Calls the function where it belongs. Its time starts with the call, not while it waits for its turn."""

        def start_clock() -> None:
            if self.settings.reward_timeout_s is not None:
                deadline.reschedule(asyncio.get_running_loop().time() + self.settings.reward_timeout_s)

        arguments = arguments_for(reward, rollouts, state, {"log_extra": None, "log_metric": None})
        if self._workers is not None and not reward.is_async:  # environments stay in this process
            arguments.pop(ENVIRONMENTS, None)
        call = reward.function, arguments
        if reward.is_async:
            start_clock()
            if reward.name not in self._async_loops:
                self._async_loops[reward.name] = start_loop(reward.name)
            loop = self._async_loops[reward.name]
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call_async(*call), loop))
        if self._workers is not None:
            async with self._free_workers:
                start_clock()
                return await asyncio.wrap_future(self._workers.schedule(call_in_worker, args=call))
        if reward.name not in self._main_thread.needed_by:
            start_clock()
            try:
                return await asyncio.wrap_future(start_thread(call_noticing, call_sync, *call))
            except NeedsMainThreadError:
                self._main_thread.needed_by.add(reward.name)
                deadline.reschedule(None)
        return await self._main_thread.call(functools.partial(call_sync, *call))


def _scores(reward: Reward, rollouts: list[Rollout], returned: Any, log: CallLog) -> Scores:
    try:
        scores = checked_scores(reward.name, returned, rollouts)
    except Exception as error:  # noqa: BLE001 - the values are user code too; a retry would return the same
        text = str(error) if isinstance(error, ValueError) else traceback.format_exc().rstrip()
        return no_scores(rollouts, printable(text))
    return replace(scores, extra=log.extra, metrics=log.metrics)


def _own_traceback(error: BaseException) -> str:
    """Returns the traceback of an error from the user's function on, without the frames that lead to it."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_name not in (call_sync.__name__, call_async.__name__):
        frame = frame.tb_next
    while frame is not None and frame.tb_frame.f_globals.get("__name__") == __name__:
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame or error.__traceback__)).rstrip()
