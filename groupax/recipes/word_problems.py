"""The word_problems recipe: arithmetic of one or two steps in everyday words, generated from templates.

The held-out problems have other templates, names and things than those of training. Two worked examples before each
problem show the form of an answer. Rows of another source have the columns `question` (or `problem`, or `prompt`) and
`answer`.
"""

import itertools
import operator
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupax.data.examples import Example
from groupax.recipes.recipe import Split, gold, make_recipe, question
from groupax.rewards.text import completion_text

NUM_TRAIN, NUM_HELD_OUT = 4096, 300
EXAMPLES = (
    ("Eva picks 6 pears and buys 3 more. How many pears does Eva have?", "6 + 3 = 9. The answer is 9."),
    (
        "Max has 4 packs of 5 pens and loses 2 pens. How many pens are left?",
        "4 * 5 = 20 and 20 - 2 = 18. The answer is 18.",
    ),
)
NAMES = {
    "train": ("Tom", "Anna", "Ben", "Lucy", "Omar", "Mia", "Jack", "Rosa", "Ivan", "Kate", "Leo", "Nina"),
    "held_out": ("Pedro", "Emma", "Hugo", "Sara", "Felix", "Zoe"),
}
THINGS = {
    "train": ("apples", "books", "pencils", "coins", "stickers", "cookies", "marbles", "cards", "eggs", "flowers"),
    "held_out": ("oranges", "stamps", "balloons", "shells", "candles"),
}


@dataclass(frozen=True)
class Template:
    """A situation with a question, and the answer as a function of its numbers, which are from 2 to `largest`."""

    text: str
    answer: Callable[..., float]
    largest: int = 12


TEMPLATES = {
    "train": (
        Template("{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", operator.add),
        Template("{name} had {a} {things} and gave {b} of them away. How many {things} are left?", operator.sub, 20),
        Template("A box holds {a} {things}. How many {things} are in {b} boxes?", operator.mul, 9),
        Template(
            "{name} shares {a} {things} equally among {b} children. How many does each child get?", operator.truediv, 20
        ),
        Template("There are {a} red and {b} blue {things}. How many {things} are there?", operator.add),
        Template("A shop had {a} {things} and sold {b}. How many {things} does it still have?", operator.sub, 20),
        Template("{name} is {a} years old. How old will {name} be in {b} years?", operator.add),
        Template("A ticket costs {a} dollars. How many dollars do {b} tickets cost?", operator.mul, 9),
        Template("{name} walks {a} miles every day. How many miles does {name} walk in {b} days?", operator.mul, 9),
        Template("A book has {a} pages, and {name} read {b} of them. How many pages are left?", operator.sub, 20),
        Template(
            "{name} has {a} {things}, buys {b} more and loses {c}. How many {things} does {name} have now?",
            lambda a, b, c: a + b - c,
        ),
        Template(
            "{name} buys {a} bags of {b} {things} and uses {c} of them. How many {things} are left?",
            lambda a, b, c: a * b - c,
            6,
        ),
        Template(
            "{name} has {a} {things} and {b} boxes of {c} {things}. How many is that?", lambda a, b, c: a + b * c, 6
        ),
        Template(
            "A bus has {a} passengers. Then {b} get off and {c} get on. How many passengers are on the bus?",
            lambda a, b, c: a - b + c,
        ),
    ),
    "held_out": (
        Template(
            "{name} found {a} {things} on Monday and {b} on Tuesday. How many {things} is that in total?", operator.add
        ),
        Template("A jar contained {a} {things} until {name} took {b}. How many {things} remain?", operator.sub, 20),
        Template(
            "A garden has {a} rows with {b} plants in each row. How many plants are in the garden?", operator.mul, 9
        ),
        Template(
            "{a} {things} are put into {b} equal groups. How many {things} are in each group?", operator.truediv, 20
        ),
        Template(
            "A train travels {a} miles, then {b} miles and then {c} miles. How many miles is that in total?",
            lambda a, b, c: a + b + c,
        ),
        Template(
            "{name} pays {a} dollars for each of {b} {things} and {c} dollars for a basket. How many dollars is that?",
            lambda a, b, c: a * b + c,
            6,
        ),
    ),
}
# of whole numbers with at most 15 digits
EQUATION = re.compile(r"(?<![\d.,])(\d{1,15}) *([-+*x×/÷]) *(\d{1,15}) *= *(\d{1,15})(?![.,]?\d)")
OPERATORS = {"+": operator.add, "-": operator.sub} | dict.fromkeys("*x×", operator.mul)


def sound_calculation(completions: Sequence[Any], question: Sequence[str]) -> list[float]:
    """Returns the share of each question's numbers that are in equations, such as `6 + 3 = 9`, if all these are true.

    It is 0 if one is false. Without the share, the model soon takes one step of two and stops.
    """

    def is_true(a: str, sign: str, b: str, c: str) -> bool:
        if sign in "/÷":
            return int(b) > 0 and int(a) == int(b) * int(c)
        return OPERATORS[sign](int(a), int(b)) == int(c)

    def share(equations: Sequence[tuple[str, ...]], asked: set[str]) -> float:
        if not all(is_true(*each) for each in equations):
            return 0.0
        used = {number for a, _, b, _ in equations for number in (a, b)}
        return len(asked & used) / max(len(asked), 1)

    found = (EQUATION.findall(completion_text(completion)) for completion in completions)
    return [share(each, set(re.findall(r"\d+", text))) for each, text in zip(found, question, strict=True)]


def generate(num: int, seed: int, split: Split = "train") -> list[dict[str, str]]:
    """Returns rows with the columns `question` and `answer`; the seed determines them.

    Example:
        >>> generate(1, seed=0)
        [{'question': 'Ivan walks 4 miles every day. How many miles does Ivan walk in 5 days?', 'answer': '20'}]
    """
    return list(itertools.islice(_problems(random.Random(f"{split} {seed}"), split), num))


def _problems(rng: random.Random, split: Split) -> Iterator[dict[str, str]]:
    while True:
        template = rng.choice(TEMPLATES[split])
        a, b, c = (rng.randint(2, template.largest) for _ in range(3))
        answer = template.answer(a, b, c) if "{c}" in template.text else template.answer(a, b)
        if answer > 0 and answer == int(answer):
            name, things = rng.choice(NAMES[split]), rng.choice(THINGS[split])
            text = template.text.format(name=name, things=things, a=a, b=b, c=c)
            yield {"question": text, "answer": str(int(answer))}


def example(row: Example) -> dict[str, Any]:
    """Returns a row with the prompt, its question and the gold number."""
    messages = [
        {"role": role, "content": text}
        for turn in EXAMPLES
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    text = question(row)
    return {"prompt": [*messages, {"role": "user", "content": text}], "question": text, "answer": gold(row)}


RECIPE = make_recipe(
    Path(__file__).with_suffix(".yaml"),
    example,
    {
        "train": lambda: [example(row) for row in generate(NUM_TRAIN, seed=1)],
        "eval": lambda: [example(row) for row in generate(NUM_HELD_OUT, seed=0, split="held_out")],
    },
)
