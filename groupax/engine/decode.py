"""The program that decodes a chunk of tokens in every slot.

It runs on each device of the data axes separately, without communication: a device leaves its loop as soon as its own
slots are done. Where devices share the weights (the mesh's `tp`), all of them take the same number of steps, so that
none waits for one that has left. On GPUs every device takes all steps: there a loop of unknown length waits for the
host before each token; a server's chunks, whose lengths vary, wait once every few tokens.
"""

import math
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from groupax.core.settings.sampling import MAX_LOGPROBS, SamplingKind
from groupax.engine.cache import ROWS, Cache, Slots, pspec_of
from groupax.engine.images import text_tokens
from groupax.engine.rules import History, TokenMasks
from groupax.engine.sampling import Sampled, sample, uniforms
from groupax.models.adapted import select_adapters
from groupax.models.attention import LayerCache, Past
from groupax.models.config import AttentionConfig, ModelConfig
from groupax.models.decoder import PassOptions, forward, head_weights
from groupax.models.experts import Routing
from groupax.models.kernels.fused_attention import AttendPast, select_attend_past
from groupax.models.layers import vocabulary_logits
from groupax.models.params import gather_weight, layout_of, partition_specs
from groupax.models.recurrent import Recurrence, State
from groupax.models.specs import Params
from groupax.parallel.collectives import all_gather
from groupax.parallel.mesh import DATA, Layout
from groupax.parallel.pytree import pytree
from groupax.parallel.runtime import traced_platform

GPU_STEPS = 4  # between two looks at the limit of a chunk


@pytree
class Chunk:
    """Up to C tokens sampled in each slot, of which the first `count` of a row are real."""

    token: Int[Array, "B C"]  # sampled tokens, an ending stop token included
    policy_logp: Float[Array, "B C"]  # natural log-prob under softmax(logits / temperature), float32
    sampler_logp: Float[Array, "B C"]  # natural log-prob under the truncated distribution that was drawn from
    count: Int[Array, "B"]  # number of tokens sampled
    stopped: Bool[Array, "B"]  # true where the row's last token is one of its stop tokens
    # the policy's likeliest tokens for each token, if a slot requests them; None if not fetched, and of plain sampling
    alternatives: Int[Array, "B C A"] | None
    alternative_logps: Float[Array, "B C A"] | None  # log-probs of the alternatives
    # experts that the token before each sampled one went through in each layer with experts, layer by layer; None
    # unless they are recorded
    experts: Int[Array, "B C LA"] | None = None


Carry = tuple[Array, Slots, Cache, Chunk]  # of the loop over a chunk's steps: the first is the next one's index


@dataclass(frozen=True)
class DecodeSettings:
    """The static settings of a program that decodes."""

    config: ModelConfig  # architecture of the model
    mesh: Mesh  # devices
    num_steps: int  # most steps of a chunk
    sampling: SamplingKind  # "plain" if all slots' settings are so (see `SamplingParams.is_plain`), else "general"
    by_block: bool = False  # whether attention is computed by blocks of columns (see `Plan.by_block`)
    records_experts: bool = False  # whether the chunk has the experts of each token


@partial(jax.jit, static_argnames="settings", donate_argnames=("cache", "slots"))
def decode_chunk(
    params: Params,
    cache: Cache,
    slots: Slots,
    masks: TokenMasks | None = None,
    limit: Int[Array, ""] | None = None,
    *,
    settings: DecodeSettings,
) -> tuple[Cache, Slots, Chunk]:
    """Samples up to `settings.num_steps` tokens in every busy slot.

    Args:
        cache, slots: Donated. The cache must have as many columns as any slot will have fed tokens.
        masks: Tokens that the slots may sample; None without constraints.
        limit: A smaller number of steps, which needs no other program; on GPUs it is rounded up to `GPU_STEPS`. None
            for `num_steps`.
        settings: Static.
    """
    config, sampling, C = settings.config, settings.sampling, settings.num_steps
    layout = layout_of(config, settings.mesh)
    attend_past = select_attend_past(settings.mesh.devices.flat[0], config, settings.by_block)

    def local(
        params: Params, cache: Cache, slots: Slots, masks: TokenMasks | None, limit: Array | None
    ) -> tuple[Cache, Slots, Chunk]:
        chunk = _empty_chunk(len(slots.token), C, config, sampling, settings.records_experts)
        # at once for all tokens: on CPU a draw takes many operations
        uniform = uniforms(slots.key, slots.position[:, None] + jnp.arange(C)[None, :])
        allowed, held = None, jnp.zeros_like(slots.remaining)
        if masks is not None:
            allowed = masks.allowed(config.vocab_size)
            held = jnp.where(masks.constrained, jnp.maximum(slots.remaining - 1, 0), 0)
            slots = replace(slots, remaining=slots.remaining - held)

        def busy(carry: Carry) -> Array:
            index, slots, _, _ = carry
            is_busy = jnp.any(slots.remaining > 0)
            if layout.axes:
                is_busy = lax.pmax(is_busy.astype(jnp.int32), DATA) > 0
            return (index < (C if limit is None else limit)) & is_busy

        def step(carry: Carry) -> Carry:
            index, slots, cache, chunk = carry
            logits, cache, history, routings = _feed(config, attend_past, params, cache, slots, layout)
            if chunk.experts is not None:
                chosen = jnp.concatenate([routing.chosen for routing in routings], axis=1)
                chunk = replace(chunk, experts=chunk.experts.at[:, index].set(chosen.astype(chunk.experts.dtype)))
            seen = history if sampling == "general" else None
            text = text_tokens(config.vision, logits)
            may_follow = text if allowed is None else allowed if text is None else allowed & text
            sampled = sample(logits, uniform[:, index], slots.settings, seen, may_follow)
            slots, chunk = _append(chunk, slots, index, sampled)
            return index + 1, slots, cache, chunk

        start = jnp.int32(0), slots, cache, chunk
        if traced_platform() != "gpu" or masks is not None:
            _, slots, cache, chunk = lax.while_loop(busy, step, start)
        elif limit is None:
            _, slots, cache, chunk = lax.fori_loop(0, C, lambda _, carry: step(carry), start)
        else:
            several = math.gcd(C, GPU_STEPS)
            _, slots, cache, chunk = lax.while_loop(
                busy, lambda carry: lax.fori_loop(0, several, lambda _, carry: step(carry), carry), start
            )
        return cache, replace(slots, remaining=slots.remaining + jnp.where(chunk.stopped, 0, held)), chunk

    of_cache, of_masks = jax.tree.map(pspec_of, cache), None if masks is None else ROWS
    of_limit = None if limit is None else jax.P()
    in_specs = partition_specs(config, settings.mesh, params), of_cache, ROWS, of_masks, of_limit
    out_specs = of_cache, ROWS, ROWS
    program = jax.shard_map(local, mesh=settings.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return program(params, cache, slots, masks, limit)


def _empty_chunk(B: int, C: int, config: ModelConfig, sampling: SamplingKind, records_experts: bool) -> Chunk:
    zeros, of_alternatives = jnp.zeros((B, C)), (B, C, min(MAX_LOGPROBS, config.vocab_size))
    has_alternatives = sampling == "general"
    experts = None
    if records_experts:
        assert config.experts is not None, "the engine refuses models without experts"
        experts = jnp.zeros((B, C, len(config.experts.layers) * config.experts.per_token), jnp.int16)
    return Chunk(
        token=zeros.astype(jnp.int32),
        policy_logp=zeros,
        sampler_logp=zeros,
        count=jnp.zeros(B, jnp.int32),
        stopped=jnp.zeros(B, bool),
        alternatives=jnp.zeros(of_alternatives, jnp.int32) if has_alternatives else None,
        alternative_logps=jnp.zeros(of_alternatives) if has_alternatives else None,
        experts=experts,
    )


def _feed(
    config: ModelConfig,
    attend_past: AttendPast,
    params: Params,
    cache: Cache,
    slots: Slots,
    layout: Layout,
) -> tuple[Float[Array, "B V"], Cache, History, list[Routing]]:
    """Feeds each busy slot's next token, whose keys and values go into its next column and which changes its states."""
    past = Past(cache.prompt_starts, jnp.where(slots.remaining > 0, slots.length + 1, 0))

    def attend(attn: AttentionConfig, layer: LayerCache, *heads: Array) -> tuple[Array, LayerCache]:
        return attend_past(attn, past, layer, *heads)

    def recur(recurrence: Recurrence, state: State, inputs: Any) -> tuple[Array, State]:
        out, after = recurrence.step(state, inputs)
        is_busy = (slots.remaining > 0)[:, None, None]
        return out, State(*(jnp.where(is_busy, new, old) for new, old in zip(after, state, strict=True)))

    params = select_adapters(params, slots.adapter)
    hidden, layers, routings = forward(
        config, params, slots.token, slots.position, attend, cache.layers, PassOptions(layout=layout, recur=recur)
    )
    head = gather_weight(layout, ("vocab", "embed"), head_weights(params))
    logits = all_gather(vocabulary_logits(hidden, head, config.logit_softcap), layout.axis("vocab"), 1)
    tokens = past.write(cache.tokens, slots.token, axis=1)
    seen = past.visible(cache.num_columns)
    history = History(
        prompt_tokens=cache.prompt_tokens,
        prompt_seen=past.prompt_visible(cache.num_prompt_columns),
        tokens=tokens,
        seen=seen,
        generated=seen.at[:, 0].set(False),  # the first column has the last token of the prompt
        num_generated=slots.length,
        stop_ids=slots.stop_ids,
    )
    return logits, replace(cache, tokens=tokens, layers=layers), history, routings


def _append(chunk: Chunk, slots: Slots, index: Array, sampled: Sampled) -> tuple[Slots, Chunk]:
    """Writes the sampled tokens into the chunk's column `index`, and into the slots to be fed next."""
    active = slots.remaining > 0
    one = active.astype(jnp.int32)
    stopped = active & jnp.any(sampled.token[:, None] == slots.stop_ids, axis=-1)
    slots = replace(
        slots,
        token=jnp.where(active, sampled.token, slots.token),
        position=slots.position + one,
        length=slots.length + one,
        remaining=jnp.where(stopped, 0, slots.remaining - one),
    )
    drawn = {each.name: getattr(sampled, each.name) for each in fields(Sampled)}
    columns = {
        name: getattr(chunk, name).at[:, index].set(column) for name, column in drawn.items() if column is not None
    }
    chunk = replace(chunk, **columns, count=chunk.count + one, stopped=chunk.stopped | stopped)
    return slots, chunk
