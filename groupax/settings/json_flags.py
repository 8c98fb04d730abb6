"""Rules for flags: mappings are written as JSON, functions as references, and switches may list what they apply to."""

import json
from typing import Any, Literal, get_args, get_origin

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from groupax.settings.fields import is_open, nearest
from groupax.settings.references import reference_to

# For the argument `registry` of `tyro.cli`.
JSON_FLAGS = ConstructorRegistry()


@JSON_FLAGS.primitive_rule
def _mapping_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[dict[str, Any]] | None:
    if get_origin(info.type) is not dict or get_args(info.type) != (str, Any):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda texts: read_mapping(texts[0]),
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [json.dumps(value)],
    )


@JSON_FLAGS.primitive_rule
def _function_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    if not is_open(info.type):
        return None
    names = [name for each in get_args(info.type) if get_origin(each) is Literal for name in get_args(each)]
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="{" + ",".join([*names, "MODULE:FUNCTION"]) + "}",
        instance_from_str=lambda texts: texts[0],
        is_instance=lambda value: isinstance(value, str) or callable(value),
        str_from_instance=lambda value: [value if isinstance(value, str) else reference_to(value)],
    )


@JSON_FLAGS.primitive_rule
def _selection_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Reads a flag that is a switch or a list of words: without a value it is on."""
    kinds = get_args(info.type)
    if len(kinds) != 2 or kinds[0] is not bool or get_origin(kinds[1]) is not tuple:
        return None
    words = get_args(get_args(kinds[1])[0])

    def read(texts: list[str]) -> bool | tuple[str, ...]:
        if len(texts) <= 1 and "".join(texts).lower() in ("", "true", "false"):
            return "".join(texts).lower() != "false"
        for text in texts:
            if text not in words:
                raise ValueError(f"{text:.100} is none of {', '.join(words)}{nearest(text, words)}")
        return tuple(texts)

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar="[{True,False}|{" + ",".join(words) + "} ...]",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, (bool, tuple)),
        str_from_instance=lambda value: [str(value)] if isinstance(value, bool) else list(value),
    )


def read_mapping(text: str) -> dict[str, Any]:
    """Returns the mapping that a flag has as JSON.

    Raises:
        ValueError: it is no JSON object.
    """
    example = """e.g. '{"enable_thinking": false}'"""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{text:.100} is no JSON ({error}); write an object, {example}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{text:.100} is no JSON object; write one, {example}")
    return value
