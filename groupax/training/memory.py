"""The dtype and the size of micro-batches: what fits into memory, advice where something did not, and their speed."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from groupax.core.errors import RunError, is_out_of_memory
from groupax.core.settings.compute import Checkpointing, CheckpointingChoice
from groupax.core.types import Metrics, Row
from groupax.models.attention import MAX_UNBLOCKED_COLUMNS
from groupax.models.config import ModelConfig
from groupax.models.execution import Execution
from groupax.models.flops import activation_bytes_per_token, forward_flops
from groupax.models.specs import Params
from groupax.parallel.memory import peak_flops, peak_memory_bytes
from groupax.training.packing import Packed

# Kinds of checkpointing by how much they recompute.
LEAST_FIRST: tuple[Checkpointing, ...] = ("none", "all_dots", "dots", "full")
# On a CPU more tokens, or more bytes of activations, only take more memory.
CPU_MICRO_BATCH_TOKENS, CPU_ACTIVATION_BYTES = 4096, 1.5e9
# Smaller micro-batches make an accelerator's matmuls slower than recomputing more in larger ones.
EFFICIENT_MICRO_BATCH_TOKENS = 4096
# Half of the free memory is for activations, and gradients, logits and the compiler's copies share the rest.
MAX_COPIED_FRAC = 0.25
# Larger micro-batches do not make matmuls any faster.
MAX_MICRO_BATCH_TOKENS = 65_536


def compute_dtype(platform: str, dtype: str) -> Any:
    """Returns the dtype of the forward pass; "auto" is float32 on CPU and bfloat16 elsewhere."""
    default = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(default if dtype == "auto" else dtype)


@dataclass(frozen=True)
class UpdateMemory:
    """The memory that the activations of an update need, and what there is."""

    config: ModelConfig  # model
    itemsize: int  # bytes of a number of the forward pass
    longest_row: int  # tokens of the longest prompt with the longest completion, or each device's share of them
    is_fused: bool  # whether a kernel computes attention, so that no scores are kept
    # memory of a device that weights and optimizer state leave free; infinite on CPU. Half of it is for activations,
    # the rest for gradients, logits and temporary arrays
    free_bytes: float

    def bytes_per_token(self, checkpointing: Checkpointing) -> int:
        """Returns the bytes of a token's activations."""
        # longer rows are computed in blocks, whose scores are recomputed
        columns = 0 if self.is_fused else min(self.longest_row, MAX_UNBLOCKED_COLUMNS)
        return activation_bytes_per_token(self.config, self.itemsize, checkpointing, columns)

    def fitting_tokens(self, checkpointing: Checkpointing) -> int:
        """Returns how many tokens of a micro-batch fit, in steps of 1,024, or of 512 on CPU."""
        if math.isinf(self.free_bytes):
            fitting = int(CPU_ACTIVATION_BYTES / self.bytes_per_token(checkpointing))
            return max(1024, min(CPU_MICRO_BATCH_TOKENS, fitting // 512 * 512))
        fitting = int(0.5 * self.free_bytes / self.bytes_per_token(checkpointing))
        return max(1024, min(MAX_MICRO_BATCH_TOKENS, fitting // 1024 * 1024))

    def update_bytes(
        self, params: Params, num_rows: int, micro_batch_tokens: int | None, checkpointing: Checkpointing
    ) -> int:
        """Returns about how much an update of `num_rows` rows takes for a time: gradients and activations."""
        tokens = max(micro_batch_tokens or self.fitting_tokens(checkpointing), self.longest_row)
        leaves = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
        gradients = sum(4 * math.prod(x.sharding.shard_shape(x.shape)) for x in leaves)
        return gradients + min(tokens, num_rows * self.longest_row) * self.bytes_per_token(checkpointing)

    def checkpointing(self, choice: CheckpointingChoice, micro_batch_tokens: int | None) -> Checkpointing:
        """Returns what the backward pass recomputes."""
        if choice != "auto":
            return choice
        tokens = max(self.longest_row, micro_batch_tokens or EFFICIENT_MICRO_BATCH_TOKENS)
        for way in LEAST_FIRST:
            if tokens * self.bytes_per_token(way) <= 0.5 * self.free_bytes:
                return way
        return "full"

    def scans_layers(self, choice: bool | None, copied_bytes: float) -> bool | None:
        """Returns the choice of a loop over layers; False if it is open and the loop's copy of weights is too large."""
        return False if choice is None and copied_bytes > MAX_COPIED_FRAC * self.free_bytes else choice

    def check_longest_row(self) -> None:
        """Checks that the longest row fits if the backward pass recomputes everything.

        Raises:
            ValueError: it does not.
        """
        needed = self.longest_row * self.bytes_per_token("full")
        if needed > self.free_bytes:
            raise ValueError(
                f"a row of {self.longest_row:,} tokens on one device needs {needed / 1e9:.2f} GB for its activations "
                f"even if everything is recomputed, and {self.free_bytes / 1e9:.2f} GB are free; lower "
                "max_completion_length, shard weights (fsdp, tp) or tokens (sp) over more devices with mesh, or "
                "set gradient_checkpointing, which skips this check"
            )


@contextmanager
def explain_out_of_memory(
    packed: Packed, num_shards: int, micro_batch_tokens: int, execution: Execution
) -> Iterator[None]:
    """Turns the devices' out-of-memory error into advice.

    Raises:
        RunError: the devices ran out of memory in the block.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        num_tokens = packed.num_tokens // num_shards
        longest_row = int((packed.batch.cells >= 0).sum(axis=1).max())
        smaller = max(256, min(num_tokens, micro_batch_tokens) // 2)
        advice = f"set micro_batch_tokens (now {micro_batch_tokens}) to {smaller}"
        if longest_row * 2 > num_tokens:
            advice = f"one completion alone has {longest_row} tokens: lower max_completion_length"
        if execution.checkpointing != "full":
            advice += ", or gradient_checkpointing to 'full'"
        if execution.scan_layers:
            advice += ", or scan_layers to False, so that no loop over layers copies their weights"
        raise RunError(
            f"out of memory in a micro-batch of {num_tokens} tokens per device; {advice}. The devices report:\n{error}"
        ) from error


def efficiency_metrics(
    packed: Sequence[Packed], rows: Sequence[Row], seconds: float, config: ModelConfig, mesh: Mesh, dtype: Any
) -> Metrics:
    """Returns padding, throughput, model FLOPs utilization and peak memory of an update."""
    groups: dict[int, tuple[int, list[int]]] = {}
    for row in rows:
        groups.setdefault(row.group, (len(row.prompt), []))[1].append(len(row.completion))
    flops_per_s = 3.0 * forward_flops(config, groups.values()) / seconds  # backward is twice forward
    num_tokens = sum(prompt - 1 + sum(lengths) for prompt, lengths in groups.values())
    return {
        "padding_frac": 1.0 - num_tokens / sum(part.num_tokens for part in packed),
        "micro_batches": float(len(packed)),
        "time/train_s": seconds,
        "train/tokens_per_s": num_tokens / seconds,
        "mfu": flops_per_s / peak_flops(mesh, dtype),
        "memory/peak_bytes": peak_memory_bytes(mesh),
    }
