"""From a Hugging Face `config.json` to a `ModelConfig`, one module per family. Imports no jax."""

from collections.abc import Callable, Mapping
from typing import Any

from groupax.models.config import ModelConfig
from groupax.models.families import llama, qwen2, qwen3

FAMILIES: dict[str, Callable[[Mapping[str, Any]], ModelConfig]] = {
    "llama": llama.read_config,
    "qwen2": qwen2.read_config,
    "qwen3": qwen3.read_config,
}


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """The `ModelConfig` that a parsed `config.json` describes.

    Raises:
        ValueError: the `model_type` is missing or unsupported, a size is missing, or the file asks for
            something that the family here does not do. Nothing is ignored in silence.
    """
    model_type = hf.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} is not supported; supported are {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type](hf)
