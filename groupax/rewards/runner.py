"""Scores groups of completions during decoding: each as soon as it is sampled, and no call can stop the run.

    score: start(group) ──► a call of each reward function (see `calls`)
           finish()     ◄── scores of all groups; until then the main thread calls the functions that need it

Several threads may score at the same time, each its own groups; functions that need the main thread are then called
while that one is in `serve`. Of several processes each scores a share of the groups. Imports no jax.
"""

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupax.core.errors import RewardError
from groupax.core.settings.rollouts import RewardSettings
from groupax.core.types import Rollout, TrainerState
from groupax.parallel import processes
from groupax.rewards.calls import MainThread, Supervisor, check_sendable
from groupax.rewards.contract import Reward, Scores, checked_scores, split_scores, with_scores
from groupax.rewards.resolve import check_setup


@dataclass(frozen=True, eq=False)
class Scored:
    """Groups with their rewards."""

    groups: list[list[Rollout]]  # groups in the order of their prompts
    failures: Mapping[str, int]  # number of completions without a reward because of a fault, by reward
    errors: Mapping[str, str]  # first error of each reward that failed
    logged: Mapping[str, Sequence[float]]  # numbers that reward functions logged, one per call, by name
    rollout_s: float  # seconds until the last group was sampled
    reward_s: float  # further seconds until the last group was scored


class _ThreadState(threading.local):
    """The groups that a thread has started to score since its last `finish`, and the calls for them."""

    def __init__(self) -> None:
        self.trainer_state = TrainerState()
        self.groups: list[list[Rollout]] = []
        self.calls: list[list[concurrent.futures.Future[Scores]]] = []


class RewardRunner:
    """Scores groups while others are decoded. As a context it is closed when the outermost block ends.

    Args:
        rewards: The K rewards.
        settings: How to call them.

    Attributes:
        names: Their names.
        device_lock: Lock to hold while reward models compute.

    Raises:
        ValueError: `reward_workers` is set and a function cannot be sent to another process.
        RunError: A built-in reward needs a program that this machine lacks.
    """

    def __init__(self, rewards: Sequence[Reward], settings: RewardSettings) -> None:
        self.rewards, self.settings = rewards, settings
        self.names = [reward.name for reward in rewards]
        self.device_lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._own = _ThreadState()
        self._running: set[concurrent.futures.Future[Scores]] = set()
        self._home: int | None = None  # the thread of the context
        self._depth = 0
        self._starting = threading.Lock()
        self._supervisor: Supervisor | None = None
        self._main_thread = MainThread()
        self._functions = [reward for reward in rewards if not reward.on_device]
        for_workers = [reward for reward in self._functions if settings.reward_workers and not reward.is_async]
        self._has_workers = bool(for_workers)
        check_sendable(for_workers)
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
        """The trainer state that functions receive when they are called for this thread."""
        return self._own.trainer_state

    @state.setter
    def state(self, state: TrainerState) -> None:
        self._own.trainer_state = state

    def score(self, sampled: Iterable[list[Rollout]]) -> Scored:
        """Scores groups while further ones are sampled.

        Args:
            sampled: Yields each group when its last completion ends.

        Raises:
            RewardError: A call failed and `reward_errors` is "raise".
        """
        started_s = time.perf_counter()
        groups = []
        for group in sampled:
            self.start(group)
            groups.append(group)
        sampled_s = time.perf_counter()
        results = self.finish()
        scored_s = time.perf_counter()
        failures = dict.fromkeys(self.names, 0)
        errors: dict[str, str] = {}
        logged: dict[str, list[float]] = {}
        scored = []
        for group, scores in zip(groups, results, strict=True):
            by_name = dict(zip(self.names, scores, strict=True))
            for name, score in by_name.items():
                failures[name] += score.num_failures
                if score.error:
                    errors.setdefault(name, score.error)
                for metric, value in score.metrics.items():
                    logged.setdefault(metric, []).append(value)
            scored.append(with_scores(group, by_name))
        scored.sort(key=lambda group: group[0].prompt_index)
        return Scored(scored, failures, errors, logged, sampled_s - started_s, scored_s - sampled_s)

    def start(self, group: Sequence[Rollout]) -> None:
        """Starts to score a group and returns at once. Of several processes each scores its share of the groups."""
        self._own.groups.append(list(group))
        if self.settings.reward_scope == "group" and self._is_ours(len(self._own.groups) - 1):
            self._start_calls(self._own.groups[-1])

    def finish(self) -> list[list[Scores]]:
        """Returns the scores of each group since this thread's last `finish`, by reward, in the order of their starts.

        Raises:
            RewardError: A call failed and `reward_errors` is "raise".
        """
        own = self._own
        groups, own.groups = own.groups, []
        parts = [[index] for index in range(len(groups))]  # groups of each call
        if self.settings.reward_scope == "rollout":
            in_order = sorted(range(len(groups)), key=lambda index: groups[index][0].prompt_index)
            parts = [in_order] if groups else []
            if groups and self._is_ours(0):
                self._start_calls([row for index in in_order for row in groups[index]])
        calls, own.calls = own.calls, []
        if self._home in (None, threading.get_ident()):
            self._main_thread.run_until([call for row in calls for call in row])
        by_reward: dict[str, list[Scores]] = {}
        rollouts = [row for group in groups for row in group]
        for reward in self.rewards:  # a reward model forms its own batches
            if reward.on_device and rollouts:
                with self.device_lock:
                    returned = reward.function(rollouts)
                by_reward[reward.name] = split_scores(checked_scores(reward.name, returned, rollouts), groups)
        called = [[call.result() for call in row] for row in calls]
        if processes.num_processes() > 1:
            shares = [iter(share) for share in processes.all_gather_object(called)]
            called = [next(shares[index % len(shares)]) for index in range(len(parts))]
        for number, reward in enumerate(self._functions):
            scores: dict[int, Scores] = {}
            for part, row in zip(parts, called, strict=True):
                scores |= zip(part, split_scores(row[number], [groups[index] for index in part]), strict=True)
            by_reward[reward.name] = [scores[index] for index in range(len(groups))]
        by_group = [[by_reward[reward.name][index] for reward in self.rewards] for index in range(len(groups))]
        for index, row in enumerate(by_group if self.settings.reward_errors == "raise" else ()):
            for reward, score in zip(self.rewards, row, strict=True):
                if score.error:
                    raise RewardError(
                        f"the reward function {reward.name!r} failed in step {self.state.step + 1}, group {index} "
                        f"(reward_errors is 'raise'):\n{score.error}"
                    )
        return by_group

    def serve(self, until: "Sequence[concurrent.futures.Future[Any]]") -> None:
        """Runs calls that need this thread, which is the context's, until all of these futures are done."""
        self._main_thread.run_until(until)

    def cancel(self) -> None:
        """Cancels the running calls; threads that wait for them receive a `CancelledError`."""
        for call in list(self._running):
            call.cancel()

    def close(self) -> None:
        """Ends the running calls: processes are killed, threads abandoned."""
        self.cancel()
        self._own.groups, self._own.calls = [], []
        if self._supervisor is not None:
            self._supervisor.close()
            self._supervisor = None

    def _start_calls(self, rollouts: list[Rollout]) -> None:
        with self._starting:
            if self._supervisor is None:
                self._supervisor = Supervisor(self.settings, self._main_thread, self._has_workers)
        state = self._own.trainer_state
        calls = [self._supervisor.submit(reward, rollouts, state) for reward in self._functions]
        self._own.calls.append(calls)
        for call in calls:
            self._running.add(call)
            call.add_done_callback(self._running.discard)

    def _is_ours(self, index: int) -> bool:
        """Returns whether this process makes the calls of this index."""
        num = processes.num_processes()
        return num == 1 or index % num == processes.process_index()
