"""Loading models and adapters with the arguments of transformers and PEFT."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from groupax.compat.hf.model import CausalLM
from groupax.compat.hf.settings import base_weights, warn_inert
from groupax.compat.hf.torch_models import is_torch_model, read_torch_model
from groupax.models.lora import as_lora_config
from groupax.models.weights.checkpoint import Model, add_adapter, load_adapter, load_model
from groupax.storage.folders import at_revision, resolve_folder

DTYPES = ("float32", "bfloat16", "float16")


class AutoModelForCausalLM:
    """A loader of models with the interface of transformers' class."""

    @staticmethod
    def from_pretrained(
        name_or_path: Any,
        quantization_config: Any = None,
        dtype: Any = None,
        torch_dtype: Any = None,
        revision: str | None = None,
        **inert: Any,
    ) -> CausalLM:
        """Loads a model from a folder or a hub id.

        Args:
            name_or_path: Folder or hub id of a model or an adapter.
            quantization_config: Quantization of the layers' matrices while they are read.
            dtype: Dtype of the weights in memory; None and "auto" keep the stored one.
            torch_dtype: Former name of `dtype`.
            revision: Branch, tag or commit of a hub id.
            inert: Arguments without effect; a warning gives the reason.

        Raises:
            TypeError: An argument is unknown.
        """
        warn_inert(inert, set(), "from_pretrained")
        weights = base_weights(quantization_config)
        named = name_or_path if revision in (None, "main") else at_revision(str(name_or_path), revision)
        return CausalLM(load_model(named, _dtype(dtype or torch_dtype), weights=weights))


class PeftModel(CausalLM):
    """A loader of adapters with the interface of PEFT's class."""

    @staticmethod
    def from_pretrained(model: CausalLM, adapter: Any, **inert: Any) -> CausalLM:
        """Returns the model with an adapter from a folder or a hub id, without copying the base weights."""
        warn_inert(inert, {"is_trainable", "adapter_name"}, "PeftModel.from_pretrained")
        adapted, folder = load_adapter(model.model, adapter), resolve_folder(adapter)
        has_tokenizer = (folder / "tokenizer_config.json").is_file()
        return CausalLM(replace(adapted, source=folder) if has_tokenizer else adapted)


def get_peft_model(model: CausalLM, peft_config: Any, **inert: Any) -> CausalLM:
    """Returns the model with a new adapter."""
    warn_inert(inert, {"adapter_name"}, "get_peft_model")
    return CausalLM(add_adapter(model.model, as_lora_config(peft_config)))


def prepare_model_for_kbit_training(model: CausalLM, **inert: Any) -> CausalLM:
    """Returns the model itself: the base of an adapter is never trained, and its norms are computed in float32."""
    known = {"use_gradient_checkpointing", "gradient_checkpointing_kwargs"}
    warn_inert(inert, known, "prepare_model_for_kbit_training")
    return model


def as_model(model: Any) -> str | Path | Model:
    """Returns a model as the native trainer accepts it; of a PyTorch model, the weights that it has now.

    Args:
        model: Folder, hub id, model of groupax or of `compat.hf`, or PyTorch model.

    Raises:
        ValueError: The model is none of these.
    """
    if isinstance(model, CausalLM):
        return model.model
    if isinstance(model, (str, Path, Model)):
        return model
    if not is_torch_model(model):
        raise ValueError(f"model must be a folder, a hub id or a model, got {type(model).__name__}")
    return read_torch_model(model)


def _dtype(dtype: Any) -> Any:
    """Returns the name of a NumPy, JAX or PyTorch dtype; None for None and "auto"."""
    name = str(getattr(dtype, "name", dtype)).removeprefix("torch.") if dtype is not None else "auto"
    if name == "auto":
        return None
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return name
