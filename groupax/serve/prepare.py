"""Checks requests against a model and encodes their prompts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from groupax.constraints import ConstraintCompiler
from groupax.data.prompts import ImageEncoder
from groupax.data.tokenizer import decode, encode_prompts, encode_within
from groupax.errors import MissingPackageError
from groupax.serve.call_constraint import turn_grammar
from groupax.serve.chat_prompt import chat_prompt, template_kwargs
from groupax.serve.errors import ApiError
from groupax.serve.exchange import Exchange, TokenTexts
from groupax.serve.images import decoded_images
from groupax.serve.protocols.incoming import Incoming
from groupax.serve.requests import DEFAULT_MAX_TOKENS, ChatRequest, CompletionRequest, Request
from groupax.serve.turn_format import TurnFormats
from groupax.serve.turns import TurnReader
from groupax.settings.sampling import SamplingParams
from groupax.tools.formats import call_frame
from groupax.types import PromptImages


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
    encoder: ImageEncoder | None = None


@dataclass(frozen=True, eq=False)
class Prepared:
    """A request that the engine can run; `images` are those of its prompt, None for text."""

    prompts: list[np.ndarray]
    params: SamplingParams
    row_keys: np.ndarray | None
    exchange: Exchange
    images: PromptImages | None = None


def prepare(incoming: Incoming, model: ServedModel, max_completions: int, chat_max_tokens: int) -> Prepared:
    """Checks and encodes a request, which takes a while for long prompts. Safe in any thread.

    Args:
        incoming: The request.
        model: The model that it names.
        max_completions: Most prompts times `n`.
        chat_max_tokens: Longest completion of a chat that sets no limit.

    Raises:
        ApiError: the request has too many completions, is too long, or cannot be encoded.
    """
    request = incoming.request
    num_prompts, n = len(request.prompts), request.n
    if num_prompts * max(n, 1) > max_completions:
        message = f"the request has {num_prompts} prompts and n={n}; a request may have {max_completions} completions"
        raise ApiError(400, message, param="n")
    check_tokens(request, model.vocab_size)
    reader = images = None
    if isinstance(request, ChatRequest):
        prompts, images, reader = encoded_chat(request, model, incoming.hints)
    else:
        prompts = encoded(request, model.tokenizer, model.max_positions)
        for ids in prompts:
            _check_text(model, ids, "prompt")
    if images is not None and request.num_prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs of a prompt with images are not supported", "prompt_logprobs")
    params = _sampling_params(request, prompts, model.max_positions, chat_max_tokens)
    if isinstance(request, ChatRequest) and reader is not None:
        params = _with_calls(request, params, model, reader)
    prompt_texts = []
    if isinstance(request, CompletionRequest) and request.echo:
        prompt_texts = [
            text if isinstance(text, str) else decode(model.tokenizer, [ids.tolist()])[0]
            for text, ids in zip(request.prompts, prompts, strict=True)
        ]
    prompt_ids = [prompt.tolist() for prompt in prompts]
    exchange = Exchange(request, incoming.wire, model.name, prompt_ids, prompt_texts, model.token_texts, reader)
    row_keys = None if request.row_keys is None else np.array(request.row_keys, np.uint32)
    return Prepared(prompts, params, row_keys, exchange, images)


def _with_calls(request: ChatRequest, params: SamplingParams, model: ServedModel, reader: TurnReader) -> SamplingParams:
    """Returns sampling parameters whose constraint allows the calls of a chat's tools."""
    if not request.callable_tools:
        return params
    try:
        frame = call_frame(model.tokenizer, request.template_kwargs)
        grammar = turn_grammar(request, params, frame, reader.begun)
    except ValueError as error:
        raise ApiError(400, str(error), "tools") from error
    return params if grammar is None else replace(params, grammar=grammar, regex=None, json_schema=None)


def check_constraint(model: ServedModel, params: SamplingParams) -> None:
    """Compiles a request's constraint.

    Raises:
        ApiError: That is not possible.
    """
    if params.constraint is not None:
        try:
            model.constraints.matcher(*params.constraint)
        except ValueError as error:
            raise ApiError(501 if isinstance(error, MissingPackageError) else 400, str(error)) from error


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
    """Returns the token ids of each prompt of a request.

    Encoding megabytes takes seconds and hundreds of megabytes: of a text that is too long for the model only an end is
    encoded, which is too long as well.

    Raises:
        ApiError: a prompt cannot be encoded.
    """
    name = "messages" if request.is_chat else "prompt"
    texts = [prompt for prompt in request.prompts if not _is_ids(prompt)]
    try:
        ids = iter(encode_prompts(tokenizer, texts, max_tokens=max_positions, name=name))
    except ValueError as error:
        raise ApiError(400, f"the prompt cannot be encoded: {error}", name) from error
    return [np.asarray(prompt, np.int32) if _is_ids(prompt) else next(ids) for prompt in request.prompts]


def encoded_chat(
    request: ChatRequest, model: ServedModel, hints: Mapping[str, Any]
) -> tuple[list[np.ndarray], PromptImages | None, TurnReader]:
    """Returns the token ids of a chat as a list of one prompt, its images, and what reads the turns that answer it.

    Args:
        request: The chat.
        model: The model that it names.
        hints: Arguments for the chat template that only count if it reads them.

    Raises:
        ApiError: the chat template cannot write it, or the model has no tools, or it has images that the model cannot
            see.
    """
    if request.image_urls and model.encoder is None:
        message = f"the chat has images, and {model.name} reads text only; send the text alone, or to a model that sees"
        raise ApiError(400, message, "messages", "unsupported_value")
    kwargs, tools = template_kwargs(request, model.tokenizer, hints), request.callable_tools
    turn_format = model.turn_formats.of(kwargs, bool(tools))
    if tools and turn_format.calls is None:
        raise ApiError(400, f"{model.name} has no tools: {turn_format.fault}", "tools", "unsupported_value")
    try:
        prompt = chat_prompt(request, model.tokenizer, kwargs)
        if (request.regex or request.json_schema) and prompt.text.rstrip().endswith(("<think>", "[THINK]")):
            raise ValueError(
                "the response is constrained from its first token, and the chat template opens reasoning; turn that "
                "off, e.g. with chat_template_kwargs={'enable_thinking': false}"
            )
        ids, images = _encoded_prompt(request, model, prompt.text)
    except ValueError as error:
        raise ApiError(400, f"the prompt cannot be encoded: {error}", "messages") from error
    reader = TurnReader(
        turn_format,
        tools,
        request.parallel_tool_calls,
        prompt.generation_prompt,
        prompt.begun,
        tuple(request.stop),
        request.min_tokens,
    )
    return ids, images, reader


def _encoded_prompt(
    request: ChatRequest, model: ServedModel, text: str
) -> tuple[list[np.ndarray], PromptImages | None]:
    """Returns the token ids of a chat's prompt, and its images."""
    urls = request.image_urls
    if not urls:
        ids = encode_within(model.tokenizer, [text], [True], model.max_positions)
        _check_text(model, ids[0], "messages")
        return ids, None
    assert model.encoder is not None, "the model sees images"
    own, images = model.encoder.encode(text, decoded_images(urls), is_rendered=True)
    return [own], images


def _check_text(model: ServedModel, ids: np.ndarray, field: str) -> None:
    """Checks that no token of a text stands for an image.

    Raises:
        ApiError: One does.
    """
    if model.encoder is not None:
        try:
            model.encoder.check_text(np.asarray(ids))
        except ValueError as error:
            raise ApiError(400, f"the prompt cannot be read: {error}", field) from error


def check_tokens(request: Request, vocab_size: int) -> None:
    """Checks that the vocabulary has all tokens that a request names.

    Raises:
        ApiError: it lacks one.
    """
    named = {
        "prompt": [token for prompt in request.prompts if _is_ids(prompt) for token in prompt],
        "stop_token_ids": request.stop_token_ids,
        "logit_bias": request.logit_bias,
    }
    for field, tokens in named.items():
        largest = max(tokens, default=0)
        if largest >= vocab_size:
            raise ApiError(400, f"{field} names token {largest}; the vocabulary has {vocab_size} tokens", param=field)


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)
