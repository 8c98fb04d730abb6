"""Names of transformers and peft over groupax's models, for scripts that load, adapt, merge and save one.

from groupax.compat.hf import AutoModelForCausalLM, BitsAndBytesConfig, LoraConfig, PeftModel, get_peft_model
"""

import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from groupax.compat.fields import tell
from groupax.engine.engine import Engine
from groupax.models.checkpoint import Model, add_adapter, load_adapter, load_model
from groupax.models.lora import as_lora_config, count_params, trainable_params_line
from groupax.models.nf4 import Nf4
from groupax.models.quantize import dense_params, is_quantized
from groupax.models.saving import save_adapter, save_model, source_folders
from groupax.parallel import processes
from groupax.settings.adapter import BaseWeights
from groupax.settings.fields import nearest
from groupax.settings.sampling import SamplingParams
from groupax.storage.folders import resolve_folder
from groupax.storage.hub import push_folder
from groupax.storage.replacing import check_disjoint, is_replaceable, merge_into_folder

# Arguments of `from_pretrained` that have no meaning here, and why.
INERT = {
    "device_map": "weights are put on all devices",
    "attn_implementation": "updates have it: set it in TRL's model_init_kwargs, or in groupax's own GRPOConfig",
    "trust_remote_code": "groupax never runs code from a model's folder",
    "use_cache": "the engine always has a cache",
    "low_cpu_mem_usage": "weights are read straight to the devices",
    "max_memory": "weights are put on all devices",
    "token": "set HF_TOKEN",
    "use_safetensors": "weights are always safetensors",
}
DTYPES = ("float32", "bfloat16", "float16")
# Arguments of `generate` that a model's generation_config.json may say, with transformers' defaults.
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
DEFAULT_NEW_TOKENS = 20  # where neither max_new_tokens nor max_length is said


class BitsAndBytesConfig:
    """The quantization of weights while they are loaded, with the arguments of transformers' class."""

    def __init__(self, load_in_4bit: bool = False, load_in_8bit: bool = False, **settings: Any) -> None:
        self.load_in_4bit, self.load_in_8bit = load_in_4bit, load_in_8bit
        known = (
            "bnb_4bit_compute_dtype",
            "bnb_4bit_quant_type",
            "bnb_4bit_use_double_quant",
            "bnb_4bit_quant_storage",
            "llm_int8_threshold",
            "llm_int8_skip_modules",
            "llm_int8_enable_fp32_cpu_offload",
            "llm_int8_has_fp16_weight",
        )
        for name, value in settings.items():
            if name not in known:
                raise TypeError(f"BitsAndBytesConfig has no field {name!r}{nearest(name, known)}")
            setattr(self, name, value)


class LoraConfig:
    """An adapter's settings in PEFT's words; `models.lora.lora_config` reads them as it reads those of peft itself."""

    def __init__(self, **settings: Any) -> None:
        self.peft_type = "LORA"
        self.__dict__ |= settings
        as_lora_config(self)


# Settings of a model's config that can be set, and why that has no meaning here.
UNUSED_OF_CONFIG = {
    "use_cache": "the engine always has a cache, and updates never",
    "pad_token_id": "tokens are never padded with one; generate has an argument of this name",
    "pretraining_tp": "products are never taken apart",
}


class Architecture:
    """A model's architecture: groupax's `ModelConfig`, and what else config.json says."""

    def __init__(self, model: Model) -> None:
        object.__setattr__(self, "_model", model)

    def __getattr__(self, name: str) -> Any:
        model = object.__getattribute__(self, "_model")
        if not hasattr(model.config, name) and name not in model.hf_config:
            raise AttributeError(f"the model's config has no {name!r}{nearest(name, model.hf_config)}")
        return getattr(model.config, name) if hasattr(model.config, name) else model.hf_config[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in UNUSED_OF_CONFIG:
            raise AttributeError(
                f"{name} of a loaded model's config cannot be set; what can be (without effect) is "
                f"{', '.join(UNUSED_OF_CONFIG)}"
            )
        tell(f"model.config.{name}={value!r} changes nothing in groupax: {UNUSED_OF_CONFIG[name]}")


class CausalLM:
    """A model with the methods of one of transformers, or of peft if it has an adapter.

    Attributes:
        model: groupax's.
    """

    device = "cpu"  # of the arrays that `generate` takes and gives

    def __init__(self, model: Model) -> None:
        self.model = model
        self._engine: Engine | None = None

    @property
    def config(self) -> Architecture:
        """The architecture."""
        return Architecture(self.model)

    def train(self, mode: bool = True) -> "CausalLM":
        """Does nothing: models have no modes; dropout belongs to a trainer's updates."""
        del mode
        return self

    def eval(self) -> "CausalLM":
        """Does nothing, likewise."""
        return self

    def to(self, *_: Any, **__: Any) -> "CausalLM":
        """Does nothing: weights are on all devices."""
        return self

    def gradient_checkpointing_enable(self, *_: Any, **__: Any) -> None:
        """Does nothing: it is a setting of the trainer."""
        tell("gradient_checkpointing_enable() changes nothing in groupax: set gradient_checkpointing in GRPOConfig")

    def gradient_checkpointing_disable(self) -> None:
        """Does nothing, likewise; by default there is none."""

    def enable_input_require_grads(self) -> None:
        """Does nothing: all trained weights receive gradients."""

    def print_trainable_parameters(self) -> None:
        """Prints the number of parameters that an adapter trains, in PEFT's format."""
        print(trainable_params_line(*count_params(self.model.config, self.model.adapter and self.model.adapter.config)))

    def generate(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        num_return_sequences: int | None = None,
        pad_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        seed: int = 0,
        **inert: Any,
    ) -> Any:
        """Returns prompts followed by their completions, as `transformers` does.

        None stands for the value in generation_config.json, or else transformers' default (see `GENERATION`).

        Args:
            input_ids: [B, S], padded on the left, as a NumPy array or a PyTorch tensor.
            attention_mask: [B, S], 0 where it is padded; None for no padding.
            max_new_tokens: Longest completion; 20 if nothing else is set.
            max_length: Longest completion including its S prompt tokens; used if `max_new_tokens` is not set.
            do_sample: Whether to sample; otherwise each token is the likeliest, and only the penalty has an effect.
            temperature, top_k, top_p, min_p, repetition_penalty: As in `SamplingParams`.
            num_return_sequences: Completions per prompt.
            pad_token_id: Padding of shorter completions; the default is the first end-of-sequence token.
            eos_token_id: End-of-sequence tokens instead of the model's own.
            seed: Seed of the sampling.
            inert: `use_cache` and `synced_gpus`, which have no meaning here.

        Returns:
            [B * num_return_sequences, S + T], of the kind of `input_ids`.

        Raises:
            TypeError: there is no such argument.
            ValueError: prompts are padded on the right, or `max_length` leaves no room for completions.
        """
        for name in inert:
            if name not in ("use_cache", "synced_gpus"):
                raise TypeError(f"generate has no argument {name!r}{nearest(name, GENERATION)}")
        given = {
            "max_new_tokens": max_new_tokens,
            "max_length": max_length,
            "do_sample": do_sample,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "num_return_sequences": num_return_sequences,
            "pad_token_id": pad_token_id,
        }
        ids = np.asarray(input_ids, np.int32)
        mask = np.ones_like(ids) if attention_mask is None else np.asarray(attention_mask)
        if (np.diff(mask, axis=1) < 0).any():
            raise ValueError("the prompts are padded on the right; set tokenizer.padding_side to 'left'")
        settings = self._generation(given)
        if max_length is not None and settings["max_new_tokens"] is not None:
            counts = f"max_new_tokens={settings['max_new_tokens']} counts"
            tell(f"generate's max_length={max_length} changes nothing: {counts}")
        ends = (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id or ())
        params = SamplingParams(
            n=settings["num_return_sequences"],
            max_tokens=self._room(settings, ids.shape[1]),
            repetition_penalty=settings["repetition_penalty"],
            seed=seed,
            stop_token_ids=ends,
            ignore_eos=bool(ends),
            **_how_to_draw(settings),
        )
        engine = self._engine_now()
        groups = engine.generate([row[kept > 0] for row, kept in zip(ids, mask, strict=True)], params)
        tokens = [completion.tokens for group in groups for completion in group]
        fill = settings["pad_token_id"]
        fill = (ends or engine.eos_ids or (0,))[0] if fill is None else fill
        new = np.full((len(tokens), max(map(len, tokens))), fill, ids.dtype)
        for row, completion in zip(new, tokens, strict=True):
            row[: len(completion)] = completion
        out = np.concatenate([np.repeat(ids, params.n, axis=0), new], axis=1)
        return input_ids.new_tensor(out) if hasattr(input_ids, "new_tensor") else out

    def merge_and_unload(self) -> "CausalLM":
        """Returns the model with its adapter merged into the base."""
        model = self.model
        if model.adapter is None:
            raise ValueError("the model has no adapter to merge")
        params = dense_params(model.params, model.params["embed"].dtype)
        return CausalLM(replace(model, params=params, adapter=None, name=model.adapter.base_name))

    def resize_token_embeddings(self, num_tokens: int | None = None) -> None:
        """Does nothing if every token of the tokenizer has an embedding.

        Raises:
            ValueError: the tokenizer has more tokens than the model.
        """
        if num_tokens is not None and num_tokens > self.model.config.vocab_size:
            raise ValueError(
                f"the tokenizer has {num_tokens} tokens, the model {self.model.config.vocab_size}; groupax adds none: "
                "use a token that there is as padding, e.g. tokenizer.pad_token = tokenizer.eos_token"
            )

    def save_pretrained(self, folder: Any, **inert: Any) -> None:
        """Writes a folder that transformers, or peft for an adapter, loads; 8-bit weights are dequantized."""
        tell_inert(inert, {"safe_serialization", "max_shard_size"}, "save_pretrained")
        sources = source_folders(self.model)
        if self.model.adapter is not None:
            save_into_folder(partial(save_adapter, self.model), folder, sources)
        else:
            save_into_folder(partial(save_model, self.model, weights=_stored_as(self.model)), folder, sources)

    def push_to_hub(self, repo_id: str, private: bool | None = None, **inert: Any) -> str:
        """Uploads the model to the Hugging Face hub and returns its address."""
        tell_inert(inert, {"token", "commit_message", "safe_serialization"}, "push_to_hub")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / repo_id.rpartition("/")[2]
            self.save_pretrained(folder)
            return push_folder(folder, repo_id, private=bool(private))

    def _generation(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings of `generate`: given, from the model's files, or transformers' defaults."""
        of_files = self.model.generation_config or self.model.hf_config  # as older folders have it
        said = [{name: source.get(name) for name in GENERATION} for source in (of_files, given)]
        return GENERATION | {name: value for each in said for name, value in each.items() if value is not None}

    def _room(self, settings: Mapping[str, Any], num_tokens: int) -> int:
        """Returns the longest completion of prompts with this many tokens."""
        wanted, longest = settings["max_new_tokens"], settings["max_length"]
        if wanted is not None:
            return wanted
        if longest is None:
            return max(1, min(DEFAULT_NEW_TOKENS, self.model.config.max_positions - num_tokens))
        if longest <= num_tokens:
            raise ValueError(
                f"the prompts have {num_tokens} tokens, and max_length={longest} leaves no room for completions; raise "
                "it, or set max_new_tokens"
            )
        return longest - num_tokens

    def _engine_now(self) -> Engine:
        if self._engine is None:
            self._engine = Engine.of(self.model)
        return self._engine


class AutoModelForCausalLM:
    """Loads models as transformers' class of that name does."""

    @staticmethod
    def from_pretrained(
        name_or_path: Any, quantization_config: Any = None, dtype: Any = None, torch_dtype: Any = None, **inert: Any
    ) -> CausalLM:
        """Loads the model of a folder or a hub id.

        Args:
            name_or_path: a model or an adapter.
            quantization_config: quantizes the layers' matrices as they are read.
            dtype: of the weights in memory; None and "auto" keep their own.
            torch_dtype: its former name.
            inert: arguments that have no meaning here; a warning says why.

        Raises:
            TypeError: there is no such argument.
        """
        tell_inert(inert, set(), "from_pretrained")
        weights = base_weights(quantization_config)
        return CausalLM(load_model(name_or_path, _dtype(dtype or torch_dtype), weights=weights))


class PeftModel(CausalLM):
    """Loads adapters as peft's class of that name does."""

    @staticmethod
    def from_pretrained(model: CausalLM, adapter: Any, **inert: Any) -> CausalLM:
        """Loads the adapter of a folder or hub id onto a base, whose weights are not copied."""
        tell_inert(inert, {"is_trainable", "adapter_name"}, "PeftModel.from_pretrained")
        adapted, folder = load_adapter(model.model, adapter), resolve_folder(adapter)
        has_tokenizer = (folder / "tokenizer_config.json").is_file()
        return CausalLM(replace(adapted, source=folder) if has_tokenizer else adapted)


def get_peft_model(model: CausalLM, peft_config: Any, **inert: Any) -> CausalLM:
    """Returns the model with a new adapter."""
    tell_inert(inert, {"adapter_name"}, "get_peft_model")
    return CausalLM(add_adapter(model.model, as_lora_config(peft_config)))


def prepare_model_for_kbit_training(model: CausalLM, **inert: Any) -> CausalLM:
    """Returns the model itself: an adapter's base is never trained, and its norms are computed in float32 anyway."""
    known = {"use_gradient_checkpointing", "gradient_checkpointing_kwargs"}
    tell_inert(inert, known, "prepare_model_for_kbit_training")
    return model


def base_weights(quantization_config: Any) -> BaseWeights:
    """Returns the setting `base_weights` for a `BitsAndBytesConfig`, transformers' or ours, or a dict of its fields.

    Raises:
        ValueError: it is another kind of quantization.
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
            f"quantization_config {type(quantization_config).__name__} asks for neither load_in_4bit nor load_in_8bit, "
            "which is what groupax does while loading"
        )
    kind = get("bnb_4bit_quant_type", "fp4")
    if kind != "nf4" or not get("bnb_4bit_use_double_quant"):
        tell(
            f"4-bit weights are nf4 with double quantization in groupax (asked for: {kind}, "
            f"bnb_4bit_use_double_quant={bool(get('bnb_4bit_use_double_quant'))})"
        )
    return "nf4"


def _how_to_draw(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `SamplingParams` that shape the distribution."""
    if not settings["do_sample"]:
        return {"temperature": 0.0}
    return {"min_p": settings["min_p"] or 0.0, **{name: settings[name] for name in ("temperature", "top_k", "top_p")}}


def _stored_as(model: Model) -> Literal["same", "nf4"]:
    """Returns the format to write weights in: 4 bits if they have 4, else unquantized, with a warning for 8 bits."""
    weights = jax.tree.leaves(model.params, is_leaf=lambda x: isinstance(x, Nf4))
    if any(isinstance(weight, Nf4) for weight in weights):
        return "nf4"
    if is_quantized(model.params):
        tell("save_pretrained: weights in 8 bits are written as numbers again; groupax writes fewer bits in nf4 alone")
    return "same"


def save_policy(trainer: Any, folder: Any) -> None:
    """Saves a native trainer's current policy into a folder that may contain other files, even the run itself.

    All processes must call this, and the primary one writes.
    """
    own = trainer.run_folder.path
    if Path(folder).resolve() == own.resolve():
        tell(f"{folder} is the run's folder, with a config.json of its own; the model is in {own / 'model'}")
        trainer.save_model()
        return
    check_disjoint(Path(folder), source_folders(trainer.model))
    if processes.run_on_primary(lambda: is_replaceable(Path(folder))):
        trainer.save_model(folder)
        return
    with tempfile.TemporaryDirectory() as name:
        saved = trainer.save_model(Path(name) / "model")
        processes.run_on_primary(lambda: merge_into_folder(saved, Path(folder)))


def save_into_folder(save: Callable[[Path], Any], folder: Any, sources: Collection[Path] = ()) -> None:
    """Saves into a folder whose other files are kept.

    Raises:
        ForeignFilesError: The folder contains files of a model that groupax did not write.
        ValueError: The folder is one of the sources, or one of them contains the other.
    """
    check_disjoint(Path(folder), sources)
    if is_replaceable(Path(folder)):
        save(Path(folder))
        return
    with tempfile.TemporaryDirectory() as name:
        save(Path(name) / "model")
        merge_into_folder(Path(name) / "model", Path(folder))


def as_model(model: Any, weights: BaseWeights = "same") -> str | Path | Model:
    """Converts a name, a model of groupax or of this module, or one of PyTorch to what the native trainer takes.

    A model of PyTorch is written to a temporary folder and read again.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(model, CausalLM):
        return model.model
    if isinstance(model, (str, Path, Model)):
        return model
    if not hasattr(model, "save_pretrained") or not hasattr(model, "state_dict"):
        raise ValueError(f"model must be a folder, a hub id or a model, got {type(model).__name__}")
    is_peft = hasattr(model, "peft_config")
    base = model.get_base_model() if is_peft else model
    name = base.config.name_or_path
    quantized = getattr(base.config, "quantization_config", None)
    weights = base_weights(quantized) if quantized is not None and is_peft else weights
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        if not is_peft:
            base.config.save_pretrained(folder)
        loaded = load_model(folder, base=name if is_peft else None, weights=weights)
    return replace(loaded, source=resolve_folder(name) if name else None, name=name or None)


def _dtype(dtype: Any) -> Any:
    """Returns the name of a dtype that any library may have named."""
    name = str(getattr(dtype, "name", dtype)).removeprefix("torch.") if dtype is not None else "auto"
    if name == "auto":
        return None
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return name


def tell_inert(given: Mapping[str, Any], quiet: set[str], function: str) -> None:
    """Warns of arguments that change nothing here, except those in `quiet`.

    Raises:
        TypeError: there is no such argument.
    """
    for name, value in given.items():
        if name in INERT:
            tell(f"{function}'s {name}={value!r} changes nothing in groupax: {INERT[name]}")
        elif name not in quiet:
            raise TypeError(f"{function} has no argument {name!r}{nearest(name, INERT)}")
