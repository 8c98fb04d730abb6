"""Examples of supervised fine-tuning as tokens, some of them learned, and their packing. Imports no jax."""

import copy
import json
import re
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from groupax.core.settings.rollouts import check_template_kwargs
from groupax.core.settings.sft import ExampleSettings
from groupax.core.types import Prompt, Row
from groupax.data.chat import Conversation, render_all
from groupax.data.example_images import ExampleImages, read_examples
from groupax.data.examples import Examples, tools_of_rows
from groupax.data.images import has_images
from groupax.data.prompts import ImagesOfPrompts, row_template_kwargs
from groupax.data.tokenizer import encode_texts, is_conversational, rust_errors

TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
START, END = "\ue0f0", "\ue0f1"  # written in place of the tags; for private use, so that texts hardly have them
Spans = Sequence[tuple[int, int]]


def render_with_spans(
    tokenizer: Any, conversations: Sequence[Conversation], with_images: bool = False
) -> tuple[list[str], Sequence[Spans]]:
    """Renders conversations, and returns where in each text the assistant's parts start and end.

    They are what the chat template puts between {% generation %} and {% endgeneration %}. A template without these tags
    is asked for the conversation before and after each of the assistant's messages.
    """
    template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    if not TAG.search(template):
        texts = render_all(tokenizer, conversations, add_generation_prompt=False, with_images=with_images)
        return texts, _spans_of_prefixes(tokenizer, conversations, texts, with_images)
    marking = copy.copy(tokenizer)
    marking.chat_template = TAG.sub(_marker, template)
    marked = render_all(marking, conversations, add_generation_prompt=False, with_images=with_images)
    return [text.replace(START, "").replace(END, "") for text in marked], [_marked_spans(text) for text in marked]


def learned_tokens(tokenizer: Any, text: str, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
    """Returns the token ids of a rendered text, and which tokens have a character in one of the spans."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            "assistant_only_loss needs a fast tokenizer, which says which characters a token has; convert it to "
            "tokenizer.json, or set assistant_only_loss to False"
        )
    with rust_errors():
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2)
    mask = np.zeros(len(offsets), bool)
    for start, end in spans:
        mask |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    return np.asarray(encoded["input_ids"], np.int32), mask


def _marker(tag: re.Match[str]) -> str:
    """Returns a statement that writes a mark and trims the same spaces as the tag."""
    left, is_end, right = tag.groups()
    return f"{{%{left} if true %}}{END if is_end else START}{{% endif {right}%}}"


def _marked_spans(text: str) -> Spans:
    spans, start, length = [], None, 0
    for part in re.split(f"([{START}{END}])", text):
        if part == START:
            start = length
        elif part == END and start is not None:
            spans.append((start, length))
            start = None
        elif part != END:
            length += len(part)
    return spans


def _spans_of_prefixes(
    tokenizer: Any, conversations: Sequence[Conversation], texts: Sequence[str], with_images: bool
) -> list[list[tuple[int, int]]]:
    turns = [
        (index, number)
        for index, each in enumerate(conversations)
        for number, message in enumerate(each.messages)
        if message.get("role") == "assistant"
    ]

    def rendered(shift: int, add_generation_prompt: bool) -> list[str]:
        chosen = [(conversations[index], number + shift) for index, number in turns]
        parts = [replace(each, messages=list(each.messages[:end])) for each, end in chosen]
        return render_all(tokenizer, parts, add_generation_prompt, with_images=with_images)

    spans: list[list[tuple[int, int]]] = [[] for _ in conversations]
    for (index, number), before, after in zip(turns, rendered(0, True), rendered(1, False), strict=True):
        if not (texts[index].startswith(after) and after.startswith(before)):
            raise ValueError(
                f"{conversations[index].name}: assistant_only_loss cannot tell message {number + 1} apart: the chat "
                "template has no {% generation %} tags, and renders the start of the conversation differently from the "
                "whole; set chat_template to one with these tags, or assistant_only_loss to False"
            )
        spans[index].append((len(before), len(after)))
    return spans


PACKED_TOGETHER = 1000  # examples, in the order of the dataset
NOT_LEARNED = -100  # in a column `labels`


@dataclass(frozen=True, eq=False)
class TokenExample:
    """An example as tokens."""

    ids: Int[np.ndarray, "T"]
    learned: Bool[np.ndarray, "T"]  # counts in the loss; never the first of a sequence, which nothing predicts
    number: int | None = None  # of its images in `TrainingSet.images`; None for a text


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """Sequences of examples."""

    sequences: Sequence[Sequence[TokenExample]]  # examples of each: one, or with packing as many as fit
    num_dropped: int  # examples without a token to learn, which are left out
    num_truncated: int  # examples that were cut off
    max_length: int  # longest sequence allowed, in tokens
    images: ImagesOfPrompts | None = None  # of each example; None if all are texts

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def num_examples(self) -> int:
        """The number of examples."""
        return sum(map(len, self.sequences))


def columns_of_examples(settings: ExampleSettings) -> tuple[str, ...]:
    """Returns the columns of which each example has one."""
    return "messages", "prompt", settings.dataset_text_field, "input_ids"


def prompt_of(row: Mapping[str, Any], text_field: str) -> Prompt:
    """Returns the prompt of an example: for one without, its text, or its conversation up to the last answer."""
    if "prompt" in row or "messages" not in row:
        return row.get("prompt") or row.get(text_field) or ""
    messages = list(row["messages"])
    while messages and messages[-1].get("role") == "assistant":
        messages.pop()
    return messages or ""


def right_answers(items: Examples, name: str) -> list[dict[str, Any]]:
    """Returns an example for each different completion that is right, of items that `groupax eval` has written.

    Raises:
        ValueError: None is right, or nothing says so.
    """
    found = {}
    for item in (items[index] for index in range(len(items))):
        if has_images(item) or has_images(item.get("columns") or {}):
            raise ValueError(f"{name}: its items have images, which evaluations do not keep; give messages with them")
        for each in item["completions"] or ():
            if isinstance(each, Mapping) and each.get("solved"):
                said = [{"role": "assistant", "content": each["text"]}]
                answer = (each.get("messages") or said) if is_conversational(item["prompt"]) else each["text"]
                found[json.dumps([item["prompt"], answer])] = {"prompt": item["prompt"], "completion": answer}
    if not found:
        raise ValueError(
            f"{name}: no completion of its {len(items):,} items is right; sample more of each (groupax eval --n), or "
            "name the reward that says what is right (--correctness_reward)"
        )
    return list(found.values())


def encode_training_set(
    examples: Examples, tokenizer: Any, settings: ExampleSettings, max_positions: int, name: str, encoder: Any = None
) -> TrainingSet:
    """Returns examples as sequences of tokens.

    An example is a conversation (`messages`), a `prompt` with a `completion`, both texts or lists of messages, a text,
    or `input_ids`, with `labels` that are -100 where a token is not learned. Texts and completions end with the
    tokenizer's end-of-sequence token. Of an item of `groupax eval` each completion that is right is an example.
    `encoder` is that of a model that sees images (`models.vision.processing.PromptEncoder`); tokens that stand for
    images are not learned.
    """
    if "completions" in examples[0] and "completion" not in examples[0]:
        examples = right_answers(examples, name)
    max_length = min(settings.max_length or max_positions, max_positions)
    strategy = settings.packing_strategy if settings.packing else None
    column = _column_of(examples[0], settings, name)
    if encoder is None:
        rows, seen = [examples[index] for index in range(len(examples))], None
    else:
        rows, seen = read_examples(examples, column, encoder, name)
    encoded = list(_encoded(rows, column, tokenizer, settings, name, seen))
    if seen is not None:
        encoded = [_placed(seen, index, example, max_length, strategy) for index, example in enumerate(encoded)]
    num_truncated = 0
    if strategy == "wrapped":  # before the first tokens are left out, so that those within a sequence are learned
        encoded = list(_wrapped(encoded, max_length))
    elif strategy != "bfd_split":
        num_truncated = sum(len(example.ids) > max_length for example in encoded)
        encoded = [replace(each, ids=each.ids[:max_length], learned=each.learned[:max_length]) for each in encoded]
    encoded = [*map(_without_first, encoded)]
    kept = [example for example in encoded if example.learned.any()]
    if not kept:
        raise ValueError(
            f"{name}: none of the {len(encoded)} examples has a token to learn within max_length {max_length}; raise "
            "max_length, or check the completions"
        )
    is_packed = strategy in ("bfd", "bfd_split")
    sequences = list(_packed(encoded, max_length)) if is_packed else [[example] for example in kept]
    images = None if seen is None else seen.of_tokens([example.ids for example in encoded])
    return TrainingSet(sequences, len(encoded) - len(kept), num_truncated, max_length, images)


def _placed(
    seen: ExampleImages, index: int, example: TokenExample, max_length: int, strategy: str | None
) -> TokenExample:
    """Returns an example that learns no tokens that stand for images, after checks that it has its images whole."""
    is_image = seen.check(index, example.ids, example.learned)
    if not seen.digests[index]:
        return example
    with seen.naming(index):
        if strategy == "wrapped" or (strategy == "bfd_split" and len(example.ids) > max_length):
            raise ValueError(f"it has images, and packing_strategy {strategy!r} would cut it; set it to 'bfd'")
        if is_image[max_length:].any():
            raise ValueError(
                f"it has {len(example.ids)} tokens, and would be cut before the end of its last image; raise "
                f"max_length ({max_length}), or give smaller images"
            )
    return replace(example, learned=example.learned & ~is_image, number=index)


def rows_of(sequences: Sequence[Sequence[TokenExample]], images: ImagesOfPrompts | None = None) -> list[Row]:
    """Returns the examples of sequences as rows, whose prompt is what precedes the first learned token.

    Rows have their `images` if these are given.
    """
    numbers: dict[tuple[bytes, tuple[str, ...]], int] = {}  # rows of one number share the computation of their prompt
    rows = []
    for example in (example for sequence in sequences for example in sequence):
        seen = None if images is None or example.number is None else images[example.number]
        digests = () if seen is None else tuple(image.digest for image in seen.images)
        positions = np.flatnonzero(example.learned)
        first, end = int(positions[0]), int(positions[-1]) + 1
        prompt, completion = example.ids[:first], example.ids[first:end]
        ones = np.ones(end - first, np.float32)
        rows.append(
            Row(
                group=numbers.setdefault((prompt.tobytes(), digests), len(numbers)),
                prompt=prompt,
                completion=completion,
                mask=example.learned[first:end],
                advantages=ones,
                rollout_logp=0 * ones,  # no engine has sampled them
                images=seen,
            )
        )
    return rows


def _wrapped(examples: Sequence[TokenExample], max_length: int) -> Iterator[TokenExample]:
    """Yields pieces of `max_length` tokens of the joined examples, from `PACKED_TOGETHER` at a time, as in TRL."""
    for block in _blocks(examples):
        ids, learned = (np.concatenate([getattr(each, name) for each in block]) for name in ("ids", "learned"))
        yield from _pieces(TokenExample(ids, learned), max_length)


def _packed(examples: Sequence[TokenExample], max_length: int) -> Iterator[list[TokenExample]]:
    """Yields sequences of at most `max_length` tokens, from `PACKED_TOGETHER` examples at a time."""
    for block in _blocks(examples):
        pieces = [_without_first(piece) for each in block for piece in _pieces(each, max_length)]
        for sequence in _best_fit_decreasing(pieces, max_length):
            if kept := [example for example in sequence if example.learned.any()]:
                yield kept


def _blocks(examples: Sequence[TokenExample]) -> Iterator[Sequence[TokenExample]]:
    return (examples[start : start + PACKED_TOGETHER] for start in range(0, len(examples), PACKED_TOGETHER))


def _pieces(example: TokenExample, max_length: int) -> Iterator[TokenExample]:
    for start in range(0, len(example.ids), max_length):
        chosen = slice(start, start + max_length)
        yield replace(example, ids=example.ids[chosen], learned=example.learned[chosen])


def _best_fit_decreasing(examples: Sequence[TokenExample], max_length: int) -> list[list[TokenExample]]:
    """Puts each example, longest first, into the sequence in which it leaves the least room."""
    sequences: list[list[TokenExample]] = []
    by_room: defaultdict[int, deque[int]] = defaultdict(deque)  # sequences with this much room
    rooms: list[int] = []  # that some sequence has, sorted
    for example in sorted(examples, key=lambda each: -len(each.ids)):
        length = len(example.ids)
        place = bisect_left(rooms, length)
        if place < len(rooms):
            room = rooms[place]
            index = by_room[room].popleft()
            if not by_room[room]:
                rooms.pop(place)
        else:
            room, index = max_length, len(sequences)
            sequences.append([])
        sequences[index].append(example)
        room -= length
        if room and not by_room[room]:
            insort(rooms, room)
        by_room[room].append(index)
    return sequences


def _without_first(example: TokenExample) -> TokenExample:
    """Returns a sequence, or its first example, whose first token is not learned."""
    return replace(example, learned=example.learned & (np.arange(len(example.ids)) > 0))


def _column_of(first: Mapping[str, Any], settings: ExampleSettings, name: str) -> str:
    """Returns the column that says of what kind all examples are, given the first one."""
    has_completions = "prompt" in first and "completion" in first
    if settings.completion_only_loss and not has_completions:
        raise ValueError(
            f"{name}: completion_only_loss needs examples with prompt and completion, and they have "
            f"{', '.join(map(str, first)):.200}; set it to False, or give such examples"
        )
    known = "input_ids", "completion" if has_completions else "messages", "messages", settings.dataset_text_field
    found = next((column for column in known if column in first), None)
    if found is None:
        raise ValueError(f"{name} has prompts without completions; give a column completion, or messages")
    return found


def _encoded(
    rows: Sequence[Mapping[str, Any]],
    column: str,
    tokenizer: Any,
    settings: ExampleSettings,
    name: str,
    seen: ExampleImages | None,
) -> Iterator[TokenExample]:
    """Yields all examples as tokens; a first token counts as learned if only its place speaks against it."""
    names = [f"{name} {index}" for index in range(len(rows))]
    if column == "input_ids":
        yield from map(_given, rows, names)
    elif column == "completion":
        yield from _completions(rows, names, tokenizer, settings, seen)
    elif column == "messages":
        conversations = _as_conversations([row["messages"] for row in rows], rows, names, settings)
        ids, learned = _conversations(conversations, tokenizer, settings, seen)
        yield from map(TokenExample, ids, learned)
    else:
        _refuse_settings_of_templates(settings, rows, name)
        texts = [_ended(row[column], tokenizer, row_name) for row, row_name in zip(rows, names, strict=True)]
        for ids in encode_texts(tokenizer, _filled(texts, seen), [False] * len(texts)):
            yield TokenExample(ids, np.ones(len(ids), bool))


def _completions(
    rows: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    tokenizer: Any,
    settings: ExampleSettings,
    seen: ExampleImages | None,
) -> Iterator[TokenExample]:
    """Yields examples of prompts with completions; these start where prompt and example differ."""
    prompts, completions = ([row[column] for row in rows] for column in ("prompt", "completion"))
    if is_conversational(prompts[0]):
        if odd := next((own for own, each in zip(names, completions, strict=True) if not isinstance(each, list)), None):
            raise ValueError(f"{odd}: prompts are lists of messages, and its completion is none; give both alike")
        begun = _as_conversations(prompts, rows, names, settings)
        texts = _filled(render_all(tokenizer, begun, with_images=seen is not None), seen, is_start=True)
        prompt_ids = encode_texts(tokenizer, texts, [True] * len(rows))
        pairs = zip(begun, completions, strict=True)
        whole = [replace(each, messages=[*each.messages, *completion]) for each, completion in pairs]
        ids, learned = _conversations(whole, tokenizer, settings, seen)
    else:
        _refuse_settings_of_templates(settings, rows, names[0])
        for row_name, prompt in zip(names, prompts, strict=True):
            _check_text(prompt, row_name)
        texts = [
            prompt + _ended(completion, tokenizer, row_name)
            for prompt, completion, row_name in zip(prompts, completions, names, strict=True)
        ]
        texts, prompts = _filled(texts, seen), _filled(prompts, seen, is_start=True)
        prompt_ids, ids = (encode_texts(tokenizer, each, [False] * len(rows)) for each in (prompts, texts))
        learned = [np.ones(len(each), bool) for each in ids]
    for start, each, mask in zip(prompt_ids, ids, learned, strict=True):
        if settings.completion_only_loss is not False:
            mask[: _num_common(start, each)] = False
        yield TokenExample(each, mask)


def _filled(texts: list[str], seen: ExampleImages | None, is_start: bool = False) -> list[str]:
    """Returns the texts of all examples, or their starts, with those of their images."""
    return texts if seen is None else [seen.filled(i, text, is_start=is_start)[0] for i, text in enumerate(texts)]


def _conversations(
    conversations: Sequence[Conversation], tokenizer: Any, settings: ExampleSettings, seen: ExampleImages | None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the token ids of conversations, and which of them are learned."""
    if settings.assistant_only_loss:
        texts, spans = render_with_spans(tokenizer, conversations, seen is not None)
        pairs = [*zip(texts, spans, strict=True)]
        if seen is not None:
            pairs = [seen.filled(index, *pair) for index, pair in enumerate(pairs)]
        found = [learned_tokens(tokenizer, text, own) for text, own in pairs]
        return [ids for ids, _ in found], [learned for _, learned in found]
    texts = render_all(tokenizer, conversations, add_generation_prompt=False, with_images=seen is not None)
    ids = encode_texts(tokenizer, _filled(texts, seen), [True] * len(texts))
    return ids, [np.ones(len(each), bool) for each in ids]


def _as_conversations(
    messages: Sequence[Any], rows: Sequence[Mapping[str, Any]], names: Sequence[str], settings: ExampleSettings
) -> list[Conversation]:
    """Returns the messages of rows with their own arguments of the chat template, and their tools."""
    tools = tools_of_rows(rows, None, False, names[0].rpartition(" ")[0]) or [()] * len(rows)
    conversations = []
    for own, row, name, schemas in zip(messages, rows, names, tools, strict=True):
        if row.get("chat_template_kwargs") is not None:
            check_template_kwargs(row["chat_template_kwargs"], f"{name}: chat_template_kwargs")
        kwargs = {**settings.chat_template_kwargs, **row_template_kwargs(row)}
        conversations.append(Conversation(own, name, kwargs, schemas))
    return conversations


def _given(row: Mapping[str, Any], name: str) -> TokenExample:
    """Returns an example that has tokens already."""
    ids = _integers(row["input_ids"], f"{name}: input_ids")
    if ids.size and not 0 <= ids.min() <= ids.max() <= np.iinfo(np.int32).max:
        raise ValueError(f"{name}: input_ids must be token ids, got numbers from {ids.min()} to {ids.max()}")
    ids = ids.astype(np.int32)
    if row.get("labels") is None:
        return TokenExample(ids, np.ones(len(ids), bool))
    labels = _integers(row["labels"], f"{name}: labels")
    if len(labels) != len(ids):
        raise ValueError(f"{name}: labels must be as many as input_ids, got {len(labels)} for {len(ids)}")
    learned = labels != NOT_LEARNED
    if (labels != ids)[learned].any():
        raise ValueError(
            f"{name}: labels must be those of input_ids, without a shift, or {NOT_LEARNED} where a token is not learned"
        )
    return TokenExample(ids, learned)


def _integers(values: Any, name: str) -> np.ndarray:
    """Returns a list of integers as an array."""
    try:
        array = np.asarray(values)
    except ValueError:  # rows of different lengths
        array = np.asarray(None)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be a list of integers, got {values!r:.100}")
    return array


def _refuse_settings_of_templates(settings: ExampleSettings, rows: Sequence[Mapping[str, Any]], name: str) -> None:
    if settings.assistant_only_loss:
        raise ValueError(
            f"{name}: assistant_only_loss is for conversations, and the examples are texts; set it to False"
        )
    if settings.chat_template_kwargs or any(row.get("chat_template_kwargs") or row.get("tools") for row in rows):
        raise ValueError(
            f"{name}: chat_template_kwargs and tools are for a chat template, which renders conversations, and the "
            "examples are texts; leave them out"
        )


def _ended(text: Any, tokenizer: Any, name: str) -> str:
    _check_text(text, name)
    end = tokenizer.eos_token or ""
    return text if text.endswith(end) else text + end


def _check_text(text: Any, name: str) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a text like the others, got {text!r:.100}")


def _num_common(a: np.ndarray, b: np.ndarray) -> int:
    """Returns the number of tokens with which both begin."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if len(differ) else size
