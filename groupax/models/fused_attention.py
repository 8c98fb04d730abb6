"""Which attention is computed by a kernel of the device's own, whose scores never reach its memory, and which plainly.

`models.attention` says what is computed. `models.splash` and `models.cudnn` call the kernels and are imported for that.
"""

from typing import Any

from jaxtyping import Array, Float, Int

from groupax.models import attention
from groupax.models.config import AttentionConfig, ModelConfig
from groupax.models.execution import FusedAttention
from groupax.settings.compute import AttnImplementation

# By a v4's stated peaks (planning.counting; 32 heads over 8 of 128 dims) splash takes about half of the plain form's
# time with 128 queries, as long with 64, and with 32 twice as long, since a block has 128.
MIN_QUERIES = 128
# cuDNN computes the scores of empty queries too. With five times the scores that are needed its arithmetic, at 60 % of
# an H100's stated peak, takes as long as the memory that plain scores go through.
MAX_EXTRA_SCORES = 4
# A GPU's least compute capability with such kernels, and the one from which heads may be as wide as the second number.
_FIRST_CAPABILITY, _FEW_DIMS = (8, 0), 128
_WIDE_CAPABILITY, _MANY_DIMS = (9, 0), 256


def select_fused_attention(
    asked: AttnImplementation, device: Any, config: ModelConfig, dtype: Any
) -> FusedAttention | None:
    """The kernel that updates attend with on a device; None for the plain form.

    Args:
        asked: see `GRPOConfig.attn_implementation`.
        device: one of jax's, which may be described only.
        config: the model.
        dtype: of the forward pass.

    Raises:
        ValueError: "fused" was asked for, and there is no kernel for it.
    """
    if asked == "plain":
        return None
    fault = _fault(device, config, str(dtype))
    if fault is None:
        return FusedAttention("splash" if device.platform == "tpu" else "cudnn")
    if asked == "fused":
        raise ValueError(f"attn_implementation is 'fused', and {fault}; set it to 'auto' or 'plain'")
    return None


def _fault(device: Any, config: ModelConfig, dtype: str) -> str | None:
    """Why there is no kernel; None if there is one."""
    if device.platform == "tpu":
        return None
    if device.platform not in ("gpu", "cuda"):
        return f"there is no fused attention for a {device.platform} device, only for TPUs and NVIDIA GPUs"
    capability = getattr(device, "compute_capability", "")
    if not capability.replace(".", "").isdigit():
        return f"there is no fused attention for {device.device_kind}, only for TPUs and NVIDIA GPUs"
    version = tuple(int(part) for part in capability.split("."))
    if version < _FIRST_CAPABILITY:
        return f"cuDNN's needs compute capability 8.0, and {device.device_kind} has {capability}"
    if dtype != "bfloat16":
        return f"cuDNN's computes in bfloat16, and dtype is {dtype}"
    if config.attention_softcap is not None:
        return f"cuDNN's has no softcap, and this model's is {config.attention_softcap}"
    dims, most = config.head_dim, _MANY_DIMS if version >= _WIDE_CAPABILITY else _FEW_DIMS
    if dims > most or dims % 8:
        return f"cuDNN's takes heads of up to {most} dims in eights on {device.device_kind}, and this model has {dims}"
    return None


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    starts: Int[Array, "B"],
    attn: AttentionConfig,
    fused: FusedAttention | None,
) -> Float[Array, "B T N H"]:
    """`attention.attend`, fused where it pays; a query before its row's start then gets numbers without meaning."""
    if fused is None or not _pays(fused, q.shape[1], 0):
        return attention.attend(q, k, v, starts, attn)
    if fused.kernel == "splash":
        from groupax.models import splash

        return splash.attend(q, k, v, starts, attn, fused.emulated)
    from groupax.models import cudnn

    return cudnn.attend(q, k, v, starts, attn, "xla" if fused.emulated else "cudnn")


def attend_with_prompt(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B C K H"],
    v: Float[Array, "B C K H"],
    prompt_k: Float[Array, "B S K H"],
    prompt_v: Float[Array, "B S K H"],
    prompt_starts: Int[Array, "B"],
    attn: AttentionConfig,
    fused: FusedAttention | None,
) -> Float[Array, "B T N H"]:
    """`attention.attend_with_prompt`, fused where it pays."""
    arrays = (q, k, v, prompt_k, prompt_v, prompt_starts)
    if fused is None or not _pays(fused, q.shape[1], prompt_k.shape[1] + k.shape[1] - q.shape[1]):
        return attention.attend_with_prompt(*arrays, attn)
    if fused.kernel == "splash":
        from groupax.models import splash

        return splash.attend_with_prompt(*arrays, attn, fused.emulated)
    from groupax.models import cudnn

    return cudnn.attend_with_prompt(*arrays, attn, "xla" if fused.emulated else "cudnn")


def _pays(fused: FusedAttention, queries: int, before: int) -> bool:
    """Whether so many queries behind so many columns take less time fused."""
    needed, computed = queries * (2 * before + queries), (before + queries) ** 2
    extra = fused.kernel == "cudnn" and computed > MAX_EXTRA_SCORES * needed
    return queries >= MIN_QUERIES and not extra
