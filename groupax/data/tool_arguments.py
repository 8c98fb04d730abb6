"""Arguments of a call, converted to what the schema of the tool wants, and checked against it. Imports no jax.

A format in XML writes nothing but texts. Such a text stands for the value that a chat template writes so, if the schema
takes that value: `5` is a number in a union of number and string, and `1.50` a string there. In other formats a text
is converted only where the schema takes no text, since models write "7" for 7 in JSON too.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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

    Raises a ValueError if it is not JSON, repeats a key, has a half of a surrogate pair, or is nested too deeply.
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


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(repeated, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {repeated!r:.80} is repeated")
    return found


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


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite, strict=False
)


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
DESCRIBING = {"patternProperties", "unevaluatedProperties", "dependentSchemas", "if"}  # other keywords for arguments
MAX_STEPS = 20_000  # of a check, about 0.1 s, and one per character of text; what is left then is taken as it is


@dataclass(frozen=True)
class _Text:
    """A text of a format that writes no types."""

    text: str


@dataclass
class _Check:
    """A check of one call."""

    root: Mapping[str, Any]  # schema of the arguments, to which references refer
    owner: str  # name of the tool in an error
    steps: int  # that are left


def check_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any], is_text: bool = False) -> dict[str, Any]:
    """Returns the arguments of a call as the tool's schema wants them, or raises a ValueError for the model."""
    values, faults = convert_arguments(schema, arguments, is_text)
    if faults:
        raise ValueError(faults[0])
    return values


def convert_arguments(
    schema: Mapping[str, Any], arguments: Mapping[str, Any], is_text: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Converts the arguments of a call, each on its own, and returns them with what is wrong with them.

    Args:
        schema: Schema of the tool in OpenAI's format. Of JSON Schema it may use type, enum, const, properties,
            required, additionalProperties, items, prefixItems, allOf, anyOf, oneOf, $ref within the schema, and
            nullable; other keywords are not checked. Arguments that it does not describe are unknown, unless it allows
            additional ones, or has other keywords that may describe them.
        is_text: Whether they are texts since the format writes no types.

    Returns:
        The arguments, and faults for the model; a value with a fault is as the model has written it.
    """
    function, parameters = schema["function"], schema["function"].get("parameters") or {}
    if not isinstance(parameters, Mapping):
        return dict(arguments), [f"the tool {function['name']!r} has no schema of an object: {short_repr(parameters)}"]
    root = {"type": "object", **parameters}
    num_characters = sum(len(value) for value in arguments.values() if isinstance(value, str))
    check = _Check(root, f"the tool {function['name']!r}", MAX_STEPS + num_characters)
    given = {key: _Text(value) if is_text and isinstance(value, str) else value for key, value in arguments.items()}
    try:
        values, faults = _checked(check, root, given, "")
        faults = _unknown(check, given) + faults
    except RecursionError:
        values, faults = given, [f"the schema of {check.owner} is nested too deeply"]
    return {key: value.text if isinstance(value, _Text) else value for key, value in values.items()}, faults


def _checked(check: _Check, schema: Any, value: Any, where: str, refs: tuple[str, ...] = ()) -> tuple[Any, list[str]]:
    """Returns a value as its schema wants it, and what is wrong with it; `refs` were followed for the same value."""
    check.steps -= 1
    if check.steps < 0:
        return value, []
    if isinstance(value, _Text):
        return _checked_text(check, schema, value.text, where, refs)
    if not isinstance(schema, Mapping):
        return value, [f"{where} is not allowed"] if schema is False else []
    if value is None and schema.get("nullable") is True:
        return None, []
    value, faults = _checked_alone(check, schema, value, where)
    if faults and not isinstance(value, dict):
        return value, faults
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref not in refs:
        value, more = _checked(check, _resolved(check.root, ref), value, where, (*refs, ref))
        faults += more
    for part in _list(schema, "allOf"):
        value, more = _checked(check, part, value, where, refs)
        faults += more
    for key in ("anyOf", "oneOf"):
        if _list(schema, key):
            value, more = _any_of(check, schema[key], value, where, refs)
            faults += more
    return value, faults


def _checked_text(check: _Check, schema: Any, text: str, where: str, refs: tuple[str, ...]) -> tuple[Any, list[str]]:
    """Returns the value that a text stands for, else the text, as the schema takes them."""
    for value in _written(text):
        found, faults = _checked(check, schema, value, where, refs)
        if not faults and type(found) is type(value) and check.steps > 0:
            return found, []
    return _checked(check, schema, text, where, refs)


def _written(text: str) -> Iterator[Any]:
    """Yields the value that chat templates write as this text, if it is not a string."""
    if text in WRITTEN:
        yield WRITTEN[text]
    value = _from_text(text)
    if isinstance(value, dict | list) or (isinstance(value, int | float) and str(value) == text):
        yield value


def _any_of(check: _Check, choices: list[Any], value: Any, where: str, refs: tuple[str, ...]) -> tuple[Any, list[str]]:
    """Returns the value by the first choice that takes it; one that does so without a conversion comes first."""
    taken, refused = [], []
    for choice in choices:
        found, faults = _checked(check, choice, value, where, refs)
        if not faults and type(found) is type(value) and found == value:
            return found, []
        (refused if faults else taken).append((found, faults))
    if taken:
        return taken[0]
    nearest_value = min(refused, key=lambda each: len(each[1]))[0]
    return nearest_value, ["; or ".join(dict.fromkeys(faults[0] for _, faults in refused))]


def _checked_alone(check: _Check, schema: Mapping[str, Any], value: Any, where: str) -> tuple[Any, list[str]]:
    """Checks a value against the keywords of a schema that do not refer to other schemas of the same value."""
    kinds = _kinds(schema)
    if kinds and not _is_any(kinds, value):
        found = _from_text(value) if isinstance(value, str) else value
        if not isinstance(value, str) or not _is_any(kinds, found):
            named = " or ".join(map(_article, kinds))
            return value, [f"{where or check.owner} must be {named}, got {short_repr(value)}"]
        value = found
    if isinstance(value, float) and "integer" in kinds and "number" not in kinds:
        value = int(value)
    for choices in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
        if isinstance(choices, list):
            check.steps -= len(choices)
            tries = [value, _from_text(value)] if isinstance(value, str) else [value]
            equal = [each for found in tries for each in choices if _are_equal(each, found)]
            if not equal:
                return value, [_not_one_of(choices, value, where or check.owner)]
            value = equal[0]
    if isinstance(value, list):
        return _array(check, schema, value, where)
    if isinstance(value, dict):
        return _object(check, schema, value, where)
    return value, []


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


def _array(check: _Check, schema: Mapping[str, Any], values: list[Any], where: str) -> tuple[list[Any], list[str]]:
    first, rest = _list(schema, "prefixItems"), schema.get("items", not _list(schema, "prefixItems"))
    if isinstance(rest, list):  # the older name of prefixItems
        first, rest = rest, schema.get("additionalItems", False)
    least = schema.get("minItems")
    least = min(least, len(first)) if isinstance(least, int) else len(first)
    if len(values) < least or (rest is False and len(values) > len(first)):
        return values, [f"{where} must have {len(first)} entries, got {len(values)}"]
    items = [*first, *[rest] * len(values)]
    checked, faults = [], []
    for index, (item, value) in enumerate(zip(items, values, strict=False)):
        found, more = _checked(check, item, value, f"entry {index} of {where}")
        checked.append(found)
        faults += more
    return checked, faults


def _object(check: _Check, schema: Mapping[str, Any], values: Mapping[str, Any], where: str) -> tuple[Any, list[str]]:
    owner, inside = where or check.owner, f" of {where}" if where else ""
    properties = _mapping(schema, "properties")
    faults = []
    is_closed = schema.get("additionalProperties") is False and where and not DESCRIBING & schema.keys()
    required = _list(schema, "required")
    check.steps -= len(required) + (len(properties) if is_closed else 0)
    if is_closed and (unknown := [key for key in values if key not in properties]):
        faults.append(_unknown_fault(owner, unknown[0], properties))
    missing = [key for key in required if isinstance(key, str) and key not in values]
    if missing:
        faults.append(f"{owner} needs the argument{'s' * (len(missing) > 1)} {', '.join(missing)}")
    checked = {}
    for key, value in values.items():
        part = properties.get(key, schema.get("additionalProperties") or None)
        if part is not None:
            value, more = _checked(check, part, value, f"the argument {key!r:.80}{inside}")
            faults += more
        checked[key] = value
    return checked, faults


def _unknown(check: _Check, values: Mapping[str, Any]) -> list[str]:
    """Returns a fault if an argument is none of those that the tool's schema, or one that it refers to, describes."""
    parts = [*_parts(check, check.root)]
    properties = dict.fromkeys(name for part in parts for name in _mapping(part, "properties"))
    takes_others = any(
        part.get("additionalProperties", False) is not False or DESCRIBING & part.keys() for part in parts
    )
    unknown = [] if takes_others or check.steps <= 0 else [key for key in values if key not in properties]
    return [_unknown_fault(check.owner, unknown[0], properties)] if unknown else []


def _unknown_fault(owner: str, key: str, names: Iterable[str]) -> str:
    known = f"it takes {', '.join(names)}" if names else "it takes none"
    return f"{owner} has no argument {key!r:.80}{nearest(key[:80], [*names][:MAX_NAMES]) or ';'} {known}"


def _parts(check: _Check, schema: Any, refs: tuple[str, ...] = ()) -> Iterator[Mapping[str, Any]]:
    """Yields a schema and those of the same value to which it refers."""
    check.steps -= 1
    if check.steps < 0 or not isinstance(schema, Mapping):
        return
    yield schema
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref not in refs:
        yield from _parts(check, _resolved(check.root, ref), (*refs, ref))
    for part in (part for key in ("allOf", "anyOf", "oneOf") for part in _list(schema, key)):
        yield from _parts(check, part, refs)


def _resolved(root: Mapping[str, Any], ref: str) -> Any:
    """Returns the schema to which a reference refers; True, which takes anything, if that is not within the schema."""
    for pointer in (unquote(ref), ref):
        found: Any = root
        for part in pointer.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = found[int(name)] if name.isdecimal() and int(name) < len(found) else None
            else:
                found = found.get(name) if isinstance(found, Mapping) else None
        if pointer.partition("/")[0] == "#" and found is not None:
            return found
    return True


def _mapping(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = schema.get(key)
    return value if isinstance(value, Mapping) else {}


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _article(kind: str) -> str:
    return "null" if kind == "null" else f"a{'n' * (kind[0] in 'aio')} {kind}"
