"""Settings of how a pass over many tokens is executed. They change its results by rounding at most."""

from dataclasses import dataclass
from typing import Literal

from groupax.settings.compute import Checkpointing, ReduceDtype

# Logits that are computed at a time. Blocks of this size stay in a CPU's cache; an accelerator reads the vocabulary's
# matrix again for each block, and has memory for 256 MiB.
CPU_LOGITS = 1 << 21
ACCELERATOR_LOGITS = 1 << 26


@dataclass(frozen=True)
class FusedAttention:
    """A fused attention kernel (see `models.fused_attention`).

    Attributes:
        kernel: "splash" on TPUs, "cudnn" on NVIDIA GPUs.
        emulated: Whether the kernel is emulated by operations that every device has, for tests.
    """

    kernel: Literal["splash", "cudnn"]
    emulated: bool = False


@dataclass(frozen=True)
class Execution:
    """The execution settings of a pass.

    Attributes:
        checkpointing: What the backward pass recomputes (see `config.Checkpointing`).
        scan_layers: Whether layers of the same kind share one compiled program, which scans over their stacked weights.
        chunk_logits: Number of logits that are computed at a time.
        attention: Attention kernel; None for plain attention.
        reduce_dtype: Dtype in which devices add up the gradients of weights that are sharded over fsdp.
    """

    checkpointing: Checkpointing = "none"
    scan_layers: bool = False
    chunk_logits: int = CPU_LOGITS
    attention: FusedAttention | None = None
    reduce_dtype: ReduceDtype = "float32"


# One program per layer and no checkpointing, as the engine runs it.
DIRECT = Execution()


def execution_for(
    platform: str,
    checkpointing: Checkpointing,
    scan_layers: bool | None = None,
    attention: FusedAttention | None = None,
    reduce_dtype: ReduceDtype = "float32",
) -> Execution:
    """Returns the execution settings for a platform.

    Args:
        platform: "cpu" or an accelerator's platform.
        checkpointing: What the backward pass recomputes.
        scan_layers: Whether to scan layers; None scans on accelerators, whose compilers take seconds per layer.
        attention: Attention kernel; None for plain attention.
        reduce_dtype: Dtype in which devices add up the gradients of weights that are sharded over fsdp.
    """
    on_cpu = platform == "cpu"
    scans = not on_cpu if scan_layers is None else scan_layers
    chunk = CPU_LOGITS if on_cpu else ACCELERATOR_LOGITS
    return Execution(checkpointing, scans, chunk, attention, reduce_dtype)
