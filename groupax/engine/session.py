"""Sequences that are decoded together, to which others are added while they run."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from groupax.engine.batch import Batch
from groupax.engine.conversations import store_finished
from groupax.engine.core import EngineCore
from groupax.engine.images import check_images
from groupax.engine.plan import Demand, Plan
from groupax.engine.prefix_cache import Place
from groupax.engine.sequence import Sequence, finish


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
        serve: Returns a server's `programs.Serving` for the plan of the cache: with it, requests that need programs
            wait until these are compiled while the engine decodes, and later requests pass them. None compiles
            whatever is needed while all wait.

    Attributes:
        serving: What `serve` has returned; None without it.
    """

    def __init__(self, engine: EngineCore, patience: int = 0, serve: Callable[[Plan], Any] | None = None) -> None:
        self.engine, self.patience = engine, patience
        self._plan = engine.plan()
        self.serving: Any = serve and serve(self._plan)
        self._batch: Batch | None = None
        self._pending: deque[list[Sequence]] = deque()
        self._num_requests = 0

    @property
    def busy(self) -> bool:
        """True while any sequence waits or runs."""
        return bool(self._pending) or self._batch is not None

    @property
    def can_step(self) -> bool:
        """True if the next step does anything: something runs, or waits for something other than programs."""
        if self._batch is not None or self.serving is None or self.serving.has_new:
            return self.busy
        return not all(self.serving.holds(each, None) for each in self._pending)

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

        Must be exhausted before the next step. A preempted sequence grows again from its beginning.
        """
        if self.engine.before_chunk is not None:
            self.engine.before_chunk()
        has_new = self.serving is not None and self.serving.look()
        yield from self._free_cancelled()
        has_more = self._start()
        batch = self._batch
        if batch is None:
            return
        batch.reshape(reserves=has_more or has_new)
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
        """Drops cancelled sequences and yields them."""
        cancelled: list[Sequence] = []
        for sequences in self._pending:
            cancelled += [sequence for sequence in sequences if sequence.finish_reason]
            sequences[:] = [sequence for sequence in sequences if not sequence.finish_reason]
        self._pending = deque(sequences for sequences in self._pending if sequences)
        if self._batch is not None:
            started = self._batch.scheduler.cancelled()
            for sequence in started:
                finish(sequence, self.engine.tokenizer, len(sequence.tokens))
            if started:
                self._batch.free_finished()
            cancelled += started
        for sequence in cancelled:
            yield sequence, 0

    def _start(self) -> bool:
        """Hands requests to the batch, in order, while it could hold them; returns whether it may need more slots."""
        has_more = False
        held: list[list[Sequence]] = []
        while self._pending and (self._batch is None or self._batch.resizing.allows(self._pending[0])):
            sequences, serving, batch = self._pending.popleft(), self.serving, self._batch
            if serving is not None and not serving.can_start(sequences, batch and batch.resizing):
                held.append(sequences)
            elif batch is None:
                self._batch = Batch(self.engine, self._plan, sequences, self.patience, serving)
                has_more = serving is not None  # which may have fewer slots than sequences
            else:
                batch.submit(sequences)
                has_more = True
        self._pending.extendleft(reversed(held))
        return has_more

    def _decode(self, batch: Batch) -> Iterator[tuple[Sequence, int]]:
        grown = batch.decode(self.engine.params)
        version = self.engine.version
        for sequence, num_before in grown:
            sequence.versions += [version] * (len(sequence.tokens) - num_before)
            if sequence.finish_reason or sequence.params.stop:
                finish(sequence, self.engine.tokenizer, num_before)
        if self.engine.prefixes.max_bytes:
            store_finished(self.engine, batch.cache, batch.scheduler)
        batch.free_finished()
        batch.compact()
        reasons = [sequence.finish_reason for sequence, _ in grown]
        for (sequence, num_before), reason in zip(grown, reasons, strict=True):
            num_new = len(sequence.tokens) - num_before
            # one that is cancelled meanwhile is reported by the next step
            if sequence.finish_reason == reason and (num_new or reason):
                yield sequence, num_new
