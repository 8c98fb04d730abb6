"""Regular expressions of the JSON documents that a schema allows. Imports no jax.

The documents are a subset of the valid ones: properties are in the schema's order, additional properties occur only in
objects without named ones, and there are no spaces but single ones after commas and colons. Keywords that cannot be
translated are refused, not ignored. Of the schemas of `oneOf` a document may satisfy several.
"""

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from groupax.constraints.json_numbers import integer_regex, number_regex, one_of
from groupax.constraints.json_strings import STRING, format_regex, pattern_regex, string_regex
from groupax.constraints.schema_merging import COMBINING, KEYWORDS, REFUSED, RULES, merged, short

MAX_DEPTH = 3  # arrays and objects within each other where a schema allows any value
MAX_RECURSION = 3  # times that a definition contains itself
MAX_VALUES_WRITTEN = 100_000  # including those within others, wherever a reference repeats them
MAX_CHARACTERS_WRITTEN = 1 << 25
MAX_VALUES = 10_000  # of numbers with multipleOf
_SPACE = " ?"
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


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
        self._num_values = self._num_characters = 0

    def value(self, schema: Any, entered: Mapping[str, int], depth: int) -> str | None:
        """Returns the expression of a value.

        Args:
            schema: Its schema.
            entered: Number of times that each definition contains this one.
            depth: Number of arrays and objects within each other, where any value is allowed.
        """
        self._num_values += 1
        if self._num_values > MAX_VALUES_WRITTEN:
            raise ValueError(f"json_schema describes more than {MAX_VALUES_WRITTEN:,} values; simplify its references")
        regex = self._value(schema, entered, depth)
        self._num_characters += len(regex or "")
        if self._num_characters > MAX_CHARACTERS_WRITTEN:
            raise ValueError("json_schema becomes too long an expression; simplify its references")
        return regex

    def _value(self, schema: Any, entered: Mapping[str, int], depth: int) -> str | None:
        if schema is False:
            return None
        if schema is True or schema == {}:
            return any_value(depth)
        if not isinstance(schema, dict):
            raise ValueError(f"a schema must be an object or a boolean, got {short(schema)}")
        for keyword in REFUSED:
            if keyword in schema:
                raise ValueError(f"json_schema has {keyword!r}, which is not supported")
        for keyword in COMBINING:
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
        return one_of(
            self.value(merged([rest, self._resolved(part)]) if _has_rules(rest) else part, entered, depth)
            for part in parts
        )

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
            raise ValueError(
                f"json_schema has the reference {path!r}; only those within the schema (#/...) are supported"
            )
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
                raise ValueError(
                    "json_schema has minProperties or maxProperties together with properties; this is not supported"
                )
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
    """Returns the expression of any value with at most this number of arrays and objects within each other."""
    scalar = one_of([STRING, number_regex(None, None, False, False), "true", "false", "null"])
    if depth <= 0:
        return str(scalar)
    inner = any_value(depth - 1)
    array = _list("[", "]", [], inner, 0, None)
    return f"(?:{scalar}|{array}|{_list('{', '}', [], f'{STRING}:{_SPACE}{inner}', 0, None)})"


def _has_rules(schema: Mapping[str, Any]) -> bool:
    return any(name in RULES for name in schema)


def _types_of(schema: dict[str, Any]) -> list[str]:
    """Returns the types that a schema names, or else those that its keywords are for."""
    given = schema.get("type")
    if given is None:
        found = [kind for kind, names in KEYWORDS.items() if any(name in schema for name in names)]
        return found or [kind for kind in _TYPES if kind != "integer"]
    kinds = [given] if isinstance(given, str) else given
    if not isinstance(kinds, list) or not all(kind in _TYPES for kind in kinds):
        raise ValueError(f"json_schema has the type {short(given)}; types are {', '.join(_TYPES)}")
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
    bounds = {name: _bound(schema, name) for name in KEYWORDS["number"]}
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
            f"json_schema has multipleOf={step}; it is supported with a minimum and a maximum, of up to {MAX_VALUES:,} "
            "values"
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
        raise ValueError(f"json_schema has {name}={short(value)}, which must be a number")
    return Decimal(str(value))


def _count(schema: dict[str, Any], name: str, default: Any) -> Any:
    value = schema.get(name, default)
    if value is default:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
        raise ValueError(f"json_schema has {name}={short(value)}, which must be a natural number")
    return int(value)


def _typed(schema: dict[str, Any], name: str, kind: type, default: Any = ...) -> Any:
    value = schema.get(name, default)
    if value is not default and not isinstance(value, kind):
        words = {str: "a text", list: "an array", dict: "an object"}
        raise ValueError(f"json_schema has {name}={short(value)}, which must be {words[kind]}")
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
    starts = [
        pair + "".join(f"(?:{comma}{later})?" for later, _ in pairs[index + 1 :])
        for index, (pair, _) in enumerate(pairs)
    ]
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
