"""Attention in updates and in decoding, by the form that suits a device: kernels or plain.

`models.attention` defines the computation. Modules with kernels are imported lazily; cuDNN's are called here.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from groupax.core.settings.compute import AttnImplementation
from groupax.models import attention
from groupax.models.attention import LayerCache, Prompts, attend_past
from groupax.models.config import AttentionConfig, Chunks, ModelConfig
from groupax.models.execution import FusedAttention
from groupax.parallel.kernels import kernel_faults
from groupax.parallel.runtime import cuda_capability

# By a TPU v4's stated peaks (planning.counting; 32 query heads over 8 kv heads of 128 dims) splash takes about half of
# the plain form's time with 128 queries, the same time with 64, and twice the time with 32, since a block has 128.
MIN_QUERIES = 128
# cuDNN computes the scores of padding queries too. With five times the needed scores its arithmetic, at 60 % of an
# H100's stated peak, takes the same time as the memory traffic of plain scores.
MAX_EXTRA_SCORES = 4
# The first compute capability of GPUs with these kernels and its most dims per head; and the one from which heads may
# have more dims.
_FIRST_CAPABILITY, _FEW_DIMS = (8, 0), 128
_WIDE_CAPABILITY, _MANY_DIMS = (9, 0), 256


_KERNELS: dict[str, Literal["splash", "cudnn"]] = {"tpu": "splash", "gpu": "cudnn", "cuda": "cudnn"}


def select_fused_attention(
    implementation: AttnImplementation, device: Any, config: ModelConfig, dtype: Any
) -> FusedAttention | None:
    """Selects the attention kernel for updates on a device; None for the plain form.

    Args:
        implementation: The setting `GRPOConfig.attn_implementation`.

    Raises:
        ValueError: "fused" is requested and no kernel supports it.
    """
    if implementation == "plain":
        return None
    reason = _unsupported_reason(device, config, str(dtype))
    if reason is None:
        return FusedAttention(_KERNELS[device.platform])
    if implementation == "fused":
        raise ValueError(f"attn_implementation is 'fused', but {reason}; set it to 'auto' or 'plain'")
    return None


def _unsupported_reason(device: Any, config: ModelConfig, dtype: str) -> str | None:
    """Returns why there is no kernel, or None if there is one."""
    if any(isinstance(window, Chunks) for window in config.windows):
        return "no kernel has the mask of chunks that this model attends to, which start with each row"
    if fault := kernel_faults().get(_KERNELS.get(device.platform, "")):
        return f"its kernel was left out on this machine: {fault}"
    if device.platform == "tpu":
        return None
    if device.platform not in ("gpu", "cuda"):
        return f"there is no fused attention for a {device.platform} device, only for TPUs and NVIDIA GPUs"
    version = cuda_capability(device)
    if version is None:
        return f"there is no fused attention for {device.device_kind}, only for TPUs and NVIDIA GPUs"
    if version < _FIRST_CAPABILITY:
        return f"cuDNN's kernel needs compute capability 8.0, and {device.device_kind} has {version[0]}.{version[1]}"
    if dtype != "bfloat16":
        return f"cuDNN's kernel computes in bfloat16, and dtype is {dtype}"
    if config.attention_softcap is not None:
        return f"cuDNN's kernel has no softcap, and this model's softcap is {config.attention_softcap}"
    if config.sinks:
        return "cuDNN's kernel has no sinks, and this model has them"
    dims, most = config.update_heads[1], _MANY_DIMS if version >= _WIDE_CAPABILITY else _FEW_DIMS
    if dims > most or dims % 8:
        return (
            f"cuDNN's kernel needs a head_dim of at most {most} that is a multiple of 8 on {device.device_kind}, and "
            f"this model's is {dims}"
        )
    return None


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    starts: Int[Array, "B"],
    attn: AttentionConfig,
    fused: FusedAttention | None,
    blocks: Int[Array, "B T"] | None = None,
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Computes `attention.attend`, fused where that is faster; queries before their row's start are then undefined.

    No kernel has a mask in which images see themselves: with `blocks` it is plain.
    """
    if fused is None or blocks is not None or not _is_faster(fused, q.shape[1], 0):
        return attention.attend(q, k, v, starts, attn, blocks, sinks)
    return _attend_fused(q, k, v, starts, attn, fused, sinks)


def attend_with_prompt(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B C K H"],
    v: Float[Array, "B C K H"],
    prompts: Prompts,
    attn: AttentionConfig,
    fused: FusedAttention | None,
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Computes `attention.attend_with_prompt`, fused where that is faster."""
    if fused is None or not _is_faster(fused, q.shape[1], prompts.k.shape[1] + k.shape[1] - q.shape[1]):
        return attention.attend_with_prompt(q, k, v, prompts, attn, sinks)
    keys, values = jnp.concatenate([prompts.k, k], axis=1), jnp.concatenate([prompts.v, v], axis=1)
    return _attend_fused(q, keys, values, prompts.starts, attn, fused, sinks)


def _attend_fused(
    q: Array, k: Array, v: Array, starts: Array, attn: AttentionConfig, fused: FusedAttention, sinks: Array | None
) -> Array:
    if fused.kernel == "splash":
        from groupax.models.kernels import splash

        return splash.attend(q, k, v, starts, attn, sinks, fused.emulated)
    return cudnn_attend(q, k, v, starts, attn, "xla" if fused.emulated else "cudnn")


def _is_faster(fused: FusedAttention, queries: int, before: int) -> bool:
    """Estimates whether this number of queries after this number of columns takes less time fused."""
    needed, computed = queries * (2 * before + queries), (before + queries) ** 2
    extra = fused.kernel == "cudnn" and computed > MAX_EXTRA_SCORES * needed
    return queries >= MIN_QUERIES and not extra


TRITON_CAPABILITY = (8, 0)  # the first compute capability of GPUs that multiply bfloat16

# (attention settings, the columns that are visible, the layer's cache, queries [B, N, H], keys [B, K, H], values
# [B, K, H], sinks [N] if the model has them) -> (outputs [B, N, H], the layer's cache with the keys and values written)
AttendPast = Callable[..., tuple[Array, LayerCache]]


def select_attend_past(device: Any, config: ModelConfig | None = None, by_block: bool = False) -> AttendPast:
    """Returns the implementation of `attention.attend_past` for a device of jax, or for a description of one.

    The kernels are for NVIDIA GPUs. They always compute by blocks of columns; with `by_block` the plain form does so
    too. It is the only one for latent attention, whose heads have more dims than the kernels support, and for sinks and
    chunks.
    """
    is_plain = config is not None and (
        config.latent is not None or config.sinks or any(isinstance(each, Chunks) for each in config.windows)
    )
    if is_plain:
        return partial(attend_past, by_block=by_block)
    capability = cuda_capability(device)
    if capability is None or capability < TRITON_CAPABILITY or "decode_attention" in kernel_faults():
        return partial(attend_past, by_block=by_block)
    from groupax.models.kernels import triton_attention

    return triton_attention.attend_past


# cuDNN's kernel, or XLA's lowering of the same call, which runs on any device.
Implementation = Literal["cudnn", "xla"]


def cudnn_attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B C K H"],
    v: Float[Array, "B C K H"],
    starts: Int[Array, "B"],
    attn: AttentionConfig,
    implementation: Implementation = "cudnn",
) -> Float[Array, "B T N H"]:
    """Computes `attention.attend` for the last T of C columns with cuDNN, without a softcap.

    Queries before their row's start get undefined results. In cuDNN's causal mask query i sees columns up to i, however
    many columns there are, and windows need that mask. So there are padding queries for the columns before, whose
    results are dropped, and a row's padding is moved to its end, where no real query sees it.
    """
    assert attn.softcap is None, "cuDNN has no softcap"
    assert not isinstance(attn.window, Chunks), "cuDNN has no chunks"
    before = k.shape[1] - q.shape[1]
    queries = jnp.pad(q, ((0, 0), (before, 0), (0, 0), (0, 0))) if before else q
    out = jax.nn.dot_product_attention(
        *(_roll_left(x, starts) for x in (queries, k, v)),
        scale=attn.scale,
        is_causal=True,
        local_window_size=None if attn.window is None else (attn.window - 1, 0),
        implementation=implementation,
    )
    return _roll_left(out, -starts)[:, before:]


@jax.custom_vjp
def _roll_left(x: Float[Array, "B C N H"], shift: Int[Array, "B"]) -> Float[Array, "B C N H"]:
    """Rolls the columns of each row to the left by its shift."""
    columns = (jnp.arange(x.shape[1])[None, :] + shift[:, None]) % x.shape[1]
    return jnp.take_along_axis(x, columns[:, :, None, None], axis=1)


_roll_left.defvjp(
    lambda x, shift: (_roll_left(x, shift), shift), lambda shift, gradient: (_roll_left(gradient, -shift), None)
)
