"""The arithmetic and activation memory of a model, computed from its table of weights."""

import math
from collections.abc import Iterable

import jax

from groupax.models.config import Chunks, GatedDeltaNet, ModelConfig, Window
from groupax.models.recurrent import CHUNK
from groupax.models.specs import Spec, model_specs, vision_specs
from groupax.models.vision.config import VisionConfig


def forward_flops(config: ModelConfig, sequences: Iterable[tuple[int, list[int]]]) -> float:
    """Counts the floating-point operations of a forward pass over prompts and the completions of each.

    There are two per token and matrix entry (of a mixture only the token's own experts count), four per head dim and
    visible column, and six per number of a recurrent layer's memory; norms, softmax and convolutions are left out. The
    vocabulary's matrix multiplies completion tokens only.

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
    per_column = 4 * config.num_heads * config.update_heads[1]
    attention = per_column * sum(num_columns[config.windows[layer]] for layer in config.attention_layers)
    memory = 6.0 * _memory_size(config) * (config.num_layers - len(config.attention_layers)) * num_tokens
    head = 2.0 * config.vocab_size * config.hidden_size * num_completion_tokens
    return 2.0 * weights * num_tokens + attention + memory + head


def _memory_size(config: ModelConfig) -> int:
    """Returns the numbers of the memory of a recurrent layer."""
    net = config.recurrent
    return net.num_value_heads * net.key_dims * net.value_dims if isinstance(net, GatedDeltaNet) else 0


def image_flops(config: VisionConfig, text_size: int, tiles: Iterable[int]) -> float:
    """Counts the floating-point operations of computing features, like `forward_flops`.

    Args:
        config: The part of the model that sees images.
        text_size: Hidden size of the language model.
        tiles: Number of patches of each tile of the images.
    """
    tower, merged, specs = config.tower, config.patches_per_feature, vision_specs(config, text_size)
    per_patch = tower.patch_dims * tower.hidden_size
    per_patch += sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs["layers"]) if spec.is_matrix)
    per_feature = sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs["projector"]) if len(spec.shape) == 2)
    per_column = 4 * tower.hidden_size * tower.num_layers
    return sum(num * (2.0 * per_patch + 2.0 * per_feature / merged + per_column * num) for num in tiles)


def _active_weights(config: ModelConfig, layer: dict[str, Spec]) -> float:
    """Counts the matrix entries that a token is multiplied with; of a mixture only its own experts' count."""
    active = 0.0
    for spec in layer.values():
        if spec.is_matrix:
            active += math.prod(spec.shape)
        elif spec.axes[0] == "expert":
            assert config.experts is not None, "only experts have stacked matrices"
            active += math.prod(spec.shape) * config.experts.per_token / config.experts.num
    return active


def _visible_columns(length: int, window: Window) -> int:
    """Counts the columns that the tokens of a sequence see, including their own."""
    if isinstance(window, Chunks):
        whole, rest = divmod(length, window.size)
        return whole * _visible_columns(window.size, None) + _visible_columns(rest, None)
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def activation_bytes_per_token(config: ModelConfig, itemsize: int, checkpointing: str, score_columns: int = 0) -> int:
    """Counts the bytes per token that a backward pass reads, and those of one layer at work, whatever is recomputed.

    Args:
        config: Architecture of the model.
        itemsize: Bytes per number.
        checkpointing: What the backward pass recomputes (see `settings.compute.Checkpointing`).
        score_columns: Number of columns for which plain attention keeps the scores of each query; 0 if a kernel
            computes attention.
    """
    layers = [_saved_numbers(config, layer, index) for index, layer in enumerate(model_specs(config)["layers"])]
    scores = config.num_heads * score_columns
    score_bytes = {"none": (4 + itemsize) * scores, "all_dots": 4 * scores}  # float32, and as factors of the values
    memory_bytes = {kind: 4 * number for kind, number in _memory_numbers(config).items()}
    at_most = [memory_bytes if config.is_recurrent(layer) else score_bytes for layer in range(config.num_layers)]
    pairs = list(zip(layers, at_most, strict=True))
    saved = sum(itemsize * layer[checkpointing] + own.get(checkpointing, 0) for layer, own in pairs)
    at_work = max(itemsize * layer["none"] + own.get("none", 0) for layer, own in pairs)
    return saved + at_work + 4 * config.hidden_size * itemsize


def _memory_numbers(config: ModelConfig) -> dict[str, int]:
    """Counts the numbers per token, in float32, of a recurrent layer's recurrence that checkpointing saves.

    These are the convolution's inputs and outputs, queries, keys, values and what the delta rule computes of them, and
    a memory per chunk.
    """
    net = config.recurrent
    if not isinstance(net, GatedDeltaNet):
        return {"none": 2 * config.hidden_size}
    V, dims = net.num_value_heads, net.key_dims + net.value_dims
    products = V * (2 * CHUNK + 3 * net.value_dims) + _memory_size(config) // CHUNK
    return {"none": 3 * net.mixed_dims + V * (5 * dims + CHUNK) + products, "all_dots": products}


def _saved_numbers(config: ModelConfig, layer: dict[str, Spec], index: int) -> dict[str, int]:
    """Counts the numbers per token that each kind of checkpointing saves of a layer.

    Without any, these are the inputs of matmuls, norms and the gated activation, and what an attention kernel reads.
    """
    K, H = config.update_heads
    D, NH, KH = config.hidden_size, config.num_heads * H, K * H
    num_norms = sum(name in layer for name in ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"))
    F, routed = config.ffn_size, 0
    if config.has_experts(index):
        assert config.experts is not None, "the layer has experts"
        F, routed = config.experts.per_token * config.experts.ffn_size, config.experts.per_token * D
    qk_norms = NH + KH if "q_norm" in layer else 0
    heads, mixed = NH + 2 * KH, qk_norms + 3 * NH + 2 * KH
    if config.is_recurrent(index):
        NH, heads, mixed = 0, *_projected_numbers(config)
    products = (2 + ("mlp_out_norm" in layer)) * D + heads + 2 * F + routed
    return {
        "none": (2 + num_norms) * D + mixed + 3 * F + 2 * routed,
        "all_dots": products + NH,
        "dots": products,
        "full": D,
    }


def _projected_numbers(config: ModelConfig) -> tuple[int, int]:
    """Counts the numbers per token of a recurrent layer that its matrices give, and those that gates and norms read."""
    net = config.recurrent
    if not isinstance(net, GatedDeltaNet):
        return 3 * config.hidden_size, 5 * config.hidden_size
    values = net.num_value_heads * net.value_dims
    return net.mixed_dims + values + 2 * net.num_value_heads, net.mixed_dims + 4 * values
