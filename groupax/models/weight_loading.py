"""Loading of a model's weights from safetensors files to their devices."""

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from groupax.models import bitsandbytes_format
from groupax.models.config import ModelConfig
from groupax.models.quantize import quantizer
from groupax.models.spec import Spec
from groupax.models.specs import HEAD, embedding_name, spec_leaves
from groupax.models.tensor_files import DTYPES, TensorFile, Tensors, cast, check_finite
from groupax.settings.optimizer import BaseWeights
from groupax.terminal.printable import short_repr

logger = logging.getLogger(__name__)
COMPARED_ROWS = 4096
# Tensors that some exporters write and no forward pass needs.
DERIVED = re.compile(r"rotary_emb\.inv_freq$")


def resolve_tied_head(config: ModelConfig, tensors: Tensors, folder: Path) -> tuple[ModelConfig, Tensors]:
    """Reconciles a head that `config.json` ties to the embedding with the tensors of the files.

    As in transformers, a single tensor is used for both, whichever of the two names it has, and two tensors that differ
    are two weights.

    Args:
        config: Architecture by `config.json`.
        tensors: Tensors of the folder.
        folder: Folder of the model, for the log.
    """
    if not config.tie_embeddings or config.num_labels or HEAD not in tensors:
        return config, tensors
    embedding = embedding_name(config)
    if embedding not in tensors:
        return config, {**tensors, embedding: TensorFile(tensors[HEAD].path, {embedding: HEAD})}
    if _are_equal(tensors, embedding, HEAD):
        return config, tensors
    logger.warning(
        "%s: config.json has tie_word_embeddings, but %s and %s differ; they are loaded as two weights. If that is "
        "intended, set it to false",
        *(folder, embedding, HEAD),
    )
    return replace(config, tie_embeddings=False), tensors


def _are_equal(tensors: Tensors, first: str, second: str) -> bool:
    """Compares two tensors with only a few rows of them in memory at a time."""

    def rows(name: str, start: int) -> np.ndarray:
        block = tensors[name].get_slice(name)[start : min(start + COMPARED_ROWS, shape[0])]
        tensors[name].close()
        return block

    slices = [tensors[name].get_slice(name) for name in (first, second)]
    shape, other = (each.get_shape() for each in slices)
    if shape != other or len(shape) != 2 or any(each.get_dtype() not in DTYPES for each in slices):
        return False
    starts = range(0, shape[0], COMPARED_ROWS)
    return all(np.array_equal(rows(first, start), rows(second, start)) for start in starts)


def check_tensors(config: ModelConfig, tensors: Tensors, folder: Path, quantized: set[str]) -> None:
    """Checks that a folder has a model's weights in their shapes, and no others.

    Args:
        config: Architecture of the model.
        tensors: Tensors of the folder.
        folder: Folder of the model, for an error.
        quantized: Names of the 4-bit weights.

    Raises:
        ValueError: A weight is missing, unknown, or of another shape or dtype.
    """
    leaves = list(spec_leaves(config))
    num_expected = len({spec.name for spec in leaves if not spec.is_stacked}) + sum(
        spec.shape[0] for spec in leaves if spec.is_stacked
    )
    if num_expected > 2 * len(tensors) + 1000:  # too many to build their names
        raise ValueError(
            f"{folder}: config.json describes a model of {num_expected:,} tensors ({config.num_layers} layers), but "
            f"its files contain {len(tensors):,}; they belong to different models"
        )
    specs = {name: spec for spec in leaves for name in spec.tensor_names}
    missing = [name for name in specs if name not in tensors]
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} weights of its config.json: {', '.join(missing[:4])} ...")
    for name, spec in specs.items():
        if name in quantized:
            _check_quantized(name, spec, tensors, folder)
        else:
            _check_tensor(name, spec, tensors[name], folder)
    known = {*specs, *([HEAD] if config.tie_embeddings else [])}
    known |= {f"{name}.{further}" for name in quantized for further in bitsandbytes_format.FURTHER}
    unknown = sorted(name for name in tensors if name not in known and not DERIVED.search(name))
    if unknown:
        raise ValueError(
            f"{folder} has weights that are not part of a {config.model_type} model: {short_repr(unknown)}"
        )


def _check_tensor(name: str, spec: Spec, file: TensorFile, folder: Path) -> None:
    found = file.get_slice(name).get_shape()
    if found != list(spec.tensor_shape):
        raise ValueError(f"{folder}: {name} has shape {found}, config.json says {list(spec.tensor_shape)}")
    dtype = file.get_slice(name).get_dtype()
    if dtype not in DTYPES:
        raise ValueError(f"{folder}: {name} has dtype {dtype}; supported are {', '.join(DTYPES)}")


def _check_quantized(name: str, spec: Spec, tensors: Tensors, folder: Path) -> None:
    if not (spec.is_layer_matrix or spec.is_vision_matrix) or spec.num_rows is not None:
        raise ValueError(f"{folder}: {name} is a 4-bit weight, which groupax only supports for single matrices")
    for stored in (name, *(f"{name}.{further}" for further in bitsandbytes_format.FURTHER)):
        if stored in tensors and tensors[stored].get_slice(stored).get_dtype() not in ("U8", "F32"):
            raise ValueError(f"{folder}: {stored} has a dtype other than U8 and F32, those of 4-bit weights")


def make_weight_loader(
    mesh: Mesh, tensors: Tensors, dtype: Any, weights: BaseWeights, quantized: set[str]
) -> Callable[[Spec, Any], Any]:
    """Returns a function that loads a weight to its devices; quantized weights are replicated.

    Args:
        mesh: Devices of the weights.
        tensors: Tensors of the folder.
        dtype: Dtype of the weights in memory; None keeps each tensor's own.
        weights: Format that the layers' matrices are quantized to.
        quantized: Names of the weights that are in 4 bits already.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    quantize = None if weights == "same" else jax.jit(quantizer(weights), out_shardings=replicated)

    def load(spec: Spec, sharding: Any) -> Any:
        if spec.name in quantized:
            try:
                return bitsandbytes_format.read_nf4(
                    spec.name, spec.shape, lambda name: tensors[name].get_tensor(name), replicated
                )
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
        return np.stack([tensors[name].get_slice(name)[index[1:]] for name in spec.tensor_names[index[0]]])
    stored = tensors[spec.name].get_slice(spec.name)
    index = spec.stored_index(index)
    steps = tuple(slice(None, None, each.step) for each in index)  # which slices of files do not have
    return spec.reordered(stored[tuple(slice(each.start, each.stop) for each in index)][steps])
