"""Sequences on the devices: they enter slots, are decoded a chunk at a time, and leave.

    (submit ──► fit) ──► spread ──► make_room ──► admit ──► decode ──► keep_prefixes ──► retire ──► shrink ──► ...

The scheduler knows which sequence sits in which slot, the plan what memory allows; here is what follows from both for
the arrays.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from groupax.engine.cache import ROWS, Cache, empty_cache, pspec_of
from groupax.engine.cache_ops import move, move_slots, read_slot, rearrange, release, take, widen_slots
from groupax.engine.decode import Chunk, Known, admit, decode_chunk
from groupax.engine.plan import (
    CACHE_COLUMNS,
    CacheShape,
    Plan,
    bucket,
    expected_columns,
    longest_columns,
    max_prompts,
    power_of_two,
    prefill_columns,
)
from groupax.engine.prefix_cache import Prefix, PrefixCache
from groupax.engine.scheduler import Admission, Scheduler
from groupax.engine.sequence import Sequence
from groupax.engine.slots import fill, slot_table, to_slots
from groupax.models.config import ModelConfig
from groupax.models.specs import Params
from groupax.parallel.mesh import num_data_shards
from groupax.parallel.transfer import to_device, to_host
from groupax.settings.sampling import BIASED_TOKENS, STOP_IDS

# With at most so many chunks to go there is no other number of slots any more.
LAST_CHUNKS = 3
# All that is compiled for decoding.
PROGRAMS: tuple[Any, ...] = (admit, decode_chunk, move, move_slots, release, read_slot, take, widen_slots)


class Batch:
    """Sequences that wait or run, and the slots and the cache of those that run.

    Args:
        config: the model's architecture.
        mesh: slots are spread over its data axes.
        plan: what the cache may take.
        sequences: unstarted ones.
        chunk_steps: tokens decoded between two visits to the host.
        kv_dtype: of the cache.
        prefixes: what the same weights have computed for earlier sequences, and where to store what they do now.
        patience: fewer slots have to be enough for so many more chunks before the others are given up.

    Attributes:
        scheduler: which sequence sits in which slot.
        cache, slots: on the devices.
        column: of the cache, which all slots write next.

    Raises:
        ValueError: the plan does not allow two of the longest sequences.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        plan: Plan,
        sequences: list[Sequence],
        chunk_steps: int,
        kv_dtype: Any,
        prefixes: PrefixCache,
        patience: int,
    ) -> None:
        self.config, self.mesh, self.plan, self.prefixes = config, mesh, plan, prefixes
        self.chunk_steps, self.patience = chunk_steps, patience
        self._generations: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()  # of the weights each began with
        self._num_idle = 0  # chunks in a row after which half of the slots were enough
        self._num_needed = 0  # slots per shard, the most of these chunks
        num_shards = num_data_shards(mesh)
        shape = self._first_shape(sequences)
        self.scheduler = Scheduler(num_shards, shape.num_slots, shape.share)
        self.scheduler.submit(sequences)
        self.num_stop_ids, self.num_biased = _slot_sizes(sequences)
        sizes = (
            num_shards * shape.num_prompt_slots,
            shape.num_prompt_columns,
            num_shards * shape.num_slots,
            self._columns(chunk_steps),
        )
        self.cache: Cache = cache_maker(config, *sizes, kv_dtype, mesh)()
        self.slots = to_slots(self._idle_slots(), self._on_rows)
        self.column = 0

    @property
    def shape(self) -> CacheShape:
        """Returns the shape of each shard's cache."""
        scheduler, cache = self.scheduler, self.cache
        return CacheShape(scheduler.slots_per_shard, scheduler.share, cache.num_prompt_columns, cache.num_columns)

    def allows(self, sequences: Iterable[Sequence]) -> bool:
        """Returns whether a sequence as long as the longest of these and of its own would fit."""
        all_of_them = [*self.scheduler.running, *self.scheduler.queued, *sequences]
        return self.plan.allows(self.plan.smallest_shape(longest(all_of_them, self.chunk_steps)))

    def submit(self, sequences: list[Sequence]) -> None:
        """Put further sequences behind those that wait. Before they are admitted, `fit` has to be called."""
        self.scheduler.submit(sequences)

    def reserve(self) -> None:
        """Have prompt columns, places and slots for what waits, as far as memory allows.

        A longer prompt makes all of them wider; running sequences begin again if there is no room for that.
        """
        scheduler, shape = self.scheduler, self.shape
        if not scheduler.waiting:
            return
        sequences = [*scheduler.running, *scheduler.queued]
        self._widen_slots(sequences)
        longest_prompt, longest_completion = longest(sequences, self.chunk_steps)
        prompt_columns = self._prompt_columns(longest_prompt)
        if shape.num_prompt_columns // 2 < prompt_columns < shape.num_prompt_columns:
            prompt_columns = shape.num_prompt_columns
        wanted = replace(shape, share=self._fitting_share(), num_prompt_columns=prompt_columns)
        if not self.plan.allows(wanted):
            target = scheduler.num_fed
            columns = self._columns(target + self.chunk_steps)
            # what begins again may share no places
            num_slots = self.plan.smaller(replace(wanted, share=1, num_columns=columns)).num_slots
            share = min(shape.share, num_slots)
            places, rows = scheduler.preempt(num_slots // share, share)
            self._rearrange(rows, places, target, columns)
            shape = self.shape
            wanted = replace(shape, share=self._fitting_share(), num_prompt_columns=prompt_columns)
        expected = max(shape.num_columns, expected_columns(longest_completion))
        # as many prompts as in twice the slots, and no more rows
        split = self._split(replace(wanted, num_columns=expected))
        if not scheduler.num_blocked(split):
            wanted = replace(wanted, share=split)
        num_blocked = scheduler.num_blocked(wanted.share)
        larger = wanted
        while num_blocked > scheduler.num_shards * (larger.num_slots - shape.num_slots):
            larger = replace(larger, num_slots=2 * larger.num_slots)
            if not (self.plan.allows(replace(larger, num_columns=expected)) and self._may_have(larger.num_slots)):
                break
            if self._is_prepared(larger):
                wanted = larger
        if wanted == shape:
            return
        more = wanted.num_slots > shape.num_slots
        rows = self._indices(wanted.num_slots, shape.num_slots, 1) if more else None
        places = self._indices(wanted.num_prompt_slots, shape.num_prompt_slots, shape.share // wanted.share)
        scheduler.split(wanted.share)
        scheduler.grow(wanted.num_slots)
        self._rearrange(rows, places, self.column, shape.num_columns, prompt_columns)

    def rebalance(self) -> None:
        """Split places, once half of all slots are idle in places where others still run, and something waits."""
        scheduler, shape = self.scheduler, self.shape
        if not scheduler.waiting or 2 * scheduler.num_stranded < len(scheduler.slots):
            return
        share = self._split(shape)
        if share == shape.share or not self._is_prepared(replace(shape, share=share)):
            return
        places = self._indices(shape.num_slots // share, shape.num_prompt_slots, shape.share // share)
        scheduler.split(share)
        self._rearrange(None, places, self.column, shape.num_columns)

    def grow_cache(self) -> None:
        """Have columns for another chunk: they are moved, made more or fewer, or slots are given up or added."""
        scheduler, shape = self.scheduler, self.shape
        target = scheduler.num_fed
        needed = self._columns(target + self.chunk_steps)
        is_wide = needed <= shape.num_columns // 2 and self._is_prepared(replace(shape, num_columns=needed))
        if self.column <= shape.num_columns - self.chunk_steps and not is_wide:
            return
        shape = replace(shape, num_columns=needed if is_wide else max(needed, shape.num_columns))
        doubled = replace(shape, num_slots=2 * shape.num_slots)
        rows = places = None
        if not self.plan.allows(shape):
            shape = self.plan.smaller(shape)
            places, rows = scheduler.preempt(shape.num_prompt_slots, shape.share)
        elif (
            scheduler.num_blocked()
            and self.plan.allows(doubled)
            and self._may_have(doubled.num_slots)
            and self._is_prepared(doubled)
        ):
            rows, places = (
                self._indices(2 * number, number, 1) for number in (shape.num_slots, shape.num_prompt_slots)
            )
            scheduler.grow(doubled.num_slots)
        self._rearrange(rows, places, target, shape.num_columns)

    def admit(self, params: Params) -> None:
        """Let waiting sequences into free slots, as many prompts at a time as are computed at once."""
        while admissions := self.scheduler.admit(self._max_prompts()):
            for admission in admissions:
                self._admit(params, admission)

    def decode(self, params: Params) -> list[tuple[Sequence, int]]:
        """Another chunk for all running sequences; returns them with their numbers of tokens before."""
        running = self.scheduler.running
        lengths = {id(sequence): len(sequence.tokens) for sequence in running}
        self.cache, self.slots, chunk = decode_chunk(
            params,
            self.cache,
            self.slots,
            np.int32(self.column),
            config=self.config,
            mesh=self.mesh,
            num_steps=self.chunk_steps,
        )
        self.column += self.chunk_steps
        grown = self.scheduler.append(_fetched(chunk, running))
        return [(sequence, lengths[id(sequence)]) for sequence in grown]

    def store_prefixes(self) -> None:
        """Store what was computed for the sequences that have just ended, if that is wanted."""
        if not self.prefixes.max_bytes:
            return
        for slot, sequence in enumerate(self.scheduler.slots):
            if sequence is None or sequence.finish_reason is None or not sequence.tokens:
                continue
            if self._generations[sequence] != self.prefixes.generation:
                continue  # some of it was computed by other weights
            stored = to_host(read_slot(self.cache, self.slots, slot, slot // self.scheduler.share))
            of_prompt = slice(self.cache.num_prompt_columns - (len(sequence.prompt) - 1), None)
            of_row = slice(int(stored["start"]), int(stored["start"]) + len(sequence.tokens))
            pairs = zip(stored["prompt_k"], stored["k"], strict=True)
            k = [np.concatenate([prompt[..., of_prompt], row[..., of_row]], axis=2) for prompt, row in pairs]
            pairs = zip(stored["prompt_v"], stored["v"], strict=True)
            v = [np.concatenate([prompt[:, of_prompt], row[:, of_row]], axis=1) for prompt, row in pairs]
            fed = np.array([*sequence.prompt, *sequence.tokens[:-1]], np.int32)
            self.prefixes.add(Prefix(fed, k, v))

    def free_finished(self) -> None:
        """Free the slots of the sequences that have ended."""
        freed = self.scheduler.free_finished()
        if not freed:
            return
        released = np.zeros(len(self.scheduler.slots), bool)
        released[freed] = True
        self.slots = release(self.slots, self._on_rows(released))

    def compact(self) -> None:
        """Have half as many slots or fewer, once so many have nothing to do any more; after each chunk.

        Each number of slots is a program of its own, for which the last few chunks are not worth it.
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
        if not is_idle or not self.plan.allows(replace(self.shape, num_slots=needed, share=1)):
            return  # a prompt for each slot may take more room than fewer slots save
        if not self._is_prepared(replace(self.shape, num_slots=needed, share=1)):
            return
        share = scheduler.share
        kept = scheduler.compact(needed)
        self._rearrange(kept, kept // share, self.column, self.cache.num_columns)

    # -- shapes, which a batch that is served chooses among those that are compiled (see `prepared`)

    def _first_shape(self, sequences: list[Sequence]) -> CacheShape:
        """Returns the shape to begin with."""
        counts: dict[tuple[int, int], int] = {}
        for sequence in sequences:
            counts[sequence.group] = counts.get(sequence.group, 0) + 1
        num_shards = num_data_shards(self.mesh)
        return self.plan.first_shape(counts.values(), num_shards, longest(sequences, self.chunk_steps))

    def _columns(self, size: int) -> int:
        """Returns the number of columns to have for so many tokens of completions."""
        return bucket(size, CACHE_COLUMNS)

    def _prompt_columns(self, size: int) -> int:
        """Returns the number of columns to have for so many tokens of prompts."""
        return prefill_columns(size)

    def _fitting_share(self) -> int:
        """Returns how many slots a place should have, so that what waits leaves none of them idle."""
        return self.scheduler.fitting_share()

    def _max_prompts(self) -> int:
        """Returns how many prompts may be computed in one admission."""
        return max_prompts(self.shape.num_prompt_columns)

    def _admission_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Returns the numbers of prompts and of their columns to compute for an admission of this size."""
        return size

    def _is_prepared(self, shape: CacheShape) -> bool:  # noqa: ARG002
        """Returns whether it is worth changing to this shape now, where that may wait."""
        return True

    def _split(self, shape: CacheShape) -> int:
        """How many slots a place of this shape should have, the most with which the fewest are left without a place."""
        halved = [replace(shape, share=shape.share >> times) for times in range(shape.share.bit_length())]
        allowed = (each.share for each in halved if self.plan.allows(each))
        return min(allowed, key=self.scheduler.num_blocked, default=shape.share)

    def _may_have(self, num_slots: int) -> bool:
        """Whether each shard may have so many slots."""
        return num_slots <= power_of_two(self.plan.max_slots, self.scheduler.num_shards)

    def _indices(self, number: int, number_before: int, parts: int) -> np.ndarray:
        """For each of so many slots or places of each shard the one that it is a part of, -1 for new ones."""
        own = np.arange(number) // parts
        return np.tile(np.where(own < number_before, own, -1), self.scheduler.num_shards).astype(np.int32)

    def _widen_slots(self, sequences: list[Sequence]) -> None:
        """Have room for the stop ids and biased tokens of these sequences."""
        sizes = _slot_sizes(sequences)
        if sizes[0] > self.num_stop_ids or sizes[1] > self.num_biased:
            self.num_stop_ids, self.num_biased = max(self.num_stop_ids, sizes[0]), max(self.num_biased, sizes[1])
            self.slots = widen_slots(self.slots, num_stop_ids=self.num_stop_ids, num_biased=self.num_biased)

    def _rearrange(
        self,
        rows: np.ndarray | None,
        places: np.ndarray | None,
        column: int,
        num_columns: int,
        num_prompt_columns: int | None = None,
    ) -> None:
        """Have these slots and places, and the next column at `column`."""
        self.cache, self.slots = rearrange(
            self.cache,
            self.slots,
            None if rows is None else self._on_rows(rows),
            None if places is None else self._on_rows(places),
            column - self.column,
            num_columns=num_columns,
            num_prompt_columns=num_prompt_columns or self.cache.num_prompt_columns,
            mesh=self.mesh,
        )
        self.column = column

    def _admit(self, params: Params, admission: Admission) -> None:
        num_prompts, length = self._admission_size(admission.size)
        prompts = np.zeros((self.scheduler.num_shards, num_prompts, length), np.int32)
        starts = np.full(prompts.shape[:2], length, np.int32)
        for shard, shard_prompts in enumerate(admission.prompts):
            for index, prompt in enumerate(shard_prompts):
                starts[shard, index] = length - (len(prompt) - 1)
                prompts[shard, index, starts[shard, index] :] = prompt[:-1]
        source = np.full(self.cache.prompt_tokens.shape[0], -1, np.int32)
        for place, index in admission.places:
            source[place] = index
        admitted = self._idle_slots()
        is_new = np.zeros(len(admitted), bool)
        for slot, sequence in admission.placed:
            is_new[slot] = True
            self._generations[sequence] = self.prefixes.generation
            fill(admitted[slot], sequence, self.column)
        prompts, starts = prompts.reshape(-1, length), starts.reshape(-1)
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
            config=self.config,
            mesh=self.mesh,
        )

    def _known(self, prompts: np.ndarray, starts: np.ndarray) -> Known | None:
        """What is stored of these left-padded prompts, [P, S]; None if nothing."""
        gathered = self.prefixes.gather(prompts, starts)
        if gathered is None:
            return None
        lengths, k, v = gathered
        arrays = (starts + lengths, k, v)
        return Known(*to_device(arrays, jax.tree.map(lambda x: NamedSharding(self.mesh, pspec_of(x)), arrays)))

    def _idle_slots(self) -> np.ndarray:
        return slot_table(len(self.scheduler.slots), self.num_stop_ids, self.num_biased)

    def _on_rows(self, array: np.ndarray) -> jax.Array:
        return to_device(np.ascontiguousarray(array), NamedSharding(self.mesh, ROWS))


def longest(sequences: Iterable[Sequence], chunk_steps: int) -> tuple[int, int]:
    """The most columns that a prompt and a completion of these take."""
    sizes = [(len(sequence.prompt), sequence.params.max_tokens) for sequence in sequences]
    longest_prompt, longest_completion = (max(of) for of in zip(*sizes, strict=True))
    return longest_columns(longest_prompt, longest_completion, chunk_steps)


def _slot_sizes(sequences: Iterable[Sequence]) -> tuple[int, int]:
    """How many stop ids and biased tokens a slot must have room for."""
    sizes = [(power_of_two(len(each.stop_ids)), power_of_two(len(each.params.logit_bias))) for each in sequences]
    return max(STOP_IDS, *(num for num, _ in sizes)), max(BIASED_TOKENS, *(num for _, num in sizes))


def _fetched(chunk: Chunk, running: list[Sequence]) -> Chunk:
    """The chunk on the host, its alternatives only if a sequence wants them."""
    if not any(sequence.params.logprobs for sequence in running):
        chunk = replace(chunk, alternatives=None, alternative_logps=None)
    return to_host(chunk)


@lru_cache(maxsize=64)
def cache_maker(config: ModelConfig, *sizes_dtype_mesh: Any) -> Callable[[], Cache]:
    """A program that makes an empty cache of these sizes on the devices."""
    *sizes, dtype, mesh = sizes_dtype_mesh
    make = partial(empty_cache, config, *sizes, dtype)
    places = jax.tree.map(lambda x: NamedSharding(mesh, pspec_of(x)), jax.eval_shape(make))
    return jax.jit(make, out_shardings=places)
