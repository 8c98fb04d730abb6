"""EasyDeL's trainer."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

import groupax.trainer as native
from groupax.compat import hf
from groupax.compat.easydel.config import GRPOConfig
from groupax.compat.easydel.models import EasyDeLModel
from groupax.compat.easydel.vinference import SAMPLING, vInference
from groupax.compat.fields import tell
from groupax.data.chat import render
from groupax.data.examples import load_examples
from groupax.data.prompts import row_template_kwargs
from groupax.data.tokenizer import is_conversational, prepare_tokenizer

# Columns that hold the question in well-known datasets without a column `prompt`.
QUESTIONS = ("question", "problem")


class GRPOTrainer:
    """EasyDeL's trainer over `groupax.GRPOTrainer`, which is its `native`.

    Args:
        arguments: Settings.
        vinference: Sampling settings where `arguments` has none.
        model: A folder, a hub id, or a loaded model.
        reward_funcs: One or several reward functions or reward models.
        reward_processing_classes: Tokenizers of the reward models.
        train_dataset: Prompts, in a column `prompt`, `question` or `problem`.
        eval_dataset: Held-out prompts, likewise.
        processing_class: The tokenizer.
        data_tokenize_fn: A function that returns `input_ids`, `attention_mask` and further columns of a batch of
            examples, whose prompts are already text; it is called with the batch, the tokenizer and tools.

    Raises:
        ValueError: A setting asks for something that groupax does not support.
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
        """Trains, and saves the model in `model/` of the run folder."""
        return self.native.train()

    def evaluate(self) -> Any:
        """Evaluates the current policy on `eval_dataset`."""
        return self.native.evaluate()

    def save_pretrained(self, folder: Any) -> None:
        """Writes the current policy as a folder that transformers loads; other files in it are kept."""
        hf.save_policy(self.native, folder)


def with_sampling(arguments: GRPOConfig, vinference: vInference | None) -> GRPOConfig:
    """Returns the settings, with those of a `vInference` where they are not set."""
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
    """Returns the rows with their `prompt` and the results of a `data_tokenize_fn`."""
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
        render(tokenizer, row["prompt"], f"prompt {index}", template_kwargs=row_template_kwargs(row))
        if is_conversational(row["prompt"])
        else row["prompt"]
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
