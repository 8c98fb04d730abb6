"""Models and adapters from memory into Hugging Face folders."""

import math
import os
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
from groupax.models.specs import Spec, model_specs
from groupax.models.tensor_files import INDEX_NAME, cast
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
    """Write a folder that `transformers` loads. It appears whole or not at all.

    Args:
        model: the model; quantized weights become numbers again, and an adapter is added to its base.
        folder: need not exist. A model that groupax has written there is replaced; other files stay.
        tokenizer: written beside the weights if given.
        dtype: of the weights on disk; None keeps each weight's own.
        weights: "nf4" writes the layers' matrices in 4 bits, as bitsandbytes does.
        card: the `README.md`, if given.

    Raises:
        ForeignFilesError: the folder holds files that groupax did not write and that are not beside a model of its own.
        ValueError: the folder is the model's source, or 4 bits are asked of tensors that hold several matrices.
    """
    if weights == "nf4" and model.config.fused_projections:
        raise ValueError(
            f"{model.config.model_type} has several matrices in one tensor; groupax writes no 4 bits of it"
        )
    folder = Path(folder)
    with replacing_folder(folder, source_folders(model)) as partial:
        dtype_name = jnp.dtype(dtype or model.params["embed"].dtype).name
        hf_config = {key: value for key, value in model.hf_config.items() if key not in ("dtype", "torch_dtype")}
        if weights == "nf4":
            hf_config["quantization_config"] = bitsandbytes_format.quantization_config(dtype_name)
        write_json(partial / "config.json", {**hf_config, "dtype": dtype_name})
        if model.generation_config:
            write_json(partial / "generation_config.json", model.generation_config)
        _save_params(model, partial, dtype, weights)
        _write_beside(partial, tokenizer, card)
    return folder


def save_adapter(model: Model, folder: str | os.PathLike[str], tokenizer: Any = None, card: str | None = None) -> Path:
    """Write the model's adapter as a folder that PEFT loads, without the base. It appears whole or not at all.

    Args:
        model: a base with an adapter.
        folder: need not exist. A model that groupax has written there is replaced; other files stay.
        tokenizer: written beside it if given.
        card: the `README.md`, if given.

    Raises:
        ForeignFilesError: the folder holds files that groupax did not write and that are not beside a model of its own.
        ValueError: there is no adapter, or the folder is the source of the adapter or of its base.
    """
    if model.adapter is None:
        raise ValueError(f"{model.name or 'the model'} has no adapter to be saved")
    folder = Path(folder)
    with replacing_folder(folder, source_folders(model)) as partial:
        write_json(partial / peft_format.CONFIG_NAME, peft_format.adapter_config_dict(model.adapter, model.config))
        peft_format.write_tensors(model.config, model.adapter.config, model.adapter.trained, partial)
        _write_beside(partial, tokenizer, card)
    return folder


def source_folders(model: Model) -> list[Path]:
    """The local folders that a model, its adapter and the adapter's base were read from, as far as they exist."""
    named = [model.source, model.name, model.adapter and model.adapter.base_name]
    return [Path(each) for each in named if each and Path(each).is_dir()]


def _write_beside(folder: Path, tokenizer: Any, card: str | None) -> None:
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if card is not None:
        (folder / "README.md").write_text(card, encoding="utf-8")


def _save_params(model: Model, folder: Path, dtype: Any, weights: str) -> None:
    own = model.params["embed"].dtype
    specs = model_specs(model.config)
    leaves = jax.tree.structure(specs).flatten_up_to(model.params)
    parts_at = {name: [(spec, leaves[index]) for index, spec in parts] for name, parts in specs_by_name(specs).items()}
    shards: list[list[str]] = [[]]
    size = total = 0
    for place, parts in parts_at.items():
        is_nf4 = weights == "nf4" and parts[0][0].is_layer_matrix
        itemsize = jnp.dtype(dtype or own).itemsize
        num_bytes = sum(nf4_bytes(spec.shape) if is_nf4 else math.prod(spec.shape) * itemsize for spec, _ in parts)
        if shards[-1] and size + num_bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(place)
        size, total = size + num_bytes, total + num_bytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, np.ndarray] = {}
        for place in shard:
            tensors |= _tensors_of(parts_at[place], dtype, own, weights)
        save_file(tensors, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # safetensors makes files that only their owner can read
        weight_map |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _tensors_of(parts: list[tuple[Spec, Any]], dtype: Any, own: Any, weights: str) -> dict[str, np.ndarray]:
    """The checkpoint's tensors that weights of one place make."""
    spec, weight = parts[0]
    if weights == "nf4" and spec.is_layer_matrix:
        quantized = weight if isinstance(weight, Nf4) else jax.jit(quantize_nf4)(dense(weight, jnp.float32))
        return bitsandbytes_format.nf4_tensors(spec.name, quantized, jnp.dtype(dtype or own).name)
    return join_tensors([(spec, _numbers(weight, dtype, own)) for spec, weight in parts])


def _numbers(weight: Any, dtype: Any, own: Any) -> np.ndarray:
    array = weight if isinstance(weight, jax.Array | np.ndarray) else dense(weight, dtype or own)
    return np.ascontiguousarray(cast(np.asarray(array), dtype))
