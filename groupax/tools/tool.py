"""Python functions and methods as tools that a model calls. Imports no jax."""

import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from groupax.core.settings.fields import nearest
from groupax.core.terminal.printable import error_line, short_repr
from groupax.tools.calls import ToolCall

MARK = "__groupax_tool__"
EXAMPLE = '"""Adds two numbers.\\n\\nArgs:\\n    a: The first number."""'
RESERVED = ("reset", "get_reward", "score", "close", "act")  # an environment's own methods, never tools


@dataclass(frozen=True)
class Step:
    """A result with a reward, which a tool or an environment may return instead of a text. It is checked then.

    Attributes:
        observation: What the model reads; None for nothing.
        reward: Reward for this call, a finite number; None for none.
        done: Whether the episode ends, a bool.
    """

    observation: Any = None
    reward: Any = None
    done: Any = False


@dataclass(frozen=True)
class _Options:
    parallel: bool = False
    timeout_s: int | float | None = None


@dataclass(frozen=True, eq=False)
class Tool:
    """A function that a model can call.

    Attributes:
        name: Name by which the model calls it.
        function: The function, called with named arguments.
        schema: Description for the model in OpenAI's format, {"type": "function", "function": {...}}.
        is_async: Whether the function is a coroutine function.
        parallel: Whether it may run at the same time as other calls of its turn.
        timeout_s: Time limit of a call in seconds; None for the runner's.
        takes_owner: Whether the function takes its environment first, or what `open` has returned.
        open: Creates what the function takes first, from a seed, for each episode that calls the tool. Tools with the
            same `open` share it. Its method `close()` is called when the episode has ended.

    Raises:
        ValueError: The name is empty or not the schema's, or the time limit is not positive.
    """

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]
    is_async: bool = False
    parallel: bool = False
    timeout_s: int | float | None = None
    takes_owner: bool = False
    open: Callable[[int], Any] | None = None

    def __post_init__(self) -> None:
        function = self.schema.get("function")
        named = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(self.name, str) or not self.name or named != self.name:
            raise ValueError(f"the tool {self.name!r} needs a schema of the same name, got {short_repr(self.schema)}")
        _check_timeout(self.name, self.timeout_s)

    def bind(self, owner: Any) -> "Tool":
        """Returns the tool of one environment, or of what `open` has returned for an episode."""
        function = functools.partial(self.function, owner) if self.takes_owner else getattr(owner, self.name)
        return replace(self, function=function)


def tool(
    function: Callable[..., Any] | None = None, *, parallel: bool = False, timeout_s: int | float | None = None
) -> Any:
    """Marks a function or method as a tool, and returns it. It is used as `@tool` or `@tool(parallel=True)`.

    Args:
        function: Function with a Google-style docstring and type hints.
        parallel: Whether it may run at the same time as other calls of its turn.
        timeout_s: Time limit of a call in seconds; None for the run's.

    Raises:
        ValueError: The time limit is not positive.
    """
    if function is None:
        return functools.partial(tool, parallel=parallel, timeout_s=timeout_s)
    inner = function.__func__ if isinstance(function, classmethod | staticmethod) else function
    _check_timeout(getattr(inner, "__name__", repr(inner)), timeout_s)
    setattr(inner, MARK, _Options(parallel, timeout_s))
    return function


def tools_from(functions: Iterable[Any]) -> dict[str, Tool]:
    """Returns tools by name, in the order given.

    Raises:
        ValueError: One of them is not a function, lacks a part of its description, or has the name of another one.
    """
    tools: dict[str, Tool] = {}
    for function in functions:
        made = function if isinstance(function, Tool) else _from_function(function)
        if made.name in tools:
            raise ValueError(f"two tools are called {made.name!r}; rename one of them")
        tools[made.name] = made
    return tools


def tools_of(environment_class: type, public: bool = False, reserved: Sequence[str] = RESERVED) -> dict[str, Tool]:
    """Returns the tools of an environment's class, those of its base classes first. See `Tool.bind`.

    Raises:
        ValueError: A method lacks a part of its description, or one that is reserved is marked.
    """
    tools = {}
    lineage = [each for each in environment_class.__mro__ if each is not object]
    for name in dict.fromkeys(name for each in reversed(lineage) for name in vars(each)):
        method = inspect.getattr_static(environment_class, name)
        if not isinstance(method, classmethod | staticmethod) and not inspect.isfunction(method):
            continue
        marks = (getattr(_function(vars(each).get(name)), MARK, None) for each in lineage)
        options = next(filter(None, marks), None)
        if options is not None and name in reserved:
            raise ValueError(
                f"{environment_class.__name__}.{name} is called by the training loop and cannot be a tool; remove @tool"
            )
        if options is not None or (public and not name.startswith("_") and name not in reserved):
            is_bound = not isinstance(method, staticmethod)
            tools[name] = _made(_function(method), name, options or _Options(), is_bound)
    return tools


def match_call(tools: Mapping[str, Tool], call: ToolCall) -> tuple[Tool | None, ToolCall]:
    """Returns a call with its tool. A call of an unknown tool gets None, and a fault with the known names."""
    if call.name in tools or call.fault:
        return tools.get(call.name), call
    known = f"the tools are {', '.join(tools)}" if tools else "there are no tools"
    fault = f"Tool {call.name:.80} not found{nearest(call.name[:80], tools) or ';'} {known}."
    return None, replace(call, fault=fault)


def _from_function(function: Any) -> Tool:
    if not inspect.isroutine(function):
        raise ValueError(f"a tool must be a function or a method with a name, got {short_repr(function)}")
    return _made(function, function.__name__, getattr(function, MARK, _Options()), is_unbound_method=False)


def _made(function: Callable[..., Any], name: str, options: _Options, is_unbound_method: bool) -> Tool:
    schema = function_schema(function, name, skip_first=is_unbound_method)
    is_async = inspect.iscoroutinefunction(function)
    return Tool(name, function, schema, is_async, options.parallel, options.timeout_s)


def _function(method: Any) -> Any:
    return method.__func__ if isinstance(method, classmethod | staticmethod) else method


def _check_timeout(name: str, timeout_s: int | float | None) -> None:
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"the tool {name!r} has timeout_s={timeout_s}, but it must be positive, or None for the run's")


def function_schema(function: Callable[..., Any], name: str, skip_first: bool = False) -> dict[str, Any]:
    """Returns the schema of a function in OpenAI's format, as transformers' `get_json_schema` writes it.

    Raises:
        ValueError: The docstring, the description of an argument or a type hint is missing, or a hint has no schema.
    """
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    docstring = (inspect.getdoc(function) or "").strip()
    signature, hints = _parameters(function, name, skip_first)

    def described_function() -> None: ...

    described_function.__name__ = name
    described_function.__doc__ = docstring
    described_function.__annotations__ = hints
    described_function.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    try:
        return get_json_schema(described_function)
    except (DocstringParsingException, TypeHintParsingException, ValueError) as error:
        raise ValueError(
            f"the tool {name!r} has no JSON schema: {error_line(error)}; give each argument a type hint and a "
            f"description, as in {EXAMPLE}"
        ) from error


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
