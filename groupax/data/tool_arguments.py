"""Arguments of a call, converted to what the schema of the tool wants, and checked against it. Imports no jax.

A format in XML writes nothing but texts. Such a text stands for the value that a chat template writes so, if the schema
takes that value: `5` is a number in a union of number and string, and `1.50` a string there. In other formats a text
is converted only where the schema takes no text, since models write "7" for 7 in JSON too.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any
from urllib.parse import unquote

from groupax.core.settings.fields import nearest
from groupax.core.terminal.printable import short_repr

MAX_DEPTH = 64  # of nested objects and arrays
SPACE = re.compile(r"\s*+")
QUOTED = 40  # characters of the text that an error quotes


def read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """Returns the JSON value that begins at a position of a text, from which errors count, and where it ends.

    Raises a ValueError if it is not JSON, has a half of a surrogate pair, or is nested too deeply.
    """
    begin = skip_space(text, start)
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        where = f"at character {error.pos - start}"
        if error.pos >= len(text) or error.msg.startswith("Unterminated string"):
            raise ValueError(f"it is cut off: {error.msg} {where}") from error
        raise ValueError(f"{error.msg} {where}, before {text[error.pos : error.pos + QUOTED]!r}") from error
    except RecursionError as error:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from error
    _check_depth(value)
    if "\\u" in text[begin:end]:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("it has half of a surrogate pair, which is not a character") from error
    return value, end


def skip_space(text: str, start: int) -> int:
    """Returns the position of the first character that is not white space, at or after `start`."""
    found = SPACE.match(text, start)
    return start if found is None else found.end()


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text:.40} is too large for a number")
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        outer = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [*chain.from_iterable(outer)]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, strict=False)


CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
WRITTEN = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
# Names of types that schemas have by mistake
ALIASES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}
MAX_NAMES = 256  # that an unknown name is compared with
# Other keywords that may describe arguments
DESCRIBING = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "unevaluatedProperties", "dependentSchemas", "if"}
MAX_STEPS = 20_000  # of a check, about 0.1 s, and one per character of text; what is left then is taken as it is


@dataclass
class _Check:
    """A check of one call."""

    root: Mapping[str, Any]  # schema of the arguments, to which references refer
    owner: str  # name of the tool in an error
    steps: int  # that are left


def check_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any], is_text: bool = False) -> dict[str, Any]:
    """Returns the arguments of a call as the tool's schema wants them.

    Args:
        schema: Schema of the tool in OpenAI's format, with its arguments as properties. Of JSON Schema these may use
            type, enum, const, properties, required, additionalProperties, items, prefixItems, allOf, anyOf, oneOf,
            $ref within the schema, and nullable; other keywords are not checked. Other arguments are unknown, unless
            the schema allows additional ones, or has other keywords that may describe them.
        is_text: Whether they are texts since the format writes no types.

    Raises:
        ValueError: An argument is wrong, with a text for the model.
    """
    check = _check_of(schema, arguments)
    is_closed = check.root.get("additionalProperties", False) is False and not DESCRIBING & check.root.keys()
    _check_names(check, check.root, arguments, check.owner, is_closed)
    return {name: _argument(check, name, value, is_text) for name, value in arguments.items()}


def convert_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call, which are texts, as the schema wants them; one that is wrong as it is."""
    values = dict(arguments)
    with contextlib.suppress(ValueError):  # of a tool without a schema of an object
        check = _check_of(schema, arguments)
        for name, value in arguments.items():
            with contextlib.suppress(ValueError):
                values[name] = _argument(check, name, value, is_text=True)
    return values


def _check_of(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> _Check:
    owner, parameters = f"the tool {schema['function']['name']!r}", schema["function"].get("parameters") or {}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"{owner} has no schema of an object: {short_repr(parameters)}")
    num_characters = sum(len(value) for value in arguments.values() if isinstance(value, str))
    return _Check(parameters, owner, MAX_STEPS + num_characters)


def _argument(check: _Check, name: str, value: Any, is_text: bool) -> Any:
    """Returns the value of an argument; of a text, what it stands for if the schema takes that."""
    schema = _mapping(check.root, "properties").get(name, check.root.get("additionalProperties") or None)
    if schema is None:
        return value
    where = f"the argument {name!r:.80}"
    try:
        for written in _written(value) if is_text and isinstance(value, str) else ():
            with contextlib.suppress(ValueError):
                found = _fit(check, schema, written, where)
                if type(found) is type(written) and check.steps > 0:
                    return found
        return _fit(check, schema, value, where)
    except RecursionError as error:
        raise ValueError(f"the schema of {check.owner} is nested too deeply") from error


def _written(text: str) -> Iterator[Any]:
    """Yields the value that chat templates write as this text, if it is not a string."""
    if text in WRITTEN:
        yield WRITTEN[text]
    value = _from_text(text)
    if isinstance(value, dict | list) or (isinstance(value, int | float) and str(value) == text):
        yield value


def _fit(check: _Check, schema: Any, value: Any, where: str) -> Any:
    """Returns a value as its schema wants it; raises a ValueError if it is wrong."""
    check.steps -= 1
    if schema is False:
        raise ValueError(f"{where} is not allowed")
    if check.steps < 0 or not isinstance(schema, Mapping) or (value is None and schema.get("nullable") is True):
        return value
    value = _typed(check, schema, value, where)
    if isinstance(schema.get("$ref"), str):
        value = _fit(check, _resolved(check.root, schema["$ref"]), value, where)
    for part in _list(schema, "allOf"):
        value = _fit(check, part, value, where)
    for key in ("anyOf", "oneOf"):
        if _list(schema, key):
            value = _any_of(check, schema[key], value, where)
    if isinstance(value, list):
        return _array(check, schema, value, where)
    return _object(check, schema, value, where) if isinstance(value, dict) else value


def _any_of(check: _Check, choices: list[Any], value: Any, where: str) -> Any:
    """Returns the value by the first choice that takes it; one that does so without a conversion comes first."""
    taken, faults = [], []
    for choice in choices:
        try:
            found = _fit(check, choice, value, where)
        except ValueError as error:
            faults.append(str(error))
            continue
        if type(found) is type(value) and found == value:
            return found
        taken.append(found)
    if not taken:
        raise ValueError("; or ".join(dict.fromkeys(faults)))
    return taken[0]


def _typed(check: _Check, schema: Mapping[str, Any], value: Any, where: str) -> Any:
    """Returns a value of the types and among the constants of a schema."""
    kinds = _kinds(schema)
    if kinds and not _is_any(kinds, value):
        found = _from_text(value) if isinstance(value, str) else value
        if not isinstance(value, str) or not _is_any(kinds, found):
            raise ValueError(f"{where} must be {' or '.join(map(_article, kinds))}, got {short_repr(value)}")
        value = found
    if isinstance(value, float) and "integer" in kinds and "number" not in kinds:
        value = int(value)
    for choices in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
        if isinstance(choices, list):
            check.steps -= len(choices)
            tries = [value, _from_text(value)] if isinstance(value, str) else [value]
            equal = [each for found in tries for each in choices if _are_equal(each, found)]
            if not equal:
                raise ValueError(_not_one_of(choices, value, where))
            value = equal[0]
    return value


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    """Returns the types of a schema; none if it has none, or one that is not JSON's."""
    given = schema.get("type")
    kinds = [str(each).lower() for each in (given if isinstance(given, list) else [given])]
    kinds = [ALIASES.get(kind, kind) for kind in kinds]
    if not all(kind in PYTHON_TYPES for kind in kinds):
        return []
    return [*kinds, "null"] if schema.get("nullable") is True else kinds


def _is_any(kinds: list[str], value: Any) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, float) and not math.isfinite(value):
        return False  # 1e999
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        return True
    return any(isinstance(value, PYTHON_TYPES[kind]) for kind in kinds)


def _are_equal(a: Any, b: Any) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _not_one_of(choices: list[Any], value: Any, where: str) -> str:
    texts = [each for each in choices if isinstance(each, str)]
    hint = nearest(value[:80], texts[:MAX_NAMES]) if isinstance(value, str) else ""
    named = f"{'one of ' * (len(choices) > 1)}{', '.join(map(repr, choices))}"
    return f"{where} must be {named}, got {short_repr(value)}{hint}"


def _from_text(text: str) -> Any:
    """Returns the value that a text writes as JSON, or as Python's True, False or None; else the text itself."""
    if text.strip().lower() in CONSTANTS:
        return CONSTANTS[text.strip().lower()]
    try:
        value, end = read_json(text)
    except ValueError:
        return text
    return value if skip_space(text, end) == len(text) else text


def _array(check: _Check, schema: Mapping[str, Any], values: list[Any], where: str) -> list[Any]:
    first = _list(schema, "prefixItems")
    rest = schema.get("items", not first)
    if len(values) < len(first) or (rest is False and len(values) > len(first)):
        raise ValueError(f"{where} must have {len(first)} entries, got {len(values)}")
    items = [*first, *[rest] * len(values)]
    pairs = enumerate(zip(items, values, strict=False))
    return [_fit(check, item, value, f"entry {index} of {where}") for index, (item, value) in pairs]


def _object(check: _Check, schema: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    properties, others = _mapping(schema, "properties"), schema.get("additionalProperties", True)
    _check_names(check, schema, values, where, others is False and not DESCRIBING & schema.keys())
    return {
        name: _fit(check, properties.get(name, others or True), value, f"the argument {name!r:.80} of {where}")
        for name, value in values.items()
    }


def _check_names(
    check: _Check, schema: Mapping[str, Any], values: Mapping[str, Any], owner: str, is_closed: bool
) -> None:
    """Raises a ValueError if a name is missing, or unknown to a schema that is closed."""
    properties, required = _mapping(schema, "properties"), _list(schema, "required")
    check.steps -= len(required) + (len(properties) if is_closed else 0)
    unknown = [name for name in values if name not in properties] if is_closed and check.steps > 0 else []
    if unknown:
        known = f"it takes {', '.join(properties)}" if properties else "it takes none"
        hint = nearest(unknown[0][:80], [*properties][:MAX_NAMES]) or ";"
        raise ValueError(f"{owner} has no argument {unknown[0]!r:.80}{hint} {known}")
    if missing := [name for name in required if isinstance(name, str) and name not in values]:
        raise ValueError(f"{owner} needs the argument{'s' * (len(missing) > 1)} {', '.join(missing)}")


def _resolved(root: Mapping[str, Any], ref: str) -> Any:
    """Returns the schema to which a reference refers; True, which takes anything, if that is not within the schema."""
    found: Any = root if ref.partition("/")[0] == "#" else None
    for part in ref.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return True if found is None else found


def _mapping(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = schema.get(key)
    return value if isinstance(value, Mapping) else {}


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _article(kind: str) -> str:
    return "null" if kind == "null" else f"a{'n' * (kind[0] in 'aio')} {kind}"
