"""Runs the calls of many episodes at once, and no tool can stop the run. Imports no jax.

    start(calls, on_done) ──► control loop: order, limits of time and number
                                ├──► a thread per call of a sync function
                                └──► the loop of async functions
    on_done(results)      ◄── in the order of the calls

The control loop never runs a tool, so that a tool that hangs delays nothing but itself.
"""

import asyncio
import contextlib
import inspect
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from groupax.data.tool_arguments import check_arguments
from groupax.terminal.printable import one_line
from groupax.tools.calls import ToolCall
from groupax.tools.results import MIN_RESULT_BYTES, ToolResult, as_step, error_result, message_of
from groupax.tools.threads import AsyncThread, Outcome, start_loop, start_thread
from groupax.tools.tool import Step, Tool

logger = logging.getLogger(__name__)
CLOSE_S = 5.0  # in which the callbacks of calls that are ended must return
CLOSED = "the run has ended"
ENDED = "not called, since an earlier call of the turn has ended the episode"
TIMED_OUT = "TimeoutError"  # kind of the outcome of a call that took too long
Calls = Sequence[tuple[Tool | None, ToolCall]]


class ToolRunner:
    """Runs calls of tools. As a context it is closed at the end.

    Args:
        num_workers: Number of calls that run at the same time.
        timeout_s: Time limit of a call in seconds, unless its tool has its own. A thread that exceeds it is abandoned,
            since Python cannot end it; another one takes its place.
        max_result_bytes: Longest result in UTF-8, to which it is cut in the middle.
        hung: Names of functions that were warned of since they hang; updated.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self, num_workers: int, timeout_s: int | float, max_result_bytes: int, hung: set[str] | None = None
    ) -> None:
        for name, value, low in (
            ("num_workers", num_workers, 1),
            ("max_result_bytes", max_result_bytes, MIN_RESULT_BYTES),
        ):
            if value < low:
                raise ValueError(f"{name} must be at least {low}, got {value}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self.timeout_s, self.max_result_bytes = timeout_s, max_result_bytes
        self._slots = asyncio.Semaphore(num_workers)
        self._control = start_loop("tools")
        self._async_thread = AsyncThread()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._hung: set[str] = set() if hung is None else hung

    def __enter__(self) -> "ToolRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(
        self,
        calls: Calls,
        on_done: Callable[[list[ToolResult]], None],
        known: Sequence[ToolResult | None] = (),
        on_result: Callable[[int, ToolResult], None] | None = None,
    ) -> None:
        """Starts calls and returns at once. Nothing that a tool does raises here.

        The calls run in their order, or at the same time if all of their tools are `parallel`. In order, none is made
        after one that has ended the episode.

        Args:
            calls: Calls with their tools; None if there is no such tool.
            on_done: Called once, in a thread of the runner, with the results in the order of the calls.
            known: Results of calls that are not to be made; None for the others.
            on_result: Called with the index and the result of each call that was made, as soon as it has ended.

        Raises:
            RuntimeError: The runner is closed.
        """
        self._start(self._run(list(calls), on_done, known, on_result))

    def call(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        on_done: Callable[[Outcome], None],
        finish: Callable[[Any], Any] | None = None,
    ) -> None:
        """Starts a call of any function, whose value or error is not changed into a text.

        Args:
            name: Name of the function in a warning.
            function: A function, or a coroutine function.
            arguments: Its arguments by name.
            on_done: Called once, in a thread of the runner, with the value or the error.
            finish: Converts what the function returns; an error of it is one of the call.

        Raises:
            RuntimeError: The runner is closed.
        """
        convert = finish or _unchanged

        async def run() -> None:
            outcome = Outcome(message=CLOSED, kind="RuntimeError")
            with contextlib.suppress(asyncio.CancelledError):
                async with self._slots:
                    is_async = inspect.iscoroutinefunction(function)
                    outcome = await self._within(self.timeout_s, name, function, arguments, convert, is_async)
            on_done(outcome)

        self._start(run())

    def close(self) -> None:
        """Ends all calls, whose results say so, and waits for none of them."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        finished = threading.Event()
        self._control.call_soon_threadsafe(lambda: self._control.create_task(self._end(finished)))
        finished.wait(0 if self._is_in_control() else CLOSE_S)

    def _is_in_control(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._control
        except RuntimeError:
            return False

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        with self._lock:
            if self._is_closed:
                work.close()
                raise RuntimeError("the tool runner is closed; start calls inside of its context")
            self._control.call_soon_threadsafe(self._begin, work)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._control.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self, finished: threading.Event) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._async_thread.close()
        finished.set()
        self._control.stop()

    async def _run(
        self,
        calls: list[tuple[Tool | None, ToolCall]],
        on_done: Callable[[list[ToolResult]], None],
        known: Sequence[ToolResult | None],
        on_result: Callable[[int, ToolResult], None] | None,
    ) -> None:
        results = [*known] or [None] * len(calls)

        async def run(index: int) -> None:
            if results[index] is None:
                result = results[index] = await self._call(*calls[index])
                if on_result is not None:
                    on_result(index, result)

        with contextlib.suppress(asyncio.CancelledError):
            if all(tool is None or tool.parallel for tool, _ in calls):
                await asyncio.gather(*map(run, range(len(calls))))
            else:
                for index in range(len(calls)):
                    before = [result for result in results[:index] if result is not None]
                    if any(result.done or result.is_infrastructure for result in before):
                        results[index] = error_result(ENDED, 0.0, self.max_result_bytes)
                    else:
                        await run(index)
        closed = error_result(CLOSED, 0.0, self.max_result_bytes)
        on_done([closed if result is None else result for result in results])

    async def _call(self, tool: Tool | None, call: ToolCall) -> ToolResult:
        fault = call.fault or (f"Tool {call.name:.80} not found." if tool is None else "")
        if tool is None or fault:
            return error_result(fault, 0.0, self.max_result_bytes)
        try:
            arguments = check_arguments(tool.schema, call.arguments, call.is_text)
        except Exception as error:  # noqa: BLE001 - of a schema that is not groupax's too
            return error_result(message_of(error), 0.0, self.max_result_bytes)
        async with self._slots:
            start = time.perf_counter()
            outcome = await self._outcome(tool, arguments)
            seconds = time.perf_counter() - start
        if isinstance(outcome.value, Step):
            step = outcome.value
            return ToolResult(step.observation, seconds, reward=step.reward, done=step.done)
        kind = "" if outcome.kind == TIMED_OUT else outcome.kind
        result = error_result(outcome.message, seconds, self.max_result_bytes, kind)
        return replace(result, is_infrastructure=outcome.is_infrastructure)

    async def _outcome(self, tool: Tool, arguments: dict[str, Any]) -> Outcome:
        """Returns what becomes of a call within its time limit."""
        timeout_s = self.timeout_s if tool.timeout_s is None else tool.timeout_s

        def finish(returned: Any) -> Step:
            return as_step(returned, self.max_result_bytes)

        return await self._within(timeout_s, tool.name, tool.function, arguments, finish, tool.is_async)

    async def _within(
        self,
        timeout_s: int | float,
        name: str,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        finish: Callable[[Any], Any],
        is_async: bool,
    ) -> Outcome:
        start = self._async_thread.submit if is_async else start_thread
        try:
            begun = start(function, arguments, finish)
        except RuntimeError as error:  # the system gives no more threads, after many calls that hang
            return Outcome(message=str(error), kind="RuntimeError", is_infrastructure=True)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(begun), timeout_s)
        except TimeoutError:
            if not is_async or not await self._async_thread.is_alive():
                self._warn_of_hanging(name, timeout_s)
            return Outcome(message=f"timed out after {timeout_s:g} s", kind=TIMED_OUT)

    def _warn_of_hanging(self, name: str, timeout_s: int | float) -> None:
        if name in self._hung:
            return
        self._hung.add(name)
        logger.warning(
            "the tool %s did not end within %g s; its thread is abandoned and may still use memory and processor time. "
            "Have the tool limit its own time, or set its timeout_s",
            one_line(name),
            timeout_s,
        )


def _unchanged(value: Any) -> Any:
    return value
