"""The format in which a chat template writes calls, found by rendering one and reading it back. Imports no jax."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from groupax.data.chat import render
from groupax.tools import readers
from groupax.tools.calls import ParsedTurn, ToolCall
from groupax.tools.readers import MISTRAL_THINK, THINK, read_marked

Reader = Callable[[str, str], ParsedTurn]


class Format(NamedTuple):
    """A format of calls: the reader of a turn that continues a prompt, and the marks that belong to it."""

    read: Reader
    marks: tuple[str, ...]


FORMATS = {
    "hermes": Format(readers.read_hermes, readers.HERMES_MARKS),
    "qwen_xml": Format(readers.read_xml, readers.XML_MARKS),
    "mistral": Format(readers.read_mistral, readers.MISTRAL_MARKS),
    "gpt_oss": Format(readers.read_harmony, readers.HARMONY_MARKS),
    "llama": Format(readers.read_llama, readers.LLAMA_MARKS),
}
RESPONSE_TEMPLATE = "response_template"
NAME, ARGUMENTS, QUESTION = "groupaxprobe", {"groupaxkey": "groupaxvalue"}, "groupaxquestion"
BEGUN_MARK = re.compile(r"[<\[][^<\[>\]]*+\Z")  # two marks may begin with the same characters
UP_TO_LETTER = re.compile(r"[^\w<\[]*+")
CALL = {"id": "groupax01", "type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}


@dataclass(frozen=True)
class CallFormat:
    """The format of a model's calls.

    Attributes:
        name: A name of `FORMATS`, or "response_template".
        reader: Reads a turn that continues a prompt.
        ends: Special tokens that are no part of the format and left out at the end of a turn.
        generation_prompt: What the chat template writes between a user's message and the turn.
    """

    name: str
    reader: Reader
    ends: tuple[str, ...]
    generation_prompt: str

    def parse(self, text: str, prompt: str | None = None) -> ParsedTurn:
        """Takes a turn apart. Never raises, whatever the model has written.

        Args:
            text: Text of the turn, decoded with its special tokens and its stop token.
            prompt: Generation prompt that the turn continues, which may have opened the reasoning. None is the one that
                the chat template writes by default.
        """
        return self.reader(_without_ends(text, self.ends), self.generation_prompt if prompt is None else prompt)


def call_format(tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> CallFormat:
    """Returns the format in which a tokenizer's chat template writes calls.

    The template renders a call, and the format is the one whose reader returns that call: one of `FORMATS`, else the
    tokenizer's `response_template`. The latter comes last because transformers takes many malformed calls for content,
    while the readers here say what is wrong with them.

    Raises:
        ValueError: The template fails, writes no calls, or writes them in another format.
    """
    generation_prompt, begun, turn = _rendered_call(tokenizer, template_kwargs)
    choices = []
    for name, (reader, marks) in FORMATS.items():
        ends = tuple(token for token in tokenizer.all_special_tokens if token and token not in marks)
        choices.append(CallFormat(name, reader, ends, generation_prompt))
    template = getattr(tokenizer, RESPONSE_TEMPLATE, None)
    if template is not None:
        reader = partial(readers.read_by_template, template)
        choices.append(CallFormat(RESPONSE_TEMPLATE, reader, (), generation_prompt))
    for choice in choices:
        calls = choice.parse(turn, begun).calls
        if len(calls) == 1 and not calls[0].fault and (calls[0].name, calls[0].arguments) == (NAME, ARGUMENTS):
            return choice
    raise ValueError(
        f"the chat template writes a tool call as {turn[:300]!r}, which is none of the formats {', '.join(FORMATS)}; "
        "set chat_template to one that writes one of these, or the tokenizer's response_template (transformers "
        "5.13 or later)"
    )


def call_opening(
    tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None, name: str | None = None
) -> tuple[str, str, str]:
    """Returns what makes a model call a tool when it is put after a prompt.

    Returns:
        The generation prompt, what replaces it (without the opened reasoning), and the beginning of a call: up to the
        name, or up to the first mark or letter after it.

    Raises:
        ValueError: The template writes no calls.
    """
    prompt, begun, turn = _rendered_call(tokenizer, template_kwargs)
    before, _, after = turn.partition(NAME)
    if name is None:
        return prompt, begun, before
    closing = UP_TO_LETTER.match(after)
    assert closing is not None, "it may be empty"
    return prompt, begun, f"{before}{name}{closing[0]}"


def reasoning_format(tokenizer: Any, generation_prompt: str) -> CallFormat | None:
    """Returns the format of turns with reasoning and without calls; None if the chat template writes no reasoning."""
    for think in (THINK, MISTRAL_THINK):
        if think[1] in str(tokenizer.chat_template):

            def read(text: str, prompt: str, think: tuple[str, str] = think) -> ParsedTurn:
                return read_marked(text, prompt, think[0], _no_call, think)

            return CallFormat("reasoning", read, (), generation_prompt)
    return None


def _no_call(text: str, start: int) -> tuple[list[ToolCall], int]:
    raise AssertionError(f"reasoning was read as a call: {text[start : start + 80]!r}")


def _rendered_call(tokenizer: Any, template_kwargs: Mapping[str, Any] | None) -> tuple[str, str, str]:
    """Returns the generation prompt, what the template writes before a turn that calls a tool, and that turn.

    The first two differ if the generation prompt opens reasoning and the turn has none.
    """
    user = {"role": "user", "content": QUESTION}
    name = "a conversation with a tool call"
    prompt = render(tokenizer, [user], name, True, template_kwargs)
    assistant = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    whole = render(tokenizer, [user, assistant], name, False, template_kwargs)
    common = next((i for i, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1]), len(prompt))
    begun = BEGUN_MARK.sub("", whole[:common])
    turn = whole[len(begun) :]
    if NAME not in turn:
        raise ValueError(
            "the chat template writes no tool calls, so the model would not see what it has called; set "
            "chat_template to one that does, or train without tools"
        )
    return prompt.rpartition(QUESTION)[2], begun.rpartition(QUESTION)[2], turn


def _without_ends(text: str, ends: Sequence[str]) -> str:
    """Returns the text without the stop tokens, and the white space between them, at its end."""
    stop, end = len(text), len(text)
    while end and (text[end - 1].isspace() or any(text.endswith(mark, 0, end) for mark in ends)):
        if text[end - 1].isspace():
            end -= 1
        else:
            end -= next(len(mark) for mark in ends if text.endswith(mark, 0, end))
            stop = end
    return text[:stop]
