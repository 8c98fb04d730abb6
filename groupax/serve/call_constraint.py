"""Constraints of turns that may call tools: arguments that are valid for strict tools, and calls or a document."""

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

from groupax.constraints.json_schema import regex_of_schema
from groupax.serve.requests import ChatRequest
from groupax.settings.sampling import SamplingParams
from groupax.tools.formats.choose import CallFrame

ANY_ARGUMENTS = {"type": "object"}


def is_strict(tool: Mapping[str, Any]) -> bool:
    """Returns whether the arguments of a tool must be valid for its schema."""
    return tool["function"].get("strict") is True


def turn_regex(request: ChatRequest, params: SamplingParams, frame: CallFrame | None, begun: str) -> str | None:
    """Returns the expression of a turn that may call tools; None if it needs none but its own.

    Args:
        request: The chat.
        params: Its sampling parameters, with the constraint of its response.
        frame: What the model writes around a call's name and arguments; None if these are not JSON.
        begun: Beginning of the call that the prompt has.

    Raises:
        ValueError: The response is constrained and calls are not JSON, or a schema cannot be translated.
    """
    tools = request.callable_tools
    is_constrained = params.constraint is not None
    if not tools or not (is_constrained or begun or any(map(is_strict, tools))):
        return None
    if frame is None:
        if is_constrained:
            raise ValueError(
                "tools together with a constraint need a model whose calls have names and arguments in JSON"
            )
        return None
    names = request.tool_choice
    chosen = [tool for tool in tools if isinstance(names, str) or tool["function"]["name"] == names["name"]]
    call = "|".join(_call(frame, tool) for tool in chosen)
    calls = f"(?:{call})(?:\\n?(?:{call}))*" if request.parallel_tool_calls else f"(?:{call})"
    if request.tool_choice != "auto":
        rests = "|".join(_rest(frame, tool, begun) for tool in chosen)
        more = f"(?:\\n?(?:{call}))*" if request.parallel_tool_calls else ""
        return f"(?:{rests}){more}"
    if params.constraint is None:
        return f"{_without(frame.before.split('{')[0].rstrip())}(?:{calls})?"
    kind, text = params.constraint
    return f"(?:{regex_of_schema(text) if kind == 'json_schema' else text})|{calls}"


def _call(frame: CallFrame, tool: Mapping[str, Any]) -> str:
    return (
        re.escape(frame.before + tool["function"]["name"] + frame.between) + _arguments(tool) + re.escape(frame.after)
    )


def _rest(frame: CallFrame, tool: Mapping[str, Any], begun: str) -> str:
    """Returns the expression of a call without its beginning."""
    start = frame.before + tool["function"]["name"] + frame.between
    assert start.startswith(begun), "the prompt begins the call as the template writes it"
    return re.escape(start[len(begun) :]) + _arguments(tool, follows=True) + re.escape(frame.after)


def _arguments(tool: Mapping[str, Any], follows: bool = False) -> str:
    """Returns the expression of a call's arguments: of strict tools by their schemas, else any object.

    Args:
        tool: The tool.
        follows: Whether arguments of others follow their schemas too, where these can be translated.
    """
    if is_strict(tool):
        return regex_of_schema(json.dumps(tool["function"]["parameters"]))
    if follows:
        with contextlib.suppress(ValueError):
            return regex_of_schema(json.dumps({**ANY_ARGUMENTS, **(tool["function"].get("parameters") or {})}))
    return regex_of_schema(json.dumps(ANY_ARGUMENTS))


def _without(mark: str) -> str:
    """Returns the expression of texts in which a mark does not occur.

    Args:
        mark: A text whose first character occurs once in it.
    """
    begun = [mark[:size] for size in range(1, len(mark))]
    partly = f"(?:{'|'.join(map(re.escape, begun))})*"
    first = re.escape(mark[0])
    broken = "|".join(f"{re.escape(text)}[^{first}{re.escape(mark[len(text)])}]" for text in begun)
    return f"(?:[^{first}]|{partly}(?:{broken}))*{partly}"
