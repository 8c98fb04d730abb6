"""Rendering of conversations by chat templates. Imports no jax."""

import html
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from groupax.data.messages import adapt_content, check_messages, check_tools, encode_arguments, message_texts
from groupax.data.template_process import TEMPLATES, TemplateError
from groupax.settings.fields import nearest
from groupax.settings.rollouts import RESERVED, check_template_kwargs

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
        tokenizer: Tokenizer with a chat template.
        messages: Messages with a role and content.
        name: Name of the conversation in an error.
        add_generation_prompt: Whether to end with the start of the assistant's answer.
        template_kwargs: Arguments for the template, e.g. {"enable_thinking": False}.
        tools: Tools that the assistant may call, as schemas in OpenAI's format.
        may_be_empty: Whether the conversation needs no text.
        with_images: Whether messages may have parts {"type": "image"}, for which the template writes placeholders.

    Raises:
        ValueError: These are not messages of text, there is no template, the template fails, exceeds its time limit,
            does not read one of the arguments, or omits a message or the tools.
    """
    given = [messages], [name], add_generation_prompt, [template_kwargs or {}], [tools]
    return render_all(tokenizer, *given, may_be_empty, with_images)[0]


def render_all(
    tokenizer: Any,
    conversations: Sequence[Any],
    names: Sequence[str],
    add_generation_prompt: bool = True,
    template_kwargs: Sequence[Mapping[str, Any]] | None = None,
    tools: Sequence[Sequence[Mapping[str, Any]]] | None = None,
    may_be_empty: bool = False,
    with_images: bool = False,
) -> list[str]:
    """Renders several conversations, each with its own name, template arguments and tools (see `render`)."""
    if not conversations:
        return []
    checked = [check_messages(*item, may_be_empty, with_images) for item in zip(conversations, names, strict=True)]
    if not tokenizer.chat_template:
        raise ValueError(
            f"{names[0]} is a list of messages, but the tokenizer has no chat template (a base model?); set "
            f"chat_template= to one of {', '.join(CHAT_TEMPLATES)} or to a file, or give prompts as strings"
        )
    arguments = []
    none = [()] * len(names)
    for name, given, own in zip(names, template_kwargs or [{}] * len(names), tools or none, strict=True):
        if given:
            check_template_kwargs(given, f"{name}: chat_template_kwargs")
            for fault in unknown_template_kwargs(tokenizer, given).values():
                raise ValueError(f"{name}: chat_template_kwargs: {fault}")
        schemas = check_tools(own, name) or None  # None without tools, as transformers does: templates test for it
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

    Args:
        template: Template in Jinja.
        special: Special tokens by name, as JSON.
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
    """Refuses a text that lacks a message.

    The assistant's are exempt, since templates leave out its thoughts. One word of a tool's result is enough, since
    templates encode results in other ways, e.g. as the items of a JSON object.
    """
    squeezed: str | None = None
    for number, message in enumerate(messages, 1):
        if message["role"] == "assistant":
            continue
        for content in filter(str.strip, message_texts(message)):
            if content in text:
                continue
            if message["role"] == "tool" and any(word[0] in text for word in re.finditer(r"\w+", content)):
                continue
            squeezed = _squeeze(text) if squeezed is None else squeezed
            quoted = (json.dumps(content)[1:-1], json.dumps(content, ensure_ascii=False)[1:-1], html.escape(content))
            if not any(_squeeze(form) in squeezed for form in (content, *quoted)):
                raise ValueError(
                    f"{name}: the chat template leaves out message {number} of {len(messages)}, which has the role "
                    f"{message['role']!r}: {content.strip()!r:.100}; move its text to a message of another role, or "
                    "set chat_template to a template that writes it"
                )


def _squeeze(text: str) -> str:
    """Returns the text without spaces and case, which templates may change."""
    return "".join(text.split()).casefold()
