"""The programs between two chunks: slots, places and columns of the cache are given up, added or moved."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from groupax.engine.cache import ROWS, Cache, pspec_of
from groupax.engine.decode import REPLICATED, Slots


def rearrange(
    cache: Cache,
    slots: Slots,
    rows: Int[Array, "B"] | None,
    places: Int[Array, "Q"] | None,
    shift: int,
    *,
    num_columns: int,
    num_prompt_columns: int,
    mesh: Mesh,
) -> tuple[Cache, Slots]:
    """Other slots in other places, with other numbers of columns; layer by layer, so that only one exists twice.

    Args:
        cache, slots: not to be used again.
        rows: for each new slot its old index on its device, -1 for an idle one; None for all as they are.
        places: likewise the places of their prompts.
        shift: how far all slots' contents move, to the right if positive.
        num_columns, num_prompt_columns, mesh: static.
    """
    by = jnp.int32(shift)
    added = num_prompt_columns - cache.num_prompt_columns  # on the left: prompts are aligned at their ends

    def columns(x: Array, axis: int) -> Array:
        new = move(x, rows, by, axis=axis, num_columns=num_columns, mesh=mesh)
        return _instead_of(x, new)

    def prompts(x: Array, axis: int | None = None) -> Array:
        if added and axis is not None:
            new = move(x, places, jnp.int32(added), axis=axis, num_columns=num_prompt_columns, mesh=mesh)
            return _instead_of(x, new)
        return x if places is None else _instead_of(x, take(x, places, mesh=mesh))

    cache = Cache(
        prompt_tokens=prompts(cache.prompt_tokens, 1),
        prompt_starts=prompts(cache.prompt_starts) + jnp.int32(added),
        prompt_k=[prompts(k, 3) for k in cache.prompt_k],
        prompt_v=[prompts(v, 2) for v in cache.prompt_v],
        tokens=columns(cache.tokens, 1),
        k=[columns(k, 3) for k in cache.k],
        v=[columns(v, 2) for v in cache.v],
    )
    return cache, move_slots(slots, rows, by, mesh=mesh)


def _instead_of(old: Array, new: Array) -> Array:
    """The new array, once it exists; the old one is deleted."""
    jax.block_until_ready(new)
    old.delete()
    return new


@partial(jax.jit, static_argnames=("axis", "num_columns", "mesh"))
def move(
    x: Array, rows: Int[Array, "B"] | None, shift: Int[Array, ""], *, axis: int, num_columns: int, mesh: Mesh
) -> Array:
    """One array of the cache, rows first, with its columns at `axis`.

    What is moved out at one end comes in at the other or is lost; it must be hidden or be overwritten.
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
def take(x: Array, places: Int[Array, "Q"], *, mesh: Mesh) -> Array:
    """Some rows of an array, each from its own device."""
    return jax.shard_map(
        lambda x, places: x[places], mesh=mesh, in_specs=(pspec_of(x), ROWS), out_specs=pspec_of(x), check_vma=False
    )(x, places)


@partial(jax.jit, static_argnames="mesh")
def move_slots(slots: Slots, rows: Int[Array, "B"] | None, shift: Int[Array, ""], *, mesh: Mesh) -> Slots:
    """The slots of these rows, where their columns have moved by `shift`; idle ones where a row is -1."""
    if rows is None:
        return replace(slots, start=slots.start + shift)

    def local(slots: Slots, rows: Array, shift: Array) -> Slots:
        taken: Slots = jax.tree.map(lambda x: x[rows], slots)
        return replace(taken, start=taken.start + shift, remaining=jnp.where(rows < 0, 0, taken.remaining))

    program = jax.shard_map(local, mesh=mesh, in_specs=(ROWS, ROWS, REPLICATED), out_specs=ROWS, check_vma=False)
    return program(slots, rows, shift)


@partial(jax.jit, static_argnames=("num_stop_ids", "num_biased"))
def widen_slots(slots: Slots, *, num_stop_ids: int, num_biased: int) -> Slots:
    """The slots, with room for so many stop ids and biased tokens each."""
    settings = slots.settings

    def wide(x: Array, num: int, padding: int) -> Array:
        return jnp.pad(x, ((0, 0), (0, num - x.shape[1])), constant_values=padding)

    bias_tokens, bias = wide(settings.bias_tokens, num_biased, -1), wide(settings.bias, num_biased, 0)
    settings = replace(settings, bias_tokens=bias_tokens, bias=bias)
    return replace(slots, stop_ids=wide(slots.stop_ids, num_stop_ids, -1), settings=settings)


@jax.jit
def read_slot(cache: Cache, slots: Slots, slot: Int[Array, ""], place: Int[Array, ""]) -> dict[str, Any]:
    """The keys and values of one slot and of its prompt, per layer, and the slot's first column."""
    rows = {"k": (cache.k, slot), "v": (cache.v, slot), "prompt_k": (cache.prompt_k, place)}
    rows["prompt_v"] = (cache.prompt_v, place)
    return {"start": slots.start[slot], **{name: [x[row] for x in layers] for name, (layers, row) in rows.items()}}


@partial(jax.jit, donate_argnames=("slots",))
def release(slots: Slots, released: Bool[Array, "B"]) -> Slots:
    """The slots, of which some are to do no more."""
    return replace(slots, remaining=jnp.where(released, 0, slots.remaining))
