"""Prompts of requests as token ids. Imports no jax."""

from typing import Any

import numpy as np

from groupax.data.tokenizer import encode_prompts
from groupax.serve.errors import ApiError
from groupax.serve.requests import Request


def encoded(request: Request, tokenizer: Any, max_positions: int) -> list[np.ndarray]:
    """Returns the token ids of each prompt of a request.

    Encoding megabytes takes seconds and hundreds of megabytes: of a text that is too long for the model only an end is
    encoded that is too long as well.

    Args:
        request: its prompts are texts, token ids, or one list of messages.
        tokenizer: of the model, with the template for messages.
        max_positions: of the model.

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


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)
