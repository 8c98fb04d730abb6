"""EasyDeL's `GRPOTrainer`, a wrapper around the native trainer, and its `vInference`, which has sampling settings."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

import groupax.trainer as native
from groupax.compat import hf
from groupax.compat.easydel.config import GRPOConfig
from groupax.compat.easydel.models import EasyDeLModel
from groupax.compat.fields import warn
from groupax.compat.trl.policy import TrainedModel
from groupax.core.settings.fields import nearest
from groupax.data.chat import render
from groupax.data.examples import load_examples
from groupax.data.prompts import row_template_kwargs
from groupax.data.tokenizer import is_conversational, prepare_tokenizer
from groupax.runs.trainer import TrainResult

# Sampling settings of a `vInference`, with their names in a `GRPOConfig`.
SAMPLING = {
    "max_new_tokens": "max_completion_length",
    "num_return_sequences": "num_return_sequences",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}


class vInference:  # noqa: N801 - EasyDeL's name
    """A model with sampling settings, for a trainer.

    Args:
        model: Model to train.
        tokenizer: Tokenizer of the model.
        do_sample: True; greedy completions of a prompt do not differ.
        settings: Sampling settings: the keys of `SAMPLING`.

    Raises:
        TypeError: A setting is unknown.
        ValueError: `do_sample` is False.
    """

    def __init__(self, model: Any, tokenizer: Any = None, *, do_sample: bool = True, **settings: Any) -> None:
        if not do_sample:
            raise ValueError("do_sample=False: greedy completions of a prompt do not differ; leave it out")
        for name in settings:
            if name not in SAMPLING:
                raise TypeError(f"vInference has no setting {name!r}{nearest(name, SAMPLING)}")
        self.model, self.tokenizer = model, tokenizer
        self.given = {name: value for name, value in settings.items() if value is not None}


class GRPOTrainer:
    """EasyDeL's trainer, implemented with the native trainer in its attribute `native`.

    Args:
        arguments: Settings.
        vinference: Sampling settings, which `arguments` overrides.
        model: Folder, hub id, or loaded model, which is trained in place; by default the model of `vinference`.
        reward_funcs: One or several reward functions or reward models.
        reward_processing_classes: Tokenizers of the reward models.
        train_dataset: Prompts to train on, in a column `prompt`.
        eval_dataset: Prompts to evaluate on.
        processing_class: Tokenizer.
        data_tokenize_fn: Function of a batch of examples with rendered prompts, the tokenizer and the tools (None),
            which returns `input_ids` and optionally `attention_mask` and further columns.

    Raises:
        ValueError: A setting is not supported by groupax.
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
        settings = with_sampling(arguments, vinference).to_native()
        if isinstance(model, EasyDeLModel):
            settings = replace(settings, **model.trainer_settings)
        processing_class = processing_class or (vinference and vinference.tokenizer)
        datasets = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        examples = {name: load_examples(each, name) for name, each in datasets.items() if each is not None}
        if data_tokenize_fn is not None:
            if processing_class is None:
                raise ValueError("data_tokenize_fn needs a tokenizer; pass it as processing_class")
            examples = {name: _tokenized(each, data_tokenize_fn, processing_class) for name, each in examples.items()}
        listeners: list[Any] = []
        self.native = native.GRPOTrainer(
            hf.as_model(model),
            reward_funcs,
            settings,
            examples.get("train_dataset"),
            examples.get("eval_dataset"),
            processing_class,
            reward_processing_classes,
            listeners=listeners,
        )
        self._trained = TrainedModel(model if isinstance(model, hf.CausalLM) else None, self.native)
        listeners.append(self._trained)

    @property
    def model(self) -> hf.CausalLM:
        """The policy with the present weights: the given model, if it was loaded."""
        return self._trained.model

    @property
    def model_state(self) -> SimpleNamespace:
        """The policy, in the attribute `model`."""
        return SimpleNamespace(model=self.model)

    def train(self) -> TrainResult:
        """Trains the policy and saves it in the run's `model/`."""
        return self.native.train()

    def evaluate(self) -> Any:
        """Evaluates the current policy on `eval_dataset`."""
        return self.native.evaluate()

    def save_pretrained(self, folder: Any) -> None:
        """Writes the current policy to a folder for transformers; other files in it are kept."""
        hf.save_policy(self.native, folder)


def with_sampling(arguments: GRPOConfig, vinference: vInference | None) -> GRPOConfig:
    """Returns the settings, with those of a `vInference` in place of defaults."""
    if vinference is None:
        return arguments
    merged, defaults = copy.copy(arguments), GRPOConfig.FIELDS.defaults  # not of what the settings hold, such as tools
    for name, value in vinference.given.items():
        own = SAMPLING[name]
        if getattr(arguments, own) == defaults[own]:
            setattr(merged, own, value)
        elif getattr(arguments, own) != value:
            warn(f"GRPOConfig's {own}={getattr(arguments, own)!r} overrides vInference's {name}={value!r}")
    return merged


def _tokenized(examples: Any, tokenize: Callable[..., Any], tokenizer: Any) -> list[dict[str, Any]]:
    """Returns the examples with the columns of a `data_tokenize_fn` and unpadded `prompt_ids`."""
    tokenizer = prepare_tokenizer(tokenizer)
    rows = [dict(examples[index]) for index in range(len(examples))]
    texts = [
        render(tokenizer, row["prompt"], f"prompt {index}", template_kwargs=row_template_kwargs(row))
        if is_conversational(row["prompt"])
        else row["prompt"]
        for index, row in enumerate(rows)
    ]
    batch = {column: [row[column] for row in rows] for column in rows[0]} | {"prompt": texts}
    columns = dict(tokenize(batch, tokenizer, None))
    if "input_ids" not in columns:
        raise ValueError(f"data_tokenize_fn must return input_ids, it returned {', '.join(columns)}")
    ids = columns.pop("input_ids")
    masks = columns.pop("attention_mask", [np.ones(len(row)) for row in ids])
    for index, (row, tokens, mask) in enumerate(zip(rows, ids, masks, strict=True)):
        row |= {name: np.asarray(values[index]).tolist() for name, values in columns.items()}
        row["prompt_ids"] = np.asarray(tokens)[np.asarray(mask) > 0].tolist()
    return rows
