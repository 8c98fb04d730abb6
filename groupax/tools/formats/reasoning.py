"""Turns in which nothing is a call: reasoning between marks, and content. Imports no jax."""

from functools import partial
from typing import Any, NoReturn

from groupax.tools.calls import ParsedTurn
from groupax.tools.formats import mistral
from groupax.tools.formats.choose import CallFormat
from groupax.tools.formats.reading import THINK, read_marked


def reasoning_format(tokenizer: Any, generation_prompt: str) -> CallFormat | None:
    """Returns the format of turns with reasoning and without calls; None if the chat template writes no reasoning.

    Args:
        tokenizer: Tokenizer with a chat template.
        generation_prompt: What the template writes between a user's message and the turn.
    """
    template = str(tokenizer.chat_template)
    for think in (THINK, mistral.THINK):
        if think[1] in template:
            return CallFormat("reasoning", partial(_read, think), (), generation_prompt)
    return None


def _read(think: tuple[str, str], text: str, prompt: str) -> ParsedTurn:
    return read_marked(text, prompt, think[0], _no_call, think)


def _no_call(text: str, start: int) -> NoReturn:
    raise AssertionError(f"reasoning was read as a call: {text[start : start + 80]!r}")
