"""The input of a request to /v1/responses as fields of a chat. Imports no jax."""

from collections.abc import Mapping
from typing import Any

from groupax.serve.chat_fields import is_text, short
from groupax.serve.errors import ApiError
from groupax.serve.protocols.incoming import text_of
from groupax.serve.requests import check_known

TEXTS = ("input_text", "output_text", "text")
LOGPROBS = "message.output_text.logprobs"
# What a response may include; all but the log-probs are parts of items that this server never has.
INCLUDED = {
    LOGPROBS,
    *("reasoning.encrypted_content", "file_search_call.results", "web_search_call.results"),
    *("web_search_call.action.sources", "code_interpreter_call.outputs", "message.input_image.image_url"),
    "computer_call_output.output.image_url",
}


def conversation(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the conversation of a request as messages of a chat."""
    items = given.get("input")
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    if not isinstance(items, list) or not items:
        raise ApiError(400, f"input must be a text or a list of at least one item, got {short(items)}", "input")
    instructions = given.get("instructions")
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": text_of(instructions, TEXTS, "instructions")})
    for number, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise ApiError(400, f"input.{number} must be an object, got {short(item)}", "input")
        _add_item(messages, item, f"input.{number}")
    return messages


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    """Adds an item of the input to the messages: items of one turn are one message."""
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "function_call_output":
        content = text_of(item.get("output"), TEXTS, f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind == "function_call" and is_text(item.get("name")) and is_text(item.get("arguments")):
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _open_turn(messages, True).setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        text = text_of(parts, ("reasoning_text", "summary_text"), f"{where}.content", "\n")
        messages.append({"role": "assistant", "content": "", **({"reasoning_content": text} if text else {})})
    elif kind == "message" and item.get("role") == "assistant":
        _open_turn(messages, False)["content"] = text_of(item.get("content"), TEXTS, f"{where}.content")
    elif kind == "message":
        messages.append({"role": item.get("role"), "content": _content(item.get("content"), f"{where}.content")})
    else:
        message = f"{where} must be a message, function_call, function_call_output or reasoning, got {short(item)}"
        raise ApiError(400, message, "input", "unsupported_value")


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Returns a content as one text, or as parts of a chat if some are images."""
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return text_of(content, TEXTS, where)
    return [
        {"type": "image_url", "image_url": {"url": _image_url(part, where)}}
        if _is_image(part)
        else {"type": "text", "text": text_of([part], TEXTS, where)}
        for part in content
    ]


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "input_image"


def _image_url(part: Mapping[str, Any], where: str) -> str:
    if part.get("file_id") is not None or not isinstance(part.get("image_url"), str):
        message = f"{where} must have images as image_url, a data: URL, got {short(part)}; this server has no files"
        raise ApiError(400, message, "input", "unsupported_value")
    return part["image_url"]


def _open_turn(messages: list[dict[str, Any]], has_call: bool) -> dict[str, Any]:
    """Returns the assistant's message that an item belongs to, which is created if no such turn has begun."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or not (has_call or not (last["content"] or "tool_calls" in last)):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def tool_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a chat about tools."""
    fields: dict[str, Any] = {}
    tools = given.get("tools", [])
    if not isinstance(tools, list):
        raise ApiError(400, f"tools must be a list, got {short(tools)}", "tools")
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            message = f"tools.{number} must be a function of yours, got {short(tool)}"
            raise ApiError(400, message, "tools", "unsupported_value")
        function = {key: tool.get(key) for key in ("name", "description", "parameters", "strict")}
        fields.setdefault("tools", []).append({"type": "function", "function": function})
    choice = given.get("tool_choice")
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    return fields if choice is None else {**fields, "tool_choice": choice}


def format_fields(text: Any) -> dict[str, Any]:
    """Returns the field of a chat about the format of the response."""
    if not isinstance(text, Mapping) or not isinstance(text.get("format", {}), Mapping | None):
        raise ApiError(400, f"text must be an object with a format, got {short(text)}", "text")
    check_known(text, ("format", "verbosity"), "text", "text")
    form = text.get("format") or {"type": "text"}
    if form.get("type") != "json_schema":
        return {"response_format": dict(form)}
    schema = {key: value for key, value in form.items() if key != "type"}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def logprob_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a chat about log-probs."""
    include = given.get("include", [])
    if not isinstance(include, list):
        raise ApiError(400, f"include must be a list, got {short(include)}", "include")
    unknown = next((each for each in include if not (is_text(each) and each in INCLUDED)), None)
    if unknown is not None:
        message = f"include has an unknown value {short(unknown)}; it may have {', '.join(sorted(INCLUDED))}"
        raise ApiError(400, message, "include", "unsupported_value")
    num = given.get("top_logprobs", 0)
    return {"logprobs": True, "top_logprobs": num} if LOGPROBS in include or num != 0 else {}
