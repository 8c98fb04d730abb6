"""PEFT's format of adapters on disk: `adapter_config.json` and `adapter_model.safetensors`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from groupax.models.adapted import LowRank, Params
from groupax.models.config import ModelConfig
from groupax.models.lora import PREFIX, Adapter, LoRAConfig, adapter_specs, as_lora_config, module_name
from groupax.models.specs import model_specs
from groupax.models.tensor_files import DTYPES, INDEX_NAME, SINGLE_NAME, TensorFile, check_finite
from groupax.parallel.collectives import to_device
from groupax.storage.folders import ADAPTER_NAME as CONFIG_NAME
from groupax.storage.folders import at_revision, split_revision
from groupax.storage.model_json import FLAG, TEXT, TEXTS, Kind, above, integer, is_number, validate
from groupax.terminal.printable import short_repr

TENSORS_NAME = "adapter_model.safetensors"
# The schema of the keys of `adapter_config.json` that are read here.
SETTINGS: Mapping[str, Kind] = {
    "bias": TEXT.or_null(),
    "lora_alpha": replace(above(0), is_number=False).or_null(),
    "lora_dropout": Kind(
        "a number of at least 0 and below 1", lambda value: is_number(value) and 0 <= value < 1
    ).or_null(),
    "modules_to_save": TEXTS,
    "peft_type": TEXT,
    "r": integer().or_null(),
    "target_modules": Kind("a string or a list of strings", lambda value: TEXT.accepts(value) or TEXTS.accepts(value)),
    "use_rslora": FLAG.or_null(),
}


def adapter_config_dict(adapter: Adapter, config: ModelConfig) -> dict[str, Any]:
    """Returns the contents of `adapter_config.json`."""
    lora = adapter.config
    is_pattern = isinstance(lora.target_modules, str) and lora.target_modules != "all-linear"
    targets = _target_names(config, lora) if isinstance(lora.target_modules, str) else list(lora.target_modules)
    base, revision = (None, None) if adapter.base_name is None else split_revision(adapter.base_name)
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if config.num_labels else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "lora_dropout": lora.lora_dropout,
        "target_modules": lora.target_modules if is_pattern else targets,
        "bias": lora.bias,
        "use_rslora": lora.use_rslora,
        "modules_to_save": list(lora.modules_to_save) or None,
        "init_lora_weights": True,
        "fan_in_fan_out": False,
    }


def _target_names(config: ModelConfig, lora: LoRAConfig) -> list[str]:
    """Returns names that match the adapted modules only: their last components, or full names if others share these."""
    specs = jax.tree.leaves(adapter_specs(config, lora), is_leaf=_is_low_rank)
    names = [module_name(spec.a).removesuffix(".lora_A").removeprefix(PREFIX) for spec in specs if _is_low_rank(spec)]
    weights = [spec for spec in jax.tree.leaves(model_specs(config)) if spec.name.endswith(".weight")]
    others = {_last_component(name) for name in set(map(module_name, weights)) - set(names)}
    return list(dict.fromkeys(name if _last_component(name) in others else _last_component(name) for name in names))


def _last_component(module: str) -> str:
    return module.rpartition(".")[2]


def _is_low_rank(spec: Any) -> bool:
    return isinstance(spec, LowRank)


def write_tensors(config: ModelConfig, lora: LoRAConfig, trained: Params, folder: Path) -> None:
    """Writes `adapter_model.safetensors`, in the dtype of the trained weights."""
    specs = jax.tree.leaves(adapter_specs(config, lora))
    pairs = zip(specs, jax.tree.leaves(trained), strict=True)
    tensors = {spec.name: np.ascontiguousarray(np.asarray(array)) for spec, array in pairs}
    save_file(tensors, folder / TENSORS_NAME, metadata={"format": "pt"})
    (folder / TENSORS_NAME).chmod(0o644)


def read_tensors(config: ModelConfig, lora: LoRAConfig, folder: Path, sharding: Any) -> Params:
    """Reads `adapter_model.safetensors` as float32 weights on the devices, in the structure of `adapter_specs`.

    Raises:
        ValueError: The file is missing or damaged, or its tensors do not match `adapter_config.json`.
    """
    path = folder / TENSORS_NAME
    if whole := [name for name in (SINGLE_NAME, INDEX_NAME) if (folder / name).is_file()]:
        raise ValueError(
            f"{folder} has an adapter ({CONFIG_NAME}) and a whole model ({whole[0]}), as a folder has that both were "
            "saved to; move one of them to another folder"
        )
    if not path.is_file():
        raise ValueError(f"{folder} has no {TENSORS_NAME}; pickled adapters are never loaded")
    file = TensorFile(path)
    try:
        specs = adapter_specs(config, lora)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG_NAME}: {error}") from error
    _check_tensors({spec.name: spec for spec in jax.tree.leaves(specs)}, file.file, path)

    def read(spec: Any) -> Any:
        array = file.get_tensor(spec.name)
        check_finite(array, f"{path}: {spec.name}")
        return to_device(array.astype(np.float32), sharding)

    return jax.tree.map(read, specs)


def _check_tensors(expected: Mapping[str, Any], file: Any, path: Path) -> None:
    found = set(file.keys())
    missing, unknown = sorted(expected.keys() - found), sorted(found - expected.keys())
    if missing or unknown:
        raise ValueError(
            f"{path} does not match {CONFIG_NAME} for this base: it lacks {missing[:3]}, and {short_repr(unknown)} "
            "does not belong there"
        )
    for name, spec in expected.items():
        shape, dtype = file.get_slice(name).get_shape(), file.get_slice(name).get_dtype()
        if tuple(shape) != spec.shape:
            raise ValueError(f"{path}: {name} has shape {shape}, not {list(spec.shape)}")
        if dtype not in DTYPES:
            raise ValueError(f"{path}: {name} has dtype {dtype}; supported are {', '.join(DTYPES)}")


def base_name(content: Mapping[str, Any], folder: Path) -> str:
    """Returns the base that a parsed `adapter_config.json` names, with its revision if it is on the hub.

    Raises:
        ValueError: It names none.
    """
    name = content.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{folder / CONFIG_NAME} does not name the adapter's base; pass it explicitly")
    revision = content.get("revision")
    return at_revision(name, revision) if isinstance(revision, str) else name


def read_lora_config(content: Mapping[str, Any], folder: Path) -> LoRAConfig:
    """Reads the settings of a trained adapter from a parsed `adapter_config.json`.

    Raises:
        ValueError: A value is not of its key's kind, or requests something unsupported.
    """
    content = validate(content, SETTINGS, str(folder / CONFIG_NAME))
    try:
        return as_lora_config(content, has_weights=True)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG_NAME}: {error}") from error
