"""The weights in a folder's safetensors files: which there are, and each to its devices."""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import SafetensorError, safe_open

from groupax.models import bitsandbytes_format
from groupax.models.config import ModelConfig
from groupax.models.quantize import quantizer
from groupax.models.specs import EMBEDDING, HEAD, Spec, spec_leaves
from groupax.settings.adapter import BaseWeights
from groupax.storage.folders import list_names, read_json
from groupax.terminal.printable import error_line, short_repr

logger = logging.getLogger(__name__)
INDEX_NAME = "model.safetensors.index.json"
SHARD_NAME = re.compile(r"[^/\\\0]*\.safetensors")
COMPARED_ROWS = 4096
CHECKED_NUMBERS = 1 << 18  # at a time: what the processor's caches hold
# What numbers a weight may be stored as; of each the bits of the exponent, which are all set if it is not finite.
DTYPES = {"F32": (np.uint32, 0x7F800000), "BF16": (np.uint16, 0x7F80), "F16": (np.uint16, 0x7C00)}
# Tensors that some exporters write and no forward pass needs.
DERIVED = re.compile(r"rotary_emb\.inv_freq$")


class TensorFile:
    """A safetensors file that is mapped only while a weight is read.

    What was read of a mapped file counts as memory of the process, as a second copy of the weights would.
    """

    def __init__(self, path: Path, stored_names: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.stored_names = stored_names or {}  # of tensors that are called otherwise than in the file
        self._file: Any = None

    @property
    def file(self) -> Any:
        """The file, opened if need be.

        Raises:
            ValueError: it is damaged.
        """
        if self._file is None:
            try:
                self._file = safe_open(self.path, framework="np")
            except (SafetensorError, OSError, ValueError) as error:
                size = self.path.stat().st_size
                raise ValueError(
                    f"{self.path} ({size} bytes) is damaged or truncated: {error_line(error)}; get the file anew from "
                    "where the model is from"
                ) from error
        return self._file

    def get_slice(self, name: str) -> Any:
        """A tensor, of which parts can be read."""
        return self.file.get_slice(self.stored_names.get(name, name))

    def get_tensor(self, name: str) -> np.ndarray:
        """A whole tensor."""
        return self.file.get_tensor(self.stored_names.get(name, name))

    def close(self) -> None:
        """Give back the memory; the file is opened again when it is needed."""
        self._file = None


Tensors = dict[str, TensorFile]  # tensor name -> the file that holds it


def find_tensors(folder: Path) -> Tensors:
    """The tensors of a model's folder, by the headers of its files.

    Raises:
        ValueError: it has no safetensors files, or not all that its index names, or files outside of it are named, or
            its index and its files disagree.
    """
    if (folder / INDEX_NAME).is_file():
        weight_map = _weight_map(folder / INDEX_NAME)
    elif (folder / "model.safetensors").is_file():
        weight_map = dict.fromkeys(TensorFile(folder / "model.safetensors").file.keys(), "model.safetensors")
    else:
        pickled = next(iter(folder.glob("*.bin")), None)
        reason = (
            f"only {list_names([pickled.name])}, a pickle, which is never loaded; convert it"
            if pickled
            else "no model.safetensors"
        )
        raise ValueError(f"{folder} has no safetensors weights: {reason}")
    files = {name: TensorFile(folder / name) for name in sorted(set(weight_map.values()))}
    missing = [name for name, file in files.items() if not file.path.is_file()]
    if missing:
        raise ValueError(
            f"{folder} is incomplete: {INDEX_NAME} names {list_names(missing)}, which is missing; get it from where the "
            "model is from"
        )
    tensors: Tensors = {}
    for file_name, file in files.items():
        for name in file.file.keys():  # noqa: SIM118 - no mapping
            if name in tensors:
                raise ValueError(
                    f"{folder}: {short_repr(name)} is in both {tensors[name].path.name} and {file_name}; a tensor must be "
                    "in one file"
                )
            tensors[name] = file
        file.close()
    absent = [name for name, file_name in weight_map.items() if tensors.get(name) is not files[file_name]]
    if absent:
        raise ValueError(
            f"{folder / INDEX_NAME} says that {short_repr(weight_map[absent[0]])} holds {short_repr(absent[0])}, which it does "
            "not; index and files are not of one model"
        )
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """Which tensor is in which file, as an index says.

    Raises:
        ValueError: it says something else, or names what is no safetensors file of its folder.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{index} has weight_map={short_repr(weight_map)}; it must be an object of tensors and their files"
        )
    for name in weight_map.values():
        if not isinstance(name, str) or not SHARD_NAME.fullmatch(name):
            raise ValueError(
                f"{index} names {short_repr(name)}, which is no safetensors file of its folder; such are never opened"
            )
    return weight_map


def resolve_tied_head(config: ModelConfig, tensors: Tensors, folder: Path) -> tuple[ModelConfig, Tensors]:
    """A model and its tensors, where `config.json` says that the head is the embedding, as the files have them.

    As in transformers one tensor is both, whichever of the two it is called, and two that differ are two weights.

    Args:
        config: the model.
        tensors: of the folder.
        folder: to be told.
    """
    if not config.tie_embeddings or config.num_labels or HEAD not in tensors:
        return config, tensors
    if EMBEDDING not in tensors:
        return config, {**tensors, EMBEDDING: TensorFile(tensors[HEAD].path, {EMBEDDING: HEAD})}
    if _are_equal(tensors, EMBEDDING, HEAD):
        return config, tensors
    logger.warning(
        "%s: config.json has tie_word_embeddings, but %s and %s differ; they are loaded as two weights. If they are "
        "meant to be, set it to false",
        *(folder, EMBEDDING, HEAD),
    )
    return replace(config, tie_embeddings=False), tensors


def _are_equal(tensors: Tensors, first: str, second: str) -> bool:
    """Whether two tensors hold the same; no more than some rows of them are in memory at a time."""

    def rows(name: str, begin: int) -> np.ndarray:
        part = tensors[name].get_slice(name)[begin : min(begin + COMPARED_ROWS, shape[0])]
        tensors[name].close()
        return part

    slices = [tensors[name].get_slice(name) for name in (first, second)]
    shape, other = (each.get_shape() for each in slices)
    if shape != other or len(shape) != 2 or any(each.get_dtype() not in DTYPES for each in slices):
        return False
    begins = range(0, shape[0], COMPARED_ROWS)
    return all(np.array_equal(rows(first, begin), rows(second, begin)) for begin in begins)


def check_tensors(config: ModelConfig, tensors: Tensors, folder: Path, quantized: set[str]) -> None:
    """See that a folder has a model's weights, in their shapes, and no others.

    Args:
        config: the model.
        tensors: of the folder.
        folder: to be told.
        quantized: the tensors that are 4-bit weights.

    Raises:
        ValueError: it has not.
    """
    leaves = list(spec_leaves(config))
    wanted = len({spec.name for spec in leaves if not spec.is_stacked}) + sum(
        spec.shape[0] for spec in leaves if spec.is_stacked
    )
    if wanted > 2 * len(tensors) + 1000:  # so many that their names had better not be made
        raise ValueError(
            f"{folder}: config.json describes a model of {wanted:,} tensors ({config.num_layers} layers), its files "
            f"hold {len(tensors):,}; they are not of one model"
        )
    specs = {name: spec for spec in leaves for name in spec.tensor_names}
    missing = [name for name in specs if name not in tensors]
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} weights of its config.json: {', '.join(missing[:4])} ...")
    for name, spec in specs.items():
        if name in quantized:
            if not spec.is_layer_matrix or spec.num_rows is not None:
                raise ValueError(f"{folder}: {name} is a 4-bit weight; groupax reads such only of single matrices")
            for part in (name, *(f"{name}.{further}" for further in bitsandbytes_format.FURTHER)):
                if part in tensors and tensors[part].get_slice(part).get_dtype() not in ("U8", "F32"):
                    raise ValueError(f"{folder}: {part} is of another dtype than those of 4-bit weights, U8 and F32")
            continue
        found = tensors[name].get_slice(name).get_shape()
        if found != list(spec.tensor_shape):
            raise ValueError(f"{folder}: {name} has shape {found}, config.json says {list(spec.tensor_shape)}")
        dtype = tensors[name].get_slice(name).get_dtype()
        if dtype not in DTYPES:
            raise ValueError(f"{folder}: {name} has dtype {dtype}; weights are read in {', '.join(DTYPES)}")
    known = {*specs, *([HEAD] if config.tie_embeddings else [])}
    known |= {f"{name}.{further}" for name in quantized for further in bitsandbytes_format.FURTHER}
    unknown = sorted(name for name in tensors if name not in known and not DERIVED.search(name))
    if unknown:
        raise ValueError(
            f"{folder} has weights that a {config.model_type} model has no place for: {short_repr(unknown)}"
        )


def make_weight_loader(
    mesh: Mesh, tensors: Tensors, dtype: Any, weights: BaseWeights, quantized: set[str]
) -> Callable[[Spec, Any], Any]:
    """What loads a weight to its devices; quantized weights are replicated.

    Args:
        mesh: of the devices.
        tensors: of the folder.
        dtype: of the weights in memory; None keeps their own.
        weights: what the layers' matrices are quantized to.
        quantized: the tensors that are 4-bit weights already.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    quantize = None if weights == "same" else jax.jit(quantizer(weights), out_shardings=whole)

    def load(spec: Spec, sharding: Any) -> Any:
        if spec.name in quantized:
            try:
                return bitsandbytes_format.read_nf4(
                    spec.name, spec.shape, lambda name: tensors[name].get_tensor(name), whole
                )
            except ValueError as error:
                raise ValueError(f"{tensors[spec.name].path}: {error}") from error
        array = _load(spec, sharding, tensors, dtype)
        return array if quantize is None or not spec.is_layer_matrix else jax.block_until_ready(quantize(array))

    return load


def _load(spec: Spec, sharding: Any, tensors: Tensors, dtype: Any) -> jax.Array:

    def read(index: Any) -> np.ndarray:
        stored = _stored(spec, tensors, index)
        check_finite(stored, f"{tensors[spec.tensor_names[0]].path}: {spec.name}")
        return cast(stored, dtype)

    array = jax.make_array_from_callback(spec.shape, sharding, read)
    for name in spec.tensor_names:
        tensors[name].close()
    return array


def _stored(spec: Spec, tensors: Tensors, index: Any) -> np.ndarray:
    """The part of a weight that a tuple of slices says, straight from the files."""
    if spec.is_stacked:
        return np.stack([tensors[name].get_slice(name)[index[1:]] for name in spec.tensor_names[index[0]]])
    if spec.num_rows is not None:
        first, end, _ = index[0].indices(spec.shape[0])
        index = (slice(spec.first_row + first, spec.first_row + end), *index[1:])
    return tensors[spec.name].get_slice(spec.name)[index]


def check_finite(array: np.ndarray, name: str) -> None:
    """Refuses weights with numbers that are infinite or none at all; it takes about a second per 10 GB.

    Raises:
        ValueError: there are such.
    """
    kinds = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    word, exponent = DTYPES[kinds[array.dtype.name]]
    bits = np.ascontiguousarray(array).view(word).reshape(-1)
    for begin in range(0, bits.size, CHECKED_NUMBERS):
        if (bits[begin : begin + CHECKED_NUMBERS] & word(exponent)).max() == exponent:
            num = int((~np.isfinite(array.astype(np.float32))).sum())
            raise ValueError(
                f"{name} has {num:,} numbers of {array.size:,} that are infinite or NaN; the model is damaged, or its "
                "training diverged: take an earlier checkpoint of it"
            )


def cast(array: np.ndarray, dtype: Any) -> np.ndarray:
    """The array in a dtype; None keeps its own."""
    return array if dtype is None else array.astype(dtype)
