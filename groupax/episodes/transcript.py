"""Finds the turn that a request of a program continues, and the prompt of its next turn. Imports no jax.

The messages of a request are compared with those of earlier requests and of what the model answered. If they begin
with an answered conversation, the prompt is the stream of tokens of that turn and a bridge to the new messages, and
nothing that was sampled is encoded again. Otherwise the whole conversation is rendered: a new stream begins.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from groupax.data.bridge import Bridge, TextBridge
from groupax.data.chat import join_text_parts
from groupax.data.tokenizer import context_tokens, decode_after, encode_prompts, encode_texts
from groupax.episodes.asked import Asked
from groupax.serve.exchange import TokenTexts
from groupax.serve.turn_format import TurnFormats
from groupax.serve.turns import Turn, TurnReader
from groupax.tools.formats.choose import call_opening

KINDS = 64  # of tools and template arguments that are kept ready

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class _Known:
    """A conversation up to and including a sampled turn."""

    stream: np.ndarray
    answer: Mapping[str, Any]  # the assistant's message


class Templates:
    """The bridges and formats of turns of a tokenizer, which the episodes of a run share. Threads may share it.

    Args:
        tokenizer: Tokenizer of the model.
        template_kwargs: Arguments of the run for the chat template.
        eos_ids: Tokens that end a turn.

    Attributes:
        adapters: Names of the adapters that requests may name as their model; empty where one policy answers all.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any], eos_ids: Sequence[int] = ()) -> None:
        self.tokenizer, self.template_kwargs, self._eos_ids = tokenizer, template_kwargs, eos_ids
        self.token_texts = TokenTexts(tokenizer)
        self.adapters: tuple[str, ...] = ()
        self._formats = TurnFormats(tokenizer)
        self._bridge = lru_cache(maxsize=KINDS)(self._new_bridge)

    def arguments(self, asked: Asked) -> dict[str, Any]:
        """Returns the arguments for the chat template of a request."""
        return {**self.template_kwargs, **(asked.template_kwargs or {})}

    def bridge(self, asked: Asked) -> Bridge | None:
        """Returns what writes the tokens between two turns; None if the template cannot be continued token by token."""
        return self._bridge(_json([list(asked.tools), self.arguments(asked)]))

    def opening(self, asked: Asked) -> str:
        """Returns the beginning of the call that a request wants, which the prompt ends with; empty for none.

        A template that opens reasoning before the turn leaves the choice to the model.
        """
        if asked.tool_choice == "auto" or not asked.tools:
            return ""
        name = None if asked.tool_choice == "required" else asked.tool_choice["name"]
        prompt, begun, opening = call_opening(self.tokenizer, self.arguments(asked), name)
        return opening if prompt == begun else ""

    def reader(self, asked: Asked) -> TurnReader:
        """Returns what reads the turns that answer a request, as its client receives them.

        Raises:
            ValueError: There are tools, and the template writes no calls that can be read.
        """
        form = self._formats.of(self.arguments(asked), bool(asked.tools))
        if asked.tools and form.calls is None:
            raise ValueError(f"the model has no tools: {form.fault}")
        return TurnReader(form, asked.tools, asked.parallel, None, self.opening(asked), tuple(asked.stop))

    def _new_bridge(self, key: str) -> Bridge | None:
        tools, kwargs = json.loads(key)
        try:
            return Bridge(self.tokenizer, tools, kwargs, self._eos_ids)
        except ValueError:  # e.g. it drops the reasoning of earlier turns, so that each request is a stream
            return None


class Transcript:
    """The conversations of one episode.

    Args:
        templates: Templates of the run.
    """

    def __init__(self, templates: Templates) -> None:
        self._templates = templates
        self._known: dict[bytes, _Known] = {}
        self._texts: list[tuple[str, np.ndarray]] = []  # prompts that are texts with their completions, and streams

    def prompt(self, asked: Asked) -> np.ndarray:
        """Returns the token ids of a request's prompt.

        Raises:
            ValueError: It cannot be encoded.
        """
        if isinstance(asked.prompt, str):
            return self._text_prompt(asked.prompt)
        if not asked.is_chat:
            return np.asarray(asked.prompt, np.int32)
        messages, tokenizer = with_own_ids(asked.prompt), self._templates.tokenizer
        ids = self._continued(asked, messages)
        if ids is None:
            kwargs, tools = self._templates.arguments(asked), [list(asked.tools)] if asked.tools else None
            [ids] = encode_prompts(tokenizer, [messages], [kwargs], name="messages", tools=tools, may_be_empty=True)
        opening = self._templates.opening(asked)
        return np.concatenate([ids, encode_texts(tokenizer, [opening], [True])[0]]) if opening else ids

    def _continued(self, asked: Asked, messages: Messages) -> np.ndarray | None:
        """Returns the stream of the turn that a chat continues, and the bridge; None if it begins a new stream."""
        bridge = self._templates.bridge(asked)
        if bridge is None:
            return None
        for size, digest in reversed([*enumerate(_digests(asked, messages), 1)]):
            known, new = self._known.get(digest), messages[size:]
            if known is not None and new and all(message["role"] != "assistant" for message in new):
                return np.concatenate([known.stream, bridge.ids(known.stream, known.answer, new)])
        return None

    def add(self, asked: Asked, prompt_ids: np.ndarray, tokens: Sequence[int]) -> tuple[str, tuple[Any, ...]]:
        """Adds a turn that was sampled.

        Args:
            asked: Its request.
            prompt_ids: Token ids of its prompt.
            tokens: Its tokens.

        Returns:
            Its text, and its conversation with the assistant's message; no messages for a prompt that is not a chat.
        """
        stream = np.concatenate([prompt_ids, np.asarray(tokens, np.int32)])
        tokenizer, context = self._templates.tokenizer, context_tokens(self._templates.tokenizer, prompt_ids)
        if not asked.is_chat:
            said = decode_after(tokenizer, context, tokens)
            if isinstance(asked.prompt, str):
                self._texts.append((asked.prompt + said, stream))
            return said, ()
        messages, reader = with_own_ids(asked.prompt), self._templates.reader(asked)
        text, _ = reader.text(context, tokens)
        turn = reader.read(text, "stop", prompt_ids.tolist())
        answer = _answer(turn, sum(len(message.get("tool_calls", ())) for message in messages))
        *_, digest = _digests(asked, [*messages, answer])
        self._known[digest] = _Known(stream, answer)
        return turn.content, (*messages, answer)

    def _text_prompt(self, text: str) -> np.ndarray:
        tokenizer = self._templates.tokenizer
        known = [(said, stream) for said, stream in self._texts if text.startswith(said)]
        if known:
            said, stream = max(known, key=lambda each: len(each[0]))
            if text == said:
                return stream
            rest = [{"role": "user", "content": text[len(said) :]}]
            return np.concatenate([stream, TextBridge(tokenizer).ids(stream, {}, rest)])
        return encode_prompts(tokenizer, [text])[0]


def with_own_ids(messages: Messages) -> list[dict[str, Any]]:
    """Returns messages whose calls are numbered, since clients and protocols write ids of their own.

    Some templates write ids, and take nine letters and digits.
    """
    numbered: list[dict[str, Any]] = []
    names: dict[Any, str] = {}
    numbers = itertools.count()
    for given in messages:
        message = {key: value for key, value in given.items() if value is not None}
        calls = []
        for call in message.get("tool_calls", ()):
            names[call.get("id")] = own = f"call{next(numbers):05d}"
            calls.append({"type": "function", "id": own, "function": dict(call["function"])})
        if calls:
            message["tool_calls"] = calls
        if "tool_call_id" in message:
            message["tool_call_id"] = names.get(message["tool_call_id"], message["tool_call_id"])
        if message["role"] == "developer":
            message["role"] = "system"
        numbered.append({"content": "", **message})
    return numbered


def _answer(turn: Turn, num_calls: int) -> dict[str, Any]:
    """Returns the assistant's message of a turn.

    Args:
        turn: The turn.
        num_calls: Number of calls of earlier turns.
    """
    message: dict[str, Any] = {"role": "assistant", "content": turn.content}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [
            {
                "type": "function",
                "id": f"call{number:05d}",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for number, call in enumerate(turn.calls, num_calls)
        ]
    return message


def _digests(asked: Asked, messages: Messages) -> Iterator[bytes]:
    """Yields a digest of the first message, of the first two, and so on."""
    digest = hashlib.blake2b(_json([list(asked.tools), asked.template_kwargs or {}]).encode(), digest_size=16)
    for message in messages:
        digest.update(_json(_compared(message)).encode() + b"\n")
        yield digest.digest()


def _compared(message: Mapping[str, Any]) -> list[Any]:
    """Returns what must agree for two messages to be the same; reasoning need not be returned by a client."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = join_text_parts(content, "a message")
    if message["role"] == "assistant":
        content = content.strip()
    calls = [
        [call["function"]["name"], _as_object(call["function"].get("arguments"))]
        for call in message.get("tool_calls", ())
    ]
    return [message["role"], content, calls, message.get("tool_call_id")]


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return dict(arguments or {})
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
