"""Options of commands for tools and environments: what a command names, or else its recipe."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from groupax.recipes import Recipe


@dataclass(frozen=True)
class Agents:
    """References of the tools and environments of a command.

    Attributes:
        tools: References of the tools.
        environments: References of the environments.
    """

    tools: Sequence[str] = ()
    environments: Sequence[str] = ()

    def load(self) -> tuple[list[Any], Any]:
        """Returns the tools and the environments, as `GRPOTrainer` takes them.

        Raises:
            ValueError: One cannot be found.
        """
        from groupax.episodes.rules import load_environments, load_tools

        return load_tools(self.tools), load_environments(self.environments)

    @property
    def flags(self) -> str:
        """The options that name them, for a command that is shown to the user."""
        given = {"--tools": self.tools, "--environments": self.environments}
        return "".join(f" {flag} {shlex.join(references)}" for flag, references in given.items() if references)


def chosen_agents(tools: Sequence[str] | None, environments: Sequence[str] | None, recipe: Recipe | None) -> Agents:
    """Returns what the options of a command name; an option that is None takes what the recipe has."""
    own = Agents(recipe.tools, recipe.environments) if recipe else Agents()
    return Agents(own.tools if tools is None else tools, own.environments if environments is None else environments)
