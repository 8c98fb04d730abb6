"""Changes of a batch's shape: which shape comes next, which slots stay, and the programs that move their arrays."""

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

from groupax.engine.cache import ROWS, Cache, Slots, pspec_of
from groupax.engine.core import EngineCore
from groupax.engine.plan import CacheShape, Demand, Plan, power_of_two
from groupax.engine.scheduler import Scheduler
from groupax.engine.sequence import Sequence
from groupax.models.attention import LayerCache
from groupax.parallel.collectives import to_device

# With at most this many chunks left, the number of slots no longer changes.
LAST_CHUNKS = 3


class Resizing:
    """The shape of a batch's cache, which follows what sequences need and memory allows.

        reserve (others wait) ──► fit_columns (before each chunk) ──► compact (after each chunk)

    These three take the arrays on the devices, which they donate, and return them in the shape that they change to.

    Args:
        core: The engine's devices, chunks and expected demand.
        plan: Limits of the cache.
        sequences: Unstarted sequences, which the scheduler queues.
        patience: Chunks to wait before the batch shrinks to fewer slots.
        serving: A server's choice of shapes and programs (`programs.Serving`); None outside of servers.

    Attributes:
        shape: Shape of each shard's cache.
        scheduler: Assigns sequences to its slots.
        demand: Demand of the sequences when slots were last reserved.

    Raises:
        ValueError: The plan does not allow two of the longest sequences.
    """

    def __init__(
        self, core: EngineCore, plan: Plan, sequences: list[Sequence], patience: int, serving: Any = None
    ) -> None:
        self.core, self.plan, self.patience, self.serving = core, plan, patience, serving
        self._num_idle = 0  # chunks in a row after which half of the slots were enough
        self._num_needed = 0  # slots per shard, the most of these chunks
        self.demand = self._demand_of(sequences)
        self.shape = plan.first_shape(self.demand, core.num_shards)
        if serving is not None:
            self.shape = serving.nearest(self.shape, sequences) or self.shape
        self.scheduler = Scheduler(core.num_shards, self.shape.num_slots, self.shape.share)
        self.scheduler.submit(sequences)

    def allows(self, sequences: Iterable[Sequence]) -> bool:
        """Returns whether a sequence as long as the longest of these and of the batch's own would fit."""
        return self.plan.allows(self.plan.smallest_shape(self._demand_of([*self._own(), *sequences])))

    def shape_with(self, sequences: Iterable[Sequence] = ()) -> CacheShape | None:
        """Returns the shape to change to if these sequences join those that wait and run, if memory allows it.

        It has enough prompt columns. If there is no room for them, it has fewer slots, otherwise as many as memory
        allows for those that wait. A server returns None until the programs of such a shape are compiled.
        """
        scheduler, now, sequences = self.scheduler, self.shape, list(sequences)
        together = [*self._own(), *sequences]
        longest = self.plan.smallest_shape(self._demand_of(together))
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

    def reserve(self, cache: Cache, slots: Slots) -> tuple[Cache, Slots]:
        """Provides what the waiting sequences need (see `shape_with`); preempts running ones if there is no room."""
        if not self.scheduler.waiting:
            return cache, slots
        self.demand = self._demand_of(self._own())
        return self._change_to(self.shape_with() or self.shape, cache, slots)

    def fit_columns(self, cache: Cache, slots: Slots) -> tuple[Cache, Slots]:
        """Provides columns for another chunk; preempts the shortest sequences if there is no room for that."""
        now, needed = self.shape, self.scheduler.num_columns(self.core.chunk_steps)
        shape = replace(now, num_columns=self.plan.num_columns(needed, self.demand, now.num_columns))
        if shape.num_columns <= now.num_columns and (shape == now or not self._is_prepared(shape)):
            return cache, slots
        shape = self.plan.smaller(shape)
        if self.serving is not None:
            self.serving.join(shape, self._own(), now)
        return self._change_to(shape, cache, slots)

    def compact(self, cache: Cache, slots: Slots) -> tuple[Cache, Slots]:
        """Halves the number of slots, or more, once they are idle.

        Each number of slots needs its own programs, which do not pay off for the last few chunks.
        """
        scheduler = self.scheduler
        if not self.plan.adapts or self.plan.conversations is not None:
            return cache, slots
        per_shard = np.array([each is not None for each in scheduler.slots]).reshape(scheduler.num_shards, -1)
        needed = max(self._num_needed, power_of_two(int(per_shard.sum(axis=1).max())))
        self._num_idle, self._num_needed = self._num_idle + 1, needed
        left = max((each.params.max_tokens - len(each.tokens) for each in scheduler.running), default=0)
        is_idle = not scheduler.waiting and needed <= scheduler.slots_per_shard // 2
        is_idle = is_idle and left > LAST_CHUNKS * self.core.chunk_steps
        if is_idle and self._num_idle <= self.patience:
            return cache, slots
        self._num_idle = self._num_needed = 0
        # a prompt slot for each slot may take more memory than fewer slots save
        shape = replace(self.shape, num_slots=needed, share=1)
        if not is_idle or not self.plan.allows(shape) or not self._is_prepared(shape):
            return cache, slots
        return self._moved(shape, *drop_idle(scheduler, needed), cache, slots)

    def _own(self) -> list[Sequence]:
        return [*self.scheduler.running, *self.scheduler.queued]

    def _demand_of(self, sequences: Iterable[Sequence]) -> Demand:
        """Returns the demand to choose shapes by, for these sequences."""
        return self.serving.demand(sequences) if self.serving else self.plan.demand(sequences, self.core.expected)

    def _is_prepared(self, shape: CacheShape) -> bool:
        """Returns whether to change to this shape now, where the change may wait."""
        return self.serving is None or self.serving.is_prepared(shape, self._own(), self.shape)

    def _change_to(self, shape: CacheShape, cache: Cache, slots: Slots) -> tuple[Cache, Slots]:
        """Changes to another shape; if it has fewer slots, the longest sequences stay in them."""
        if shape == self.shape:
            return cache, slots
        if shape.num_slots < self.shape.num_slots:
            return self._moved(shape, *preempt(self.scheduler, shape.num_prompt_slots, shape.share), cache, slots)
        return self._moved(shape, *grow(self.scheduler, shape.num_slots), cache, slots)

    def _moved(
        self, shape: CacheShape, rows: np.ndarray, prompt_slots: np.ndarray, cache: Cache, slots: Slots
    ) -> tuple[Cache, Slots]:
        """Returns these slots and prompt slots in arrays of another shape; only one array exists twice at a time."""
        mesh = self.core.mesh
        moves_rows, moves_prompts = what_moves(self.shape, shape)
        kept = rows if moves_rows else None, prompt_slots if moves_prompts else None
        kept = jax.tree.map(lambda x: np.ascontiguousarray(x.reshape(-1), np.int32), kept)
        self.shape, (rows_now, prompts_now) = shape, to_device(kept, NamedSharding(mesh, ROWS))
        arrays, structure = jax.tree.flatten(cache)
        for index, call in enumerate(moves(cache, rows_now, prompts_now, shape, mesh)):
            if call is not None:
                old, arrays[index] = arrays[index], jax.block_until_ready(call(arrays[index]))
                old.delete()
        slots = move_slots(slots, rows_now, mesh=mesh) if moves_rows else slots
        return jax.tree.unflatten(structure, arrays), slots


# -- which slots stay: each function gives the scheduler other slots, and returns which the new slots and prompt slots
# of each shard were, by their indices within it, [D, B] and [D, Q]


def grow(scheduler: Scheduler, slots_per_shard: int) -> tuple[np.ndarray, np.ndarray]:
    """Adds idle slots at the end of each shard, whose indices are -1."""
    own, share = np.arange(slots_per_shard), scheduler.share
    rows = np.tile(np.where(own < scheduler.slots_per_shard, own, -1), (scheduler.num_shards, 1))
    scheduler.rearrange(rows, share)
    return rows, rows[:, ::share] // share


def drop_idle(scheduler: Scheduler, slots_per_shard: int) -> tuple[np.ndarray, np.ndarray]:
    """Leaves each shard fewer slots, enough for its running sequences, and gives each slot its own prompt slot."""
    is_idle = np.array([each is None for each in scheduler.slots]).reshape(scheduler.num_shards, -1)
    rows, share = np.argsort(is_idle, axis=1, kind="stable")[:, :slots_per_shard], scheduler.share
    scheduler.rearrange(rows, share=1)
    return rows, rows // share


def preempt(scheduler: Scheduler, num_prompt_slots: int, share: int) -> tuple[np.ndarray, np.ndarray]:
    """Keeps each shard's prompt slots with the longest sequences, and the longest of each; preempts the others.

    Preempted sequences go to the front of the queue and are sampled again from their prompts, which costs the least
    for the shortest.
    """
    before, num_shards = scheduler.slots, scheduler.num_shards
    progress = np.array([-1 if each is None else len(each.tokens) for each in before])
    progress = progress.reshape(num_shards, -1, scheduler.share)  # [D, Q, rows of a prompt slot]
    longest = np.argsort(-progress.max(axis=2), axis=1, kind="stable")[:, :num_prompt_slots]
    prompt_slots = np.sort(longest, axis=1)
    progress = np.take_along_axis(progress, prompt_slots[:, :, None], axis=1)
    within = np.sort(np.argsort(-progress, axis=2, kind="stable")[:, :, :share], axis=2)
    rows = (prompt_slots[:, :, None] * scheduler.share + within).reshape(num_shards, -1)
    scheduler.rearrange(rows, share)
    kept, others = set(scheduler.slots), scheduler.queued
    preempted = [each for each in before if each is not None and each not in kept]
    for sequence in preempted:
        sequence.cut(0)
    scheduler.waiting.clear()
    scheduler.submit([*preempted, *others])
    return rows, prompt_slots


# -- the programs


def what_moves(before: CacheShape, after: CacheShape) -> tuple[bool, bool]:
    """Returns whether the arrays of slots, and those of prompt slots, change from one shape to another."""
    changes_slots = (before.num_slots, before.share) != (after.num_slots, after.share)
    changes_prompts = before.num_prompt_columns != after.num_prompt_columns
    return changes_slots or before.num_columns != after.num_columns, changes_slots or changes_prompts


def moves(cache: Cache, rows: Any, prompt_slots: Any, shape: CacheShape, mesh: Mesh) -> list[partial[Array] | None]:
    """Returns the call of `move` that brings each array of the cache into a shape, None for none.

    Args:
        rows: Old index on its device of each new slot, -1 for an idle one; None if neither slots nor columns change.
        prompt_slots: Likewise for the prompt slots; None if neither they nor their columns change.
    """
    added, of_slots = shape.num_prompt_columns - cache.num_prompt_columns, {"num_columns": shape.num_columns}
    of_prompts = {"num_columns": shape.num_prompt_columns, "at_start": True}

    def call(rows: Any, axis: int | None, **more: Any) -> partial[Array] | None:
        return None if rows is None else partial(move, rows=rows, axis=axis, **more, mesh=mesh)

    calls = [call(prompt_slots, 1, **of_prompts), call(prompt_slots, None, added=added), call(rows, 1, **of_slots)]
    for layer in cache.layers:
        if isinstance(layer, LayerCache):
            calls += [call(prompt_slots, axis, **of_prompts) for axis in (3, 2)]
            calls += [call(rows, axis, **of_slots) for axis in (3, 2)]
        else:
            calls += [call(rows, None) for _ in layer]
    return calls


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
