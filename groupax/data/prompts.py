"""Prompts as token ids, and the policies for those that are too long. Imports no jax."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from groupax.data.examples import Examples
from groupax.data.tokenizer import SPARE_TOKENS, encode_prompts, is_conversational
from groupax.data.tools_column import tools_of_rows
from groupax.settings.prompts import PromptOverflow
from groupax.settings.template_kwargs import check_template_kwargs


@dataclass(frozen=True, eq=False)
class PromptSet:
    """Prompts with their token ids.

    Attributes:
        examples: Rows with a `prompt` and any further columns.
        token_ids: Token ids of each prompt.
        num_dropped: Number of prompts left out because they were too long.
        num_truncated: Number of prompts whose start was cut off.
        max_length: Longest prompt allowed, in tokens.
    """

    examples: Examples
    token_ids: Sequence[np.ndarray]
    num_dropped: int = 0
    num_truncated: int = 0
    max_length: int = 0

    def __len__(self) -> int:
        return len(self.examples)


def encode_examples(
    examples: Examples,
    tokenizer: Any,
    max_length: int,
    overflow: PromptOverflow,
    template_kwargs: Mapping[str, Any] | None = None,
    name: str = "",
    tools: Sequence[Sequence[Mapping[str, Any]]] | None = None,
    may_be_empty: bool = False,
) -> PromptSet:
    """Tokenizes all prompts and applies the policy for those longer than `max_length` tokens.

    A column `prompt_ids` has the tokens of the prompts, with their tools if they have any, if they are not those that
    the tokenizer returns. A column `chat_template_kwargs` has arguments for the chat template, which take precedence
    over `template_kwargs`. A column `tools` has schemas for it, if the run has no tools.

    Args:
        examples: Rows with a column `prompt`.
        tokenizer: Tokenizer of the model.
        max_length: Longest prompt allowed, in tokens.
        overflow: Policy for longer prompts.
        template_kwargs: Arguments for the chat template.
        name: Name of the dataset in an error.
        tools: The run's tools for each row, as schemas in OpenAI's format.
        may_be_empty: Whether a conversation needs no text, e.g. since an environment adds to it.

    Raises:
        ValueError: A prompt is too long and the policy is "error", none is left after dropping, one is empty, or one
            cannot be encoded (see `encode_prompts`).
    """
    label = f"{name}: prompt" if name else "prompt"
    shown_tools = tools_of_rows(examples, tools, may_be_empty, label)
    token_ids = _encode(examples, tokenizer, max_length, template_kwargs or {}, name, shown_tools, may_be_empty)
    for index, ids in enumerate(token_ids):
        if len(ids) == 0:
            raise ValueError(f"{label} {index} is empty and the tokenizer adds no token; the model needs at least one")
    too_long = [index for index, ids in enumerate(token_ids) if len(ids) > max_length]
    if not too_long:
        return PromptSet(examples, token_ids, max_length=max_length)
    if overflow == "error":
        raise ValueError(_length_fault(token_ids, too_long, max_length, label))
    if overflow == "truncate_left":
        cut = [ids[-max_length:] for ids in token_ids]
        return PromptSet(examples, cut, num_truncated=len(too_long), max_length=max_length)
    kept = [index for index, ids in enumerate(token_ids) if len(ids) <= max_length]
    if not kept:
        raise ValueError(
            f"all {len(examples)} prompts are longer than {max_length} tokens, which max_prompt_length allows, or what "
            "the completion leaves of the model's positions; change these"
        )
    rows, ids = [examples[i] for i in kept], [token_ids[i] for i in kept]
    return PromptSet(rows, ids, num_dropped=len(too_long), max_length=max_length)


def _length_fault(token_ids: Sequence[np.ndarray], too_long: Sequence[int], max_length: int, label: str) -> str:
    known = max_length + SPARE_TOKENS  # of a longer prompt only the end may have been encoded
    length = len(token_ids[too_long[0]])
    return (
        f"{label} {too_long[0]} has {length if length <= known else f'more than {known}'} tokens, at most {max_length} "
        f"are allowed ({len(too_long)} of {len(token_ids)} prompts are too long): by max_prompt_length, or by what the "
        "completion leaves of the model's positions; change these, or set prompt_overflow to 'drop' or 'truncate_left'"
    )


def _encode(
    examples: Examples,
    tokenizer: Any,
    max_length: int,
    template_kwargs: Mapping[str, Any],
    name: str,
    tools: Sequence[Sequence[Mapping[str, Any]]] | None,
    may_be_empty: bool,
) -> list[np.ndarray]:
    label = f"{name}: prompt" if name else "prompt"
    is_table = hasattr(examples, "column_names")
    prompts = list(examples["prompt"]) if is_table else [examples[index]["prompt"] for index in range(len(examples))]
    if "prompt_ids" not in examples[0]:
        arguments = _template_kwargs(examples, prompts, template_kwargs, label)
        return encode_prompts(tokenizer, prompts, arguments, max_length, label, tools, may_be_empty)
    if template_kwargs:
        raise ValueError(
            f"{name or 'the dataset'} has a column prompt_ids, which chat_template_kwargs cannot change; leave one of "
            "them out"
        )
    return [_check_ids(examples[index]["prompt_ids"], f"{label} {index}") for index in range(len(examples))]


def _check_ids(given: Any, name: str) -> np.ndarray:
    try:
        ids = np.asarray(given)
    except ValueError:  # rows of different lengths
        ids = np.zeros((0, 0))
    is_ids = ids.ndim == 1 and (ids.size == 0 or (np.issubdtype(ids.dtype, np.integer) and ids.min() >= 0))
    if not is_ids or (ids.size and ids.max() >= 1 << 31):
        raise ValueError(f"{name}: the column prompt_ids must have a list of token ids, got {given!r:.100}")
    return ids.astype(np.int32)


def _template_kwargs(
    examples: Examples, prompts: Sequence[Any], shared: Mapping[str, Any], name: str
) -> list[dict[str, Any]] | None:
    """Returns each prompt's arguments for the chat template, or None if there are none.

    Raises:
        ValueError: A row's arguments are not a mapping, or no prompt is rendered by a chat template.
    """
    if shared and not any(map(is_conversational, prompts)):
        raise ValueError(
            f"chat_template_kwargs has {', '.join(shared)}, but no prompt is a list of messages, and a chat template "
            "renders nothing else; leave them out, or give such prompts"
        )
    if not shared and "chat_template_kwargs" not in examples[0]:
        return None
    arguments = []
    for index, prompt in enumerate(prompts):
        row = examples[index]
        if row.get("chat_template_kwargs") is not None:
            check_template_kwargs(row["chat_template_kwargs"], f"{name} {index}: chat_template_kwargs")
        arguments.append({**(shared if is_conversational(prompt) else {}), **row_template_kwargs(row)})
    return arguments


def row_template_kwargs(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row's own arguments for the chat template, without nulls, which tables have for missing arguments."""
    return {key: value for key, value in (row.get("chat_template_kwargs") or {}).items() if value is not None}


def prompt_limit(max_positions: int, max_completion_length: int, max_prompt_length: int | None, name: str) -> int:
    """Returns the longest prompt allowed, in tokens: the positions that the completion leaves, or fewer.

    Args:
        max_positions: Number of positions of the model.
        max_completion_length: Longest completion, in tokens.
        max_prompt_length: A lower limit; None for the model's only.
        name: Name of the completion's limit in an error.

    Raises:
        ValueError: The completion leaves no position.
    """
    context = max_positions - max_completion_length
    limit = min(context, max_prompt_length or context)
    if limit < 1:
        raise ValueError(
            f"{name} {max_completion_length} leaves no room for a prompt in the model's {max_positions} positions; "
            "lower it"
        )
    return limit
