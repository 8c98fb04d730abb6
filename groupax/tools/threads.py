"""Threads and an event loop that call tools, and that no tool can end or block for others. Imports no jax."""

import asyncio
import concurrent.futures
import contextlib
import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from groupax.errors import InfrastructureError, RunError
from groupax.tools.results import message_of

GRACE_S = 1.0  # in which the event loop of tools must answer


@dataclass(frozen=True)
class Outcome:
    """The end of a call: a value, or an error.

    Attributes:
        value: The finished value; None if there is an error.
        message: Message of the error.
        kind: Class of the exception.
        is_infrastructure: Whether it is an `InfrastructureError`, or a `RunError`, which ends the run.
    """

    value: Any = None
    message: str = ""
    kind: str = ""
    is_infrastructure: bool = False


Function = Callable[..., Any]
Finish = Callable[[Any], Any]


def start_thread(
    function: Function, arguments: Mapping[str, Any], finish: Finish
) -> "concurrent.futures.Future[Outcome]":
    """Calls a function in a thread of its own, which does not keep the interpreter from exiting.

    Args:
        function: Function of a tool.
        arguments: Its arguments by name.
        finish: Converts what it returns, in the same thread.
    """
    future: concurrent.futures.Future[Outcome] = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome = Outcome(finish(_value(function(**arguments))))
        except BaseException as error:  # noqa: BLE001 - becomes the result of the call
            outcome = _failure(error)
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # its time is over
            future.set_result(outcome)

    threading.Thread(target=run, name="tool", daemon=True).start()
    return future


class AsyncThread:
    """A thread with the event loop of async tools. If a tool blocks the loop, another one takes its place."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(
        self, function: Function, arguments: Mapping[str, Any], finish: Finish
    ) -> "concurrent.futures.Future[Outcome]":
        """Calls a coroutine function on the loop; see `start_thread`. Cancelling the future cancels the coroutine."""
        if self._loop is None:
            self._loop = start_loop("async tools")
        return asyncio.run_coroutine_threadsafe(_await(function, arguments, finish), self._loop)

    async def is_alive(self) -> bool:
        """Returns whether the loop answers in time. If not, it is abandoned."""
        loop = self._loop
        if loop is None:
            return True
        answer: concurrent.futures.Future[None] = concurrent.futures.Future()
        loop.call_soon_threadsafe(_answer, answer)
        try:
            await asyncio.wait_for(asyncio.wrap_future(answer), GRACE_S)
        except TimeoutError:
            if self._loop is loop:
                self._loop = None
            return False
        return True

    def close(self) -> None:
        """Stops the loop, which cancels its coroutines, and does not wait for it."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)


def start_loop(name: str) -> asyncio.AbstractEventLoop:
    """Returns an event loop that runs in a daemon thread. When it is stopped, its unfinished tasks are cancelled."""
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    loop = runner.get_loop()

    def run() -> None:
        with runner:
            while True:
                try:
                    return loop.run_forever()
                except (SystemExit, KeyboardInterrupt):  # of a task that a tool has started
                    continue

    threading.Thread(target=run, name=name, daemon=True).start()
    return loop


async def _await(function: Function, arguments: Mapping[str, Any], finish: Finish) -> Outcome:
    try:
        return Outcome(finish(_value(await function(**arguments))))
    except BaseException as error:  # SystemExit, for one, would stop the event loop
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        return _failure(error)


def _answer(future: "concurrent.futures.Future[None]") -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # too late
        future.set_result(None)


def _value(returned: Any) -> Any:
    """Returns what a function has returned.

    Raises:
        TypeError: It is something that would still have to be run.
    """
    if inspect.iscoroutine(returned):
        returned.close()
        raise TypeError("the function returns a coroutine; define it by async def")
    if inspect.isgenerator(returned) or inspect.isasyncgen(returned):
        raise TypeError("the function is a generator; let it return its result instead of yielding")
    return returned


def _failure(error: BaseException) -> Outcome:
    is_infrastructure = isinstance(error, (InfrastructureError, RunError))
    return Outcome(message=message_of(error), kind=type(error).__name__, is_infrastructure=is_infrastructure)
