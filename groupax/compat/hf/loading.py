"""Loading models and adapters with the arguments of transformers and PEFT, and models of PyTorch.

The weights of a PyTorch model are read, and the trained ones are written back in place. PyTorch is imported only where
such a model is given.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from groupax.compat.fields import warn
from groupax.compat.hf.model import CausalLM, warn_inert
from groupax.core.settings.optimizer import BaseWeights
from groupax.core.storage.folders import at_revision, read_json, resolve_folder
from groupax.models.lora import ADAPTER_NAME, adapter_specs, as_lora_config, read_lora_config
from groupax.models.specs import model_specs
from groupax.models.weights.checkpoint import Model, add_adapter, load_adapter, load_model
from groupax.models.weights.saving import host_tensors, param_leaves


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
    given = quantization_config
    get = given.get if isinstance(given, Mapping) else lambda name: getattr(given, name, None)
    if skipped := get("llm_int8_skip_modules"):
        warn(f"llm_int8_skip_modules={skipped} changes nothing in groupax: all matrices of the layers are quantized")
    if str(get("bnb_4bit_compute_dtype")).removeprefix("torch.") == "float16":
        warn("bnb_4bit_compute_dtype=float16 changes nothing in groupax: bf16 of the config chooses the dtype")
    if not get("load_in_4bit"):
        raise ValueError(
            f"quantization_config {type(quantization_config).__name__} does not set load_in_4bit, the only "
            "quantization that groupax applies while loading"
        )
    kind, is_double = get("bnb_4bit_quant_type") or "fp4", bool(get("bnb_4bit_use_double_quant"))
    if kind != "nf4" or not is_double:
        warn(
            f"4-bit weights are nf4 with double quantization in groupax (requested: {kind}, "
            f"bnb_4bit_use_double_quant={is_double})"
        )
    return "nf4"


def is_torch_model(model: Any) -> bool:
    """Returns whether the object is a PyTorch model with the methods of transformers."""
    return hasattr(model, "save_pretrained") and hasattr(model, "state_dict") and hasattr(model, "named_modules")


def is_peft_model(model: Any) -> bool:
    """Returns whether the PyTorch model is one of PEFT."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def wrap_with_peft(model: Any, peft_config: Any, seed: int) -> Any:
    """Returns the PyTorch model with a new adapter of PEFT, drawn by the seed; PyTorch's state stays as it was."""
    import peft
    import torch

    as_lora_config(peft_config)  # refuses what groupax does not support
    if isinstance(peft_config, LoraConfig):
        peft_config = peft.LoraConfig(**vars(peft_config))
    if not isinstance(peft_config, peft.PeftConfig):
        raise ValueError("a PyTorch model takes a LoraConfig as peft_config; or pass the model's folder or hub id")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return peft.get_peft_model(model, peft_config)


def read_torch_model(model: Any) -> Model:
    """Returns the weights that a PyTorch model has now, through a temporary folder.

    A base that bitsandbytes has quantized is quantized again from the files that it was loaded from.
    """
    if hasattr(model, "peft_config") and not is_peft_model(model):
        raise ValueError(
            "the adapter was added with transformers' add_adapter, which groupax does not read; pass the model without "
            "it and peft_config to the trainer, or wrap the model with peft.get_peft_model"
        )
    base = model.get_base_model() if is_peft_model(model) else model
    name = base.config.name_or_path
    quantized = getattr(base.config, "quantization_config", None)
    with tempfile.TemporaryDirectory() as temporary:
        adapter = _saved_adapter(model, Path(temporary) / "adapter") if is_peft_model(model) else None
        folder = Path(temporary) / "model"
        if is_peft_model(model) and quantized is not None:
            loaded = load_model(name, weights=base_weights(quantized))
        else:
            base.save_pretrained(folder, **({"state_dict": _base_tensors(base)} if is_peft_model(model) else {}))
            base.config.save_pretrained(folder)
            loaded = load_model(folder)
        loaded = replace(loaded, source=resolve_folder(name) if name else None, name=name or None)
        return loaded if adapter is None else replace(load_adapter(loaded, adapter), name=loaded.name)


def _saved_adapter(model: Any, folder: Path) -> Path:
    """Writes the active adapter, and returns its folder."""
    adapter = _adapter_name(model)
    model.save_pretrained(folder, selected_adapters=[adapter])
    own = folder if adapter == "default" else folder / adapter
    if read_lora_config(read_json(own / ADAPTER_NAME), own).is_pissa:
        raise ValueError(
            "PEFT has removed PiSSA's changes from the weights of this model, which no longer are those of its name; "
            "pass the model's folder or hub id, and peft_config"
        )
    return own


def _base_tensors(base: Any) -> dict[str, Any]:
    """Returns the tensors of a PEFT model's base under the names that they had before PEFT wrapped its modules."""
    return {
        name.replace(".base_layer.", ".").replace(".original_module.", "."): tensor
        for name, tensor in base.state_dict().items()
        if ".lora_" not in name and ".modules_to_save." not in name
    }


def _adapter_name(model: Any) -> str:
    active = model.active_adapter
    if not isinstance(active, str):
        raise ValueError(f"the model has the active adapters {', '.join(active)}; activate the one to train")
    return active


class TorchWeights:
    """The trained weights of a PyTorch model, which `write` replaces in place.

    Args:
        torch_model: Model of transformers or PEFT.
        model: The weights that groupax read from it.

    Raises:
        ValueError: The weights that require gradients are not those that groupax trains.
    """

    def __init__(self, torch_model: Any, model: Model) -> None:
        self.torch_model = torch_model
        specs = model_specs(model.config)
        if model.adapter is not None:
            specs = adapter_specs(model.config, model.adapter.config)
        self._specs = specs
        found = dict(torch_model.named_parameters())
        in_files = dict.fromkeys(name for spec in jax.tree.leaves(specs) for name in spec.tensor_names)
        names = {name: self._parameter_name(name, found) for name in in_files}
        if missing := [name for name, own in names.items() if not own]:
            raise ValueError(
                f"transformers stores weights otherwise than their files do ({', '.join(missing[:3])}, ...), as "
                "those of experts; pass the model's folder or hub id"
            )
        self._by_name = {name: found[own] for name, own in names.items()}
        self._check_trainable(found, set(names.values()))

    def _parameter_name(self, name: str, found: Mapping[str, Any]) -> str:
        """Returns the parameter of a tensor in the model's files; empty if there is none."""
        if is_peft_model(self.torch_model):
            adapter = self.torch_model.active_adapter
            module, _, kind = name.rpartition(".")
            parts, copied = name.split("."), ("modules_to_save", adapter)  # of the module, or of one that contains it
            copies = (".".join([*parts[:end], *copied, *parts[end:]]) for end in range(len(parts) - 1, 0, -1))
            candidates = (f"{module}.{adapter}.{kind}", *copies, name, f"{name}.{adapter}.weight")
            return next((candidate for candidate in candidates if candidate in found), "")
        return name if name in found else ""

    def _check_trainable(self, found: Mapping[str, Any], own: set[str]) -> None:
        trainable = {name for name, parameter in found.items() if parameter.requires_grad}
        if frozen := sorted(own - trainable):
            raise ValueError(
                f"{len(frozen)} of the {len(own)} weights that groupax would train have requires_grad=False "
                f"({', '.join(frozen[:3])}); load an adapter with PeftModel.from_pretrained(..., is_trainable=True), "
                "pass peft_config=LoraConfig(...) to train few weights, or leave requires_grad as it was"
            )
        if is_peft_model(self.torch_model) and (more := sorted(trainable - own)):
            raise ValueError(
                f"{len(more)} weights outside of the adapter require gradients ({', '.join(more[:3])}); groupax trains "
                "them only if modules_to_save of the adapter's config names them"
            )

    def write(self, model: Model) -> None:
        """Copies the model's trained weights, in the dtypes and on the devices of the PyTorch model."""
        import torch

        params = model.adapter.trained if model.adapter is not None else model.params
        tensors = host_tensors(self._specs, param_leaves(self._specs, params))
        with torch.no_grad():
            for name, parameter in self._by_name.items():
                parameter.copy_(torch.from_numpy(np.array(tensors[name], np.float32)))


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
