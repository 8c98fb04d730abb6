"""The thread that drives the engines: requests join while others run.

submit (any thread) ──► commands ─┐
cancel ───────────────► commands ─┤  between two chunks
between_chunks ───────► commands ─┤
                                  ▼
          the thread: commands, then a step of every session that has work ──► listeners
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from groupax.engine.engine import Engine
from groupax.engine.programs import Programs
from groupax.engine.sequence import Sequence
from groupax.engine.session import Session
from groupax.settings.sampling import SamplingParams
from groupax.types import FinishReason

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Chunks for which slots are kept that nobody needs: clients who have an answer often ask again.
PATIENCE = 32


class FullError(Exception):
    """There are as many sequences already as the loop takes."""


class ClosedError(Exception):
    """The loop takes no requests any more."""


@dataclass(frozen=True, eq=False)
class Growth:
    """What a completion has got since its listener was last told.

    Attributes:
        index: of the completion in its request: those of the first prompt, then those of the second, ...
        first: position of the first new token; 0 if it had to begin again and other weights made it another one.
        tokens, policy_logps, sampler_logps, alternatives, versions: the new ones (see `scheduler.Sequence`).
        finish_reason: None while it runs; "abort" if the engine failed.
        text: the whole text, once it is finished.
    """

    index: int
    first: int
    tokens: list[int]
    policy_logps: list[float]
    sampler_logps: list[float]
    alternatives: list[list[tuple[int, float]]]
    versions: list[int]
    finish_reason: FinishReason | None
    text: str


Listener = Callable[[Growth], None]


@dataclass(eq=False)
class Job:
    """A request in the loop.

    Attributes:
        model: name of its engine.
        sequences: what runs; they belong to the loop's thread.
        listener: told of every growth, in that thread; it must be quick and must not raise.
    """

    model: str
    sequences: list[Sequence]
    listener: Listener
    told: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class LoopCounts:
    """How the loop stands, and what it has done since it began."""

    num_running: int = 0
    num_waiting: int = 0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_finished: int = 0
    num_cancelled: int = 0
    num_chunks: int = 0


class EngineLoop:
    """Engines that are driven by one thread, a chunk of each that has work in turn.

    A completion depends on its prompt, its settings with their seed, its place in its request, and on the weights:
    it is the one of `Engine.generate`.

    Args:
        engines: by the name of their model. The memory for keys and values of each is fixed now.
        max_sequences: most that wait or run at once.

    Attributes:
        engines: their weights are changed by what `between_chunks` runs, and by nothing else.
        counts: how it stands; a record that is replaced, so that any thread may read it.
        programs: of each engine, compiled beside decoding.
        is_ready: whether the usual programs are compiled; set by who calls `warm_up`.
    """

    def __init__(self, engines: Mapping[str, Engine], max_sequences: int = 1024) -> None:
        self.engines = dict(engines)
        self.max_sequences = max_sequences
        self.counts = LoopCounts()
        self.programs = {name: Programs(engine, self._wake) for name, engine in self.engines.items()}
        self._sessions = {name: self._new_session(name) for name in self.engines}
        self._jobs: dict[int, tuple[Job, int]] = {}  # by sequence: its job, its index there
        self._num_sequences = 0  # submitted and not ended
        self._commands: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.is_ready = True
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> "EngineLoop":
        """Begin to work."""
        self._thread.start()
        return self

    def close(self) -> None:
        """End after the chunk under way; what runs is told that it was aborted."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        for programs in self.programs.values():
            programs.close()
        if self._thread.ident is not None:
            self._thread.join()

    def warm_up(self, clients: Iterable[int], num_tokens: int) -> int:
        """Compile what requests of usual sizes need, and wait for it.

        Args:
            clients: numbers of requests at once.
            num_tokens: of their prompts and of their completions, at most.

        Returns:
            How many programs were compiled.

        Raises:
            ClosedError: the loop has ended.
        """
        clients, before = list(clients), sum(programs.num_compiled for programs in self.programs.values())
        for name, engine in self.engines.items():
            most = min(num_tokens, engine.config.max_positions // 2)
            session, programs = self._sessions[name], self.programs[name]
            while missing := self.between_chunks(partial(session.usual_programs, clients, most)).result():
                programs.request(missing)
                programs.wait(missing)
            if clients:  # what is left is small, and compiled by a request
                done = threading.Event()
                params = SamplingParams(max_tokens=1)
                self.submit(name, [np.zeros(1, np.int32)], params, lambda _, done=done: done.set())
                done.wait()
        return sum(programs.num_compiled for programs in self.programs.values()) - before

    @property
    def is_alive(self) -> bool:
        """Whether requests are worked on."""
        return self._thread.is_alive()

    def submit(
        self,
        model: str,
        prompts: list[np.ndarray],
        params: SamplingParams,
        listener: Listener,
        row_keys: np.ndarray | None = None,
    ) -> Job:
        """Begin a request; from any thread.

        Args:
            model: whose engine.
            prompts: token ids of each; `params.n` completions of every one.
            params: how to sample.
            listener: called in the loop's thread.
            row_keys: the source of each completion's randomness, [prompts * n, 2] uint32; None makes them of the seed.

        Raises:
            ValueError: the engine cannot do it (see `Engine.sequences` and `Session.check`).
            FullError: too many sequences wait or run.
            ClosedError: the loop has ended.
        """
        sequences = self.engines[model].sequences(prompts, params)
        if row_keys is not None:
            if row_keys.shape != (len(sequences), 2):
                raise ValueError(f"row_keys must be {len(sequences)} pairs, one for each completion")
            for sequence, key in zip(sequences, row_keys, strict=True):
                sequence.key = key
        session = self._sessions[model]
        session.check(sequences)
        job = Job(model, sequences, listener, [[] for _ in sequences])
        with self._changed:
            if self._closed:
                raise ClosedError
            if self._num_sequences + len(sequences) > self.max_sequences:
                raise FullError
            self._num_sequences += len(sequences)
            self._commands.append(lambda: self._begin(job))
            self._changed.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Give up what a request still has to do; its listener hears no more of it. From any thread, at any time."""
        self._command(lambda: self._cancel(job))

    def between_chunks(self, function: Callable[[], T]) -> Future[T]:
        """Run something in the loop's thread when no program runs, as a change of an engine's weights.

        Args:
            function: every request waits for it. To change weights it sets `engine.params`, and `engine.version` if
                that is not to be one more; sequences under way go on with the new ones.

        Returns:
            Its result or its error. Cancelled before it began, the function is not run.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, Exception):
                    raise

        if not self._command(run):
            future.set_exception(ClosedError())
        return future

    def _command(self, command: Callable[[], None]) -> bool:
        with self._changed:
            if not self._closed:
                self._commands.append(command)
                self._changed.notify()
            return not self._closed

    # -- in the loop's thread

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not (self._closed or self._commands or any(s.can_step for s in self._sessions.values())):
                        self._changed.wait()
                    if self._closed:
                        break
                    num_commands = len(self._commands)
                for _ in range(num_commands):
                    self._commands.popleft()()
                for model in self._sessions:
                    self._step(model)
        finally:
            with self._changed:
                self._closed = True
            with ExitStack() as last:  # each of these, even if one before it raises
                last.callback(self._abort_all)
                for command in reversed(self._commands):
                    last.callback(command)

    def _new_session(self, model: str) -> Session:
        return Session(self.engines[model], PATIENCE, self.programs[model])

    def _wake(self) -> None:
        """Programs were compiled, for which requests may wait."""
        with self._changed:
            self._changed.notify()

    def _step(self, model: str) -> None:
        session = self._sessions[model]
        if not session.busy:
            return
        try:
            updates = [sequence for sequence, _ in session.step()]
        except Exception:
            # as when the devices' memory is full; the next requests begin with an empty cache
            logger.exception("the engine of %s failed; its requests are aborted", model)
            self._sessions[model] = self._new_session(model)
            self._count()
            for job in {id(job): job for job, _ in self._jobs.values() if job.model == model}.values():
                self._abort(job)
            return
        grown = [each for sequence in updates if (each := self._growth(sequence)) is not None]
        num_finished = sum(growth.finish_reason is not None for _, growth in grown)
        self._ended(num_finished)
        num_tokens = sum(len(growth.tokens) for _, growth in grown)
        self._count(
            num_chunks=int(bool(grown)), num_tokens=num_tokens, num_finished=num_finished
        )  # before anybody is told
        for job, growth in grown:
            job.listener(growth)

    def _begin(self, job: Job) -> None:
        for index, sequence in enumerate(job.sequences):
            self._jobs[id(sequence)] = job, index
        self._count(num_prompt_tokens=sum(len(s.prompt) for s in job.sequences if s.sample_index == 0))
        self._sessions[job.model].submit(job.sequences)

    def _cancel(self, job: Job) -> None:
        cancelled = [sequence for sequence in job.sequences if self._jobs.pop(id(sequence), None) is not None]
        for sequence in cancelled:
            sequence.cancel()
        self._ended(len(cancelled))
        self._count(num_cancelled=len(cancelled))

    def _abort_all(self) -> None:
        for job in {id(job): job for job, _ in self._jobs.values()}.values():
            self._abort(job)

    def _abort(self, job: Job) -> None:
        for index, sequence in enumerate(job.sequences):
            if self._jobs.pop(id(sequence), None) is not None:
                self._ended(1)
                job.listener(Growth(index, len(job.told[index]), [], [], [], [], [], "abort", ""))

    def _growth(self, sequence: Sequence) -> tuple[Job, Growth] | None:
        """What a listener has to be told; None if that is nothing."""
        job, index = self._jobs.get(id(sequence), (None, 0))
        if job is None:
            return None  # cancelled
        told = job.told[index]
        first = len(told) if sequence.tokens[: len(told)] == told else 0
        if sequence.finish_reason is None and len(sequence.tokens) <= first:
            return None
        new = slice(first, None)
        growth = Growth(
            index=index,
            first=first,
            tokens=sequence.tokens[new],
            policy_logps=sequence.policy_logps[new],
            sampler_logps=sequence.sampler_logps[new],
            alternatives=sequence.alternatives[new],
            versions=sequence.versions[new],
            finish_reason=sequence.finish_reason,
            text=sequence.text,
        )
        told[first:] = growth.tokens
        if sequence.finish_reason:
            del self._jobs[id(sequence)]
        return job, growth

    def _ended(self, num: int) -> None:
        with self._changed:
            self._num_sequences -= num

    def _count(self, **added: Any) -> None:
        sessions = self._sessions.values()
        values = {name: getattr(self.counts, name) + number for name, number in added.items()}
        values["num_running"] = sum(session.num_running for session in sessions)
        values["num_waiting"] = sum(session.num_waiting for session in sessions)
        self.counts = LoopCounts(**{**vars(self.counts), **values})
