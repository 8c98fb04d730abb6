"""Adapters as PEFT has them on disk: `adapter_config.json` and `adapter_model.safetensors`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from groupax.models.adapted import LowRank, Params
from groupax.models.config import ModelConfig
from groupax.models.lora import PREFIX, Adapter, LoRAConfig, adapter_specs, module_name
from groupax.models.specs import model_specs
from groupax.parallel.transfer import placed

CONFIG_NAME = "adapter_config.json"
TENSORS_NAME = "adapter_model.safetensors"


def adapter_json(adapter: Adapter, config: ModelConfig) -> dict[str, Any]:
    """The contents of `adapter_config.json`."""
    lora = adapter.config
    is_pattern = isinstance(lora.target_modules, str) and lora.target_modules != "all-linear"
    named = _target_names(config, lora) if isinstance(lora.target_modules, str) else list(lora.target_modules)
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if config.num_labels else "CAUSAL_LM",
        "base_model_name_or_path": adapter.base_name,
        "inference_mode": True,
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "lora_dropout": lora.lora_dropout,
        "target_modules": lora.target_modules if is_pattern else named,
        "bias": lora.bias,
        "use_rslora": lora.use_rslora,
        "modules_to_save": list(lora.modules_to_save) or None,
        "init_lora_weights": True,
        "fan_in_fan_out": False,
    }


def _target_names(config: ModelConfig, lora: LoRAConfig) -> list[str]:
    """Names that stand for the adapted modules and no others: how they end, or all of it where others end so too."""
    specs = jax.tree.leaves(adapter_specs(config, lora), is_leaf=_is_change)
    names = [module_name(spec.a).removesuffix(".lora_A").removeprefix(PREFIX) for spec in specs if _is_change(spec)]
    weights = [spec for spec in jax.tree.leaves(model_specs(config)) if spec.name.endswith(".weight")]
    others = {_ending(name) for name in set(map(module_name, weights)) - set(names)}
    return list(dict.fromkeys(name if _ending(name) in others else _ending(name) for name in names))


def _ending(module: str) -> str:
    return module.rpartition(".")[2]


def _is_change(spec: Any) -> bool:
    return isinstance(spec, LowRank)


def write_tensors(config: ModelConfig, lora: LoRAConfig, trained: Params, folder: Path) -> None:
    """Write `adapter_model.safetensors`, in the dtype of what was trained."""
    specs = jax.tree.leaves(adapter_specs(config, lora))
    pairs = zip(specs, jax.tree.leaves(trained), strict=True)
    tensors = {spec.name: np.ascontiguousarray(np.asarray(array)) for spec, array in pairs}
    save_file(tensors, folder / TENSORS_NAME, metadata={"format": "pt"})
    (folder / TENSORS_NAME).chmod(0o644)


def read_tensors(config: ModelConfig, lora: LoRAConfig, folder: Path, sharding: Any) -> Params:
    """What `adapter_model.safetensors` holds, as float32 on the devices, in the structure of `adapter_specs`.

    Raises:
        ValueError: the file is missing or damaged, or does not hold what `adapter_config.json` says.
    """
    path = folder / TENSORS_NAME
    if not path.is_file():
        raise ValueError(f"{folder} has no {TENSORS_NAME}; pickled adapters are never loaded")
    try:
        with safe_open(path, framework="np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} ({path.stat().st_size} bytes) is damaged or truncated: {error}") from error
    specs = adapter_specs(config, lora)
    expected = {spec.name: spec for spec in jax.tree.leaves(specs)}
    _check(expected, tensors, path)
    return jax.tree.map(
        lambda spec: placed(tensors[spec.name].astype(np.float32), sharding),
        specs,
    )


def _check(expected: Mapping[str, Any], tensors: Mapping[str, np.ndarray], path: Path) -> None:
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or unknown:
        raise ValueError(
            f"{path} does not hold what {CONFIG_NAME} says for this base: it lacks {missing[:3]}, and there is no "
            f"place for {unknown[:3]}"
        )
    for name, spec in expected.items():
        if tensors[name].shape != spec.shape:
            raise ValueError(f"{path}: {name} has shape {list(tensors[name].shape)}, not {list(spec.shape)}")
