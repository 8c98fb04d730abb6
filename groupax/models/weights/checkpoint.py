"""Loading of models and adapters from Hugging Face folders. Never unpickles, never runs remote code."""

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from groupax.core.settings.optimizer import BaseWeights
from groupax.core.storage.folders import ADAPTER_NAME, read_json, resolve_folder
from groupax.core.storage.model_json import GENERATION, validate
from groupax.core.terminal.printable import short_repr
from groupax.models.adapted import apply_adapter
from groupax.models.config import ModelConfig
from groupax.models.families import read_config, text_config
from groupax.models.families.gpt_oss import without_mxfp4
from groupax.models.lora import (
    Adapter,
    LoRAConfig,
    adapter_base,
    adapter_specs,
    init_adapter,
    read_adapter,
    read_lora_config,
    removed_changes,
    residual,
)
from groupax.models.params import init_params, param_shardings, shard_params, split_dims
from groupax.models.specs import Params, Spec, embedding_name, head_name, model_specs, num_params, spec_leaves
from groupax.models.weights.casts import cast_unquantized, is_quantized
from groupax.models.weights.mxfp4 import dequantized_tensors
from groupax.models.weights.nf4 import FURTHER, is_nf4, quantize_nf4, read_nf4, without_nf4
from groupax.models.weights.tensor_files import (
    Tensors,
    cast,
    check_finite,
    find_tensors,
    own_tensors,
)
from groupax.parallel.mesh import check_divisible, default_mesh, format_mesh


@dataclass(frozen=True)
class Model:
    """A model in memory: its architecture, its weights on a mesh, and the settings of its files.

    Attributes:
        config: Architecture.
        params: Weights (see `models.specs`), including an adapter's.
        mesh: Devices of the weights.
        hf_config: Parsed `config.json`.
        generation_config: Parsed `generation_config.json`; empty if there was none.
        source: Folder that it was loaded from, which also has the tokenizer; None for a new model.
        name: Folder or hub id that it was loaded by; None for a new model.
        adapter: The adapter and its base, if the model has an adapter.
    """

    config: ModelConfig
    params: Params
    mesh: Mesh
    hf_config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    source: Path | None = None
    name: str | None = None
    adapter: Adapter | None = None

    @property
    def processor_folder(self) -> Path | None:
        """The folder with the settings of the image processor; None for a model of text, and for a new one."""
        return self.source if self.config.vision else None


def init_model(
    hf_config: Mapping[str, Any],
    seed: int = 0,
    dtype: Any = jnp.float32,
    mesh: Mesh | None = None,
    replicated: Collection[str] = (),
) -> Model:
    """Returns a model with random weights.

    Args:
        hf_config: Contents of a `config.json`.
        seed: Seed of the weights.
        dtype: Dtype of the weights.
        mesh: Devices of the weights (see `load_model`).
        replicated: Dims that may be replicated (see `load_model`).
    """
    config = read_config(hf_config)
    mesh = mesh or default_mesh(num_params(config) * jnp.dtype(dtype).itemsize)
    _check_mesh(config, mesh, replicated)
    return Model(config, init_params(config, jax.random.key(seed), mesh, dtype), mesh, dict(hf_config), {})


def load_model(
    name_or_path: str | os.PathLike[str],
    dtype: Any = None,
    mesh: Mesh | None = None,
    weights: BaseWeights = "same",
    base: str | os.PathLike[str] | None = None,
    max_positions: int | None = None,
    replicated: Collection[str] = (),
    is_abstract: bool = False,
) -> Model:
    """Loads a causal language model from a folder or, if there is no such folder, from the Hugging Face Hub.

    Each device receives its shard of each tensor directly from the file, so that no host holds a second copy.

    Args:
        name_or_path: Folder with `config.json` and safetensors files, or with a PEFT adapter; or a hub id like
            "Qwen/Qwen3-0.6B".
        dtype: Dtype of the weights in memory; None keeps each tensor's own.
        mesh: Devices of the weights; by default every device has a copy (see `parallel.mesh.default_mesh`).
        weights: "nf4" to quantize the layers' matrices to 4 bits as they are read.
        base: Base of an adapter, if it is not the one that `adapter_config.json` names.
        max_positions: Longest sequence; None for the value in `config.json`, or for the original context if longer
            sequences need other rotary embeddings ("longrope"). It applies to all sequences (see `rope.frequencies`).
        replicated: Dims that may be replicated if they are not divisible by the mesh.
        is_abstract: Whether to return shapes in the place of weights, whose files are checked but not read.

    Raises:
        ValueError: The folder is not a model's, its config or weights are unsupported, damaged or incomplete, or its
            dims are not divisible by the mesh.
    """
    if weights not in get_args(BaseWeights):
        raise ValueError(f"weights must be one of {', '.join(get_args(BaseWeights))}, got {weights!r}")
    folder = resolve_folder(name_or_path)
    if (folder / ADAPTER_NAME).is_file():
        options = {"dtype": dtype, "mesh": mesh, "weights": weights, "max_positions": max_positions}
        options |= {"replicated": replicated, "is_abstract": is_abstract}
        return _load_with_base(name_or_path, folder, base, options)
    if base is not None:
        raise ValueError(f"{name_or_path} is a model and not an adapter; it has no base ({base})")
    whole_config, generation_config, config = _read_settings(folder)
    hf_config = text_config(whole_config)
    in_4_bits = is_nf4(hf_config.get("quantization_config"))
    hf_config = without_mxfp4(without_nf4(hf_config))
    config = config if max_positions is None else replace(config, max_positions=max_positions)
    tensors = own_tensors(whole_config, config, dequantized_tensors(find_tensors(folder)), folder)
    is_tied = config.tie_embeddings and not config.num_labels
    embedding, head = embedding_name(config), head_name(config)
    if is_tied and head in tensors and embedding not in tensors:
        tensors[embedding] = tensors.pop(head)  # the name that the file has for both
    quantized = {name for name in tensors if in_4_bits and f"{name}.{FURTHER[0]}" in tensors}
    check_tensors(config, tensors, folder, quantized)
    if is_tied and head in tensors:
        tensors[head].check(tensors[embedding].shape, f"{folder}: {head}")
        num_rows = tensors[head].shape[0]
        starts = range(0, num_rows, COMPARED_ROWS)
        parts = (slice(start, min(start + COMPARED_ROWS, num_rows)) for start in starts)
        pairs = ([tensors[name].read((part, slice(None))) for name in (head, embedding)] for part in parts)
        if not all(np.array_equal(own, embedded) for own, embedded in pairs):
            raise ValueError(
                f"{folder}: config.json ties the head to the embedding, but {head} and {embedding} differ; set "
                "tie_word_embeddings to false there, so that they are two weights"
            )
        tensors[head].close()
    mesh = mesh or default_mesh(4 * num_params(config))
    _check_mesh(config, mesh, replicated, in_4_bits or weights != "same")
    load = (
        partial(_shape_of, weights, quantized)
        if is_abstract
        else make_weight_loader(mesh, tensors, dtype, weights, quantized)
    )
    params = jax.tree.map(load, model_specs(config), param_shardings(config, mesh))
    return Model(config, params, mesh, hf_config, generation_config, folder, _absolute(name_or_path))


def _shape_of(weights: BaseWeights, quantized: set[str], spec: Spec, sharding: Any) -> Any:
    shape = jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=sharding)
    is_nf4 = spec.name in quantized or (weights == "nf4" and spec.is_layer_matrix)
    return jax.eval_shape(quantize_nf4, shape) if is_nf4 else shape


def _read_settings(folder: Path) -> tuple[dict[str, Any], dict[str, Any], ModelConfig]:
    """Returns the parsed `config.json` and `generation_config.json` (empty if there is none), and the architecture."""
    hf_config = read_json(folder / "config.json")
    path = folder / "generation_config.json"
    generation_config = validate(read_json(path), GENERATION, str(path)) if path.is_file() else {}
    try:
        config = read_config(without_nf4(hf_config))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    return hf_config, generation_config, config


def _absolute(name_or_path: str | os.PathLike[str]) -> str:
    path = Path(name_or_path).expanduser()
    return str(path.resolve()) if path.is_dir() else str(name_or_path)


def load_adapter(model: Model, name_or_path: str | os.PathLike[str]) -> Model:
    """Returns the model with an adapter from a folder or the hub; the model's weights are not copied.

    Raises:
        ValueError: It is not an adapter, does not fit the model, or the model has one already.
    """
    folder = resolve_folder(name_or_path)
    if not (folder / ADAPTER_NAME).is_file():
        raise ValueError(f"{name_or_path} is not an adapter: it has no {ADAPTER_NAME}")
    if model.adapter is not None:
        raise ValueError(f"{model.name or 'the model'} has an adapter already; load its base instead")
    lora = read_lora_config(read_json(folder / ADAPTER_NAME), folder)
    trained = read_adapter(model.config, lora, folder, _replicated(model.mesh))
    initial = _initial(model, lora) if lora.is_pissa else trained
    return replace(_with_adapter(model, lora, trained, initial), name=_absolute(name_or_path))


def _load_with_base(name_or_path: str | os.PathLike[str], folder: Path, base: Any, options: Mapping[str, Any]) -> Model:
    base_name = base if base is not None else adapter_base(read_json(folder / ADAPTER_NAME), folder)
    try:
        base_folder = resolve_folder(base_name)
        if (base_folder / ADAPTER_NAME).is_file():
            raise ValueError(f"{base_name} is an adapter too; merge it first")
        model = load_model(base_name, **options)
    except ValueError as error:
        raise ValueError(f"the base of the adapter in {folder} cannot be loaded: {error}") from error
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    return replace(load_adapter(model, name_or_path), source=folder if has_tokenizer else model.source)


def add_adapter(model: Model, lora: LoRAConfig, seed: int = 0) -> Model:
    """Returns the model with a new adapter, which changes nothing yet; the base's weights are not copied.

    Where PiSSA removes changes from the base, they are stored apart from it.

    The adapter of an abstract model has specs in the place of weights.

    Raises:
        ValueError: The model has an adapter already, or the adapter's settings do not fit it.
    """
    if model.adapter is not None:
        raise ValueError(f"{model.name or 'the model'} has an adapter already; merge it first, or train that one")
    if isinstance(model.params["embed"], jax.ShapeDtypeStruct):
        return replace(model, adapter=Adapter(lora, model.params, adapter_specs(model.config, lora), model.name))
    trained = _initial(model, lora, seed)
    return _with_adapter(model, lora, trained, trained)


def _initial(model: Model, lora: LoRAConfig, seed: int = 0) -> Params:
    return init_adapter(model.config, lora, model.params, jax.random.key(seed), _replicated(model.mesh))


def _with_adapter(model: Model, lora: LoRAConfig, trained: Params, initial: Params) -> Model:
    trained = shard_params(model.config, model.mesh, trained)
    removed = shard_params(model.config, model.mesh, removed_changes(lora, initial))
    return _adapted(model, Adapter(lora, model.params, trained, model.name, removed))


def _check_mesh(config: ModelConfig, mesh: Mesh, replicated: Collection[str], is_quantized: bool = False) -> None:
    if is_quantized and mesh.shape["tp"] * mesh.shape["ep"] > 1:
        raise ValueError(
            f"mesh {format_mesh(mesh)}: quantized weights are replicated and cannot be sharded over tp or ep; set both "
            "to 1, or keep the base as it is stored"
        )
    check_divisible(split_dims(config), mesh, replicated)


def reshard(model: Model, mesh: Mesh, replicated: Collection[str] = ()) -> Model:
    """Returns the model on another mesh.

    Args:
        mesh: Devices of the new weights.
        replicated: Dims that may be replicated if they are not divisible by the mesh.

    Raises:
        ValueError: The model's dims are not divisible by the mesh.
    """
    if mesh == model.mesh:
        return model
    _check_mesh(model.config, mesh, replicated, is_quantized(model.params))
    if model.adapter is None:
        return replace(model, params=shard_params(model.config, mesh, model.params), mesh=mesh)
    names = ("frozen", "trained", "removed")
    parts = {name: shard_params(model.config, mesh, getattr(model.adapter, name)) for name in names}
    return _adapted(replace(model, params=parts["frozen"], mesh=mesh), replace(model.adapter, **parts))


def _adapted(model: Model, adapter: Adapter) -> Model:
    parts = {"trained": adapter.trained, "removed": adapter.removed}
    cast = replace(adapter, **cast_unquantized(parts, model.params["embed"].dtype))
    return replace(model, params=apply_adapter(residual(cast), cast.trained), adapter=adapter)


def _replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


# Tensors that some exporters write and no forward pass needs.
DERIVED = re.compile(r"(rotary_emb\.inv_freq|\.(attn|attention)\.(masked_)?bias)$")
COMPARED_ROWS = 4096  # of a tied head and the embedding at a time
MANY = 10_000  # missing weights that are counted; a false config.json has millions


def check_tensors(config: ModelConfig, tensors: Tensors, folder: Path, quantized: set[str]) -> None:
    """Checks that a folder has a model's weights in their shapes, and no others.

    Args:
        quantized: Names of the 4-bit weights.

    Raises:
        ValueError: A weight is missing, unknown, or of another shape or dtype.
    """
    names = (name for spec in spec_leaves(config) for name in spec.tensor_names)
    if missing := [*islice((name for name in names if name not in tensors), MANY)]:
        number = f"{len(missing)}{' or more' * (len(missing) == MANY)}"
        raise ValueError(f"{folder} lacks {number} weights of its config.json: {', '.join(missing[:4])} ...")
    specs = {name: spec for spec in spec_leaves(config) for name in spec.tensor_names}
    for name, spec in specs.items():
        if name in quantized:
            _check_quantized(name, spec, tensors, folder)
        else:
            tensors[name].check(spec.tensor_shape, f"{folder}: {name}")
    known = {*specs, *([head_name(config)] if config.tie_embeddings else [])}
    known |= {f"{name}.{further}" for name in quantized for further in FURTHER}
    unknown = sorted(name for name in tensors if name not in known and not DERIVED.search(name))
    if unknown:
        raise ValueError(
            f"{folder} has weights that are not part of a {config.model_type} model: {short_repr(unknown)}"
        )


def _check_quantized(name: str, spec: Spec, tensors: Tensors, folder: Path) -> None:
    if not (spec.is_layer_matrix or spec.is_vision_matrix) or spec.num_rows is not None:
        raise ValueError(f"{folder}: {name} is a 4-bit weight, which groupax only supports for single matrices")
    for stored in (name, *(f"{name}.{further}" for further in FURTHER)):
        if stored in tensors and tensors[stored].dtype not in ("U8", "F32"):
            raise ValueError(f"{folder}: {stored} has a dtype other than U8 and F32, those of 4-bit weights")


def make_weight_loader(
    mesh: Mesh, tensors: Tensors, dtype: Any, weights: BaseWeights, quantized: set[str]
) -> Callable[[Spec, Any], Any]:
    """Returns a function that loads a weight to its devices; quantized weights are replicated.

    Args:
        dtype: Dtype of the weights in memory; None keeps each tensor's own.
        weights: Format that the layers' matrices are quantized to.
        quantized: Names of the weights that are in 4 bits already.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    quantize = None if weights == "same" else jax.jit(quantize_nf4, out_shardings=replicated)

    def load(spec: Spec, sharding: Any) -> Any:
        if spec.name in quantized:
            try:
                return read_nf4(spec.name, spec.shape, lambda name: tensors[name].whole(), replicated)
            except ValueError as error:
                raise ValueError(f"{tensors[spec.name].path}: {error}") from error
        array = _load(spec, sharding, tensors, dtype)
        return array if quantize is None or not spec.is_layer_matrix else jax.block_until_ready(quantize(array))

    return load


def _load(spec: Spec, sharding: Any, tensors: Tensors, dtype: Any) -> jax.Array:
    def read(index: Any) -> np.ndarray:
        stored = _read_shard(spec, tensors, index)
        check_finite(stored, f"{tensors[spec.tensor_names[0]].path}: {spec.name}")
        return cast(stored, np.float32 if spec.is_float32 else dtype)

    array = jax.make_array_from_callback(spec.shape, sharding, read)
    for name in spec.tensor_names:
        tensors[name].close()
    return array


def _read_shard(spec: Spec, tensors: Tensors, index: Any) -> np.ndarray:
    """Reads the shard of a weight at a tuple of slices, directly from the files."""
    if spec.is_stacked:
        return np.stack([tensors[name].read(index[1:]) for name in spec.tensor_names[index[0]]])
    index = spec.stored_index(index)
    steps = tuple(slice(None, None, each.step) for each in index)  # which slices of files do not have
    stored = tensors[spec.name].read(tuple(slice(each.start, each.stop) for each in index))
    return spec.reordered(stored[steps])
