"""Conversations as texts: what messages may hold, and what a chat template makes of them. Imports no jax."""

import atexit
import html
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from groupax.data import template_process
from groupax.settings.fields import nearest
from groupax.settings.template_kwargs import RESERVED, check_json, check_template_kwargs

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
BATCH, BATCH_CHARACTERS = 256, 1 << 22  # conversations that are rendered at a time, and their characters


def unknown_template_kwargs(tokenizer: Any, given: Mapping[str, Any]) -> dict[str, str]:
    """Returns the names of arguments that the tokenizer's chat template does not read, each with what to say of it."""
    template = _template_of(tokenizer)
    if not given or template is None:
        return {}
    own = {*RESERVED, *tokenizer.special_tokens_map}
    known = [name for name in _variables(template) if name not in own]
    return {
        name: f"the chat template reads no {name!r}{nearest(name, known)}; it reads {', '.join(known) or 'none'}"
        for name in given
        if name not in known
    }


def joined_parts(parts: Sequence[Any], where: str) -> str:
    """Returns the text of a message's content that is given as a list of parts, one after the other.

    Args:
        parts: as OpenAI writes them, each {"type": "text", "text": "..."}.
        where: what to call the content in an error.

    Raises:
        ValueError: a part is no text.
    """
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind is not None and kind != "text":
            raise ValueError(
                f"{where} has a part of type {kind!r:.40}, and the model reads texts alone: groupax has no vision or "
                "audio tower; remove the part, or the row"
            )
        if kind is None or not isinstance(part.get("text"), str):
            raise ValueError(f"{where} has a part that is no {{'type': 'text', 'text': '...'}}: {_shown(part)}")
    return "".join(part["text"] for part in parts)


def render(
    tokenizer: Any,
    messages: Any,
    name: str,
    add_generation_prompt: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Returns a conversation as the tokenizer's chat template writes it.

    Content that is a list of text parts goes to the template as it is if the template reads parts, or else as one text;
    and a text goes to a template that reads nothing but parts as one part.

    Args:
        tokenizer: with the template.
        messages: role and content each.
        name: what to call the conversation in an error.
        add_generation_prompt: end where the assistant's answer begins.
        template_kwargs: arguments for the template, e.g. {"enable_thinking": False}.

    Raises:
        ValueError: these are no messages of texts, there is no template, it fails or takes too long, it does not read
            one of the arguments, or its text lacks a message.
    """
    return render_all(tokenizer, [messages], [name], add_generation_prompt, [template_kwargs or {}])[0]


def render_all(
    tokenizer: Any,
    conversations: Sequence[Any],
    names: Sequence[str],
    add_generation_prompt: bool = True,
    template_kwargs: Sequence[Mapping[str, Any]] | None = None,
) -> list[str]:
    """Returns what `render` does of each conversation, which has a name and arguments for the template of its own."""
    if not conversations:
        return []
    checked = [_checked_messages(*item) for item in zip(conversations, names, strict=True)]
    if not tokenizer.chat_template:
        raise ValueError(
            f"{names[0]} is a list of messages, but the tokenizer has no chat template (a base model?); set "
            f"chat_template= to one of {', '.join(CHAT_TEMPLATES)} or to a file, or give prompts as strings"
        )
    arguments = []
    for name, given in zip(names, template_kwargs or [{}] * len(names), strict=True):
        if given:
            check_template_kwargs(given, f"{name}: chat_template_kwargs")
            for fault in unknown_template_kwargs(tokenizer, given).values():
                raise ValueError(f"{name}: chat_template_kwargs: {fault}")
        arguments.append({**given, "add_generation_prompt": add_generation_prompt})
    template = _template_of(tokenizer)
    if template is None:  # a tokenizer with a way of its own; what it does with parts is not known
        given = [[_as_read(message, True, False) for message in messages] for messages in checked]
        texts = [_by_itself(tokenizer, *item) for item in zip(given, names, arguments, strict=True)]
    else:
        special = json.dumps(tokenizer.special_tokens_map, default=str)
        try:
            reads = _reads(template, special)
        except _TemplateError as fault:
            raise ValueError(f"{names[0]}: the chat template fails: {fault}") from fault
        given = [[_as_read(message, *reads) for message in messages] for messages in checked]
        texts = _by_template(template, given, names, [{**json.loads(special), **more} for more in arguments])
    for messages, text, name in zip(checked, texts, names, strict=True):
        _check_nothing_lost(messages, text, name)
    return texts


def _checked_messages(messages: Any, name: str) -> list[dict[str, Any]]:
    """Returns the messages without fields that are None, which tables have for what a row does not say."""
    is_messages = isinstance(messages, list) and all(isinstance(m, Mapping) and "role" in m for m in messages)
    if not is_messages or not messages:
        raise ValueError(
            f"{name} must be a string or a list of messages like {{'role': 'user', 'content': '...'}}, got "
            f"{_shown(messages)}"
        )
    checked = []
    for number, given in enumerate(messages, 1):
        where = f"{name}: message {number} of {len(messages)}"
        message = {key: value for key, value in given.items() if value is not None}
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise ValueError(f"{where} has no role like 'user' or 'system': {_shown(given)}")
        if (content is None or content == []) and not message.get("tool_calls"):
            raise ValueError(f"{where} has no content: {_shown(given)}")
        if isinstance(content, list):
            parts = [_without_none(part) for part in content]
            joined_parts(parts, where)
            message["content"] = parts
        elif content is not None and not isinstance(content, str):
            raise ValueError(
                f"{where}: the content must be a text or a list of text parts, got {type(content).__name__} "
                f"{_shown(content)}"
            )
        check_json(message, where)
        checked.append(message)
    if not any("".join(texts_of(message)).strip() for message in checked):
        raise ValueError(f"{name} is empty: no message has any text: {_shown(messages)}")
    return checked


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.200}"
    except RecursionError:
        return f"a {type(value).__name__} of many levels"


def texts_of(message: Mapping[str, Any]) -> list[str]:
    """Returns the texts of a checked message: one, or one for each part; none if it has no content."""
    content = message.get("content") or ""
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def _without_none(part: Any) -> Any:
    return {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else part


def _as_read(message: Mapping[str, Any], takes_text: bool, takes_parts: bool) -> dict[str, Any]:
    """Returns the message with its content as the template reads it."""
    content = message.get("content")
    if isinstance(content, list) and not takes_parts:
        return {**message, "content": "".join(texts_of(message))}
    if isinstance(content, str) and takes_parts and not takes_text:
        return {**message, "content": [{"type": "text", "text": content}]}
    return dict(message)


@lru_cache(maxsize=16)
def _reads(template: str, special: str) -> tuple[bool, bool]:
    """Returns whether a template writes content that is a text, and content that is a list of text parts.

    It does if the text of a probe is written, and not the representation of the list that it was in.

    Args:
        template: in Jinja.
        special: its other arguments, as JSON.
    """

    def arrives(content: Any) -> bool:
        messages = [{"role": "user", "content": content}]
        part = {"conversations": [messages], "arguments": [json.loads(special)]}
        try:
            [text] = _PROCESS.ask({"action": "render", "template": template, **part}, 1)
        except _TemplateError as fault:
            if fault.ended:
                raise
            return False  # it may not be made for such messages; those that it gets tell their errors
        return PROBE in text and not any(f"{quote}{PROBE}{quote}" in text for quote in "'\"")

    return arrives(PROBE), arrives([{"type": "text", "text": PROBE}])


def _by_template(
    template: str, conversations: list[Any], names: Sequence[str], arguments: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Returns the conversations as the template writes them, in the process that is made for it."""
    texts: list[str] = []
    while (first := len(texts)) < len(conversations):
        size, end = 0, first
        while end < len(conversations) and end - first < BATCH and size < BATCH_CHARACTERS:
            size += sum(len(text) for message in conversations[end] for text in texts_of(message))
            end += 1
        part = {"conversations": conversations[first:end], "arguments": list(arguments[first:end])}
        try:
            texts += _PROCESS.ask({"action": "render", "template": template, **part}, end - first)
        except _TemplateError as fault:
            raise ValueError(f"{names[first + fault.index]}: the chat template fails: {fault}") from fault
    return texts


def _by_itself(tokenizer: Any, messages: list[dict[str, Any]], name: str, arguments: Mapping[str, Any]) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
    except ValueError as error:
        raise ValueError(f"{name}: the chat template fails: {error}") from error


def _in_line(text: str) -> str:
    """Returns a text that a template may have written, in one line and without control characters."""
    return "".join(c if c.isprintable() else " " for c in text)


def _check_nothing_lost(messages: Sequence[Mapping[str, Any]], text: str, name: str) -> None:
    """Refuses a text that lacks a message which is not the assistant's, of which templates leave out the thoughts."""
    squeezed: str | None = None
    for number, message in enumerate(messages, 1):
        if message["role"] == "assistant":
            continue
        for content in filter(str.strip, texts_of(message)):
            if content in text:
                continue
            squeezed = _squeezed(text) if squeezed is None else squeezed
            quoted = (json.dumps(content)[1:-1], json.dumps(content, ensure_ascii=False)[1:-1], html.escape(content))
            if not any(_squeezed(form) in squeezed for form in (content, *quoted)):
                raise ValueError(
                    f"{name}: the chat template leaves out message {number} of {len(messages)}, of the role "
                    f"{message['role']!r}: {content.strip()!r:.100}; put its text into a message of another role, or "
                    "set chat_template to a template that writes it"
                )


def _squeezed(text: str) -> str:
    """Returns the text without spaces and capitals, in which templates may differ from what they are given."""
    return "".join(text.split()).casefold()


def _template_of(tokenizer: Any) -> str | None:
    """Returns the chat template if the tokenizer renders it as transformers does; None if it has a way of its own."""
    from transformers import PreTrainedTokenizerBase

    if getattr(tokenizer.apply_chat_template, "__func__", None) is not PreTrainedTokenizerBase.apply_chat_template:
        return None
    return tokenizer.get_chat_template()


@lru_cache(maxsize=16)
def _variables(template: str) -> list[str]:
    try:
        return _PROCESS.ask({"action": "variables", "template": template}, 1)[0]
    except _TemplateError as fault:
        raise ValueError(f"the chat template fails: {fault}") from fault


class _TemplateError(Exception):
    """A template fails.

    Args:
        message: what is wrong, in one line.
        index: at which of the things that were asked for.
        ended: the process had to end over it.
    """

    def __init__(self, message: str, index: int, ended: bool) -> None:
        super().__init__(message)
        self.index, self.ended = index, ended


class _TemplateProcess:
    """A process that runs `groupax.data.template_process`, started when it is first asked. One thread asks at a time.

    Args:
        deadline_s: the longest that a request may take.
    """

    def __init__(self, deadline_s: int = 10) -> None:
        self.deadline_s = deadline_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0

    def ask(self, request: Mapping[str, Any], count: int) -> list[Any]:
        """Returns the values that answer a request.

        Args:
            request: what to do.
            count: how many values there are.

        Raises:
            _TemplateError: the template fails, or takes too much time or memory.
        """
        line = json.dumps(request)
        values: list[Any] = []
        with self._lock:
            process = self._running()
            assert process.stdin is not None, "it is a pipe"
            assert process.stdout is not None, "it is a pipe"
            try:
                with suppress(BrokenPipeError):  # then there is no answer either
                    process.stdin.write(line + "\n")
                    process.stdin.flush()
                while len(values) < count:
                    answered = process.stdout.readline()
                    if not answered.endswith("\n"):
                        raise _TemplateError(self._end(), len(values), ended=True)
                    answer = json.loads(answered)
                    if "error" in answer:
                        raise _TemplateError(_in_line(answer["error"]), len(values), ended=False)
                    values.append(answer["value"])
            except _TemplateError:
                raise
            except BaseException:  # answers that nobody has read would be taken for those to the next request
                process.kill()
                self._end()
                raise
        return values

    def close(self) -> None:
        """Ends the process, if it is this one's."""
        with self._lock:
            if self._process is not None and self._owner == os.getpid():
                self._end()

    def _running(self) -> subprocess.Popen[str]:
        if self._owner != os.getpid():
            self._process = None  # a fork has its parent's pipes
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            # -P: this package's folder, which has a data.py and the like, is no place to import from
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(template_process.__file__)), str(self.deadline_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C is for those who ask
            )
            self._owner = os.getpid()
        return self._process

    def _end(self) -> str:
        """Ends the process and returns why it does not answer any more."""
        assert self._process is not None, "it is running"
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "they are pipes"
            with suppress(BrokenPipeError):  # what was written last is not read any more
                pipe.close()
        status, self._process = self._process.wait(), None
        if status == -signal.SIGALRM:
            return f"it was still running after {self.deadline_s} s"
        return f"the process that renders it ended with status {status}; is there too little memory?"


_PROCESS = _TemplateProcess()
atexit.register(_PROCESS.close)
