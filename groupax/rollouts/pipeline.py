"""Rollouts that are generated ahead of their updates in threads, while the main thread trains.

    main thread     begin ──► update ──► begin ──► collect (waits) ──► update ...
    rollout r         └► samples ──► rewards ────────┘▲
    rollout r + 1                └► samples ──► rewards

Each rollout is sampled by the policy from `max_staleness` optimizer steps before its first update. A run is therefore
independent of timing, and a checkpoint needs to contain these policies only, not the rollouts in progress. One rollout
is sampled at a time; its rewards may take longer.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from groupax.engine.engine import Engine
from groupax.engine.sequence import Cancellable, Sampler, SamplingSession, Sequence
from groupax.models.specs import Params
from groupax.parallel.preemption import FairLock
from groupax.rollouts.collector import Collector
from groupax.rollouts.state import Cursor, Experience


@dataclass(frozen=True)
class Policy:
    """Weights to sample a rollout from."""

    version: int  # number of optimizer steps that they have seen
    trained: Params  # trained weights in the compute dtype (see `Learner.snapshot`)


@dataclass(frozen=True, eq=False)
class _Job:
    """A rollout in progress."""

    number: int  # number of the rollout in the run
    policy: Policy  # policy that samples it
    cursor: Cursor  # progress of the run at its first update; `num_prompts` may depend on the previous rollout
    # event that is set when nothing is left to decode
    sampled: threading.Event = field(default_factory=threading.Event)
    result: "Future[Experience]" = field(default_factory=Future)  # the rollout


class Pipeline:
    """The asynchronous rollouts of a run. A context manager that stops the rollouts in progress when it exits.

    Args:
        collector: Collector of a rollout; its engine, learner and reward runner take turns on the devices.
        max_staleness: Number of optimizer steps between a policy and the first update on its rollout.
        num_steps: Number of optimizer steps of the run.
    """

    def __init__(self, collector: Collector, max_staleness: int, num_steps: int) -> None:
        self.collector, self.max_staleness, self.num_steps = collector, max_staleness, num_steps
        self.device_lock = FairLock()
        self._jobs: deque[_Job] = deque()
        self._threads: list[threading.Thread] = []
        self._saved: dict[int, Policy] = {}

    def __enter__(self) -> "Pipeline":
        self.device_lock = self.collector.learner.device_lock = self.collector.scoring.runner.device_lock = FairLock()
        return self

    def __exit__(self, *_: object) -> None:
        self.device_lock.close()
        for thread in self._threads:
            while thread.is_alive():
                self.collector.scoring.runner.cancel()
                if isinstance(self.collector.engine, Cancellable):
                    self.collector.engine.cancel()
                thread.join(0.05)
        self._jobs.clear()
        self._threads.clear()
        self.collector.learner.device_lock = self.collector.scoring.runner.device_lock = nullcontext()

    def begin(self, cursor: Cursor) -> None:
        """Starts all rollouts that the current policy samples, and those that restored policies sample."""
        now: Policy | None = None
        steps = self.collector.schedule.updates_per_rollout
        number = cursor.num_rollouts + len(self._jobs)
        while number * steps < self.num_steps and number * steps - self.max_staleness <= cursor.step:
            policy = self._saved.pop(number, None)
            if policy is None:
                policy = now = now or Policy(cursor.step, self.collector.learner.snapshot())
            ahead = (number - cursor.num_rollouts) * self.collector.schedule.prompts_per_rollout
            step, num_prompts = max(number * steps, cursor.step), cursor.num_prompts + ahead
            at = replace(cursor, step=step, num_rollouts=number, num_prompts=num_prompts)
            before = self._jobs[-1] if self._jobs else None
            self._jobs.append(_Job(number, policy, at))
            thread = threading.Thread(target=self._make, args=(self._jobs[-1], before), name="rollout", daemon=True)
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]
            thread.start()
            number += 1

    def collect(self, cursor: Cursor) -> Experience:
        """Waits for the next rollout and returns it ready for updates, like `Collector.collect`.

        Raises:
            Exception: Any error of the thread that generated it.
        """
        begun_s = time.perf_counter()
        job = self._jobs[0]
        self.collector.scoring.runner.serve([job.result])
        self.collector.scoring.runner.state = self.collector.trainer_state(job.cursor)
        metrics = {"time/wait_s": time.perf_counter() - begun_s}
        experience = self.collector.with_logprobs(job.result.result(), cursor)
        self._jobs.popleft()
        return replace(experience, metrics=experience.metrics | metrics)

    def settle(self) -> None:
        """Waits until no rollout is in progress."""
        self.collector.scoring.runner.serve([job.result for job in self._jobs])

    def policies(self, cursor: Cursor) -> Mapping[int, Policy]:
        """Returns the policies older than the learner's that sample coming rollouts, by the number of the rollout."""
        begun = {job.number: job.policy for job in self._jobs} | self._saved
        return {number: policy for number, policy in begun.items() if policy.version < cursor.step}

    def restore(self, policies: Mapping[int, Policy]) -> None:
        """Sets the policies that sample the rollouts of these numbers."""
        self._saved = dict(policies)

    # -- in the threads

    def _make(self, job: _Job, before: _Job | None) -> None:
        try:
            job.result.set_result(self._made(job, before))
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            job.result.set_exception(error)
        finally:
            job.sampled.set()

    def _made(self, job: _Job, before: _Job | None) -> Experience:
        collector, cursor = self.collector, job.cursor
        if before is not None:
            before.sampled.wait()
            if collector.args.filter_zero_variance:  # how many prompts it visited follows from its rewards
                earlier = before.result.result()
                cursor = replace(cursor, num_prompts=earlier.first_prompt + len(earlier.groups))
        with self.device_lock:
            collector.engine.params = collector.learner.policy_of(job.policy.trained)
        sampler = _LockedSampler(collector.engine, self.device_lock)
        if not collector.args.filter_zero_variance:  # which may sample again
            sampler.ended = job.sampled
        return collector.rollout(sampler, cursor, job.policy.version)


class _LockedSampler:
    """A sampler that holds the device lock for each chunk an engine decodes; servers have devices of their own."""

    def __init__(self, engine: Sampler, device_lock: FairLock) -> None:
        self.engine, self.device_lock = engine, device_lock
        self.ended: threading.Event | None = None
        self.sequences = engine.sequences

    def session(self) -> SamplingSession:
        session = self.engine.session()
        return _LockedSession(session, self.device_lock if isinstance(self.engine, Engine) else nullcontext(), self)


class _LockedSession:
    """A session whose steps hold a lock."""

    def __init__(self, session: SamplingSession, lock: AbstractContextManager[object], sampler: _LockedSampler) -> None:
        self._session, self._lock, self._sampler = session, lock, sampler
        self.submit = session.submit

    @property
    def busy(self) -> bool:
        return self._session.busy

    def step(self) -> Iterator[tuple[Sequence, int]]:
        with self._lock:
            yielded = list(self._session.step())
        yield from yielded

    def close(self) -> None:
        self._session.close()
        if self._sampler.ended is not None:
            self._sampler.ended.set()
