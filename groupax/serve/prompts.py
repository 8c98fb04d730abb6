"""Prepares requests for the engine: the chat template, token ids, sampling parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from groupax.core.errors import MissingPackageError
from groupax.core.settings.sampling import SamplingParams
from groupax.core.types import PromptImages
from groupax.data.chat import render, unknown_template_kwargs
from groupax.data.tokenizer import encode_prompts, encode_within
from groupax.engine.constraints import ConstraintCompiler
from groupax.engine.engine import Engine
from groupax.models.vision.processing import PromptEncoder
from groupax.serve.chats import decoded_images
from groupax.serve.exchange import Exchange, TokenTexts
from groupax.serve.requests import (
    DEFAULT_MAX_TOKENS,
    ChatRequest,
    Incoming,
    Request,
)
from groupax.serve.turns import TurnFormats, TurnReader
from groupax.serve.web import ApiError, bad_request
from groupax.tools.formats import call_opening

DEVELOPER = "developer"  # newer name of the system's role, which few templates know


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model as its requests need it; `encoder` encodes prompts with images, None of a model that sees none."""

    name: str
    tokenizer: Any
    turn_formats: TurnFormats
    token_texts: TokenTexts
    constraints: ConstraintCompiler
    vocab_size: int
    max_positions: int
    encoder: PromptEncoder | None = None

    @classmethod
    def of(cls, name: str, engine: Engine) -> "ServedModel":
        """Returns an engine's model; raises ValueError if the engine has no tokenizer."""
        tokenizer, config = engine.tokenizer, engine.config
        if tokenizer is None:
            raise ValueError(f"the engine of {name} has no tokenizer; a server needs one for texts")
        return cls(
            name=name,
            tokenizer=tokenizer,
            turn_formats=TurnFormats(tokenizer),
            token_texts=TokenTexts(tokenizer),
            constraints=engine.constraints,
            vocab_size=config.vocab_size,
            max_positions=config.max_positions,
            encoder=engine.image_encoder,
        )

    def check_text(self, ids: np.ndarray, field: str) -> None:
        """Refuses a text that has a token which stands for an image."""
        if self.encoder is not None:
            with bad_request(field, "the prompt cannot be read: "):
                self.encoder.check_text(np.asarray(ids))


@dataclass(frozen=True, eq=False)
class Prepared:
    """A request that the engine can run; `images` are those of its prompt, None for text."""

    prompts: list[np.ndarray]
    params: SamplingParams
    row_keys: np.ndarray | None
    exchange: Exchange
    images: PromptImages | None = None


@dataclass(frozen=True)
class ChatPrompt:
    """The prompt of a chat."""

    text: str
    generation_prompt: str | None = None  # its end, which the turn continues; None is the template's own
    begun: str = ""  # beginning of the turn, if the prompt has it


def prepare(incoming: Incoming, model: ServedModel, max_completions: int, chat_max_tokens: int) -> Prepared:
    """Checks and encodes a request, which takes a while for long prompts. Safe in any thread."""
    request = incoming.request
    num_prompts, n = len(request.prompts), request.n
    if num_prompts * max(n, 1) > max_completions:
        message = f"the request has {num_prompts} prompts and n={n}; a request may have {max_completions} completions"
        raise ApiError(400, message, param="n")
    if request.row_keys is not None and len(request.row_keys) != num_prompts * n:
        message = f"row_keys must have {num_prompts * n} pairs, one for each completion, got {len(request.row_keys)}"
        raise ApiError(400, message, "row_keys")
    named = {
        "prompt": [token for prompt in request.prompts if _is_ids(prompt) for token in prompt],
        "stop_token_ids": request.stop_token_ids,
        "logit_bias": request.logit_bias,
    }
    for field, tokens in named.items():
        if (largest := max(tokens, default=0)) >= model.vocab_size:
            message = f"{field} names token {largest}; the vocabulary has {model.vocab_size} tokens"
            raise ApiError(400, message, param=field)
    reader = images = None
    if isinstance(request, ChatRequest):
        prompts, images, reader = encoded_chat(request, model, incoming.hints)
    else:
        prompts = encoded(request, model.tokenizer, model.max_positions)
        for ids in prompts:
            model.check_text(ids, "prompt")
    params = _sampling_params(request, prompts, model.max_positions, chat_max_tokens)
    if isinstance(request, ChatRequest) and request.callable_tools and params.constraint is not None:
        message = "a response is constrained by tools or by a format, not by both; set tool_choice='none' for a format"
        raise ApiError(400, message, "response_format")
    prompt_ids = [prompt.tolist() for prompt in prompts]
    exchange = Exchange(request, incoming.wire, model.name, prompt_ids, model.token_texts, reader)
    row_keys = None if request.row_keys is None else np.array(request.row_keys, np.uint32)
    return Prepared(prompts, params, row_keys, exchange, images)


def check_constraint(model: ServedModel, params: SamplingParams) -> None:
    """Compiles a request's constraint, or raises an `ApiError` if that is not possible."""
    if params.constraint is not None:
        try:
            model.constraints.matcher(*params.constraint)
        except ValueError as error:
            raise ApiError(501 if isinstance(error, MissingPackageError) else 400, str(error)) from error


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)


def _sampling_params(
    request: Request, prompts: list[np.ndarray], max_positions: int, chat_max_tokens: int
) -> SamplingParams:
    field = "messages" if request.is_chat else "prompt"
    longest = max(map(len, prompts))
    default = max(1, min(chat_max_tokens, max_positions - longest)) if request.is_chat else DEFAULT_MAX_TOKENS
    params = request.sampling_params(default)
    if longest + params.max_tokens > max_positions:
        at_least = "at least " if longest > max_positions else ""  # of such a prompt only an end was encoded
        message = (
            f"a prompt of {at_least}{longest} tokens with max_tokens {params.max_tokens} exceeds the model's "
            f"{max_positions} positions; shorten the prompt or lower max_tokens"
        )
        raise ApiError(400, message, param=field, code="context_length_exceeded")
    if not all(map(len, prompts)):
        raise ApiError(400, "a prompt has no tokens; the model needs at least one to continue from", param=field)
    return params


def encoded(request: Request, tokenizer: Any, max_positions: int) -> list[np.ndarray]:
    """Returns the token ids of each prompt of a request for completions.

    Encoding megabytes takes seconds and hundreds of megabytes: of a text that is too long for the model only an end is
    encoded, which is too long as well.
    """
    texts = [prompt for prompt in request.prompts if not _is_ids(prompt)]
    with bad_request("prompt", "the prompt cannot be encoded: "):
        ids = iter(encode_prompts(tokenizer, texts, max_tokens=max_positions))
    return [np.asarray(prompt, np.int32) if _is_ids(prompt) else next(ids) for prompt in request.prompts]


def encoded_chat(
    request: ChatRequest, model: ServedModel, hints: Mapping[str, Any]
) -> tuple[list[np.ndarray], PromptImages | None, TurnReader]:
    """Returns the token ids of a chat as a list of one prompt, its images, and what reads the turns that answer it."""
    urls = request.image_urls
    if urls and model.encoder is None:
        message = f"the chat has images, and {model.name} reads text only; send the text alone, or to a model that sees"
        raise ApiError(400, message, "messages", "unsupported_value")
    kwargs, tools = template_kwargs(request, model.tokenizer, hints), request.callable_tools
    turn_format = model.turn_formats.of(kwargs, bool(tools))
    if tools and turn_format.calls is None:
        raise ApiError(400, f"{model.name} has no tools: {turn_format.fault}", "tools", "unsupported_value")
    images = None
    with bad_request("messages", "the prompt cannot be encoded: "):
        prompt = chat_prompt(request, model.tokenizer, kwargs)
        if (request.regex is not None or request.json_schema is not None) and prompt.text.rstrip().endswith(
            ("<think>", "[THINK]")
        ):
            raise ValueError(
                "the response is constrained from its first token, and the chat template opens reasoning; turn that "
                "off, e.g. with chat_template_kwargs={'enable_thinking': false}"
            )
        if urls:
            assert model.encoder is not None, "the model sees images"
            own, images = model.encoder.encode(prompt.text, decoded_images(urls), is_rendered=True)
            ids = [own]
        else:
            ids = encode_within(model.tokenizer, [prompt.text], [True], model.max_positions)
            model.check_text(ids[0], "messages")
    reader = TurnReader(
        format=turn_format,
        tools=tools,
        parallel=request.parallel_tool_calls,
        prompt=prompt.generation_prompt,
        begun=prompt.begun,
        stop=tuple(request.stop),
        min_tokens=request.min_tokens,
    )
    return ids, images, reader


def template_kwargs(request: ChatRequest, tokenizer: Any, hints: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a request for the chat template, with those hints that the template reads."""
    kwargs = request.template_kwargs
    if not tokenizer.chat_template:
        raise ApiError(400, "the model has no chat template; start the server with --chat_template", "messages")
    for name, fault in unknown_template_kwargs(tokenizer, kwargs).items():
        is_effort = name == "reasoning_effort" and name not in request.chat_template_kwargs
        raise ApiError(400, fault, "reasoning_effort" if is_effort else "chat_template_kwargs", "unsupported_value")
    unknown = unknown_template_kwargs(tokenizer, hints)
    return {**{name: value for name, value in hints.items() if name not in unknown}, **kwargs}


def chat_prompt(request: ChatRequest, tokenizer: Any, kwargs: Mapping[str, Any]) -> ChatPrompt:
    """Returns what the chat template writes, and the beginning of the turn that a request asks for.

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
        own, begun, opening = call_opening(tokenizer, kwargs, name)
        pairs = enumerate(zip(own, begun, strict=False))
        same = next((index for index, (old, new) in pairs if old != new), len(begun))
        return ChatPrompt(text.removesuffix(own[same:]) + begun[same:] + opening, begun, opening)
    return ChatPrompt(text)
