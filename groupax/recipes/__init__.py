"""Recipes: named tasks with data, prompts, rewards, default settings and a model. Imports no jax.

A recipe is a module, which turns rows into prompts, and a YAML file of the same name with all settings.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupax.data.examples import Example, Examples, check_text_only
from groupax.data.files import EVAL_SPLITS, TRAIN_SPLITS, MissingSplitError, file_kind, read_rows
from groupax.settings.fields import nearest


@dataclass(frozen=True)
class Recipe:
    """A task that a model can be trained on with one command.

    Attributes:
        model: Folder or hub id of the default model.
        reward_funcs: Names or references of the reward functions.
        tools: References of the tools that the model may call.
        environments: References of the environments.
        source: Hub id of its data; None if it generates them or takes them from files.
        config: Settings of `GRPOConfig` that differ from its defaults.
        expected: Measured result of a run, or a note that there is none.
        train_dataset: Loads the training prompts from the recipe's own source, or from a file, a folder or a hub id.
        eval_dataset: Loads the held-out prompts likewise; returns None if the source has none.
        examples: Loads the prompts of all rows of a file, or of the test split of a folder or hub id.
    """

    model: str
    reward_funcs: Sequence[str]
    tools: Sequence[str]
    environments: Sequence[str]
    source: str | None
    config: Mapping[str, Any]
    expected: str
    train_dataset: Callable[..., Examples]
    eval_dataset: Callable[..., Examples | None]
    examples: Callable[[str], Examples]


# Name of a recipe -> its module, which defines `RECIPE`.
RECIPES = {
    "arithmetic": "groupax.recipes.arithmetic.recipe",
    "shapes": "groupax.recipes.shapes.recipe",
    "gsm8k": "groupax.recipes.gsm8k",
    "numinamath": "groupax.recipes.numinamath",
    "countdown": "groupax.recipes.countdown",
    "tldr_length": "groupax.recipes.tldr_length",
    "calculator": "groupax.recipes.agents.calculator",
    "guess_number": "groupax.recipes.agents.guess_number",
    "sql": "groupax.recipes.agents.sql",
}


def load_recipe(name: str) -> Recipe:
    """Returns the recipe with this name.

    Raises:
        ValueError: There is none.
    """
    if name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}; the recipes are {', '.join(RECIPES)}{nearest(name, RECIPES)}")
    return importlib.import_module(RECIPES[name]).RECIPE


def make_recipe(
    module_file: str,
    example: Callable[[Example], dict[str, Any]],
    generated: Mapping[str, Callable[[], Examples]] | None = None,
) -> Recipe:
    """Creates the recipe of a module and the YAML file of the same name.

    The file has `model`, `reward_funcs`, `expected`, settings of `GRPOConfig`, and the source of the data: `dataset`, a
    hub id, and `subset`, its configuration. It may have `tools` and `environments`.

    Args:
        module_file: `__file__` of the module.
        example: Turns a row of the data into a row with a `prompt`; raises ValueError if it cannot.
        generated: Functions that generate "train" and "eval" data, instead of `dataset`.
    """
    import yaml

    settings = yaml.safe_load(Path(module_file).with_suffix(".yaml").read_text(encoding="utf-8"))
    model, rewards, expected = (settings.pop(name) for name in ("model", "reward_funcs", "expected"))
    tools, environments = (settings.pop(name, ()) for name in ("tools", "environments"))
    dataset, subset = settings.pop("dataset", None), settings.pop("subset", None)

    def read(source: str, splits: Sequence[str], name: str) -> Examples:
        rows = read_rows(source, name, splits, subset if source == dataset or Path(source).is_dir() else None)
        check_text_only(rows, f"{name} ({source})", may_have_images=True)
        return [_example(example, rows[index], index, source) for index in range(len(rows))]

    def train_dataset(source: str | None = None) -> Examples:
        if source is None and generated:
            return generated["train"]()
        return read(source or dataset, TRAIN_SPLITS, "train_dataset")

    def eval_dataset(source: str | None = None) -> Examples | None:
        if source is None and generated:
            return generated["eval"]()
        if source is not None and _is_one_set(Path(source)):
            return None
        try:
            return read(source or dataset, EVAL_SPLITS, "eval_dataset")
        except MissingSplitError:
            return None

    def examples(source: str) -> Examples:
        return read(source, EVAL_SPLITS, "eval_dataset")

    model = str(Path(module_file).parent / model) if model.startswith("./") else model
    config = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    return Recipe(
        model,
        tuple(rewards),
        tuple(tools),
        tuple(environments),
        dataset,
        config,
        expected.strip(),
        train_dataset,
        eval_dataset,
        examples,
    )


def _is_one_set(source: Path) -> bool:
    """Returns whether a source has no splits: a file, or a single dataset as saved by `datasets`."""
    return file_kind(source) is not None or (source / "state.json").is_file()


def _example(example: Callable[[Example], dict[str, Any]], row: Any, index: int, source: str) -> dict[str, Any]:
    try:
        return example(row)
    except ValueError as error:
        raise ValueError(f"row {index} of {source} does not fit the recipe: {error}") from error
