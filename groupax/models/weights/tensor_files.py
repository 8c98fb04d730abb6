"""Safetensors files of a folder: which tensors they contain, by the names in the table of weights, and reading them."""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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

    def tensors(self) -> "Tensors":
        """Returns the file's tensors by name, from its header."""
        found = {name: self._tensor(name) for name in self.file.keys()}  # noqa: SIM118 - not a mapping
        self.close()
        return found

    def _tensor(self, name: str) -> "Tensor":
        stored = self.file.get_slice(name)
        shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
        return Tensor(shape, dtype, lambda index: self.file.get_slice(name)[index], (self,))

    def close(self) -> None:
        """Unmaps the file, which is opened again when it is needed."""
        self._file = None


@dataclass(frozen=True)
class Tensor:
    """A tensor that is read in slices from a file, or made of such tensors as it is read.

    Attributes:
        shape: Its shape.
        dtype: Name of its dtype in safetensors files.
        read: Returns the part at a tuple of slices, one per dim.
        files: Files that it is read from.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[tuple[slice, ...]], np.ndarray]
    files: tuple[TensorFile, ...]

    @property
    def path(self) -> Path:
        """Path of the first of its files."""
        return self.files[0].path

    def whole(self) -> np.ndarray:
        """Reads the tensor."""
        return self.read((slice(None),) * len(self.shape))

    def close(self) -> None:
        """Unmaps the files."""
        for file in self.files:
            file.close()

    def check(self, shape: tuple[int, ...], name: str, config: str = "config.json") -> None:
        """Checks that it is a weight of this shape.

        Args:
            shape: Shape of the weight.
            name: Where the tensor is and its name, for an error.
            config: File that gives the shape, for an error.

        Raises:
            ValueError: It has another shape or an unsupported dtype.
        """
        if self.shape != shape:
            raise ValueError(f"{name} has shape {list(self.shape)}, {config} says {list(shape)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"{name} has dtype {self.dtype}; supported are {', '.join(DTYPES)}")


Tensors = dict[str, Tensor]


def _rows(stack: Tensor, matrix: int, part: int, num_parts: int) -> Tensor:
    """Returns one of equally many rows of one matrix of a stack as a tensor of its own."""
    _, num_rows, *others = stack.shape
    size = num_rows // num_parts

    def read(index: tuple[slice, ...]) -> np.ndarray:
        first, end, _ = index[0].indices(size)
        own = slice(part * size + first, part * size + end)
        return stack.read((slice(matrix, matrix + 1), own, *index[1:]))[0]

    return replace(stack, shape=(size, *others), read=read)


def _transposed(stored: Tensor) -> Tensor:
    """Returns a tensor with its last two dims in the other order."""
    *others, rows, columns = stored.shape

    def read(index: tuple[slice, ...]) -> np.ndarray:
        *before, row, column = index
        return stored.read((*before, column, row)).swapaxes(-1, -2)

    return replace(stored, shape=(*others, columns, rows), read=read)


def find_tensors(folder: Path) -> Tensors:
    """Returns the tensors of a model's folder, from the headers of its files.

    Raises:
        ValueError: There are no safetensors files, one is missing, there are two whole sets of them, or the index names
            a file outside of the folder.
    """
    shards = {path.name for path in folder.glob("model-*-of-*.safetensors")}
    if (folder / INDEX_NAME).is_file():
        names = _files_of_index(folder / INDEX_NAME)
        if (folder / SINGLE_NAME).is_file() and SINGLE_NAME not in names:
            raise ValueError(
                f"{folder} has two sets of weights, {SINGLE_NAME} and the shards of {INDEX_NAME}, as a folder has that "
                f"a model was saved to twice; delete {SINGLE_NAME}, or {INDEX_NAME} with its shards"
            )
    elif (folder / SINGLE_NAME).is_file():
        names = {SINGLE_NAME}
    else:
        pickled = next(iter(folder.glob("*.bin")), None)
        if shards:
            reason = f"{list_names(shards)} without {INDEX_NAME}, which says what they contain; download it too"
        elif pickled:
            reason = f"only {list_names([pickled.name])}, a pickle, which is never loaded; convert it"
        else:
            reason = f"no {SINGLE_NAME}"
        raise ValueError(f"{folder} has no safetensors weights: {reason}")
    if left := shards - names:
        logger.warning("%s has the shards %s, which are not of its model and are not read", folder, list_names(left))
    if missing := [name for name in sorted(names) if not (folder / name).is_file()]:
        raise ValueError(
            f"{folder} is incomplete: {INDEX_NAME} names {list_names(missing)}, which is missing; download it again"
        )
    tensors: Tensors = {}
    for name in sorted(names):
        tensors |= TensorFile(folder / name).tensors()
    return tensors


def _files_of_index(index: Path) -> set[str]:
    """Returns the files that an index names; what they contain is in their headers."""
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
    return set(weight_map.values())


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
    ("visual.", "model.visual."),
    *((f"model.{part}.", f"model.language_model.{part}.") for part in ("embed_tokens", "layers", "norm")),
)
# Prefixes in released GPT-2 models, whose files are of the decoder alone.
_DECODER_PREFIXES = tuple((f"{name}.", f"transformer.{name}.") for name in ("wte", "wpe", "h", "ln_f"))
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
    """
    found = dict(tensors)
    if has_text_part(hf):
        found = _renamed({name: each for name, each in tensors.items() if not _IMAGES.match(name)}, _TEXT_PREFIXES)
    elif hf.get("model_type") in VISION_FAMILIES:
        found = _renamed(tensors, _OLDER_PREFIXES)
    elif hf.get("model_type") == "gpt2":
        found = _renamed(tensors, _DECODER_PREFIXES)
    if num_ahead := hf.get("num_nextn_predict_layers") or 0:
        ahead = range(config.num_layers, config.num_layers + num_ahead)
        layers = {name: int(match[1]) for name in found if (match := _LAYER.match(name))}
        found = {name: each for name, each in found.items() if layers.get(name, -1) not in ahead}
    if hf.get("model_type") in _WITH_AHEAD:
        found = {name: each for name, each in found.items() if not _AHEAD.match(name)}
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


def _renamed(tensors: Tensors, prefixes: tuple[tuple[str, str], ...]) -> Tensors:
    def own(name: str) -> str:
        return next((new + name.removeprefix(old) for old, new in prefixes if name.startswith(old)), name)

    return {own(name): tensor for name, tensor in tensors.items()}


def _unstacked(tensors: Tensors) -> Tensors:
    """Returns the tensors with the matrices of stacked experts by the names that each expert's would have."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        match = _STACKS.fullmatch(name)
        if match is None or len(tensor.shape) != 3 or not 1 <= tensor.shape[0] <= MAX_EXPERTS:
            found[name] = tensor
            continue
        parts = match[2].removesuffix("_proj").split("_")
        found |= {
            f"{match[1]}.{expert}.{part}_proj.weight": _rows(tensor, expert, index, len(parts))
            for expert in range(tensor.shape[0])
            for index, part in enumerate(parts)
        }
    return found


def _in_released_order(tensors: Tensors, hidden_size: int) -> Tensors:
    """Returns the tensors with stacks of experts in the order of released models, if their shape tells the order.

    Released are [E, D, 2 F] for gates and [E, F, D] for the matrices after them.
    """
    found = dict(tensors)
    for name, tensor in tensors.items():
        match, sizes = _STACKS.fullmatch(name), tensor.shape[1:]
        if match is None or len(sizes) != 2 or sizes[0] == sizes[1]:
            continue
        if sizes[match[2] == "gate_up_proj"] == hidden_size:
            found[name] = _transposed(tensor)
    return found
