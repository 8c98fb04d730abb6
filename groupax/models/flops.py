"""The arithmetic and activation memory of a model, computed from its table of weights."""

import math
from collections.abc import Iterable

from groupax.models.config import ModelConfig
from groupax.models.specs import Spec, model_specs


def forward_flops(config: ModelConfig, sequences: Iterable[tuple[int, list[int]]]) -> float:
    """Counts the floating-point operations of a forward pass over prompts and the completions of each.

    There are two per token and matrix entry (of a mixture only the token's own experts count), and four per head dim
    and visible column; norms and softmax are left out. The vocabulary's matrix multiplies completion tokens only.

    Args:
        config: Architecture of the model.
        sequences: Length of each prompt and lengths of its completions.
    """
    num_tokens = num_completion_tokens = 0
    num_columns = dict.fromkeys(config.windows, 0)  # visible columns, summed over tokens
    for prompt, completions in sequences:
        num_completion_tokens += sum(completions)
        num_tokens += prompt + sum(completions)
        for window in num_columns:
            before = _visible_columns(prompt, window)
            num_columns[window] += before
            num_columns[window] += sum(_visible_columns(prompt + length, window) - before for length in completions)
    weights = sum(_active_weights(config, layer) for layer in model_specs(config)["layers"])
    per_column = 4 * config.num_heads * config.head_dim
    attention = per_column * sum(num_columns[window] for window in config.windows)
    return 2.0 * weights * num_tokens + attention + 2.0 * config.vocab_size * config.hidden_size * num_completion_tokens


def _active_weights(config: ModelConfig, layer: dict[str, Spec]) -> float:
    """Counts the matrix entries that a token is multiplied with; of a mixture only its own experts' count."""
    active = 0.0
    for spec in layer.values():
        if spec.is_matrix:
            active += math.prod(spec.shape)
        elif len(spec.shape) == 3:
            assert config.experts is not None, "only experts have stacked matrices"
            active += math.prod(spec.shape) * config.experts.per_token / config.experts.num
    return active


def _visible_columns(length: int, window: int | None) -> int:
    """Counts the columns that the tokens of a sequence see, including their own."""
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def activation_bytes_per_token(config: ModelConfig, itemsize: int, checkpointing: str) -> int:
    """Estimates the bytes that are saved for the backward pass per token: the inputs of all matmuls.

    One layer at a time has all its activations in memory, whatever the checkpointing.

    Args:
        config: Architecture of the model.
        itemsize: Bytes per number.
        checkpointing: What the backward pass recomputes (see `config.Checkpointing`).
    """
    D, NH, KH = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def layer(index: int) -> tuple[int, int]:
        """Returns the numbers saved of a layer, and those in memory while it is computed."""
        D_mlp, F = D, config.ffn_size
        if config.has_experts(index):
            assert config.experts is not None, "the layer has experts"
            D_mlp, F = D * config.experts.per_token, config.experts.ffn_size * config.experts.per_token
        matmul_inputs = 4 * D + 2 * D_mlp + 4 * F + 4 * NH + 4 * KH
        everything = matmul_inputs + 8 * D + 2 * F  # norms save two float32 numbers, and the activation its slope
        saved = {
            "none": everything,
            "all_dots": matmul_inputs - 2 * D,
            "dots": 2 * D + D_mlp + 2 * F + 2 * NH,
            "full": D,
        }
        return saved[checkpointing], matmul_inputs

    saved, matmul_inputs = zip(*map(layer, range(config.num_layers)), strict=True)
    return itemsize * (sum(saved) + max(matmul_inputs) + 4 * D)
