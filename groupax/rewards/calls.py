"""One call of a reward function, in a thread, in a worker process or on an event loop. Imports no jax."""

import asyncio
import concurrent.futures
import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from groupax.rewards.contract import split_per_completion
from groupax.terminal.printable import short_repr

MAX_VALUES = 1_000_000  # returned by one call


@dataclass
class CallLog:
    """The values that a reward function logs during a call, in addition to the rewards that it returns."""

    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def log_extra(self, column: Any, values: Any) -> None:
        """Keeps one value per completion for the rollout log.

        Raises:
            TypeError: The column's name is not a text, or the values have no order.
        """
        check_name("log_extra", "column", column)
        if isinstance(values, (str, bytes, Mapping, Set)) or not hasattr(values, "__iter__"):
            raise TypeError(f"log_extra: values must be a list with one value per completion, got {short_repr(values)}")
        self.extra.setdefault(column, []).extend(itertools.islice(values, MAX_VALUES))

    def log_metric(self, name: Any, value: Any) -> None:
        """Keeps a number for the metrics of the step.

        Raises:
            TypeError: The name is not a text, or the value is not a number.
        """
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
    """Checks the name of what user code logs.

    Args:
        function: The function that was called with it.
        argument: Its argument with the name.
        name: The name.

    Raises:
        TypeError: It is not a text.
    """
    if not isinstance(name, str):
        raise TypeError(f"{function}: {argument} must be a text, got {type(name).__name__} {short_repr(name)}")


def call_sync(
    function: Callable[..., Any], arguments: Mapping[str, Any], num_completions: int | None
) -> tuple[Any, CallLog]:
    """Calls a sync reward function in the current thread or process.

    Args:
        function: A reward function.
        arguments: Its keyword arguments; lists have one entry per completion.
        num_completions: Number of completions if the function takes one at a time; None if one call takes all.

    Returns:
        The return value of the function, with arrays and generators as lists, and the values that it logged.
    """
    log = CallLog()
    arguments = log.bind(arguments)
    if num_completions is None:
        return _as_list(function(**arguments)), log
    return [function(**each) for each in split_per_completion(arguments, num_completions)], log


def call_in_worker(*call: Any) -> tuple[Any, CallLog]:
    """Calls `call_sync` in a worker process, and raises nothing but subclasses of Exception."""
    try:
        return call_sync(*call)
    except BaseException as error:
        raise as_exception(error) from error


async def call_async(
    function: Callable[..., Any], arguments: Mapping[str, Any], num_completions: int | None
) -> tuple[Any, CallLog]:
    """Calls an async reward function like `call_sync`, with all completions at once if it takes one at a time."""
    log = CallLog()
    arguments = log.bind(arguments)
    try:
        if num_completions is None:
            return _as_list(await function(**arguments)), log
        calls = (function(**each) for each in split_per_completion(arguments, num_completions))
        return list(await asyncio.gather(*calls)), log
    except BaseException as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise as_exception(error) from error  # SystemExit, for one, would stop the event loop


def as_exception(error: BaseException) -> Exception:
    """Returns an exception that a future accepts and that stops no event loop, for anything that a function raises."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(": ".join(filter(None, (f"raised {type(error).__name__}", str(error)))))


def start_event_loop(name: str) -> asyncio.AbstractEventLoop:
    """Returns an event loop that runs in a daemon thread. When it is stopped, its unfinished tasks are cancelled."""
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    loop = runner.get_loop()

    def run() -> None:
        with runner:
            loop.run_forever()

    threading.Thread(target=run, name=name, daemon=True).start()
    return loop


def start_thread(function: Callable[..., Any], *args: Any) -> "concurrent.futures.Future[Any]":
    """Calls a function in a daemon thread, which does not keep the interpreter from exiting."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            settle, outcome = future.set_result, function(*args)
        except BaseException as error:  # noqa: BLE001 - passed to the waiting thread
            settle, outcome = future.set_exception, as_exception(error)
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled in the meantime
            settle(outcome)

    threading.Thread(target=run, name="reward", daemon=True).start()
    return future


def _as_list(returned: Any) -> Any:
    """Returns arrays of other libraries, and iterables, as lists, so that they can be sent between processes.

    One that does not end gives more values than there can be completions, which `contract.checked_scores` refuses.
    """
    if hasattr(returned, "tolist"):
        return returned.tolist()
    if isinstance(returned, (str, bytes, Mapping)) or not hasattr(returned, "__iter__"):
        return returned
    return list(itertools.islice(returned, MAX_VALUES))
