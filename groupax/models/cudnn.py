"""Attention in blocks that stay on the chip, on NVIDIA's GPUs: cuDNN's, with a backward pass of its own.

cuDNN's causal mask has query i see columns up to i, however many columns there are; windows go with that mask alone. So
prompt and row become one sequence that begins at its first token, with empty queries where none are asked for, whose
results are dropped. Padding lies behind, where nothing that counts sees it.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from groupax.models.config import AttentionConfig

# cuDNN's, or what XLA makes of the same call on any device.
Implementation = Literal["cudnn", "xla"]


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    starts: Int[Array, "B"],
    attn: AttentionConfig,
    implementation: Implementation = "cudnn",
) -> Float[Array, "B T N H"]:
    """As `attention.attend`, but for what a query before its row's start gets.

    Args:
        q, k, v, starts, attn: see there; there is no softcap.
        implementation: of the call.
    """
    assert attn.softcap is None, "cuDNN has no softcap"
    window = None if attn.window is None else (attn.window - 1, 0)
    out = jax.nn.dot_product_attention(
        *(_turned(x, starts) for x in (q, k, v)),
        scale=attn.scale,
        is_causal=True,
        local_window_size=window,
        implementation=implementation,
    )
    return _turned(out, -starts)


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
    """As `attention.attend_with_prompt`; `implementation` as in `attend`."""
    before = prompt_k.shape[1] + k.shape[1] - q.shape[1]
    queries = jnp.pad(q, ((0, 0), (before, 0), (0, 0), (0, 0)))
    keys, values = jnp.concatenate([prompt_k, k], axis=1), jnp.concatenate([prompt_v, v], axis=1)
    return attend(queries, keys, values, prompt_starts, attn, implementation)[:, before:]


@jax.custom_vjp
def _turned(x: Float[Array, "B C N H"], by: Int[Array, "B"]) -> Float[Array, "B C N H"]:
    """Each row's columns moved to the left by so many; those that fall out come back at the other end."""
    columns = (jnp.arange(x.shape[1])[None, :] + by[:, None]) % x.shape[1]
    return jnp.take_along_axis(x, columns[:, :, None, None], axis=1)


def _turned_forward(x: Array, by: Array) -> tuple[Array, Array]:
    return _turned(x, by), by


def _turned_backward(by: Array, gradient: Array) -> tuple[Array, None]:
    return _turned(gradient, -by), None


_turned.defvjp(_turned_forward, _turned_backward)
