"""Safetensors files of a folder: which tensors they contain, by the names in the table of weights, and reading them."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from groupax.core.storage.folders import list_names, read_json
from groupax.core.storage.model_json import MAX_EXPERTS
from groupax.core.terminal.printable import error_line, short_repr
from groupax.models.config import ModelConfig
from groupax.models.families import VISION_FAMILIES, has_text_part

logger = logging.getLogger(__name__)

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
SHARD_NAME = re.compile(r"[^/\\\0]*\.safetensors")
CHECKED_NUMBERS = 1 << 18  # checked at a time, to fit in the processor's caches
# Dtypes of weights, each with its bits of the exponent, which are all set in numbers that are not finite.
DTYPES = {"F32": (np.uint32, 0x7F800000), "BF16": (np.uint16, 0x7F80), "F16": (np.uint16, 0x7C00)}


class TensorFile:
    """A safetensors file that is memory-mapped only while a weight is read.

    Pages that were read of a mapped file count as memory of the process, like a second copy of the weights.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None

    @property
    def file(self) -> Any:
        """File handle, which is opened if necessary.

        Raises:
            ValueError: It is damaged.
        """
        if self._file is None:
            try:
                self._file = safe_open(self.path, framework="np")
            except (SafetensorError, OSError, ValueError) as error:
                size = self.path.stat().st_size
                raise ValueError(
                    f"{self.path} ({size} bytes) is damaged or truncated: {error_line(error)}; download the file again"
                ) from error
        return self._file

    def get_slice(self, name: str) -> Any:
        """Returns a tensor that can be read in slices."""
        return self.file.get_slice(name)

    def get_tensor(self, name: str) -> np.ndarray:
        """Reads a tensor."""
        return self.file.get_tensor(name)

    def close(self) -> None:
        """Unmaps the file, which is opened again when it is needed."""
        self._file = None


@dataclass(frozen=True)
class Slices:
    """A tensor that is made of stored ones as its slices are read, with the interface of a slice of safetensors.

    Attributes:
        shape: Its shape.
        dtype: Name of its dtype in safetensors files.
        read: Returns the part at a tuple of slices.
    """

    shape: list[int]
    dtype: str
    read: Callable[[tuple[slice, ...]], np.ndarray]

    def get_shape(self) -> list[int]:
        """Returns the shape."""
        return self.shape

    def get_dtype(self) -> str:
        """Returns the name of the dtype."""
        return self.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.read(index)


class DerivedFile(TensorFile):
    """The file of one tensor that is made of stored ones, whatever name it is requested by.

    Args:
        files: The files with the stored ones.
        make: Returns the tensor, to be read in slices.
    """

    def __init__(self, files: Sequence[TensorFile], make: Callable[[], Any]) -> None:
        super().__init__(files[0].path)
        self.files, self.make = files, make

    def get_slice(self, name: str) -> Any:
        """Returns the tensor."""
        del name
        return self.make()

    def get_tensor(self, name: str) -> np.ndarray:
        """Reads the tensor."""
        found = self.get_slice(name)
        return found[(slice(None),) * len(found.get_shape())]

    def close(self) -> None:
        """Unmaps the files."""
        for file in self.files:
            file.close()


def renamed(file: TensorFile, stored: str) -> DerivedFile:
    """Returns the file of a tensor that has another name there."""
    return DerivedFile([file], lambda: file.get_slice(stored))


def _rows(file: TensorFile, stack: str, matrix: int, part: int, num_parts: int) -> DerivedFile:
    """Returns one of equally many rows of one matrix of a stack as a tensor of its own."""

    def make() -> Slices:
        stored = file.get_slice(stack)
        _, num_rows, *others = stored.get_shape()
        size = num_rows // num_parts

        def read(index: tuple[slice, ...]) -> np.ndarray:
            first, end, _ = index[0].indices(size)
            own = slice(part * size + first, part * size + end)
            return stored[(slice(matrix, matrix + 1), own, *index[1:])][0]

        return Slices([size, *others], stored.get_dtype(), read)

    return DerivedFile([file], make)


def _transposed(file: TensorFile, name: str) -> DerivedFile:
    """Returns a tensor with its last two dims in the other order."""

    def make() -> Slices:
        stored = file.get_slice(name)
        *others, rows, columns = stored.get_shape()

        def read(index: tuple[slice, ...]) -> np.ndarray:
            *before, row, column = index
            return stored[(*before, column, row)].swapaxes(-1, -2)

        return Slices([*others, columns, rows], stored.get_dtype(), read)

    return DerivedFile([file], make)


Tensors = dict[str, TensorFile]  # files by the names of their tensors


def find_tensors(folder: Path) -> Tensors:
    """Returns the tensors of a model's folder, from the headers of its files.

    Raises:
        ValueError: There are no safetensors files, one is missing, the index names a file outside of the folder, or the
            index and the files disagree.
    """
    weight_map = _weight_map(folder)
    files = {name: TensorFile(folder / name) for name in sorted(set(weight_map.values()))}
    missing = [name for name, file in files.items() if not file.path.is_file()]
    if missing:
        raise ValueError(
            f"{folder} is incomplete: {INDEX_NAME} names {list_names(missing)}, which is missing; download it again"
        )
    tensors: Tensors = {}
    for file_name, file in files.items():
        for name in file.file.keys():  # noqa: SIM118 - not a mapping
            if name in tensors:
                raise ValueError(
                    f"{folder}: {short_repr(name)} is in both {tensors[name].path.name} and {file_name}; a tensor must "
                    "be in one file"
                )
            tensors[name] = file
        file.close()
    absent = [name for name, file_name in weight_map.items() if tensors.get(name) is not files[file_name]]
    if absent:
        raise ValueError(
            f"{folder / INDEX_NAME} says that {short_repr(weight_map[absent[0]])} contains {short_repr(absent[0])}, "
            "which it does not; the index and the files belong to different models"
        )
    return tensors


def _weight_map(folder: Path) -> dict[str, str]:
    """Returns the names of all tensors, each with the name of its file.

    Raises:
        ValueError: There are no such files, or there are two whole sets of them.
    """
    shards = {path.name for path in folder.glob("model-*-of-*.safetensors")}
    if (folder / INDEX_NAME).is_file():
        weight_map = _read_index(folder / INDEX_NAME)
        if (folder / SINGLE_NAME).is_file() and SINGLE_NAME not in weight_map.values():
            raise ValueError(
                f"{folder} has two sets of weights, {SINGLE_NAME} and the shards of {INDEX_NAME}, as a folder has that "
                f"a model was saved to twice; delete {SINGLE_NAME}, or {INDEX_NAME} with its shards"
            )
    elif (folder / SINGLE_NAME).is_file():
        weight_map = dict.fromkeys(TensorFile(folder / SINGLE_NAME).file.keys(), SINGLE_NAME)
    else:
        pickled = next(iter(folder.glob("*.bin")), None)
        if shards:
            reason = f"{list_names(shards)} without {INDEX_NAME}, which says what they contain; download it too"
        elif pickled:
            reason = f"only {list_names([pickled.name])}, a pickle, which is never loaded; convert it"
        else:
            reason = f"no {SINGLE_NAME}"
        raise ValueError(f"{folder} has no safetensors weights: {reason}")
    if left := shards - set(weight_map.values()):
        logger.warning("%s has the shards %s, which are not of its model and are not read", folder, list_names(left))
    return weight_map


def _read_index(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{index} has weight_map={short_repr(weight_map)}; it must be an object with the file of each tensor"
        )
    for name in weight_map.values():
        if not isinstance(name, str) or not SHARD_NAME.fullmatch(name):
            raise ValueError(
                f"{index} names {short_repr(name)}, which is not a safetensors file in its folder and is never opened"
            )
    return weight_map


def check_finite(array: np.ndarray, name: str) -> None:
    """Refuses weights with infinite numbers or NaN; checking takes about a second per 10 GB.

    Raises:
        ValueError: There are such numbers.
    """
    kinds = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    word, exponent = DTYPES[kinds[array.dtype.name]]
    bits = np.ascontiguousarray(array).view(word).reshape(-1)
    for start in range(0, bits.size, CHECKED_NUMBERS):
        if (bits[start : start + CHECKED_NUMBERS] & word(exponent)).max() == exponent:
            num = int((~np.isfinite(array.astype(np.float32))).sum())
            raise ValueError(
                f"{name} has {num:,} numbers of {array.size:,} that are infinite or NaN; the model is damaged, or its "
                "training diverged: use an earlier checkpoint"
            )


def cast(array: np.ndarray, dtype: Any) -> np.ndarray:
    """Returns the array in a dtype; None keeps its own."""
    return array if dtype is None else array.astype(dtype)


# Prefixes of text models within others, with what stands there in a text model alone.
_TEXT_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
# Older prefixes in models that see images, with those of today's.
_OLDER_PREFIXES = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("vision_tower.vision_model.", "model.vision_tower."),
    ("model.vision_tower.vision_model.", "model.vision_tower."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)
# Tensors of the parts that see images.
_IMAGES = re.compile(r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector)\.")
# Layers of these models that predict several tokens ahead, which have names of their own.
_AHEAD = re.compile(r"mtp\.")
_WITH_AHEAD = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"})
# Experts that released models of these kinds have in stacks, and files of transformers one by one.
_STACKS = re.compile(r"(model\.(?:language_model\.)?layers\.\d{1,4}\.mlp\.experts)\.(gate_up_proj|down_proj)")
_WITH_STACKS = frozenset({"qwen3_5_moe", "qwen3_5_moe_text"})
# Released models of these kinds have stacks whose last two dims are in the other order than in files of transformers.
_WITH_EITHER_ORDER = frozenset({"qwen3_vl_moe"})
_LAYER = re.compile(r"model\.layers\.(\d{1,4})\.")


def own_tensors(hf: Mapping[str, Any], config: ModelConfig, tensors: Tensors, folder: Path) -> Tensors:
    """Returns the tensors of a model by the names of its specs.

    Left out are layers that predict several tokens ahead, and the parts of a model that see images if only its text
    part is supported.

    Args:
        hf: Parsed `config.json`, of the whole model.
        config: Architecture of the model.
        tensors: All tensors of the folder.
        folder: Folder of the model, for the log.
    """
    found = dict(tensors)
    if has_text_part(hf):
        found = _renamed({name: file for name, file in tensors.items() if not _IMAGES.match(name)}, _TEXT_PREFIXES)
    elif hf.get("model_type") in VISION_FAMILIES:
        found = _renamed(tensors, _OLDER_PREFIXES)
    if num_ahead := hf.get("num_nextn_predict_layers") or 0:
        ahead = range(config.num_layers, config.num_layers + num_ahead)
        layers = {name: int(match[1]) for name in found if (match := _LAYER.match(name))}
        found = {name: file for name, file in found.items() if layers.get(name, -1) not in ahead}
    if hf.get("model_type") in _WITH_AHEAD:
        found = {name: file for name, file in found.items() if not _AHEAD.match(name)}
    num_left = len(found)
    if hf.get("model_type") in _WITH_STACKS:
        found = _unstacked(found)
    if hf.get("model_type") in _WITH_EITHER_ORDER:
        found = _in_released_order(found, config.hidden_size)
    if num_left < len(tensors):
        logger.warning(
            "%s: %d of its %d tensors are of parts that groupax does not have, which see images or predict several "
            "tokens ahead; they are neither read nor saved",
            *(folder, len(tensors) - num_left, len(tensors)),
        )
    return found


def _renamed(tensors: Tensors, prefixes: tuple[tuple[str, str], ...]) -> dict[str, TensorFile]:
    found = {}
    for name, file in tensors.items():
        own = next((new + name.removeprefix(old) for old, new in prefixes if name.startswith(old)), name)
        found[own] = file if own == name else renamed(file, name)
    return found


def _unstacked(tensors: Tensors) -> Tensors:
    """Returns the tensors with the matrices of stacked experts by the names that each expert's would have."""
    found: Tensors = {}
    for name, file in tensors.items():
        match = _STACKS.fullmatch(name)
        shape = file.get_slice(name).get_shape() if match else []
        if match is None or len(shape) != 3 or not 1 <= shape[0] <= MAX_EXPERTS:
            found[name] = file
            continue
        parts = match[2].removesuffix("_proj").split("_")
        found |= {
            f"{match[1]}.{expert}.{part}_proj.weight": _rows(file, name, expert, index, len(parts))
            for expert in range(shape[0])
            for index, part in enumerate(parts)
        }
        file.close()
    return found


def _in_released_order(tensors: Tensors, hidden_size: int) -> Tensors:
    """Returns the tensors with stacks of experts in the order of released models, if their shape tells the order.

    Released are [E, D, 2 F] for gates and [E, F, D] for the matrices after them.

    Args:
        tensors: Tensors by name.
        hidden_size: D.
    """
    found = dict(tensors)
    for name, file in tensors.items():
        if match := _STACKS.fullmatch(name):
            _, *sizes = file.get_slice(name).get_shape() or [0]
            file.close()
            is_gate = match[2] == "gate_up_proj"
            if len(sizes) == 2 and sizes[0] != sizes[1] and sizes[is_gate] == hidden_size:
                found[name] = _transposed(file, name)
    return found
