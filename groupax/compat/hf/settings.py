"""Arguments of transformers and PEFT as groupax's settings: loading, quantization, adapters, `generate`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from groupax.compat.fields import warn
from groupax.models.lora import as_lora_config
from groupax.models.weights.checkpoint import Model
from groupax.settings.fields import nearest
from groupax.settings.optimizer import BaseWeights

# Arguments of `from_pretrained` without effect in groupax, each with the reason.
INERT = {
    "attn_implementation": "it is a training setting: set it in TRL's model_init_kwargs or in groupax's GRPOConfig",
    "cache_dir": "the hub's cache is chosen by HF_HUB_CACHE",
    "device_map": "weights are put on all devices",
    "local_files_only": "the hub's client is offline with HF_HUB_OFFLINE=1",
    "low_cpu_mem_usage": "weights are read straight to the devices",
    "max_memory": "weights are put on all devices",
    "token": "set HF_TOKEN",
    "trust_remote_code": "groupax never runs code from a model's folder",
    "use_cache": "the engine always has a cache",
    "use_safetensors": "weights are always safetensors",
}


@dataclass
class BitsAndBytesConfig:
    """The quantization of weights during loading, with fields of transformers' class."""

    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: Any = None  # the trainer's setting dtype chooses it
    bnb_4bit_quant_storage: Any = None  # codes are always stored as bytes


class LoraConfig:
    """The settings of an adapter, with the fields of PEFT's class; validated like a `LoraConfig` of PEFT itself."""

    def __init__(self, **settings: Any) -> None:
        self.peft_type = "LORA"
        self.__dict__ |= settings
        as_lora_config(self)


def base_weights(quantization_config: Any) -> BaseWeights:
    """Returns the setting `base_weights` that a quantization config requests.

    Args:
        quantization_config: A `BitsAndBytesConfig` of transformers or of this package, or a dict of its fields.

    Raises:
        ValueError: The config requests another kind of quantization.
    """
    if quantization_config is None:
        return "same"
    get = (
        quantization_config.get
        if isinstance(quantization_config, Mapping)
        else lambda name, default=None: getattr(quantization_config, name, default)
    )
    if get("load_in_8bit"):
        return "int8"
    if not get("load_in_4bit"):
        raise ValueError(
            f"quantization_config {type(quantization_config).__name__} sets neither load_in_4bit nor load_in_8bit, "
            "the quantizations that groupax applies while loading"
        )
    kind = get("bnb_4bit_quant_type", "fp4")
    if kind != "nf4" or not get("bnb_4bit_use_double_quant"):
        warn(
            f"4-bit weights are nf4 with double quantization in groupax (requested: {kind}, "
            f"bnb_4bit_use_double_quant={bool(get('bnb_4bit_use_double_quant'))})"
        )
    return "nf4"


def warn_inert(given: Mapping[str, Any], quiet: set[str], function: str) -> None:
    """Warns about arguments without effect in groupax, except those in `quiet`.

    Raises:
        TypeError: An argument is unknown.
    """
    for name, value in given.items():
        if name in INERT:
            warn(f"{function}'s {name}={value!r} changes nothing in groupax: {INERT[name]}")
        elif name not in quiet:
            raise TypeError(f"{function} has no argument {name!r}{nearest(name, INERT)}")


# Arguments of `generate` that a model's generation_config.json may set, with transformers' defaults.
GENERATION: dict[str, Any] = {
    "max_new_tokens": None,
    "max_length": None,
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "num_return_sequences": 1,
    "pad_token_id": None,
}
DEFAULT_NEW_TOKENS = 20  # without max_new_tokens and max_length


def generation_settings(model: Model, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of `generate`: the arguments, else the model's generation config, else the defaults."""
    stored = model.generation_config or model.hf_config  # older folders have generation settings in config.json
    sources = [{name: source.get(name) for name in GENERATION} for source in (stored, given)]
    settings = GENERATION | {name: value for each in sources for name, value in each.items() if value is not None}
    if given.get("max_length") is not None and settings["max_new_tokens"] is not None:
        used = f"max_new_tokens={settings['max_new_tokens']} is used"
        warn(f"generate's max_length={given['max_length']} changes nothing: {used}")
    return settings
