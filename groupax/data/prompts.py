"""Prompts as token ids and images, and the policies for those that are too long. Imports no jax."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from groupax.core.settings.rollouts import PromptOverflow, check_template_kwargs
from groupax.core.types import PromptImages
from groupax.data.chat import render
from groupax.data.examples import Examples, image_columns, tools_of_rows
from groupax.data.images import has_images, images_of, with_images, without_images
from groupax.data.tokenizer import SPARE_TOKENS, encode_prompts, is_conversational

Tools = Sequence[Sequence[Mapping[str, Any]]]  # of each prompt, as schemas in OpenAI's format
logger = logging.getLogger(__name__)


class ImageRows:
    """Rows of a dataset, all or those of some indices, whose images are read when a row is (see `images.with_images`).

    `name` is that of a row in an error, before its index.
    """

    def __init__(self, examples: Examples, name: str, indices: Sequence[int] | None = None) -> None:
        self._examples, self._name = examples, name
        self._indices = range(len(examples)) if indices is None else indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any, /) -> Any:
        row = self._examples[self._indices[index]]
        return with_images(row, f"{self._name} {self._indices[index]}") if has_images(row) else row

    def select(self, indices: Sequence[int]) -> "ImageRows":
        """Returns some of the rows."""
        return ImageRows(self._examples, self._name, [self._indices[index] for index in indices])


class ImagesOfPrompts:
    """The images of prompts by index, read and processed when they are needed; the last ones used are kept in memory.

    `rows` returns a row with its images by index (see `ImageRows`), and `digests` has those of the images of each
    prompt, none for a prompt of text.
    """

    def __init__(
        self,
        rows: Any,
        encoder: Any,
        token_ids: Sequence[np.ndarray],
        digests: Sequence[tuple[str, ...]],
    ) -> None:
        self.digests = digests
        self._rows, self._encoder, self._token_ids = rows, encoder, token_ids
        self._kept: OrderedDict[int, PromptImages] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __getitem__(self, index: int) -> PromptImages | None:
        """Returns the images of a prompt, which must still be those of the start; None for a prompt of text."""
        if not self.digests[index]:
            return None
        with self._lock:
            if index in self._kept:
                self._kept.move_to_end(index)
                return self._kept[index]
        found = self._encoder.place(self._token_ids[index], images_of(self._rows[index]))
        if tuple(image.digest for image in found.images) != self.digests[index]:
            raise ValueError(f"an image of row {index} has changed since the start of the run; restore its file")
        self.keep(index, found)
        return found

    def keep(self, index: int, images: PromptImages) -> None:
        """Keeps the images of a prompt in memory, as far as there is room."""
        with self._lock:
            self._kept[index] = images
            self._num_bytes += _num_bytes(images)
            while self._num_bytes > self._encoder.max_bytes:
                self._num_bytes -= _num_bytes(self._kept.popitem(last=False)[1])

    def select(self, rows: ImageRows, indices: Sequence[int]) -> "ImagesOfPrompts":
        """Returns the images of some of the prompts, whose rows these are."""
        ids, digests = [self._token_ids[index] for index in indices], [self.digests[index] for index in indices]
        selected = ImagesOfPrompts(rows, self._encoder, ids, digests)
        for new, index in enumerate(indices):
            if index in self._kept:
                selected.keep(new, self._kept[index])
        return selected


def _num_bytes(images: PromptImages) -> int:
    return sum(image.patches.nbytes for image in images.images)


@dataclass(frozen=True, eq=False)
class PromptSet:
    """Prompts with their token ids."""

    examples: Examples  # rows with a `prompt` and any further columns
    token_ids: Sequence[np.ndarray]  # of each prompt
    num_dropped: int = 0  # prompts left out because they were too long
    num_truncated: int = 0  # prompts whose start was cut off
    max_length: int = 0  # longest prompt allowed, in tokens
    images: ImagesOfPrompts | None = None  # of each prompt; None if all prompts are text

    def __len__(self) -> int:
        return len(self.examples)

    def images_of(self, indices: Sequence[int]) -> list[PromptImages | None]:
        """Returns the images of some prompts, None for each prompt of text."""
        return [None if self.images is None else self.images[index] for index in indices]


def encode_examples(
    examples: Examples,
    tokenizer: Any,
    max_length: int,
    overflow: PromptOverflow,
    template_kwargs: Mapping[str, Any] | None = None,
    name: str = "",
    tools: Sequence[Sequence[Mapping[str, Any]]] | None = None,
    may_be_empty: bool = False,
    encoder: Any = None,
) -> PromptSet:
    """Tokenizes all prompts and applies the policy for those longer than `max_length` tokens.

    A column `prompt_ids` has the tokens of the prompts, with their tools if they have any, if they are not those that
    the tokenizer returns. A column `chat_template_kwargs` has arguments for the chat template, which take precedence
    over `template_kwargs`. A column `tools` has schemas for it, if the run has no tools.

    Args:
        tools: The run's tools for each row, as schemas in OpenAI's format.
        may_be_empty: Whether a conversation needs no text, e.g. since an environment adds to it.
        encoder: Encoder of prompts with images (`models.vision.processing.PromptEncoder`); None for a model of text.

    Raises:
        ValueError: A prompt is too long and the policy is "error", or it has images and the policy is "truncate_left";
            none is left after dropping, one is empty, or one cannot be encoded (see `encode_prompts`, `with_images`);
            or there are images, and the model reads text.
    """
    label = f"{name}: prompt" if name else "prompt"
    shown_tools = tools_of_rows(examples, tools, may_be_empty, label)
    encoding = _Encoding(tokenizer, max_length, template_kwargs or {}, label, may_be_empty)
    images: ImagesOfPrompts | None = None
    if encoder is not None:
        examples, token_ids, images = encoding.with_images(examples, shown_tools, encoder)
    elif column := next(iter(image_columns(examples)), None):
        raise ValueError(
            f"{name or 'the dataset'} has a column {column!r}, which the model would not see: it reads text; drop the "
            "column to train on the text alone, or give a model that sees images"
        )
    else:
        token_ids = encoding.of_texts(examples, shown_tools)
    for index, ids in enumerate(token_ids):
        if len(ids) == 0:
            raise ValueError(f"{label} {index} is empty and the tokenizer adds no token; the model needs at least one")
    too_long = [index for index, ids in enumerate(token_ids) if len(ids) > max_length]
    if not too_long:
        return PromptSet(examples, token_ids, max_length=max_length, images=images)
    if overflow == "error":
        raise ValueError(_length_fault(token_ids, too_long, max_length, label))
    if overflow == "truncate_left":
        if images is not None and any(images.digests[index] for index in too_long):
            first = next(index for index in too_long if images.digests[index])
            raise ValueError(
                f"{label} {first} has images and {len(token_ids[first])} tokens, and {max_length} are allowed; it "
                "cannot be cut within an image: set prompt_overflow to 'drop', or give smaller images"
            )
        cut = [ids[-max_length:] for ids in token_ids]
        return PromptSet(examples, cut, num_truncated=len(too_long), max_length=max_length, images=images)
    kept = [index for index, ids in enumerate(token_ids) if len(ids) <= max_length]
    if not kept:
        raise ValueError(
            f"all {len(examples)} prompts are longer than {max_length} tokens, which max_prompt_length allows, or what "
            "the completion leaves of the model's positions; change these"
        )
    ids = [token_ids[i] for i in kept]
    if isinstance(examples, ImageRows) and images is not None:
        rows = examples.select(kept)
        return PromptSet(rows, ids, len(too_long), max_length=max_length, images=images.select(rows, kept))
    return PromptSet([examples[i] for i in kept], ids, num_dropped=len(too_long), max_length=max_length)


@dataclass(frozen=True, eq=False)
class _Encoding:
    """The properties that the prompts of a dataset share; `label` names them in errors, before their index."""

    tokenizer: Any
    max_length: int
    template_kwargs: Mapping[str, Any]
    label: str
    may_be_empty: bool

    def of_texts(self, examples: Examples, tools: Tools | None) -> list[np.ndarray]:
        """Returns the token ids of prompts without images."""
        is_table, num = hasattr(examples, "column_names"), len(examples)
        prompts = list(examples["prompt"]) if is_table else [examples[index]["prompt"] for index in range(num)]
        begun = [i for i, each in enumerate(prompts) if isinstance(each, list) and each and _is_of_assistant(each[-1])]
        if begun:
            logger.warning(
                "%s %d and %d others end with a message of the assistant. It is not continued: the chat template "
                "closes it and begins another one; end prompts with a message of the user",
                self.label,
                begun[0],
                len(begun) - 1,
            )
        if "prompt_ids" not in examples[0]:
            arguments = _template_kwargs(examples, prompts, self.template_kwargs, self.label)
            more = {"tools": tools, "may_be_empty": self.may_be_empty}
            return encode_prompts(self.tokenizer, prompts, arguments, self.max_length, self.label, **more)
        if self.template_kwargs:
            raise ValueError(
                f"{self.label.removesuffix('prompt') or 'the dataset'} has a column prompt_ids, which "
                "chat_template_kwargs cannot change; leave one of them out"
            )
        return [_check_ids(examples[index]["prompt_ids"], f"{self.label} {index}") for index in range(num)]

    def with_images(
        self, examples: Examples, tools: Tools | None, encoder: Any
    ) -> tuple[Examples, list[np.ndarray], ImagesOfPrompts | None]:
        """Returns rows, token ids and images of prompts of which some have images."""
        shown = _rows_with_images(examples)
        if not shown:
            token_ids = self.of_texts(examples, tools)
            _check_text(encoder, token_ids, range(len(token_ids)), self.label)
            return examples, token_ids, None
        if "prompt_ids" in examples[0]:
            raise ValueError(f"{self.label}s have images and a column prompt_ids; leave one of them out")
        rows = ImageRows(examples, self.label)
        token_ids: list[np.ndarray] = [np.zeros(0, np.int32)] * len(examples)
        digests: list[tuple[str, ...]] = [()] * len(examples)
        images = ImagesOfPrompts(rows, encoder, token_ids, digests)
        for index in shown:
            row, where = rows[index], f"{self.label} {index}"
            text = prompt = without_images(row["prompt"])
            if is_rendered := is_conversational(prompt):
                arguments = {**self.template_kwargs, **row_template_kwargs(row)}
                more = {"tools": tools[index] if tools is not None else (), "may_be_empty": True, "with_images": True}
                text = render(self.tokenizer, prompt, where, template_kwargs=arguments, **more)
            try:
                token_ids[index], found = encoder.encode(text, images_of(row), is_rendered)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            digests[index] = tuple(image.digest for image in found.images)
            images.keep(index, found)
        if plain := sorted(set(range(len(examples))) - set(shown)):
            own_tools = None if tools is None else [tools[index] for index in plain]
            encoded = self.of_texts([examples[index] for index in plain], own_tools)
            _check_text(encoder, encoded, plain, self.label)
            for index, ids in zip(plain, encoded, strict=True):
                token_ids[index] = ids
        return rows, token_ids, images


def _check_text(encoder: Any, token_ids: Sequence[np.ndarray], indices: Sequence[int], label: str) -> None:
    for index, ids in zip(indices, token_ids, strict=True):
        try:
            encoder.check_text(ids)
        except ValueError as error:
            raise ValueError(f"{label} {index}: {error}") from error


def _rows_with_images(examples: Examples) -> list[int]:
    """Returns the indices of the rows that have images, without decoding any where the table tells."""
    if hasattr(examples, "column_names") and not image_columns(examples):
        prompts = enumerate(examples["prompt"])
        return [index for index, prompt in prompts if has_images({"prompt": prompt})]
    return [index for index in range(len(examples)) if has_images(examples[index])]


def _length_fault(token_ids: Sequence[np.ndarray], too_long: Sequence[int], max_length: int, label: str) -> str:
    known = max_length + SPARE_TOKENS  # of a longer prompt only the end may have been encoded
    length = len(token_ids[too_long[0]])
    return (
        f"{label} {too_long[0]} has {length if length <= known else f'more than {known}'} tokens, at most {max_length} "
        f"are allowed ({len(too_long)} of {len(token_ids)} prompts are too long): by max_prompt_length, or by what the "
        "completion leaves of the model's positions; change these, or set prompt_overflow to 'drop' or 'truncate_left'"
    )


def _is_of_assistant(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def _check_ids(given: Any, name: str) -> np.ndarray:
    try:
        ids = np.asarray(given)
    except ValueError:  # rows of different lengths
        ids = np.zeros((0, 0))
    is_ids = ids.ndim == 1 and (ids.size == 0 or (np.issubdtype(ids.dtype, np.integer) and ids.min() >= 0))
    if not is_ids or (ids.size and ids.max() >= 1 << 31):
        raise ValueError(f"{name}: the column prompt_ids must have a list of token ids, got {given!r:.100}")
    return ids.astype(np.int32)


def _template_kwargs(
    examples: Examples, prompts: Sequence[Any], shared: Mapping[str, Any], name: str
) -> list[dict[str, Any]] | None:
    """Returns each prompt's arguments for the chat template, or None if there are none."""
    if shared and not any(map(is_conversational, prompts)):
        raise ValueError(
            f"chat_template_kwargs has {', '.join(shared)}, but no prompt is a list of messages, and a chat template "
            "renders nothing else; leave them out, or give such prompts"
        )
    if not shared and "chat_template_kwargs" not in examples[0]:
        return None
    arguments = []
    for index, prompt in enumerate(prompts):
        row = examples[index]
        if row.get("chat_template_kwargs") is not None:
            check_template_kwargs(row["chat_template_kwargs"], f"{name} {index}: chat_template_kwargs")
        arguments.append({**(shared if is_conversational(prompt) else {}), **row_template_kwargs(row)})
    return arguments


def row_template_kwargs(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row's own arguments for the chat template, without nulls, which tables have for missing arguments."""
    return {key: value for key, value in (row.get("chat_template_kwargs") or {}).items() if value is not None}


def prompt_limit(max_positions: int, max_completion_length: int, max_prompt_length: int | None, name: str) -> int:
    """Returns the longest prompt allowed, in tokens: the positions that the completion leaves, or fewer."""
    context = max_positions - max_completion_length
    limit = min(context, max_prompt_length or context)
    if limit < 1:
        raise ValueError(
            f"{name} {max_completion_length} leaves no room for a prompt in the model's {max_positions} positions; "
            "lower it"
        )
    return limit
