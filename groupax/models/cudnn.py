"""Fused attention on NVIDIA GPUs: cuDNN's kernels, forward and backward.

In cuDNN's causal mask query i sees columns up to i, however many columns there are, and windows need that mask. So
prompt and row become one sequence that starts at its first token, with padding queries for the prompt, whose results
are dropped. The padding is moved to the end, where no real query sees it.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from groupax.models.config import AttentionConfig, Chunks

# cuDNN's kernel, or XLA's lowering of the same call, which runs on any device.
Implementation = Literal["cudnn", "xla"]


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    starts: Int[Array, "B"],
    attn: AttentionConfig,
    implementation: Implementation = "cudnn",
) -> Float[Array, "B T N H"]:
    """Computes `attention.attend` without a softcap; queries before their row's start get undefined results."""
    assert attn.softcap is None, "cuDNN has no softcap"
    assert not isinstance(attn.window, Chunks), "cuDNN has no chunks"
    window = None if attn.window is None else (attn.window - 1, 0)
    out = jax.nn.dot_product_attention(
        *(_roll_left(x, starts) for x in (q, k, v)),
        scale=attn.scale,
        is_causal=True,
        local_window_size=window,
        implementation=implementation,
    )
    return _roll_left(out, -starts)


def attend_with_prompt(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B C K H"],
    v: Float[Array, "B C K H"],
    prompt_k: Float[Array, "B S K H"],
    prompt_v: Float[Array, "B S K H"],
    prompt_starts: Int[Array, "B"],
    attn: AttentionConfig,
    implementation: Implementation = "cudnn",
) -> Float[Array, "B T N H"]:
    """Computes `attention.attend_with_prompt`."""
    before = prompt_k.shape[1] + k.shape[1] - q.shape[1]
    queries = jnp.pad(q, ((0, 0), (before, 0), (0, 0), (0, 0)))
    keys, values = jnp.concatenate([prompt_k, k], axis=1), jnp.concatenate([prompt_v, v], axis=1)
    return attend(queries, keys, values, prompt_starts, attn, implementation)[:, before:]


@jax.custom_vjp
def _roll_left(x: Float[Array, "B C N H"], shift: Int[Array, "B"]) -> Float[Array, "B C N H"]:
    """Rolls the columns of each row to the left by its shift."""
    columns = (jnp.arange(x.shape[1])[None, :] + shift[:, None]) % x.shape[1]
    return jnp.take_along_axis(x, columns[:, :, None, None], axis=1)


def _roll_forward(x: Array, shift: Array) -> tuple[Array, Array]:
    return _roll_left(x, shift), shift


def _roll_backward(shift: Array, gradient: Array) -> tuple[Array, None]:
    return _roll_left(gradient, -shift), None


_roll_left.defvjp(_roll_forward, _roll_backward)
