"""How much arithmetic a model takes, by the table of its weights. Imports no jax beyond that table."""

import math
from collections.abc import Iterable

from groupax.models.config import ModelConfig
from groupax.models.specs import model_specs


def forward_flops(config: ModelConfig, sequences: Iterable[tuple[int, list[int]]]) -> float:
    """Floating-point operations of one forward pass over prompts and the completions behind each.

    Two per weight of a matrix and token, and four per head dim and visible column; norms and softmax are left out.
    The vocabulary's matrix multiplies completion tokens only.

    Args:
        config: the model.
        sequences: the length of each prompt, and those of its completions.
    """
    layer = sum(math.prod(spec.shape) for spec in model_specs(config)["layers"][0].values() if len(spec.shape) == 2)
    per_column = 4 * config.num_heads * config.head_dim
    num_prompt_tokens = num_completion_tokens = num_columns = 0
    for prompt, completions in sequences:
        num_prompt_tokens += prompt
        num_completion_tokens += sum(completions)
        num_columns += prompt * (prompt + 1) // 2
        num_columns += sum(length * prompt + length * (length + 1) // 2 for length in completions)
    num_tokens = num_prompt_tokens + num_completion_tokens
    layers = config.num_layers * (2.0 * layer * num_tokens + per_column * num_columns)
    return layers + 2.0 * config.vocab_size * config.hidden_size * num_completion_tokens


def activation_bytes_per_token(config: ModelConfig, itemsize: int, checkpointing: str) -> int:
    """What the backward pass finds of one token, roughly: the inputs of each product, layer by layer.

    Args:
        config: the model.
        itemsize: bytes of a number.
        checkpointing: what is computed again (see `config.Checkpointing`); at the same time one layer is there whole.
    """
    D, F, NH, KH = config.hidden_size, config.ffn_size, config.num_heads * config.head_dim, config.num_kv_heads
    whole = 6 * D + 4 * F + 4 * NH + 4 * KH * config.head_dim
    kept = {"none": whole, "all_dots": whole - 2 * D, "dots": 3 * D + 2 * F + 2 * NH, "full": D}[checkpointing]
    return itemsize * (config.num_layers * kept + whole + 4 * D)
