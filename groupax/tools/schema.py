"""JSON schemas of functions, from their Google-style docstrings and type hints. Imports no jax."""

import inspect
import typing
from collections.abc import Callable
from typing import Any

from groupax.terminal.printable import error_line

EXAMPLE = '"""Adds two numbers.\\n\\nArgs:\\n    a: The first number."""'


def function_schema(function: Callable[..., Any], name: str, skip_first: bool = False) -> dict[str, Any]:
    """Returns the schema of a function in OpenAI's format, as transformers' `get_json_schema` writes it.

    Args:
        function: A function or method.
        name: Name of the tool.
        skip_first: Whether to leave out the first parameter, `self` or `cls`.

    Raises:
        ValueError: The docstring, the description of an argument or a type hint is missing, or a hint has no schema.
    """
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
        parse_google_format_docstring,
    )

    docstring = (inspect.getdoc(function) or "").strip()
    if not docstring:
        raise ValueError(
            f"the tool {name!r} has no docstring, from which the model learns what it does; e.g. {EXAMPLE}"
        )
    signature, hints = _parameters(function, name, skip_first)
    described = parse_google_format_docstring(docstring)[1] or {}
    for parameter in signature.parameters:
        if parameter not in hints:
            raise ValueError(f"the tool {name!r} has no type hint of its argument {parameter!r}; add one, e.g. : str")
        if parameter not in described:
            raise ValueError(
                f"the tool {name!r} has no description of its argument {parameter!r}; add it to the section 'Args:' of "
                f"the docstring, as in {EXAMPLE}"
            )

    def described_function() -> None: ...

    described_function.__name__ = name
    described_function.__doc__ = docstring
    described_function.__annotations__ = hints
    described_function.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    try:
        return get_json_schema(described_function)
    except (DocstringParsingException, TypeHintParsingException, ValueError) as error:
        raise ValueError(f"the tool {name!r} has no JSON schema: {error_line(error)}") from error


def _parameters(function: Callable[..., Any], name: str, skip_first: bool) -> tuple[inspect.Signature, dict[str, Any]]:
    """Returns the signature of a function without `self`, and its hints by parameter, "return" included."""
    try:
        signature = inspect.signature(function)
        hints = typing.get_type_hints(inspect.unwrap(function))
    except (ValueError, TypeError, NameError) as error:
        raise ValueError(f"the type hints of the tool {name!r} cannot be read: {error_line(error)}") from error
    parameters = list(signature.parameters.values())[1 if skip_first else 0 :]
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(
                f"the tool {name!r} has the parameter {str(parameter)!r}; a model passes arguments by name, so list "
                "them one by one, without *, ** and /"
            )
    names = [parameter.name for parameter in parameters]
    typed = [
        parameter.replace(annotation=hints.get(parameter.name, parameter.empty), kind=parameter.KEYWORD_ONLY)
        for parameter in parameters
    ]
    return inspect.Signature(typed), {key: hints[key] for key in (*names, "return") if key in hints}
