"""Messages of conversations: checks of their fields, and their texts. Imports no jax."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from groupax.settings.fields import check_json
from groupax.terminal.printable import short_repr

IMAGE_PART = {"type": "image"}  # the place of an image in a message


def check_messages(
    messages: Any, name: str, may_be_empty: bool = False, with_images: bool = False
) -> list[dict[str, Any]]:
    """Checks the messages of a conversation and returns them without null fields, with which tables fill their rows.

    Arguments of tool calls that are given as the text of a JSON object are returned as that object.

    Args:
        messages: Messages with a role and content, or with tool calls.
        name: Name of the conversation in an error.
        may_be_empty: Whether no message needs to have any text.
        with_images: Whether parts may be {"type": "image"}, without the image itself.

    Raises:
        ValueError: These are not messages of text, or of text and images.
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
    if not may_be_empty and not any("".join(message_texts(message)).strip() for message in checked):
        raise ValueError(f"{name} is empty: no message has any text: {short_repr(messages)}")
    return checked


def _check_message(given: Mapping[str, Any], where: str, with_images: bool) -> dict[str, Any]:
    message = _without_nulls(given)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where} has no role like 'user' or 'system': {short_repr(given)}")
    if (content is None or content == []) and not message.get("tool_calls"):
        raise ValueError(f"{where} has no content: {short_repr(given)}")
    if isinstance(content, list):
        parts = [_without_nulls(part) if isinstance(part, Mapping) else part for part in content]
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
        checked.append({**_without_nulls(call), "function": {**function, "arguments": dict(arguments or {})}})
    return checked


def _parse_arguments(text: str, where: str) -> Any:
    try:
        return json.loads(text) if text.strip() else {}  # which clients send for a tool without parameters
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} has arguments that are not JSON ({error}): {text!r:.100}") from error


def _without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def join_text_parts(parts: Sequence[Any], where: str) -> str:
    """Returns the concatenated text of a message's content that is given as a list of parts.

    Args:
        parts: Parts in OpenAI's format, each {"type": "text", "text": "..."}.
        where: Name of the content in an error.

    Raises:
        ValueError: A part is not a text.
    """
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind is not None and kind != "text":
            raise ValueError(
                f"{where} has a part of type {kind!r:.40}, and what reads it has no vision: give images in "
                "the prompts of a model that sees them; remove the part, or the row"
            )
        if kind is None or not isinstance(part.get("text"), str):
            raise ValueError(f"{where} has a part that is not {{'type': 'text', 'text': '...'}}: {short_repr(part)}")
    return "".join(part["text"] for part in parts)


def message_texts(message: Mapping[str, Any]) -> list[str]:
    """Returns the texts of a checked message: one, or one per part of text; none if it has no content."""
    content = message.get("content") or ""
    return [content] if isinstance(content, str) else [part["text"] for part in content if part != IMAGE_PART]


def adapt_content(message: Mapping[str, Any], takes_text: bool, takes_parts: bool) -> dict[str, Any]:
    """Returns the message with its content in a form that a template reads.

    Args:
        message: A checked message.
        takes_text: Whether the template reads content that is a text.
        takes_parts: Whether the template reads content that is a list of text parts.

    Raises:
        ValueError: The message has images, and the template reads no parts.
    """
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
    """Checks that tools are schemas in OpenAI's format.

    Args:
        tools: Schemas of the tools.
        name: Name of the conversation in an error.

    Raises:
        ValueError: They are not.
    """
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ValueError(
                f"{name}: a tool must be a schema like {{'type': 'function', 'function': {{'name': '...', "
                f"'description': '...', 'parameters': {{...}}}}}}, got {short_repr(tool)}"
            )
    check_json(tools, f"{name}: tools")
    return list(tools)
