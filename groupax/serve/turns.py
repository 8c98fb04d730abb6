"""Turns of a chat as protocols report them: reasoning, content and calls, in full or as they grow. Imports no jax."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from groupax.data.tokenizer import decode
from groupax.data.tool_arguments import convert_arguments
from groupax.engine.sequence import exempt_length, text_before_stop
from groupax.tools.calls import ParsedTurn, ToolCall
from groupax.tools.formats import FORMATS, RESPONSE_TEMPLATE, CallFormat, call_format, reasoning_format
from groupax.tools.readers import MESSAGE, MISTRAL_THINK, THINK

KEPT_FORMATS = 64  # per model, one for each value of the template's arguments
ENDED_LATE = ("llama", RESPONSE_TEMPLATE)
HEADER = re.compile(r"<\|(?:channel|start)\|>")


@dataclass(frozen=True)
class TurnFormat:
    """The way in which a model writes turns, for certain template arguments.

    Attributes:
        tokenizer: Tokenizer of the model.
        calls: Format of calls and of reasoning; None if turns are plain text.
        marks: Marks of the format.
        hidden: Special tokens that are not marks.
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
        # a mark may have begun, but not ended
        starts = (mark[:size] for mark in self.marks for size in range(1, len(mark)))
        return text[: len(text) - max((len(start) for start in starts if text.endswith(start)), default=0)]


class TurnFormats:
    """The turn formats of a model, found when they are first needed. Threads may share them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._of = lru_cache(maxsize=KEPT_FORMATS)(self._find)

    def of(self, template_kwargs: Mapping[str, Any], has_tools: bool) -> TurnFormat:
        """Returns the format of turns for some template arguments; without tools only reasoning is separated."""
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


ID_LETTERS = 9  # letters and digits, which is all that some templates take for an id
MAX_READINGS = 256  # of the whole text while a turn doubles its length, so that the time is about linear


@dataclass(frozen=True)
class Call:
    """A call of a tool."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Turn:
    """A turn, or what is new of it.

    Attributes:
        content: Text without reasoning and calls.
        reasoning: Text of the reasoning.
        calls: Calls that can be read; the text of others is content.
        finish_reason: "stop", "length" or "tool_calls"; None while the turn continues.
        stop_string: The stop string that ended the turn.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    finish_reason: str | None = None
    stop_string: str | None = None


@dataclass(frozen=True)
class TurnReader:
    """Reads the turns that answer a request.

    Attributes:
        format: How the model writes turns.
        tools: Tools that it may call, as schemas in OpenAI's format.
        parallel: Whether more than the first call is reported.
        prompt: Generation prompt that the turn continues; None is the template's own.
        begun: Beginning of the turn that was written for the model.
        stop: Stop strings.
        min_tokens: Number of tokens in which a stop string may not end.
    """

    format: TurnFormat
    tools: Sequence[Mapping[str, Any]] = ()
    parallel: bool = True
    prompt: str | None = None
    begun: str = ""
    stop: tuple[str, ...] = ()
    min_tokens: int = 0

    def text(self, context: Sequence[int], tokens: Sequence[int]) -> tuple[str, str | None]:
        """Returns the text of a finished turn, up to a stop string, and that stop string.

        The context are the last tokens of the prompt (see `tokenizer.context_tokens`).
        """

        def decode(tokens: Sequence[int]) -> str:
            before, both = self.format.decode(context), self.format.decode([*context, *tokens])
            return both[len(before) :] if both.startswith(before) else self.format.decode(tokens)

        whole = decode(tokens)
        text = text_before_stop(whole, self.stop, exempt_length(decode, tokens, self.min_tokens) if self.stop else 0)
        cut = whole[len(text) :]
        return text, next((stop for stop in self.stop if cut.startswith(stop)), None)

    def read(self, text: str, finish_reason: str, seed: Sequence[int], stop_string: str | None = None) -> Turn:
        """Returns a finished turn; ids of its calls are made from the seed."""
        parsed = self.format.parse(self.begun + text, self.prompt)
        sound = [call for call in parsed.calls if self.tools and not call.fault]
        others = [call.text.strip() for call in parsed.calls if not self.tools or call.fault]
        content = "\n".join(filter(None, [parsed.content, *others]))
        calls = self._calls(sound, seed)
        reason = "tool_calls" if calls and finish_reason == "stop" else finish_reason
        return Turn(content, parsed.reasoning, calls, reason, stop_string)

    def read_begun(self, text: str, seed: Sequence[int]) -> Turn:
        """Returns what later tokens cannot change of a turn that continues."""
        settled = self.format.settled(self.begun + text, bool(self.tools))
        if self.format.calls is None:
            return Turn(settled)
        parsed = self.format.parse(settled, self.prompt)
        is_early = self.tools and self.format.calls.name not in ENDED_LATE  # else only a turn's end shows a call
        sound = [call for call in parsed.calls if is_early and not call.fault]
        return Turn(parsed.content, parsed.reasoning, self._calls(sound, seed))

    def _calls(self, calls: Sequence[ToolCall], seed: Sequence[int]) -> tuple[Call, ...]:
        calls = calls if self.parallel else calls[:1]
        begun = hashlib.sha256(json.dumps([*seed]).encode()).hexdigest() if calls else ""  # of a long prompt only once
        ids = [hashlib.sha256(f"{begun} {number}".encode()).hexdigest()[:ID_LETTERS] for number in range(len(calls))]
        texts = [json.dumps(self._arguments(call), ensure_ascii=False) for call in calls]
        return tuple(Call(own, call.name, text) for own, call, text in zip(ids, calls, texts, strict=True))

    def _arguments(self, call: ToolCall) -> Mapping[str, Any]:
        """Returns the arguments of a call; where the format writes no types, those that the tool's schema has."""
        schema = next((tool for tool in self.tools if tool["function"]["name"] == call.name), None)
        return convert_arguments(schema, call.arguments) if call.is_text and schema else call.arguments


class TurnStream:
    """The new parts of a turn that grows."""

    def __init__(self, reader: TurnReader, seed: Sequence[int]) -> None:
        self._reader, self._seed = reader, seed
        self._text, self._sent, self._num_read = "", Turn(), 0

    def add(self, text: str) -> Turn:
        """Adds text and returns what is new; throttled for long turns, which are re-parsed from their start."""
        self._text += text
        if len(self._text) - self._num_read < len(self._text) // MAX_READINGS:
            return Turn()
        self._num_read = len(self._text)
        return self._new_part(self._reader.read_begun(self._text, self._seed))

    def end(self, text: str, finish_reason: str, stop_string: str | None) -> Turn:
        """Returns the rest of the whole turn."""
        return self._new_part(self._reader.read(text, finish_reason, self._seed, stop_string))

    def _new_part(self, turn: Turn) -> Turn:
        sent = self._sent
        reasoning, content = _rest(turn.reasoning, sent.reasoning), _rest(turn.content, sent.content)
        calls = turn.calls[len(sent.calls) :]
        self._sent = Turn(sent.content + content, sent.reasoning + reasoning, (*sent.calls, *calls))
        return Turn(content, reasoning, calls, turn.finish_reason, turn.stop_string)


def _rest(whole: str, sent: str) -> str:
    """Returns what is left of a text; all of it where it is another text than the one that was sent.

    It is if a model closes reasoning that it has not opened: what was sent as content is reasoning then.
    """
    return whole[len(sent) :] if whole.startswith(sent) else whole
