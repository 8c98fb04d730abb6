"""Tokenizers: loading, prompts to ids, ids to completions. Imports no jax."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from groupax.chat import CHAT_TEMPLATES, render

Prompt = str | list[dict[str, Any]]
# What transformers calls a tokenizer that is no family's own.
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
SPARE_TOKENS = 64  # beside the longest prompt, so that where a text was cut changes none of the last tokens
CONTEXT_TOKENS = 8  # of a prompt, with which the text of a completion is read
REPLACEMENT = "\ufffd"  # what a tokenizer writes for the bytes of a character that is not whole
# What tokens are read from. Without any of these transformers makes a tokenizer of special tokens for some families.
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model*", "*.model", "vocab.json", "vocab.txt", "tekken.json")


def load_tokenizer(folder: str | os.PathLike[str], chat_template: str | None = None) -> Any:
    """The `transformers` tokenizer of a model folder.

    Args:
        folder: with the tokenizer's files.
        chat_template: replaces the tokenizer's own: a name in `CHAT_TEMPLATES` or a file.

    Raises:
        ValueError: there is no tokenizer in the folder, or no such template.
    """
    if Path(folder).is_dir() and not any(any(Path(folder).glob(pattern)) for pattern in VOCABULARY_FILES):
        names = ", ".join(VOCABULARY_FILES)
        raise ValueError(f"{folder} has no tokenizer that transformers can load: it has none of {names}")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if _is_generic(Path(folder)):
        # AutoTokenizer goes by the model's type, and would split text as that family does whatever the files say; it
        # also imports torch, where that is installed
        from transformers import PreTrainedTokenizerFast as Loader
    else:
        from transformers import AutoTokenizer as Loader

    try:
        tokenizer = Loader.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} has no tokenizer that transformers can load: {error}") from error
    return prepare_tokenizer(tokenizer, chat_template)


def _is_generic(folder: Path) -> bool:
    """Whether the tokenizer's files say that all there is to it is in `tokenizer.json`."""
    file = folder / "tokenizer_config.json"
    if not file.is_file() or not (folder / "tokenizer.json").is_file():
        return False
    return json.loads(file.read_text(encoding="utf-8")).get("tokenizer_class") in GENERIC_CLASSES


def prepare_tokenizer(tokenizer: Any, chat_template: str | None = None) -> Any:
    """Give a tokenizer the chat template asked for and, if it lacks one, a padding token.

    Padding is told from tokens by lengths and never by id, so that a pad equal to the end-of-sequence token
    does not hide the latter from the loss.
    """
    if chat_template is not None:
        tokenizer.chat_template = _read_template(chat_template)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def _read_template(name_or_file: str) -> str:
    if name_or_file in CHAT_TEMPLATES:
        return CHAT_TEMPLATES[name_or_file]
    if Path(name_or_file).is_file():
        return Path(name_or_file).read_text(encoding="utf-8")
    raise ValueError(f"chat_template {name_or_file!r} is neither a file nor one of {', '.join(CHAT_TEMPLATES)}")


def eos_token_ids(tokenizer: Any, *configs: Mapping[str, Any]) -> tuple[int, ...]:
    """All tokens that end a completion: the tokenizer's and those of the model's and the generation config."""
    ids: list[int] = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for config in configs:
        named = config.get("eos_token_id")
        ids += named if isinstance(named, list) else [] if named is None else [named]
    return tuple(dict.fromkeys(ids))


def special_token_ids(tokenizer: Any, texts: Sequence[str]) -> tuple[int, ...]:
    """The ids of the special tokens that are written like one of these texts; decoded texts leave them out."""
    return tuple(
        number for number, token in tokenizer.added_tokens_decoder.items() if token.special and token.content in texts
    )


def is_conversational(prompt: Prompt) -> bool:
    """Whether a prompt is a list of messages rather than a string."""
    return not isinstance(prompt, str)


def last_text(prompt: Prompt) -> str:
    """What a prompt ends with, to be shown: itself, or the text of its last message, or that message as JSON."""
    if isinstance(prompt, str):
        return prompt
    content = prompt[-1].get("content")
    if isinstance(content, str):
        return content
    parts = [part.get("text") for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    return "\n".join(filter(None, parts)) or json.dumps(prompt[-1], default=str)


def encode_prompts(
    tokenizer: Any,
    prompts: Sequence[Any],
    template_kwargs: Sequence[Mapping[str, Any]] | None = None,
    most_tokens: int | None = None,
    name: str = "prompt",
) -> list[np.ndarray]:
    """Returns the token ids of each prompt: strings as the tokenizer encodes them, messages by its chat template.

    Args:
        tokenizer: with the template.
        prompts: strings or lists of messages.
        template_kwargs: for each prompt arguments for the template.
        most_tokens: of a prompt that cannot have so few only the end is encoded, which has more.
        name: what to call a prompt in an error, before its index.

    Raises:
        ValueError: a prompt is neither a string nor a list of messages of texts, has template arguments that no
            template reads, or is conversational and the tokenizer has no chat template, or one that fails.
    """
    texts: list[str] = []
    for index, prompt in enumerate(prompts):
        arguments = template_kwargs[index] if template_kwargs is not None else {}
        if not isinstance(prompt, str):
            texts.append(render(tokenizer, prompt, f"{name} {index}", template_kwargs=arguments))
            continue
        if arguments:
            raise ValueError(
                f"{name} {index} is a string, which no chat template writes, and has chat_template_kwargs "
                f"{dict(arguments)!r:.200}; leave them out, or give a list of messages"
            )
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name} {index} has half of a surrogate pair, which is no character; remove it"
            ) from error
        texts.append(prompt)
    rendered = [is_conversational(prompt) for prompt in prompts]
    if most_tokens is None:
        return encode_texts(tokenizer, texts, rendered)
    ends = [_end_of(tokenizer, text, most_tokens) for text in texts]
    encoded = encode_texts(tokenizer, ends, rendered)
    for index, end in enumerate(ends):
        if len(end) < len(texts[index]) and len(encoded[index]) <= most_tokens:  # one token for all unknown characters
            [encoded[index]] = encode_texts(tokenizer, [texts[index]], [rendered[index]])
    return encoded


def _end_of(tokenizer: Any, text: str, most_tokens: int) -> str:
    """Returns the text, or if it has more characters than so many tokens can have, its end, which has more tokens too.

    No token has more characters than the longest one of the vocabulary. Spaces do not count: some tokenizers make one
    of many.
    """
    if len(text) <= most_tokens + SPARE_TOKENS:
        return text
    needed = (most_tokens + SPARE_TOKENS) * _longest_token(tokenizer)
    size = needed
    while size < len(text):
        end = text[-size:]
        if sum(map(len, end.split())) > needed:
            return end
        size *= 2
    return text


def _longest_token(tokenizer: Any) -> int:
    """Returns the characters of the longest token, or more: some tokenizers write bytes as characters."""
    return max(map(len, tokenizer.get_vocab()))


def encode_texts(tokenizer: Any, texts: Sequence[str], rendered: Sequence[bool]) -> list[np.ndarray]:
    """Token ids of each text, with the tokenizer's special tokens unless a chat template wrote them."""
    encoded: list[np.ndarray] = [np.zeros(0, np.int32)] * len(texts)
    for by_template in (False, True):
        chosen = [index for index, flag in enumerate(rendered) if flag == by_template]
        if chosen:
            ids = tokenizer([texts[i] for i in chosen], add_special_tokens=not by_template)["input_ids"]
            for index, row in zip(chosen, ids, strict=True):
                encoded[index] = np.asarray(row, np.int32)
    return encoded


def decode(tokenizer: Any, completions: Sequence[Sequence[int]]) -> list[str]:
    """The text of each completion, without special tokens."""
    return tokenizer.batch_decode([list(ids) for ids in completions], skip_special_tokens=True)


def context_of(tokenizer: Any, prompt: Sequence[int] | np.ndarray) -> list[int]:
    """The last tokens of a prompt, to read a completion behind; none where the prompt ends within a character."""
    context = [int(token) for token in prompt[-CONTEXT_TOKENS:]]
    return [] if decode(tokenizer, [context])[0].endswith(REPLACEMENT) else context


def decode_behind(tokenizer: Any, context: Sequence[int], tokens: Sequence[int]) -> str:
    """The text that a completion adds to that of its prompt, without special tokens.

    By themselves tokens of SentencePiece lose the space before their first word, which `decode` leaves out as TRL does.

    Args:
        tokenizer: of the model.
        context: see `context_of`.
        tokens: of the completion.
    """
    before, both = decode(tokenizer, [context, [*context, *tokens]])
    # a tokenizer that tidies spaces up may change what stood before
    return both[len(before) :] if both.startswith(before) else decode(tokenizer, [tokens])[0]
