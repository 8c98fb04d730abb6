"""Calls reward functions with a concurrency limit, a timeout and retries, from an event loop in a daemon thread.

    submit ──► semaphore of the reward ──► attempt within the timeout ──► scores, or why there are none
                                             │  └─ failed: retried after a pause
                                             ▼
               the reward's event loop (async) | a worker process | a daemon thread | the main thread (signals)

A thread cannot be killed: one that hangs is abandoned. A process is killed. Imports no jax.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import traceback
from dataclasses import replace
from typing import Any

from groupax.rewards import calls
from groupax.rewards.calls import CallLog, call_async, call_in_worker, call_sync, start_event_loop, start_thread
from groupax.rewards.contract import ENVIRONMENTS, Reward, Scores, arguments_for, checked_scores, no_scores
from groupax.rewards.main_thread import MainThread, NeedsMainThreadError, call_noticing, signal_requests_noticed
from groupax.rewards.workers import start_workers
from groupax.settings.rollouts import RewardSettings
from groupax.terminal.printable import printable
from groupax.types import Rollout, TrainerState

BACKOFF_S = 0.5  # before the first retry; doubled before each further one
ASYNC_CONCURRENCY = 64  # calls of one async function at a time
PING_S = 1.0  # an event loop that does not respond for this long is blocked


class Supervisor:
    """Calls reward functions so that none can stop the run.

    Args:
        settings: How to call them.
        main_thread: Calls the functions that set signal handlers.
        has_workers: Whether to start worker processes.
    """

    def __init__(self, settings: RewardSettings, main_thread: MainThread, has_workers: bool) -> None:
        self.settings, self._main_thread = settings, main_thread
        self._semaphores: dict[str, asyncio.Semaphore] = {}
        self._free_workers = asyncio.Semaphore(settings.reward_workers)  # all functions share them
        self._async_loops: dict[str, asyncio.AbstractEventLoop] = {}
        with contextlib.ExitStack() as stack:
            self._workers = start_workers(settings.reward_workers_on, settings.reward_workers) if has_workers else None
            self._loop = start_event_loop("rewards")
            stack.callback(self._stop_loops)
            stack.enter_context(signal_requests_noticed())
            if self._workers is not None:
                stack.callback(self._workers.stop)
            self._resources = stack.pop_all()

    def submit(
        self, reward: Reward, rollouts: list[Rollout], state: TrainerState
    ) -> "concurrent.futures.Future[Scores]":
        """Starts a call; the future's result is its scores, whatever happens in the call."""
        return asyncio.run_coroutine_threadsafe(self._call_with_retries(reward, rollouts, state), self._loop)

    def close(self) -> None:
        """Cancels all calls: worker processes are killed, threads abandoned."""
        self._resources.close()

    def _stop_loops(self) -> None:
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
                        await self._replace_blocked_loop(reward.name)
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
        call = reward.function, arguments, len(rollouts) if reward.per_completion else None
        if reward.is_async:
            start_clock()
            loop = self._async_loops.get(reward.name) or start_event_loop(reward.name)
            self._async_loops[reward.name] = loop
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call_async(*call), loop))
        if self._workers is not None:
            async with self._free_workers:
                start_clock()
                return await asyncio.wrap_future(self._workers.schedule(call_in_worker, *call))
        if reward.name not in self._main_thread.needed_by:
            start_clock()
            try:
                return await asyncio.wrap_future(start_thread(call_noticing, call_sync, *call))
            except NeedsMainThreadError:
                self._main_thread.needed_by.add(reward.name)
                deadline.reschedule(None)
        return await self._main_thread.call(functools.partial(call_sync, *call), start_clock)

    async def _replace_blocked_loop(self, name: str) -> None:
        """Drops the event loop of an async function that blocks it; further calls start a new one."""
        loop = self._async_loops.get(name)
        if loop is None:
            return
        try:
            ping = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
            await asyncio.wait_for(asyncio.wrap_future(ping), PING_S)
        except TimeoutError:
            if self._async_loops.get(name) is loop:
                del self._async_loops[name]


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
    while frame is not None and frame.tb_frame.f_globals.get("__name__") == calls.__name__:
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame or error.__traceback__)).rstrip()
