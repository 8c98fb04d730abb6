"""Runs rewards beside decoding: a group is scored as soon as it is sampled, and no call can stop the run for ever.

    main thread             supervisor loop (a daemon thread)             where the function runs
    start(group) ──► for each reward: wait for a place ──► call ──► a daemon thread | the function's loop | a process
    finish()     ◄── Scores: values, or why there are none ◄── within the timeout, else tried again or given up
                                                                   | the main thread, inside finish()

Processes may be of this machine or of a Ray cluster. Threads cannot be killed: one that hangs is left behind, and does
not keep the interpreter from ending. Processes are killed. A function that asks for a signal while it runs in a thread
is called again, and from then on, in the main thread. Several threads can score at the same time, each its own groups;
what needs the main thread is then called while that one is in `serve`. Imports no jax.
"""

import asyncio
import concurrent.futures
import contextlib
import multiprocessing
import pickle
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from groupax.errors import RewardError
from groupax.parallel import processes
from groupax.rewards import ray_workers
from groupax.rewards.builtin import check_setup
from groupax.rewards.calls import Logged, call_async, call_in_worker, call_sync
from groupax.rewards.contract import Reward, Scores, arguments_for, checked_values
from groupax.rewards.main_thread import MainThread, SignalWanted, call_noticing, hook, unhook
from groupax.rewards.threads import in_daemon_thread, new_loop
from groupax.terminal.printable import printable
from groupax.types import Rollout, TrainerState

BACKOFF_S = 0.5  # before the first retry; doubled before each further one
ASYNC_CONCURRENCY = 64  # calls of one async function at a time


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """How rewards are run. The fields are `GRPOConfig`'s of the same names.

    Attributes:
        reward_batch: one call per group, beside decoding, or one for all completions of a rollout, after it.
        reward_concurrency: calls of one sync function at a time.
        reward_workers: processes to run sync functions in; 0 runs them in threads.
        reward_workers_on: "processes" of this machine, or "ray", as tasks on a cluster.
        reward_timeout_s: longest call; None for no limit.
        reward_retries: further tries of a call that raised or took too long.
        reward_errors: "none" gives the completions of a failed call no reward, "raise" stops the run.
    """

    reward_batch: str = "group"
    reward_concurrency: int = 1
    reward_workers: int = 0
    reward_workers_on: str = "processes"
    reward_timeout_s: float | None = 300.0
    reward_retries: int = 0
    reward_errors: str = "none"


class _Scoring(threading.local):
    """What a thread is scoring.

    Attributes:
        state: of the run, for the functions.
        groups: since the last `finish`.
        calls: for them.
    """

    def __init__(self) -> None:
        self.state = TrainerState()
        self.groups: list[list[Rollout]] = []
        self.calls: list[list[concurrent.futures.Future[Scores]]] = []


class RewardRunner:
    """Scores groups while others are decoded. As a context it is closed when the outermost block ends.

    Args:
        rewards: K rewards.
        settings: how to run them.

    Attributes:
        device_lock: Lock to hold while reward models compute.

    Raises:
        ValueError: `reward_workers` is set and a function cannot be sent to another process, or ray is not installed.
        RunError: a built-in reward needs a program that this machine lacks.
    """

    def __init__(self, rewards: Sequence[Reward], settings: RewardSettings) -> None:
        self.rewards, self.settings = rewards, settings
        self.device_lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._own = _Scoring()
        self._running: set[concurrent.futures.Future[Scores]] = set()
        self._home: int | None = None  # the thread of the context
        self._beginning = threading.Lock()
        self._supervisor: asyncio.AbstractEventLoop | None = None
        self._user_loops: dict[str, asyncio.AbstractEventLoop] = {}
        self._places: dict[str, asyncio.Semaphore] = {}
        self._free_workers = asyncio.Semaphore(settings.reward_workers)  # all functions share them
        self._pool: Any = None
        self._main_thread = MainThread()
        self._need_signals: set[str] = set()
        self._depth = 0
        self._for_workers = [
            reward for reward in rewards if settings.reward_workers and not (reward.is_async or reward.on_device)
        ]
        if self._for_workers:
            self._check_sendable()
        if not settings.reward_workers or settings.reward_workers_on == "processes":  # else it is for other machines
            for reward in rewards:
                check_setup(reward.function)

    def __enter__(self) -> "RewardRunner":
        self._depth += 1
        self._home = threading.get_ident()
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.close()

    @property
    def state(self) -> TrainerState:
        """Of the run, for the functions that are called from this thread."""
        return self._own.state

    @state.setter
    def state(self, state: TrainerState) -> None:
        self._own.state = state

    def start(self, group: Sequence[Rollout]) -> None:
        """Begin to score a group; returns at once. Of several processes each scores its share of the groups."""
        self._own.groups.append(list(group))
        if self.settings.reward_batch == "group" and self._is_ours(len(self._own.groups) - 1):
            self._call_all(self._own.groups[-1])

    def finish(self) -> list[list[Scores]]:
        """The scores of each group since this thread's last `finish`, by reward, in the order of their starts.

        Raises:
            RewardError: a call failed and `reward_errors` is "raise".
        """
        own = self._own
        groups, own.groups = own.groups, []
        if self.settings.reward_batch == "rollout" and groups and self._is_ours(0):
            self._call_all([row for group in groups for row in group])
        calls, own.calls = own.calls, []
        if self._home in (None, threading.get_ident()):
            self.serve([call for row in calls for call in row])
        results = [self._on_device(groups), *([call.result() for call in row] for row in calls)]
        on_device, called = results[0], self._of_all(results[1:], len(groups))
        if self.settings.reward_batch == "rollout":
            called = _split(called[0], [len(group) for group in groups]) if groups else []
        by_group = []
        for index in range(len(groups)):
            rest = iter(called[index] if called else [])
            by_group.append(
                [on_device[reward.name][index] if reward.on_device else next(rest) for reward in self.rewards]
            )
        if self.settings.reward_errors == "raise":
            self._raise_failures(by_group)
        return by_group

    def _is_ours(self, index: int) -> bool:
        """Whether this process has functions called for the call of that index."""
        return index % processes.num_processes() == processes.process_index()

    def _of_all(self, called: list[list[Scores]], num_groups: int) -> list[list[Scores]]:
        """What the functions have said in all processes, in the order of the calls."""
        if processes.num_processes() == 1:
            return called
        shares = [iter(share) for share in processes.all_gather_object(called)]
        num_calls = num_groups if self.settings.reward_batch == "group" else min(num_groups, 1)
        return [next(shares[index % len(shares)]) for index in range(num_calls)]

    def serve(self, until: "Sequence[concurrent.futures.Future[Any]]") -> None:
        """Have this thread, the context's, call what needs it until all of these are done."""
        self._main_thread.run_until(until)

    def cancel(self) -> None:
        """Give up the calls under way; who waits for them gets a `concurrent.futures.CancelledError`."""
        for call in list(self._running):
            call.cancel()

    def close(self) -> None:
        """End what still runs: processes are killed, threads left behind."""
        self.cancel()
        self._own.groups, self._own.calls = [], []
        if self._pool is not None:
            self._pool.stop()
            self._pool.join(timeout=5.0)
            self._pool = None
        if self._supervisor is not None:
            unhook()
        self._main_thread.close()
        for loop in (self._supervisor, *self._user_loops.values()):
            if loop is not None:
                loop.call_soon_threadsafe(loop.stop)
        self._supervisor, self._user_loops = None, {}
        self._places = {}  # they belong to a loop
        self._free_workers = asyncio.Semaphore(self.settings.reward_workers)

    # -- in the thread that scores

    def _call_all(self, rollouts: list[Rollout]) -> None:
        with self._beginning:
            if self._supervisor is None:
                if self._for_workers:
                    self._pool = _new_pool(self.settings)
                self._supervisor = new_loop("rewards")
                hook()
        calls = [
            asyncio.run_coroutine_threadsafe(self._supervised(reward, rollouts, self.state), self._supervisor)
            for reward in self.rewards
            if not reward.on_device
        ]
        self._own.calls.append(calls)
        for call in calls:
            self._running.add(call)
            call.add_done_callback(self._running.discard)

    def _on_device(self, groups: Sequence[Sequence[Rollout]]) -> dict[str, list[Scores]]:
        """Reward models' scores by name, by group: one call each, as they batch for themselves."""
        rollouts = [row for group in groups for row in group]
        scores: dict[str, list[Scores]] = {}
        for reward in self.rewards:
            if reward.on_device and rollouts:
                with self.device_lock:
                    returned = reward.function(rollouts)
                values, faults = checked_values(reward.name, returned, rollouts)
                whole = Scores(values, len(faults), "\n".join(faults[:1]))
                scores[reward.name] = [row[0] for row in _split([whole], [len(group) for group in groups])]
        return scores

    def _raise_failures(self, by_group: Sequence[Sequence[Scores]]) -> None:
        for index, scores in enumerate(by_group):
            for reward, score in zip(self.rewards, scores, strict=True):
                if score.error:
                    raise RewardError(
                        f"the reward function {reward.name!r} failed in step {self.state.step + 1}, group {index} "
                        f"(reward_errors is 'raise'):\n{score.error}"
                    )

    def _check_sendable(self) -> None:
        on_ray = self.settings.reward_workers_on == "ray"
        dumps, remedy = (
            (ray_workers.pickled, "keep what cannot be sent out of its globals and closure")
            if on_ray
            else (pickle.dumps, "define it at the top of a module")
        )
        for reward in self._for_workers:
            try:
                dumps(reward.function)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise ValueError(
                    f"reward_workers is {self.settings.reward_workers}, but the reward function {reward.name!r} cannot "
                    f"be sent to another process ({error}); {remedy}, or set reward_workers=0"
                ) from error

    # -- in the supervisor's loop

    async def _supervised(self, reward: Reward, rollouts: list[Rollout], state: TrainerState) -> Scores:
        """The scores of one call, whatever happens in it."""
        settings = self.settings
        limit = ASYNC_CONCURRENCY if reward.is_async else settings.reward_workers or settings.reward_concurrency
        async with self._places.setdefault(reward.name, asyncio.Semaphore(limit)):
            error = ""
            for attempt in range(settings.reward_retries + 1):
                if attempt:
                    await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1))
                limit_s = asyncio.timeout(None)
                try:
                    async with limit_s:
                        returned, logged = await self._invoke(reward, rollouts, state, limit_s)
                except Exception as raised:  # noqa: BLE001 - user code may raise anything; it is reported and counted
                    error = printable("".join(traceback.format_exception(raised)).rstrip())
                    if limit_s.expired():  # a function's own TimeoutError keeps its traceback
                        error = (
                            f"the reward function {reward.name!r} did not return within reward_timeout_s = "
                            f"{settings.reward_timeout_s} on {len(rollouts)} completions"
                        )
                        await self._replace_blocked_loop(reward.name)
                    continue
                try:
                    values, faults = checked_values(reward.name, returned, rollouts)
                except Exception as rubbish:  # noqa: BLE001 - its values are user code too; another try would return the same
                    error = printable(
                        str(rubbish) if isinstance(rubbish, ValueError) else traceback.format_exc().rstrip()
                    )
                    break
                return Scores(values, len(faults), "\n".join(faults[:1]), logged.extra, logged.metrics)
        return Scores(np.full(len(rollouts), np.nan), len(rollouts), error)

    async def _invoke(
        self, reward: Reward, rollouts: list[Rollout], state: TrainerState, limit_s: asyncio.Timeout
    ) -> tuple[Any, Logged]:
        """Call the function where it belongs. The time limit begins with the call, not while it waits for its turn."""

        def begun() -> None:
            if self.settings.reward_timeout_s is not None:
                limit_s.reschedule(asyncio.get_running_loop().time() + self.settings.reward_timeout_s)

        arguments = arguments_for(reward, rollouts, state, {"log_extra": None, "log_metric": None})
        num_singly = len(rollouts) if reward.per_completion else None
        if reward.is_async:
            begun()
            loop = self._user_loops.get(reward.name) or new_loop(reward.name)
            self._user_loops[reward.name] = loop
            call = asyncio.run_coroutine_threadsafe(call_async(reward.function, arguments, num_singly), loop)
            return await asyncio.wrap_future(call)
        if self.settings.reward_workers:
            async with self._free_workers:
                begun()
                call = self._pool.schedule(call_in_worker, args=(reward.function, arguments, num_singly))
                return await asyncio.wrap_future(call)

        def function() -> tuple[Any, Logged]:
            return call_sync(reward.function, arguments, num_singly)

        if reward.name not in self._need_signals:
            begun()
            try:
                return await in_daemon_thread(lambda: call_noticing(function))
            except SignalWanted:
                self._need_signals.add(reward.name)
                limit_s.reschedule(None)
        return await self._main_thread.call(function, begun)

    async def _replace_blocked_loop(self, name: str) -> None:
        """An async function that blocks takes its loop with it: if it does not answer, further calls get a new one."""
        loop = self._user_loops.get(name)
        if loop is None:
            return
        try:
            ping = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
            await asyncio.wait_for(asyncio.wrap_future(ping), 1.0)
        except TimeoutError:
            if self._user_loops.get(name) is loop:
                del self._user_loops[name]


def _split(scores: Sequence[Scores], sizes: Sequence[int]) -> list[list[Scores]]:
    """Scores of all completions, by reward, as scores by group and reward; failures and metrics stay with the first."""
    edges = np.cumsum([0, *sizes])
    by_group = []
    for index in range(len(sizes)):
        part = slice(edges[index], edges[index + 1])
        by_group.append(
            [
                Scores(
                    score.values[part],
                    score.num_failures if index == 0 else 0,
                    score.error if index == 0 else "",
                    {name: values[part] for name, values in score.extra.items()},
                    score.metrics if index == 0 else {},
                )
                for score in scores
            ]
        )
    return by_group


def _new_pool(settings: RewardSettings) -> Any:
    if settings.reward_workers_on == "ray":
        return ray_workers.RayWorkers(settings.reward_workers)
    from pebble import ProcessPool

    return ProcessPool(max_workers=settings.reward_workers, context=multiprocessing.get_context("spawn"))
