"""Tokenizers: loading them, encoding prompts and decoding completions. Imports no jax."""

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from groupax.core.storage.folders import check_links, read_json
from groupax.core.terminal.printable import error_line, short_repr
from groupax.core.types import Prompt
from groupax.data.chat import CHAT_TEMPLATES, TEMPLATES, Conversation, TemplateError, render_all
from groupax.data.files import check_characters

# Classes of tokenizers that are fully described by `tokenizer.json`.
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
CHARACTERS_PER_TOKEN = 8  # more than most texts have
SPARE_TOKENS = 64  # encoded in addition to the longest prompt, so that cutting the text changes none of the last tokens
CONTEXT_TOKENS = 8  # tokens of a prompt with which a completion is decoded
REPLACEMENT = "\ufffd"  # decoded for the bytes of an incomplete character
# Without any of these files transformers creates a tokenizer of special tokens only for some families.
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model*", "*.model", "vocab.json", "vocab.txt", "tekken.json")

# Parts of `tokenizer.json` that replace, cut and add text, and signs of those that are more than a fixed rule.
RULES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
RISKY = re.compile(r'"(Regex|Replace|Precompiled|Prepend|continuing_subword_prefix)"|.{4096}', re.DOTALL)
# Encoded by a new tokenizer before any other text, together with the texts that its rules name.
TRIAL = f"{'a' * 48}! {'1' * 48}! {' ' * 48}!\n{''.join(map(chr, range(0x20, 0x530)))}"
TRIAL += " 東京 ひらがな カタカナ 한국어 हिन्दी עברית العربية ไทย 🙂"
TRIAL_CHARACTERS = 1 << 14  # most of the rules' texts that are encoded
TRIAL_DEADLINE_S = 60

logger = logging.getLogger(__name__)

# Files that must contain a JSON object, if they exist.
TOKENIZER_OBJECTS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def load_tokenizer(folder: str | os.PathLike[str], chat_template: str | None = None) -> Any:
    """Loads the `transformers` tokenizer of a model folder, without running code of the folder.

    `chat_template` is a name in `CHAT_TEMPLATES` or a file of a template that replaces the tokenizer's own. Raises a
    ValueError if the tokenizer is missing, damaged or Python code, or if it needs more time or memory for a short text
    than any does.
    """
    folder = Path(folder)
    if folder.is_dir():
        _check_files(folder)
        if (folder / "tokenizer.json").is_file():
            _try_out(folder / "tokenizer.json")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if _is_generic(folder):
        # AutoTokenizer chooses by the model's type, and would split text as that family does whatever the files say; it
        # also imports torch if that is installed
        from transformers import PreTrainedTokenizerFast as Loader
    else:
        from transformers import AutoTokenizer as Loader

    try:
        tokenizer = Loader.from_pretrained(folder, trust_remote_code=False)
        token_ids(tokenizer, ["a"])  # an incomplete file fails here rather than at the first prompt
    except Exception as error:  # the tokenizers library raises no narrower class
        raise ValueError(
            f"{folder} has no tokenizer that transformers can load: {type(error).__name__}: {error_line(error)}; "
            "download its files again"
        ) from error
    return prepare_tokenizer(tokenizer, chat_template)


def _check_files(folder: Path) -> None:
    """Raises a ValueError, before transformers reads them, if files lack, are damaged, lead out, or ask for code."""
    check_links(folder)
    if not any(any(folder.glob(pattern)) for pattern in VOCABULARY_FILES):
        names = ", ".join(VOCABULARY_FILES)
        raise ValueError(f"{folder} has no tokenizer that transformers can load: it has none of {names}")
    for name in TOKENIZER_OBJECTS:
        if (folder / name).is_file():
            read_json(folder / name)
    config = _read_optional(folder / "tokenizer_config.json")
    for name, content in (("tokenizer_config.json", config), ("config.json", _read_optional(folder / "config.json"))):
        code = content.get("auto_map")
        code = code.get("AutoTokenizer") if isinstance(code, dict) else code
        if code and not _is_generic(folder):
            raise ValueError(
                f"{folder / name} requests a tokenizer that is Python code of the folder (auto_map: "
                f"{short_repr(code)}), which groupax never runs. If tokenizer.json is complete, remove "
                "auto_map and set tokenizer_class to PreTrainedTokenizerFast in tokenizer_config.json"
            )
    for key in ("vocab", "merges", "fast_tokenizer_files"):  # transformers opens these paths wherever they lead
        named = config.get(key)
        for name in named if isinstance(named, list) else [named]:
            if isinstance(name, str) and not (folder / Path(name).name == folder / name and (folder / name).is_file()):
                raise ValueError(
                    f"{folder / 'tokenizer_config.json'} has {key}={short_repr(named)}, which is not one of its files"
                )


def _try_out(path: Path) -> None:
    """Encodes and decodes a text in the limited process, unless the rules of `tokenizer.json` are all harmless.

    Rules may be regular expressions that take forever, and replacements that make 10^12 characters of one.
    """
    content = read_json(path)
    rules = json.dumps([content.get(name) for name in RULES])
    if not RISKY.search(rules):
        return
    texts = " ".join(text[:1024] for text in _texts_of(json.loads(rules)))
    request = {"action": "tokenize", "path": str(path.absolute()), "text": f"{TRIAL} {texts[:TRIAL_CHARACTERS]}"}
    try:
        TEMPLATES.ask(request, 1, TRIAL_DEADLINE_S)
    except TemplateError as fault:
        raise ValueError(
            f"{path} cannot be used: it fails with a text of {len(request['text']):,} characters, for which {fault}; "
            "download the file again, or do not trust it"
        ) from fault


def _texts_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts_of(each)


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _is_generic(folder: Path) -> bool:
    """Returns whether the tokenizer is fully described by `tokenizer.json`."""
    if not (folder / "tokenizer.json").is_file():
        return False
    config = _read_optional(folder / "tokenizer_config.json")
    return config.get("tokenizer_class") in GENERIC_CLASSES and not config.get("auto_map")


def prepare_tokenizer(tokenizer: Any, chat_template: str | None = None) -> Any:
    """Sets the requested chat template, and a padding token if the tokenizer has none.

    Padding is recognized by lengths and never by id, so that a padding token equal to the end-of-sequence token does
    not hide the latter from the loss.
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
    """Returns all tokens that end a completion: the tokenizer's, and those in the model's and generation configs."""
    ids: list[int] = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for config in configs:
        tokens = config.get("eos_token_id")
        ids += tokens if isinstance(tokens, list) else [] if tokens is None else [tokens]
    return tuple(dict.fromkeys(ids))


def special_token_ids(tokenizer: Any, texts: Sequence[str]) -> tuple[int, ...]:
    """Returns the ids of the special tokens that are written as one of these texts; decoding leaves them out."""
    added = tokenizer.added_tokens_decoder.items()
    return tuple(index for index, token in added if token.special and token.content in texts)


def is_conversational(prompt: Any) -> bool:
    """Returns whether a prompt is a list of messages rather than a string."""
    return not isinstance(prompt, str)


def last_text(prompt: Prompt) -> str:
    """Returns the end of a prompt for display: itself, the text of its last message, or that message as JSON."""
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
    max_tokens: int | None = None,
    name: str = "prompt",
    tools: Sequence[Sequence[Mapping[str, Any]]] | None = None,
    may_be_empty: bool = False,
) -> list[np.ndarray]:
    """Returns the token ids of each prompt: a string is encoded directly, messages are rendered by the chat template.

    Args:
        max_tokens: Limit beyond which a prompt need not be complete: of a longer prompt, an end that exceeds the limit
            may be encoded instead. None encodes everything.
        may_be_empty: Whether a conversation needs no text, e.g. since an environment adds to it.
    """
    arguments = template_kwargs if template_kwargs is not None else [{}] * len(prompts)
    tools = tools if tools is not None else [()] * len(prompts)
    given = enumerate(zip(prompts, arguments, tools, strict=True))
    every = [Conversation(prompt, f"{name} {index}", kwargs, own) for index, (prompt, kwargs, own) in given]
    rendered = [is_conversational(prompt) for prompt in prompts]
    conversations = [each for each, flag in zip(every, rendered, strict=True) if flag]
    rendered_texts = iter(render_all(tokenizer, conversations, may_be_empty=may_be_empty))
    texts = [next(rendered_texts) if flag else _checked_text(each) for each, flag in zip(every, rendered, strict=True)]
    if max_tokens is None:
        return encode_texts(tokenizer, texts, rendered)
    return encode_within(tokenizer, texts, rendered, max_tokens)


def encode_within(tokenizer: Any, texts: Sequence[str], rendered: Sequence[bool], max_tokens: int) -> list[np.ndarray]:
    """Returns the token ids of each text, or of an end that has more than `max_tokens` if the whole text does."""
    longest = CHARACTERS_PER_TOKEN * (max_tokens + SPARE_TOKENS)
    encoded = encode_texts(tokenizer, [text if len(text) <= longest else "" for text in texts], rendered)
    for index, text in enumerate(texts):
        if len(text) > longest:
            encoded[index] = _encode_end(tokenizer, text, rendered[index], max_tokens)
    return encoded


def _checked_text(prompt: Conversation) -> str:
    """Returns a prompt that is a string, which no chat template renders."""
    if prompt.tools:
        raise ValueError(
            f"{prompt.name} is a string, which is not rendered by a chat template, so the model would not know its "
            "tools; give a list of messages, or leave the tools out"
        )
    if prompt.template_kwargs:
        raise ValueError(
            f"{prompt.name} is a string, which is not rendered by a chat template, but has chat_template_kwargs "
            f"{dict(prompt.template_kwargs)!r:.200}; leave them out, or give a list of messages"
        )
    check_characters(prompt.messages, prompt.name)
    return prompt.messages


def _encode_end(tokenizer: Any, text: str, rendered: bool, max_tokens: int) -> np.ndarray:
    """Returns the token ids of a text, or of an end of it with more than `max_tokens` tokens."""
    num_characters = CHARACTERS_PER_TOKEN * (max_tokens + SPARE_TOKENS)
    while num_characters < len(text):
        [ids] = encode_texts(tokenizer, [text[-num_characters:]], [rendered])
        if len(ids) > max_tokens + SPARE_TOKENS:
            return ids
        num_characters *= 4
    [ids] = encode_texts(tokenizer, [text], [rendered])
    return ids


def encode_texts(tokenizer: Any, texts: Sequence[str], rendered: Sequence[bool]) -> list[np.ndarray]:
    """Returns the token ids of each text, with special tokens added unless a chat template has rendered it."""
    encoded: list[np.ndarray] = [np.zeros(0, np.int32)] * len(texts)
    for is_rendered in (False, True):
        chosen = [index for index, flag in enumerate(rendered) if flag == is_rendered]
        if chosen:
            rows = token_ids(tokenizer, [texts[i] for i in chosen], add_special_tokens=not is_rendered)
            for index, row in zip(chosen, rows, strict=True):
                encoded[index] = np.asarray(row, np.int32)
    return encoded


def token_ids(tokenizer: Any, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
    """Returns the token ids of each text.

    A text that begins with the special tokens that the tokenizer puts first, as one does that `apply_chat_template` has
    rendered, has them once.
    """
    with rust_errors():
        rows = tokenizer(list(texts), add_special_tokens=add_special_tokens)["input_ids"]
        special = tuple(tokenizer.all_special_tokens)
        if add_special_tokens and any(text.startswith(special) for text in texts):
            first = _first_tokens(tokenizer)
            doubled = [bool(first) and row[: 2 * len(first)] == 2 * first for row in rows]
            if any(doubled):
                _say_doubled(" ".join(tokenizer.convert_ids_to_tokens(first)))
            rows = [row[len(first) :] if is_doubled else row for row, is_doubled in zip(rows, doubled, strict=True)]
    return rows


def _first_tokens(tokenizer: Any) -> list[int]:
    """Returns the special tokens that a tokenizer puts before a text."""
    whole, own = (tokenizer("a", add_special_tokens=flag)["input_ids"] for flag in (True, False))
    starts = (start for start in range(len(whole) + 1) if whole[start : start + len(own)] == own)
    return whole[: next(starts, 0)]


@lru_cache
def _say_doubled(tokens: str) -> None:
    logger.warning(
        "a text begins with %s, as a chat template writes it, and the tokenizer puts that before every text: it is "
        "given to the model once",
        tokens,
    )


@contextmanager
def rust_errors() -> Iterator[None]:
    """Raises a ValueError where the tokenizers library, in Rust, panics, which Python has no `Exception` for."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizer fails with a text: {error_line(error)}; are its files damaged?") from error


def decode(tokenizer: Any, completions: Sequence[Sequence[int]]) -> list[str]:
    """Returns the text of each completion, without special tokens."""
    with rust_errors():
        return tokenizer.batch_decode([list(ids) for ids in completions], skip_special_tokens=True)


def context_tokens(tokenizer: Any, prompt: Sequence[int] | np.ndarray) -> list[int]:
    """Returns the last tokens of a prompt, the context of `decode_after`; none if it ends within a character."""
    context = [int(token) for token in prompt[-CONTEXT_TOKENS:]]
    return [] if decode(tokenizer, [context])[0].endswith(REPLACEMENT) else context


def decode_after(tokenizer: Any, context: Sequence[int], tokens: Sequence[int]) -> str:
    """Returns the text that a completion adds to its prompt, without special tokens.

    Decoded without context, SentencePiece tokens lose the space before their first word, as in `decode` and in TRL.
    """
    before, both = decode(tokenizer, [context, [*context, *tokens]])
    # a tokenizer that cleans up spaces may change the text of the context
    return both[len(before) :] if both.startswith(before) else decode(tokenizer, [tokens])[0]
