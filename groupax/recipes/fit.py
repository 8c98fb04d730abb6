"""A recipe's defaults, fitted to the model at hand."""

from collections.abc import Sequence
from dataclasses import replace

from groupax.config import GRPOConfig
from groupax.data.examples import Examples
from groupax.data.tokenizer import is_conversational, load_tokenizer
from groupax.models.bitsandbytes_format import without_nf4
from groupax.models.families import read_config
from groupax.models.summary import find_config
from groupax.recipes import Recipe
from groupax.storage.folders import resolve_folder

FALLBACK_TEMPLATE = "plain"


def positions_of(model: str) -> int:
    """How many positions a model has, which is loaded from this folder or hub id."""
    return read_config(without_nf4(find_config(str(resolve_folder(model)))[0])).max_positions


def fitted(args: GRPOConfig, recipe: Recipe, positions: int) -> tuple[GRPOConfig, list[str]]:
    """The settings with those defaults of the recipe changed that the model cannot have, and lines for the user.

    Args:
        args: of the run.
        recipe: that it is of.
        positions: of the model.
    """
    default = recipe.config["max_completion_length"]
    if args.max_completion_length != default:
        return args, []
    longest, notes = fitting_length(positions, default, args.max_prompt_length)
    return replace(args, max_completion_length=longest), notes


def fitting_length(positions: int, max_completion_length: int, max_prompt_length: int | None) -> tuple[int, list[str]]:
    """A default of the longest completion, lowered to half of the model's positions if prompts have no room beside it.

    Args:
        positions: of the model.
        max_completion_length: the default, in tokens.
        max_prompt_length: what prompts may take.

    Returns:
        The length, and a line for the user if it is another one.
    """
    half = positions // 2
    if max_completion_length + (max_prompt_length or 1) <= positions or max_completion_length <= half:
        return max_completion_length, []
    return half, [
        f"the model has {positions} positions: completions have at most {half} tokens instead of the default "
        f"{max_completion_length}, and prompts what is left"
    ]


def fitting_template(
    model: str, chat_template: str | None, datasets: Sequence[Examples]
) -> tuple[str | None, list[str]]:
    """The chat template, where prompts are conversations and the model, a base model, has none.

    Args:
        model: a folder or hub id.
        chat_template: what the user asked for.
        datasets: with the prompts.

    Returns:
        The template's name or None for the model's own, and a line for the user if it is a fallback.
    """
    if chat_template is not None or not any(is_conversational(rows[0]["prompt"]) for rows in datasets if len(rows)):
        return chat_template, []
    folder = resolve_folder(model)
    if (folder / "adapter_config.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        return None, []  # the base's tokenizer is loaded with it
    if load_tokenizer(folder).chat_template:
        return None, []
    return FALLBACK_TEMPLATE, [
        f"the tokenizer has no chat template (a base model?): prompts are written with chat_template "
        f"'{FALLBACK_TEMPLATE}'"
    ]
