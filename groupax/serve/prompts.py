"""Prompts of requests as token ids, with what is too much for the model refused early. Imports no jax."""

from typing import Any

import numpy as np
from jinja2 import TemplateError

from groupax.chat import render
from groupax.serve.errors import ApiError
from groupax.serve.requests import Request
from groupax.tokenizer import encode_texts

PROBE_CHARACTERS = 8  # per position of the model: what is encoded of a long text to see whether it is too long
TEMPLATE_ERRORS = (TemplateError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
SLACK_TOKENS = 64  # that fewer of a text's beginning may become when the rest follows


def encoded(request: Request, tokenizer: Any, max_positions: int) -> list[np.ndarray]:
    """Returns the token ids of each prompt of a request.

    Of a long text first a part is encoded, then twice as much: encoding megabytes takes seconds and hundreds of
    megabytes, and to know that there are too many tokens the beginning is enough.

    Args:
        request: its prompts are texts, token ids, or one list of messages.
        tokenizer: of the model, with the template for messages.
        max_positions: of the model.

    Raises:
        ApiError: a prompt cannot be encoded, or is longer than the model's context.
    """
    name = "messages" if request.is_chat else "prompt"
    try:
        rendered = [
            render(tokenizer, prompt, "the conversation") if request.is_chat else prompt for prompt in request.prompts
        ]
        texts = [each for each in rendered if isinstance(each, str)]
        for text in texts:
            _check_length(text, tokenizer, max_positions, name)
        ids = iter(encode_texts(tokenizer, texts, [request.is_chat] * len(texts)))
    except (*TEMPLATE_ERRORS, TypeError) as error:  # what templates raise for their messages
        raise ApiError(400, f"the prompt cannot be encoded: {error}", name) from error
    return [next(ids) if isinstance(each, str) else np.asarray(each, np.int32) for each in rendered]


def check_tokens(request: Request, vocab_size: int) -> None:
    """Refuse tokens that the model does not have.

    Raises:
        ApiError: the request names one.
    """
    named = {
        "prompt": [token for prompt in request.prompts if _is_ids(prompt) for token in prompt],
        "stop_token_ids": request.settings.get("stop_token_ids", ()),
        "logit_bias": request.settings.get("logit_bias", {}),
    }
    for field, tokens in named.items():
        largest = max(tokens, default=0)
        if largest >= vocab_size:
            raise ApiError(400, f"{field} names token {largest}; the vocabulary has {vocab_size} tokens", param=field)


def _check_length(text: str, tokenizer: Any, max_positions: int, name: str) -> None:
    num_characters = PROBE_CHARACTERS * max_positions
    while num_characters < len(text):
        [ids] = encode_texts(tokenizer, [text[:num_characters]], [True])
        if len(ids) > max_positions + SLACK_TOKENS:
            raise ApiError(
                400,
                f"the prompt has {len(text)} characters, of which the first {num_characters} are more tokens than "
                f"the model's {max_positions} positions; shorten it",
                param=name,
                code="context_length_exceeded",
            )
        num_characters *= 2


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)
