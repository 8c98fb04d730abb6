"""Prompts of chats: what the chat template writes, and the beginning of the turn that a request asks for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from groupax.data.chat import render, unknown_template_kwargs
from groupax.serve.errors import ApiError
from groupax.serve.requests import ChatRequest
from groupax.tools.formats import call_opening

DEVELOPER = "developer"  # newer name of the system's role, which few templates know


@dataclass(frozen=True)
class ChatPrompt:
    """The prompt of a chat.

    Attributes:
        text: The prompt.
        generation_prompt: Its end, which the turn continues; None is the template's own.
        begun: Beginning of the turn, if the prompt has it.
    """

    text: str
    generation_prompt: str | None = None
    begun: str = ""


def template_kwargs(request: ChatRequest, tokenizer: Any, hints: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a request for the chat template.

    Args:
        request: The chat.
        tokenizer: Tokenizer of the model.
        hints: Arguments that only count if the template reads them.

    Raises:
        ApiError: The template does not read one of them.
    """
    kwargs = request.template_kwargs
    if not tokenizer.chat_template:
        raise ApiError(400, "the model has no chat template; start the server with --chat_template", "messages")
    for name, fault in unknown_template_kwargs(tokenizer, kwargs).items():
        is_effort = name == "reasoning_effort" and name not in request.chat_template_kwargs
        raise ApiError(400, fault, "reasoning_effort" if is_effort else "chat_template_kwargs", "unsupported_value")
    unknown = unknown_template_kwargs(tokenizer, hints)
    return {**{name: value for name, value in hints.items() if name not in unknown}, **kwargs}


def chat_prompt(request: ChatRequest, tokenizer: Any, kwargs: Mapping[str, Any]) -> ChatPrompt:
    """Returns the prompt of a chat.

    Args:
        request: The chat.
        tokenizer: Tokenizer with a chat template.
        kwargs: Arguments for the template.

    Raises:
        ValueError: The template cannot write it.
    """
    messages, tools = request.messages, request.callable_tools
    if DEVELOPER not in str(tokenizer.chat_template):
        messages = [{**each, "role": "system"} if each["role"] == DEVELOPER else each for each in messages]
    text = render(tokenizer, messages, "the chat", request.add_generation_prompt, kwargs, tools, with_images=True)
    if request.continue_final_message:
        final = messages[-1]["content"].strip()
        return ChatPrompt(text[: text.rindex(final) + len(final)], final)
    if not request.add_generation_prompt:
        return ChatPrompt(text, "")
    if tools and request.tool_choice != "auto":
        name = None if request.tool_choice == "required" else request.tool_choice["name"]
        prompt, begun, opening = call_opening(tokenizer, kwargs, name)
        return ChatPrompt(_with_end(text, prompt, begun) + opening, begun, opening)
    return ChatPrompt(text)


def _with_end(text: str, old: str, new: str) -> str:
    """Returns a text with another end, as far as the two ends differ."""
    same = next((index for index, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), len(new))
    return text.removesuffix(old[same:]) + new[same:]
