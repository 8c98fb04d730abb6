"""Weights as named tensors on the host, and saving of models and adapters as Hugging Face folders."""

import math
import os
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from groupax.core.storage.folders import ADAPTER_NAME, write_json
from groupax.core.storage.replacing import replacing_folder
from groupax.models.adapted import dense
from groupax.models.lora import adapter_config_dict, as_plain, write_adapter
from groupax.models.specs import Params, Spec, model_specs, vision_modules
from groupax.models.vision.processing import write_processor
from groupax.models.weights.checkpoint import Model
from groupax.models.weights.nf4 import Nf4, nf4_bytes, nf4_tensors, quantization_config, quantize_nf4
from groupax.models.weights.tensor_files import INDEX_NAME, cast

SHARD_BYTES = 5 * 10**9


def save_model(
    model: Model,
    folder: str | os.PathLike[str],
    tokenizer: Any = None,
    dtype: Any = None,
    weights: Literal["same", "nf4"] = "same",
    card: str | None = None,
) -> Path:
    """Writes a folder that `transformers` loads, atomically.

    Args:
        model: Model to save. Quantized weights are dequantized, and an adapter is merged into its base.
        folder: Destination, which need not exist. A model that groupax wrote there is replaced.
        tokenizer: Tokenizer to save with the weights, if given.
        dtype: Dtype of the weights on disk; None keeps each weight's own.
        weights: "nf4" to write the matrices of the decoder's layers in the 4-bit format of bitsandbytes.
        card: Text of the `README.md`, if given.

    Raises:
        ForeignFilesError: The folder contains files that groupax did not write.
        ValueError: The folder overlaps with the model's source, or 4 bits are requested for tensors that consist of
            several matrices.
    """
    if weights == "nf4" and (model.config.fused_qkv or model.config.fused_gate_up):
        raise ValueError(
            f"{model.config.model_type} has several matrices in one tensor, which groupax cannot write in 4 bits"
        )
    folder = Path(folder)
    with replacing_folder(folder, source_folders(model)) as partial:
        dtype_name = jnp.dtype(dtype or model.params["embed"].dtype).name
        hf_config = {key: value for key, value in model.hf_config.items() if key not in ("dtype", "torch_dtype")}
        if weights == "nf4":
            skipped = vision_modules(model.config.vision) if model.config.vision else ()
            hf_config["quantization_config"] = quantization_config(dtype_name, skipped)
        write_json(partial / "config.json", {**hf_config, "dtype": dtype_name})
        if model.generation_config:
            write_json(partial / "generation_config.json", model.generation_config)
        _save_params(model, partial, dtype, weights)
        write_processor(model.processor_folder, partial)
        _write_tokenizer_and_card(partial, tokenizer, card)
    return folder


def save_adapter(model: Model, folder: str | os.PathLike[str], tokenizer: Any = None, card: str | None = None) -> Path:
    """Writes the model's adapter, without the base, as a folder that PEFT loads, atomically.

    Args:
        model: A base with an adapter.
        folder: Destination, which need not exist. A model that groupax wrote there is replaced.
        tokenizer: Tokenizer to save with the adapter, if given.
        card: Text of the `README.md`, if given.

    Raises:
        ForeignFilesError: The folder contains files that groupax did not write.
        ValueError: There is no adapter, or the folder overlaps with the source of the adapter or of its base.
    """
    if model.adapter is None:
        raise ValueError(f"{model.name or 'the model'} has no adapter to save")
    folder = Path(folder)
    with replacing_folder(folder, source_folders(model)) as partial:
        adapter = as_plain(model.adapter)
        write_json(partial / ADAPTER_NAME, adapter_config_dict(adapter, model.config))
        write_adapter(model.config, adapter.config, adapter.trained, partial)
        write_processor(model.processor_folder, partial)
        _write_tokenizer_and_card(partial, tokenizer, card)
    return folder


def source_folders(model: Model) -> list[Path]:
    """Returns the existing local folders that a model, its adapter and the adapter's base were read from."""
    names = [model.source, model.name, model.adapter and model.adapter.base_name]
    return [Path(name) for name in names if name and Path(name).is_dir()]


def _write_tokenizer_and_card(folder: Path, tokenizer: Any, card: str | None) -> None:
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if card is not None:
        (folder / "README.md").write_text(card, encoding="utf-8")


def _save_params(model: Model, folder: Path, dtype: Any, weights: str) -> None:
    from huggingface_hub import split_state_dict_into_shards_factory

    own = model.params["embed"].dtype
    specs = model_specs(model.config)
    leaves = jax.tree.structure(specs).flatten_up_to(model.params)
    by_name = {name: [(spec, leaves[index]) for index, spec in parts] for name, parts in specs_by_name(specs).items()}
    itemsize = jnp.dtype(dtype or own).itemsize
    sizes = {
        name: sum(
            nf4_bytes(spec.shape) if weights == "nf4" and spec.is_layer_matrix else math.prod(spec.shape) * itemsize
            for spec, _ in parts
        )
        for name, parts in by_name.items()
    }
    split = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=SHARD_BYTES,
    )
    weight_map: dict[str, str] = {}
    for file, names in split.filename_to_tensors.items():
        tensors: dict[str, np.ndarray] = {}
        for name in names:
            tensors |= _tensors_of(by_name[name], dtype, own, weights)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # safetensors creates files that only their owner can read
        weight_map |= dict.fromkeys(tensors, file)
    if split.is_sharded:
        write_json(folder / INDEX_NAME, {"metadata": split.metadata, "weight_map": weight_map})


def _tensors_of(parts: list[tuple[Spec, Any]], dtype: Any, own: Any, weights: str) -> dict[str, np.ndarray]:
    """Returns the checkpoint's tensors for the weights of one name."""
    spec, weight = parts[0]
    if weights == "nf4" and spec.is_layer_matrix:
        quantized = weight if isinstance(weight, Nf4) else jax.jit(quantize_nf4)(dense(weight, jnp.float32))
        return nf4_tensors(spec.name, quantized, jnp.dtype(dtype or own).name)
    return join_tensors(
        [(spec, _dequantized(weight, None if spec.is_float32 else dtype, own)) for spec, weight in parts]
    )


def _dequantized(weight: Any, dtype: Any, own: Any) -> np.ndarray:
    array = weight if isinstance(weight, jax.Array | np.ndarray) else dense(weight, dtype or own)
    return np.ascontiguousarray(cast(np.asarray(array), dtype))


def specs_by_name(specs: Params) -> dict[str, list[tuple[int, Spec]]]:
    """Groups specs by their name in a checkpoint; each comes with its index among the tree's leaves."""
    found: dict[str, list[tuple[int, Spec]]] = {}
    for index, spec in enumerate(jax.tree.leaves(specs)):
        found.setdefault(spec.name, []).append((index, spec))
    return found


def join_tensors(parts: Sequence[tuple[Spec, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns the checkpoint's tensors for the weights of one name.

    A stacked weight becomes one tensor per index; weights that are rows of one tensor are concatenated.
    """
    spec, array = parts[0]
    if spec.is_stacked:
        return dict(zip(spec.tensor_names, array, strict=True))
    if len(parts) == 1:
        return {spec.name: np.ascontiguousarray(spec.reordered(array))}
    fused = np.empty(spec.fused_shape, array.dtype)
    for each, rows in parts:
        fused[each.fused_index(_whole(each))] = rows
    return {spec.name: np.ascontiguousarray(spec.reordered(fused))}


def _whole(spec: Spec) -> tuple[slice, ...]:
    return (slice(None),) * len(spec.shape)


def param_leaves(specs: Params, params: Params) -> list[Any]:
    """Returns the weights in the order of their specs.

    Raises:
        ValueError: Some weights are quantized.
    """
    leaves = jax.tree.structure(specs).flatten_up_to(params)
    if not all(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves):
        raise ValueError("quantized weights cannot be exchanged; train an adapter on them, which can")
    return leaves


def host_tensors(specs: Params, leaves: list[Any], names: Container[str] | None = None) -> dict[str, np.ndarray]:
    """Returns weights as tensors on the host, without a copy if the devices allow it.

    Args:
        names: Names of the requested weights in a checkpoint; None for all.
    """
    tensors: dict[str, np.ndarray] = {}
    for name, parts in specs_by_name(specs).items():
        if names is None or name in names:
            tensors |= join_tensors([(spec, np.asarray(leaves[index])) for index, spec in parts])
    return tensors


def replace_tensors(specs: Params, params: Params, tensors: Mapping[str, np.ndarray]) -> Params:
    """Returns weights with some of their tensors replaced; dtypes and shardings stay the same.

    Args:
        params: Old weights, which are not modified.
        tensors: New tensors by name, in the shapes of the specs. They must not be modified afterwards, since the
            weights may share their memory.
    """
    leaves, structure = jax.tree.flatten(specs)
    weights = [_replaced(*pair, tensors) for pair in zip(leaves, structure.flatten_up_to(params), strict=True)]
    return jax.block_until_ready(jax.tree.unflatten(structure, weights))


def _replaced(spec: Spec, weight: jax.Array, tensors: Mapping[str, np.ndarray]) -> jax.Array:
    given = [(index, tensors[name]) for index, name in enumerate(spec.tensor_names) if name in tensors]
    if not given:
        return weight
    if spec.is_stacked:
        array = np.array(weight)
        for index, tensor in given:
            array[index] = tensor
    else:
        [(_, array)] = given
        array = spec.reordered(array)[spec.fused_index(_whole(spec))]
    return jax.device_put(array.astype(weight.dtype, copy=False), weight.sharding)
