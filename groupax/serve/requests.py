"""Schemas of requests in OpenAI's format. Imports no jax."""

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic_core import from_json

from groupax.core.settings.fields import nearest
from groupax.core.settings.sampling import BIASED_TOKENS, MAX_LOGPROBS, MAX_STOP_STRINGS, STOP_IDS, SamplingParams
from groupax.data.images import images_of, without_images
from groupax.serve.chats import Messages, TemplateKwargs, Text, ToolChoice, Tools, expect, is_text, short
from groupax.serve.web import ApiError

DEFAULT_MAX_TOKENS = 16  # of completions, as in OpenAI's API; the server's own limit applies to chats
MAX_BIAS = 100.0
MAX_STOP_CHARACTERS = 1024  # of a stop string
MAX_STOP_IDS = STOP_IDS - 32  # leaves room for the model's own stop tokens and those of stop strings

Schema = TypeVar("Schema", bound=BaseModel)
Int32 = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
UInt32 = Annotated[int, Field(ge=0, lt=1 << 32)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Number = Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]


def _prompts(value: Any) -> list[Any]:
    single = isinstance(value, str) or (isinstance(value, list) and bool(value) and type(value[0]) is int)
    prompts: Any = [value] if single else value
    is_list = isinstance(prompts, list) and prompts
    expect(is_list, "prompt must be a string, token ids, or a list of either", value)
    for each in prompts:
        if not is_text(each) and not _is_ids(each):
            raise ApiError(400, f"a prompt must be a string or a list of token ids, got {short(each)}", "prompt")
    return prompts


def _token_of_key(key: str) -> int:
    expect(re.fullmatch("0|[1-9][0-9]{0,9}", key), "logit_bias must have token ids as its keys", key)
    return int(key)


NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
LogitBias = Annotated[dict[Annotated[int, BeforeValidator(_token_of_key)], Bias], Field(max_length=BIASED_TOKENS)]
StopStrings = Annotated[
    list[Annotated[Text, Field(max_length=MAX_STOP_CHARACTERS)]],
    Field(max_length=MAX_STOP_STRINGS, fail_fast=True),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]
StopTokenIds = Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS, fail_fast=True)]
RowKey = Annotated[list[UInt32], Field(min_length=2, max_length=2)]
RowKeys = Annotated[list[RowKey], Field(min_length=1, fail_fast=True)]


# Types of sampling parameters in requests; those of other types have fields of their own.
_TYPES: dict[Any, Any] = {int: Int32, float: Number, bool: bool}
_TYPES[str | None] = Text | None  # pyright: ignore[reportOperatorIssue]
# Grammars could take any time: they are made here, of schemas and expressions that are checked.
_REQUESTED = [each for each in fields(SamplingParams) if each.name != "grammar"]
_FIELDS: Any = {each.name: (_TYPES[each.type], each.default) for each in _REQUESTED if each.type in _TYPES}
_Sampling: Any = create_model("_Sampling", __config__=ConfigDict(strict=True), **_FIELDS)


class Request(_Sampling, BaseModel):
    """A request for completions or for a chat. Sampling parameters have the names and defaults of `SamplingParams`.

    Attributes:
        model: Name of the model; None takes the server's first.
        max_tokens: None takes the server's default.
        return_token_ids: Whether to report token ids and both log-probs of each token.
        row_keys: The PRNG key of each completion, used instead of the seed, [prompts * n, 2] uint32.
        weights_state: The weights to sample from (see `serve.weights`); with others the request is refused.
        prompts: Strings or lists of token ids; for a chat one list of messages.
        logprobs: Number of alternatives to report for each token; None reports no log-probs.
    """

    model: Text | None = None
    max_tokens: Int64 | None = None
    stream: bool = False
    stream_options: dict[str, bool | None] = {}
    return_token_ids: bool = False
    row_keys: RowKeys | None = None
    weights_state: Text | None = None
    top_k: Annotated[Int32, AfterValidator(lambda k: 0 if k == -1 else k)] = 0  # -1 keeps all tokens in other APIs
    logit_bias: LogitBias = {}
    seed: Int64 = Field(default_factory=lambda: secrets.randbits(31))
    stop: StopStrings = []
    stop_token_ids: StopTokenIds = []
    prompts: list[Any]
    logprobs: NumLogprobs | None = None

    @property
    def is_chat(self) -> bool:
        """True for a chat."""
        return isinstance(self, ChatRequest)

    def sampling_params(self, default_max_tokens: int) -> SamplingParams:
        """Returns the sampling parameters."""
        max_tokens = default_max_tokens if self.max_tokens is None else self.max_tokens
        settings: dict[str, Any] = {name: getattr(self, name) for name in SETTINGS}
        settings["stop_token_ids"] = tuple(self.stop_token_ids)
        try:
            return SamplingParams(**settings, max_tokens=max_tokens, logprobs=self.logprobs or 0)
        except ValueError as error:
            name = str(error).partition(" ")[0]
            raise ApiError(400, str(error), param=name if name in type(self).model_fields else None) from error


class CompletionRequest(Request):
    """The body of a POST to /v1/completions."""

    prompts: Annotated[list[Any], BeforeValidator(_prompts)] = Field(validation_alias="prompt")
    logprobs: Annotated[NumLogprobs | None, BeforeValidator(lambda num: None if num is False else num)] = None


class ChatRequest(Request):
    """The body of a POST to /v1/chat/completions.

    Attributes:
        tools: Schemas of functions in OpenAI's format.
        tool_choice: "auto", "none", "required", or the name of the function to call as {"name": ...}.
        parallel_tool_calls: Whether a turn may have several calls; the first one is reported otherwise.
        chat_template_kwargs: Arguments for the chat template, as {"enable_thinking": False}.
        reasoning_effort: One more argument for the chat template, under this name.
        add_generation_prompt: Whether the prompt ends with the start of the assistant's message.
        continue_final_message: Whether the last message is continued instead of being answered.
    """

    prompts: Annotated[Messages, AfterValidator(lambda each: [each])] = Field(validation_alias="messages")
    has_logprobs: bool = Field(False, validation_alias="logprobs")
    logprobs: NumLogprobs | None = Field(None, validation_alias="top_logprobs")
    max_completion_tokens: Int64 | None = None
    tools: Tools = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: TemplateKwargs = {}
    reasoning_effort: Text | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages as chat templates read them, with a part {"type": "image"} for each image."""
        prompts: list[Any] = self.prompts
        return without_images(prompts[0])

    @property
    def image_urls(self) -> list[str]:
        """The `data:` URLs of the images in the messages, in their order."""
        return images_of({"prompt": self.prompts[0]})

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """All arguments for the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **self.chat_template_kwargs}


SETTINGS = {each.name for each in _REQUESTED} - {"max_tokens", "logprobs"}
assert Request.model_fields.keys() >= SETTINGS, f"requests lack {SETTINGS - Request.model_fields.keys()}"
# Fields of chats that other protocols take too, with their meaning there; these have their own for constraints.
EXTENSIONS = SETTINGS - {"n", "regex", "json_schema"} | {
    *("row_keys", "weights_state", "chat_template_kwargs", "return_token_ids"),
}
STREAM_OPTIONS = ("include_usage", "include_obfuscation")  # the second has no effect here
# Fields without an effect here.
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity"}
# Fields that are not supported, and the value of them that requests nothing.
UNSUPPORTED: dict[str, Any] = {
    "best_of": 1,
    "echo": False,
    "function_call": "none",
    "functions": [],
    "modalities": ["text"],
    "suffix": "",
}


@dataclass(frozen=True)
class Incoming:
    """A request, whatever its protocol.

    Attributes:
        request: The request.
        wire: Further fields that the client has sent and the response repeats.
        hints: Arguments for the chat template that only count if the template reads them.
    """

    request: Request
    wire: Mapping[str, Any] = field(default_factory=dict)
    hints: Mapping[str, Any] = field(default_factory=dict)


def parse(body: bytes, is_chat: bool) -> Request:
    """Returns the request in the body of a POST to /v1/completions or /v1/chat/completions."""
    return request_of(parse_json(body), is_chat)


def chat_fields(body: bytes, same: set[str], others: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the fields of a body in another protocol, and those of them that a chat has under the same names."""
    given = {name: value for name, value in parse_json(body).items() if value is not None}
    check_known(given, [*same, *others, *EXTENSIONS], "the request")
    return given, {name: given[name] for name in given.keys() & (same | EXTENSIONS)}


def request_of(given: Mapping[str, Any], is_chat: bool) -> Request:
    """Returns the request that the fields of a body describe (see `parse`)."""
    schema = ChatRequest if is_chat else CompletionRequest
    known = [str(field.validation_alias or name) for name, field in schema.model_fields.items()]
    given = {name: value for name, value in given.items() if value is not None}
    check_known(given, [*known, "response_format", *IGNORED, *UNSUPPORTED], "the request")
    form = given.pop("response_format", None)
    form_schema = None if form is None else _schema_of(form)
    if form_schema is not None:
        if "json_schema" in given:
            raise ApiError(400, "response_format and json_schema are two constraints; set one of them", "json_schema")
        given["json_schema"] = json.dumps(form_schema)
    for name in given.keys() & UNSUPPORTED.keys():
        if type(given[name]) is not type(UNSUPPORTED[name]) or given[name] != UNSUPPORTED[name]:
            raise ApiError(400, f"{name}={short(given[name])} is not supported", name, "unsupported_value")
    if isinstance(given.get("stream_options"), dict):
        check_known(given["stream_options"], STREAM_OPTIONS, "stream_options", param="stream_options")
    request = validated(schema, given)
    if isinstance(request, ChatRequest):
        _complete_chat(request)
    return request


def _complete_chat(request: "ChatRequest") -> None:
    """Checks fields of a chat against each other, and sets those that others stand for."""
    if request.logprobs is not None and not request.has_logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
    request.logprobs = (request.logprobs or 0) if request.has_logprobs else None
    if request.max_completion_tokens is not None:
        request.max_tokens = request.max_completion_tokens
    choice, names = request.tool_choice, [tool["function"]["name"] for tool in request.tools]
    if choice == "required" and not names:
        raise ApiError(400, "tool_choice is required, but there are no tools", "tool_choice")
    if isinstance(choice, Mapping) and choice["name"] not in names:
        message = f"tool_choice names the function {short(choice['name'])}; the tools are {short(names)}"
        raise ApiError(400, message, "tool_choice")
    if request.continue_final_message:
        no_other = "continue_final_message needs add_generation_prompt=false, since no new message begins"
        expect(not request.add_generation_prompt, no_other, True)
        last = request.messages[-1]
        is_open = last["role"] == "assistant" and not last.get("tool_calls") and (last.get("content") or "").strip()
        expect(is_open, "continue_final_message needs a last message with a text of the assistant", dict(last))


def _schema_of(form: Any) -> dict[str, Any] | bool | None:
    """Returns the JSON schema that a `response_format` requests; None for any text."""
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind == "text":
        return None
    is_known = kind in ("json_object", "json_schema")
    expect(is_known, "response_format must have the type text, json_object or json_schema", form)
    given: Any = {"schema": {"type": "object"}} if kind == "json_object" else form.get("json_schema")
    has_schema = isinstance(given, Mapping) and isinstance(given.get("schema"), Mapping | bool)
    expect(has_schema, "response_format.json_schema must be an object with a schema", given)
    return given["schema"]


def parse_json(body: bytes) -> dict[str, Any]:
    """Returns the JSON object in a body that a response could repeat: 1e999 is not a number."""
    try:
        given = from_json(body, allow_inf_nan=False)
        json.dumps(given, allow_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise ApiError(400, f"the body must be a JSON object, got {short(given)}")
    return given


def check_known(given: Mapping[str, Any], known: Iterable[str], where: str, param: str | None = None) -> None:
    """Refuses an object with an unknown field, and suggests the nearest known name."""
    known = list(known)
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        message = f"{where} has an unknown field {short(unknown)}{nearest(unknown, known)}"
        raise ApiError(400, message, param or unknown)


def validated(schema: type[Schema], given: Mapping[str, Any]) -> Schema:
    """Returns an object as an instance of its schema, or raises an `ApiError` that names the faulty field."""
    try:
        return schema.model_validate(given)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        path = ".".join(map(str, fault["loc"]))
        text = re.sub(r"^\w+ should |^Value error, ", "must ", fault["msg"]).replace("dictionary", "object")
        text = re.sub(r" after validation| or instance of \w+", "", text)
        missing = fault["type"] == "missing"
        message = f"{path} is missing" if missing else f"{path} {text}, got {short(fault['input'])}"
        raise ApiError(400, message, param=str(fault["loc"][0])) from error


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and 0 <= token < 1 << 31 for token in value)
