"""A model with the methods of transformers' and PEFT's models."""

import functools
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from groupax.compat.fields import warn
from groupax.core.settings.fields import nearest
from groupax.core.settings.sampling import SamplingParams
from groupax.core.storage.hub import push_folder
from groupax.core.storage.replacing import check_disjoint, is_replaceable, merge_into_folder
from groupax.engine.engine import Engine
from groupax.models.adapted import dense
from groupax.models.lora import PREFIX, adapter_specs, count_params, residual, trainable_params_line
from groupax.models.specs import CORRECTION_NAMES, embedding_name, head_name, model_specs
from groupax.models.weights.casts import dense_params, is_quantized
from groupax.models.weights.checkpoint import Model
from groupax.models.weights.saving import join_tensors, save_adapter, save_model, source_folders, specs_by_name
from groupax.parallel import processes

DEFAULT_NEW_TOKENS = 20  # without max_new_tokens and max_length
_CHANGING = ("__set__", "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")


def parameters_of(model: Model) -> Iterator[tuple[str, np.ndarray, bool]]:
    """Yields the name of each parameter, its value, and whether it is trained.

    Names are those of the checkpoint; with an adapter they are those of `peft.PeftModel`. Quantized weights are
    dequantized.
    """
    adapter = model.adapter
    if adapter is None:
        yield from ((name, tensor, True) for name, tensor in _tensors(model_specs(model.config), model.params))
        return
    specs = adapter_specs(model.config, adapter.config)
    trained = {name.removeprefix(PREFIX): tensor for name, tensor in _tensors(specs, adapter.trained)}
    adapted = {name.rpartition(".lora_A.")[0] for name in trained if ".lora_A." in name}
    for name, tensor in _tensors(model_specs(model.config), residual(adapter)):
        module, _, kind = name.rpartition(".")
        if name in trained and kind == "weight":
            yield f"{PREFIX}{module}.original_module.{kind}", tensor, False
            yield f"{PREFIX}{module}.modules_to_save.default.{kind}", trained[name], True
        elif module in adapted:
            own = f"{module}.base_layer.{kind}"
            yield PREFIX + own, trained.get(own, tensor), own in trained
        else:
            yield PREFIX + name, trained.get(name, tensor), name in trained
        if module in adapted and kind == "weight":
            for part in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector"):
                if (own := f"{module}.{part}") in trained:
                    yield f"{PREFIX}{module}.{part.partition('.')[0]}.default.weight", trained[own], True


def _tensors(specs: Any, params: Any) -> Iterator[tuple[str, np.ndarray]]:
    leaves = jax.tree.structure(specs).flatten_up_to(params)
    for parts in specs_by_name(specs).values():
        yield from join_tensors([(spec, _dense(leaves[index])) for index, spec in parts]).items()


def _dense(weight: Any) -> np.ndarray:
    return np.asarray(weight if isinstance(weight, (jax.Array, np.ndarray)) else dense(weight, jnp.float32))


def as_parameter(array: np.ndarray, is_trained: bool) -> Any:
    """Returns a copy of a weight as a PyTorch parameter that refuses to be changed."""
    import torch

    is_half = array.dtype == jnp.bfloat16
    tensor = torch.from_numpy(np.array(array).view(np.int16) if is_half else np.array(array))
    cls = _parameter_class()
    return cls._make_subclass(cls, tensor.view(torch.bfloat16) if is_half else tensor, is_trained)


@cache
def _parameter_class() -> Any:
    """Returns the class of these parameters, which needs PyTorch."""
    import torch

    class Copy(torch.Tensor):
        """A copy of a weight, which refuses to be changed, since the model would not change with it."""

        _is_param = True

        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = function.__name__
            is_in_place = name.endswith("_") and not name.endswith("__")
            if (is_in_place or name in _CHANGING) and isinstance(args[0], cls):
                raise RuntimeError(
                    f"{name} would change a copy of a weight of compat.hf's model, not the model; train with an "
                    "adapter to freeze weights, or load the model with transformers and pass that to the trainer"
                )
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))

    return Copy


def save_policy(trainer: Any, folder: Any) -> None:
    """Saves a native trainer's current policy into a folder that may hold other files. All processes must call this."""
    save_into(trainer.save_model, folder, source_folders(trainer.model), processes.run_on_primary)


def save_into(
    save: Callable[[Path], Any],
    folder: Any,
    sources: Collection[Path],
    on_primary: Callable[[Callable[[], Any]], Any] = lambda function: function(),
) -> None:
    """Saves into a folder and keeps the other files in it.

    Args:
        save: Function that saves into a folder.
        folder: The folder.
        sources: Folders that must not be overwritten.
        on_primary: Function that calls another one in the primary process, if all processes save.

    Raises:
        ForeignFilesError: The folder holds files of a model that groupax did not write.
        ValueError: The folder is, contains or is inside one of the sources.
    """
    folder = Path(folder)
    check_disjoint(folder, sources)
    if on_primary(lambda: is_replaceable(folder)):
        save(folder)
        return
    with tempfile.TemporaryDirectory() as name:
        save(Path(name) / "model")
        on_primary(lambda: merge_into_folder(Path(name) / "model", folder))


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


def warn_inert(
    given: Mapping[str, Any], quiet: Collection[str], function: str, inert: Mapping[str, str] = INERT
) -> None:
    """Warns about arguments without effect in groupax, except those in `quiet`, and refuses unknown ones."""
    for name, value in given.items():
        if name in quiet:
            continue
        if name not in inert:
            raise TypeError(f"{function} has no argument {name!r}{nearest(name, (*inert, *quiet))}; leave it out")
        warn(f"{function}'s {name}={value!r} changes nothing in groupax: {inert[name]}")


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


def generation_settings(model: Model, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of `generate`: the arguments, else the model's generation config, else the defaults."""
    stored = model.generation_config or model.hf_config  # older folders have generation settings in config.json
    sources = {name: value for name, value in stored.items() if name in GENERATION}, given
    return GENERATION | {name: value for each in sources for name, value in each.items() if value is not None}


class Architecture:
    """A read-only view of a model's architecture: groupax's `ModelConfig`, then the other fields of config.json."""

    def __init__(self, model: Model) -> None:
        vars(self).update({**model.hf_config, **vars(model.config)})

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("use_cache", "pad_token_id", "pretraining_tp"):
            raise AttributeError(f"{name} of a loaded model's config cannot be set")
        warn(f"model.config.{name}={value!r} changes nothing in groupax, which neither pads nor stores caches by it")


class CausalLM:
    """A model with the methods of a transformers model, or of a PEFT model if it has an adapter.

    A trainer that is given one replaces its `model` after every step.

    Args:
        model: The model of groupax.
    """

    device = "cpu"  # device of the arrays that `generate` accepts and returns

    def __init__(self, model: Model) -> None:
        self.model = model

    @property
    def model(self) -> Model:
        """The model of groupax."""
        return self._model

    @model.setter
    def model(self, model: Model) -> None:
        self._model = model
        self.__dict__.pop("_engine", None)  # of the weights before

    @property
    def config(self) -> Architecture:
        """The architecture of the model."""
        return Architecture(self.model)

    def train(self, *_: Any, **__: Any) -> "CausalLM":
        """Does nothing: models have no modes, weights are on all devices, and only updates apply dropout."""
        return self

    eval = to = train

    def gradient_checkpointing_enable(self, *_: Any, **__: Any) -> None:
        """Warns that gradient checkpointing is a setting of the trainer."""
        warn("gradient_checkpointing_enable() changes nothing in groupax: set gradient_checkpointing in GRPOConfig")

    def enable_input_require_grads(self) -> None:
        """Does nothing: every trained weight receives gradients."""

    gradient_checkpointing_disable = enable_input_require_grads  # it is off by default

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Yields the name of each weight and a copy of it as a PyTorch parameter, which refuses to be changed.

        Names are those of the checkpoint; with an adapter they are those of `peft.PeftModel`. Weights that are never
        trained, which transformers stores as buffers, are left out.
        """
        for name, value, is_trained in parameters_of(self.model):
            if not name.endswith(CORRECTION_NAMES):
                yield name, as_parameter(value, is_trained)

    def parameters(self) -> Iterator[Any]:
        """Yields copies of the weights (see `named_parameters`)."""
        return (parameter for _, parameter in self.named_parameters())

    def get_parameter(self, target: str) -> Any:
        """Returns a copy of the weight of a name (see `named_parameters`)."""
        names = []
        for name, value, is_trained in parameters_of(self.model):
            if name == target:
                return as_parameter(value, is_trained)
            names.append(name)
        raise AttributeError(f"the model has no weight {target!r}{nearest(target, names)}")

    @property
    def lm_head(self) -> SimpleNamespace:
        """The output layer, whose `weight` is a copy (see `named_parameters`)."""
        config, prefix = self.model.config, PREFIX if self.model.adapter else ""
        name = embedding_name(config) if config.tie_embeddings else head_name(config)
        return SimpleNamespace(weight=self.get_parameter(prefix + name))

    def num_parameters(self, only_trainable: bool = False) -> int:
        """Returns the number of parameters, or of those that are trained."""
        adapter = self.model.adapter
        return count_params(self.model.config, adapter and adapter.config)[0 if only_trainable else 1]

    def print_trainable_parameters(self) -> None:
        """Prints the number of trainable parameters in PEFT's format."""
        print(trainable_params_line(*count_params(self.model.config, self.model.adapter and self.model.adapter.config)))

    def generate(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        *,
        eos_token_id: int | list[int] | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> Any:
        """Returns the prompts, each followed by a completion, like `generate` of transformers.

        Args:
            input_ids: [B, S] tokens with left padding, as a NumPy array or a PyTorch tensor.
            attention_mask: [B, S], 0 at padding; None if there is no padding.
            eos_token_id: Tokens that end a completion instead of the model's own.
            seed: Seed of the sampling.
            settings: Any of `GENERATION`. A missing or None value comes from the model's generation_config.json, else
                from `GENERATION`. `max_length` counts the S prompt tokens too and yields to `max_new_tokens`; without
                both a completion has at most 20 tokens. `use_cache` has no effect.

        Returns:
            [B * num_return_sequences, S + T] tokens, an array or tensor like `input_ids`. Shorter rows are filled up
            with `pad_token_id`, by default the first end-of-sequence token.

        Raises:
            TypeError: An argument is unknown.
            ValueError: Prompts are padded on the right, or `max_length` leaves no room for a completion.
        """
        for name in settings:
            if name not in (*GENERATION, "use_cache"):
                raise TypeError(f"generate has no argument {name!r}{nearest(name, GENERATION)}")
        ids = np.asarray(input_ids, np.int32)
        mask = np.ones_like(ids) if attention_mask is None else np.asarray(attention_mask)
        if (np.diff(mask, axis=1) < 0).any():
            raise ValueError("the prompts are padded on the right; set tokenizer.padding_side to 'left'")
        settings = generation_settings(self.model, settings)
        stops = (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id or ())
        drawn: dict[str, Any] = {"temperature": 0.0}
        if settings["do_sample"]:
            names = ("temperature", "top_k", "top_p", "min_p")
            drawn = {name: settings[name] for name in names if settings[name] is not None}
        params = SamplingParams(
            n=settings["num_return_sequences"],
            max_tokens=_max_new_tokens(self.model, settings, ids.shape[1]),
            repetition_penalty=settings["repetition_penalty"],
            seed=seed,
            stop_token_ids=stops,
            ignore_eos=bool(stops),
            **drawn,
        )
        groups = self._engine.generate([row[kept > 0] for row, kept in zip(ids, mask, strict=True)], params)
        pad_id = settings["pad_token_id"]
        pad_id = (stops or self._engine.eos_ids or (0,))[0] if pad_id is None else pad_id
        completions = [completion.tokens for group in groups for completion in group]
        new = np.full((len(completions), max(map(len, completions))), pad_id, ids.dtype)
        for row, completion in zip(new, completions, strict=True):
            row[: len(completion)] = completion
        out = np.concatenate([np.repeat(ids, params.n, axis=0), new], axis=1)
        return input_ids.new_tensor(out) if hasattr(input_ids, "new_tensor") else out

    def merge_and_unload(self) -> "CausalLM":
        """Returns the model with its adapter merged into the base weights."""
        model = self.model
        if model.adapter is None:
            raise ValueError("the model has no adapter to merge")
        params = dense_params(model.params, model.params["embed"].dtype)
        return CausalLM(replace(model, params=params, adapter=None, name=model.adapter.base_name))

    def resize_token_embeddings(self, num_tokens: int | None = None) -> None:
        """Checks that every token has an embedding; groupax never adds any.

        Raises:
            ValueError: The tokenizer has more tokens than the model.
        """
        if num_tokens is not None and num_tokens > self.model.config.vocab_size:
            raise ValueError(
                f"the tokenizer has {num_tokens} tokens, the model {self.model.config.vocab_size}; groupax adds none: "
                "pad with an existing token, e.g. tokenizer.pad_token = tokenizer.eos_token"
            )

    def save_pretrained(self, folder: Any, **inert: Any) -> None:
        """Writes a folder for transformers, or for PEFT if there is an adapter."""
        warn_inert(inert, {"safe_serialization", "max_shard_size"}, "save_pretrained")
        sources = source_folders(self.model)
        if self.model.adapter is not None:
            save_into(partial(save_adapter, self.model), folder, sources)
        else:
            kind = "nf4" if is_quantized(self.model.params) else "same"
            save_into(partial(save_model, self.model, weights=kind), folder, sources)

    def push_to_hub(self, repo_id: str, private: bool | None = None, **inert: Any) -> str:
        """Uploads the model to the Hugging Face hub and returns its URL."""
        warn_inert(inert, {"commit_message", "safe_serialization"}, "push_to_hub")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / repo_id.rpartition("/")[2]
            self.save_pretrained(folder)
            return push_folder(folder, repo_id, private=bool(private))

    @functools.cached_property
    def _engine(self) -> Engine:
        return Engine.of(self.model)


def _max_new_tokens(model: Model, settings: Mapping[str, Any], num_prompt_tokens: int) -> int:
    if settings["max_new_tokens"] is not None:
        return settings["max_new_tokens"]
    if settings["max_length"] is None:
        return max(1, min(DEFAULT_NEW_TOKENS, model.config.max_positions - num_prompt_tokens))
    if settings["max_length"] <= num_prompt_tokens:
        raise ValueError(
            f"the prompts have {num_prompt_tokens} tokens, so max_length={settings['max_length']} leaves no room for a "
            "completion; raise it, or set max_new_tokens"
        )
    return settings["max_length"] - num_prompt_tokens
