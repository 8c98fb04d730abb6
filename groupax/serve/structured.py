"""Fields of requests that constrain the response, in the names of OpenAI, vLLM and SGLang. Imports no jax."""

import json
import re
from collections.abc import Mapping
from typing import Any

from groupax.serve.chat_fields import is_text, short
from groupax.serve.errors import ApiError

ANY_OBJECT = '{"type": "object"}'
# Other names of a field, with the key under which `structured_outputs` has it.
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice"}
FIELDS = ("regex", "json_schema", "response_format", "structured_outputs", *GUIDED)
_OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties", "disable_fallback")


def with_constraint(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a request with its constraint as `regex` or `json_schema`.

    Args:
        given: Fields of a request, in which any of `FIELDS` may be.

    Raises:
        ApiError: A field has another form, or two of them are set.
    """
    rest = {name: value for name, value in given.items() if name not in FIELDS}
    found: dict[str, tuple[str, str]] = {}
    for name in FIELDS:
        value = given.get(name)
        if value is None:
            continue
        if name == "response_format":
            constraint = _of_response_format(value)
        elif name == "structured_outputs":
            constraint = _of_structured_outputs(value)
        elif name in GUIDED:
            constraint = _constraint(GUIDED[name], value, name)
        else:
            constraint = _constraint("regex" if name == "regex" else "json", value, name)
        if constraint is not None:
            found[name] = constraint
    if len(found) > 1:
        names = list(found)
        raise ApiError(400, f"{' and '.join(names)} are several constraints; set one of them", names[1])
    return {**rest, **dict(found.values())}


def _of_response_format(value: Any) -> tuple[str, str] | None:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return "json_schema", ANY_OBJECT
    if kind == "json_schema":
        form = value.get("json_schema")
        if not isinstance(form, Mapping) or not isinstance(form.get("schema"), Mapping | bool):
            message = f"response_format.json_schema must be an object with a schema, got {short(form)}"
            raise ApiError(400, message, "response_format")
        return _constraint("json", form["schema"], "response_format")
    message = f"response_format must have the type text, json_object or json_schema, got {short(value)}"
    raise ApiError(400, message, "response_format")


def _of_structured_outputs(value: Any) -> tuple[str, str] | None:
    if not isinstance(value, Mapping):
        raise ApiError(400, f"structured_outputs must be an object, got {short(value)}", "structured_outputs")
    given = {key: each for key, each in value.items() if each is not None and key not in _OPTIONS}
    if not given:
        return None
    if len(given) > 1:
        message = f"structured_outputs has {' and '.join(given)}, which are several constraints; set one of them"
        raise ApiError(400, message, "structured_outputs")
    [(kind, constraint)] = given.items()
    if kind == "json_object":
        return ("json_schema", ANY_OBJECT) if constraint else None
    return _constraint(kind, constraint, "structured_outputs")


def _constraint(kind: str, value: Any, name: str) -> tuple[str, str]:
    """Returns the field of a constraint and its text.

    Args:
        kind: "regex", "json" or "choice".
        value: Expression, schema or texts.
        name: Field of the request.
    """
    if kind == "regex" and is_text(value):
        return "regex", value
    if kind == "choice" and isinstance(value, list) and value and all(map(is_text, value)):
        return "regex", "|".join(map(re.escape, value))
    if kind == "json" and (is_text(value) or isinstance(value, Mapping | bool)):
        return "json_schema", value if isinstance(value, str) else json.dumps(value)
    words = {"regex": "a text", "choice": "a list of texts", "json": "a JSON schema"}
    if kind not in words:
        message = f"{name} has {short(kind)}, which is not supported; there are json, regex, choice and json_object"
        raise ApiError(400, message, name, "unsupported_value")
    raise ApiError(400, f"{name} must be {words[kind]}, got {short(value)}", name)
