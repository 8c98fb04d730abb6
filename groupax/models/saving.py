"""Saving of models and adapters as Hugging Face folders."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from groupax.models import bitsandbytes_format, peft_format
from groupax.models.checkpoint import Model
from groupax.models.named_tensors import join_tensors, specs_by_name
from groupax.models.nf4 import Nf4, nf4_bytes, quantize_nf4
from groupax.models.quantize import dense
from groupax.models.spec import Spec
from groupax.models.specs import model_specs
from groupax.models.tensor_files import INDEX_NAME, cast
from groupax.models.vision.processing import write_processor
from groupax.models.vision.specs import vision_modules
from groupax.storage.folders import write_json
from groupax.storage.replacing import replacing_folder

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
            hf_config["quantization_config"] = bitsandbytes_format.quantization_config(dtype_name, skipped)
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
        write_json(partial / peft_format.CONFIG_NAME, peft_format.adapter_config_dict(model.adapter, model.config))
        peft_format.write_tensors(model.config, model.adapter.config, model.adapter.trained, partial)
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
    shards = _group_in_shards(sizes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, np.ndarray] = {}
        for name in shard:
            tensors |= _tensors_of(by_name[name], dtype, own, weights)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # safetensors creates files that only their owner can read
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        write_json(folder / INDEX_NAME, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})


def _group_in_shards(sizes: Mapping[str, int]) -> list[list[str]]:
    """Groups the names of weights into files of at most `SHARD_BYTES`; a larger weight has a file to itself."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, num_bytes in sizes.items():
        if shards[-1] and size + num_bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    return shards


def _tensors_of(parts: list[tuple[Spec, Any]], dtype: Any, own: Any, weights: str) -> dict[str, np.ndarray]:
    """Returns the checkpoint's tensors for the weights of one name."""
    spec, weight = parts[0]
    if weights == "nf4" and spec.is_layer_matrix:
        quantized = weight if isinstance(weight, Nf4) else jax.jit(quantize_nf4)(dense(weight, jnp.float32))
        return bitsandbytes_format.nf4_tensors(spec.name, quantized, jnp.dtype(dtype or own).name)
    return join_tensors(
        [(spec, _dequantized(weight, None if spec.is_float32 else dtype, own)) for spec, weight in parts]
    )


def _dequantized(weight: Any, dtype: Any, own: Any) -> np.ndarray:
    array = weight if isinstance(weight, jax.Array | np.ndarray) else dense(weight, dtype or own)
    return np.ascontiguousarray(cast(np.asarray(array), dtype))
