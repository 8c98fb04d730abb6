"""Recipes: known tasks that a model can be trained on with one command. Each is imported when it is used."""

import importlib

from groupax.core.settings.fields import check_known
from groupax.recipes.recipe import Recipe

# Name of a recipe -> its module, which defines `RECIPE`.
RECIPES = {
    "arithmetic": "groupax.recipes.arithmetic.problems",
    "shapes": "groupax.recipes.shapes.scenes",
    "gsm8k": "groupax.recipes.gsm8k",
    "numinamath": "groupax.recipes.numinamath",
    "instructions": "groupax.recipes.instructions",
    "word_problems": "groupax.recipes.word_problems",
    "calculator": "groupax.recipes.agents.calculator",
}


def load_recipe(name: str) -> Recipe:
    """Returns the recipe with this name."""
    check_known(name, RECIPES, f"there is no recipe {name!r}")
    return importlib.import_module(RECIPES[name]).RECIPE
