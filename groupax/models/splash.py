"""Attention in blocks that stay on the chip, on TPUs: jax's splash kernels, with backward passes of their own.

Scores never reach the device's memory. The masks of positions are static, so that blocks without a visible score are
passed over; a prompt's left padding is hidden by segment ids. Padding sees padding and itself, never nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Bool, Float, Int

from groupax.models.config import AttentionConfig
from groupax.models.layers import scaled

# What lies next to each other in a TPU's registers: blocks are multiples of it.
LANES = 128
# Of queries and of columns in a block; wider ones make the same products and need more of the chip's own memory.
MAX_BLOCK = 512


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    starts: Int[Array, "B"],
    attn: AttentionConfig,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """As `attention.attend`, but for what a query before its row's start gets.

    Args:
        q, k, v, starts, attn: see there.
        interpret: compute what the kernels do with operations of any device.
    """
    is_own = jnp.arange(q.shape[1])[None, :] >= starts[:, None]
    return _through_kernel(q, k, v, (is_own, is_own), 0, attn, interpret)


def attend_with_prompt(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B C K H"],
    v: Float[Array, "B C K H"],
    prompt_k: Float[Array, "B S K H"],
    prompt_v: Float[Array, "B S K H"],
    prompt_starts: Int[Array, "B"],
    attn: AttentionConfig,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """As `attention.attend_with_prompt`; `interpret` as in `attend`."""
    B, T = q.shape[:2]
    columns = prompt_k.shape[1] + k.shape[1]
    keys, values = jnp.concatenate([prompt_k, k], axis=1), jnp.concatenate([prompt_v, v], axis=1)
    is_own = jnp.arange(columns)[None, :] >= prompt_starts[:, None]
    return _through_kernel(q, keys, values, (jnp.ones((B, T), bool), is_own), columns - T, attn, interpret)


def _through_kernel(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B C K H"],
    v: Float[Array, "B C K H"],
    is_own: tuple[Bool[Array, "B T"], Bool[Array, "B C"]],
    offset: int,
    attn: AttentionConfig,
    interpret: bool,
) -> Float[Array, "B T N H"]:
    """Query t is at column `offset` + t; it sees columns up to there that are its row's own, if it is."""
    T, N, C = *q.shape[1:3], k.shape[1]
    block_q = block_size(T)
    num_queries = -(-T // block_q) * block_q
    # a column for each query, so that those that fill up see at least their own
    columns = max(C, offset + num_queries)
    block_kv = block_size(columns)
    num_columns = -(-columns // block_kv) * block_kv
    shape = (num_queries, num_columns)
    seen: masks.Mask = masks.CausalMask(shape, offset)
    if attn.window is not None:
        seen = masks.LocalMask(shape, (attn.window - 1, 0), offset)
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([seen] * N),
        block_sizes=kernels.BlockSizes(
            block_q=block_q,
            block_kv=block_kv,
            block_q_dkv=block_q,
            block_kv_dkv=block_kv,
            block_q_dq=block_q,
            block_kv_dq=block_kv,
        ),
        attn_logits_soft_cap=attn.softcap,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )

    def filled_up(x: Array, size: int) -> Array:
        rest = ((0, 0),) * (x.ndim - 2)
        return jnp.pad(x, ((0, 0), (0, size - x.shape[1]), *rest), constant_values=x.ndim == 2)

    segments = (filled_up(x, size).astype(jnp.int32) for x, size in zip(is_own, shape, strict=True))
    sides = (scaled(q, attn.scale), num_queries), (k, num_columns), (v, num_columns)
    heads = (filled_up(x, size).swapaxes(1, 2) for x, size in sides)
    out: Any = jax.vmap(kernel)(*heads, kernels.SegmentIds(*segments))
    return out.swapaxes(1, 2)[:, :T]


def block_size(length: int) -> int:
    """The largest of a few sizes of blocks that fill up `length` by at most a quarter more than the smallest."""
    least = -(-length // LANES) * LANES
    sizes = range(MAX_BLOCK, 0, -LANES)
    return next(size for size in sizes if -(-length // size) * size <= 1.25 * least)
