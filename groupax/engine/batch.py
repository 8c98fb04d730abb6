"""Sequences on the devices: they enter slots, are decoded a chunk at a time, and leave.

    (submit ──► reserve) ──► rebalance ──► grow_cache ──► admit ──► decode ──► store_prefixes ──► free_finished ──►
    compact ──► ...

The scheduler knows which sequence sits in which slot, the plan what memory allows; the batch changes the arrays
accordingly.
"""

from collections.abc import Iterable
from dataclasses import replace
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from groupax.engine.cache import ROWS, Cache, cache_maker, pspec_of
from groupax.engine.cache_ops import move_slots, read_slot, rearrange, release, widen_slots
from groupax.engine.core import EngineCore
from groupax.engine.decode import Chunk, decode_chunk
from groupax.engine.plan import (
    CACHE_COLUMNS,
    CacheShape,
    Plan,
    bucket,
    expected_columns,
    max_prompts,
    power_of_two,
    prefill_columns,
)
from groupax.engine.prefill import Known, admit
from groupax.engine.prefix_cache import prefix_of
from groupax.engine.scheduler import Admission, Scheduler
from groupax.engine.sequence import Sequence, required_columns
from groupax.engine.slots import fill, slot_table, to_slots
from groupax.models.specs import Params
from groupax.parallel.mesh import num_data_shards
from groupax.parallel.transfer import to_device, to_host
from groupax.settings.sampling import BIASED_TOKENS, STOP_IDS, SamplingKind, sampling_kind

# With at most this many chunks left, the number of slots no longer changes.
LAST_CHUNKS = 3


class Batch:
    """Sequences that wait or run, and the slots and the cache of those that run.

    Args:
        core: The engine's model, devices and cache of prefixes.
        plan: Limits of the cache.
        sequences: Unstarted sequences.
        patience: Number of chunks for which fewer slots must be enough before the others are dropped.

    Attributes:
        scheduler: Assigns sequences to slots.
        cache, slots: The arrays on the devices.
        column: The column of the cache that all slots write next.

    Raises:
        ValueError: The plan does not allow two of the longest sequences.
    """

    def __init__(self, core: EngineCore, plan: Plan, sequences: list[Sequence], patience: int) -> None:
        self.core, self.plan, self.patience = core, plan, patience
        self.mesh, self.chunk_steps = core.mesh, core.chunk_steps
        self._generations: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()  # of the weights each started with
        self._num_idle = 0  # chunks in a row after which half of the slots were enough
        self._num_needed = 0  # slots per shard, the most of these chunks
        shape = self._first_shape(sequences)
        self.scheduler = Scheduler(num_data_shards(self.mesh), shape.num_slots, shape.share)
        self.scheduler.submit(sequences)
        self.num_stop_ids, self.num_biased = _slot_sizes(sequences)
        shape = replace(shape, num_columns=self._columns(self.chunk_steps))
        self.cache: Cache = cache_maker(core.config, self.mesh, shape, core.kv_dtype)()
        self.slots = to_slots(self._idle_slots(), self._on_rows)
        self.column = 0

    @property
    def shape(self) -> CacheShape:
        """Shape of each shard's cache."""
        scheduler, cache = self.scheduler, self.cache
        return CacheShape(scheduler.slots_per_shard, scheduler.share, cache.num_prompt_columns, cache.num_columns)

    def allows(self, sequences: Iterable[Sequence]) -> bool:
        """Returns whether a sequence as long as the longest of these and of the batch's own would fit."""
        all_of_them = [*self.scheduler.running, *self.scheduler.queued, *sequences]
        return self.plan.allows(self.plan.smallest_shape(required_columns(all_of_them, self.chunk_steps)))

    def submit(self, sequences: list[Sequence]) -> None:
        """Adds sequences at the end of the queue. Before they are admitted, `reserve` must be called."""
        self.scheduler.submit(sequences)

    def reserve(self) -> None:
        """Adds prompt columns, prompt slots and slots for the waiting sequences, as far as memory allows.

        A longer prompt makes all prompt slots wider; running sequences are preempted if there is no room for that.
        """
        scheduler, now = self.scheduler, self.shape
        if not scheduler.waiting:
            return
        sequences = [*scheduler.running, *scheduler.queued]
        self._widen_slots(sequences)
        longest_prompt, longest_completion = required_columns(sequences, self.chunk_steps)
        prompt_columns = self._prompt_columns(longest_prompt)
        if now.num_prompt_columns // 2 < prompt_columns < now.num_prompt_columns:
            prompt_columns = now.num_prompt_columns
        shape = replace(now, share=self._fitting_share(), num_prompt_columns=prompt_columns)
        if not self.plan.allows(shape):
            columns = self._columns(scheduler.num_fed + self.chunk_steps)
            # preempted sequences may share no prompt slots
            num_slots = self.plan.smaller(replace(shape, share=1, num_columns=columns)).num_slots
            self._preempt_to(CacheShape(num_slots, min(now.share, num_slots), now.num_prompt_columns, columns))
            now = self.shape
            shape = replace(now, share=self._fitting_share(), num_prompt_columns=prompt_columns)
        shape = self._with_room(shape, max(now.num_columns, expected_columns(longest_completion)))
        if shape != now:
            self._change_to(shape, self.column)

    def _with_room(self, shape: CacheShape, num_columns: int) -> CacheShape:
        """Returns the shape with prompt slots and slots for the waiting sequences, allowed at this many columns."""
        scheduler, num_slots = self.scheduler, shape.num_slots
        # as many prompts as in twice the slots, and no more rows
        split = self._split(replace(shape, num_columns=num_columns))
        if not scheduler.num_blocked(split):
            shape = replace(shape, share=split)
        num_blocked = scheduler.num_blocked(shape.share)
        larger = shape
        while num_blocked > scheduler.num_shards * (larger.num_slots - num_slots):
            larger = replace(larger, num_slots=2 * larger.num_slots)
            if not (self.plan.allows(replace(larger, num_columns=num_columns)) and self._may_have(larger.num_slots)):
                break
            if self._is_prepared(larger):
                shape = larger
        return shape

    def rebalance(self) -> None:
        """Splits prompt slots, once half of all slots are idle in those where others still run, and something waits."""
        scheduler, shape = self.scheduler, self.shape
        if not scheduler.waiting or 2 * scheduler.num_stranded < len(scheduler.slots):
            return
        split = replace(shape, share=self._split(shape))
        if split != shape and self._is_prepared(split):
            self._change_to(split, self.column)

    def grow_cache(self) -> None:
        """Provides columns for another chunk: they are shifted, added or dropped, or sequences are preempted.

        Where there is memory for twice the slots, those are added too.
        """
        scheduler, shape = self.scheduler, self.shape
        needed = self._columns(scheduler.num_fed + self.chunk_steps)
        is_wide = needed <= shape.num_columns // 2 and self._is_prepared(replace(shape, num_columns=needed))
        if self.column <= shape.num_columns - self.chunk_steps and not is_wide:
            return
        shape = replace(shape, num_columns=needed if is_wide else max(needed, shape.num_columns))
        if not self.plan.allows(shape):
            self._preempt_to(self.plan.smaller(shape))
            return
        doubled = replace(shape, num_slots=2 * shape.num_slots)
        is_allowed = scheduler.num_blocked() and self.plan.allows(doubled) and self._may_have(doubled.num_slots)
        self._change_to(doubled if is_allowed and self._is_prepared(doubled) else shape, scheduler.num_fed)

    def admit(self, params: Params) -> None:
        """Lets waiting sequences enter free slots, as many prompts at a time as are computed at once."""
        while admissions := self.scheduler.admit(self._max_prompts()):
            for admission in admissions:
                self._admit(params, admission)

    def decode(self, params: Params) -> list[tuple[Sequence, int]]:
        """Decodes another chunk and returns the running sequences with their numbers of tokens before."""
        running = self.scheduler.running
        lengths = {id(sequence): len(sequence.tokens) for sequence in running}
        self.cache, self.slots, chunk = decode_chunk(
            params,
            self.cache,
            self.slots,
            np.int32(self.column),
            config=self.core.config,
            mesh=self.mesh,
            num_steps=self.chunk_steps,
            sampling=self._sampling(running),
        )
        self.column += self.chunk_steps
        grown = self.scheduler.append(_fetched(chunk, running))
        return [(sequence, lengths[id(sequence)]) for sequence in grown]

    def store_prefixes(self) -> None:
        """Stores the keys and values of the sequences that have just finished, if prefixes are kept."""
        prefixes = self.core.prefixes
        if not prefixes.max_bytes:
            return
        for slot, sequence in enumerate(self.scheduler.slots):
            if sequence is None or sequence.finish_reason is None or not sequence.tokens:
                continue
            if self._generations[sequence] != prefixes.generation:
                continue  # some of it was computed by other weights
            stored = to_host(read_slot(self.cache, self.slots, slot, slot // self.scheduler.share))
            prefixes.add(prefix_of(stored, sequence.prompt, sequence.tokens))

    def free_finished(self) -> None:
        """Frees the slots of finished sequences."""
        freed = self.scheduler.free_finished()
        if not freed:
            return
        released = np.zeros(len(self.scheduler.slots), bool)
        released[freed] = True
        self.slots = release(self.slots, self._on_rows(released))

    def compact(self) -> None:
        """Halves the number of slots, or more, once they are idle; to be called after each chunk.

        Each number of slots needs its own programs, which do not pay off for the last few chunks.
        """
        scheduler = self.scheduler
        needed = max(self._num_needed, power_of_two(scheduler.num_slots_needed()))
        self._num_idle, self._num_needed = self._num_idle + 1, needed
        left = max((each.params.max_tokens - len(each.tokens) for each in scheduler.running), default=0)
        is_idle = not scheduler.waiting and needed <= scheduler.slots_per_shard // 2
        is_idle = is_idle and left > LAST_CHUNKS * self.chunk_steps
        if is_idle and self._num_idle <= self.patience:
            return
        self._num_idle = self._num_needed = 0
        # a prompt slot for each slot may take more memory than fewer slots save
        shape = replace(self.shape, num_slots=needed, share=1)
        if not is_idle or not self.plan.allows(shape) or not self._is_prepared(shape):
            return
        share = scheduler.share
        kept = scheduler.compact(needed)
        self._rearrange(kept, kept // share, self.column, shape)

    # -- shapes, which a batch that is served chooses among those that are compiled (see `prepared`)

    def _first_shape(self, sequences: list[Sequence]) -> CacheShape:
        counts: dict[tuple[int, int], int] = {}
        for sequence in sequences:
            counts[sequence.group] = counts.get(sequence.group, 0) + 1
        num_shards = num_data_shards(self.mesh)
        return self.plan.first_shape(counts.values(), num_shards, required_columns(sequences, self.chunk_steps))

    def _columns(self, num_tokens: int) -> int:
        """Returns the number of columns for completions of this many tokens."""
        return bucket(num_tokens, CACHE_COLUMNS)

    def _prompt_columns(self, num_tokens: int) -> int:
        """Returns the number of prompt columns for prompts of this many tokens."""
        return prefill_columns(num_tokens)

    def _fitting_share(self) -> int:
        """Returns the number of slots per prompt slot with which waiting sequences leave none of them idle."""
        return self.scheduler.fitting_share()

    def _max_prompts(self) -> int:
        """Returns the maximum number of prompts of one admission on a shard."""
        return max_prompts(self.shape.num_prompt_columns)

    def _admission_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Returns the numbers of prompts and of their columns to compute for an admission of this size."""
        return size

    def _sampling(self, sequences: Iterable[Sequence]) -> SamplingKind:
        """Returns the kind of sampling of a program that decodes these sequences."""
        return sampling_kind(sequence.params for sequence in sequences)

    def _is_prepared(self, shape: CacheShape) -> bool:  # noqa: ARG002
        """Returns whether to change to this shape now, where the change may wait."""
        return True

    def _split(self, shape: CacheShape) -> int:
        """Returns the largest number of slots per prompt slot with which the fewest sequences are blocked."""
        halved = [replace(shape, share=shape.share >> times) for times in range(shape.share.bit_length())]
        allowed = (each.share for each in halved if self.plan.allows(each))
        return min(allowed, key=self.scheduler.num_blocked, default=shape.share)

    def _may_have(self, num_slots: int) -> bool:
        return num_slots <= power_of_two(self.plan.max_slots, self.scheduler.num_shards)

    # -- changes of the arrays

    def _change_to(self, shape: CacheShape, column: int) -> None:
        """Changes to a shape with as many slots or more, and as many per prompt slot or fewer."""
        now, scheduler = self.shape, self.scheduler
        rows = prompt_slots = None
        if shape.num_slots != now.num_slots:
            rows = self._indices(shape.num_slots, now.num_slots, 1)
        if rows is not None or (shape.share, shape.num_prompt_columns) != (now.share, now.num_prompt_columns):
            prompt_slots = self._indices(shape.num_prompt_slots, now.num_prompt_slots, now.share // shape.share)
        if shape.share != now.share:
            scheduler.split(shape.share)
        scheduler.grow(shape.num_slots)
        self._rearrange(rows, prompt_slots, column, shape)

    def _preempt_to(self, shape: CacheShape) -> None:
        """Changes to a shape with fewer slots, in which the longest sequences stay."""
        column = self.scheduler.num_fed
        prompt_slots, rows = self.scheduler.preempt(shape.num_prompt_slots, shape.share)
        self._rearrange(rows, prompt_slots, column, shape)

    def _indices(self, number: int, number_before: int, parts: int) -> np.ndarray:
        """Returns for each new slot of each shard the old slot that it is one of `parts` of, -1 for an added one."""
        own = np.arange(number) // parts
        return np.tile(np.where(own < number_before, own, -1), self.scheduler.num_shards).astype(np.int32)

    def _widen_slots(self, sequences: list[Sequence]) -> None:
        """Makes room for the stop ids and biased tokens of these sequences."""
        sizes = _slot_sizes(sequences)
        if sizes[0] > self.num_stop_ids or sizes[1] > self.num_biased:
            self.num_stop_ids, self.num_biased = max(self.num_stop_ids, sizes[0]), max(self.num_biased, sizes[1])
            self.slots = widen_slots(self.slots, num_stop_ids=self.num_stop_ids, num_biased=self.num_biased)

    def _rearrange(
        self, rows: np.ndarray | None, prompt_slots: np.ndarray | None, column: int, shape: CacheShape
    ) -> None:
        """Moves these slots and prompt slots into arrays of a shape, with the next column at `column`."""
        rows_on_devices = None if rows is None else self._on_rows(rows)
        self.cache = rearrange(
            self.cache,
            rows_on_devices,
            None if prompt_slots is None else self._on_rows(prompt_slots),
            column - self.column,
            num_columns=shape.num_columns,
            num_prompt_columns=shape.num_prompt_columns,
            mesh=self.mesh,
        )
        self.slots = move_slots(self.slots, rows_on_devices, jnp.int32(column - self.column), mesh=self.mesh)
        self.column = column

    def _admit(self, params: Params, admission: Admission) -> None:
        prompts, starts = admission.padded(self._admission_size(admission.size))
        source = np.full(self.cache.prompt_tokens.shape[0], -1, np.int32)
        for prompt_slot, index in admission.prompt_slots:
            source[prompt_slot] = index
        admitted = self._idle_slots()
        is_new = np.zeros(len(admitted), bool)
        for slot, sequence in admission.slots:
            is_new[slot] = True
            self._generations[sequence] = self.core.prefixes.generation
            fill(admitted[slot], sequence, self.column)
        self.cache, self.slots = admit(
            params,
            self.cache,
            self.slots,
            self._on_rows(prompts),
            self._on_rows(starts),
            self._on_rows(source),
            self._on_rows(is_new),
            to_slots(admitted, self._on_rows),
            self._known(prompts, starts),
            config=self.core.config,
            mesh=self.mesh,
        )

    def _known(self, prompts: np.ndarray, starts: np.ndarray) -> Known | None:
        """Returns the stored keys and values of these left-padded prompts, [P, S]; None if there are none."""
        gathered = self.core.prefixes.gather(prompts, starts)
        if gathered is None:
            return None
        lengths, k, v = gathered
        arrays = (starts + lengths, k, v)
        return Known(*to_device(arrays, jax.tree.map(lambda x: NamedSharding(self.mesh, pspec_of(x)), arrays)))

    def _idle_slots(self) -> np.ndarray:
        return slot_table(len(self.scheduler.slots), self.num_stop_ids, self.num_biased)

    def _on_rows(self, array: np.ndarray) -> jax.Array:
        return to_device(np.ascontiguousarray(array), NamedSharding(self.mesh, ROWS))


def _slot_sizes(sequences: Iterable[Sequence]) -> tuple[int, int]:
    """Returns the numbers of stop ids and biased tokens that a slot must have room for."""
    sizes = [(power_of_two(len(each.stop_ids)), power_of_two(len(each.params.logit_bias))) for each in sequences]
    return max(STOP_IDS, *(num for num, _ in sizes)), max(BIASED_TOKENS, *(num for _, num in sizes))


def _fetched(chunk: Chunk, running: list[Sequence]) -> Chunk:
    """Returns the chunk on the host, its alternatives only if a sequence requested them."""
    if not any(sequence.params.logprobs for sequence in running):
        chunk = replace(chunk, alternatives=None, alternative_logps=None)
    return to_host(chunk)
