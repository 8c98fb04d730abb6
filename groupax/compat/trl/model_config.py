"""TRL's `ModelConfig`, and the adapter and quantization that it describes. Imports no jax."""

import importlib.util
from dataclasses import dataclass, field
from typing import Any

from groupax.compat.arguments import accepting_more


@accepting_more
@dataclass
class ModelConfig:
    """A model and its adapter, with the fields of TRL's class.

    Raises:
        ValueError: 8 and 4 bits are both requested.
    """

    model_name_or_path: str | None = None
    model_revision: str = "main"
    dtype: str | None = field(default="float32", metadata={"choices": ["auto", "bfloat16", "float16", "float32"]})
    attn_implementation: str | None = None
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: list[str] | None = None
    lora_target_parameters: list[str] | None = None
    lora_modules_to_save: list[str] | None = None
    lora_task_type: str = "CAUSAL_LM"
    use_rslora: bool = False
    use_dora: bool = False
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = field(default="nf4", metadata={"choices": ["fp4", "nf4"]})
    use_bnb_nested_quant: bool = False
    bnb_4bit_quant_storage: str | None = None

    def __post_init__(self) -> None:
        """Checks the quantization, and takes a single target module out of its list, as it may be "all-linear"."""
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("load_in_8bit and load_in_4bit are both set; leave one of them out")
        if isinstance(self.lora_target_modules, (list, tuple)) and len(self.lora_target_modules) == 1:
            self.lora_target_modules = self.lora_target_modules[0]  # pyright: ignore[reportAttributeAccessIssue]


def get_peft_config(model_args: Any) -> Any:
    """Returns the adapter that a `ModelConfig`, TRL's or this one, describes; None without `use_peft`.

    It is a `LoraConfig` of PEFT where PEFT is installed, else one of `groupax.compat.hf`.
    """
    if not model_args.use_peft:
        return None
    if _is_installed("peft", "torch"):
        from peft import LoraConfig
    else:
        from groupax.compat.hf import LoraConfig
    more: dict[str, Any] = {}
    if model_args.lora_target_parameters is not None:
        more["target_parameters"] = model_args.lora_target_parameters
    return LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        target_modules=model_args.lora_target_modules,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        bias="none",
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        modules_to_save=model_args.lora_modules_to_save,
        **more,
    )


def get_quantization_config(model_args: Any) -> Any:
    """Returns the quantization that a `ModelConfig` describes; None without `load_in_4bit` and `load_in_8bit`.

    It is a `BitsAndBytesConfig` of transformers where bitsandbytes is installed, else one of `groupax.compat.hf`.
    """
    if not (model_args.load_in_4bit or model_args.load_in_8bit):
        return None
    if _is_installed("bitsandbytes", "torch"):
        from transformers import BitsAndBytesConfig
    else:
        from groupax.compat.hf import BitsAndBytesConfig
    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=model_args.dtype,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
    )


def get_kbit_device_map() -> None:
    """Returns None, as weights are put on all devices; scripts of TRL before 1.0 pass it as `device_map`."""


def _is_installed(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages)
