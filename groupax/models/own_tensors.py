"""The tensors of a folder that groupax reads, by the names that its table of weights has."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families import VISION_FAMILIES, has_text_part
from groupax.models.tensor_files import StackedRows, TensorFile, Tensors
from groupax.storage.model_json import MAX_EXPERTS

logger = logging.getLogger(__name__)
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
        found = {name: file for name, file in found.items() if _layer_index(name) not in ahead}
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
        found[own] = file if own == name else TensorFile(file.path, {own: name})
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
        parts, stored = match[2].removesuffix("_proj").split("_"), file.stored_names.get(name, name)
        rows = {
            f"{match[1]}.{expert}.{part}_proj.weight": StackedRows(stored, expert, index, len(parts))
            for expert in range(shape[0])
            for index, part in enumerate(parts)
        }
        file.close()
        found |= dict.fromkeys(rows, TensorFile(file.path, rows=rows))
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
                found[name] = TensorFile(file.path, {name: file.stored_names.get(name, name)}, transposed={name})
    return found


def _layer_index(name: str) -> int:
    match = _LAYER.match(name)
    return int(match[1]) if match else -1
