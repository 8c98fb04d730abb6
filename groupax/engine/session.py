"""Sequences that run, to which others are added while they do."""

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from groupax.data.tokenizer import context_tokens, decode_after
from groupax.engine.batch import Batch, longest
from groupax.engine.prepared import PreparedBatch, Rehearsal, copied, usual
from groupax.engine.programs import Program, Programs
from groupax.engine.sequence import Sequence
from groupax.engine.stop_strings import exempt_length, find_stop, text_before_stop
from groupax.parallel.mesh import num_data_shards

if TYPE_CHECKING:
    from groupax.engine.engine import Engine


class Session:
    """Requests of one engine, each a list of sequences from `Engine.sequences`, decoded together.

        submit ──► waits ──► step ──► step ──► ... each yields what has grown

    A sequence comes out as if it ran alone, whenever others join or leave. Between two steps requests may be added,
    sequences cancelled (`Sequence.cancel`) and the engine's weights changed; all of that in the thread that steps.
    While nothing runs, no memory is held for keys and values.

    Args:
        engine: its memory for keys and values is counted now and belongs to this session until it ends.
        patience: while requests are few, slots for more are kept for so many chunks.
        programs: what is compiled beside decoding; requests that need something else wait for it, and others pass them.
            None compiles when something is needed, while all wait.
    """

    def __init__(self, engine: "Engine", patience: int = 0, programs: Programs | None = None) -> None:
        self.engine, self.patience, self.programs = engine, patience, programs
        self._held: set[tuple[Any, ...]] = set()  # kinds of requests that wait for programs, as long as none is added
        self._num_programs = 0
        self._plan = engine.plan()
        self._batch: Batch | None = None
        self._pending: deque[list[Sequence]] = deque()
        self._num_requests = 0
        self._told: dict[int, int] = {}  # by sequence; one that had to start again has been told more than it has
        self._ended: set[int] = set()  # told to have ended, by whoever was told, and still in a slot

    @property
    def busy(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self._pending) or self._batch is not None

    @property
    def can_step(self) -> bool:
        """Whether the next step does anything: something runs, or waits for something else than programs."""
        if self._batch is not None or self._has_new_programs:
            return self.busy
        return any(self._kind(each) not in self._held for each in self._pending)

    @property
    def _has_new_programs(self) -> bool:
        return self.programs is not None and self.programs.num_compiled != self._num_programs

    @property
    def num_running(self) -> int:
        """Sequences in slots."""
        return len(self._batch.scheduler.running) if self._batch else 0

    @property
    def num_waiting(self) -> int:
        """Sequences that have no slot yet, or none any more."""
        queued = len(self._batch.scheduler.queued) if self._batch else 0
        return queued + sum(len(sequences) for sequences in self._pending)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Refuse a request that can never run; from any thread.

        Raises:
            ValueError: the memory for keys and values does not hold two of its longest sequences.
        """
        self._plan.check(longest(sequences, self.engine.chunk_steps))

    def usual_programs(self, clients: Iterable[int], num_tokens: int) -> list[Program]:
        """Returns what requests of usual sizes need and is not compiled yet (see `prepared.usual`)."""
        assert self.programs is not None, "of a session that compiles beside decoding"
        num_shards = num_data_shards(self.engine.mesh)
        needed = usual(clients, num_tokens, self.engine.chunk_steps, num_shards, self._plan.allows)
        return self.programs.missing(needed)

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Add a request: unstarted sequences, which begin with the next step if there is room.

        Raises:
            ValueError: the memory for keys and values does not hold two of its longest sequences.
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
        """Another chunk for all that run; yields those that have grown or ended, with the numbers of their new tokens.

        To be exhausted before the next one. One that had to begin again is told again only when it is further than
        before; if it is cancelled by then, the number is negative.
        """
        yield from self._cancelled_before_they_began()
        has_new = self._has_new_programs
        if self.programs is not None and has_new:
            self._num_programs = self.programs.num_compiled
            self._held.clear()
        has_more = self._begin()
        batch = self._batch
        if batch is None:
            return
        cancelled = batch.scheduler.cancelled()
        for sequence in cancelled:
            self._finish(sequence, len(sequence.tokens))
        batch.free_finished()
        for sequence in cancelled:
            self._told.pop(id(sequence), None)
            if id(sequence) in self._ended:
                self._ended.remove(id(sequence))
            else:
                yield sequence, 0
        if has_more or has_new:
            batch.reserve()
        batch.rebalance()
        batch.grow_cache()
        batch.admit(self.engine.params)
        if batch.scheduler.running:
            yield from self._decode(batch)
        if self.programs is not None and isinstance(batch, PreparedBatch):
            self.programs.request(batch.wishes())
        if not batch.scheduler.busy:
            self._batch = None

    def _cancelled_before_they_began(self) -> Iterator[tuple[Sequence, int]]:
        for sequences in self._pending:
            cancelled = [sequence for sequence in sequences if sequence.finish_reason]
            sequences[:] = [sequence for sequence in sequences if not sequence.finish_reason]
            for sequence in cancelled:
                yield sequence, 0
        self._pending = deque(sequences for sequences in self._pending if sequences)

    def _begin(self) -> bool:
        """Hand requests to the batch, in their order, as long as it could hold them; whether it got any."""
        has_more = False
        held: list[list[Sequence]] = []
        while self._pending and (self._batch is None or self._batch.allows(self._pending[0])):
            sequences = self._pending.popleft()
            if not self._is_prepared(sequences):
                held.append(sequences)
            elif self._batch is None:
                self._batch = self._new_batch(sequences)
            else:
                self._batch.submit(sequences)
                has_more = True
        self._pending.extendleft(reversed(held))
        return has_more

    def _settings(self, sequences: list[Sequence]) -> tuple[Any, ...]:
        """The arguments of a new batch."""
        engine = self.engine
        kept = engine.chunk_steps, engine.kv_dtype, engine.prefixes, self.patience
        return engine.config, engine.mesh, self._plan, sequences, *kept

    def _new_batch(self, sequences: list[Sequence]) -> Batch:
        settings = self._settings(sequences)
        return Batch(*settings) if self.programs is None else PreparedBatch(self.programs, *settings)

    def _is_prepared(self, sequences: list[Sequence]) -> bool:
        """Whether all is compiled that a request and its company may need; if not, that is requested."""
        if self.programs is None:
            return True
        kind = self._kind(sequences)
        if kind in self._held:
            return False
        if isinstance(self._batch, PreparedBatch):
            rehearsal = Rehearsal(self._batch)
            rehearsal.submit(copied(sequences))
        else:
            rehearsal = Rehearsal.of_first(self.programs, *self._settings(copied(sequences)))
        missing = self.programs.missing(rehearsal.run())
        if missing:
            self._held.add(kind)
            self.programs.request(missing)
        return not missing

    def _kind(self, sequences: list[Sequence]) -> tuple[Any, ...]:
        """The same for requests that need the same programs, if they join now."""
        if not sequences:
            return ()
        shape = self._batch.shape if self._batch else None
        groups = len({sequence.group for sequence in sequences})
        return *longest(sequences, self.engine.chunk_steps), groups, len(sequences), shape

    def _decode(self, batch: Batch) -> Iterator[tuple[Sequence, int]]:
        grown = batch.decode(self.engine.params)
        for sequence, num_before in grown:
            sequence.versions += [self.engine.version] * (len(sequence.tokens) - num_before)
            self._finish(sequence, num_before)
        batch.store_prefixes()
        batch.free_finished()
        batch.compact()
        in_slots = {id(sequence) for sequence in batch.scheduler.running}
        for sequence, _ in grown:
            key = id(sequence)
            told = self._told.get(key, 0)
            num_new = len(sequence.tokens) - told
            self._told[key] = max(told, len(sequence.tokens))
            if sequence.finish_reason and key in in_slots:
                self._ended.add(key)
            elif sequence.finish_reason:
                del self._told[key]
            if num_new > 0 or sequence.finish_reason:
                yield sequence, num_new

    def _finish(self, sequence: Sequence, num_before: int) -> None:
        """Look for stop texts in what is new, and set the text of a sequence that has ended."""
        stop, tokenizer = sequence.params.stop, self.engine.tokenizer
        if tokenizer is None or not (stop or sequence.finish_reason):
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
