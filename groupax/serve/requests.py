"""Requests in OpenAI's form: what may stand in them, checked, as records. Imports no jax."""

import json
import math
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from groupax.data.messages import join_text_parts
from groupax.serve.errors import ApiError
from groupax.settings.fields import nearest
from groupax.settings.sampling import BIASED_TOKENS, MAX_LOGPROBS, MAX_STOP_STRINGS, STOP_IDS, SamplingParams

DEFAULT_MAX_TOKENS = 16  # of a completion, as in OpenAI's interface; a chat has the server's own
MAX_BIAS = 100.0
MAX_STOP_IDS = STOP_IDS - 32  # beside those of the model and of stop texts
MAX_DIGITS = 10  # of a token id


@dataclass(frozen=True, eq=False)
class Request:
    """A request for completions.

    Attributes:
        model: its name; None for the server's own.
        is_chat: whether it is one for a chat.
        prompts: texts or lists of token ids; for a chat one list of messages.
        settings: fields of `SamplingParams` that are given.
        max_tokens: None if it does not say.
        stream: whether the answer is to come in pieces.
        include_usage: a streamed answer ends with the numbers of tokens.
        echo: the text of the prompt stands before that of the completion.
        logprobs: how many alternatives of each token to tell; None for no log-probs.
        return_token_ids: tell token ids, and both log-probs of each.
        ids_for_tokens: "token_id:7" in the place of a token's text, in log-probs.
        row_keys: the source of each completion's randomness in the place of the seed, [prompts * n, 2] uint32.
        weights_state: the weights that are meant (see `serve.weights`); with others the request is refused.
    """

    model: str | None
    is_chat: bool
    prompts: list[Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    logprobs: int | None = None
    return_token_ids: bool = False
    ids_for_tokens: bool = False
    row_keys: np.ndarray | None = None
    weights_state: str | None = None

    def sampling_params(self, default_max_tokens: int) -> SamplingParams:
        """How to sample.

        Raises:
            ApiError: settings are out of their range.
        """
        max_tokens = default_max_tokens if self.max_tokens is None else self.max_tokens
        try:
            return SamplingParams(**self.settings, max_tokens=max_tokens, logprobs=self.logprobs or 0)
        except ValueError as error:
            name = str(error).partition(" ")[0]
            raise ApiError(400, str(error), param=name if name in SETTINGS else None) from error


def parse(body: bytes, is_chat: bool) -> Request:
    """The request in the body of a POST to /v1/completions or /v1/chat/completions.

    Raises:
        ApiError: it is no JSON object, or a field is unknown, of another type, or asks for what is not done here.
    """
    given = parse_json(body)
    known = {*SETTINGS, *(CHAT_FIELDS if is_chat else COMPLETION_FIELDS), *COMMON_FIELDS, *IGNORED, *UNSUPPORTED}
    for name, value in given.items():
        if name not in known:
            raise ApiError(400, f"the request has an unknown field {name!r}{nearest(name, known)}", param=name)
        if name in UNSUPPORTED and not any(type(value) is type(each) and value == each for each in UNSUPPORTED[name]):
            raise ApiError(400, f"{name}={_short(value)} is not supported", param=name, code="unsupported_value")
    given = {name: value for name, value in given.items() if value is not None}
    settings = {name: read(name, given[name]) for name, read in SETTINGS.items() if name in given}
    if settings.get("top_k") == -1:  # how others write that all are kept
        settings["top_k"] = 0
    settings.setdefault("seed", secrets.randbits(31))
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise ApiError(400, f"stream_options must be an object, got {_short(options)}", param="stream_options")
    unknown = next((name for name in options if name not in STREAM_OPTIONS), None)
    if unknown is not None:
        raise ApiError(400, f"stream_options has an unknown field {_short(unknown)}", param="stream_options")
    limits = [_integer(name, given[name]) for name in ("max_completion_tokens", "max_tokens") if name in given]
    common = {
        "model": _text("model", given["model"]) if "model" in given else None,
        "is_chat": is_chat,
        "settings": settings,
        "max_tokens": limits[0] if limits else None,
        "stream": _flag("stream", given.get("stream", False)),
        "include_usage": _flag("stream_options.include_usage", options.get("include_usage") or False),
        "return_token_ids": _flag("return_token_ids", given.get("return_token_ids", False)),
        "ids_for_tokens": _flag("return_tokens_as_token_ids", given.get("return_tokens_as_token_ids", False)),
        "row_keys": _keys("row_keys", given["row_keys"]) if "row_keys" in given else None,
        "weights_state": _text("weights_state", given["weights_state"]) if "weights_state" in given else None,
    }
    return _chat(given, common) if is_chat else _completion(given, common)


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        ApiError: there is none, or the name of a field is no text.
    """

    def no_number(name: str) -> Any:
        raise ValueError(f"{name} is no number of JSON")

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            name = next(name for name, count in counts.items() if count > 1)
            raise ApiError(400, f"the body has the field {_short(name)} twice", param=name if _is_text(name) else None)
        return found

    try:
        given = json.loads(body, parse_constant=no_number, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise ApiError(400, f"the body must be a JSON object, it is {_short(given)}")
    for name in given:
        if not _is_text(name):  # nor could an answer name it
            raise ApiError(400, f"the body has a field whose name is no text: {_short(name)}")
    return given


def _completion(given: Mapping[str, Any], common: dict[str, Any]) -> Request:
    if "prompt" not in given:
        raise ApiError(400, "prompt is missing: a text, token ids, or a list of either", param="prompt")
    prompt = given["prompt"]
    single = isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and _is_integer(prompt[0]))
    prompts = [prompt] if single else prompt
    if not isinstance(prompts, list) or not prompts:
        raise ApiError(400, f"prompt must be a text, token ids, or a list of either, got {_short(prompt)}", "prompt")
    for each in prompts:
        if not _is_text(each) and not _is_ids(each):
            raise ApiError(400, f"a prompt must be a text or a list of token ids, got {_short(each)}", "prompt")
    logprobs = given.get("logprobs")
    logprobs = None if logprobs is None or logprobs is False else _alternatives("logprobs", logprobs)
    request = Request(prompts=prompts, logprobs=logprobs, echo=_flag("echo", given.get("echo", False)), **common)
    if request.echo and logprobs is not None:
        raise ApiError(400, "echo with logprobs needs log-probs of the prompt, which are not computed", "echo")
    return request


def _chat(given: Mapping[str, Any], common: dict[str, Any]) -> Request:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, f"messages must be a list of messages, got {_short(messages)}", param="messages")
    wants = _flag("logprobs", given.get("logprobs", False))
    if "top_logprobs" in given and not wants:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    logprobs = _alternatives("top_logprobs", given.get("top_logprobs", 0)) if wants else None
    return Request(prompts=[[_message(each) for each in messages]], logprobs=logprobs, **common)


def _message(message: Any) -> dict[str, Any]:
    """A message whose content is one text."""
    if not isinstance(message, dict) or not _is_text(message.get("role")):
        raise ApiError(400, f"a message must be an object with role and content, got {_short(message)}", "messages")
    content = message.get("content")
    if isinstance(content, list):
        try:
            content = join_text_parts(content, "a message")
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from error
    if not _is_text(content):
        raise ApiError(400, f"the content of a message must be a text, got {_short(content)}", param="messages")
    return {**message, "content": content}


def _is_text(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(_is_integer(token) and 0 <= token < 1 << 31 for token in value)


def _integer(name: str, value: Any) -> int:
    if not _is_integer(value) or not -(1 << 63) <= value < 1 << 63:
        raise ApiError(400, f"{name} must be an integer, got {_short(value)}", param=name)
    return value


def _small_integer(name: str, value: Any) -> int:
    if not -(1 << 31) <= _integer(name, value) < 1 << 31:
        raise ApiError(400, f"{name} is out of range: {value}", param=name)
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ApiError(400, f"{name} must be a number, got {_short(value)}", param=name)
    if abs(value) > 1e9:
        raise ApiError(400, f"{name} is out of range: {value}", param=name)
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ApiError(400, f"{name} must be true or false, got {_short(value)}", param=name)
    return value


def _text(name: str, value: Any) -> str:
    if not _is_text(value):
        raise ApiError(400, f"{name} must be a text, got {_short(value)}", param=name)
    return value


def _alternatives(name: str, value: Any) -> int:
    if not 0 <= _integer(name, value) <= MAX_LOGPROBS:
        raise ApiError(400, f"{name} must be in [0, {MAX_LOGPROBS}], got {value}", param=name)
    return value


def _stops(name: str, value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(_is_text(stop) for stop in stops) or len(stops) > MAX_STOP_STRINGS:
        raise ApiError(
            400, f"{name} must be a text or at most {MAX_STOP_STRINGS} of them, got {_short(value)}", param=name
        )
    return tuple(stops)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not _is_ids(value):
        raise ApiError(400, f"{name} must be a list of token ids, got {_short(value)}", param=name)
    if len(value) > MAX_STOP_IDS:
        raise ApiError(400, f"{name} may have {MAX_STOP_IDS} tokens, got {len(value)}", param=name)
    return tuple(value)


def _keys(name: str, value: Any) -> np.ndarray:
    pairs = value if isinstance(value, list) else []
    if not pairs or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ApiError(400, f"{name} must be a list of pairs of numbers, got {_short(value)}", param=name)
    if not all(_is_integer(number) and 0 <= number < 1 << 32 for pair in pairs for number in pair):
        raise ApiError(400, f"{name} must hold numbers of 32 bits, got {_short(value)}", param=name)
    return np.array(pairs, np.uint32)


def _biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ApiError(400, f"{name} must be an object of token ids and numbers, got {_short(value)}", param=name)
    if len(value) > BIASED_TOKENS:
        raise ApiError(400, f"{name} may have {BIASED_TOKENS} tokens, got {len(value)}", param=name)
    biases = {}
    for token, bias in value.items():
        is_number = token.isascii() and token.isdecimal() and len(token) <= MAX_DIGITS
        if not is_number or str(int(token)) != token or int(token) >= 1 << 31:
            raise ApiError(400, f"{name} must name token ids, got {_short(token)}", param=name)
        if abs(_number(name, bias)) > MAX_BIAS:
            raise ApiError(400, f"{name} must be in [-{MAX_BIAS:.0f}, {MAX_BIAS:.0f}], got {bias}", param=name)
        biases[int(token)] = float(bias)
    return biases


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_READ_BY_TYPE = {float: _number, int: _small_integer, bool: _flag}
_READ_BY_NAME = {"seed": _integer, "stop": _stops, "stop_token_ids": _ids, "logit_bias": _biases}
# Fields of `SamplingParams` that have the same names in a request, and how each is read.
SETTINGS: dict[str, Callable[[str, Any], Any]] = {
    each.name: _READ_BY_NAME.get(each.name) or _READ_BY_TYPE[each.type]
    for each in fields(SamplingParams)
    if each.name not in ("max_tokens", "logprobs")
}
STREAM_OPTIONS = {"include_usage", "include_obfuscation"}  # the second changes nothing here
COMMON_FIELDS = {"model", "max_tokens", "stream", "stream_options", "return_token_ids", "return_tokens_as_token_ids"}
COMMON_FIELDS |= {"row_keys", "weights_state"}
COMPLETION_FIELDS = {"prompt", "logprobs", "echo"}
CHAT_FIELDS = {"messages", "logprobs", "top_logprobs", "max_completion_tokens"}
# What changes nothing here.
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
# What is not done here, and the values that do not ask for it.
UNSUPPORTED: dict[str, list[Any]] = {
    "audio": [None],
    "best_of": [None, 1],
    "function_call": [None, "none"],
    "functions": [None, []],
    "modalities": [None, ["text"]],
    "prediction": [None],
    "reasoning_effort": [None],
    "response_format": [None, {"type": "text"}],
    "suffix": [None, ""],
    "tool_choice": [None, "none", "auto"],
    "tools": [None, []],
    "web_search_options": [None],
}
