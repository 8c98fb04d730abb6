"""Regular expressions of the JSON documents that a schema allows. Imports no jax.

The documents are a subset of the valid ones: properties are in the schema's order, additional properties occur only in
objects without named ones, and there are no spaces but single ones after commas and colons. What a schema cannot be
translated to is refused, not ignored.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any

from groupax.constraints.json_numbers import integer_regex, number_regex, one_of
from groupax.constraints.json_strings import STRING, format_regex, pattern_regex, string_regex

MAX_DEPTH = 3  # arrays and objects within each other where a schema allows any value
MAX_RECURSION = 3  # times that a definition contains itself
MAX_CHARACTERS = 1 << 20
_SPACE = " ?"
_KEYWORDS: dict[str, tuple[str, ...]] = {
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties", "patternProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_REFUSED = (
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "propertyNames",
    "unevaluatedItems",
    "additionalItems",
    "$dynamicRef",
    "$recursiveRef",
)
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf")
MAX_VALUES = 10_000  # of integers with multipleOf


def regex_of_schema(text: str) -> str:
    """Returns the expression of the documents that a schema allows.

    Args:
        text: The schema, as JSON.

    Raises:
        ValueError: The text is no JSON, no document satisfies the schema, or a keyword is unknown to JSON Schema, has
            another type, or is not supported.
    """
    try:
        schema = json.loads(text)
        regex = _Translator(schema).value(schema, {}, MAX_DEPTH)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"json_schema is not JSON, or nested too deeply: {error}") from error
    if regex is None:
        raise ValueError("json_schema allows no document of finite depth")
    return regex


class _Translator:
    """Translates the parts of one schema; None stands for what no document satisfies."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._num_characters = 0

    def value(self, schema: Any, entered: Mapping[str, int], depth: int) -> str | None:
        """Returns the expression of a value.

        Args:
            schema: Its schema.
            entered: Number of times that each definition contains this one.
            depth: Number of arrays and objects within each other, where any value is allowed.
        """
        regex = self._value(schema, entered, depth)
        self._num_characters += len(regex or "")
        if self._num_characters > 64 * MAX_CHARACTERS or len(regex or "") > MAX_CHARACTERS:
            raise ValueError(f"json_schema becomes an expression of more than {MAX_CHARACTERS:,} characters; simplify it")
        return regex

    def _value(self, schema: Any, entered: Mapping[str, int], depth: int) -> str | None:
        if schema is False:
            return None
        if schema is True or schema == {}:
            return any_value(depth)
        if not isinstance(schema, dict):
            raise ValueError(f"a schema must be an object or a boolean, got {_short(schema)}")
        for keyword in _REFUSED:
            if keyword in schema:
                raise ValueError(f"json_schema has {keyword!r}, which is not supported")
        for keyword in _COMBINING:
            if keyword in schema:
                return self._combined(keyword, schema, entered, depth)
        if "const" in schema or "enum" in schema:
            return self._constants(schema)
        kinds = _types_of(schema)
        return one_of(self._of_type(kind, schema, entered, depth) for kind in kinds)

    def _combined(self, keyword: str, schema: dict[str, Any], entered: Mapping[str, int], depth: int) -> str | None:
        rest = {name: value for name, value in schema.items() if name != keyword}
        if keyword == "$ref":
            path = _typed(schema, "$ref", str)
            if entered.get(path, 0) >= MAX_RECURSION:
                return None
            entered = {**entered, path: entered.get(path, 0) + 1}
            return self.value(merged([rest, self._definition(path)]), entered, depth)
        parts = _typed(schema, keyword, list)
        if not parts:
            raise ValueError(f"json_schema has an empty {keyword!r}")
        if keyword == "allOf":
            return self.value(merged([rest, *(self._resolved(part) for part in parts)]), entered, depth)
        # one of several schemas: documents that satisfy two of them are not ruled out
        return one_of(self.value(merged([rest, self._resolved(part)]) if _has_rules(rest) else part, entered, depth) for part in parts)

    def _resolved(self, schema: Any) -> Any:
        """Returns a schema with its reference replaced by the definition, so that others can be merged with it."""
        seen = 0
        while isinstance(schema, dict) and "$ref" in schema:
            seen += 1
            if seen > 100:
                raise ValueError("json_schema has references that lead to each other")
            rest = {name: value for name, value in schema.items() if name != "$ref"}
            schema = merged([rest, self._definition(_typed(schema, "$ref", str))])
        return schema

    def _definition(self, path: str) -> Any:
        if path != "#" and not path.startswith("#/"):
            raise ValueError(f"json_schema has the reference {path!r}; only those within the schema (#/...) are supported")
        found = self.root
        for name in path.split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                raise ValueError(f"json_schema has the reference {path!r}, which leads nowhere")
        return found

    def _constants(self, schema: dict[str, Any]) -> str | None:
        values = [schema["const"]] if "const" in schema else _typed(schema, "enum", list)
        if "const" in schema and "enum" in schema:
            values = [value for value in schema["enum"] if value == schema["const"]]
        kinds = _types_of(schema) if "type" in schema else _TYPES
        return one_of(_constant(value) for value in values if any(_is_of(value, kind) for kind in kinds))

    def _of_type(self, kind: str, schema: dict[str, Any], entered: Mapping[str, int], depth: int) -> str | None:
        match kind:
            case "null":
                return "null"
            case "boolean":
                return "(?:true|false)"
            case "string":
                return _string(schema)
            case "integer" | "number":
                return _number(schema, kind == "integer")
            case "array":
                return self._array(schema, entered, depth)
            case _:
                return self._object(schema, entered, depth)

    def _array(self, schema: dict[str, Any], entered: Mapping[str, int], depth: int) -> str | None:
        first = [self.value(each, entered, depth - 1) for each in _typed(schema, "prefixItems", list, [])]
        items = schema.get("items", True)
        if isinstance(items, list):  # before 2020
            first, items = [self.value(each, entered, depth - 1) for each in items], True
        low, high = _count(schema, "minItems", 0), _count(schema, "maxItems", None)
        if schema.get("uniqueItems") and (high is None or high > 1):
            raise ValueError("json_schema has uniqueItems, which is not supported")
        if None in first:
            high = first.index(None) if high is None else min(high, first.index(None))
        is_full = high is not None and high <= len(first)
        item = None if is_full or (items is True and depth <= 0) else self.value(items, entered, depth - 1)
        if item is None:
            high = len(first) if high is None else min(high, len(first))
        if high is not None and low > high:
            return None
        return _list("[", "]", first, item, low, high)

    def _object(self, schema: dict[str, Any], entered: Mapping[str, int], depth: int) -> str | None:
        properties = dict(_typed(schema, "properties", dict, {}))
        required = _typed(schema, "required", list, [])
        others = schema.get("additionalProperties", True)
        for name in required:
            properties.setdefault(str(name), others)
        low, high = _count(schema, "minProperties", 0), _count(schema, "maxProperties", None)
        if properties:
            if low > len(required) or (high is not None and high < len(properties)):
                raise ValueError("json_schema has minProperties or maxProperties beside properties; this is not supported")
            pairs = []
            for name, each in properties.items():
                value = self.value(each, entered, depth - 1) if depth > 0 or each is not True else any_value(0)
                if value is None and name in required:
                    return None
                if value is not None:
                    pairs.append((f"{_constant(name)}:{_SPACE}{value}", name in required))
            return rf"\{{{_in_order(pairs)}\}}"
        return self._mapping(schema, others, low, high, entered, depth)

    def _mapping(
        self, schema: dict[str, Any], others: Any, low: int, high: int | None, entered: Mapping[str, int], depth: int
    ) -> str | None:
        """Returns the expression of an object whose properties have no names in the schema."""
        patterns = _typed(schema, "patternProperties", dict, {})
        pairs = [] if patterns else [(STRING, others)]
        pairs += [(pattern_regex(pattern), each) for pattern, each in patterns.items()]
        if len(pairs) > 1:
            raise ValueError("json_schema has several patternProperties; one is supported")
        [(name, each)] = pairs
        value = None if each is True and depth <= 0 else self.value(each, entered, depth - 1)
        pair = None if value is None else f"{name}:{_SPACE}{value}"
        if pair is None and low:
            return None
        return _list("{", "}", [], pair, low, high if pair is not None else 0)


def any_value(depth: int) -> str:
    """Returns the expression of any value with so many arrays and objects within each other."""
    scalar = one_of([STRING, number_regex(None, None, False, False), "true", "false", "null"])
    if depth <= 0:
        return str(scalar)
    inner = any_value(depth - 1)
    return f"(?:{scalar}|{_list('[', ']', [], inner, 0, None)}|{_list('{', '}', [], f'{STRING}:{_SPACE}{inner}', 0, None)})"


def merged(schemas: Iterable[Any]) -> Any:
    """Returns a schema that allows what all of these allow.

    Raises:
        ValueError: Two of them set one keyword to different values, in a way that is not supported.
    """
    result: dict[str, Any] = {}
    for schema in schemas:
        if schema is False:
            return False
        if schema is True:
            continue
        if not isinstance(schema, dict):
            raise ValueError(f"a schema must be an object or a boolean, got {_short(schema)}")
        for name, value in schema.items():
            if name not in result or result[name] == value:
                result[name] = value
            elif name in _MERGES:
                result[name] = _MERGES[name](result[name], value)
            elif name in _RULES:
                raise ValueError(f"json_schema combines two different values of {name!r}; this is not supported")
    return result


def _merged_types(one: Any, other: Any) -> Any:
    one, other = ([each] if isinstance(each, str) else list(each) for each in (one, other))
    return [each for each in one if each in other or (each == "integer" and "number" in other)] + [
        each for each in other if each == "integer" and "number" in one and "integer" not in one
    ]


def _merged_properties(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {name: merged([part[name] for part in (one, other) if name in part]) for name in {**one, **other}}


_MERGES: dict[str, Callable[[Any, Any], Any]] = {
    "type": _merged_types,
    "properties": _merged_properties,
    "required": lambda one, other: [*one, *(each for each in other if each not in one)],
    "enum": lambda one, other: [each for each in one if each in other],
    "additionalProperties": lambda one, other: merged([one, other]),
    "allOf": lambda one, other: [*one, *other],
    **{name: max for name in ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")},
    **{name: min for name in ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")},
}
_RULES = {*_COMBINING, *_REFUSED, "type", "enum", "const", *(name for names in _KEYWORDS.values() for name in names)}


def _has_rules(schema: Mapping[str, Any]) -> bool:
    return any(name in _RULES for name in schema)


def _types_of(schema: dict[str, Any]) -> list[str]:
    """Returns the types that a schema names, or else those that its keywords are for."""
    given = schema.get("type")
    if given is None:
        found = [kind for kind, names in _KEYWORDS.items() if any(name in schema for name in names)]
        return found or [kind for kind in _TYPES if kind != "integer"]
    kinds = [given] if isinstance(given, str) else given
    if not isinstance(kinds, list) or not all(kind in _TYPES for kind in kinds):
        raise ValueError(f"json_schema has the type {_short(given)}; types are {', '.join(_TYPES)}")
    return kinds


def _string(schema: dict[str, Any]) -> str | None:
    low, high = _count(schema, "minLength", 0), _count(schema, "maxLength", None)
    pattern, form = _typed(schema, "pattern", str, None), _typed(schema, "format", str, None)
    by_format = None if form is None else format_regex(form)
    rules = [pattern is not None, by_format is not None, low > 0 or high is not None]
    if sum(rules) > 1:
        raise ValueError("json_schema has a string with two of pattern, format and a length; one of them is supported")
    if pattern is not None:
        return pattern_regex(pattern)
    if high is not None and low > high:
        return None
    return by_format or string_regex(low, high)


def _number(schema: dict[str, Any], is_integer: bool) -> str | None:
    bounds = {name: _bound(schema, name) for name in _KEYWORDS["number"]}
    low, high, above, below = bounds["minimum"], bounds["maximum"], False, False
    if (exclusive := bounds["exclusiveMinimum"]) is not None and (low is None or exclusive >= low):
        low, above = exclusive, True
    if (exclusive := bounds["exclusiveMaximum"]) is not None and (high is None or exclusive <= high):
        high, below = exclusive, True
    if (multiple := bounds["multipleOf"]) is not None:
        return _multiples(multiple, low, high, above, below)
    if not is_integer:
        return number_regex(low, high, above, below)
    if above and low is not None and low == low.to_integral_value():
        low += 1
    if below and high is not None and high == high.to_integral_value():
        high -= 1
    return integer_regex(low, high)


def _multiples(step: Decimal, low: Decimal | None, high: Decimal | None, above: bool, below: bool) -> str | None:
    if step == 1 and not above and not below:
        return integer_regex(low, high)
    if low is None or high is None or step <= 0 or (high - low) / step > MAX_VALUES:
        raise ValueError(
            f"json_schema has multipleOf={step}; it is supported with a minimum and a maximum, of up to {MAX_VALUES:,} values"
        )
    first = -(-low // step) if low >= 0 or low % step == 0 else low // step
    values = [number * step for number in range(int(first) - 1, int(high // step) + 2)]
    kept = [v for v in values if low <= v <= high and not (above and v == low) and not (below and v == high)]
    return one_of(re.escape(f"{value.normalize():f}") for value in kept)


def _bound(schema: dict[str, Any], name: str) -> Decimal | None:
    value = schema.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"json_schema has {name}={_short(value)}, which must be a number")
    return Decimal(str(value))


def _count(schema: dict[str, Any], name: str, default: Any) -> Any:
    value = schema.get(name, default)
    if value is default:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
        raise ValueError(f"json_schema has {name}={_short(value)}, which must be a natural number")
    return int(value)


def _typed(schema: dict[str, Any], name: str, kind: type, default: Any = ...) -> Any:
    value = schema.get(name, default)
    if value is not default and not isinstance(value, kind):
        words = {str: "a text", list: "an array", dict: "an object"}
        raise ValueError(f"json_schema has {name}={_short(value)}, which must be {words[kind]}")
    return value


def _list(start: str, end: str, first: list[str | None], item: str | None, low: int, high: int | None) -> str:
    """Returns the expression of a list with commas: the first items in order, then others."""
    comma = f",{_SPACE}"
    body = ""
    # from the end: each further one of the first items may be left out with all that follow
    most = None if high is None else max(0, high - len(first))
    if item is not None and most != 0:
        fewest = max(0, low - len(first))
        if first:
            body = f"(?:{comma}{item}){{{fewest},{'' if most is None else most}}}"
        else:
            further = f"(?:{comma}{item}){{{max(0, fewest - 1)},{'' if most is None else most - 1}}}"
            body = f"{item}{further}" if fewest else f"(?:{item}{further})?"
    for index in reversed(range(len(first) if high is None else min(high, len(first)))):
        own = f"{comma if index else ''}{first[index]}{body}"
        body = own if index < low else f"(?:{own})?"
    return f"\\{start}{body}\\{end}"


def _in_order(pairs: list[tuple[str, bool]]) -> str:
    """Returns the expression of properties in their order, of which those that are not required may be left out."""
    comma = f",{_SPACE}"
    required = [index for index, (_, is_required) in enumerate(pairs) if is_required]
    if required:
        first = required[0]
        parts = [f"(?:{pair}{comma})?" for pair, _ in pairs[:first]] + [pairs[first][0]]
        parts += [f"{comma}{pair}" if must else f"(?:{comma}{pair})?" for pair, must in pairs[first + 1 :]]
        return "".join(parts)
    starts = [pair + "".join(f"(?:{comma}{later})?" for later, _ in pairs[index + 1 :]) for index, (pair, _) in enumerate(pairs)]
    return f"(?:{'|'.join(starts)})?" if starts else ""


def _constant(value: Any) -> str:
    """Returns the expression of one value, without spaces but after commas and colons."""
    return re.escape(json.dumps(value, ensure_ascii=False, allow_nan=False))


def _is_of(value: Any, kind: str) -> bool:
    kinds: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    if kind in kinds:
        return isinstance(value, kinds[kind])
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (kind == "number" or value == int(value))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
