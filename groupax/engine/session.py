"""Sequences that are decoded together, to which others are added while they run."""

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from groupax.data.tokenizer import context_tokens, decode_after
from groupax.engine.batch import Batch
from groupax.engine.core import EngineCore
from groupax.engine.prefill import check_images
from groupax.engine.prefix_cache import Place
from groupax.engine.programs import Pace, Program, Programs, Serving, kind_of
from groupax.engine.scheduler import Demand
from groupax.engine.sequence import Sequence, exempt_length, find_stop, text_before_stop


class Session:
    """The requests of one engine, each a list of sequences from `Engine.sequences`, decoded together.

        submit ──► waits ──► step ──► step ──► ... each yields the sequences that have grown

    A sequence comes out as if it ran alone, whenever others join or leave, up to the rounding of its log-probs, which
    depends on the number of slots; with conversations that number never changes. Between two steps requests may be
    added, sequences cancelled (`Sequence.cancel`) and the engine's weights changed; all of that in the thread that
    steps. While nothing runs, no memory is held for keys and values.

    Args:
        engine: The engine; its memory for keys and values is measured now and belongs to this session until it ends.
        patience: Number of chunks for which slots for more requests are kept while requests are few.
        programs: Programs that are compiled while the engine decodes; requests that need others wait for them, and
            later requests pass them. None compiles whatever is needed while all wait.
        pace: Chooses the length of chunks with `programs`; None for one of its own.
    """

    def __init__(
        self, engine: EngineCore, patience: int = 0, programs: Programs | None = None, pace: Pace | None = None
    ) -> None:
        self.engine, self.patience, self.programs = engine, patience, programs
        self._held: set[tuple[Any, ...]] = set()  # kinds of requests that wait for programs, until one is compiled
        self._num_programs = 0
        self._plan = engine.plan()
        self._serving = programs and Serving(programs, self._plan, pace or Pace(engine.chunk_steps))
        self._batch: Batch | None = None
        self._pending: deque[list[Sequence]] = deque()
        self._num_requests = 0
        self._reported: dict[int, int] = {}  # tokens by sequence, which for a preempted one are more than it has
        self._finished: set[int] = set()  # sequences that were reported as finished and are still in a slot

    @property
    def busy(self) -> bool:
        """True while any sequence waits or runs."""
        return bool(self._pending) or self._batch is not None

    @property
    def can_step(self) -> bool:
        """True if the next step does anything: something runs, or waits for something other than programs."""
        serving, programs = self._serving, self.programs
        if self._batch is not None or serving is None or (programs and programs.num_compiled != self._num_programs):
            return self.busy
        return any(self._kind(serving, each) not in self._held for each in self._pending)

    @property
    def pace(self) -> Pace:
        """The length of chunks where programs are compiled while the engine decodes."""
        assert self._serving is not None, "for a session that compiles while it decodes"
        return self._serving.pace

    @property
    def num_running(self) -> int:
        """Number of sequences in slots."""
        return len(self._batch.scheduler.running) if self._batch else 0

    @property
    def num_waiting(self) -> int:
        """Number of sequences without a slot."""
        queued = len(self._batch.scheduler.queued) if self._batch else 0
        return queued + sum(len(sequences) for sequences in self._pending)

    @property
    def kv_frac(self) -> float:
        """Fraction of the memory for keys and values that the tokens of running sequences use."""
        running = self._batch.scheduler.running if self._batch else []
        return sum(len(each.prompt) + len(each.tokens) for each in running) / max(1, self._plan.max_tokens)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Refuses a request that can never run; from any thread.

        Raises:
            ValueError: The memory for keys and values does not hold two of its longest sequences, or a prompt and its
                images do not fit together.
        """
        sequences = list(sequences)
        vision = self.engine.config.vision
        for sequence in sequences:
            if vision is not None or sequence.images is not None:
                check_images(vision, sequence)
        self._plan.check(self._plan.demand(sequences, self.engine.expected))

    def usual_programs(self, clients: Iterable[int], num_tokens: int) -> list[Program]:
        """Returns the programs that requests of usual sizes lack (see `programs.Serving.usual`)."""
        assert self._serving is not None, "for a session that compiles while it decodes"
        return self._serving.usual(clients, num_tokens)

    def converse(self, number: int, max_prompt_tokens: int, max_tokens: int) -> list[Place]:
        """Begins conversations; to be called while nothing waits or runs.

        A prompt of a turn has at most `max_prompt_tokens`, with all turns before it, and a turn has `max_tokens`.

        Returns:
            The place of each for its keys and values; `prefix_bytes` are divided among them.
        """
        assert not self.busy, "shapes are chosen before the first turn"
        engine, demand = self.engine, Demand((1,) * number, max_prompt_tokens - 1, max_tokens)
        self._plan = self._plan.with_conversations(demand, engine.num_shards)
        tokens = engine.prefixes.max_bytes // (engine.bytes_per_token * engine.mesh.shape["tp"])
        return [Place(tokens // number) for _ in range(number)]

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Adds a request: unstarted sequences, which start with the next step if there is room.

        Raises:
            ValueError: It can never run (see `check`).
        """
        sequences = list(sequences)
        if not sequences:
            return
        self.check(sequences)
        self._num_requests += 1
        for sequence in sequences:
            sequence.request = self._num_requests
        self._pending.append(sequences)

    def step(self) -> Iterator[tuple[Sequence, int]]:
        """Decodes a chunk and yields the sequences that have grown or finished, with their numbers of new tokens.

        Must be exhausted before the next step. A preempted sequence is reported again only when it is longer than
        before; if it is cancelled by then, the number is negative.
        """
        if self.engine.before_chunk is not None:
            self.engine.before_chunk()
        has_new = self.programs is not None and self.programs.num_compiled != self._num_programs
        if self.programs is not None and has_new:
            self._num_programs = self.programs.num_compiled
            self._held.clear()
        yield from self._free_cancelled()
        has_more = self._start()
        batch = self._batch
        if batch is None:
            return
        if has_more or has_new:
            batch.reserve()
        batch.fit_columns()
        batch.admit(self.engine.params)
        if batch.scheduler.running:
            yield from self._decode(batch)
        if not (batch.scheduler.waiting or batch.scheduler.running):
            self._batch = None

    def close(self) -> None:
        """Drops everything that waits or runs."""
        self._pending.clear()
        self._batch = None

    def _free_cancelled(self) -> Iterator[tuple[Sequence, int]]:
        """Drops cancelled sequences and yields them, but those that were reported as finished."""
        cancelled: list[Sequence] = []
        for sequences in self._pending:
            cancelled += [sequence for sequence in sequences if sequence.finish_reason]
            sequences[:] = [sequence for sequence in sequences if not sequence.finish_reason]
        self._pending = deque(sequences for sequences in self._pending if sequences)
        if self._batch is not None:
            started = self._batch.scheduler.cancelled()
            for sequence in started:
                self._finish(sequence, len(sequence.tokens))
                self._reported.pop(id(sequence), None)
            if started:
                self._batch.free_finished()
            cancelled += [sequence for sequence in started if id(sequence) not in self._finished]
            self._finished -= {id(sequence) for sequence in started}
        for sequence in cancelled:
            yield sequence, 0

    def _start(self) -> bool:
        """Hands requests to the batch, in order, while it could hold them; returns whether it may need more slots."""
        has_more = False
        held: list[list[Sequence]] = []
        while self._pending and (self._batch is None or self._batch.allows(self._pending[0])):
            sequences = self._pending.popleft()
            if self._serving is not None and not self._is_prepared(self._serving, sequences):
                held.append(sequences)
            elif self._batch is None:
                self._batch = Batch(self.engine, self._plan, sequences, self.patience, self._serving)
                has_more = self.programs is not None  # which may have fewer slots than sequences
            else:
                self._batch.submit(sequences)
                has_more = True
        self._pending.extendleft(reversed(held))
        return has_more

    def _is_prepared(self, serving: Serving, sequences: list[Sequence]) -> bool:
        """Returns whether a request can start with compiled programs; if not, has them compiled."""
        kind = self._kind(serving, sequences)
        if kind in self._held:
            return False
        if self._batch is not None:
            shape = self._batch.shape_with(sequences)
        else:
            shape = serving.nearest(serving.first_shape(sequences), sequences)
        if shape is None:
            self._held.add(kind)
        return shape is not None

    def _kind(self, serving: Serving, sequences: list[Sequence]) -> tuple[Any, ...]:
        """Returns a key that requests share which need the same programs, if they join now."""
        return serving.demand(sequences), kind_of(sequences), self._batch.shape if self._batch else None

    def _decode(self, batch: Batch) -> Iterator[tuple[Sequence, int]]:
        grown = batch.decode(self.engine.params)
        version = self.engine.version
        for sequence, num_before in grown:
            own = version if sequence.adapter is None else self.engine.version_of(sequence.adapter)
            sequence.versions += [own] * (len(sequence.tokens) - num_before)
            if sequence.finish_reason or sequence.params.stop:
                self._finish(sequence, num_before)
        if self.engine.prefixes.max_bytes:
            batch.store_prefixes()
        batch.free_finished()
        batch.compact()
        in_slots = {id(sequence) for sequence in batch.scheduler.running}
        for sequence, _ in grown:
            key = id(sequence)
            reported = self._reported.get(key, 0)
            num_new = len(sequence.tokens) - reported
            self._reported[key] = max(reported, len(sequence.tokens))
            if sequence.finish_reason and key in in_slots:
                self._finished.add(key)
            elif sequence.finish_reason:
                del self._reported[key]
            if num_new > 0 or sequence.finish_reason:
                yield sequence, num_new

    def _finish(self, sequence: Sequence, num_before: int) -> None:
        """Looks for stop strings in the new tokens, and sets the text of a finished sequence."""
        stop, tokenizer = sequence.params.stop, self.engine.tokenizer
        if tokenizer is None:
            return
        text_of = partial(decode_after, tokenizer, context_tokens(tokenizer, sequence.prompt))
        if stop and sequence.finish_reason != "abort":
            kept = find_stop(text_of, sequence.tokens, num_before, stop, sequence.params.min_tokens)
            if kept is not None:
                sequence.cut(kept)
                sequence.finish_reason = "stop"
        if sequence.finish_reason:
            exempt = exempt_length(text_of, sequence.tokens, sequence.params.min_tokens) if stop else 0
            sequence.text = text_before_stop(text_of(sequence.tokens), stop, exempt)
