"""Conversations as texts: what messages may hold, and what a chat template makes of them. Imports no jax."""

import html
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from groupax.data.messages import adapt_content, check_messages, message_texts
from groupax.data.template_process import TEMPLATES, TemplateError
from groupax.settings.fields import nearest
from groupax.settings.template_kwargs import RESERVED, check_template_kwargs

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
    checked = [check_messages(*item) for item in zip(conversations, names, strict=True)]
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
        given = [[adapt_content(message, True, False) for message in messages] for messages in checked]
        texts = [_by_itself(tokenizer, *item) for item in zip(given, names, arguments, strict=True)]
    else:
        special = json.dumps(tokenizer.special_tokens_map, default=str)
        try:
            reads = _reads(template, special)
        except TemplateError as fault:
            raise ValueError(f"{names[0]}: the chat template fails: {fault}") from fault
        given = [[adapt_content(message, *reads) for message in messages] for messages in checked]
        texts = _by_template(template, given, names, [{**json.loads(special), **more} for more in arguments])
    for messages, text, name in zip(checked, texts, names, strict=True):
        _check_nothing_lost(messages, text, name)
    return texts


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
            [text] = TEMPLATES.ask({"action": "render", "template": template, **part}, 1)
        except TemplateError as fault:
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
            size += sum(len(text) for message in conversations[end] for text in message_texts(message))
            end += 1
        part = {"conversations": conversations[first:end], "arguments": list(arguments[first:end])}
        try:
            texts += TEMPLATES.ask({"action": "render", "template": template, **part}, end - first)
        except TemplateError as fault:
            raise ValueError(f"{names[first + fault.index]}: the chat template fails: {fault}") from fault
    return texts


def _by_itself(tokenizer: Any, messages: list[dict[str, Any]], name: str, arguments: Mapping[str, Any]) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
    except ValueError as error:
        raise ValueError(f"{name}: the chat template fails: {error}") from error


def _check_nothing_lost(messages: Sequence[Mapping[str, Any]], text: str, name: str) -> None:
    """Refuses a text that lacks a message which is not the assistant's, of which templates leave out the thoughts."""
    squeezed: str | None = None
    for number, message in enumerate(messages, 1):
        if message["role"] == "assistant":
            continue
        for content in filter(str.strip, message_texts(message)):
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
        return TEMPLATES.ask({"action": "variables", "template": template}, 1)[0]
    except TemplateError as fault:
        raise ValueError(f"the chat template fails: {fault}") from fault
