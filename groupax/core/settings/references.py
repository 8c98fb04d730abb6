"""References to Python objects in settings: "module:attribute", with options "module:attribute(option=1)".

Imports no jax.
"""

import ast
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupax.core.settings.fields import nearest


@dataclass(frozen=True)
class Bound:
    """A function with some options set: `functools.partial`, but equal and hashable by value, as jit's static arguments
    must be."""

    function: Callable[..., Any]
    options: tuple[tuple[str, Any], ...]

    def __call__(self, *args: Any) -> Any:
        """Calls the function with these arguments and the options."""
        return self.function(*args, **dict(self.options))


def resolve(setting: str, value: Any, builtin: Mapping[str, Any], arguments: Sequence[str]) -> Any:
    """Returns what a setting names: a built-in, the object that a reference loads, or the given object itself.

    Raises a ValueError if there is no such object, if it does not have the options, or if it cannot be called with
    positional arguments of these names.
    """
    if isinstance(value, str) and value in builtin:
        return builtin[value]
    found = _load(setting, value, builtin) if isinstance(value, str) else value
    if not callable(found):
        raise ValueError(f"{setting} must be a function of ({', '.join(arguments)}), got {found!r}")
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError as error:
        raise ValueError(
            f"{setting} {reference_to(found)!r} is called with ({', '.join(arguments)}), but takes "
            f"{inspect.signature(found)}: {error}"
        ) from error
    return found


def _load(setting: str, reference: str, builtin: Mapping[str, Any]) -> Any:
    name, options, bare = parse_call(setting, reference)
    if ":" not in name:
        raise ValueError(
            f"{setting} must be one of {', '.join(builtin)}, or one of your own as 'module:function', got {reference!r}"
            f"{nearest(name, builtin)}"
        )
    if bare:
        raise ValueError(f"{setting} {reference!r}: {' and '.join(bare.values())} must be numbers or quoted texts")
    function = import_attribute(setting, name)
    return bind(setting, function, options) if options else function


def bind(setting: str, function: Any, options: Mapping[str, Any]) -> Any:
    """Returns the function with these options set; an object with a method `bind` does so itself."""
    if hasattr(function, "bind"):
        return function.bind(setting, options)
    known = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for option in options:
        if option not in known and not takes_any:
            raise ValueError(
                f"{setting} {reference_to(function)!r} has no option {option!r}; it takes "
                f"{inspect.signature(function)}{nearest(option, known)}"
            )
    return Bound(function, tuple((name, _hashable(value)) for name, value in options.items()))


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def reference_to(value: Any) -> str:
    """Returns the "module:name" of a function, with the options that are set on it; of another object its text."""
    if isinstance(value, Bound):
        value = functools.partial(value.function, **dict(value.options))
    if isinstance(value, functools.partial):
        options = [*map(repr, value.args), *(f"{name}={option!r}" for name, option in value.keywords.items())]
        return f"{reference_to(value.func)}({', '.join(options)})"
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}:{name}" if name else str(value)


def parse_call(what: str, reference: str) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Returns the name, the literal options and the bare words of "name(option=1, argument=word)"."""
    name, bracket, rest = reference.partition("(")
    if not bracket:
        return reference, {}, {}
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("options have names")
        options, words = {}, {}
        for keyword in call.keywords:
            if keyword.arg is None:
                raise ValueError("options have names")
            if isinstance(keyword.value, ast.Name):
                words[keyword.arg] = keyword.value.id
            else:
                options[keyword.arg] = ast.literal_eval(keyword.value)
    except (SyntaxError, ValueError) as error:
        example = "name(option=1, argument=column)" if what == "reward" else "module:function(option=1)"
        raise ValueError(f"{what} {reference!r} cannot be parsed ({error}); write it as {example}") from error
    return name.strip(), options, words


def import_attribute(what: str, name: str) -> Any:
    """Returns the object of a "module:attribute" reference; an error says what it is and what is similar."""
    module, _, attribute = name.partition(":")
    if module.endswith(".py") or "/" in module:
        dotted = module.removesuffix(".py").strip("./").replace("/", ".")
        raise ValueError(f"{what} {name!r} names a file; name the module, without .py: '{dotted}:{attribute}'")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        reason = str(error)
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):  # not one it imports
            near = nearest(error.name or "", [path.stem for path in Path().glob("*.py")])
            reason = f"there is no module {error.name!r} in the current folder ({Path.cwd()}), in PYTHONPATH or among "
            reason += f"the installed packages{near}"
        raise ValueError(f"{what} {name!r} cannot be imported: {reason}") from error
    if not hasattr(found, attribute):
        functions = [each for each, value in vars(found).items() if callable(value) and not each.startswith("_")]
        have = f"; it has {', '.join(functions[:8])}" if functions else ""
        raise ValueError(
            f"{what} {name!r}: module {module!r} has no {attribute!r}{have}{nearest(attribute, functions)}"
        )
    return getattr(found, attribute)
