"""The instructions recipe: one-sentence answers that follow an instruction of ten kinds, which code checks.

There are two held-out sets: `wordings`, the same kinds in other words, about other topics, and `kinds`, other kinds of
instructions. Rows of another source have the columns `prompt`, `kind` (a key of `KINDS` or `HELD_OUT_KINDS`),
`argument` and `topic`.

Source: arXiv:2311.07911 (IFEval), for the idea.
"""

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from groupax.data.examples import Example
from groupax.recipes.recipe import make_recipe
from groupax.rewards.text import completion_text

NUM_TRAIN, NUM_HELD_OUT = 4096, 200
Split = Literal["train", "wordings", "kinds"]
HELD_OUT: tuple[Split, ...] = ("wordings", "kinds")
TOPICS = (
    *("rain", "snow", "tea", "milk", "dogs", "cats", "birds", "fish", "horses", "trees", "rivers", "lakes"),
    *("fire", "ice", "wind", "stars", "clouds", "cars", "trains", "boats", "planes", "bikes", "bread", "rice"),
    *("salt", "sugar", "fruit", "games", "songs", "books", "chess", "tennis", "art", "maths", "schools", "banks"),
    *("farms", "cities", "parks", "roads", "bees", "ants", "lions", "tigers", "sharks", "whales", "gold", "iron"),
    *("glass", "wool", "cotton", "doctors", "nurses", "pilots", "cooks"),
)
HELD_OUT_TOPICS = (
    *("thunder", "coffee", "frogs", "wolves", "deserts", "islands", "ships"),
    *("soup", "garlic", "dancing", "soccer", "paintings", "hotels", "bridges"),
)
MIN_WORDS = 5  # different ones, in any answer
WORD = re.compile(r"[A-Za-z0-9']+")
LETTER = re.compile(r"[A-Za-z]")
SENTENCE_END = re.compile(r"[.!?]+(?:\s+|$)")


@dataclass(frozen=True)
class Kind:
    """A kind of instruction.

    Attributes:
        wordings: The instruction in several ways, with a place for its argument; the last one is held out.
        arguments: What may stand there.
        score: Takes an answer and the argument, and returns from 0 to 1 how well the answer follows the instruction.
        is_marked: Whether such an answer ends with a mark of its own, instead of that of a sentence.
        task: The request that precedes the instruction, with a place for the topic.
    """

    wordings: Sequence[str]
    arguments: Sequence[str]
    score: Callable[[str, str], float]
    is_marked: bool = False
    task: str = "Write one short sentence about {}."


def _share(parts: Sequence[str], is_good: Callable[[str], bool]) -> float:
    return sum(map(is_good, parts)) / max(len(parts), 1)


def _num_sentences_score(text: str, number: str) -> float:
    wanted = ("one", "two", "three").index(number) + 1
    found = sum(bool(part.strip()) for part in SENTENCE_END.split(text))
    return max(0.0, 1 - abs(found - wanted) / wanted)


def _json_score(text: str, key: str) -> float:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return 0.2 * (text.startswith("{") + text.endswith("}") + (f'"{key}":' in text))
    is_right = isinstance(value, dict) and value.keys() == {key} and isinstance(value[key], str)
    return 1.0 if is_right else 0.6


def _between_score(text: str, start: str, end: str) -> float:
    inner = text.removeprefix(start).removesuffix(end)
    is_whole = text.startswith(start) and text.endswith(end) and WORD.search(inner)
    if is_whole and start not in inner and end not in inner:
        return 1.0
    return 0.4 * text.startswith(start) + 0.2 * (start in text) + 0.2 * text.endswith(end)


def _begins_score(text: str, start: str) -> float:
    return 1.0 if re.match(rf"{re.escape(start)}\b", text) else 0.3 * (start.lower() in text.lower())


KINDS = {
    "sentences": Kind(
        (
            "Use exactly {} sentences.",
            "Your answer must have {} sentences.",
            "Write {} sentences, no more and no less.",
        ),
        ("two", "three"),
        _num_sentences_score,
        task="Write a few words about {}.",
    ),
    "at_most_words": Kind(
        ("Use at most {} words.", "Do not write more than {} words.", "Stay within a limit of {} words."),
        ("8", "10", "12"),
        lambda text, number: min(1.0, int(number) / max(1, len(WORD.findall(text)))),
    ),
    "without_word": Kind(
        ('Do not use the word "{}".', 'Avoid the word "{}".', 'The word "{}" is forbidden.'),
        ("the", "is", "a", "and", "of"),
        lambda text, word: 1 - 0.4 * min(2, WORD.findall(text.lower()).count(word)),
    ),
    "without_letter": Kind(
        ('Do not use the letter "{}".', 'Avoid the letter "{}".', 'The letter "{}" is forbidden.'),
        ("b", "d", "f", "g", "m", "p", "u", "y"),
        lambda text, letter: _share(text.lower().split(), lambda word: letter not in word),
    ),
    "with_words": Kind(
        ("Use the words {}.", "Include the words {}.", "The words {} must occur in it."),
        ("old and warm", "children and happy", "small and quiet", "morning and beautiful", "water and life"),
        lambda text, words: _share(words.split(" and "), lambda word: word in WORD.findall(text.lower())),
    ),
    "begins_with": Kind(
        ('Begin with "{}".', 'The first words must be "{}".', 'Let it start with "{}".'),
        ("Honestly", "I think", "Every day", "Perhaps", "In summer"),
        _begins_score,
    ),
    "quotes": Kind(
        ("Put it in double quotation marks.", 'Write it in quotation marks, like "this".', 'Start and end with ".'),
        ("",),
        lambda text, _: _between_score(text, '"', '"'),
        is_marked=True,
    ),
    "tags": Kind(
        (
            "Put it between <{0}> and </{0}>.",
            "Answer like this: <{0}>...</{0}>",
            "Start with <{0}> and end with </{0}>.",
        ),
        ("answer", "fact", "note"),
        lambda text, tag: _between_score(text, f"<{tag}>", f"</{tag}>"),
        is_marked=True,
    ),
    "json": Kind(
        (
            'Answer in JSON: {{"{}": "..."}}',
            'Write only a JSON object with the key "{}".',
            'Give a JSON object whose key is "{}".',
        ),
        ("text", "fact", "answer"),
        _json_score,
        is_marked=True,
    ),
    "capitals": Kind(
        ("USE CAPITAL LETTERS ONLY.", "Write only in capital letters.", "Use nothing but uppercase letters."),
        ("",),
        lambda text, _: _share(LETTER.findall(text), str.isupper),
    ),
}
HELD_OUT_KINDS = {
    "without_commas": Kind(("Do not use commas.",), ("",), lambda text, _: float("," not in text)),
    "with_digit": Kind(("Use a number in digits.",), ("",), lambda text, _: float(re.search(r"\d", text) is not None)),
    "question": Kind(("Write it as a question.",), ("",), lambda text, _: float(text.endswith("?"))),
    "brackets": Kind(
        ("Put it between [[ and ]].",), ("",), lambda text, _: _between_score(text, "[[", "]]"), is_marked=True
    ),
    "last_word": Kind(
        ('The last word must be "{}".',),
        ("forever", "today"),
        lambda text, word: float(WORD.findall(text)[-1:] == [word]),
    ),
}


def instruction_score(
    completions: Sequence[Any], kind: Sequence[str], argument: Sequence[str], topic: Sequence[str]
) -> list[float]:
    """Returns how well each answer follows its instruction, from 0 to 1.

    Of this 0.1 are for its topic, 0.1 for an end, and 0.2 for `MIN_WORDS` different words: without these the model soon
    writes "Soccer soccer."
    """
    kinds = KINDS | HELD_OUT_KINDS
    texts = (completion_text(completion).strip() for completion in completions)
    return [
        0.1 * (about[:3] in text.lower())
        + 0.1 * (kinds[name].is_marked or text.endswith((".", "!", "?")))
        + 0.2 * min(1.0, len(set(WORD.findall(text.lower()))) / MIN_WORDS)
        + 0.6 * kinds[name].score(text, what)
        for text, name, what, about in zip(texts, kind, argument, topic, strict=True)
    ]


def follows_instruction(
    completions: Sequence[Any], kind: Sequence[str], argument: Sequence[str], topic: Sequence[str]
) -> list[float]:
    """Returns 1 for each answer that follows its instruction and has topic, end and enough words, else 0."""
    return [float(score > 0.999) for score in instruction_score(completions, kind, argument, topic)]


def generate(num: int, seed: int, split: Split = "train") -> list[dict[str, Any]]:
    """Returns rows with the columns `prompt`, `kind`, `argument` and `topic`.

    Args:
        num: Number of rows.
        seed: Determines them; fewer rows are the first ones of more.
        split: "train", "wordings" for the held-out wordings of the same kinds, or "kinds" for the held-out kinds.

    Example:
        >>> generate(1, seed=0)[0]["prompt"][0]["content"]
        'Write one short sentence about maths. Begin with "Perhaps".'
    """
    return list(itertools.islice(_rows(random.Random(f"{split} {seed}"), split), num))


def _rows(rng: random.Random, split: Split) -> Iterator[dict[str, Any]]:
    kinds: Mapping[str, Kind] = HELD_OUT_KINDS if split == "kinds" else KINDS
    while True:
        name = rng.choice(list(kinds))
        argument = rng.choice(kinds[name].arguments)
        topic = rng.choice(TOPICS if split == "train" else HELD_OUT_TOPICS)
        if name == "without_letter" and argument in topic:
            continue
        texts = kinds[name].wordings
        instruction = rng.choice(texts[:-1] if split == "train" else texts[-1:]).format(argument)
        text = f"{kinds[name].task.format(topic)} {instruction}"
        yield {"prompt": [{"role": "user", "content": text}], "kind": name, "argument": argument, "topic": topic}


def example(row: Example) -> dict[str, Any]:
    """Returns a row with the prompt and what the rewards need."""
    columns = ("prompt", "kind", "argument", "topic")
    if missing := [name for name in columns if row.get(name) is None]:
        raise ValueError(f"it has no column {' and no column '.join(missing)}; it has {', '.join(row)}")
    if row["kind"] not in KINDS | HELD_OUT_KINDS:
        raise ValueError(
            f"there is no kind of instruction {row['kind']!r}; there are {', '.join(KINDS | HELD_OUT_KINDS)}"
        )
    try:
        (KINDS | HELD_OUT_KINDS)[row["kind"]].score("", row["argument"])
    except ValueError as error:
        raise ValueError(f"its argument {row['argument']!r} does not fit the kind {row['kind']!r}: {error}") from error
    return {name: row[name] for name in columns}


RECIPE = make_recipe(
    Path(__file__).with_suffix(".yaml"),
    example,
    {
        "train": lambda: generate(NUM_TRAIN, seed=1),
        "eval": lambda: {split: generate(NUM_HELD_OUT, seed=0, split=split) for split in HELD_OUT},
    },
)
