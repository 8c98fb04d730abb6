"""Places where sync reward functions run other than threads: processes, tasks of a Ray cluster, the main thread.

Python allows signal handlers, with which math-verify limits its time, in the main thread only:

    daemon thread:  the function calls signal.signal ──► NeedsMainThreadError ──► it is called again in the main thread
    main thread:    run_until(calls are done) calls the functions that wait; a signal interrupts one that times out

Imports no jax.
"""

import asyncio
import contextlib
import functools
import multiprocessing
import pickle
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from groupax.errors import require
from groupax.parallel.preemption import RolloutCancelled, is_raised
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


def as_exception(error: BaseException) -> Exception:
    """Returns an exception that a future accepts and that stops no event loop, for anything that a function raises."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(": ".join(filter(None, (f"raised {type(error).__name__}", str(error)))))


# -- the main thread

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
