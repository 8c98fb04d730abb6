"""Options of commands for tools and environments: what a command names, or else its recipe."""

from collections.abc import Sequence
from typing import Any

from groupax.recipes import Recipe


def load_agents(
    tools: Sequence[str] | None, environments: Sequence[str] | None, recipe: Recipe | None
) -> tuple[list[Any], Any]:
    """Returns the tools and the environments of a command, as `GRPOTrainer` takes them.

    Args:
        tools: References of the tools; None takes the recipe's.
        environments: References of the environments; None takes the recipe's.
        recipe: Recipe of the command, if it has one.

    Raises:
        ValueError: One cannot be found.
    """
    from groupax.episodes.references import load_environments, load_tools

    if tools is None:
        tools = recipe.tools if recipe else ()
    if environments is None:
        environments = recipe.environments if recipe else ()
    return load_tools(tools), load_environments(environments)
