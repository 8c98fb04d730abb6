"""Chooses the form of attention while decoding that suits a device; `models.decode_attention` defines the computation.

Modules with kernels are imported lazily.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from jaxtyping import Array

from groupax.models import decode_attention
from groupax.models.config import Chunks, ModelConfig
from groupax.models.decode_attention import LayerCache
from groupax.parallel.runtime import cuda_capability

TRITON_CAPABILITY = (8, 0)  # the first compute capability of GPUs that multiply bfloat16

# (attention settings, the columns that are visible, the layer's cache, queries [B, N, H], keys [B, K, H], values
# [B, K, H], sinks [N] if the model has them) -> (outputs [B, N, H], the layer's cache with the keys and values written)
AttendPast = Callable[..., tuple[Array, LayerCache]]


def select_attend_past(device: Any, config: ModelConfig | None = None, by_block: bool = False) -> AttendPast:
    """Returns the implementation of `decode_attention.attend_past` for a device of jax, or for a description of one.

    Kernels always compute by blocks of columns; with `by_block` the plain form does so too. It is the only one for
    latent attention, whose heads have more dims than the kernels support, and for sinks and chunks.
    """
    if config is not None and _needs_plain(config):
        return partial(decode_attention.attend_past, by_block=by_block)
    if device.platform == "tpu":
        from groupax.models import tpu_attention

        return tpu_attention.attend_past
    capability = cuda_capability(device)
    if capability is None or capability < TRITON_CAPABILITY:
        return partial(decode_attention.attend_past, by_block=by_block)
    from groupax.models import triton_attention

    return triton_attention.attend_past


def _needs_plain(config: ModelConfig) -> bool:
    return config.latent is not None or config.sinks or any(isinstance(each, Chunks) for each in config.windows)
