"""A thread that drives an engine: requests join while others run.

submit (any thread) ──► commands ─┐
cancel ───────────────► commands ─┤  between two chunks
between_chunks ───────► commands ─┤
                                  ▼
          the thread: commands, then a step of the session ──► listeners
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np

from groupax.core.settings.sampling import SamplingParams
from groupax.core.types import PromptImages
from groupax.engine.engine import Engine
from groupax.engine.programs import Programs, Serving
from groupax.engine.sequence import Sequence
from groupax.engine.session import Session
from groupax.serve.exchange import LISTS, Delta
from groupax.serve.web import ApiError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Listener = Callable[[Delta], None]

# Chunks for which unused slots are kept: clients often send another request after a response.
PATIENCE = 32
# What one turn of the loop may take while other requests wait, in seconds: a wide request joins in parts of PART
# completions, more of them at a time as long as chunks take less.
LONGEST_TURN_S = 0.25
PART = 32


class ClosedError(ApiError):
    """The loop takes no more requests."""

    def __init__(self) -> None:
        super().__init__(503, "the server is stopping", code="stopping")


@dataclass(eq=False)
class Job:
    """A request in the loop.

    Attributes:
        sequences: Its sequences, which belong to the loop's thread.
        listener: Called with every delta, in that thread; it must be quick and must not raise.
        reported: Tokens of each sequence that the listener has received.
    """

    sequences: list[Sequence]
    listener: Listener
    reported: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class LoopCounts:
    """The current load of the loop, and the number of completions that were cancelled since its start."""

    num_running: int = 0
    num_waiting: int = 0
    kv_frac: float = 0.0
    num_cancelled: int = 0


class EngineLoop:
    """Drives an engine in one thread.

    A completion depends on its prompt, its settings including the seed, its index in the request, and the weights: it
    equals that of `Engine.generate`. Methods may be called from any thread; they raise a `ClosedError`, or return a
    future that does, once the loop has stopped.

    Args:
        engine: The engine. Its memory for the KV cache is fixed now.
        name: Name of its model; its adapters have their own.
        max_sequences: Most sequences that wait or run at once.

    Attributes:
        engine: The engine; only functions that `between_chunks` runs may change its weights.
        names: Names of the model and of its adapters.
        counts: Load and totals; the record is replaced, so that any thread may read it.
        programs: Programs of the engine, compiled in the background.
        is_ready: Whether the usual programs are compiled; set by the caller of `warm_up`.
    """

    def __init__(self, engine: Engine, name: str, max_sequences: int = 1024) -> None:
        self.engine, self.names, self.max_sequences = engine, (name, *engine.adapters), max_sequences
        self.counts = LoopCounts()
        self.programs = Programs(engine, self._wake)
        self._session = self._new_session()
        self._jobs: dict[int, tuple[Job, int]] = {}  # by sequence: its job, its index there
        self._parts: deque[list[Sequence]] = deque()  # of wide requests, which wait
        self._width = PART  # most sequences at once while such parts wait
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
        self.programs.close()
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
        clients, before = list(clients), self.programs.num_compiled
        most = min(num_tokens, self.engine.config.max_positions // 2)
        while missing := self.between_chunks(partial(self._session.serving.usual, clients, most)).result():
            self.programs.request(missing)
            self.programs.wait(missing)
        done = threading.Semaphore(0)

        def listener(delta: Delta) -> None:
            if delta.finish_reason is not None:
                done.release()

        for number in sorted(min(each, self.max_sequences) for each in clients):
            # requests compile the small rest, and load the programs
            self._width = max(self._width, number)
            self.submit(self.names[0], [np.zeros(1, np.int32)] * number, SamplingParams(max_tokens=1), listener)
            for _ in range(number):
                done.acquire()
        return self.programs.num_compiled - before

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
            model: One of `names`.
            prompts: Token ids of each prompt.
            params: Sampling parameters; each prompt gets `params.n` completions.
            listener: Called in the loop's thread.
            row_keys: PRNG key of each completion, [prompts * n, 2] uint32; None derives them from the seed.
            images: Images of the prompt, which is then the only one.

        Raises:
            ValueError: The engine cannot run it (see `Engine.sequences` and `Session.check`).
            ApiError: Too many sequences wait or run.
        """
        sequences = self.engine.sequences(prompts, params, adapter=None if model == self.names[0] else model)
        for sequence in sequences:
            sequence.images = images
        if row_keys is not None:
            for sequence, key in zip(sequences, row_keys, strict=True):
                sequence.key = key
        self._session.check(sequences)
        job = Job(sequences, listener, [[] for _ in sequences])
        with self._changed:
            if self._closed:
                raise ClosedError
            if self._num_sequences + len(sequences) > self.max_sequences:
                message = f"{self.max_sequences} completions wait or run; try again later"
                raise ApiError(429, message, code="queue_full", headers={"retry-after": "1"})
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
                    while not (self._closed or self._commands or self._parts or self._session.can_step):
                        self._changed.wait()
                    if self._closed:
                        break
                    num_commands = len(self._commands)
                for _ in range(num_commands):
                    self._commands.popleft()()
                self._step()
        finally:
            with self._changed:
                self._closed = True
            with ExitStack() as last:  # runs each of these, even if an earlier one raises
                last.callback(self._abort_all)
                for command in reversed(self._commands):
                    last.callback(command)

    def _new_session(self) -> Session:
        return Session(self.engine, PATIENCE, partial(Serving, self.programs))

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _step(self) -> None:
        session, parts = self._session, self._parts
        while parts and session.num_running + session.num_waiting < self._width:
            session.submit([each for each in parts.popleft() if not each.finish_reason])
        if not session.busy:
            return
        pace = session.serving.pace
        begun_s, pace.device_s = time.perf_counter(), 0.0
        try:
            updates = [sequence for sequence, _ in session.step()]
        except Exception:
            # For example out of memory on the devices. The next requests start with an empty cache.
            logger.exception("the engine failed; its requests are aborted")
            self._session = self._new_session()
            parts.clear()
            self._count()
            self._abort_all()
            return
        deltas = [each for sequence in updates if (each := self._delta(sequence)) is not None]
        self._release(sum(delta.finish_reason is not None for _, delta in deltas))
        self._count()  # before listeners
        for job, delta in deltas:
            job.listener(delta)
        pace.add_host(time.perf_counter() - begun_s - pace.device_s)
        if pace.device_s > LONGEST_TURN_S:
            self._width = max(PART, session.num_running // 2)
        elif parts and pace.device_s < LONGEST_TURN_S / 2 and session.num_running >= self._width // 2:
            self._width *= 2

    def _start(self, job: Job) -> None:
        """Has a request join the session: at once, or the rest of a wide one later and in parts."""
        for index, sequence in enumerate(job.sequences):
            self._jobs[id(sequence)] = job, index
        self._session.submit(job.sequences[:PART])
        self._parts.extend(job.sequences[first : first + PART] for first in range(PART, len(job.sequences), PART))
        self._count()

    def _cancel(self, job: Job) -> None:
        cancelled = [sequence for sequence in job.sequences if self._jobs.pop(id(sequence), None) is not None]
        for sequence in cancelled:
            sequence.cancel()
        self._release(len(cancelled))
        self._count(num_cancelled=len(cancelled))

    def _abort_all(self) -> None:
        for key, (job, index) in list(self._jobs.items()):
            del self._jobs[key]
            self._release(1)
            job.listener(Delta(index, len(job.reported[index]), [], [], [], [], [], "abort", ""))

    def _delta(self, sequence: Sequence) -> tuple[Job, Delta] | None:
        """Returns what a listener has not received yet; None if that is nothing."""
        job, index = self._jobs.get(id(sequence), (None, 0))
        if job is None:
            return None  # cancelled
        reported = job.reported[index]
        num = len(sequence.tokens)  # fewer than reported of one that was preempted
        is_same = sequence.tokens[: len(reported)] == reported or (
            num < len(reported) and reported[:num] == sequence.tokens
        )
        start = len(reported) if is_same else 0
        if sequence.finish_reason is None and num <= start:
            return None
        new = {name: getattr(sequence, name)[start:] for name in LISTS}
        text, reason = sequence.fault or sequence.text, sequence.finish_reason
        delta = Delta(index=index, start=start, finish_reason=reason, text=text, **new)
        reported[start:] = delta.tokens
        if sequence.finish_reason:
            del self._jobs[id(sequence)]
        return job, delta

    def _release(self, num: int) -> None:
        with self._changed:
            self._num_sequences -= num

    def _count(self, num_cancelled: int = 0) -> None:
        session = self._session
        num_held = sum(id(each) in self._jobs for part in self._parts for each in part)
        num_waiting, num_cancelled = session.num_waiting + num_held, self.counts.num_cancelled + num_cancelled
        self.counts = LoopCounts(session.num_running, num_waiting, session.kv_frac, num_cancelled)
