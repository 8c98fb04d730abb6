"""The format in which a served model writes turns: its marks of reasoning and calls. Imports no jax."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from groupax.data.tokenizer import decode
from groupax.tools.calls import ParsedTurn
from groupax.tools.formats import FORMATS, RESPONSE_TEMPLATE, CallFormat, call_format, reasoning_format
from groupax.tools.readers import MESSAGE, MISTRAL_THINK, THINK

KEPT_FORMATS = 64  # per model, one for each value of the template's arguments
ENDED_LATE = ("llama", RESPONSE_TEMPLATE)  # formats in which only the end of a turn shows whether it is a call
HEADER = re.compile(r"<\|(?:channel|start)\|>")


@dataclass(frozen=True)
class TurnFormat:
    """The way in which a model writes turns, for certain template arguments.

    Attributes:
        tokenizer: Tokenizer of the model.
        calls: Format of calls and of reasoning; None if turns are plain text.
        marks: Marks of the format.
        hidden: Special tokens that are no marks.
        fault: Reason why there can be no calls.
    """

    tokenizer: Any
    calls: CallFormat | None
    marks: tuple[str, ...] = ()
    hidden: frozenset[int] = frozenset()
    fault: str = ""

    def parse(self, text: str, prompt: str | None) -> ParsedTurn:
        """Takes a turn apart (see `CallFormat.parse`)."""
        return ParsedTurn(text, "", ()) if self.calls is None else self.calls.parse(text, prompt)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, in which the only special tokens are marks of the format."""
        if self.calls is None:
            return decode(self.tokenizer, [tokens])[0]
        shown = [token for token in tokens if token not in self.hidden]
        return self.tokenizer.decode(shown, skip_special_tokens=False)

    def settled(self, text: str, has_tools: bool) -> str:
        """Returns the beginning of an unfinished turn that later tokens cannot give another meaning."""
        if self.calls is None:
            return text
        if self.calls.name == RESPONSE_TEMPLATE:
            return ""
        if self.calls.name == "llama" and has_tools and text.lstrip().startswith("{"):
            return ""
        if self.calls.name == "gpt_oss":
            header = next(reversed([*HEADER.finditer(text)]), None)
            if header is not None and MESSAGE not in text[header.start() :]:
                text = text[: header.start()]
        longest = max((mark_overlap(text, mark) for mark in self.marks), default=0)
        return text[: len(text) - longest]

    @property
    def reports_calls_early(self) -> bool:
        """True if a call is complete before the end of its turn."""
        return self.calls is not None and self.calls.name not in ENDED_LATE


class TurnFormats:
    """The turn formats of a model, found when they are first needed. Threads may share them.

    Args:
        tokenizer: Tokenizer of the model.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._of = lru_cache(maxsize=KEPT_FORMATS)(self._find)

    def of(self, template_kwargs: Mapping[str, Any], has_tools: bool) -> TurnFormat:
        """Returns the format of turns.

        Args:
            template_kwargs: Arguments for the chat template.
            has_tools: Whether the model may call tools; otherwise only its reasoning is separated.
        """
        return self._of(json.dumps(template_kwargs, sort_keys=True), has_tools)

    def _find(self, template_kwargs: str, has_tools: bool) -> TurnFormat:
        tokenizer, fault = self._tokenizer, ""
        if not tokenizer.chat_template:
            return TurnFormat(tokenizer, None, fault="the tokenizer has no chat template")
        try:
            found = call_format(tokenizer, json.loads(template_kwargs))
        except ValueError as error:
            found, fault = None, str(error)
        if not has_tools and (found is None or found.name != "gpt_oss"):
            found = reasoning_format(tokenizer, "" if found is None else found.generation_prompt)
        if found is None:
            return TurnFormat(tokenizer, None, fault=fault)
        marks = FORMATS[found.name][1] if found.name in FORMATS else (*THINK, *MISTRAL_THINK)
        added = {} if found.name == RESPONSE_TEMPLATE else tokenizer.added_tokens_decoder
        hidden = frozenset(index for index, token in added.items() if token.special and token.content not in marks)
        return TurnFormat(tokenizer, found, marks, hidden)


def mark_overlap(text: str, mark: str) -> int:
    """Returns the length of the longest end of the text with which a mark begins, but not the whole mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
