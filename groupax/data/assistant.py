"""The parts of rendered conversations that the assistant wrote. Imports no jax."""

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from groupax.data.chat import render_all
from groupax.data.tokenizer import rust_errors

TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
START, END = "\ue0f0", "\ue0f1"  # written in place of the tags; for private use, so that texts hardly have them
Spans = list[tuple[int, int]]


def render_with_spans(
    tokenizer: Any,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    names: Sequence[str],
    template_kwargs: Sequence[Mapping[str, Any]],
    tools: Sequence[Sequence[Mapping[str, Any]]],
) -> tuple[list[str], list[Spans]]:
    """Renders conversations, and returns where in each text the assistant's parts start and end.

    They are what the chat template puts between {% generation %} and {% endgeneration %}. A template without these tags
    is asked for the conversation before and after each of the assistant's messages.

    Raises:
        ValueError: The template renders the start of a conversation differently from the whole, or a conversation
            cannot be rendered (see `render_all`).
    """
    template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    given = template_kwargs, tools
    if not TAG.search(template):
        texts = render_all(tokenizer, conversations, names, False, *given)
        return texts, _spans_of_prefixes(tokenizer, conversations, texts, names, *given)
    marking = copy.copy(tokenizer)
    marking.chat_template = TAG.sub(_marker, template)
    marked = render_all(marking, conversations, names, False, *given)
    return [text.replace(START, "").replace(END, "") for text in marked], [_marked_spans(text) for text in marked]


def learned_tokens(tokenizer: Any, text: str, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
    """Returns the token ids of a rendered text, and which tokens have a character in one of the spans.

    Raises:
        ValueError: The tokenizer does not say which characters a token has.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            "assistant_only_loss needs a fast tokenizer, which says which characters a token has; convert it to "
            "tokenizer.json, or set assistant_only_loss to False"
        )
    with rust_errors():
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2)
    mask = np.zeros(len(offsets), bool)
    for start, end in spans:
        mask |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    return np.asarray(encoded["input_ids"], np.int32), mask


def _marker(tag: re.Match[str]) -> str:
    """Returns a statement that writes a mark and trims the same spaces as the tag."""
    left, is_end, right = tag.groups()
    return f"{{%{left} if true %}}{END if is_end else START}{{% endif {right}%}}"


def _marked_spans(text: str) -> Spans:
    spans, start, length = [], None, 0
    for part in re.split(f"([{START}{END}])", text):
        if part == START:
            start = length
        elif part == END and start is not None:
            spans.append((start, length))
            start = None
        elif part != END:
            length += len(part)
    return spans


def _spans_of_prefixes(
    tokenizer: Any,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    texts: Sequence[str],
    names: Sequence[str],
    template_kwargs: Sequence[Mapping[str, Any]],
    tools: Sequence[Sequence[Mapping[str, Any]]],
) -> list[Spans]:
    turns = [
        (index, number)
        for index, messages in enumerate(conversations)
        for number, message in enumerate(messages)
        if message.get("role") == "assistant"
    ]

    def rendered(shift: int, add_generation_prompt: bool) -> list[str]:
        parts = [list(conversations[index][: number + shift]) for index, number in turns]
        own = [names[index] for index, _ in turns]
        kwargs = [template_kwargs[index] for index, _ in turns]
        schemas = [tools[index] for index, _ in turns]
        return render_all(tokenizer, parts, own, add_generation_prompt, kwargs, schemas)

    spans: list[Spans] = [[] for _ in conversations]
    for (index, number), before, after in zip(turns, rendered(0, True), rendered(1, False), strict=True):
        if not (texts[index].startswith(after) and after.startswith(before)):
            raise ValueError(
                f"{names[index]}: assistant_only_loss cannot tell message {number + 1} apart: the chat template has no "
                "{% generation %} tags, and renders the start of the conversation differently from the whole; set "
                "chat_template to one with these tags, or assistant_only_loss to False"
            )
        spans[index].append((len(before), len(after)))
    return spans
