"""The dtype and the size of micro-batches: what fits into memory, and advice where something did not."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from groupax.errors import RunError, is_out_of_memory
from groupax.models.config import ModelConfig
from groupax.models.flops import activation_bytes_per_token
from groupax.settings.compute import Checkpointing
from groupax.training.batch import Packed

# Activations of more tokens do not fit into a CPU's caches.
CPU_MICRO_BATCH_TOKENS = 4096
# Larger micro-batches do not make matmuls any faster.
MAX_MICRO_BATCH_TOKENS = 65_536


def compute_dtype(platform: str, dtype: str) -> Any:
    """Returns the dtype of the forward pass; "auto" is float32 on CPU and bfloat16 elsewhere."""
    default = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(default if dtype == "auto" else dtype)


def fitting_tokens(config: ModelConfig, itemsize: int, checkpointing: Checkpointing, free_bytes: float) -> int:
    """Returns how many tokens of a micro-batch fit into half of an accelerator's free memory, in steps of 1,024.

    Args:
        config: model.
        itemsize: bytes of a number of the forward pass.
        checkpointing: what the backward pass recomputes.
        free_bytes: memory of a device that weights and optimizer state leave free.
    """
    fitting = int(0.5 * free_bytes / activation_bytes_per_token(config, itemsize, checkpointing))
    return max(1024, min(MAX_MICRO_BATCH_TOKENS, fitting // 1024 * 1024))


@contextmanager
def explain_out_of_memory(
    packed: Packed, num_shards: int, micro_batch_tokens: int, checkpointing: Checkpointing
) -> Iterator[None]:
    """Turns the devices' out-of-memory error into advice.

    Args:
        packed: micro-batch that is computed in the block.
        num_shards: number of devices that share it.
        micro_batch_tokens: value of the setting, or its automatic value.
        checkpointing: what the backward pass recomputes.

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
        if checkpointing != "full":
            advice += ", or gradient_checkpointing to 'full'"
        raise RunError(
            f"out of memory in a micro-batch of {num_tokens} tokens per device; {advice}. The devices report:\n{error}"
        ) from error
