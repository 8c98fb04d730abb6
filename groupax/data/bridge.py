"""Tokens between two turns of an episode, from the chat template alone. Imports no jax."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from groupax.core.terminal.printable import short_repr
from groupax.data.chat import CHAT_TEMPLATES, check_tools, join_text_parts, render, writes_tools
from groupax.data.tokenizer import encode_texts


class PlainText:
    """Encodes texts of a template that contain untrusted texts.

    Control tokens are the tokenizer's special tokens, and the other tokens that were added to its vocabulary unless
    they are words or spaces: `</tool_response>` is not special in Qwen's tokenizer, but ends a tool's result.

    The whole text is encoded at once, so that the tokens are those of the template's own rendering. Where an untrusted
    text has the characters of a control token, the text is cut after the first of them, and both sides are encoded on
    their own. This needs nothing of the tokenizer but its list of added tokens: `split_special_tokens=True` of
    transformers leaves added tokens that are not special as they are, and changes the state of a fast tokenizer that
    other threads use.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        chosen = {index: token for index, token in added.items() if token.special or _is_markup(token.content)}
        self.special_ids = frozenset(index for index, token in chosen.items() if token.special)
        self.control_ids = np.asarray(sorted(chosen), np.int32)
        self._look_alikes = [token.content for token in chosen.values() if len(token.content) > 1]

    def encode(self, parts: Sequence[str], contents: Sequence[str], control: np.ndarray) -> np.ndarray:
        """Returns the token ids of alternating texts of a template, with its control tokens, and untrusted texts."""
        pieces = [piece for pair in zip(parts, contents, strict=False) for piece in pair] + [parts[-1]]
        text = "".join(pieces)
        edges = np.cumsum([0, *map(len, pieces)])
        spans = [(int(edges[2 * index + 1]), int(edges[2 * index + 2])) for index in range(len(contents))]
        ids = self._encode_cut(text, {cut for span in spans for cut in self._cuts(text, *span)})
        if np.array_equal(self.control_of(ids), control):
            return ids
        # the tokenizer normalizes some characters to those of a control token
        return self._encode_cut(text, {cut for start, end in spans for cut in range(start, end + 1)})

    def control_of(self, ids: np.ndarray) -> np.ndarray:
        """Returns the control tokens among token ids."""
        return ids[np.isin(ids, self.control_ids)]

    def _cuts(self, text: str, start: int, end: int) -> Iterator[int]:
        """Yields a place within each look-alike of a control token that overlaps the untrusted `text[start:end]`."""
        for look_alike in self._look_alikes:
            first, last = max(start - len(look_alike) + 1, 0), end + len(look_alike) - 1
            while (first := text.find(look_alike, first, last)) >= 0:
                yield max(first + 1, start)
                first += 1

    def _encode_cut(self, text: str, cuts: set[int]) -> np.ndarray:
        places = [0, *sorted(cuts), len(text)]
        texts = [text[start:end] for start, end in pairwise(places) if start < end]
        encoded = encode_texts(self.tokenizer, texts, [True] * len(texts))
        return np.concatenate([np.zeros(0, np.int32), *encoded])


def _is_markup(text: str) -> bool:
    return any(not character.isalnum() and not character.isspace() for character in text)


SENTINEL = "groupaxsentinel"  # stands for the sampled turn
HOLE = re.compile("groupaxhole([0-9]+)x")  # stands for the content of a new message
UNUSUAL = re.compile(r"[^\w.-]")  # in names and ids, which a model may have written
NAME_CHARACTERS = 64
SCAFFOLDS = 1024  # kept per bridge
OPENING = [{"role": "user", "content": "Question"}]


@dataclass(frozen=True)
class Scaffold:
    """The template's texts after a sampled turn, for new messages of certain roles and names."""

    parts: tuple[str, ...]  # texts around the contents of the new messages
    order: tuple[int, ...]  # index of the message whose content stands at each place
    head: np.ndarray  # token ids of the first text
    unfinished: int  # tokens of `head` to leave out after a turn that ended without a token of `head`
    finished: int  # the same after a turn that ended with one of `ends`
    ends: frozenset[int]  # tokens that end a turn in place of the template's own
    control: np.ndarray  # control tokens of all texts, in order
    conversation: list[dict[str, Any]]  # messages that the template has rendered, from the turn's


class Bridge:
    """Writes what stands between two turns: the end of the assistant's message, new messages and a generation prompt.

    The next prompt is the token stream so far and these tokens: sampled tokens are never decoded, and the history is
    never rendered again. The tokens are found by rendering a short conversation in which a sentinel stands for the
    sampled turn, and cutting after it. What the sampled turn has already ended with, e.g. `<|im_end|>`, is left out.

    Contents of new messages are untrusted. They never become control tokens (see `PlainText`). Each is rendered, since
    a template may change it (e.g. to JSON), and put into a cached rendering of the others.

    Threads may share a bridge.

    Args:
        tokenizer: Tokenizer with a chat template.
        tools: Tools that the assistant may call, as schemas in OpenAI's format.
        template_kwargs: Arguments for the template.
        stop_ids: Tokens that end a turn in addition to the tokenizer's end-of-sequence token.

    Raises:
        ValueError: There is no chat template, or it does not write the tools, a user's turn or a tool's result.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        stop_ids: Sequence[int] = (),
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template (a base model?), which episodes of several turns need; set "
                f"chat_template= to one of {', '.join(CHAT_TEMPLATES)} or to a file, or give prompts as strings"
            )
        self.tokenizer, self.template_kwargs = tokenizer, template_kwargs or {}
        self.tools = check_tools(tools, "the bridge between turns")
        self._plain = PlainText(tokenizer)
        eos = tokenizer.eos_token_id
        self._stop_ids = frozenset(stop_ids) | (frozenset() if eos is None else {eos})
        self._scaffold = lru_cache(maxsize=SCAFFOLDS)(self._build)
        self._writes_ids = False
        self._check_turns()

    def ids(self, stream: np.ndarray, turn: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Returns the tokens to append to a token stream so that the next turn can be sampled.

        Args:
            stream: Token ids of the prompt and everything since, up to the last sampled token.
            turn: The assistant's message that the sampled turn was parsed to. Only the names and ids of its tool calls
                are read.
            messages: The new messages, of text.
        """
        if not messages:
            raise ValueError("there are no new messages to put between two turns; give a tool's result or a question")
        contents = [_content(message) for message in messages]
        scaffold = self._scaffold(self._key(turn, messages))
        texts = [self._rendered(scaffold, place, contents[index]) for place, index in enumerate(scaffold.order)]
        ids = self._plain.encode(scaffold.parts, texts, scaffold.control)
        return ids[self._start(scaffold, stream) :]

    def _start(self, scaffold: Scaffold, stream: np.ndarray) -> int:
        """Returns the number of the scaffold's tokens that the sampled turn has already ended with."""
        if len(stream) == 0:
            return scaffold.unfinished
        last = int(stream[-1])
        if last in self._plain.control_ids and last in scaffold.head:
            return int(np.argmax(scaffold.head == last)) + 1
        return scaffold.finished if last in scaffold.ends else scaffold.unfinished

    def _key(self, turn: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns all that a scaffold depends on, as JSON."""
        given = turn.get("tool_calls") or []
        names = [_tame(call["function"]["name"]) for call in given]
        # templates may look up a result's call by its id, but few write ids
        renamed = {
            call["id"]: _tame(call["id"]) if self._writes_ids else _call_id(number)
            for number, call in enumerate(given)
            if call.get("id") is not None
        }
        ids = [renamed.get(call.get("id"), _call_id(number)) for number, call in enumerate(given)]
        calls = [
            {"id": index, "type": "function", "function": {"name": name, "arguments": {"value": "x"}}}
            for index, name in zip(ids, names, strict=True)
        ]
        fields, results = [], iter([*zip(ids, names, strict=True)])
        for message in messages:
            field = {"role": message["role"]}
            if message["role"] == "tool":
                index, name = next(results, (_call_id(len(given)), None))
                field["tool_call_id"] = renamed.get(message.get("tool_call_id"), index)
                if (name := message.get("name") or name) is not None:
                    field["name"] = _tame(name)
            fields.append(field)
        return json.dumps([calls, fields])

    def _build(self, key: str) -> Scaffold:
        """Renders a scaffold with the best form of the turn that the template accepts."""
        calls, fields = json.loads(key)
        messages = [{**field, "content": f"groupaxhole{index}x"} for index, field in enumerate(fields)]
        fault, forms = "it leaves out their text", []
        for turn in _turns(calls):
            try:
                after = self._after([turn, *messages])
            except ValueError as error:
                fault = str(error)
                continue
            order = tuple(int(hole) for hole in HOLE.findall(after or ""))
            if after is not None and sorted(order) == list(range(len(messages))):
                forms.append((after, order, [turn, *messages]))
        if forms:
            # after a turn without calls the text begins where the turn ends; it counts if the calls change nothing else
            return self._measure(*(forms[-1] if forms[0][0].endswith(forms[-1][0]) else forms[0]))
        roles = " and ".join(dict.fromkeys(field["role"] for field in fields))
        raise ValueError(
            f"the chat template cannot write {len(fields)} new messages with the role {roles} after an assistant's "
            f"message with {len(calls)} tool calls: {fault}; set chat_template to one that can, or use an environment "
            "without such messages"
        )

    def _measure(self, after: str, order: tuple[int, ...], conversation: list[dict[str, Any]]) -> Scaffold:
        parts = tuple(HOLE.split(after)[::2])
        head, alone, whole = self._encode(parts[0]), self._encode(self._alone(conversation[0])), self._encode(after)
        shared = next(
            (index for index, pair in enumerate(zip(head, alone, strict=False)) if pair[0] != pair[1]),
            min(len(head), len(alone)),
        )
        special = self._plain.special_ids
        closers = [index for index in range(shared) if int(head[index]) in special]
        # some templates end the last message of a conversation with another token than the others
        differs = shared < min(len(head), len(alone)) and {int(head[shared]), int(alone[shared])} <= special
        if not closers and differs:
            closers = [shared]
        ends = self._stop_ids if closers else frozenset()
        if differs:
            ends |= {int(alone[shared])}
        has_calls = bool(conversation[0].get("tool_calls"))
        unfinished = 0 if not has_calls else closers[-1] if closers else shared
        finished = closers[-1] + 1 if closers else unfinished
        control = self._plain.control_of(whole)
        return Scaffold(parts, order, head, unfinished, finished, ends, control, conversation)

    def _alone(self, turn: Mapping[str, Any]) -> str:
        """Returns what the template writes after the turn if nothing follows it."""
        try:
            return self._after([turn], add_generation_prompt=False) or ""
        except ValueError:  # a template may require that results follow calls
            return ""

    def _after(self, messages: Sequence[Mapping[str, Any]], **more: bool) -> str | None:
        """Returns what stands after the sentinel in a rendered conversation, or None if it is left out."""
        text = self._text([*OPENING, *messages], **more)
        return text.rpartition(SENTINEL)[2] if SENTINEL in text else None

    def _text(self, messages: Sequence[Mapping[str, Any]], **more: bool) -> str:
        kwargs, tools = self.template_kwargs, self.tools
        return render(self.tokenizer, messages, "a probe", template_kwargs=kwargs, tools=tools, **more)

    def _encode(self, text: str) -> np.ndarray:
        return encode_texts(self.tokenizer, [text], [True])[0]

    def _rendered(self, scaffold: Scaffold, place: int, content: str) -> str:
        """Returns what stands at a place of the scaffold after rendering with the content.

        If the content changes more than that, e.g. since the template leaves out empty messages, or if the template
        fails with it, it is the content itself, so that no tool's result ends an episode.
        """
        conversation = list(scaffold.conversation)
        index = 1 + scaffold.order[place]
        conversation[index] = {**conversation[index], "content": content}
        pieces = [piece for part, hole in zip(scaffold.parts, scaffold.order, strict=False) for piece in (part, hole)]
        pieces = [f"groupaxhole{piece}x" if isinstance(piece, int) else piece for piece in pieces]
        before = "".join(pieces[: 2 * place + 1])
        behind = "".join([*pieces[2 * place + 2 :], scaffold.parts[-1]])
        try:
            text = self._text([*OPENING, *conversation])
        except ValueError:
            return content
        # an untrusted text may contain the sentinel, which only stands for the turn where it comes first
        text = text.partition(SENTINEL)[2]
        intact = text.startswith(before) and text.endswith(behind) and len(text) >= len(before) + len(behind)
        return text[len(before) : len(text) - len(behind)] if intact else content

    def _check_turns(self) -> None:
        if self.tools and not writes_tools(self.tokenizer, self.template_kwargs):
            raise ValueError(
                "there are tools, but the chat template does not write them, so the model would not know them; set "
                "chat_template to a template that does, e.g. of the model's newest version, or run without tools"
            )
        self._scaffold(self._key({}, [{"role": "user", "content": ""}]))
        if not self.tools:
            return
        call = {"id": "groupax42", "type": "function", "function": {"name": self.tools[0]["function"]["name"]}}
        result = {"role": "tool", "tool_call_id": "groupax42", "content": ""}
        self._writes_ids = True
        scaffold = self._scaffold(self._key({"tool_calls": [call]}, [result]))
        self._writes_ids = any("groupax42" in part for part in scaffold.parts)


class TextBridge:
    """Writes what stands between two turns of a prompt that is a string: the texts of the new messages alone."""

    def __init__(self, tokenizer: Any) -> None:
        self._plain = PlainText(tokenizer)

    def ids(self, stream: np.ndarray, turn: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Returns the tokens of the messages' texts, whatever the stream and the turn (see `Bridge.ids`)."""
        del stream, turn
        text = "".join(map(_content, messages))
        return self._plain.encode(("", ""), (text,), np.zeros(0, np.int32))


def _turns(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns forms of a turn with a sentinel, the best one first: in the last call, or in the content.

    Not all templates write several calls, and some write none.
    """
    turns: list[dict[str, Any]] = []
    if calls:
        last = {**calls[-1], "function": {**calls[-1]["function"], "arguments": {"value": SENTINEL}}}
        turns += [{"content": "", "tool_calls": [*calls[:-1], last]}, {"content": "", "tool_calls": [last]}]
        turns += [{"content": SENTINEL, "tool_calls": list(calls)}]
    return [{"role": "assistant", **turn} for turn in [*turns, {"content": SENTINEL}]]


def _call_id(number: int) -> str:
    return f"groupax{number:02}"  # nine letters and digits, which Mistral's templates require


def _tame(name: Any) -> str:
    """Returns a name or id without the characters of control tokens, since it stands within the template's text."""
    return UNUSUAL.sub("_", str(name))[:NAME_CHARACTERS]


def _content(message: Mapping[str, Any]) -> str:
    """Returns the text of a new message, with a question mark for half of a surrogate pair."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role.isidentifier():
        raise ValueError(f"a new message has no role like 'tool' or 'user': {short_repr(message)}")
    if isinstance(content, list):
        content = join_text_parts(content, "a new message")
    if not isinstance(content, str):
        raise ValueError(f"the content of a new message must be a text, got {short_repr(message)}")
    return content.encode(errors="replace").decode()
