"""Keywords of JSON Schema, and schemas that allow what several others allow together. Imports no jax."""

from collections.abc import Callable, Iterable
from typing import Any

KEYWORDS: dict[str, tuple[str, ...]] = {
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties", "patternProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
REFUSED = (
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
COMBINING = ("$ref", "allOf", "anyOf", "oneOf")


def merged(schemas: Iterable[Any]) -> Any:
    """Returns a schema that allows what all of these allow.

    Raises:
        ValueError: Two of them set one keyword to different values, in a way that is not supported.
    """
    result: dict[str, Any] = {}
    schemas = list(schemas)
    for schema in schemas:
        if schema is False:
            return False
        if schema is True:
            continue
        if not isinstance(schema, dict):
            raise ValueError(f"a schema must be an object or a boolean, got {short(schema)}")
        for name, value in schema.items():
            if name not in result or result[name] == value:
                result[name] = value
            elif name in _MERGES:
                result[name] = _MERGES[name](result[name], value)
            elif name in RULES:
                raise ValueError(f"json_schema combines two different values of {name!r}; this is not supported")
    for schema in schemas:
        own: dict[str, Any] = {} if schema is True else schema
        others = result.get("properties", {}).keys() - own.get("properties", {}).keys()
        if others and own.get("additionalProperties", True) is not True:
            raise ValueError(
                f"json_schema combines the property {min(others)!r} with additionalProperties that rule it out"
            )
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
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), min),
}
RULES = {*COMBINING, *REFUSED, "type", "enum", "const", *(name for names in KEYWORDS.values() for name in names)}


def short(value: Any) -> str:
    """Returns a value as an error quotes it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
