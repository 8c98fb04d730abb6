"""How a pass over many tokens is computed. What it gives stays the same, but for rounding."""

from dataclasses import dataclass
from typing import Literal

from groupax.settings.compute import Checkpointing

# Logits in flight at the vocabulary's matrix, in numbers: blocks of this size stay in a CPU's cache; an accelerator
# reads the matrix again for each, and has memory for 256 MiB.
CPU_LOGITS = 1 << 21
ACCELERATOR_LOGITS = 1 << 26


@dataclass(frozen=True)
class FusedAttention:
    """Attention by a kernel (see `models.fused_attention`).

    Attributes:
        kernel: of TPUs or of NVIDIA's GPUs.
        emulated: by operations that every device has, to see what the kernel computes where it does not run.
    """

    kernel: Literal["splash", "cudnn"]
    emulated: bool = False


@dataclass(frozen=True)
class Execution:
    """See above.

    Attributes:
        checkpointing: what the backward pass computes again (see `config.Checkpointing`).
        scan_layers: layers that are alike are one program, compiled once, which takes them from a copy of their weights
            that lies in one piece.
        chunk_logits: logits in flight at the vocabulary's matrix.
        attention: the kernel that attends; None for the plain form.
    """

    checkpointing: Checkpointing = "none"
    scan_layers: bool = False
    chunk_logits: int = CPU_LOGITS
    attention: FusedAttention | None = None


# Layers of their own, as the engine has them, and nothing kept back.
DIRECT = Execution()


def execution_for(
    platform: str,
    checkpointing: Checkpointing,
    scan_layers: bool | None = None,
    attention: FusedAttention | None = None,
) -> Execution:
    """What suits a kind of device.

    Args:
        platform: "cpu" or another.
        checkpointing, attention: see `Execution`.
        scan_layers: None scans on accelerators, whose compilers take seconds for a layer.
    """
    on_cpu = platform == "cpu"
    scans = not on_cpu if scan_layers is None else scan_layers
    return Execution(checkpointing, scans, CPU_LOGITS if on_cpu else ACCELERATOR_LOGITS, attention)
