"""A thread that drives engines: requests join while others run.

submit (any thread) ──► commands ─┐
cancel ───────────────► commands ─┤  between two chunks
between_chunks ───────► commands ─┤
                                  ▼
          the thread: commands, then a step of every session that has work ──► listeners
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np

from groupax.core.settings.sampling import SamplingParams
from groupax.core.types import PromptImages
from groupax.engine.engine import Engine
from groupax.engine.programs import Programs, Serving
from groupax.engine.prompt_logps import PromptLogps, Scoring, compile_for, num_columns
from groupax.engine.sequence import Sequence
from groupax.engine.session import Session
from groupax.parallel.mesh import num_data_shards
from groupax.serve.exchange import Delta
from groupax.serve.web import ApiError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Listener = Callable[[Delta], None]
PauseMode = Literal["keep", "wait", "abort"]

# Chunks for which unused slots are kept: clients often send another request after a response.
PATIENCE = 32
# What one turn of the loop may take while other requests wait, in seconds: a wide request joins in parts of PART
# completions, more of them at a time as long as chunks take less, and prompts are scored some columns at a time.
LONGEST_TURN_S = 0.25
PART = 32


class QueueFullError(ApiError):
    """The loop has as many sequences as it takes."""

    def __init__(self, what: str) -> None:
        super().__init__(429, f"{what}; try again later", code="queue_full", headers={"retry-after": "1"})


class ClosedError(ApiError):
    """The loop takes no more requests."""

    def __init__(self) -> None:
        super().__init__(503, "the server is stopping", code="stopping")


@dataclass(eq=False)
class Job:
    """A request in the loop.

    Attributes:
        model: Name of its engine.
        sequences: Its sequences, which belong to the loop's thread.
        listener: Called with every delta, in that thread; it must be quick and must not raise.
        reported: Tokens of each sequence that the listener has received.
    """

    model: str
    sequences: list[Sequence]
    listener: Listener
    reported: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class LoopCounts:
    """The current load of the loop, and totals since its start."""

    num_running: int = 0
    num_waiting: int = 0
    num_tokens: int = 0
    num_cancelled: int = 0
    num_chunks: int = 0


@dataclass(frozen=True)
class EngineLoad:
    """The current load of an engine."""

    num_running: int = 0
    num_waiting: int = 0
    kv_frac: float = 0.0


class EngineLoop:
    """Drives engines in one thread, which decodes a chunk of each that has work in turn.

    A completion depends on its prompt, its settings including the seed, its index in the request, and the weights: it
    equals that of `Engine.generate`. Methods may be called from any thread; they raise a `ClosedError`, or return a
    future that does, once the loop has stopped.

    Args:
        engines: Engines by the name of their model; adapters that an engine decodes together with its model have it
            under their names too. The memory for the KV cache of each is fixed now.
        max_sequences: Most sequences that wait or run at once.

    Attributes:
        engines: The engines; only functions that `between_chunks` runs may change their weights.
        counts: Load and totals; the record is replaced, so that any thread may read it.
        loads: The current load of each engine, by the name of its first model, replaced in the same way.
        programs: Programs of each engine, by the same names, compiled in the background.
        pausing: The mode of the current pause; None while the engines run.
        is_paused: Whether no chunk is decoded; with "wait" only after the last running request has finished.
        is_ready: Whether the usual programs are compiled; set by the caller of `warm_up`.
    """

    def __init__(self, engines: Mapping[str, Engine], max_sequences: int = 1024) -> None:
        self.engines = dict(engines)
        firsts: dict[int, str] = {}
        self._firsts = {name: firsts.setdefault(id(engine), name) for name, engine in engines.items()}
        own = {name: engine for name, engine in self.engines.items() if self._firsts[name] == name}
        self.max_sequences = max_sequences
        self.counts = LoopCounts()
        self.pausing: PauseMode | None = None
        self.is_paused = False
        self._pauses: list[Future[None]] = []  # which wait for the engines to stop
        self._arrived_while_paused: list[Job] = []
        self.programs = {name: Programs(engine, self._wake) for name, engine in own.items()}
        self._sessions = {name: self._new_session(name) for name in own}
        self.loads = {name: EngineLoad() for name in own}
        self._jobs: dict[int, tuple[Job, int]] = {}  # by sequence: its job, its index there
        self._parts: dict[str, deque[list[Sequence]]] = {name: deque() for name in own}  # of wide requests, which wait
        self._widths = dict.fromkeys(own, PART)  # most sequences at once while such parts wait
        self._num_sequences = 0  # submitted and not ended
        self._commands: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.is_ready = True
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> "EngineLoop":
        """Starts the thread."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Stops after the current chunk and aborts what runs."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        for programs in self.programs.values():
            programs.close()
        if self._thread.ident is not None:
            self._thread.join()

    def warm_up(self, clients: Iterable[int], num_tokens: int) -> int:
        """Compiles what requests of usual sizes need, and waits for it.

        Args:
            clients: Numbers of simultaneous requests.
            num_tokens: Most tokens of their prompts and of their completions.

        Returns:
            The number of programs that were compiled.
        """
        clients, before = list(clients), sum(programs.num_compiled for programs in self.programs.values())
        for name, programs in self.programs.items():
            most = min(num_tokens, self.engines[name].config.max_positions // 2)
            session = self._sessions[name]
            while missing := self.between_chunks(partial(session.serving.usual, clients, most)).result():
                programs.request(missing)
                programs.wait(missing)
            for number in sorted(min(each, self.max_sequences) for each in clients):
                # requests compile the small rest, and load the programs
                self._widths[name] = max(self._widths[name], number)
                done = threading.Semaphore(0)

                def listener(delta: Delta, done: threading.Semaphore = done) -> None:
                    if delta.finish_reason is not None:
                        done.release()

                self.submit(name, [np.zeros(1, np.int32)] * number, SamplingParams(max_tokens=1), listener)
                for _ in range(number):
                    done.acquire()
        return sum(programs.num_compiled for programs in self.programs.values()) - before

    @property
    def is_alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    def submit(
        self,
        model: str,
        prompts: list[np.ndarray],
        params: SamplingParams,
        listener: Listener,
        row_keys: np.ndarray | None = None,
        images: PromptImages | None = None,
    ) -> Job:
        """Starts a request.

        Args:
            model: Name of the engine's model.
            prompts: Token ids of each prompt.
            params: Sampling parameters; each prompt gets `params.n` completions.
            listener: Called in the loop's thread.
            row_keys: PRNG key of each completion, [prompts * n, 2] uint32; None derives them from the seed.
            images: Images of the prompt, which is then the only one.

        Raises:
            ValueError: The engine cannot run it (see `Engine.sequences` and `Session.check`).
            QueueFullError: Too many sequences wait or run.
        """
        engine = self.engines[model]
        sequences = engine.sequences(prompts, params, adapter=adapter_of(engine, model))
        for sequence in sequences:
            sequence.images = images
        if row_keys is not None:
            for sequence, key in zip(sequences, row_keys, strict=True):
                sequence.key = key
        session = self._sessions[self._firsts[model]]
        session.check(sequences)
        job = Job(model, sequences, listener, [[] for _ in sequences])
        with self._changed:
            if self._closed:
                raise ClosedError
            if self._num_sequences + len(sequences) > self.max_sequences:
                raise QueueFullError(f"{self.max_sequences} completions wait or run")
            self._num_sequences += len(sequences)
            self._commands.append(lambda: self._start(job))
            self._changed.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Cancels the rest of a request, whose listener is not called any more."""
        self._command(lambda: self._cancel(job))

    def between_chunks(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function in the loop's thread while no program runs, for example to change an engine's weights.

        Args:
            function: The function, which every request waits for. To change weights it sets `engine.params`, and
                `engine.version` unless that should increase by one; running sequences continue with the new weights.

        Returns:
            The future result. Cancelling it before the function starts skips the function.
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

    def pause(self, mode: PauseMode) -> Future[None]:
        """Pauses all engines, for example while their weights change. Requests that arrive meanwhile wait.

        Args:
            mode: "keep" stops after the current chunk, and running requests continue after `resume`; "wait" stops when
                they have finished; "abort" aborts all requests.

        Returns:
            Ends when the engines have stopped.
        """
        future: Future[None] = Future()

        def begin() -> None:
            if mode == "abort":
                self._abort_all()
                self._arrived_while_paused.clear()
                for name in self._sessions:
                    self._restart(name)
                self._count()
            self.pausing, self.is_paused = mode, False
            self._pauses.append(future)
            self._pause_if_idle()

        if not self._command(begin):
            future.set_exception(ClosedError())
        return future

    def resume(self) -> Future[None]:
        """Ends a pause."""
        return self.between_chunks(self._resume)

    def _command(self, command: Callable[[], None]) -> bool:
        with self._changed:
            if not self._closed:
                self._commands.append(command)
                self._changed.notify()
            return not self._closed

    # -- methods of the loop's thread

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not (self._closed or self._commands or (self._has_work and not self.is_paused)):
                        self._changed.wait()
                    if self._closed:
                        break
                    num_commands = len(self._commands)
                for _ in range(num_commands):
                    self._commands.popleft()()
                if self.is_paused:
                    continue
                for model in self._sessions:
                    self._step(model)
                self._pause_if_idle()
        finally:
            with self._changed:
                self._closed = True
            with ExitStack() as last:  # runs each of these, even if an earlier one raises
                last.callback(self._answer_pauses)
                last.callback(self._abort_all)
                for command in reversed(self._commands):
                    last.callback(command)

    def _restart(self, model: str) -> None:
        self._sessions[model] = self._new_session(model)
        self._parts[model].clear()

    def _new_session(self, model: str) -> Session:
        return Session(self.engines[model], PATIENCE, partial(Serving, self.programs[model]))

    @property
    def _has_work(self) -> bool:
        return any(self._parts[name] or session.can_step for name, session in self._sessions.items())

    def _pause_if_idle(self) -> None:
        """Stops the engines for a pause, unless it waits for requests that still run."""
        is_busy = any(self._parts[name] or session.busy for name, session in self._sessions.items())
        if self.pausing is not None and not (self.pausing == "wait" and is_busy):
            self.is_paused = True
            self._answer_pauses()

    def _answer_pauses(self) -> None:
        waiting, self._pauses = self._pauses, []
        for future in waiting:
            future.set_result(None)

    def _resume(self) -> None:
        self.pausing, self.is_paused = None, False
        self._answer_pauses()
        arrived, self._arrived_while_paused = self._arrived_while_paused, []
        for job in arrived:
            self._admit(job)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _step(self, model: str) -> None:
        session, parts = self._sessions[model], self._parts[model]
        while parts and session.num_running + session.num_waiting < self._widths[model]:
            session.submit([each for each in parts.popleft() if not each.finish_reason])
        if not session.busy:
            return
        pace = session.serving.pace
        begun_s, pace.device_s = time.perf_counter(), 0.0
        try:
            updates = [sequence for sequence, _ in session.step()]
        except Exception:
            # For example out of memory on the devices. The next requests start with an empty cache.
            logger.exception("the engine of %s failed; its requests are aborted", model)
            self._restart(model)
            self._count()
            self._abort_all(model)
            return
        deltas = [each for sequence in updates if (each := self._delta(sequence)) is not None]
        self._release(sum(delta.finish_reason is not None for _, delta in deltas))
        num_tokens = sum(len(delta.tokens) for _, delta in deltas)
        self._count(num_chunks=int(bool(deltas)), num_tokens=num_tokens)  # before listeners
        for job, delta in deltas:
            job.listener(delta)
        pace.add_host(time.perf_counter() - begun_s - pace.device_s)
        if pace.device_s > LONGEST_TURN_S:
            self._widths[model] = max(PART, session.num_running // 2)
        elif parts and pace.device_s < LONGEST_TURN_S / 2 and session.num_running >= self._widths[model] // 2:
            self._widths[model] *= 2

    def _start(self, job: Job) -> None:
        for index, sequence in enumerate(job.sequences):
            self._jobs[id(sequence)] = job, index
        self._count()
        if self.pausing is None:
            self._admit(job)
        else:
            self._arrived_while_paused.append(job)

    def _admit(self, job: Job) -> None:
        """Has a request join its engine's session: at once, or the rest of a wide one later and in parts."""
        model, sequences = self._firsts[job.model], job.sequences
        self._sessions[model].submit(sequences[:PART])
        self._parts[model].extend(sequences[first : first + PART] for first in range(PART, len(sequences), PART))

    def _cancel(self, job: Job) -> None:
        cancelled = [sequence for sequence in job.sequences if self._jobs.pop(id(sequence), None) is not None]
        for sequence in cancelled:
            sequence.cancel()
        self._release(len(cancelled))
        self._count(num_cancelled=len(cancelled))

    def _abort_all(self, model: str | None = None) -> None:
        """Aborts all requests, or those to a model's engine."""
        for key, (job, index) in list(self._jobs.items()):
            if model in (None, self._firsts[job.model]):
                del self._jobs[key]
                self._release(1)
                job.listener(Delta(index, len(job.reported[index]), [], [], [], [], [], "abort", ""))

    def _delta(self, sequence: Sequence) -> tuple[Job, Delta] | None:
        """Returns what a listener has not received yet; None if that is nothing."""
        job, index = self._jobs.get(id(sequence), (None, 0))
        if job is None:
            return None  # cancelled
        reported = job.reported[index]
        start = len(reported) if sequence.tokens[: len(reported)] == reported else 0
        if sequence.finish_reason is None and len(sequence.tokens) <= start:
            return None
        new = slice(start, None)
        delta = Delta(
            index=index,
            start=start,
            tokens=sequence.tokens[new],
            policy_logps=sequence.policy_logps[new],
            sampler_logps=sequence.sampler_logps[new],
            alternatives=sequence.alternatives[new],
            versions=sequence.versions[new],
            finish_reason=sequence.finish_reason,
            text=sequence.fault or sequence.text,
        )
        reported[start:] = delta.tokens
        if sequence.finish_reason:
            del self._jobs[id(sequence)]
        return job, delta

    def _release(self, num: int) -> None:
        with self._changed:
            self._num_sequences -= num

    def _count(self, **added: Any) -> None:
        values = {name: getattr(self.counts, name) + number for name, number in added.items()}
        self.loads = {
            name: EngineLoad(session.num_running, session.num_waiting, session.kv_frac)
            for name, session in self._sessions.items()
        }
        held = [job.sequences for job in self._arrived_while_paused]
        held += [part for parts in self._parts.values() for part in parts]
        num_held = sum(id(each) in self._jobs for part in held for each in part)
        values["num_running"] = sum(load.num_running for load in self.loads.values())
        values["num_waiting"] = sum(load.num_waiting for load in self.loads.values()) + num_held
        self.counts = LoopCounts(**{**vars(self.counts), **values})


def adapter_of(engine: Engine, model: str) -> str | None:
    """Returns the adapter of an engine that a model's name stands for; None if it is the engine's own model."""
    return model if model in engine.adapters else None


class PromptScorer:
    """Computes the log-probs of prompts in the loop's thread. Completions continue between two slices of a prompt."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._turn = asyncio.Semaphore(1)
        self._num_waiting = 0
        self._num_pieces = 1  # of a slice

    async def score(
        self, model: str, prompts: list[np.ndarray], temperature: float, num_alternatives: int
    ) -> list[PromptLogps]:
        """Returns the log-probs of prompts, in their order."""
        if self._num_waiting + len(prompts) > self._loop.max_sequences:
            raise QueueFullError(f"{self._loop.max_sequences} prompts wait for their log-probs")
        self._num_waiting += len(prompts)
        engine, found = self._loop.engines[model], dict[int, PromptLogps]()
        size = num_data_shards(engine.mesh)
        by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        try:
            for first in range(0, len(prompts), size):
                indices = by_length[first : first + size]
                chosen = [prompts[index] for index in indices]
                await asyncio.to_thread(compile_for, engine, num_columns(len(chosen[-1])))
                async with self._turn:
                    scoring = await self._between_chunks(
                        lambda: Scoring(engine, chosen, temperature, adapter_of(engine, model))  # noqa: B023
                    )
                    while not scoring.is_done:
                        await self._between_chunks(partial(self._advance, scoring))
                found |= dict(zip(indices, await asyncio.to_thread(scoring.results, num_alternatives), strict=True))
            return [found[index] for index in range(len(prompts))]
        finally:
            self._num_waiting -= len(prompts)

    async def _between_chunks(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._loop.between_chunks(function))

    def _advance(self, scoring: Scoring) -> None:
        begun_s = time.perf_counter()
        scoring.advance(self._num_pieces)
        seconds = time.perf_counter() - begun_s
        if seconds > LONGEST_TURN_S:
            self._num_pieces = max(1, self._num_pieces // 2)
        elif seconds < LONGEST_TURN_S / 4:
            self._num_pieces *= 2
