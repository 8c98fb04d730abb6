"""The program that admits prompts into slots.

It runs on each device of the data axes separately, without communication. A slot's last prompt token is not prefilled;
it is the first token that decoding feeds, so that the first sampled token takes the same path as all others.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from groupax.engine.cache import ROWS, Cache, pspec_of
from groupax.engine.plan import piece_columns
from groupax.engine.slots import Slots
from groupax.models.attention import attend_masked, within_window
from groupax.models.config import AttentionConfig, ModelConfig
from groupax.models.decode_attention import to_cache
from groupax.models.decoder import forward
from groupax.models.specs import Params, layout_of
from groupax.models.split import partition_specs
from groupax.parallel.mesh import DATA, Layout
from groupax.parallel.pytree import pytree


@pytree
class Known:
    """Stored keys and values of the beginnings of P prompts; arbitrary where they are not stored.

    Attributes:
        first_unknown: The first column that must be computed.
        k, v: Keys and values, per layer.
    """

    first_unknown: Int[Array, "P"]
    k: list[Float[Array, "P K H S"]]
    v: list[Float[Array, "P K S H"]]


@partial(jax.jit, static_argnames=("config", "mesh"), donate_argnames=("cache", "slots"))
def admit(
    params: Params,
    cache: Cache,
    slots: Slots,
    prompts: Int[Array, "P S"],
    prompt_starts: Int[Array, "P"],
    source: Int[Array, "Q"],
    is_new: Bool[Array, "B"],
    admitted: Slots,
    known: Known | None = None,
    *,
    config: ModelConfig,
    mesh: Mesh,
) -> tuple[Cache, Slots]:
    """Computes each prompt once and stores it where the slots that continue it read it.

    Args:
        params: The weights.
        cache, slots: Donated; prompt slots and slots that are not admitted keep their contents.
        prompts: Prompts without their last tokens, left-padded; P is sharded over the data axes like B, and S is at
            most the cache's number of prompt columns.
        prompt_starts: Column at which each prompt's tokens begin.
        source: Index on its device of the prompt that each prompt slot receives, -1 for none.
        is_new: Slots that are admitted.
        admitted: Their new contents.
        known: Keys and values that need not be computed.
        config, mesh: Static.
    """
    layout = layout_of(config, mesh)

    def local(params: Any, cache: Cache, slots: Slots, *given: Any) -> tuple[Cache, Slots]:
        prompts, starts, source, is_new, admitted, *known = given
        keys, values = _prefill(config, params, prompts, starts, cache.k[0], known[0] if known else None, layout)
        cache = _stored(cache, prompts, starts, source, keys, values)
        return cache, jax.tree.map(lambda new, old: jnp.where(_like(is_new, new), new, old), admitted, slots)

    given = (prompts, prompt_starts, source, is_new, admitted, *(() if known is None else (known,)))
    of_cache, of_given = jax.tree.map(pspec_of, (cache, given))
    in_specs = (partition_specs(config, mesh, params), of_cache, ROWS, *of_given)
    program = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=(of_cache, ROWS), check_vma=False)
    return program(params, cache, slots, *given)


def _stored(
    cache: Cache, prompts: Array, starts: Array, source: Array, keys: list[Array], values: list[Array]
) -> Cache:
    """Returns the cache with the prompts, aligned at their ends, in the prompt slots that receive them."""
    has_new = source >= 0
    first = cache.num_prompt_columns - prompts.shape[1]

    def put(old: Array, new: Array, axis: int) -> Array:
        kept = lax.slice_in_dim(old, first, None, axis=axis)
        chosen = jnp.where(_like(has_new, kept), new[source], kept)
        return lax.dynamic_update_slice_in_dim(old, chosen, first, axis)

    return replace(
        cache,
        prompt_tokens=put(cache.prompt_tokens, prompts, 1),
        prompt_starts=jnp.where(has_new, first + starts[source], cache.prompt_starts),
        prompt_k=[put(old, new, 3) for old, new in zip(cache.prompt_k, keys, strict=True)],
        prompt_v=[put(old, new, 2) for old, new in zip(cache.prompt_v, values, strict=True)],
    )


def _prefill(
    config: ModelConfig,
    params: Params,
    prompts: Int[Array, "P S"],
    starts: Int[Array, "P"],
    like: Float[Array, "B K H T"],
    known: Known | None,
    layout: Layout,
) -> tuple[list[Array], list[Array]]:
    """Computes the prompts' keys and values, per layer, in pieces of some columns from the first unknown one on.

    Returns:
        The keys and values of the device's heads, in the dtype of `like`.
    """
    (P, S), (_, K, H, _), dtype = prompts.shape, like.shape, like.dtype
    M = piece_columns(P, S, config.num_heads // config.num_kv_heads * K)
    if known is None:
        keys = [jnp.zeros((P, K, H, S), dtype) for _ in range(config.num_layers)]
        values = [jnp.zeros((P, K, S, H), dtype) for _ in range(config.num_layers)]
        first_unknown = starts
    else:
        keys, values, first_unknown = known.k, known.v, known.first_unknown
    columns = jnp.arange(S)[None, :]

    def piece(index: Array, stored: tuple[list[Array], list[Array]]) -> tuple[list[Array], list[Array]]:
        first = index * M
        own = first + jnp.arange(M)
        attend = _Piece(
            first=first,
            visible=(columns >= starts[:, None])[:, None, :] & (columns <= own[:, None])[None],
            distance=(own[:, None] - columns)[None],
            is_unknown=None if known is None else own[None, :] >= first_unknown[:, None],
        )
        tokens = lax.dynamic_slice_in_dim(prompts, first, M, 1)
        positions = jnp.maximum(own[None, :] - starts[:, None], 0)
        layers = list(zip(*stored, strict=True))
        layers = forward(
            config, params, tokens.reshape(-1), positions.reshape(-1), attend, layers, layout=layout
        ).caches
        return [keys for keys, _ in layers], [values for _, values in layers]

    first_piece = jnp.minimum(jnp.min(first_unknown), S - 1) // M
    if layout.axes:
        first_piece = lax.pmin(first_piece, DATA)
    return lax.fori_loop(first_piece, S // M, piece, (keys, values))


@dataclass(frozen=True, eq=False)
class _Piece:
    """Attention of M columns of each prompt to the columns up to them; writes their keys and values.

    Attributes:
        first: The first of the columns.
        visible: [P, M, S] columns that each column attends to, without a window.
        distance: [1, M, S] how far before it these are.
        is_unknown: [P, M] columns that are computed; None computes all.
    """

    first: Array
    visible: Array
    distance: Array
    is_unknown: Array | None

    def __call__(
        self, attn: AttentionConfig, stored: tuple[Array, Array], q: Array, k: Array, v: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        (P, M, _), first = self.visible.shape, self.first
        keys, values = stored
        q, k, v = (x.reshape(P, M, *x.shape[1:]) for x in (q, k, v))
        k, v = to_cache(k.transpose(0, 2, 3, 1), keys.dtype), to_cache(v.transpose(0, 2, 1, 3), values.dtype)
        if self.is_unknown is not None:
            k = jnp.where(self.is_unknown[:, None, None], k, lax.dynamic_slice_in_dim(keys, first, M, 3))
            v = jnp.where(self.is_unknown[:, None, :, None], v, lax.dynamic_slice_in_dim(values, first, M, 2))
        keys = lax.dynamic_update_slice_in_dim(keys, k, first, 3)
        values = lax.dynamic_update_slice_in_dim(values, v, first, 2)
        seen = self.visible & within_window(self.distance, attn.window)
        return attend_masked(q, keys, values, seen, attn).reshape(P * M, *q.shape[2:]), (keys, values)


def _like(mask: Bool[Array, "B"], x: Array) -> Array:
    return jnp.expand_dims(mask, tuple(range(1, x.ndim)))
