"""The size of a model, from its table of weights: arithmetic, activation memory, and a summary of its `config.json`."""

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax

from groupax.core.storage.folders import ADAPTER_NAME, local_folder, read_json, split_revision
from groupax.core.storage.model_json import validate_config
from groupax.models.config import Chunks, GatedDeltaNet, ModelConfig, Window
from groupax.models.families import read_config
from groupax.models.lora import LoRAConfig, adapter_base, count_params, read_lora_config, trainable_params_line
from groupax.models.recurrent import CHUNK
from groupax.models.specs import Spec, model_specs, num_params
from groupax.models.weights.nf4 import nf4_bytes, without_nf4


def forward_flops(config: ModelConfig, sequences: Iterable[tuple[int, list[int]]]) -> float:
    """Counts the floating-point operations of a forward pass over prompts and the completions of each.

    There are two per token and matrix entry (of a mixture only the token's own experts count), four per head dim and
    visible column, and six per number of a recurrent layer's memory; norms, softmax and convolutions are left out. The
    vocabulary's matrix multiplies completion tokens only.

    Args:
        sequences: Length of each prompt and lengths of its completions.
    """
    num_tokens = num_completion_tokens = 0
    weights, memory, per_column = _token_costs(config)
    num_columns = dict.fromkeys(per_column, 0)  # visible columns, summed over tokens
    for prompt, completions in sequences:
        num_completion_tokens += sum(completions)
        num_tokens += prompt + sum(completions)
        for window in num_columns:
            before = _visible_columns(prompt, window)
            num_columns[window] += before
            num_columns[window] += sum(_visible_columns(prompt + length, window) - before for length in completions)
    attention = sum(cost * num_columns[window] for window, cost in per_column.items())
    head = 2.0 * config.vocab_size * config.hidden_size * num_completion_tokens
    return 2.0 * weights * num_tokens + attention + 6.0 * memory * num_tokens + head


@lru_cache(maxsize=16)
def _token_costs(config: ModelConfig) -> tuple[float, int, dict[Window, int]]:
    """Counts the matrix entries and the numbers of memories for each token, and operations by window for each column.

    They are those of all layers together.
    """
    per_column = dict.fromkeys(config.windows, 0)
    for layer in config.attention_layers:
        per_column[config.windows[layer]] += 4 * config.num_heads * config.update_heads[1]
    weights = sum(_active_weights(config, layer) for layer in model_specs(config)["layers"])
    return weights, _memory_size(config) * (config.num_layers - len(config.attention_layers)), per_column


def _memory_size(config: ModelConfig) -> int:
    """Returns the numbers of the memory of a recurrent layer."""
    net = config.recurrent
    return net.num_value_heads * net.key_dims * net.value_dims if isinstance(net, GatedDeltaNet) else 0


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
    factors = 1 + config.gated
    products = (2 + ("mlp_out_norm" in layer)) * D + heads + factors * F + routed
    return {
        "none": (2 + num_norms) * D + mixed + (factors + 1) * F + 2 * routed,
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


# Float32 masters and two moments of AdamW.
TRAINED_BYTES = 12


def find_config(name_or_path: str, is_base: bool = False) -> tuple[dict[str, Any], LoRAConfig | None]:
    """Returns the `config.json` of a model or of an adapter's base, and the adapter's settings.

    Args:
        name_or_path: Folder, `config.json`, or hub id, of which no weights are downloaded.
        is_base: Whether it must be the base of an adapter, which cannot be an adapter itself.

    Raises:
        ValueError: There is no such model, or its files are damaged.
    """
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return _read_checked(path), None
    try:
        folder = local_folder(name_or_path)
    except ValueError as error:
        raise ValueError(f"{error}{', nor a config.json' * (path.suffix == '.json')}") from error
    if folder is None:
        file = _downloaded(name_or_path)
    else:
        file = folder / (ADAPTER_NAME if (folder / ADAPTER_NAME).is_file() else "config.json")
    if file.name != ADAPTER_NAME:
        return _read_checked(file), None
    content = read_json(file)
    if is_base:
        raise ValueError(f"{name_or_path} should be the base of an adapter, but is an adapter too; merge it first")
    lora = read_lora_config(content, file.parent)
    hf_config, base_lora = find_config(adapter_base(content, file.parent), is_base=True)
    assert base_lora is None, "a base is not an adapter"
    return hf_config, lora


def _read_checked(file: Path) -> dict[str, Any]:
    """Returns a `config.json` unchanged, after validating it."""
    content = read_json(file)
    try:
        validate_config(content)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return content


def _downloaded(hub_id: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    name, revision = split_revision(hub_id)
    try:
        try:
            return Path(hf_hub_download(name, ADAPTER_NAME, revision=revision))
        except EntryNotFoundError:  # not an adapter, or the hub is unreachable and the cache has none
            return Path(hf_hub_download(name, "config.json", revision=revision))
    except (OSError, ValueError) as error:
        raise ValueError(f"there is no folder {hub_id}, and it cannot be downloaded from the hub: {error}") from error


def summarize(hf_config: Mapping[str, Any], lora: LoRAConfig | None = None) -> str:
    """Returns a text with the architecture, parameter counts, and memory of the weights.

    Args:
        lora: An adapter, in which case only it is trained.
    """
    config = read_config(without_nf4(hf_config))
    trained, total = count_params(config, lora)
    lines = [_architecture(config), *_parameters(config), *_memory(config)]
    trained_name = "the adapter" if lora else "all weights"
    state = f"{_size_text(TRAINED_BYTES * trained)} of masters and moments"
    lines.append(_row(f"training {trained_name} with AdamW", state))
    return "\n".join([*lines, trainable_params_line(trained, total)])


def _architecture(config: ModelConfig) -> str:
    head = "a head tied to the embedding" if config.tie_embeddings else "a separate head"
    return (
        f"{config.model_type}: {config.num_layers} layers of {config.hidden_size} dims, {config.num_heads} query and "
        f"{config.num_kv_heads} key/value heads of {config.head_dim}, feed-forward {config.ffn_size}, vocabulary "
        f"{config.vocab_size} with {head}, {config.max_positions} positions"
    )


def _parameters(config: ModelConfig) -> list[str]:
    specs = model_specs(config)
    layers = sum(_size(spec) for spec in jax.tree.leaves(specs["layers"]))
    embedding, head = (
        sum(_size(specs[name]) for name in names if name in specs)
        for names in (("embed", "positions"), ("head", "score"))
    )
    vision = sum(_size(spec) for spec in jax.tree.leaves(specs.get("vision")))
    parts = {"layers": layers, "embedding": embedding, "head": head, "images": vision}
    counted = [_row(f"  {name}", f"{count:,}") for name, count in parts.items() if count]
    return [_row("parameters", f"{num_params(config):,}"), *counted]


def _memory(config: ModelConfig) -> list[str]:
    """Returns lines with the size of the weights in each dtype; next to quantized matrices the rest is bfloat16."""
    specs: list[Spec] = jax.tree.leaves(model_specs(config))
    rest = sum(2 * _size(spec) for spec in specs if not spec.is_layer_matrix)
    matrices = [spec.shape for spec in specs if spec.is_layer_matrix]
    by_dtype = {
        "float32": 4 * num_params(config),
        "bfloat16": 2 * num_params(config),
        "nf4": rest + sum(nf4_bytes(shape) for shape in matrices),
    }
    return ["weights in memory", *(_row(f"  {name}", _size_text(size)) for name, size in by_dtype.items())]


def _size_text(num_bytes: int) -> str:
    unit, name = (1e9, "GB") if num_bytes >= 1e8 else (1e6, "MB")
    return f"{num_bytes / unit:.2f} {name}"


def _size(spec: Spec) -> int:
    return math.prod(spec.shape)


def _row(name: str, value: str) -> str:
    return f"{name:<34}{value:>18}" if len(value) <= 18 else f"{name:<34}{value}"
