"""The two programs of the engine: admit prompts into slots, and decode a chunk of tokens in every slot.

Both run on each device of the data axes by itself, with no communication: a device leaves its loop as soon as
its own slots are done. Where devices share the weights (the mesh's `tp`), all of them take the same number of
turns, so that none waits for one that has left. A slot's last prompt token is not prefilled; it is the first token
that decoding feeds, so that the first sampled token takes the same path as all others.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from groupax.engine.cache import ROWS, Cache, pspec_of
from groupax.engine.plan import piece_columns
from groupax.engine.sampling import History, SamplingArrays, alternatives, sample, uniforms
from groupax.models.attention import attend_cached, attend_masked, within_window
from groupax.models.config import AttentionConfig, ModelConfig
from groupax.models.decoder import forward, head_weights
from groupax.models.layers import vocabulary_logits
from groupax.models.specs import Params, layout_of
from groupax.models.split import gather_weight, partition_specs
from groupax.parallel.collectives import all_gather
from groupax.parallel.mesh import DATA, Layout
from groupax.parallel.pytree import pytree
from groupax.settings.sampling import MAX_LOGPROBS

REPLICATED = PartitionSpec()


@pytree
class Slots:
    """What each of B slots does next.

    Attributes:
        token: fed next.
        position: of that token in its sequence.
        start: the slot's first column in the cache.
        key: of the slot's randomness (see `sampling.row_keys`).
        remaining: tokens that it may still sample; 0 for an idle slot.
        stop_ids: tokens that end the sequence, padded with -1.
        settings: how to sample.
    """

    token: Int[Array, "B"]
    position: Int[Array, "B"]
    start: Int[Array, "B"]
    key: UInt32[Array, "B 2"]
    remaining: Int[Array, "B"]
    stop_ids: Int[Array, "B E"]
    settings: SamplingArrays


@pytree
class Chunk:
    """Up to C tokens sampled in each slot: the first `count` of a row are real.

    Attributes:
        token: sampled tokens, an ending stop token included.
        policy_logp: natural log-probability under softmax(logits / temperature), float32.
        sampler_logp: the same under the truncated distribution that was drawn from.
        count: tokens sampled.
        stopped: the row's last token is one of its stop tokens.
        alternatives: the policy's likeliest tokens in each place, if a slot wants them; None if not fetched.
        alternative_logps: their log-probs.
    """

    token: Int[Array, "B C"]
    policy_logp: Float[Array, "B C"]
    sampler_logp: Float[Array, "B C"]
    count: Int[Array, "B"]
    stopped: Bool[Array, "B"]
    alternatives: Int[Array, "B C A"] | None
    alternative_logps: Float[Array, "B C A"] | None


@pytree
class Known:
    """Keys and values of the beginnings of P prompts, from before; anything where they are not known.

    Attributes:
        first_unknown: the first column that has to be computed.
        k, v: per layer.
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
    """Compute each prompt once and put it where the slots that continue it read it.

    Args:
        params: the weights.
        cache, slots: donated; places and slots that are not admitted keep what they have.
        prompts: left-padded, without each prompt's last token; P is split over the data axes like B. S is at most the
            cache's number of prompt columns.
        prompt_starts: where each prompt's tokens begin in its row.
        source: which of its device's prompts a place gets, -1 for none.
        is_new: slots that are admitted.
        admitted: their new contents.
        known: keys and values that need not be computed.
        config, mesh: static.
    """

    layout = layout_of(config, mesh)

    def local(
        params: Params,
        cache: Cache,
        slots: Slots,
        prompts: Array,
        starts: Array,
        source: Array,
        is_new: Array,
        admitted: Slots,
        *known: Known,
    ) -> tuple[Cache, Slots]:
        has_new = source >= 0
        keys, values = _prefill(config, params, prompts, starts, cache.k[0], known[0] if known else None, layout)
        first = cache.num_prompt_columns - prompts.shape[1]

        def put(old: Array, new: Array, axis: int) -> Array:
            kept = lax.slice_in_dim(old, first, None, axis=axis)
            chosen = jnp.where(_like(has_new, kept), new[source], kept)
            return lax.dynamic_update_slice_in_dim(old, chosen, first, axis)

        cache = replace(
            cache,
            prompt_tokens=put(cache.prompt_tokens, prompts, 1),
            prompt_starts=jnp.where(has_new, first + starts[source], cache.prompt_starts),
            prompt_k=[put(old, new, 3) for old, new in zip(cache.prompt_k, keys, strict=True)],
            prompt_v=[put(old, new, 2) for old, new in zip(cache.prompt_v, values, strict=True)],
        )
        return cache, jax.tree.map(lambda new, old: jnp.where(_like(is_new, new), new, old), admitted, slots)

    given = () if known is None else (known,)
    places = jax.tree.map(pspec_of, cache)
    of_known = jax.tree.map(pspec_of, given)
    in_specs = (partition_specs(config, mesh, params), places, *(ROWS,) * 6, *of_known)
    program = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=(places, ROWS), check_vma=False)
    return program(params, cache, slots, prompts, prompt_starts, source, is_new, admitted, *given)


@partial(jax.jit, static_argnames=("config", "mesh", "num_steps"), donate_argnames=("cache", "slots"))
def decode_chunk(
    params: Params,
    cache: Cache,
    slots: Slots,
    column: Int[Array, ""],
    *,
    config: ModelConfig,
    mesh: Mesh,
    num_steps: int,
) -> tuple[Cache, Slots, Chunk]:
    """Sample up to `num_steps` tokens in every busy slot.

    Args:
        params: the weights.
        cache, slots: donated.
        column: the next column to be written; the cache must have `num_steps` columns from it on.
        config, mesh, num_steps: static.
    """

    layout, places = layout_of(config, mesh), jax.tree.map(pspec_of, cache)

    def local(params: Params, cache: Cache, slots: Slots, column: Array) -> tuple[Cache, Slots, Chunk]:
        return _decode_chunk(config, num_steps, params, cache, slots, column, layout)

    in_specs, out_specs = (partition_specs(config, mesh, params), places, ROWS, REPLICATED), (places, ROWS, ROWS)
    program = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return program(params, cache, slots, column)


def _prefill(
    config: ModelConfig,
    params: Params,
    prompts: Int[Array, "P S"],
    starts: Int[Array, "P"],
    like: Float[Array, "B K H T"],
    known: Known | None,
    layout: Layout,
) -> tuple[list[Array], list[Array]]:
    """Keys and values of the prompts, per layer, computed in pieces of some columns from the first unknown one on.

    Those of the device's heads, in the dtype of `like`.
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
        visible = (columns >= starts[:, None])[:, None, :] & (columns <= own[:, None])[None]
        behind = (own[:, None] - columns)[None]
        is_unknown = own[None, :] >= first_unknown[:, None]

        def attend_to_stored(
            attn: AttentionConfig, stored: tuple[Array, Array], q: Array, k: Array, v: Array
        ) -> tuple[Array, tuple[Array, Array]]:
            keys, values = stored
            q, k, v = (x.reshape(P, M, *x.shape[1:]) for x in (q, k, v))
            k, v = k.transpose(0, 2, 3, 1).astype(dtype), v.transpose(0, 2, 1, 3).astype(dtype)
            if known is not None:
                k = jnp.where(is_unknown[:, None, None], k, lax.dynamic_slice_in_dim(keys, first, M, 3))
                v = jnp.where(is_unknown[:, None, :, None], v, lax.dynamic_slice_in_dim(values, first, M, 2))
            keys = lax.dynamic_update_slice_in_dim(keys, k, first, 3)
            values = lax.dynamic_update_slice_in_dim(values, v, first, 2)
            seen = visible & within_window(behind, attn.window)
            return attend_masked(q, keys, values, seen, attn).reshape(P * M, *q.shape[2:]), (keys, values)

        tokens = lax.dynamic_slice_in_dim(prompts, first, M, 1)
        positions = jnp.maximum(own[None, :] - starts[:, None], 0)
        layers = list(zip(*stored, strict=True))
        layers = forward(
            config, params, tokens.reshape(-1), positions.reshape(-1), attend_to_stored, layers, layout=layout
        ).caches
        return [keys for keys, _ in layers], [values for _, values in layers]

    first_piece = jnp.minimum(jnp.min(first_unknown), S - 1) // M
    if layout.axes:
        first_piece = lax.pmin(first_piece, DATA)
    return lax.fori_loop(first_piece, S // M, piece, (keys, values))


def _decode_chunk(
    config: ModelConfig, C: int, params: Params, cache: Cache, slots: Slots, column: Int[Array, ""], layout: Layout
) -> tuple[Cache, Slots, Chunk]:
    """The loop over one device's slots, with the cache updated in place."""
    B = slots.token.shape[0]
    zeros, places = jnp.zeros((B, C)), (B, C, min(MAX_LOGPROBS, config.vocab_size))
    chunk = Chunk(
        token=zeros.astype(jnp.int32),
        policy_logp=zeros,
        sampler_logp=zeros,
        count=jnp.zeros(B, jnp.int32),
        stopped=jnp.zeros(B, bool),
        alternatives=jnp.zeros(places, jnp.int32),
        alternative_logps=jnp.zeros(places),
    )
    columns = jnp.arange(cache.num_columns)[None, :]
    prompt_columns = jnp.arange(cache.num_prompt_columns)[None, :]
    prompt_visible = prompt_columns >= cache.prompt_starts[:, None]
    rows_per_prompt = B // prompt_visible.shape[0]
    # at once for all tokens: on CPU a draw takes many operations
    uniform = uniforms(slots.key, slots.position[:, None] + jnp.arange(C)[None, :])

    def busy(carry: tuple[Array, Slots, Cache, Chunk]) -> Array:
        index, slots, _, _ = carry
        is_busy = jnp.any(slots.remaining > 0)
        if layout.axes:
            is_busy = lax.pmax(is_busy.astype(jnp.int32), DATA) > 0
        return (index < C) & is_busy

    def step(carry: tuple[Array, Slots, Cache, Chunk]) -> tuple[Array, Slots, Cache, Chunk]:
        index, slots, cache, chunk = carry
        current = column + index
        visible = (columns >= slots.start[:, None]) & (columns <= current)

        def attend_to_past(
            attn: AttentionConfig, kept: tuple[Array, ...], q: Array, k: Array, v: Array
        ) -> tuple[Array, tuple[Array, ...]]:
            prompt_k, prompt_v, keys, values = kept
            keys = lax.dynamic_update_index_in_dim(keys, k.astype(keys.dtype), current, axis=3)
            values = lax.dynamic_update_index_in_dim(values, v.astype(values.dtype), current, axis=2)
            of_prompt, of_row = prompt_visible, visible
            if attn.window is not None:
                behind_prompt = (current - slots.start)[:, None] + cache.num_prompt_columns - prompt_columns
                of_prompt = jnp.repeat(prompt_visible, rows_per_prompt, axis=0)
                of_prompt = of_prompt & within_window(behind_prompt, attn.window)
                of_row = visible & within_window(current - columns, attn.window)
            out = attend_cached(q, prompt_k, prompt_v, of_prompt, keys, values, of_row, attn)
            return out, (prompt_k, prompt_v, keys, values)

        layers = list(zip(cache.prompt_k, cache.prompt_v, cache.k, cache.v, strict=True))
        hidden, layers, _ = forward(config, params, slots.token, slots.position, attend_to_past, layers, layout=layout)
        _, _, keys, values = (list(each) for each in zip(*layers, strict=True))
        head = gather_weight(layout, ("vocab", "embed"), head_weights(params))
        logits = all_gather(vocabulary_logits(hidden, head, config.logit_softcap), layout.axis("vocab"), 1)
        tokens = lax.dynamic_update_index_in_dim(cache.tokens, slots.token, current, axis=1)
        history = History(
            prompt_tokens=cache.prompt_tokens,
            prompt_seen=prompt_visible,
            tokens=tokens,
            seen=visible,
            generated=visible & (columns > slots.start[:, None]),
            num_generated=current - slots.start,
            stop_ids=slots.stop_ids,
        )
        sampled = sample(logits, uniform[:, index], slots.settings, history)
        others, other_logps = alternatives(logits, slots.settings)

        active = slots.remaining > 0
        one = active.astype(jnp.int32)
        stopped = active & jnp.any(sampled.token[:, None] == slots.stop_ids, axis=-1)
        slots = replace(
            slots,
            token=sampled.token,
            position=slots.position + one,
            remaining=jnp.where(stopped, 0, slots.remaining - one),
        )
        chunk = Chunk(
            token=chunk.token.at[:, index].set(sampled.token),
            policy_logp=chunk.policy_logp.at[:, index].set(sampled.policy_logp),
            sampler_logp=chunk.sampler_logp.at[:, index].set(sampled.sampler_logp),
            count=chunk.count + one,
            stopped=chunk.stopped | stopped,
            alternatives=_written(chunk.alternatives, index, others),
            alternative_logps=_written(chunk.alternative_logps, index, other_logps),
        )
        return index + 1, slots, replace(cache, tokens=tokens, k=keys, v=values), chunk

    _, slots, cache, chunk = lax.while_loop(busy, step, (jnp.int32(0), slots, cache, chunk))
    return cache, slots, chunk


def _written(places: Array | None, index: Array, values: Array) -> Array:
    assert places is not None, "a chunk on the devices has all its fields"
    return places.at[:, index].set(values)


def _like(mask: Bool[Array, "B"], x: Array) -> Array:
    return jnp.expand_dims(mask, tuple(range(1, x.ndim)))
