"""Finds the turn that a request of a program continues, and the prompt of its next turn. Imports no jax.

The messages of a request are compared with those of earlier requests and of what the model answered. If they begin
with an answered conversation, the prompt is the stream of tokens of that turn and a bridge to the new messages, and
nothing that was sampled is encoded again. Otherwise the whole conversation is rendered: a new stream begins.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from groupax.data.bridge import Bridge
from groupax.data.chat import join_text_parts
from groupax.data.tokenizer import context_tokens, encode_prompts, encode_texts
from groupax.episodes.program import TurnRequest
from groupax.serve.exchange import TokenTexts
from groupax.serve.turns import TurnFormats, TurnReader
from groupax.tools.calls import assistant_message
from groupax.tools.formats import call_opening

KINDS = 64  # of tools and template arguments that are kept ready

Messages = Sequence[Mapping[str, Any]]


class Templates:
    """The bridges and formats of turns of a tokenizer, which the episodes of a run share. Threads may share it."""

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any], eos_ids: Sequence[int] = ()) -> None:
        self.tokenizer, self.template_kwargs, self._eos_ids = tokenizer, template_kwargs, eos_ids
        self.token_texts = TokenTexts(tokenizer)
        self._formats = TurnFormats(tokenizer)
        self._bridge = lru_cache(maxsize=KINDS)(self._new_bridge)

    def arguments(self, request: TurnRequest) -> dict[str, Any]:
        """Returns the arguments for the chat template of a request."""
        return {**self.template_kwargs, **(request.template_kwargs or {})}

    def bridge(self, request: TurnRequest) -> Bridge | None:
        """Returns what writes the tokens between two turns; None if the template cannot be continued token by token."""
        return self._bridge(_json([list(request.tools), self.arguments(request)]))

    def opening(self, request: TurnRequest) -> str:
        """Returns the beginning of the call that a request wants, which the prompt ends with; empty for none.

        A template that opens reasoning before the turn leaves the choice to the model.
        """
        if request.tool_choice == "auto" or not request.tools:
            return ""
        name = None if request.tool_choice == "required" else request.tool_choice["name"]
        prompt, begun, opening = call_opening(self.tokenizer, self.arguments(request), name)
        return opening if prompt == begun else ""

    def reader(self, request: TurnRequest) -> TurnReader:
        """Returns what reads the turns that answer a request, as its client receives them."""
        form = self._formats.of(self.arguments(request), bool(request.tools))
        if request.tools and form.calls is None:
            raise ValueError(f"the model has no tools: {form.fault}")
        return TurnReader(form, request.tools, request.parallel, None, self.opening(request), tuple(request.stop))

    def _new_bridge(self, key: str) -> Bridge | None:
        tools, kwargs = json.loads(key)
        try:
            return Bridge(self.tokenizer, tools, kwargs, self._eos_ids)
        except ValueError:  # e.g. it drops the reasoning of earlier turns, so that each request is a stream
            return None


class Transcript:
    """The conversations of one episode."""

    def __init__(self, templates: Templates) -> None:
        self._templates = templates
        # by the digest of a conversation: the stream of tokens up to its last turn, and the message of that turn
        self._answered: dict[bytes, tuple[np.ndarray, Mapping[str, Any]]] = {}

    def prompt(self, request: TurnRequest) -> np.ndarray:
        """Returns the token ids of a request's prompt."""
        messages, tokenizer = with_own_ids(request.prompt), self._templates.tokenizer
        ids = self._continued(request, messages)
        if ids is None:
            kwargs, tools = self._templates.arguments(request), [list(request.tools)] if request.tools else None
            [ids] = encode_prompts(tokenizer, [messages], [kwargs], name="messages", tools=tools, may_be_empty=True)
        opening = self._templates.opening(request)
        return np.concatenate([ids, encode_texts(tokenizer, [opening], [True])[0]]) if opening else ids

    def _continued(self, request: TurnRequest, messages: Messages) -> np.ndarray | None:
        """Returns the stream of the turn that a chat continues, and the bridge; None if it begins a new stream."""
        bridge = self._templates.bridge(request)
        if bridge is None:
            return None
        for size, digest in reversed([*enumerate(_digests(request, messages), 1)]):
            found, new = self._answered.get(digest), messages[size:]
            if found is not None and new and all(message["role"] != "assistant" for message in new):
                stream, answer = found
                return np.concatenate([stream, bridge.ids(stream, answer, new)])
        return None

    def add(self, request: TurnRequest, prompt_ids: np.ndarray, tokens: Sequence[int]) -> tuple[str, tuple[Any, ...]]:
        """Adds a turn that was sampled.

        Args:
            request: Its request.
            prompt_ids: Token ids of its prompt.
            tokens: Its tokens.

        Returns:
            Its text, and its conversation with the assistant's message.
        """
        stream = np.concatenate([prompt_ids, np.asarray(tokens, np.int32)])
        context = context_tokens(self._templates.tokenizer, prompt_ids)
        messages, reader = with_own_ids(request.prompt), self._templates.reader(request)
        text, _ = reader.text(context, tokens)
        turn = reader.read(text, "stop", prompt_ids.tolist())
        calls = [(call.name, json.loads(call.arguments)) for call in turn.calls]
        num_calls = sum(len(message.get("tool_calls", ())) for message in messages)
        answer = assistant_message(turn.content, turn.reasoning, calls, num_calls)
        *_, digest = _digests(request, [*messages, answer])
        self._answered[digest] = stream, answer
        return turn.content, (*messages, answer)


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


def _digests(request: TurnRequest, messages: Messages) -> Iterator[bytes]:
    """Yields a digest of the first message, of the first two, and so on."""
    digest = hashlib.blake2b(_json([list(request.tools), request.template_kwargs or {}]).encode(), digest_size=16)
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
