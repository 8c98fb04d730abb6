"""Tools and environments that settings name as "module:attribute". Imports no jax."""

from collections.abc import Mapping, Sequence
from typing import Any

from groupax.settings.fields import nearest
from groupax.settings.references import import_attribute, parse_call

# Functions that make environments or tools, whose names need no module.
ENVIRONMENTS = {
    "openenv": "groupax.environments.openenv:openenv",
    "verifiers": "groupax.environments.verifiers_v0:verifiers",
    "program": "groupax.environments.program:program",
}
TOOLS = {
    "python_tool": "groupax.environments.python_tool:python_tool",
    "mcp": "groupax.environments.mcp_tools:mcp",
}


def load_tools(references: Sequence[str]) -> list[Any]:
    """Returns the tools with these references.

    Args:
        references: "module:function" for a function, or "module:maker(option=1)" for the tool or the list of tools that
            a function returns.

    Raises:
        ValueError: One cannot be found, or the options do not fit.
    """
    found = [_load("tool", reference, TOOLS) for reference in references]
    return [each for made in found for each in (made if isinstance(made, list | tuple) else [made])]


def load_environments(references: Sequence[str]) -> Any:
    """Returns the environments with these references, as `GRPOTrainer` takes them; None without any.

    Args:
        references: "module:Class", "module:maker(option=1)" or "openenv(url='ws://...')"; of several, each with the
            name that the dataset's column `environment` has for it: "name=module:Class".

    Raises:
        ValueError: One cannot be found, the options do not fit, or several have no names.
    """
    if not references:
        return None
    named = [_named(reference) for reference in references]
    if len(named) == 1 and not named[0][0]:
        return _load("environment", named[0][1], ENVIRONMENTS)
    names = [name for name, _ in named]
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(
            f"several environments need different names, as in name=module:Class, got {', '.join(references)}; the "
            "dataset's column environment names one of them"
        )
    return {name: _load("environment", reference, ENVIRONMENTS) for name, reference in named}


def _named(reference: str) -> tuple[str, str]:
    """Returns the name before the reference, if there is one, and the reference."""
    name, equals, rest = reference.partition("=")
    return (name, rest) if equals and name.isidentifier() else ("", reference)


def _load(what: str, reference: str, known: Mapping[str, str]) -> Any:
    name, options, words = parse_call(what, reference)
    if ":" not in name and name not in known:
        own = f" or one of {', '.join(known)}" if known else ""
        raise ValueError(f"{what} {reference!r} must be written as 'module:name'{own}{nearest(name, known)}")
    if words:
        raise ValueError(f"{what} {reference!r}: {' and '.join(words.values())} must be numbers or quoted texts")
    found = import_attribute(what, known.get(name, name))
    if "(" not in reference:
        return found
    try:
        return found(**options)
    except TypeError as error:
        raise ValueError(f"{what} {reference!r} cannot be called: {error}") from error
