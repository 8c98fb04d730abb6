"""Calls as the tokenizer's own `response_template` describes them, which transformers 5.13 and later read.

The template's regular expressions come with a model, so they run in the process of chat templates, with its time and
memory limits. Imports no jax.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from groupax.data.chat import TEMPLATES, TemplateError
from groupax.tools.calls import ParsedTurn, ToolCall
from groupax.tools.formats.reading import CUT_OFF, call_of

REASONING = ("reasoning_content", "reasoning", "thinking")


def read(template: Mapping[str, Any], text: str, prompt: str) -> ParsedTurn:
    """Reads a turn by a response template. A turn that it cannot read is one call with a fault.

    Args:
        template: The tokenizer's response template.
        text: Text of the turn.
        prompt: Generation prompt that the turn continues.
    """
    request = {"action": "parse_response", "response_template": template, "prefix": prompt, "text": text}
    try:
        [(message, num_closed)] = TEMPLATES.ask(request, 1)
    except TemplateError as error:
        return ParsedTurn("", "", (ToolCall("", {}, f"the turn cannot be read: {str(error)[:300]}", text),))
    calls = [_call(each) for each in message.get("tool_calls") or []]
    calls[num_closed:] = [replace(call, fault=call.fault or CUT_OFF) for call in calls[num_closed:]]
    thoughts = [message[key] for key in REASONING if isinstance(message.get(key), str)]
    content = message.get("content")
    return ParsedTurn(content.strip() if isinstance(content, str) else "", "\n".join(thoughts).strip(), tuple(calls))


def _call(value: Any) -> ToolCall:
    call = call_of(value.get("function", value) if isinstance(value, dict) else value)
    return replace(call, text=str(value)[:1000])
