"""Settings of devices, precision and memory. Imports no jax."""

from dataclasses import dataclass
from typing import Literal

from groupax.core.settings.fields import ranged, setting

Checkpointing = Literal["none", "full", "dots", "all_dots"]
CheckpointingChoice = Literal["auto", "none", "full", "dots", "all_dots"]
ReduceDtype = Literal["float32", "bfloat16"]
AttnImplementation = Literal["auto", "plain", "fused"]
SharePrefix = Literal["auto", "always", "never"]
DecodingWeights = Literal["same", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class MeshSettings:
    """Layout of weights and rows over devices."""

    mesh: str | None = setting(None, resume="free")
    """Devices along dp, fsdp, ep, tp and sp, e.g. 1,-1,1,1,1; -1 takes the remaining devices. Rows are sharded over dp,
    fsdp and ep, weights over fsdp, ep (experts) and tp, the tokens of a row over sp. None shards rows over all
    devices."""
    mesh_dcn: str | None = setting(None, resume="free")
    """Slices of accelerators, which a slower network connects, along each axis, e.g. 2,1,1,1,1; None puts all slices
    along dp."""
    mesh_replicate: tuple[str, ...] = setting((), resume="free")
    """Dims to replicate if they are not divisible by the mesh, e.g. kv_heads; other indivisible dims are an error."""

    def check(self) -> None:
        """Raises a ValueError for invalid mesh strings."""
        if self.mesh is not None:
            mesh_sizes(self.mesh)
        if self.mesh_dcn is not None and min(mesh_sizes(self.mesh_dcn, "mesh_dcn")) < 1:
            raise ValueError(f"mesh_dcn must be numbers of slices, all at least 1, got {self.mesh_dcn!r}")


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """Precision, memory and kernels of updates."""

    dtype: Literal["auto", "float32", "bfloat16"] = setting("auto", resume="fixed")
    """Dtype of the forward pass; "auto" is float32 on CPU and bfloat16 elsewhere. Master weights are always float32."""
    fsdp_reduce_dtype: ReduceDtype = setting("float32", resume="fixed")
    """Dtype in which devices add up the gradients of weights that are sharded over fsdp, in each micro-batch;
    "bfloat16" sends half as many bytes and rounds each sum."""
    micro_batch_tokens: int | None = ranged(None, 10**9, low=1, resume="free")
    """Tokens per device in a micro-batch of training; None chooses a number for the device."""
    gradient_checkpointing: CheckpointingChoice = setting("auto", resume="free")
    """Save memory by recomputing layers in the backward pass: "full" recomputes everything, "dots" all but matmuls
    with weights, "all_dots" all but matmuls and fused attention. "auto" recomputes as little as the memory allows for
    the longest row, and nothing on CPU. Results change by rounding at most; a resumed run keeps its choice."""
    scan_layers: bool | None = setting(None, resume="free")
    """Compile identical layers once, as a loop over them, which copies their weights; None does so on accelerators that
    have memory for the copy."""
    attn_implementation: AttnImplementation = setting("auto", resume="free")
    """Attention in updates: "plain" runs anywhere, "fused" uses a kernel of the accelerator that keeps scores out of
    its memory, "auto" uses the kernel where there is one for the model. See docs/architecture.md."""
    share_prefix: SharePrefix = setting("auto", resume="free")
    """Compute a prompt once for all rows of its group in updates; "auto" does so where it saves work."""
    offload_optimizer: bool = setting(False, resume="free")
    """Keep the optimizer state in host memory and move it to the devices layer by layer during an update. Results stay
    the same."""


@dataclass(frozen=True, kw_only=True)
class DecodingSettings:
    """Memory and precision of decoding, by the engine in this process."""

    max_concurrent_rows: int = ranged(256, 10**6, low=1, resume="free")
    """Completions that are decoded at the same time, at most."""
    kv_cache_gb: float | None = ranged(None, 1e6, low=1e-6, resume="free")
    """Memory for the KV cache on each device in GB; None takes 80 % of what is free. Completions beyond it wait."""
    prefix_cache_gb: float = ranged(4.0, 1e6, resume="free")
    """Host memory in GB for the keys and values of episodes with tools or environments, between two turns; divided
    evenly among the episodes of a rollout. What does not fit is computed again."""
    kv_cache_dtype: Literal["same", "float32", "bfloat16", "float8"] = "same"
    """Dtype of the KV cache; "same" takes that of the decoding weights, and float32 on CPU. "float8" (e4m3) is for
    TPUs and for NVIDIA GPUs of compute capability 8.9 or more."""
    decoding_weights: DecodingWeights = "same"
    """Weights that rollouts are decoded with: the policy's own, or a copy in bfloat16, which is faster but not exactly
    the policy (see rollout_correction)."""
    decoding_tp: int = ranged(1, 10**5, low=1, resume="free")
    """Tensor-parallel size for decoding; 1 replicates the weights and shards the rows."""
    routing_replay: bool = False
    """Record the experts that sampled tokens go through, and choose the same in updates (rollout routing replay, R3);
    for mixtures of experts whose engine rounds otherwise than the update."""


def mesh_sizes(mesh: str, name: str = "mesh") -> tuple[int, int, int, int, int]:
    """Returns the sizes of dp, fsdp, ep, tp and sp in a text like "1,-1,1,1,1".

    Raises:
        ValueError: the text is something else.
    """
    try:
        dp, fsdp, ep, tp, sp = sizes = [int(size) for size in mesh.split(",")]
    except (AttributeError, ValueError) as error:
        raise ValueError(
            f"{name} must be five numbers with commas, the devices along dp, fsdp, ep, tp and sp, got {mesh!r}; e.g. "
            "1,-1,1,1,1"
        ) from error
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"{name} sizes must be at least 1, except that one may be -1 for the rest, got {mesh!r}")
    return dp, fsdp, ep, tp, sp


@dataclass(frozen=True, kw_only=True)
class VisionSettings:
    """Training of the part of a model that sees images, and memory for images."""

    freeze_vision_tower: bool = setting(True, resume="fixed")
    """Keep the weights that see images, the vision tower and its projector, as they are. Each image is then encoded
    once for all rollouts and updates. Of an adapter, its target modules decide."""
    image_cache_gb: float = ranged(2.0, 1e6, resume="free")
    """Host memory in GB for the features of images, and as much again for prepared images. What does not fit is
    computed again."""
