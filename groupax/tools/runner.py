"""Runs the calls of many episodes at once, and no tool can stop the run. Imports no jax.

    call(function, on_done) ──► control loop: limits of time and number
                                  ├──► a thread per call of a sync function
                                  └──► the loop of async functions
    on_done(outcome)        ◄── in a thread of the runner

The control loop never runs a tool, so that a tool that hangs delays nothing but itself.
"""

import asyncio
import concurrent.futures
import contextlib
import inspect
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from groupax.core.errors import InfrastructureError, RunError
from groupax.core.terminal.printable import one_line
from groupax.data.tool_arguments import check_arguments
from groupax.tools.calls import ToolCall
from groupax.tools.results import MIN_RESULT_BYTES, ToolResult, as_step, error_result, message_of
from groupax.tools.tool import Step, Tool

logger = logging.getLogger(__name__)
CLOSE_S = 5.0  # in which the callbacks of calls that are ended must return
CLOSED = "the run has ended"
TIMED_OUT = "TimeoutError"  # kind of the outcome of a call that took too long
GRACE_S = 1.0  # in which the event loop of tools or rewards must answer
Function = Callable[..., Any]
Finish = Callable[[Any], Any]


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


Work = Callable[[], Coroutine[Any, Any, Outcome]]


class ToolRunner:
    """Runs calls of tools. As a context it is closed at the end.

    Args:
        num_workers: Number of calls that run at the same time.
        timeout_s: Time limit of a call in seconds, unless its tool has its own. A thread that exceeds it is abandoned,
            since Python cannot end it; another one takes its place.
        max_result_bytes: Longest result in UTF-8, to which it is cut in the middle; at least `MIN_RESULT_BYTES`.
        hung: Names of functions that were warned of since they hang; updated.
    """

    def __init__(
        self, num_workers: int, timeout_s: int | float, max_result_bytes: int, hung: set[str] | None = None
    ) -> None:
        self.timeout_s, self.max_result_bytes = timeout_s, max(max_result_bytes, MIN_RESULT_BYTES)
        self._slots = asyncio.Semaphore(num_workers)
        self._control = start_loop("tools")
        self._async_loop: asyncio.AbstractEventLoop | None = None  # of coroutine functions
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._hung: set[str] = set() if hung is None else hung

    def __enter__(self) -> "ToolRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call_tool(self, tool: Tool | None, call: ToolCall, on_done: Callable[[ToolResult], None]) -> None:
        """Starts a call of a tool, and returns at once. Nothing that a tool does raises here.

        Args:
            tool: The tool; None for a call whose fault says that there is none of that name.
            call: The call.
            on_done: Called once, in a thread of the runner, with the result.

        Raises:
            RuntimeError: The runner is closed.
        """

        async def run() -> None:
            result = error_result(CLOSED, 0.0, self.max_result_bytes)
            with contextlib.suppress(asyncio.CancelledError):
                result = await self._call(tool, call)
            on_done(result)

        self._start(run())

    def call(
        self,
        name: str,
        function: Function,
        arguments: dict[str, Any],
        on_done: Callable[[Outcome], None],
        finish: Finish,
    ) -> None:
        """Starts a call of any function, whose value or error is not changed into a text.

        Raises:
            RuntimeError: The runner is closed.
        """

        async def run() -> None:
            outcome = Outcome(message=CLOSED, kind="RuntimeError")
            with contextlib.suppress(asyncio.CancelledError):
                async with self._slots:
                    is_async = inspect.iscoroutinefunction(function)
                    work = partial(_finished, function, arguments, finish, is_async)
                    outcome = await self._within(self.timeout_s, name, is_async, work)
            on_done(outcome)

        self._start(run())

    def close(self) -> None:
        """Ends all calls, whose results say so, and waits for none of them."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        finished = threading.Event()

        async def end() -> None:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._async_loop is not None:  # its coroutines are cancelled
                self._async_loop.call_soon_threadsafe(self._async_loop.stop)
            finished.set()
            self._control.stop()

        self._control.call_soon_threadsafe(lambda: self._control.create_task(end()))
        with contextlib.suppress(RuntimeError):
            if asyncio.get_running_loop() is self._control:  # in a callback, which must not wait for itself
                return
        finished.wait(CLOSE_S)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        def begin() -> None:
            task = self._control.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        with self._lock:
            if self._is_closed:
                work.close()
                raise RuntimeError("the tool runner is closed; start calls inside of its context")
            self._control.call_soon_threadsafe(begin)

    async def _call(self, tool: Tool | None, call: ToolCall) -> ToolResult:
        if tool is None or call.fault:
            return error_result(call.fault, 0.0, self.max_result_bytes)
        try:
            arguments = check_arguments(tool.schema, call.arguments, call.is_text)
        except Exception as error:  # noqa: BLE001 - of a schema that is not groupax's too
            return error_result(message_of(error), 0.0, self.max_result_bytes)
        timeout_s = self.timeout_s if tool.timeout_s is None else tool.timeout_s
        finish = partial(as_step, max_bytes=self.max_result_bytes)
        work = partial(_finished, tool.function, arguments, finish, tool.is_async)
        async with self._slots:
            start = time.perf_counter()
            outcome = await self._within(timeout_s, tool.name, tool.is_async, work)
            seconds = time.perf_counter() - start
        if isinstance(outcome.value, Step):
            step = outcome.value
            return ToolResult(step.observation, seconds, reward=step.reward, done=step.done)
        kind = "" if outcome.kind == TIMED_OUT else outcome.kind
        result = error_result(outcome.message, seconds, self.max_result_bytes, kind)
        return replace(result, is_infrastructure=outcome.is_infrastructure)

    async def _within(self, timeout_s: int | float, name: str, is_async: bool, work: Work) -> Outcome:
        """Returns the outcome of a call, in a thread of its own or on the loop of coroutine functions."""
        if is_async and self._async_loop is None:
            self._async_loop = start_loop("async tools")
        loop = self._async_loop if is_async else None
        try:
            begun = _in_thread(work) if loop is None else asyncio.run_coroutine_threadsafe(work(), loop)
        except RuntimeError as error:  # the system gives no more threads, after many calls that hang
            return Outcome(message=str(error), kind="RuntimeError", is_infrastructure=True)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(begun), timeout_s)
        except TimeoutError:
            if loop is None or not await answers_in_time(loop):
                if self._async_loop is loop:
                    self._async_loop = None  # another one takes its place
                self._warn_of_hanging(name, timeout_s)
            return Outcome(message=f"timed out after {timeout_s:g} s", kind=TIMED_OUT)

    def _warn_of_hanging(self, name: str, timeout_s: int | float) -> None:
        if name not in self._hung:
            self._hung.add(name)
            logger.warning(
                "the tool %s did not end within %g s; its thread is abandoned and may still use memory and processor "
                "time. Have the tool limit its own time, or set its timeout_s",
                one_line(name),
                timeout_s,
            )


async def answers_in_time(loop: asyncio.AbstractEventLoop) -> bool:
    """Returns whether a loop answers in time; one that does not is blocked."""
    answer = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
    try:
        await asyncio.wait_for(asyncio.wrap_future(answer), GRACE_S)
    except TimeoutError:
        return False
    return True


def start_loop(name: str) -> asyncio.AbstractEventLoop:
    """Returns an event loop that runs in a daemon thread. When it is stopped, its unfinished tasks are cancelled."""
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    loop = runner.get_loop()

    def run() -> None:
        with runner:
            while True:
                try:
                    return loop.run_forever()
                except (SystemExit, KeyboardInterrupt):  # of a task that the code of a user has started
                    continue

    threading.Thread(target=run, name=name, daemon=True).start()
    return loop


def _in_thread(work: Work) -> "concurrent.futures.Future[Outcome]":
    """Runs the coroutine of a call, which never waits, in a thread that does not keep the interpreter from exiting."""
    future: concurrent.futures.Future[Outcome] = concurrent.futures.Future()

    def run() -> None:
        try:
            work().send(None)
        except StopIteration as end:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # its time is over
                future.set_result(end.value)

    threading.Thread(target=run, name="tool", daemon=True).start()
    return future


async def _finished(function: Function, arguments: Mapping[str, Any], finish: Finish, is_async: bool) -> Outcome:
    """Calls a function and returns its converted value or its error; it waits for coroutine functions alone."""
    try:
        returned = function(**arguments)
        if is_async:
            returned = await returned
        if inspect.iscoroutine(returned):
            returned.close()
            raise TypeError("the function returns a coroutine; define it by async def")
        if inspect.isgenerator(returned) or inspect.isasyncgen(returned):
            raise TypeError("the function is a generator; let it return its result instead of yielding")
        return Outcome(finish(returned))
    except BaseException as error:  # SystemExit, for one, would stop the event loop
        task = asyncio.current_task() if is_async else None
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        is_infrastructure = isinstance(error, (InfrastructureError, RunError))
        return Outcome(message=message_of(error), kind=type(error).__name__, is_infrastructure=is_infrastructure)
