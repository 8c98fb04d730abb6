"""Models and adapters from Hugging Face folders into memory. Never pickle, never remote code."""

import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from groupax.models import bitsandbytes_format, peft_format
from groupax.models.adapted import Frozen, joined
from groupax.models.config import ModelConfig
from groupax.models.families import read_config
from groupax.models.lora import Adapter, LoRAConfig, init_adapter
from groupax.models.quantize import is_quantized
from groupax.models.specs import Params, init_params, model_specs, num_params, param_shardings, split_dims
from groupax.models.split import laid_out
from groupax.models.tensor_files import check_tensors, find_tensors, make_weight_loader, resolve_tied_head
from groupax.parallel.mesh import check_divisible, default_mesh, format_mesh
from groupax.settings.adapter import BaseWeights
from groupax.storage.folders import read_json, resolve_folder
from groupax.storage.model_json import GENERATION, out_of_vocabulary, validate
from groupax.terminal.printable import short_repr

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """A model in memory: what it is, its weights on the mesh, and the files' settings to be written back.

    Attributes:
        config: the architecture.
        params: the weights (see `models.specs`), an adapter's among them.
        mesh: where they lie.
        hf_config: the parsed `config.json`.
        generation_config: the parsed `generation_config.json`, empty if there was none.
        source: the folder that it came from, where the tokenizer lies too; None for a model made here.
        name: the folder or hub id that it was loaded by; None for a model made here.
        adapter: base and changes, if the model is a base with an adapter.
    """

    config: ModelConfig
    params: Params
    mesh: Mesh
    hf_config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    source: Path | None = None
    name: str | None = None
    adapter: Adapter | None = None


def init_model(
    hf_config: Mapping[str, Any],
    seed: int = 0,
    dtype: Any = jnp.float32,
    mesh: Mesh | None = None,
    replicated: Collection[str] = (),
) -> Model:
    """A model with random weights from the contents of a `config.json`; the rest as in `load_model`."""
    config = read_config(hf_config)
    mesh = mesh or default_mesh(num_params(config) * jnp.dtype(dtype).itemsize)
    check_divisible(split_dims(config), mesh, replicated)
    return Model(config, init_params(config, jax.random.key(seed), mesh, dtype), mesh, dict(hf_config), {})


def load_model(
    name_or_path: str | os.PathLike[str],
    dtype: Any = None,
    mesh: Mesh | None = None,
    weights: BaseWeights = "same",
    base: str | os.PathLike[str] | None = None,
    max_positions: int | None = None,
    replicated: Collection[str] = (),
) -> Model:
    """Load a causal language model from a folder or, if there is none of that name, from the Hugging Face hub.

    Each device receives its part of each tensor straight from the file, so that no host holds a second copy.

    Args:
        name_or_path: a folder with `config.json` and safetensors files, or with a PEFT adapter, or a hub id like
            "Qwen/Qwen3-0.6B".
        dtype: of the weights in memory; None keeps each tensor's own.
        mesh: where to put them; by default a copy on every device (see `parallel.mesh.default_mesh`).
        weights: "int8", "float8" or "nf4" quantize the layers' matrices, each as it is read.
        base: the base of an adapter, if it is not where `adapter_config.json` says.
        max_positions: the longest sequence; None for what `config.json` says, and for the original context if rotary
            embeddings are others beyond it ("longrope"). It decides for all sequences (see `rope.frequencies`).
        replicated: dims that may stay whole on every device if they do not divide by the mesh.

    Raises:
        ValueError: the folder is no model, its config or weights are unsupported, damaged or incomplete, or the mesh
            does not divide it.
        ImportError: 8 bits are asked for and qwix is not installed.
    """
    folder = resolve_folder(name_or_path)
    if (folder / peft_format.CONFIG_NAME).is_file():
        return _load_adapter(
            name_or_path,
            folder,
            base,
            lambda name: load_model(name, dtype, mesh, weights, max_positions=max_positions, replicated=replicated),
        )
    if base is not None:
        raise ValueError(f"{name_or_path} is a model and no adapter; it has no base ({base})")
    hf_config = read_json(folder / "config.json")
    is_nf4 = bitsandbytes_format.is_nf4(hf_config.get("quantization_config"))
    if is_nf4 and weights not in ("same", "nf4"):
        raise ValueError(f"the weights in {folder} are 4-bit ones; they cannot be quantized to {weights}")
    hf_config = bitsandbytes_format.without_nf4(hf_config)
    generation_config = _generation_config(folder)
    try:
        config = read_config(hf_config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    _tell_endless(folder, hf_config, generation_config)
    config = config if max_positions is None else replace(config, max_positions=max_positions)
    stored, tensors = resolve_tied_head(config, find_tensors(folder), folder)
    quantized = {name for name in tensors if is_nf4 and f"{name}.{bitsandbytes_format.FURTHER[0]}" in tensors}
    check_tensors(stored, tensors, folder, quantized)
    if stored != config:
        config, hf_config = stored, {**hf_config, "tie_word_embeddings": False}
    mesh = mesh or default_mesh(num_params(config) * 4)
    check_divisible(split_dims(config), mesh, replicated)
    if is_nf4 or weights != "same":
        _check_whole(mesh)
    load = make_weight_loader(mesh, tensors, dtype, weights, quantized)
    params = jax.tree.map(load, model_specs(config), param_shardings(config, mesh))
    return Model(config, params, mesh, hf_config, generation_config, folder, _absolute(name_or_path))


def _generation_config(folder: Path) -> dict[str, Any]:
    """The contents of `generation_config.json`, which a folder need not have."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    content = read_json(path)
    return validate(content, GENERATION, str(path))


def _tell_endless(folder: Path, hf_config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> None:
    for name, content in (("config.json", hf_config), ("generation_config.json", generation_config)):
        outside = out_of_vocabulary(content, hf_config["vocab_size"])
        if outside:
            logger.warning(
                "%s names the end-of-sequence tokens %s; the vocabulary has %s tokens, so that they end no completion",
                *(folder / name, short_repr(outside), hf_config["vocab_size"]),
            )


def _absolute(name_or_path: str | os.PathLike[str]) -> str:
    path = Path(name_or_path).expanduser()
    return str(path.resolve()) if path.is_dir() else str(name_or_path)


def load_adapter(model: Model, name_or_path: str | os.PathLike[str]) -> Model:
    """A model with an adapter of a folder or a hub id; the model's weights are not copied.

    Raises:
        ValueError: it is no adapter, does not fit the model, or the model has one already.
    """
    folder = resolve_folder(name_or_path)
    if not (folder / peft_format.CONFIG_NAME).is_file():
        raise ValueError(f"{name_or_path} is no adapter: it has no {peft_format.CONFIG_NAME}")
    if model.adapter is not None:
        raise ValueError(f"{model.name or 'the model'} has an adapter already; give its base")
    lora = peft_format.read_lora_config(read_json(folder / peft_format.CONFIG_NAME), folder)
    trained = peft_format.read_tensors(model.config, lora, folder, _replicated(model.mesh))
    return replace(_with_adapter(model, lora, trained), name=_absolute(name_or_path))


def _load_adapter(
    name_or_path: str | os.PathLike[str], folder: Path, base: Any, load_base: Callable[[str], Model]
) -> Model:
    named = base or peft_format.base_name(read_json(folder / peft_format.CONFIG_NAME), folder)
    try:
        base_folder = resolve_folder(named)
        if (base_folder / peft_format.CONFIG_NAME).is_file():
            raise ValueError(f"{named} is an adapter too; merge it first")
        model = load_base(named)
    except ValueError as error:
        raise ValueError(f"the base of the adapter in {folder} cannot be loaded: {error}") from error
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    return replace(load_adapter(model, name_or_path), source=folder if has_tokenizer else model.source)


def add_adapter(model: Model, lora: LoRAConfig, seed: int = 0) -> Model:
    """The model with a new adapter, which changes nothing yet; the base's weights are not copied.

    Raises:
        ValueError: it has an adapter already, or the adapter's settings do not fit it.
    """
    if model.adapter is not None:
        raise ValueError(f"{model.name or 'the model'} has an adapter already; merge it first, or train that one")
    trained = init_adapter(model.config, lora, model.params, jax.random.key(seed), _replicated(model.mesh))
    return _with_adapter(model, lora, trained)


def _with_adapter(model: Model, lora: LoRAConfig, trained: Params) -> Model:
    trained = laid_out(model.config, model.mesh, trained)
    return _adapted(model, Adapter(lora, Frozen(model.params, np.float32(lora.scale)), trained, model.name))


def _check_whole(mesh: Mesh) -> None:
    if mesh.shape["tp"] * mesh.shape["ep"] > 1:
        raise ValueError(
            f"mesh {format_mesh(mesh)}: quantized weights lie whole on every device and cannot be multiplied in parts; "
            "have tp and ep 1, or the base as it is stored"
        )


def reshard(model: Model, mesh: Mesh, replicated: Collection[str] = ()) -> Model:
    """The model on another mesh.

    Raises:
        ValueError: the mesh does not divide it.
    """
    if mesh == model.mesh:
        return model
    if is_quantized(model.params):
        _check_whole(mesh)
    check_divisible(split_dims(model.config), mesh, replicated)
    if model.adapter is None:
        return replace(model, params=laid_out(model.config, mesh, model.params), mesh=mesh)
    adapter = model.adapter
    frozen = replace(adapter.frozen, params=laid_out(model.config, mesh, adapter.frozen.params))
    adapter = replace(adapter, frozen=frozen, trained=laid_out(model.config, mesh, adapter.trained))
    return _adapted(replace(model, params=frozen.params, mesh=mesh), adapter)


def _adapted(model: Model, adapter: Adapter) -> Model:
    like_base = jax.tree.map(lambda x: x.astype(model.params["embed"].dtype), adapter.trained)
    return replace(model, params=joined(adapter.frozen, like_base), adapter=adapter)


def _replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
