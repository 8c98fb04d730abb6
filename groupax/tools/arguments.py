"""Arguments of a call, checked against the schema of the tool. Imports no jax.

A text is converted where the schema wants something else: formats in XML write nothing but texts, and models write "7"
for 7 in JSON too. Nothing else is converted, but a number without a fraction is an integer, as JSON Schema has it.
"""

import math
from collections.abc import Mapping
from typing import Any

from groupax.settings.fields import nearest
from groupax.terminal.printable import short_repr
from groupax.tools.strict_json import read_json, skip_space

CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def check_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call as the tool's schema wants them.

    Args:
        schema: Schema of the tool in OpenAI's format; of JSON Schema it may use type, enum, properties, required,
            additionalProperties, items, prefixItems, anyOf and nullable. Other keywords are not checked.
        arguments: Arguments by name.

    Raises:
        ValueError: An argument is unknown, missing or of a wrong type; the message is for the model.
    """
    function = schema["function"]
    parameters = {"type": "object", "properties": {}, "additionalProperties": False, **function.get("parameters", {})}
    return _object(parameters, dict(arguments), "", f"the tool {function['name']!r}")


def _checked(schema: Mapping[str, Any], value: Any, where: str) -> Any:
    """Returns a value as its schema wants it; `where` is its name in an error."""
    if value is None and schema.get("nullable"):
        return None
    if "anyOf" in schema:
        return _any_of(schema, value, where)
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if schema.get("nullable"):
        kinds.append("null")
    if kinds:
        value = _typed(kinds, value, where)
    if "enum" in schema and not any(value == each and type(value) is type(each) for each in schema["enum"]):
        choices = ", ".join(map(repr, schema["enum"]))
        hint = (
            nearest(value[:80], [each for each in schema["enum"] if isinstance(each, str)])
            if isinstance(value, str)
            else ""
        )
        raise ValueError(f"{where} must be one of {choices}, got {short_repr(value)}{hint}")
    if isinstance(value, list):
        return _array(schema, value, where)
    if isinstance(value, dict):
        return _object(schema, value, where, where)
    return value


def _any_of(schema: Mapping[str, Any], value: Any, where: str) -> Any:
    """Returns the value by the first choice that takes it; one that does so without a conversion comes first."""
    taken, faults = [], []
    for choice in schema["anyOf"]:
        try:
            taken.append(_checked(choice, value, where))
        except ValueError as error:
            faults.append(str(error))
    if not taken:
        raise ValueError("; or ".join(faults))
    return next((each for each in taken if type(each) is type(value)), taken[0])


def _typed(kinds: list[str], value: Any, where: str) -> Any:
    """Returns a value of one of the types, converted from a text if it is none of them."""
    if _is_any(kinds, value):
        return int(value) if isinstance(value, float) and "number" not in kinds and "integer" in kinds else value
    if isinstance(value, str):
        found = _from_text(value)
        if _is_any(kinds, found):
            return int(found) if isinstance(found, float) and "number" not in kinds else found
    raise ValueError(f"{where} must be {' or '.join(map(_article, kinds))}, got {short_repr(value)}")


def _is_any(kinds: list[str], value: Any) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, float) and not math.isfinite(value):
        return False  # 1e999
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        return True
    # types that are not JSON's are not checked
    return any(isinstance(value, PYTHON_TYPES.get(kind, (object,))) for kind in kinds)


def _from_text(text: str) -> Any:
    """Returns the value that a text writes as JSON, or as Python's True, False or None; else the text itself."""
    if text.strip().lower() in CONSTANTS:
        return CONSTANTS[text.strip().lower()]
    try:
        value, end = read_json(text)
    except ValueError:
        return text
    return value if skip_space(text, end) == len(text) else text


def _array(schema: Mapping[str, Any], values: list[Any], where: str) -> list[Any]:
    if "prefixItems" in schema:
        items = schema["prefixItems"]
        if len(values) != len(items):
            raise ValueError(f"{where} must have {len(items)} entries, got {len(values)}")
    else:
        items = [schema.get("items", {})] * len(values)
    return [
        _checked(item, value, f"entry {index} of {where}")
        for index, (item, value) in enumerate(zip(items, values, strict=True))
    ]


def _object(schema: Mapping[str, Any], values: dict[str, Any], where: str, owner: str) -> dict[str, Any]:
    properties, more = schema.get("properties", {}), schema.get("additionalProperties", True)
    inside = f" of {where}" if where else ""
    for key in values:
        if key not in properties and more is False:
            known = f"it takes {', '.join(properties)}" if properties else "it takes none"
            raise ValueError(f"{owner} has no argument {key!r:.80}{nearest(key[:80], properties) or ';'} {known}")
    missing = [key for key in schema.get("required", ()) if key not in values]
    if missing:
        raise ValueError(f"{owner} needs the argument{'s' * (len(missing) > 1)} {', '.join(missing)}")
    other = more if isinstance(more, Mapping) else {}
    return {
        key: _checked(properties.get(key, other), value, f"the argument {key!r:.80}{inside}")
        for key, value in values.items()
    }


def _article(kind: str) -> str:
    return "null" if kind == "null" else f"a{'n' * (kind[0] in 'aio')} {kind}"
