"""Chats in requests: messages, images, tools, and arguments for the chat template. Imports no jax."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WrapValidator

from groupax.core.settings.rollouts import check_template_kwargs
from groupax.data.chat import check_messages, check_tools, join_text_parts
from groupax.data.images import URL, open_image, read_image, without_images
from groupax.serve.web import ApiError, bad_request

MAX_TOOLS = 256
MAX_QUOTED = 80  # characters of a value that an error quotes
MAX_IMAGES = 16  # of a request
MAX_PIXELS = 1 << 24  # of an image
MAX_ALL_PIXELS = 1 << 25  # of the images of a request: each takes 4 bytes decoded, and up to 24 as patches
CHOICES = ("none", "auto", "required")
SYSTEM = ("system", "developer")
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def is_text(value: Any) -> bool:
    """Returns whether a value is a text of valid Unicode, which a response can quote."""
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value


def short(value: Any) -> str:
    """Returns a value as an error quotes it."""
    text = repr(value)
    return text if len(text) <= MAX_QUOTED else f"{text[: MAX_QUOTED - 3]}..."


def expect(condition: Any, message: str, value: Any) -> None:
    """Raises an `ApiError` that quotes a value, of the field that the message begins with, unless a condition holds."""
    if not condition:
        field = message.partition(" ")[0].partition(".")[0]
        raise ApiError(400, f"{message}, got {short(value)}", field)


def tools_of(tools: Any, kinds: tuple[str | None, ...], what: str, parameters: str) -> list[dict[str, Any]]:
    """Returns the tools of another protocol, of these types and with schemas named `parameters`, as those of a chat."""
    expect(isinstance(tools, list), "tools must be a list", tools)
    found = []
    for number, tool in enumerate(tools):
        expect(isinstance(tool, Mapping) and tool.get("type") in kinds, f"tools.{number} must be {what}", tool)
        function = {key: tool.get(key) for key in ("name", "description", "strict")}
        found.append({"type": "function", "function": {**function, "parameters": tool.get(parameters)}})
    return found


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
    with bad_request("messages"):
        text = join_text_parts(texts, "a message")
        return check(text) if len(texts) == len(parts) else parts


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _image(part: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an image of OpenAI's format as the chat template's, with the checked URL."""
    given = part.get("image_url")
    url: Any = given.get("url") if isinstance(given, Mapping) else given
    if part["type"] == "image" or not isinstance(url, str):
        form = "{'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,...'}}"
        raise ApiError(400, f"a part of a message must be {form}", "messages")
    if not url.startswith(URL):
        message = f"a part of a message has the URL {url[:80]!r}, and this server fetches none; send the image as a "
        raise ApiError(400, f"{message}data: URL", "messages", "unsupported_value")
    return {"type": "image", "image": url}


def decoded_images(urls: Sequence[str]) -> list[Any]:
    """Returns the PIL images of `data:` URLs."""
    if len(urls) > MAX_IMAGES:
        raise ApiError(400, f"the chat has {len(urls)} images; a request may have {MAX_IMAGES}", "messages")
    with bad_request("messages", code="invalid_image"):
        opened = [open_image(url, f"image {number} of the chat", MAX_PIXELS) for number, url in enumerate(urls, 1)]
        num_pixels = sum(image.width * image.height for image in opened)
        if num_pixels > MAX_ALL_PIXELS:
            raise ValueError(
                f"the images of the chat have {num_pixels:,} pixels together, at most {MAX_ALL_PIXELS:,} are read; "
                "send smaller images"
            )
        return [read_image(image, f"image {number} of the chat") for number, image in enumerate(opened, 1)]


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
        if isinstance(fields["content"], list) and message.role not in ("user", *SYSTEM):
            raise ApiError(400, f"messages.{number} has an image, and its role is {short(message.role)}", "messages")
        messages.append(fields)
    _check_results(messages)
    with bad_request("messages"):
        checked = check_messages(without_images(messages), "messages", may_be_empty=True, with_images=True)
    return [
        {**own, "content": message["content"]} if isinstance(message["content"], list) else own
        for own, message in zip(checked, messages, strict=True)
    ]


def _check_results(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuses the result of a tool that belongs to no earlier call."""
    ids: set[str] = set()  # as they are quoted, whatever their type
    for number, message in enumerate(messages):
        calls = message.get("tool_calls") if message["role"] == "assistant" else None
        if isinstance(calls, list):
            ids |= {repr(call.get("id")) for call in calls if isinstance(call, Mapping)}
        found = message.get("tool_call_id")
        if message["role"] == "tool" and repr(found) not in ids:
            text = (
                f"messages.{number}, a tool's, has the tool_call_id {short(found)}, and no call before it has that id"
            )
            raise ApiError(400, text, "messages")


def _tools(value: Any) -> list[dict[str, Any]]:
    is_list = isinstance(value, list) and len(value) <= MAX_TOOLS
    expect(is_list, f"tools must be a list of at most {MAX_TOOLS} functions", value)
    tools = []
    for number, tool in enumerate(value):
        if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
            message = f"tools.{number} must be {{'type': 'function', 'function': {{...}}}}, got {short(tool)}"
            raise ApiError(400, message, "tools", "unsupported_value")
        given: Any = tool.get("function")
        has_name = isinstance(given, Mapping) and is_text(given.get("name")) and given["name"]
        expect(has_name, f"tools.{number}.function must have a name", given)
        parameters = given.get("parameters")
        is_schema = isinstance(parameters, Mapping | None)
        expect(is_schema, f"tools.{number}.function.parameters must be a JSON schema", parameters)
        expect(
            all(given["name"] != each["function"]["name"] for each in tools),
            "tools must have different names",
            given["name"],
        )
        # in the order in which templates of models that know tools were trained to read them; null fields are left out
        function = {"name": "", "description": "", "parameters": NO_ARGUMENTS}
        function |= {key: each for key, each in given.items() if each is not None and (key, each) != ("parameters", {})}
        tools.append({"type": "function", "function": function})
    with bad_request("tools"):
        check_tools(value, "the request")
    return tools


def _tool_choice(value: Any) -> str | dict[str, str]:
    if value in CHOICES:
        return value
    is_function = isinstance(value, Mapping) and value.get("type") == "function"
    function: Any = value.get("function") if is_function else None
    has_name = isinstance(function, Mapping) and isinstance(function.get("name"), str)
    form = f"one of {', '.join(CHOICES)}, or {{'type': 'function', 'function': {{'name': ...}}}}"
    expect(has_name, f"tool_choice must be {form}", value)
    return {"name": function["name"]}


def _template_kwargs(value: Any) -> dict[str, Any]:
    with bad_request("chat_template_kwargs"):
        check_template_kwargs(value, "chat_template_kwargs")
    return value


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True), AfterValidator(_messages)]
Tools = Annotated[Any, BeforeValidator(_tools)]
ToolChoice = Annotated[Any, BeforeValidator(_tool_choice)]
TemplateKwargs = Annotated[Any, BeforeValidator(_template_kwargs)]


def text_of(content: Any, kinds: tuple[str, ...], where: str, between: str = "") -> str:
    """Returns the text of a content: a text, or a list of parts of these types with texts, joined by `between`."""
    if is_text(content):
        return content
    expect(isinstance(content, list), f"{where} must be a text or a list of parts", content)
    for part in content:
        is_sound = isinstance(part, Mapping) and part.get("type") in kinds and is_text(part.get("text"))
        expect(is_sound, f"{where} may have parts of type {' or '.join(kinds)} with a text", part)
    return between.join(part["text"] for part in content)
