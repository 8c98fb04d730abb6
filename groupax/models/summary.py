"""A summary of a model's architecture and memory, from its `config.json` alone."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from groupax.models.config import ModelConfig
from groupax.models.families import read_config
from groupax.models.lora import LoRAConfig, adapter_base, count_params, read_lora_config, trainable_params_line
from groupax.models.specs import Spec, model_specs, num_params
from groupax.models.weights.nf4 import nf4_bytes, without_nf4
from groupax.storage.folders import ADAPTER_NAME, check_links, read_json, whereabouts
from groupax.storage.model_json import validate_config

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
    if path.is_dir():
        adapter = path / ADAPTER_NAME
        file = adapter if adapter.is_file() else path / "config.json"
        if not file.is_file():
            raise ValueError(f"{path} is not a model folder: it has no config.json")
        check_links(path)
    elif path.exists() or name_or_path.count("/") != 1:
        raise ValueError(
            f"{name_or_path} is neither a model folder, nor a config.json, nor a hub id like 'owner/name'"
            f"{whereabouts(path)}"
        )
    else:
        file = _downloaded(name_or_path)
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

    try:
        try:
            return Path(hf_hub_download(hub_id, ADAPTER_NAME))
        except EntryNotFoundError:  # not an adapter, or the hub is unreachable and the cache has none
            return Path(hf_hub_download(hub_id, "config.json"))
    except (OSError, ValueError) as error:
        raise ValueError(f"there is no folder {hub_id}, and it cannot be downloaded from the hub: {error}") from error


def summarize(hf_config: Mapping[str, Any], lora: LoRAConfig | None = None) -> str:
    """Returns a text with the architecture, parameter counts, and memory of the weights.

    Args:
        hf_config: Parsed `config.json`.
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
    head = sum(_size(spec) for name in ("head", "score") if (spec := specs.get(name)))
    vision = sum(_size(spec) for spec in jax.tree.leaves(specs.get("vision")))
    parts = {"layers": layers, "embedding": _size(specs["embed"]), "head": head, "images": vision}
    counted = [_row(f"  {name}", f"{count:,}") for name, count in parts.items() if count]
    return [_row("parameters", f"{num_params(config):,}"), *counted]


def _memory(config: ModelConfig) -> list[str]:
    """Returns lines with the size of the weights in each dtype; next to quantized matrices the rest is bfloat16."""
    specs: list[Spec] = jax.tree.leaves(model_specs(config))
    rest = sum(2 * _size(spec) for spec in specs if not spec.is_layer_matrix)
    matrices = [spec.shape for spec in specs if spec.is_layer_matrix]
    eight = sum(math.prod(shape) + 4 * shape[0] for shape in matrices)
    by_dtype = {
        "float32": 4 * num_params(config),
        "bfloat16": 2 * num_params(config),
        "int8, float8": rest + eight,
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
