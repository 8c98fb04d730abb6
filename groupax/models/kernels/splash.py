"""Fused attention on TPUs: jax's splash kernels, forward and backward.

Scores never reach the device's memory. The masks of positions are static, so that blocks without a visible score are
skipped; a prompt's left padding is hidden by segment ids. Padding sees padding and itself, so it always sees something.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Bool, Float, Int

from groupax.models.config import AttentionConfig, Chunks
from groupax.models.layers import scaled

# Lanes of a TPU's vector registers; block sizes are multiples of it.
LANES = 128
# Most queries and columns in a block; wider blocks compute the same matmuls and need more of the chip's own memory.
MAX_BLOCK = 512


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    starts: Int[Array, "B"],
    attn: AttentionConfig,
    interpret: bool = False,
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Computes `attention.attend`; queries before their row's start get undefined results.

    Args:
        q, k, v, starts, attn, sinks: Arguments of `attention.attend`.
        interpret: Whether to emulate the kernels with operations that every device has.
    """
    is_own = jnp.arange(q.shape[1])[None, :] >= starts[:, None]
    return _call_kernel(q, k, v, (is_own, is_own), 0, attn, interpret, sinks)


def attend_with_prompt(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B C K H"],
    v: Float[Array, "B C K H"],
    prompt_k: Float[Array, "B S K H"],
    prompt_v: Float[Array, "B S K H"],
    prompt_starts: Int[Array, "B"],
    attn: AttentionConfig,
    interpret: bool = False,
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Computes `attention.attend_with_prompt`; `interpret` as in `attend`."""
    B, T = q.shape[:2]
    columns = prompt_k.shape[1] + k.shape[1]
    keys, values = jnp.concatenate([prompt_k, k], axis=1), jnp.concatenate([prompt_v, v], axis=1)
    is_own = jnp.arange(columns)[None, :] >= prompt_starts[:, None]
    return _call_kernel(q, keys, values, (jnp.ones((B, T), bool), is_own), columns - T, attn, interpret, sinks)


def _call_kernel(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B C K H"],
    v: Float[Array, "B C K H"],
    is_own: tuple[Bool[Array, "B T"], Bool[Array, "B C"]],
    offset: int,
    attn: AttentionConfig,
    interpret: bool,
    sinks: Float[Array, "N"] | None,
) -> Float[Array, "B T N H"]:
    """Attends from query t, which is at column `offset` + t, to the columns up to there that are not padding."""
    T, N, C = *q.shape[1:3], k.shape[1]
    block_q = block_size(T)
    num_queries = _round_up(T, block_q)
    # a column for each query, so that padding queries see at least their own
    columns = max(C, offset + num_queries)
    block_kv = block_size(columns)
    num_columns = _round_up(columns, block_kv)

    def pad(x: Array, size: int) -> Array:
        rest = ((0, 0),) * (x.ndim - 2)
        return jnp.pad(x, ((0, 0), (0, size - x.shape[1]), *rest), constant_values=x.ndim == 2)

    seen: masks.Mask = masks.CausalMask((num_queries, num_columns), offset)
    assert not isinstance(attn.window, Chunks), "chunks start with each row, and masks are static"
    if attn.window is not None:
        seen = masks.LocalMask((num_queries, num_columns), (attn.window - 1, 0), offset)
    kernel = _make_kernel(masks.MultiHeadMask([seen] * N), block_q, block_kv, attn.softcap, interpret)
    segments = (pad(x, size).astype(jnp.int32) for x, size in zip(is_own, (num_queries, num_columns), strict=True))
    sides = (scaled(q, attn.scale), num_queries), (k, num_columns), (v, num_columns)
    heads = (pad(x, size).swapaxes(1, 2) for x, size in sides)
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    out: Any = jax.vmap(partial(kernel, sinks=sinks))(*heads, kernels.SegmentIds(*segments))
    return out.swapaxes(1, 2)[:, :T]


def _make_kernel(mask: masks.MultiHeadMask, block_q: int, block_kv: int, softcap: float | None, interpret: bool) -> Any:
    return kernels.make_splash_mha(
        mask,
        block_sizes=kernels.BlockSizes(
            block_q=block_q,
            block_kv=block_kv,
            block_q_dkv=block_q,
            block_kv_dkv=block_kv,
            block_q_dq=block_q,
            block_kv_dq=block_kv,
        ),
        attn_logits_soft_cap=softcap,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def block_size(length: int) -> int:
    """Returns the largest block size that pads `length` to at most 1.25 times what the smallest one pads it to."""
    least = _round_up(length, LANES)
    sizes = range(MAX_BLOCK, 0, -LANES)
    return next(size for size in sizes if _round_up(length, size) <= 1.25 * least)
