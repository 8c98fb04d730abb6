"""Fields of chats in requests: messages, tools, and arguments for the chat template. Imports no jax."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WrapValidator

from groupax.data.chat import check_messages, check_tools, join_text_parts
from groupax.data.images import without_images
from groupax.serve.errors import ApiError
from groupax.serve.images import image_url
from groupax.settings.template_kwargs import check_template_kwargs

MAX_TOOLS = 256
MAX_QUOTED = 80  # characters of a value that an error quotes
CHOICES = ("none", "auto", "required")
SYSTEM = ("system", "developer")


def is_text(value: Any) -> bool:
    """Returns whether a value is a text of valid Unicode, which a response can quote."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def short(value: Any) -> str:
    """Returns a value as an error quotes it."""
    text = repr(value)
    return text if len(text) <= MAX_QUOTED else f"{text[: MAX_QUOTED - 3]}..."


def _unicode(text: str) -> str:
    if not is_text(text):
        raise ValueError("be valid Unicode")  # half of a surrogate pair
    return text


Text = Annotated[str, AfterValidator(_unicode)]


def _content(value: Any, check: Callable[[Any], Any]) -> Any:
    """Returns a content as one text, or as parts if some are images, which then have their `data:` URL as `image`."""
    if not isinstance(value, list):
        return check(value)
    parts = [_image(part) if _is_image(part) else part for part in value]
    texts = [part for part in parts if not (_is_image(part) and part["type"] == "image")]
    try:
        text = join_text_parts(texts, "a message")
        return check(text) if len(texts) == len(parts) else parts
    except ValueError as error:
        raise ApiError(400, str(error), "messages") from error


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _image(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "image":
        raise ApiError(400, "a message has a part of type image; images are parts of type image_url", "messages")
    return {"type": "image", "image": image_url(part, "a part of a message")}


class Message(BaseModel):
    """A message of a chat, whose content is one text, or parts if some of them are images.

    An assistant's message with tool calls may have none.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    role: Text
    content: Annotated[Text | None, WrapValidator(_content)] = None


def _messages(given: list[Message]) -> list[dict[str, Any]]:
    """Returns messages as chat templates read them."""
    messages = []
    for number, message in enumerate(given):
        fields = message.model_dump(warnings=False)  # of contents that are parts
        if "reasoning" in fields:  # another name for it
            fields.setdefault("reasoning_content", fields.pop("reasoning"))
        if fields["content"] is None and not fields.get("tool_calls"):
            if message.role != "assistant":
                raise ApiError(400, f"messages.{number}.content is missing", "messages")
            fields["content"] = ""
        messages.append(fields)
    _check_results(messages)
    for number, message in enumerate(messages):
        if isinstance(message["content"], list) and message["role"] not in ("user", *SYSTEM):
            raise ApiError(400, f"messages.{number} has an image, and its role is {short(message['role'])}", "messages")
    try:
        checked = check_messages(without_images(messages), "messages", may_be_empty=True, with_images=True)
    except ValueError as error:
        raise ApiError(400, str(error), "messages") from error
    with_images = [isinstance(message["content"], list) for message in messages]
    return [
        {**own, "content": message["content"]} if has_images else own
        for own, message, has_images in zip(checked, messages, with_images, strict=True)
    ]


def _check_results(messages: Sequence[Mapping[str, Any]]) -> None:
    """Checks that each result of a tool belongs to an earlier call.

    Raises:
        ApiError: It has the id of no call, or there is no call before it.
    """
    ids: dict[str, None] = {}  # as they are quoted, whatever their type
    for number, message in enumerate(messages):
        calls = message.get("tool_calls") if message["role"] == "assistant" else None
        if isinstance(calls, list):
            ids |= dict.fromkeys(repr(call.get("id")) for call in calls if isinstance(call, Mapping))
        found = message.get("tool_call_id")
        if message["role"] == "tool" and repr(found) not in ids:
            known = (
                f"the calls before it have the ids {', '.join(ids):.{MAX_QUOTED}}"
                if ids
                else "there is no call before it"
            )
            name = "has no tool_call_id" if found is None else f"is the result of the call {short(found)}"
            raise ApiError(400, f"messages.{number}, a tool's, {name}; {known}", "messages")


def _tools(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise ApiError(400, f"tools must be a list of at most {MAX_TOOLS} functions, got {short(value)}", "tools")
    for number, tool in enumerate(value):
        kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
        if kind != "function":
            message = f"tools.{number} must be {{'type': 'function', 'function': {{...}}}}, got {short(tool)}"
            raise ApiError(400, message, "tools", "unsupported_value")
        function = tool.get("function")
        if not isinstance(function, Mapping) or not is_text(function.get("name")) or not function["name"]:
            raise ApiError(400, f"tools.{number}.function must have a name, got {short(function)}", "tools")
        if not isinstance(function.get("parameters"), Mapping | None):
            message = f"tools.{number}.function.parameters must be a JSON schema, got {short(function['parameters'])}"
            raise ApiError(400, message, "tools")
    names = [tool["function"]["name"] for tool in value]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ApiError(400, f"two tools have the name {short(repeated)}", "tools")
    try:
        check_tools(value, "the request")
    except ValueError as error:
        raise ApiError(400, str(error), "tools") from error
    return [{"type": "function", "function": _function(tool["function"])} for tool in value]


def _function(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a function without null fields, with the schema of no arguments if it has none."""
    function = {key: value for key, value in given.items() if value is not None and (key, value) != ("parameters", {})}
    # in the order in which templates of models that know tools were trained to read them
    no_arguments = {"type": "object", "properties": {}, "additionalProperties": False}
    return {"name": "", "description": "", "parameters": no_arguments, **function}


def _tool_choice(value: Any) -> str | dict[str, str]:
    if value in CHOICES:
        return value
    function = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
    if isinstance(function, Mapping) and isinstance(function.get("name"), str):
        return {"name": function["name"]}
    message = f"tool_choice must be one of {', '.join(CHOICES)}, or {{'type': 'function', 'function': {{'name': ...}}}}"
    raise ApiError(400, f"{message}, got {short(value)}", "tool_choice")


def _template_kwargs(value: Any) -> dict[str, Any]:
    try:
        check_template_kwargs(value, "chat_template_kwargs")
    except ValueError as error:
        raise ApiError(400, str(error), "chat_template_kwargs") from error
    return value


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True), AfterValidator(_messages)]
Tools = Annotated[Any, BeforeValidator(_tools)]
ToolChoice = Annotated[Any, BeforeValidator(_tool_choice)]
TemplateKwargs = Annotated[Any, BeforeValidator(_template_kwargs)]


def check_tool_choice(choice: str | Mapping[str, str], tools: Sequence[Mapping[str, Any]]) -> None:
    """Checks that there is the tool that a request wants to be called.

    Raises:
        ApiError: There is none.
    """
    names = [tool["function"]["name"] for tool in tools]
    if choice == "required" and not names:
        raise ApiError(400, "tool_choice is required, but there are no tools", "tool_choice")
    if isinstance(choice, Mapping) and choice["name"] not in names:
        message = f"tool_choice names the function {short(choice['name'])}; the tools are {short(names)}"
        raise ApiError(400, message, "tool_choice")


def check_last_message(messages: Sequence[Mapping[str, Any]], add_prompt: bool, is_continued: bool) -> None:
    """Checks that a chat whose last message is continued ends with a text of the assistant.

    Raises:
        ApiError: It does not, or a new message is requested too.
    """
    if not is_continued:
        return
    if add_prompt:
        message = "continue_final_message needs add_generation_prompt=false, since no new message begins"
        raise ApiError(400, message, "continue_final_message")
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls") or not (last.get("content") or "").strip():
        message = f"continue_final_message needs a last message with a text of the assistant, got {short(dict(last))}"
        raise ApiError(400, message, "continue_final_message")
