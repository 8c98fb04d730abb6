"""The cache and slots of a batch, and their changes to other shapes: what stays is moved, array by array."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int

from groupax.core.settings.sampling import BIASED_TOKENS, STOP_IDS
from groupax.engine.cache import (
    ROWS,
    Cache,
    Slots,
    cache_maker,
    pspec_of,
    slot_table,
    to_slots,
)
from groupax.engine.core import EngineCore
from groupax.engine.plan import CacheShape, Demand, Plan, power_of_two
from groupax.engine.scheduler import Scheduler
from groupax.engine.sequence import Sequence
from groupax.parallel.collectives import to_device

# With at most this many chunks left, the number of slots no longer changes.
LAST_CHUNKS = 3


class Arrays:
    """The slots and the cache of sequences that run, in a shape that follows the work (see `Batch`)."""

    def __init__(
        self, core: EngineCore, plan: Plan, sequences: list[Sequence], patience: int, serving: Any = None
    ) -> None:
        self.core, self.plan, self.patience, self.serving = core, plan, patience, serving
        self.mesh, self.chunk_steps = core.mesh, core.chunk_steps
        self._num_idle = 0  # chunks in a row after which half of the slots were enough
        self._num_needed = 0  # slots per shard, the most of these chunks
        self.demand = self.demand_of(sequences)
        shape = plan.first_shape(self.demand, core.num_shards)
        if serving is not None:
            shape = serving.nearest(shape, sequences) or shape
        self.scheduler = Scheduler(core.num_shards, shape.num_slots, shape.share)
        self.scheduler.submit(sequences)
        self.num_stop_ids, self.num_biased = _slot_sizes(sequences)
        self.cache: Cache = cache_maker(core.config, self.mesh, shape, core.kv_dtype)()
        self.shape, self.rows = shape, NamedSharding(self.mesh, ROWS)
        self.slots = to_slots(self.idle_slots(), self.on_rows)

    def demand_of(self, sequences: Iterable[Sequence]) -> Demand:
        """Returns the demand to choose shapes by, for these sequences."""
        return self.serving.demand(sequences) if self.serving else self.plan.demand(sequences, self.core.expected)

    def shape_with(self, sequences: Iterable[Sequence] = ()) -> CacheShape | None:
        """Returns the shape to change to if these sequences join those that wait and run, if memory allows it.

        It has enough prompt columns. If there is no room for them, it has fewer slots, otherwise as many as memory
        allows for those that wait. A server returns None until the programs of such a shape are compiled.
        """
        scheduler, now, sequences = self.scheduler, self.shape, list(sequences)
        together = [*scheduler.running, *scheduler.queued, *sequences]
        longest = self.plan.smallest_shape(self.demand_of(together))
        shape = replace(now, num_prompt_columns=max(now.num_prompt_columns, longest.num_prompt_columns))
        if not self.plan.allows(shape):
            shape = self.plan.smaller(shape)
            return shape if self.serving is None or self.serving.is_prepared(shape, together, now) else None
        num_blocked, expected = scheduler.num_blocked(sequences), max(now.num_columns, longest.num_columns // 2)
        most = power_of_two(self.plan.max_slots, scheduler.num_shards)
        while num_blocked > scheduler.num_shards * (shape.num_slots - now.num_slots):
            larger = replace(shape, num_slots=2 * shape.num_slots)
            if larger.num_slots > most or not self.plan.allows(replace(larger, num_columns=expected)):
                break
            shape = larger
        return shape if self.serving is None else self.serving.nearest(shape, together, now)

    def allows(self, sequences: Iterable[Sequence]) -> bool:
        """Returns whether a sequence as long as the longest of these and of the batch's own would fit."""
        demand = self.demand_of([*self.scheduler.running, *self.scheduler.queued, *sequences])
        return self.plan.allows(self.plan.smallest_shape(demand))

    def reserve(self) -> None:
        """Provides what the waiting sequences need (see `shape_with`); preempts running ones if there is no room."""
        if self.scheduler.waiting:
            sequences = [*self.scheduler.running, *self.scheduler.queued]
            self.demand = self.demand_of(sequences)
            self._widen_slots(sequences)
            self._change_to(self.shape_with() or self.shape)

    def fit_columns(self) -> None:
        """Provides columns for another chunk; preempts the shortest sequences if there is no room for that."""
        now, needed = self.shape, self.scheduler.num_columns(self.chunk_steps)
        shape = replace(now, num_columns=self.plan.num_columns(needed, self.demand, now.num_columns))
        if shape.num_columns > now.num_columns or (shape != now and self._is_prepared(shape)):
            shape = self.plan.smaller(shape)
            if self.serving is not None:
                self.serving.join(shape, [*self.scheduler.running, *self.scheduler.queued], now)
            self._change_to(shape)

    def compact(self) -> None:
        """Halves the number of slots, or more, once they are idle; to be called after each chunk.

        Each number of slots needs its own programs, which do not pay off for the last few chunks.
        """
        scheduler = self.scheduler
        if not self.plan.adapts or self.plan.conversations is not None:
            return
        per_shard = np.array([each is not None for each in scheduler.slots]).reshape(scheduler.num_shards, -1)
        needed = max(self._num_needed, power_of_two(int(per_shard.sum(axis=1).max())))
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
        self._resize(kept, kept // share, shape)

    def _is_prepared(self, shape: CacheShape) -> bool:
        """Returns whether to change to this shape now, where the change may wait."""
        sequences = [*self.scheduler.running, *self.scheduler.queued]
        return self.serving is None or self.serving.is_prepared(shape, sequences, self.shape)

    def _change_to(self, shape: CacheShape) -> None:
        """Changes to another shape; if it has fewer slots, the longest sequences stay in them."""
        now, scheduler = self.shape, self.scheduler
        if shape == now:
            return
        rows = prompt_slots = None
        if shape.num_slots < now.num_slots:
            prompt_slots, rows = scheduler.preempt(shape.num_prompt_slots, shape.share)
        else:
            if (shape.num_slots, shape.num_columns) != (now.num_slots, now.num_columns):
                rows = self._indices(shape.num_slots, now.num_slots)
            if (shape.num_slots, shape.num_prompt_columns) != (now.num_slots, now.num_prompt_columns):
                prompt_slots = self._indices(shape.num_prompt_slots, now.num_prompt_slots)
            scheduler.grow(shape.num_slots)
        self._resize(rows, prompt_slots, shape)

    def _indices(self, number: int, number_before: int) -> np.ndarray:
        """Returns for each new slot of each shard the old slot that it is, -1 for an added one."""
        own = np.arange(number)
        return np.tile(np.where(own < number_before, own, -1), self.scheduler.num_shards).astype(np.int32)

    def _widen_slots(self, sequences: list[Sequence]) -> None:
        """Makes room for the stop ids and biased tokens of these sequences."""
        sizes = _slot_sizes(sequences)
        if sizes[0] > self.num_stop_ids or sizes[1] > self.num_biased:
            self.num_stop_ids, self.num_biased = max(self.num_stop_ids, sizes[0]), max(self.num_biased, sizes[1])
            self.slots = widen_slots(self.slots, num_stop_ids=self.num_stop_ids, num_biased=self.num_biased)

    def _resize(self, rows: np.ndarray | None, prompt_slots: np.ndarray | None, shape: CacheShape) -> None:
        """Moves these slots and prompt slots into arrays of a shape; None keeps all, with their columns."""
        self.shape = shape
        rows_on_devices = None if rows is None else self.on_rows(rows)
        self.cache = resize(
            self.cache,
            rows_on_devices,
            None if prompt_slots is None else self.on_rows(prompt_slots),
            num_columns=shape.num_columns,
            num_prompt_columns=shape.num_prompt_columns,
            mesh=self.mesh,
        )
        if rows_on_devices is not None:
            self.slots = move_slots(self.slots, rows_on_devices, mesh=self.mesh)

    def idle_slots(self) -> np.ndarray:
        """Returns as many idle slots as there are, on the host."""
        return slot_table(len(self.scheduler.slots), self.num_stop_ids, self.num_biased, bool(self.core.adapters))

    def on_rows(self, array: np.ndarray) -> jax.Array:
        """Puts an array with a row for each slot, or prompt, on the devices."""
        return to_device(np.ascontiguousarray(array), self.rows)


def _slot_sizes(sequences: Iterable[Sequence]) -> tuple[int, int]:
    """Returns the numbers of stop ids and biased tokens that a slot must have room for."""
    sizes = [(power_of_two(len(each.stop_ids)), power_of_two(len(each.params.logit_bias))) for each in sequences]
    return max(STOP_IDS, *(num for num, _ in sizes)), max(BIASED_TOKENS, *(num for _, num in sizes))


def resize(
    cache: Cache,
    rows: Int[Array, "B"] | None,
    prompt_slots: Int[Array, "Q"] | None,
    *,
    num_columns: int,
    num_prompt_columns: int,
    mesh: Mesh,
) -> Cache:
    """Returns the cache with other slots, prompt slots and numbers of columns; only one array exists twice at a time.

    Args:
        rows: Old index on its device of each new slot, -1 for an idle one; None if neither slots nor columns change.
        prompt_slots: Likewise for the prompt slots; None if neither they nor their columns change.
    """
    columns = {"num_columns": num_columns, "num_prompt_columns": num_prompt_columns}
    arrays, structure = jax.tree.flatten(cache)
    for index, call in enumerate(moves(cache, rows, prompt_slots, **columns, mesh=mesh)):
        if call is not None:
            old, arrays[index] = arrays[index], jax.block_until_ready(call(arrays[index]))
            old.delete()
    return jax.tree.unflatten(structure, arrays)


def moves(
    cache: Cache, rows: Any, prompt_slots: Any, *, num_columns: int, num_prompt_columns: int, mesh: Mesh
) -> list[partial[Array] | None]:
    """Returns the call of `move` that changes each array of the cache as `resize` does, None for none."""
    added, layers = num_prompt_columns - cache.num_prompt_columns, range(len(cache.k))

    def call(rows: Any, axis: int | None, **more: Any) -> partial[Array] | None:
        return None if rows is None else partial(move, rows=rows, axis=axis, **more, mesh=mesh)

    of_slots, of_prompts = {"num_columns": num_columns}, {"num_columns": num_prompt_columns, "at_start": True}
    prompts = [call(prompt_slots, 1, **of_prompts), call(prompt_slots, None, added=added)]
    prompts += [call(prompt_slots, axis, **of_prompts) for axis in (3, 2) for _ in layers]
    slots = [call(rows, 1, **of_slots), *(call(rows, axis, **of_slots) for axis in (3, 2) for _ in layers)]
    return [*prompts, *slots, *(call(rows, None) for _ in jax.tree.leaves(cache.states))]


@partial(jax.jit, static_argnames=("axis", "num_columns", "at_start", "added", "mesh"))
def move(
    x: Array,
    rows: Int[Array, "B"],
    *,
    axis: int | None,
    num_columns: int = 0,
    at_start: bool = False,
    added: int = 0,
    mesh: Mesh,
) -> Array:
    """Returns these rows of an array, with columns, at `axis`, cut or added at their end, or added at their start.

    Without an axis `added` is added to the numbers.
    """

    def local(x: Array, rows: Array) -> Array:
        if axis is None:
            return x[rows] + added if added else x[rows]
        kept = lax.slice_in_dim(x, 0, min(num_columns, x.shape[axis]), axis=axis)[rows]
        padding = num_columns - kept.shape[axis]
        at_axis = (padding, 0) if at_start else (0, padding)
        return jnp.pad(kept, [at_axis if dim == axis else (0, 0) for dim in range(x.ndim)])

    in_specs = (pspec_of(x), ROWS)
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=pspec_of(x), check_vma=False)(x, rows)


@partial(jax.jit, static_argnames="mesh")
def move_slots(slots: Slots, rows: Int[Array, "B"], *, mesh: Mesh) -> Slots:
    """Returns these rows of the slots, idle where a row is -1."""

    def local(slots: Slots, rows: Array) -> Slots:
        taken: Slots = jax.tree.map(lambda x: x[rows], slots)
        return replace(taken, remaining=jnp.where(rows < 0, 0, taken.remaining))

    return jax.shard_map(local, mesh=mesh, in_specs=(ROWS, ROWS), out_specs=ROWS, check_vma=False)(slots, rows)


@partial(jax.jit, static_argnames=("num_stop_ids", "num_biased"))
def widen_slots(slots: Slots, *, num_stop_ids: int, num_biased: int) -> Slots:
    """Returns the slots with room for more stop ids and biased tokens."""

    def wide(x: Array, num: int, padding: int) -> Array:
        return jnp.pad(x, ((0, 0), (0, num - x.shape[1])), constant_values=padding)

    of_tokens = {name: x for name, x in slots.settings.items() if x.ndim > 1}
    widened = {name: wide(x, num_biased, -1 if name.endswith("_tokens") else 0) for name, x in of_tokens.items()}
    return replace(slots, stop_ids=wide(slots.stop_ids, num_stop_ids, -1), settings={**slots.settings, **widened})
