"""EasyDeL's names over groupax.

import groupax.compat.easydel as ed
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from jax.sharding import Mesh

import groupax.trainer as native
from groupax.compat import hf
from groupax.compat.easydel_fields import DEFAULTS, FORMER, INERT
from groupax.compat.fields import Fields, ForeignConfig, as_native, attention_setting, tell
from groupax.compat.meshes import tell_whole
from groupax.config import mesh_sizes, nearest
from groupax.data import load_examples
from groupax.engine.engine import Engine
from groupax.engine.params import SamplingParams
from groupax.engine.sharing import undivided
from groupax.models.checkpoint import Model, load_model
from groupax.parallel.mesh import RULES, decoding_mesh, make_mesh
from groupax.tokenizer import is_conversational, prepare_tokenizer, render

# What a `vInference` and a `GRPOConfig` may both say of sampling, and the latter's name for it.
SAMPLING = {
    "max_new_tokens": "max_completion_length",
    "num_return_sequences": "num_return_sequences",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}
# Columns that hold the question in well-known datasets without a column `prompt`.
QUESTIONS = ("question", "problem")


class EasyDeLOptimizers(StrEnum):
    """Optimizers."""

    ADAMW = "adamw"
    ADAFACTOR = "adafactor"
    LION = "lion"
    MUON = "muon"
    SGD = "sgd"


class EasyDeLSchedulers(StrEnum):
    """Schedules of the learning rate."""

    NONE = "none"
    LINEAR = "linear"
    COSINE = "cosine"


class EasyDeLGradientCheckPointers(StrEnum):
    """What the backward pass computes again."""

    NONE = ""
    EVERYTHING_SAVEABLE = "everything_saveable"
    NOTHING_SAVEABLE = "nothing_saveable"
    CHECKPOINT_DOTS = "checkpoint_dots"
    CHECKPOINT_DOTS_WITH_NO_BATCH_DMIS = "checkpoint_dots_with_no_batch_dims"


class AttentionMechanisms(StrEnum):
    """Ways to compute attention."""

    AUTO = "auto"
    VANILLA = "vanilla"
    FLASH_ATTN2 = "flash_attn2"
    SPLASH = "splash"
    RING = "ring"
    CUDNN = "cudnn"
    BLOCKWISE = "blockwise"
    SDPA = "sdpa"
    CUDA_FLASH_ATTN2 = "cuda_flash_attn2"
    PAGED_ATTENTION = "paged_attention"


SCHEDULES = {"none": "constant", "": "constant", "constant": "constant", "linear": "linear", "cosine": "cosine"}
CHECKPOINTING = {
    "": "none",
    "none": "none",
    "everything_saveable": "none",
    "nothing_saveable": "full",
    "checkpoint_dots": "dots",
    "checkpoint_dots_with_no_batch_dims": "dots",
}


def EasyDeLBaseConfigDict(**settings: Any) -> dict[str, Any]:  # noqa: N802 - EasyDeL's name
    """Settings of a model's config, for `config_kwargs`."""
    return settings


# `ed.utils.get_logger`, which scripts call.
utils = SimpleNamespace(get_logger=logging.getLogger)


class EasyDeLModel(hf.CausalLM):
    """A model, with what it was asked to compute in.

    Attributes:
        trainer_settings: settings of the native trainer that EasyDeL gives to the model.
    """

    def __init__(self, model: Model, trainer_settings: Mapping[str, Any]) -> None:
        super().__init__(model)
        self.trainer_settings = trainer_settings


class AutoEasyDeLModelForCausalLM:
    """Loads models as EasyDeL's class of that name does."""

    # Arguments that have no meaning here, and why.
    INERT: ClassVar[dict[str, str]] = {
        **hf.INERT,
        "auto_shard_model": "weights are put on all devices",
        "shard_attention_computation": "groupax has its own attention",
        "shard_fns": "weights are put on all devices",
        "sharding_axis_names": "the mesh's axes are dp, fsdp, ep, tp, sp",
        "partition_axis": "the mesh's axes are dp, fsdp, ep, tp, sp",
        "partition_rules": "one table of rules belongs to every family",
        "precision": "products add up in float32",
        "device": "weights are put on all devices",
        "backend": "programs are XLA's on every backend",
        "platform": "programs are XLA's on every backend",
        "from_torch": "safetensors are read without PyTorch",
        "verbose": "nothing is told while loading",
    }
    QUIET: ClassVar[set[str]] = {"auto_shard_model", "precision", "from_torch", "verbose"}

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: Any,
        dtype: Any = None,
        param_dtype: Any = None,
        sharding_axis_dims: Sequence[int] | None = None,
        config_kwargs: Mapping[str, Any] | None = None,
        quantization_config: Any = None,
        **inert: Any,
    ) -> EasyDeLModel:
        """The model of a folder or a hub id.

        Args:
            name_or_path: a model or an adapter.
            dtype: of the forward pass in training.
            param_dtype: of the weights in memory; None keeps their own. What is trained has float32 masters.
            sharding_axis_dims: sizes of the mesh's axes dp, fsdp, ep, tp and sp; one may be -1. What does not divide
                stays whole on every device, as in EasyDeL, which is told.
            config_kwargs: settings of the model's config (see `EasyDeLBaseConfigDict`).
            quantization_config: as in transformers.
            inert: arguments that have no meaning here.

        Raises:
            TypeError: there is no such argument.
        """
        for name, value in inert.items():
            if name not in cls.INERT:
                raise TypeError(f"from_pretrained has no argument {name!r}{nearest(name, cls.INERT)}")
            if name not in cls.QUIET:
                tell(f"from_pretrained's {name}={value!r} changes nothing in groupax: {cls.INERT[name]}")
        mesh = None if sharding_axis_dims is None else _mesh(sharding_axis_dims)
        settings, max_positions = _config_settings(config_kwargs or {})
        if dtype is not None:
            settings["dtype"] = _compute_dtype(dtype)
        weights = hf.base_weights(quantization_config)
        stored = None if param_dtype is None else np.dtype(param_dtype).name
        model = load_model(
            name_or_path, stored, mesh, weights, max_positions=max_positions, replicated=() if mesh is None else RULES
        )
        tell_whole(model, "sharding_axis_dims")
        if _shared_by(model) > 1:
            settings["decoding_tp"] = _shared_by(model)
        return EasyDeLModel(model, settings)


class GRPOConfig(ForeignConfig):
    """EasyDeL's settings. What groupax does not have is taken with a warning that says why; unknown names fail."""

    FIELDS: ClassVar[Fields] = Fields("EasyDeL", DEFAULTS, INERT, FORMER)

    def to_native(self) -> Any:
        """The native config.

        Raises:
            ValueError: something is asked for that groupax does not do.
        """
        return as_native(
            {
                "output_dir": f"{str(self.save_directory or 'EasyDeL-Checkpoints').rstrip('/')}/{self.model_name}",
                "num_train_epochs": self.num_train_epochs,
                "max_steps": self.max_training_steps or -1,
                "prompts_per_step": self.total_batch_size,
                "num_generations": self.num_return_sequences,
                "prompt_order": "shuffled" if self.shuffle_train_dataset else "dataset",
                "prompt_overflow": "truncate_left",
                "top_k": self.top_k or 0,
                "min_p": self.min_p or 0.0,
                "use_bias_correction_kl": False,
                "scale_rewards": {True: "group", False: "none"}.get(self.scale_rewards, self.scale_rewards),
                "reward_weights": None if self.reward_weights is None else tuple(self.reward_weights),
                "optimizer": _named(self.optimizer, EasyDeLOptimizers, "optimizer"),
                "lr_scheduler_type": SCHEDULES[_named(self.scheduler, SCHEDULES, "scheduler")],
                "learning_rate_end": self.learning_rate_end or 0.0,
                "max_grad_norm": self.clip_grad or 0.0,
                "eval_steps": self.evaluation_steps or 0,
                "save_steps": self.save_steps or 0,
                "save_interval_minutes": self.save_interval_minutes or 0.0,
                "resume": "auto" if self.resume_if_possible else "never",
                "logging_steps": self.log_steps,
                "progress_bar": self.progress_bar_type,
                "report_to": ("wandb",) if self.use_wandb else (),
                "run_name": self.wandb_name or self.model_name,
                "project": f"EasyDeL-{self.model_name}",
                "track_memory": bool(self.track_memory),
                **{name: getattr(self, name) for name in SAME},
            }
        )


# Settings that groupax has under the same name with the same meaning.
SAME = (
    "seed",
    "num_iterations",
    "max_prompt_length",
    "max_completion_length",
    "temperature",
    "top_p",
    "repetition_penalty",
    "loss_type",
    "beta",
    "epsilon",
    "epsilon_high",
    "delta",
    "importance_sampling_level",
    "mask_truncated_completions",
    "sync_ref_model",
    "ref_model_mixup_alpha",
    "ref_model_sync_steps",
    "learning_rate",
    "warmup_steps",
    "weight_decay",
    "save_total_limit",
    "save_optimizer_state",
    "do_last_save",
    "weight_distribution_log_steps",
)


class vInference:  # noqa: N801 - EasyDeL's name
    """Says how a trainer samples, and samples by itself with `generate`.

    Args:
        model: to sample from.
        tokenizer: for prompts that are text; also called processor_class.
        processor_class: likewise.
        generation_config: an object or a dict with the settings below.
        settings: max_new_tokens, num_return_sequences, temperature, top_p, top_k, min_p, repetition_penalty, do_sample.

    Raises:
        TypeError: there is no such setting.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        processor_class: Any = None,
        generation_config: Any = None,
        **settings: Any,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer or processor_class
        known = (*SAMPLING, "do_sample", "seed")
        for name in settings:
            if name not in known:
                raise TypeError(f"vInference has no setting {name!r}{nearest(name, known)}")
        config = generation_config or {}
        more = config if isinstance(config, Mapping) else vars(config)
        settings = {name: more[name] for name in known if more.get(name) is not None} | settings
        self.given = {name: value for name, value in settings.items() if name in SAMPLING}
        self.do_sample, self.seed = settings.get("do_sample", True), settings.get("seed", 0)

    def generate(self, prompts: Any) -> list[list[str]]:
        """The completions of each prompt, as text."""
        given = {name: self.given[name] for name in ("temperature", "top_p", "top_k", "min_p") if name in self.given}
        given |= {} if self.do_sample else {"temperature": 0.0}
        params = SamplingParams(
            n=self.given.get("num_return_sequences", 1),
            max_tokens=self.given.get("max_new_tokens", DEFAULTS["max_completion_length"]),
            repetition_penalty=self.given.get("repetition_penalty", 1.0),
            seed=self.seed,
            **given,
        )
        return [[completion.text or "" for completion in group] for group in self._engine.generate(prompts, params)]

    @functools.cached_property
    def _engine(self) -> Engine:
        model = hf.as_model(self.model)
        model = model if isinstance(model, Model) else load_model(model)
        return Engine.of(model, self.tokenizer, tp=_shared_by(model))


class vInferenceConfig(SimpleNamespace):  # noqa: N801 - EasyDeL's name
    """Settings for `vInference(generation_config=...)`."""


class GRPOTrainer:
    """EasyDeL's trainer over `groupax.GRPOTrainer`, which is its `native`.

    Args:
        arguments: settings.
        vinference: says how to sample, where `arguments` does not.
        model: a folder, a hub id, or a loaded model.
        reward_funcs: one or several reward functions or reward models.
        reward_processing_classes: tokenizers of the reward models.
        train_dataset: prompts, in a column `prompt`, `question` or `problem`.
        eval_dataset: likewise.
        processing_class: the tokenizer.
        data_tokenize_fn: makes `input_ids`, `attention_mask` and further columns of a batch of examples, whose prompts
            are text by then; it is called with the batch, the tokenizer and tools.

    Raises:
        ValueError: something is asked for that groupax does not do.
    """

    def __init__(
        self,
        arguments: GRPOConfig | None = None,
        vinference: vInference | None = None,
        model: Any = None,
        reward_funcs: Any = None,
        reward_processing_classes: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        data_tokenize_fn: Callable[..., Mapping[str, Any]] | None = None,
    ) -> None:
        self.arguments = arguments = arguments or GRPOConfig()
        model = vinference.model if model is None and vinference is not None else model
        settings = _with_sampling(arguments, vinference).to_native()
        if isinstance(model, EasyDeLModel):
            settings = replace(settings, **model.trainer_settings)
        processing_class = processing_class or (vinference and vinference.tokenizer)
        datasets = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        examples = {
            name: _examples(dataset, name, data_tokenize_fn, processing_class, arguments.tools)
            for name, dataset in datasets.items()
            if dataset is not None
        }
        self.native = native.GRPOTrainer(
            hf.as_model(model),
            reward_funcs,
            settings,
            examples.get("train_dataset"),
            examples.get("eval_dataset"),
            processing_class,
            reward_processing_classes,
        )

    def train(self) -> native.TrainResult:
        """Train, and save the model in the run's `model/`."""
        return self.native.train()

    def evaluate(self) -> Any:
        """Score the current policy on `eval_dataset`."""
        return self.native.evaluate()

    def save_pretrained(self, folder: Any) -> None:
        """Write the current policy as a folder that transformers loads."""
        self.native.save_model(folder)


def _with_sampling(arguments: GRPOConfig, vinference: vInference | None) -> GRPOConfig:
    """The settings with a `vInference`'s where they say nothing themselves."""
    if vinference is None:
        return arguments
    if not vinference.do_sample:
        tell("vInference's do_sample=False: a trainer always samples; equal completions leave nothing to compare")
    settings = dict(arguments.given)
    for name, value in vinference.given.items():
        own = SAMPLING[name]
        if settings.setdefault(own, value) != value:
            tell(f"GRPOConfig's {own}={settings[own]!r} is taken, not vInference's {name}={value!r}")
    merged = GRPOConfig()
    merged.given.update(settings)
    return merged


def _examples(dataset: Any, name: str, tokenize: Callable[..., Any] | None, tokenizer: Any, tools: Any) -> Any:
    """The rows, with `prompt` and what a `data_tokenize_fn` makes of them."""
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list) and "prompt" not in columns:
        found = [column for column in QUESTIONS if column in columns]
        if found:
            tell(f"{name} has no column 'prompt'; {found[0]!r} is taken in its place")
            dataset = dataset.rename_column(found[0], "prompt")
    examples = load_examples(dataset, name)
    if tokenize is None:
        return examples
    if tokenizer is None:
        raise ValueError("data_tokenize_fn needs a tokenizer; give it as processing_class")
    tokenizer = prepare_tokenizer(tokenizer)
    rows = [dict(examples[index]) for index in range(len(examples))]
    texts = [
        render(tokenizer, row["prompt"], f"prompt {index}") if is_conversational(row["prompt"]) else row["prompt"]
        for index, row in enumerate(rows)
    ]
    batch = {column: [row[column] for row in rows] for column in rows[0]} | {"prompt": texts}
    made = dict(tokenize(batch, tokenizer, tools))
    if "input_ids" not in made:
        raise ValueError(f"data_tokenize_fn must return input_ids, it returned {', '.join(made)}")
    ids, masks = made.pop("input_ids"), made.pop("attention_mask", None)
    if len(ids) != len(rows):
        raise ValueError(f"data_tokenize_fn returned {len(ids)} rows of input_ids for {len(rows)} examples")
    kept = [np.asarray(row) for row in ids]
    if masks is not None:
        kept = [row[np.asarray(mask) > 0] for row, mask in zip(kept, masks, strict=True)]
    more = [
        {column: np.asarray(values[index]).tolist() for column, values in made.items()} for index in range(len(rows))
    ]
    return [
        {**row, **extra, "prompt_ids": tokens.tolist()} for row, extra, tokens in zip(rows, more, kept, strict=True)
    ]


def _config_settings(config: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
    """Settings of the native trainer, and the longest sequence, from a model's `config_kwargs`."""
    config = dict(config)
    lengths = [config.pop(name, None) for name in ("mask_max_position_embeddings", "freq_max_position_embeddings")]
    settings: dict[str, Any] = {}
    if "gradient_checkpointing" in config:
        asked = _named(config.pop("gradient_checkpointing"), CHECKPOINTING, "gradient_checkpointing")
        settings["gradient_checkpointing"] = CHECKPOINTING[asked]
    if config.get("kvdtype") is not None:
        settings["kv_cache_dtype"] = _compute_dtype(config["kvdtype"])
    config.pop("kvdtype", None)
    mechanism = config.pop("attn_mechanism", AttentionMechanisms.AUTO)
    if attention_setting(mechanism) != "auto":
        settings["attn_implementation"] = attention_setting(mechanism)
    for name in ("attn_dtype", "attn_softmax_dtype"):
        dtype = config.pop(name, None)
        if name == "attn_softmax_dtype" and dtype is not None and np.dtype(dtype).name != "float32":
            tell(f"{name}={np.dtype(dtype).name}: groupax adds up attention's weights in float32")
    for name, value in config.items():
        tell(f"config_kwargs {name}={value!r} changes nothing in groupax: the model is what its config.json says")
    return settings, max((length for length in lengths if length), default=None)


def _compute_dtype(dtype: Any) -> str:
    name = np.dtype(dtype).name
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"groupax computes in float32 or bfloat16, got {name}")
    return name


def _named(value: Any, known: Any, setting: str) -> str:
    """A member of an enum, or its name or value, as text.

    Raises:
        ValueError: there is none of that name.
    """
    names = [str(getattr(each, "value", each)) for each in known]
    text = str(getattr(value, "value", "none" if value is None else value)).lower()
    if text not in names:
        raise ValueError(
            f"{setting} {text!r} is not supported{nearest(text, names)}; there are {', '.join(filter(None, names))}"
        )
    return text


def _shared_by(model: Model) -> int:
    """How many devices share the weights that are decoded with: those of the mesh's tp, if they divide the model."""
    tp = model.mesh.shape["tp"]
    return 1 if undivided(model.config, decoding_mesh(model.mesh, tp)) else tp


def _mesh(dims: Sequence[int]) -> Mesh:
    try:
        return make_mesh(mesh_sizes(",".join(map(str, dims))))
    except ValueError as error:
        raise ValueError(f"sharding_axis_dims={tuple(dims)}: {error}") from error
