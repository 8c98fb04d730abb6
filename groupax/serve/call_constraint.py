"""Grammars of turns that may call tools: arguments that are valid for strict tools, and calls or a document."""

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

from groupax.constraints import HEADER, rule, supported
from groupax.serve.requests import ChatRequest
from groupax.settings.sampling import SamplingParams
from groupax.tools.formats import CallFrame

ANY_ARGUMENTS, NO_ARGUMENTS = {"type": "object"}, {"type": "object", "additionalProperties": False}
_NAMES_NONE = {"type", "properties", "additionalProperties", "required", "title", "description", "$schema"}
_MAX_TRIED = 8192  # characters of a schema that is tried


def is_strict(tool: Mapping[str, Any]) -> bool:
    """Returns whether the arguments of a tool must be valid for its schema."""
    return tool["function"].get("strict") is True


def turn_grammar(request: ChatRequest, params: SamplingParams, frame: CallFrame | None, begun: str) -> str | None:
    """Returns the grammar of a turn that may call tools; None if it needs none but its own constraint.

    Args:
        request: The chat.
        params: Its sampling parameters, with the constraint of its response.
        frame: What the model writes around a call's name and arguments; None if these are not JSON.
        begun: Beginning of the call that the prompt has.

    Raises:
        ValueError: The response is constrained and calls are not JSON, or a schema is not supported.
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
    names, must_call = request.tool_choice, request.tool_choice != "auto"
    chosen = [tool for tool in tools if isinstance(names, str) or tool["function"]["name"] == names["name"]]
    starts = [frame.before + tool["function"]["name"] + frame.between for tool in chosen]
    mark = frame.before.split("{")[0].rstrip()
    rules = [f"arguments{index}: {_arguments(tool, must_call)}" for index, tool in enumerate(chosen)]

    def calls(before: str) -> str:
        """Returns the alternatives of a call without what is written of it."""
        assert all(start.startswith(before) for start in starts), "calls begin as the template writes them"
        ends = [(start[len(before) :], f"arguments{index}") for index, start in enumerate(starts)]
        return " | ".join(f"{_text(start)} {name} {_text(frame.after)}" for start, name in ends)

    more = ' ("\\n"? call)*' if request.parallel_tool_calls else ""
    rules += [f"call: {calls('')}"]
    if must_call:
        rules += [f"start: begun{more}", f"begun: {calls(begun)}"]
    elif params.constraint is not None:
        rules += [f"start: response | call{more}", f"response: {rule(*params.constraint)}"]
    else:
        marked = re.escape(mark).replace("/", r"\/")
        rules += [
            f"start: TEXT | before marked{more}",
            f"TEXT: /(?s:.*)/ & ~/(?s:.*){marked}(?s:.*)/",
            f"before[lazy]: /(?s:.*){marked}/",
            f"marked: {calls(mark)}",
        ]
    return HEADER + "\n".join(rules)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _arguments(tool: Mapping[str, Any], must_call: bool) -> str:
    """Returns the rule of a call's arguments: of strict tools by their schemas, else any object.

    Tools without parameters take none.

    Args:
        tool: The tool.
        must_call: Whether arguments of others follow their schemas too, where these are supported.
    """
    parameters = {**ANY_ARGUMENTS, **(tool["function"].get("parameters") or {})}
    names_some = any(parameters.get(keyword) for keyword in ("properties", "required", "additionalProperties"))
    if parameters["type"] == "object" and parameters.keys() <= _NAMES_NONE and not names_some:
        return rule("json_schema", json.dumps(NO_ARGUMENTS))
    text = json.dumps(parameters)
    if is_strict(tool):
        return rule("json_schema", text)
    if must_call and len(text) <= _MAX_TRIED:
        with contextlib.suppress(ValueError):
            return supported(rule("json_schema", text))
    return rule("json_schema", json.dumps(ANY_ARGUMENTS))
