"""The programs between two chunks: slots, prompt slots and columns of the cache are dropped, added or moved."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from groupax.engine.cache import ROWS, Cache, pspec_of
from groupax.engine.slots import Slots


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
        cache: The old cache; it must not be used again.
        rows: Old index on its device of each new slot, -1 for an idle one; None if neither slots nor columns change.
        prompt_slots: Likewise for the prompt slots; None if neither they nor their columns change.
        num_columns: Number of columns of a slot, at least as many as its sequence has.
        num_prompt_columns: Number of columns of a prompt slot, at least as many as before.
        mesh: Devices of the cache.
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
    """Returns the call of a jitted function that changes each array of the cache as `resize` does, None for none."""
    tokens = k = v = state = prompt_tokens = starts = prompt_k = prompt_v = None
    if rows is not None:
        in_slots = partial(move, rows=rows, num_columns=num_columns, mesh=mesh)
        tokens, k, v = (partial(in_slots, axis=axis) for axis in (1, 3, 2))
        state = partial(move_state, rows=rows, mesh=mesh)
    if prompt_slots is not None:
        added = num_prompt_columns - cache.num_prompt_columns
        starts = partial(move_starts, rows=prompt_slots, added=added, mesh=mesh)
        widened = partial(widen, rows=prompt_slots, added=added, mesh=mesh)
        prompt_tokens, prompt_k, prompt_v = (partial(widened, axis=axis) for axis in (1, 3, 2))
    layers = range(len(cache.k))
    prompts = [prompt_tokens, starts, *(prompt_k for _ in layers), *(prompt_v for _ in layers)]
    slots = [tokens, *(k for _ in layers), *(v for _ in layers), *(state for _ in jax.tree.leaves(cache.states))]
    return [*prompts, *slots]


@partial(jax.jit, static_argnames=("axis", "num_columns", "mesh"))
def move(x: Array, rows: Int[Array, "B"], *, axis: int, num_columns: int, mesh: Mesh) -> Array:
    """Returns these rows of one array of the slots, with columns, at `axis`, cut or added at their end."""

    def local(x: Array, rows: Array) -> Array:
        kept = lax.slice_in_dim(x, 0, min(num_columns, x.shape[axis]), axis=axis)[rows]
        added = num_columns - kept.shape[axis]
        return jnp.pad(kept, [(0, added if dim == axis else 0) for dim in range(x.ndim)])

    in_specs = (pspec_of(x), ROWS)
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=pspec_of(x), check_vma=False)(x, rows)


@partial(jax.jit, static_argnames="mesh")
def move_state(x: Array, rows: Int[Array, "B"], *, mesh: Mesh) -> Array:
    """Returns these rows of one array of the slots' states."""

    def local(x: Array, rows: Array) -> Array:
        return x[rows]

    in_specs = (pspec_of(x), ROWS)
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=pspec_of(x), check_vma=False)(x, rows)


@partial(jax.jit, static_argnames=("axis", "added", "mesh"))
def widen(x: Array, rows: Int[Array, "Q"], *, axis: int, added: int, mesh: Mesh) -> Array:
    """Returns these rows of one array of the prompts with columns, at `axis`, added before the others."""

    def local(x: Array, rows: Array) -> Array:
        return jnp.pad(x[rows], [(added if dim == axis else 0, 0) for dim in range(x.ndim)])

    in_specs = (pspec_of(x), ROWS)
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=pspec_of(x), check_vma=False)(x, rows)


@partial(jax.jit, static_argnames=("added", "mesh"))
def move_starts(starts: Int[Array, "P"], rows: Int[Array, "Q"], *, added: int, mesh: Mesh) -> Array:
    """Returns the first columns of these prompts, before which columns are added."""

    def local(starts: Array, rows: Array) -> Array:
        return starts[rows] + added

    return jax.shard_map(local, mesh=mesh, in_specs=(ROWS, ROWS), out_specs=ROWS, check_vma=False)(starts, rows)


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


@partial(jax.jit, static_argnames="mesh")
def read_slots(cache: Cache, rows: Int[Array, "D"], prompt_slots: Int[Array, "D"], *, mesh: Mesh) -> dict[str, Any]:
    """Returns the keys and values of a slot of each shard, and of their prompts, per layer.

    Args:
        cache: The cache.
        rows: Index on its device of the slot of each shard.
        prompt_slots: Likewise of the prompts.
        mesh: Devices of the cache.
    """
    given = {"k": (cache.k, rows), "v": (cache.v, rows)}
    given |= {"prompt_k": (cache.prompt_k, prompt_slots), "prompt_v": (cache.prompt_v, prompt_slots)}

    def local(given: dict[str, tuple[list[Array], Array]]) -> dict[str, list[Array]]:
        return {name: [x[rows] for x in layers] for name, (layers, rows) in given.items()}

    in_specs = jax.tree.map(pspec_of, given)
    out_specs = {name: [pspec_of(x) for x in layers] for name, (layers, _) in given.items()}
    return jax.shard_map(local, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs, check_vma=False)(given)


@partial(jax.jit, donate_argnames=("slots",))
def release(slots: Slots, released: Bool[Array, "B"]) -> Slots:
    """Returns the slots, of which the released ones are idle."""
    return replace(slots, remaining=jnp.where(released, 0, slots.remaining))
