"""Tokenizers: loading, prompts to ids, ids to completions. Imports no jax."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from groupax.data.chat import CHAT_TEMPLATES, render_all
from groupax.storage.folders import MAX_JSON_BYTES, READ, check_links, read_json
from groupax.terminal.printable import error_line, short_repr
from groupax.types import Prompt

# What transformers calls a tokenizer that is no family's own.
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
CHARACTERS_PER_TOKEN = 8  # more than most texts have
SPARE_TOKENS = 64  # beside the longest prompt, so that where a text was cut changes none of the last tokens
CONTEXT_TOKENS = 8  # of a prompt, with which the text of a completion is read
REPLACEMENT = "\ufffd"  # what a tokenizer writes for the bytes of a character that is not whole
# What tokens are read from. Without any of these transformers makes a tokenizer of special tokens for some families.
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model*", "*.model", "vocab.json", "vocab.txt", "tekken.json")

# Files that hold a JSON object, where they are.
TOKENIZER_OBJECTS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def load_tokenizer(folder: str | os.PathLike[str], chat_template: str | None = None) -> Any:
    """The `transformers` tokenizer of a model folder.

    Args:
        folder: with the tokenizer's files.
        chat_template: replaces the tokenizer's own: a name in `CHAT_TEMPLATES` or a file.

    Raises:
        ValueError: there is no tokenizer in the folder that can be loaded without code of its own, or no such template.
    """
    folder = Path(folder)
    if folder.is_dir():
        _check_files(folder)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if _is_generic(folder):
        # AutoTokenizer goes by the model's type, and would split text as that family does whatever the files say; it
        # also imports torch, where that is installed
        from transformers import PreTrainedTokenizerFast as Loader
    else:
        from transformers import AutoTokenizer as Loader

    try:
        tokenizer = Loader.from_pretrained(folder, trust_remote_code=False)
        tokenizer("a")  # what a file lacks is missed here rather than at the first prompt
    except Exception as error:  # the tokenizers library raises nothing more special
        raise ValueError(
            f"{folder} has no tokenizer that transformers can load: {type(error).__name__}: {error_line(error)}; get "
            "its files anew from where the model is from"
        ) from error
    return prepare_tokenizer(tokenizer, chat_template)


def _check_files(folder: Path) -> None:
    """Refuses what a tokenizer's files must not hold, before transformers reads them.

    Raises:
        ValueError: there is no vocabulary, a file is damaged or leads out of the folder, or they ask for code.
    """
    check_links(folder)
    if not any(any(folder.glob(pattern)) for pattern in VOCABULARY_FILES):
        names = ", ".join(VOCABULARY_FILES)
        raise ValueError(f"{folder} has no tokenizer that transformers can load: it has none of {names}")
    for path in folder.iterdir():
        is_read = READ.fullmatch(path.name) and path.suffix not in (".safetensors", ".md") and path.is_file()
        if is_read and path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(
                f"{path} has {path.stat().st_size:,} bytes, a tokenizer's files at most {MAX_JSON_BYTES:,}"
            )
    for name in TOKENIZER_OBJECTS:
        if (folder / name).is_file():
            read_json(folder / name)
    config = _tokenizer_config(folder)
    of_model = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    for name, content in (("tokenizer_config.json", config), ("config.json", of_model)):
        code = content.get("auto_map")
        code = code.get("AutoTokenizer") if isinstance(code, dict) else code
        if code and not _is_generic(folder):
            raise ValueError(
                f"{folder / name} asks for a tokenizer that is Python code of the folder (auto_map: "
                f"{short_repr(code)}), which groupax never runs. If tokenizer.json is all there is to it, remove "
                "auto_map and set tokenizer_class to PreTrainedTokenizerFast in tokenizer_config.json"
            )
    for key in ("vocab", "merges", "fast_tokenizer_files"):  # which transformers opens where they lie
        named = config.get(key)
        for name in named if isinstance(named, list) else [named]:
            if isinstance(name, str) and not (folder / Path(name).name == folder / name and (folder / name).is_file()):
                raise ValueError(
                    f"{folder / 'tokenizer_config.json'} has {key}={short_repr(named)}, which is no file of the folder"
                )


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """The contents of `tokenizer_config.json`, which a folder need not have."""
    file = folder / "tokenizer_config.json"
    return read_json(file) if file.is_file() else {}


def _is_generic(folder: Path) -> bool:
    """Whether the tokenizer's files say that all there is to it is in `tokenizer.json`."""
    if not (folder / "tokenizer.json").is_file():
        return False
    config = _tokenizer_config(folder)
    return config.get("tokenizer_class") in GENERIC_CLASSES and not config.get("auto_map")


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


def is_conversational(prompt: Any) -> bool:
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
    max_tokens_kept: int | None = None,
    name: str = "prompt",
) -> list[np.ndarray]:
    """Returns the token ids of each prompt: strings as the tokenizer encodes them, messages by its chat template.

    Args:
        tokenizer: with the template.
        prompts: strings or lists of messages.
        template_kwargs: for each prompt arguments for the template.
        max_tokens_kept: of a prompt that has more, only an end that has more too may be encoded; None encodes all.
        name: what to call a prompt in an error, before its index.

    Raises:
        ValueError: a prompt is neither a string nor a list of messages of texts, has template arguments that no
            template reads, or is conversational and the tokenizer has no chat template, or one that fails.
    """
    arguments = template_kwargs if template_kwargs is not None else [{}] * len(prompts)
    rendered = [is_conversational(prompt) for prompt in prompts]
    chosen = [index for index, flag in enumerate(rendered) if flag]
    conversations = [prompts[index] for index in chosen]
    names, more = [f"{name} {index}" for index in chosen], [arguments[index] for index in chosen]
    written = iter(render_all(tokenizer, conversations, names, template_kwargs=more))
    texts = [
        next(written) if flag else _checked_text(prompt, given, f"{name} {index}")
        for index, (prompt, given, flag) in enumerate(zip(prompts, arguments, rendered, strict=True))
    ]
    if max_tokens_kept is None:
        return encode_texts(tokenizer, texts, rendered)
    longest = CHARACTERS_PER_TOKEN * (max_tokens_kept + SPARE_TOKENS)
    encoded = encode_texts(tokenizer, [text if len(text) <= longest else "" for text in texts], rendered)
    for index, text in enumerate(texts):
        if len(text) > longest:
            encoded[index] = _encode_end(tokenizer, text, rendered[index], max_tokens_kept)
    return encoded


def _checked_text(prompt: str, template_kwargs: Mapping[str, Any], name: str) -> str:
    if template_kwargs:
        raise ValueError(
            f"{name} is a string, which no chat template writes, and has chat_template_kwargs "
            f"{dict(template_kwargs)!r:.200}; leave them out, or give a list of messages"
        )
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} has half of a surrogate pair, which is no character; remove it") from error
    return prompt


def _encode_end(tokenizer: Any, text: str, rendered: bool, max_tokens_kept: int) -> np.ndarray:
    """Returns the token ids of a text, or of an end of it that has more than `max_tokens_kept` already."""
    num_characters = CHARACTERS_PER_TOKEN * (max_tokens_kept + SPARE_TOKENS)
    while num_characters < len(text):
        [ids] = encode_texts(tokenizer, [text[-num_characters:]], [rendered])
        if len(ids) > max_tokens_kept + SPARE_TOKENS:
            return ids
        num_characters *= 4
    [ids] = encode_texts(tokenizer, [text], [rendered])
    return ids


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


def context_tokens(tokenizer: Any, prompt: Sequence[int] | np.ndarray) -> list[int]:
    """The last tokens of a prompt, to read a completion behind; none where the prompt ends within a character."""
    context = [int(token) for token in prompt[-CONTEXT_TOKENS:]]
    return [] if decode(tokenizer, [context])[0].endswith(REPLACEMENT) else context


def decode_after(tokenizer: Any, context: Sequence[int], tokens: Sequence[int]) -> str:
    """The text that a completion adds to that of its prompt, without special tokens.

    By themselves tokens of SentencePiece lose the space before their first word, which `decode` leaves out as TRL does.

    Args:
        tokenizer: of the model.
        context: see `context_tokens`.
        tokens: of the completion.
    """
    before, both = decode(tokenizer, [context, [*context, *tokens]])
    # a tokenizer that tidies spaces up may change what stood before
    return both[len(before) :] if both.startswith(before) else decode(tokenizer, [tokens])[0]
