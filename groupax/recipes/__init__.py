"""Recipes: data, rewards, defaults and a model that belong together, by name. Imports no jax."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupax.config import nearest


@dataclass(frozen=True)
class Recipe:
    """A task that a model can be trained on with one command.

    Attributes:
        model: a folder or hub id, used unless the user names another.
        train_dataset: makes the training prompts.
        eval_dataset: makes the held-out prompts.
        reward_funcs: reward functions or names.
        config: settings of `GRPOConfig` that differ from its defaults.
    """

    model: str
    train_dataset: Callable[[], Sequence[Mapping[str, Any]]]
    eval_dataset: Callable[[], Sequence[Mapping[str, Any]]]
    reward_funcs: Sequence[Any]
    config: Mapping[str, Any]


# The module of each recipe; it has a `RECIPE`.
RECIPES = {"arithmetic": "groupax.recipes.arithmetic.recipe"}


def load_recipe(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}{nearest(name, RECIPES)}; there are {', '.join(RECIPES)}")
    return importlib.import_module(RECIPES[name]).RECIPE
