"""The programs between two chunks: slots, prompt slots and columns of the cache are dropped, added or moved."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from groupax.engine.cache import REPLICATED, ROWS, Cache, pspec_of
from groupax.engine.slots import Slots


def rearrange(
    cache: Cache,
    rows: Int[Array, "B"] | None,
    prompt_slots: Int[Array, "Q"] | None,
    shift: int,
    *,
    num_columns: int,
    num_prompt_columns: int,
    mesh: Mesh,
) -> Cache:
    """Returns the cache with other slots, prompt slots and numbers of columns; only one array exists twice at a time.

    Args:
        cache: The old cache; it must not be used again.
        rows: Old index on its device of each new slot, -1 for an idle one; None keeps all slots.
        prompt_slots: Likewise for the prompt slots; needed where `num_prompt_columns` changes.
        shift: Number of columns by which all slots' contents move, to the right if positive.
        num_columns: Number of columns of a slot.
        num_prompt_columns: Number of columns of a prompt slot.
        mesh: Devices of the cache.
    """
    columns = {"num_columns": num_columns, "num_prompt_columns": num_prompt_columns}
    arrays, structure = jax.tree.flatten(cache)
    for index, call in enumerate(moves(cache, rows, prompt_slots, shift, **columns, mesh=mesh)):
        if call is not None:
            old, arrays[index] = arrays[index], jax.block_until_ready(call(arrays[index]))
            old.delete()
    return jax.tree.unflatten(structure, arrays)


def moves(
    cache: Cache, rows: Any, prompt_slots: Any, shift: int, *, num_columns: int, num_prompt_columns: int, mesh: Mesh
) -> list[partial[Array] | None]:
    """Returns the call of a jitted function that changes each array of the cache as `rearrange` does, None for none."""
    added = num_prompt_columns - cache.num_prompt_columns  # on the left: prompts are aligned at their ends
    in_slots = partial(move, rows=rows, shift=jnp.int32(shift), num_columns=num_columns, mesh=mesh)
    tokens, k, v = (partial(in_slots, axis=axis) for axis in (1, 3, 2))
    prompt_tokens = starts = prompt_k = prompt_v = None
    if prompt_slots is not None:
        starts = partial(move_starts, rows=prompt_slots, shift=jnp.int32(added), mesh=mesh)
        prompt_tokens = prompt_k = prompt_v = partial(take, rows=prompt_slots, mesh=mesh)
    if added:
        widened = partial(move, rows=prompt_slots, shift=jnp.int32(added), num_columns=num_prompt_columns, mesh=mesh)
        prompt_tokens, prompt_k, prompt_v = (partial(widened, axis=axis) for axis in (1, 3, 2))
    layers = range(len(cache.k))
    prompts = [prompt_tokens, starts, *(prompt_k for _ in layers), *(prompt_v for _ in layers)]
    return [*prompts, tokens, *(k for _ in layers), *(v for _ in layers)]


@partial(jax.jit, static_argnames=("axis", "num_columns", "mesh"))
def move(
    x: Array, rows: Int[Array, "B"] | None, shift: Int[Array, ""], *, axis: int, num_columns: int, mesh: Mesh
) -> Array:
    """Returns these rows of one array of the cache with its columns, at `axis`, shifted.

    Columns that leave at one end enter at the other or are lost; they must be masked or be overwritten.
    """

    def local(x: Array, shift: Array, *rows: Array) -> Array:
        x = x[rows[0]] if rows else x
        added = max(0, num_columns - x.shape[axis])
        padded = jnp.pad(x, [(0, added if dim == axis else 0) for dim in range(x.ndim)])
        return lax.slice_in_dim(jnp.roll(padded, shift, axis), 0, num_columns, axis=axis)

    given = () if rows is None else (rows,)
    in_specs = (pspec_of(x), REPLICATED, *(ROWS for _ in given))
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=pspec_of(x), check_vma=False)(x, shift, *given)


@partial(jax.jit, static_argnames="mesh")
def take(x: Array, rows: Int[Array, "Q"], *, mesh: Mesh) -> Array:
    """Returns these rows of one array of the cache."""
    in_specs = (pspec_of(x), ROWS)
    return jax.shard_map(lambda x, rows: x[rows], mesh=mesh, in_specs=in_specs, out_specs=pspec_of(x), check_vma=False)(
        x, rows
    )


@partial(jax.jit, static_argnames="mesh")
def move_starts(starts: Int[Array, "P"], rows: Int[Array, "Q"], shift: Int[Array, ""], *, mesh: Mesh) -> Array:
    """Returns the first columns of these prompts, shifted."""
    return take(starts, rows, mesh=mesh) + shift


@partial(jax.jit, static_argnames="mesh")
def move_slots(slots: Slots, rows: Int[Array, "B"] | None, shift: Int[Array, ""], *, mesh: Mesh) -> Slots:
    """Returns these rows of the slots with their columns shifted, idle where a row is -1."""
    if rows is None:
        return replace(slots, start=slots.start + shift)

    def local(slots: Slots, rows: Array, shift: Array) -> Slots:
        taken: Slots = jax.tree.map(lambda x: x[rows], slots)
        return replace(taken, start=taken.start + shift, remaining=jnp.where(rows < 0, 0, taken.remaining))

    program = jax.shard_map(local, mesh=mesh, in_specs=(ROWS, ROWS, REPLICATED), out_specs=ROWS, check_vma=False)
    return program(slots, rows, shift)


@partial(jax.jit, static_argnames=("num_stop_ids", "num_biased"))
def widen_slots(slots: Slots, *, num_stop_ids: int, num_biased: int) -> Slots:
    """Returns the slots with room for more stop ids and biased tokens."""
    settings = slots.settings

    def wide(x: Array, num: int, padding: int) -> Array:
        return jnp.pad(x, ((0, 0), (0, num - x.shape[1])), constant_values=padding)

    bias_tokens, bias = wide(settings.bias_tokens, num_biased, -1), wide(settings.bias, num_biased, 0)
    settings = replace(settings, bias_tokens=bias_tokens, bias=bias)
    return replace(slots, stop_ids=wide(slots.stop_ids, num_stop_ids, -1), settings=settings)


@jax.jit
def read_slot(cache: Cache, slots: Slots, slot: Int[Array, ""], prompt_slot: Int[Array, ""]) -> dict[str, Any]:
    """Returns the keys and values of one slot and of its prompt, per layer, and the slot's first column."""
    rows = {"k": (cache.k, slot), "v": (cache.v, slot)}
    rows |= {"prompt_k": (cache.prompt_k, prompt_slot), "prompt_v": (cache.prompt_v, prompt_slot)}
    return {"start": slots.start[slot], **{name: [x[row] for x in layers] for name, (layers, row) in rows.items()}}


@partial(jax.jit, donate_argnames=("slots",))
def release(slots: Slots, released: Bool[Array, "B"]) -> Slots:
    """Returns the slots, of which the released ones are idle."""
    return replace(slots, remaining=jnp.where(released, 0, slots.remaining))
