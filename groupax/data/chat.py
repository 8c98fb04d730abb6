"""Conversations: checks of their messages, and their rendering by chat templates. Imports no jax."""

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from groupax.core.settings.fields import check_json, nearest
from groupax.core.settings.rollouts import RESERVED, check_template_kwargs
from groupax.core.terminal.printable import error_line, short_repr

IMAGE_PART = {"type": "image"}  # the place of an image in a message


def check_messages(
    messages: Any, name: str, may_be_empty: bool = False, with_images: bool = False
) -> list[dict[str, Any]]:
    """Checks the messages of a conversation and returns them without null fields, with which tables fill their rows.

    Arguments of tool calls that are given as the text of a JSON object are returned as that object.
    """
    is_messages = isinstance(messages, list) and all(isinstance(m, Mapping) and "role" in m for m in messages)
    if not is_messages or not messages:
        raise ValueError(
            f"{name} must be a string or a list of messages like {{'role': 'user', 'content': '...'}}, got "
            f"{short_repr(messages)}"
        )
    checked = [
        _check_message(message, f"{name}: message {number} of {len(messages)}", with_images)
        for number, message in enumerate(messages, 1)
    ]
    if not may_be_empty and not any("".join(message_texts(each)).strip() or has_image(each) for each in checked):
        raise ValueError(f"{name} is empty: no message has any text: {short_repr(messages)}")
    return checked


def has_image(message: Mapping[str, Any]) -> bool:
    """Returns whether a checked message has a place for an image."""
    return isinstance(message.get("content"), list) and IMAGE_PART in message["content"]


def _check_message(given: Mapping[str, Any], where: str, with_images: bool) -> dict[str, Any]:
    message = _filled(given)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where} has no role like 'user' or 'system': {short_repr(given)}")
    if (content is None or content == []) and not message.get("tool_calls"):
        raise ValueError(f"{where} has no content: {short_repr(given)}")
    if isinstance(content, list):
        parts = [without_nulls(part) for part in content]
        join_text_parts([part for part in parts if not (with_images and part == IMAGE_PART)], where)
        message["content"] = parts
    elif content is not None and not isinstance(content, str):
        raise ValueError(
            f"{where}: the content must be a text or a list of text parts, got {type(content).__name__} "
            f"{short_repr(content)}"
        )
    if "tool_calls" in message:
        message["tool_calls"] = _check_tool_calls(message["tool_calls"], where)
    check_json(message, where)
    return message


def _check_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Returns tool calls in OpenAI's format, with arguments that are objects.

    A call may also be given as its function alone, as transformers allows.
    """
    checked = []
    for given in calls if isinstance(calls, list | tuple) else [calls]:
        is_function = isinstance(given, Mapping) and "function" not in given
        call = {"type": "function", "function": given} if is_function else given
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"{where}: tool_calls must be a list of calls like {{'type': 'function', 'function': {{'name': '...', "
                f"'arguments': {{...}}}}}}, got {short_repr(calls)}"
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _parse_arguments(arguments, f"{where}: the call of {function['name']!r:.60}")
        if arguments is not None and not isinstance(arguments, Mapping):
            raise ValueError(
                f"{where}: the arguments of the call of {function['name']!r:.60} must be an object, got "
                f"{short_repr(arguments)}"
            )
        checked.append({**_filled(call), "function": {**_filled(function), "arguments": dict(arguments or {})}})
    return checked


def _filled(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def _parse_arguments(text: str, where: str) -> Any:
    try:
        return json.loads(text) if text.strip() else {}  # which clients send for a tool without parameters
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} has arguments that are not JSON ({error}): {text!r:.100}") from error


def without_nulls(value: Any) -> Any:
    """Returns a value without the nulls that a table has where other rows have more, at any depth."""
    if isinstance(value, Mapping):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def join_text_parts(parts: Sequence[Any], where: str) -> str:
    """Returns the concatenated text of a message's content that is given as a list of parts of text."""
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind is not None and kind != "text":
            raise ValueError(
                f"{where} has a part of type {kind!r:.40}; only texts are read here, and images in the prompts of a "
                "model that sees them, but no videos or sounds: remove the part, or the row"
            )
        if kind is None or not isinstance(part.get("text"), str):
            raise ValueError(f"{where} has a part that is not {{'type': 'text', 'text': '...'}}: {short_repr(part)}")
    return "".join(part["text"] for part in parts)


def message_texts(message: Mapping[str, Any]) -> list[str]:
    """Returns the texts of a checked message: one, or one per part of text; none if it has no content."""
    content = message.get("content") or ""
    return [content] if isinstance(content, str) else [part["text"] for part in content if part != IMAGE_PART]


def adapt_content(message: Mapping[str, Any], takes_text: bool, takes_parts: bool) -> dict[str, Any]:
    """Returns the message with its content in a form that a template reads; images need one that reads parts."""
    content = message.get("content")
    if isinstance(content, list) and not takes_parts:
        if IMAGE_PART in content:
            raise ValueError("it does not write parts of messages, and so no images")
        return {**message, "content": "".join(message_texts(message))}
    if isinstance(content, str) and takes_parts and not takes_text:
        return {**message, "content": [{"type": "text", "text": content}]}
    return dict(message)


def encode_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message with the arguments of its tool calls as JSON texts, which a few templates need."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or []
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def check_tools(tools: Any, name: str) -> list[dict[str, Any]]:
    """Checks that tools are schemas in OpenAI's format."""
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ValueError(
                f"{name}: a tool must be a schema like {{'type': 'function', 'function': {{'name': '...', "
                f"'description': '...', 'parameters': {{...}}}}}}, got {short_repr(tool)}"
            )
    check_json(tools, f"{name}: tools")
    return list(tools)


WORKER = Path(__file__).with_name("template_worker.py")


class TemplateError(Exception):
    """A template or tokenizer failed at the requested value with this index; `ended` if it ended the process."""

    def __init__(self, message: str, index: int, ended: bool) -> None:
        super().__init__(message)
        self.index, self.ended = index, ended


class TemplateProcess:
    """A template worker that starts at the first request, each of which has a deadline. Threads take turns."""

    def __init__(self, deadline_s: int = 10) -> None:
        self.deadline_s = deadline_s
        self._lock = threading.Lock()
        self._process: Any = None
        self._owner = 0

    def ask(self, request: Mapping[str, Any], count: int, deadline_s: int | None = None) -> list[Any]:
        """Returns the values that answer a request, of which the action yields `count`, or raises a TemplateError."""
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        values: list[Any] = []
        with self._lock:
            process = self._running()
            try:
                with suppress(BrokenPipeError):  # then there is no answer either
                    process.stdin.write(json.dumps({"deadline_s": deadline_s, **request}) + "\n")
                    process.stdin.flush()
                while len(values) < count:
                    line = process.stdout.readline()
                    if not line.endswith("\n"):
                        raise TemplateError(_ending(process.wait(), deadline_s), len(values), ended=True)
                    answer = json.loads(line)
                    if "error" in answer:
                        raise TemplateError(error_line(answer["error"], 1100), len(values), ended=False)
                    values.append(answer["value"])
            except BaseException as error:
                if not isinstance(error, TemplateError):  # unread answers would be taken for those to the next request
                    process.kill()
                    process.wait()
                raise
        return values

    def close(self) -> None:
        """Ends the process, which also ends with this one, unless it belongs to a parent of this process."""
        if self._process is not None and self._owner == os.getpid():
            with suppress(BrokenPipeError):  # nobody reads the last request any more
                self._process.stdin.close()
            self._process.stdout.close()
            self._process.wait()
        self._process = None

    def _running(self) -> Any:
        if self._owner != os.getpid() or self._process is None or self._process.poll() is not None:
            self.close()
            self._owner = os.getpid()
            # -P: modules next to the worker's file must not shadow those that it imports
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C is meant for this process only
            )
        return self._process


def _ending(status: int, deadline_s: int) -> str:
    if status == -signal.SIGALRM:
        return f"it was still running after {deadline_s} s"
    return f"the process that runs it ended with status {status}; is there too little memory?"


TEMPLATES = TemplateProcess()
atexit.register(TEMPLATES.close)


# Chat templates by name, for `GRPOConfig.chat_template`.
CHAT_TEMPLATES = {
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "plain": (
        "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n"
        "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
}
PROBE = "groupaxprobe"
PROBE_CALL = {"id": "groupax00", "type": "function", "function": {"name": PROBE, "arguments": {"value": PROBE}}}
PROBE_SCHEMA = {"type": "object", "properties": {"value": {"type": "string", "description": "Text."}}}
PROBE_TOOL = {"type": "function", "function": {"name": PROBE, "description": "Probes.", "parameters": PROBE_SCHEMA}}
BATCH, BATCH_CHARACTERS = 256, 1 << 22  # largest number of conversations, and of their characters, per request


@dataclass(frozen=True)
class Conversation:
    """Messages to render, with arguments of the chat template and the tools that it writes."""

    messages: Any
    name: str  # for errors
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()


def render(
    tokenizer: Any,
    messages: Any,
    name: str,
    add_generation_prompt: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    may_be_empty: bool = False,
    with_images: bool = False,
) -> str:
    """Returns a conversation as rendered by the tokenizer's chat template.

    Content that is a list of text parts is passed unchanged to a template that reads parts, and as one text to others.
    A text is passed as one part to a template that only reads parts. The arguments of an assistant's tool calls may be
    objects or JSON texts, whichever the template reads.

    Args:
        add_generation_prompt: Whether to end with the start of the assistant's answer.
        may_be_empty: Whether the conversation needs no text.
        with_images: Whether messages may have parts {"type": "image"}, for which the template writes placeholders.
    """
    own = [Conversation(messages, name, template_kwargs or {}, tools)]
    return render_all(tokenizer, own, add_generation_prompt, may_be_empty, with_images)[0]


def render_all(
    tokenizer: Any,
    conversations: Sequence[Conversation],
    add_generation_prompt: bool = True,
    may_be_empty: bool = False,
    with_images: bool = False,
) -> list[str]:
    """Renders several conversations (see `render`)."""
    if not conversations:
        return []
    checked = [check_messages(each.messages, each.name, may_be_empty, with_images) for each in conversations]
    names = [each.name for each in conversations]
    if not tokenizer.chat_template:
        raise ValueError(
            f"{names[0]} is a list of messages, but the tokenizer has no chat template (a base model?); set "
            f"chat_template= to one of {', '.join(CHAT_TEMPLATES)} or to a file, or give prompts as strings"
        )
    arguments = []
    for each in conversations:
        name, given = each.name, each.template_kwargs
        if given:
            check_template_kwargs(given, f"{name}: chat_template_kwargs")
            for fault in unknown_template_kwargs(tokenizer, given).values():
                raise ValueError(f"{name}: chat_template_kwargs: {fault}")
        schemas = check_tools(each.tools, name) or None  # None without any, as transformers does: templates test for it
        if schemas and not writes_tools(tokenizer, given):
            raise ValueError(
                f"{name} has tools, but the chat template does not write them, so the model would not know them; set "
                "chat_template to a template that does, e.g. of the model's newest version, or run without tools"
            )
        arguments.append({**given, "tools": schemas, "add_generation_prompt": add_generation_prompt})
    template = _template_of(tokenizer)
    if template is None:
        texts = [_render_by_tokenizer(tokenizer, *item) for item in zip(checked, names, arguments, strict=True)]
    else:
        texts = _render_by_template(template, tokenizer, checked, names, arguments)
    for messages, text, name in zip(checked, texts, names, strict=True):
        _check_complete(messages, text, name)
    return texts


def unknown_template_kwargs(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Returns the arguments that the tokenizer's chat template does not read, each with an error message."""
    template = _template_of(tokenizer)
    if not template_kwargs or template is None:
        return {}
    own = {*RESERVED, *tokenizer.special_tokens_map}
    known = [name for name in _variables(template) if name not in own]
    return {
        name: f"the chat template reads no {name!r}; it reads {', '.join(known) or 'none'}{nearest(name, known)}"
        for name in template_kwargs
        if name not in known
    }


def writes_tools(tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> bool:
    """Returns whether the tokenizer's chat template writes the tools that it is given.

    It does if it writes the name of a probe.
    """
    template = _template_of(tokenizer)
    if template is None:
        messages = [{"role": "user", "content": "Hi"}]
        text = _render_by_tokenizer(tokenizer, messages, "a probe", {**(template_kwargs or {}), "tools": [PROBE_TOOL]})
        return PROBE in text
    special = json.dumps(tokenizer.special_tokens_map, default=str)
    return _writes_tools(template, special, json.dumps(template_kwargs or {}, sort_keys=True))


@lru_cache(maxsize=64)
def _writes_tools(template: str, special: str, template_kwargs: str) -> bool:
    more = {**json.loads(special), **json.loads(template_kwargs), "tools": [PROBE_TOOL]}
    try:
        forms = _content_forms(template, special)
        text = _ask_once(template, [adapt_content({"role": "user", "content": "Hi"}, *forms)], more)
    except TemplateError as fault:
        raise ValueError(f"the chat template fails with tools: {fault}") from fault
    return PROBE in text


def _ask_once(template: str, messages: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
    batch = {"conversations": [messages], "arguments": [arguments]}
    return TEMPLATES.ask({"action": "render", "template": template, **batch}, 1)[0]


def _template_of(tokenizer: Any) -> str | None:
    """Returns the chat template, or None if the tokenizer overrides transformers' way of rendering it."""
    from transformers import PreTrainedTokenizerBase

    if getattr(tokenizer.apply_chat_template, "__func__", None) is not PreTrainedTokenizerBase.apply_chat_template:
        return None
    return tokenizer.get_chat_template()


@lru_cache(maxsize=16)
def _variables(template: str) -> list[str]:
    try:
        return TEMPLATES.ask({"action": "variables", "template": template}, 1)[0]
    except TemplateError as fault:
        raise ValueError(f"the chat template fails: {fault}") from fault


def _render_by_tokenizer(
    tokenizer: Any, messages: list[dict[str, Any]], name: str, arguments: Mapping[str, Any]
) -> str:
    """Renders by the tokenizer's own method, of which it is not known how it treats text parts."""
    try:
        messages = [adapt_content(message, True, False) for message in messages]
        return tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
    except ValueError as error:
        raise ValueError(f"{name}: the chat template fails: {error}") from error


def _render_by_template(
    template: str,
    tokenizer: Any,
    conversations: list[Any],
    names: Sequence[str],
    arguments: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Renders in batches in the template process."""
    special = json.dumps(tokenizer.special_tokens_map, default=str)
    has_calls = any(message.get("tool_calls") for messages in conversations for message in messages)
    try:
        forms = _content_forms(template, special)
        as_texts = has_calls and _needs_argument_texts(template, special)
    except TemplateError as fault:
        raise ValueError(f"{names[0]}: the chat template fails: {fault}") from fault
    try:
        conversations = [[adapt_content(message, *forms) for message in messages] for messages in conversations]
    except ValueError as fault:
        raise ValueError(f"{names[0]}: the chat template cannot be used: {fault}") from fault
    if as_texts:
        conversations = [[encode_arguments(message) for message in messages] for messages in conversations]
    arguments = [{**json.loads(special), **more} for more in arguments]
    texts: list[str] = []
    while (start := len(texts)) < len(conversations):
        size, end = 0, start
        while end < len(conversations) and end - start < BATCH and size < BATCH_CHARACTERS:
            size += sum(len(text) for message in conversations[end] for text in message_texts(message))
            end += 1
        batch = {"conversations": conversations[start:end], "arguments": arguments[start:end]}
        try:
            texts += TEMPLATES.ask({"action": "render", "template": template, **batch}, end - start)
        except TemplateError as fault:
            raise ValueError(f"{names[start + fault.index]}: the chat template fails: {fault}") from fault
    return texts


@lru_cache(maxsize=16)
def _content_forms(template: str, special: str) -> tuple[bool, bool]:
    """Returns whether a template reads content that is a text, and content that is a list of text parts.

    It does if it writes the text of a probe, but not the representation of the list that contains it.
    """

    def reads(content: Any) -> bool:
        text = _probe(template, special, [{"role": "user", "content": content}])
        return PROBE in text and not any(f"{quote}{PROBE}{quote}" in text for quote in "'\"")

    return reads(PROBE), reads([{"type": "text", "text": PROBE}])


@lru_cache(maxsize=16)
def _needs_argument_texts(template: str, special: str) -> bool:
    """Returns whether a template only writes the arguments of tool calls if they are JSON texts, not objects."""
    forms = _content_forms(template, special)
    question = adapt_content({"role": "user", "content": "Hi"}, *forms)
    call = adapt_content({"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]}, *forms)
    written = [
        _probe(template, special, [question, message]).count(PROBE) for message in (call, encode_arguments(call))
    ]
    return written[0] < 2 <= written[1]


def _probe(template: str, special: str, messages: list[dict[str, Any]]) -> str:
    """Returns a conversation as rendered, or "" if the template refuses it."""
    try:
        return _ask_once(template, messages, json.loads(special))
    except TemplateError as fault:
        if fault.ended:
            raise
        return ""  # if it refuses real messages too, that is reported


def _check_complete(messages: Sequence[Mapping[str, Any]], text: str, name: str) -> None:
    """Refuses a text that lacks a message, which a template may write as JSON; of a tool's result a word is enough.

    The assistant's are exempt, since templates leave out its thoughts.
    """
    squeezed = ""  # the text, once it is needed
    for number, message in enumerate(messages, 1):
        contents = [] if message["role"] == "assistant" else message_texts(message)
        for content in contents:
            is_result = message["role"] == "tool"
            if content in text or (is_result and any(word in text for word in re.findall(r"\w+", content))):
                continue
            forms = (content, json.dumps(content)[1:-1], json.dumps(content, ensure_ascii=False)[1:-1])
            squeezed = squeezed or _squeeze(text)
            if not any(_squeeze(form) in squeezed for form in forms):
                raise ValueError(
                    f"{name}: the chat template leaves out message {number} of {len(messages)}, which has the role "
                    f"{message['role']!r}: {content.strip()!r:.100}; move its text to a message of another role, or "
                    "set chat_template to a template that writes it"
                )


def _squeeze(text: str) -> str:
    """Returns the text without spaces and case, which templates may change."""
    return "".join(text.split()).casefold()
