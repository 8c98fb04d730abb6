"""How much arithmetic a model takes, by the table of its weights. Imports no jax beyond that table."""

import math
from collections.abc import Iterable

from groupax.models.config import ModelConfig
from groupax.models.specs import Spec, model_specs


def forward_flops(config: ModelConfig, sequences: Iterable[tuple[int, list[int]]]) -> float:
    """Floating-point operations of one forward pass over prompts and the completions behind each.

    Two per weight of a matrix and token, of a mixture's experts those that the token goes through, and four per head
    dim and visible column; norms and softmax are left out. The vocabulary's matrix multiplies completion tokens only.

    Args:
        config: the model.
        sequences: the length of each prompt, and those of its completions.
    """
    num_tokens = num_completion_tokens = 0
    num_columns = dict.fromkeys(config.windows, 0)  # that are visible, summed over tokens
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
    """Entries of matrices that a token is multiplied with; of the experts those of its own."""
    active = 0.0
    for spec in layer.values():
        if spec.is_matrix:
            active += math.prod(spec.shape)
        elif len(spec.shape) == 3:
            assert config.experts is not None, "their matrices are stacked"
            active += math.prod(spec.shape) * config.experts.per_token / config.experts.num
    return active


def _visible_columns(length: int, window: int | None) -> int:
    """Columns that the tokens of a sequence see, their own included."""
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def activation_bytes_per_token(config: ModelConfig, itemsize: int, checkpointing: str) -> int:
    """What the backward pass finds of one token, roughly: the inputs of each product, layer by layer.

    Args:
        config: the model.
        itemsize: bytes of a number.
        checkpointing: what is computed again (see `config.Checkpointing`); at the same time one layer is there whole.
    """
    D, NH, KH = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def layer(index: int) -> tuple[int, int]:
        """What is kept of a layer, and what there is of it while it is computed."""
        D_mlp, F = D, config.ffn_size
        if config.has_experts(index):
            assert config.experts is not None, "the layer has some"
            D_mlp, F = D * config.experts.per_token, config.experts.ffn_size * config.experts.per_token
        whole = 4 * D + 2 * D_mlp + 4 * F + 4 * NH + 4 * KH
        everything = whole + 8 * D + 2 * F  # norms have two float32 numbers, and the activation is kept with its slope
        kept = {"none": everything, "all_dots": whole - 2 * D, "dots": 2 * D + D_mlp + 2 * F + 2 * NH, "full": D}
        return kept[checkpointing], whole

    kept, whole = zip(*map(layer, range(config.num_layers)), strict=True)
    return itemsize * (sum(kept) + max(whole) + 4 * D)
