"""Changes of a cache and of slots to other shapes: what stays is moved, array by array."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from groupax.engine.cache import ROWS, Cache, Slots, pspec_of


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
