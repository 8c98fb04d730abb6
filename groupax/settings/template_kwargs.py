"""Checks of the arguments that users pass to a chat template, before there is a template. Imports no jax."""

import json
from collections.abc import Mapping
from typing import Any

# Names that groupax passes to a template itself, and parameters of `apply_chat_template` that no template reads.
RESERVED = (
    "messages",
    "conversation",
    "conversations",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "documents",
    "tokenize",
    "tokenizer_kwargs",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "sanitize_control_tokens",
)


def check_template_kwargs(kwargs: Any, name: str) -> None:
    """Checks that arguments for a chat template are named JSON values that a user may set.

    Args:
        kwargs: Arguments by name.
        name: Name of the arguments in an error.

    Raises:
        ValueError: They are not a mapping of names, one of the names is reserved, or a value is not valid JSON.
    """
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise ValueError(
            f"{name} must be a mapping of names to values, e.g. {{'enable_thinking': False}}, got {kwargs!r}"
        )
    for key in kwargs:
        if key in RESERVED:
            raise ValueError(f"{name} has {key!r}, which groupax sets itself or does not support; leave it out")
    check_json(kwargs, name)


def check_json(value: Any, where: str) -> None:
    """Checks that a value can be written as JSON in UTF-8.

    Raises:
        ValueError: It cannot.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} has half of a surrogate pair, which is no character; remove it") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{where} has a value that JSON cannot represent ({error}); make it a text or a number"
        ) from error
