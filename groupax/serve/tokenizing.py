"""Tokens of texts and chats, and texts of tokens, in vLLM's format: /tokenize, /detokenize, /tokenizer_info."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from groupax.data.tokenizer import encode_texts
from groupax.serve.chat_fields import Text
from groupax.serve.errors import ApiError
from groupax.serve.prepare import ServedModel, encoded_chat
from groupax.serve.requests import ChatRequest, TokenId, check_known, parse_json, request_of, validated

MAX_CHARACTERS = 1 << 19  # of a text: two seconds and 100 MB on a slow core
MAX_TOKENS = 1 << 18
CHAT_FIELDS = {
    *("messages", "tools", "tool_choice", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    *("reasoning_effort", "model"),
}
TEXT_FIELDS = {"model", "prompt", "add_special_tokens"}
INFO = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template", "model_max_length")


class TextToEncode(BaseModel):
    """The body of a POST to /tokenize with a text."""

    model_config = ConfigDict(strict=True)

    prompt: Annotated[Text, Field(max_length=MAX_CHARACTERS)]
    add_special_tokens: bool = True


class TokensToDecode(BaseModel):
    """The body of a POST to /detokenize."""

    model_config = ConfigDict(strict=True)

    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True)]


def parse(body: bytes) -> tuple[str | None, dict[str, Any]]:
    """Returns the name of the model and the fields in a body.

    Raises:
        ApiError: the body is not a JSON object.
    """
    given = {name: value for name, value in parse_json(body).items() if value is not None}
    name = given.get("model")
    if not isinstance(name, str | None):
        raise ApiError(400, f"model must be a valid string, got {name!r:.80}", "model")
    return name, given


def tokenize(given: Mapping[str, Any], model: ServedModel) -> dict[str, Any]:
    """Returns the tokens of a text, or of a chat as the chat template writes it.

    Args:
        given: Fields of the request.
        model: The model that it names.

    Raises:
        ApiError: a field is missing, unknown or of another type, or the chat cannot be written.
    """
    tokenizer, fields = model.tokenizer, {key: value for key, value in given.items() if key != "return_token_strs"}
    if "messages" in fields:
        check_known(fields, CHAT_FIELDS | {"add_special_tokens"}, "the request")
        if fields.pop("add_special_tokens", False) is not False:
            message = "add_special_tokens must be false for messages, since the chat template writes them"
            raise ApiError(400, message, "add_special_tokens")
        chat = request_of(fields, is_chat=True)
        assert isinstance(chat, ChatRequest), "of messages"
        [ids], _, _ = encoded_chat(chat, model, {})
    else:
        check_known(fields, TEXT_FIELDS, "the request")
        text = validated(TextToEncode, fields)
        [ids] = encode_texts(tokenizer, [text.prompt], [not text.add_special_tokens])
    tokens = ids.tolist()
    strings = tokenizer.convert_ids_to_tokens(tokens) if given.get("return_token_strs") is True else None
    return {"count": len(tokens), "max_model_len": model.max_positions, "tokens": tokens, "token_strs": strings}


def detokenize(given: Mapping[str, Any], model: ServedModel) -> dict[str, Any]:
    """Returns the text of tokens, special ones included.

    Args:
        given: Fields of the request.
        model: The model that it names.

    Raises:
        ApiError: a field is missing, unknown or of another type, or the vocabulary lacks a token.
    """
    check_known(given, ("model", "tokens"), "the request")
    tokens = validated(TokensToDecode, given).tokens
    if max(tokens, default=0) >= model.vocab_size:
        message = f"tokens names token {max(tokens)}; the vocabulary has {model.vocab_size} tokens"
        raise ApiError(400, message, "tokens")
    return {"prompt": model.tokenizer.decode(tokens, skip_special_tokens=False)}


def tokenizer_info(model: ServedModel) -> dict[str, Any]:
    """Returns what clients need to know of a tokenizer."""
    tokenizer = model.tokenizer
    limit = min(int(tokenizer.model_max_length), model.max_positions)
    found = {name: getattr(tokenizer, name, None) for name in INFO}
    return {"tokenizer_class": type(tokenizer).__name__, **found, "model_max_length": limit}
