"""Adaptation of a recipe's defaults to a model."""

from collections.abc import Sequence
from dataclasses import replace

from groupax.config import GRPOConfig
from groupax.data.examples import Examples
from groupax.data.tokenizer import is_conversational, load_tokenizer
from groupax.models.families import read_config
from groupax.models.flops import find_config
from groupax.models.weights.nf4 import without_nf4
from groupax.recipes import Recipe
from groupax.storage.folders import resolve_folder

FALLBACK_TEMPLATE = "plain"


def max_positions_of(model: str) -> int:
    """Returns the number of positions of the model in a folder or with a hub id."""
    return read_config(without_nf4(find_config(str(resolve_folder(model)))[0])).max_positions


def fit_config(args: GRPOConfig, recipe: Recipe, positions: int) -> tuple[GRPOConfig, list[str]]:
    """Returns the settings, with defaults of the recipe changed that do not fit the model, and messages for the user.

    Args:
        args: Settings of the run.
        recipe: Recipe of the run.
        positions: Number of positions of the model.
    """
    default = recipe.config["max_completion_length"]
    if args.max_completion_length != default:
        return args, []
    longest, notes = fitting_length(positions, default, args.max_prompt_length)
    return replace(args, max_completion_length=longest), notes


def fitting_length(positions: int, max_completion_length: int, max_prompt_length: int | None) -> tuple[int, list[str]]:
    """Returns a default for the longest completion that leaves room for prompts: at most half of the positions.

    Args:
        positions: Number of positions of the model.
        max_completion_length: Default in tokens.
        max_prompt_length: Longest prompt in tokens.

    Returns:
        The length in tokens, and a message for the user if it differs from the default.
    """
    half = positions // 2
    if max_completion_length + (max_prompt_length or 1) <= positions or max_completion_length <= half:
        return max_completion_length, []
    return half, [
        f"the model has {positions} positions: completions have at most {half} tokens instead of the default "
        f"{max_completion_length}, and prompts have the rest"
    ]


def fitting_template(
    model: str, chat_template: str | None, datasets: Sequence[Examples]
) -> tuple[str | None, list[str]]:
    """Returns a fallback chat template if prompts are conversations and the model has none, as base models.

    Args:
        model: Folder or hub id.
        chat_template: Template that the user requested.
        datasets: Datasets with the prompts.

    Returns:
        The template's name, None for the model's own, and a message for the user if it is the fallback.
    """
    if chat_template is not None or not any(is_conversational(rows[0]["prompt"]) for rows in datasets if len(rows)):
        return chat_template, []
    folder = resolve_folder(model)
    if (folder / "adapter_config.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        return None, []  # the tokenizer of the base model is loaded with it
    if load_tokenizer(folder).chat_template:
        return None, []
    return FALLBACK_TEMPLATE, [
        f"the tokenizer has no chat template (a base model?): prompts are written with chat_template "
        f"'{FALLBACK_TEMPLATE}'"
    ]
