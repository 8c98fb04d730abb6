"""The guess_number recipe: a small model learns to halve the interval in a game of three turns. Imports no jax.

The environment thinks of a number from 1 to 7 and says after each guess whether it is higher or lower. Three guesses
are enough for a player who always guesses the middle; guesses at random find it in 37 % of the games. Rows of another
source have the column `number`.
"""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupax.data.examples import Example
from groupax.recipes.recipe import make_recipe
from groupax.tools.tool import Step

NUM_TRAIN = 2048
NUM_HELD_OUT = 140
LARGEST = 7
PROMPT = f"Guess my number from 1 to {LARGEST}."


class GuessNumber:
    """A game: the model guesses a number, and reads whether it is higher or lower."""

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Thinks of the row's number, or of one that depends on the seed if the row has none."""
        self.number = row.get("number") or 1 + seed % LARGEST

    def act(self, message: Mapping[str, Any]) -> Step:
        """Answers a guess."""
        text = message["content"].strip()
        if not (text.isascii() and text.isdecimal() and len(text) < 10):
            return Step("a number, please")
        if int(text) == self.number:
            return Step(reward=1.0, done=True)
        return Step("higher" if int(text) < self.number else "lower")


def games(num: int, seed: int) -> list[dict[str, Any]]:
    """Returns games in which all numbers are equally frequent, in an order that the seed determines."""
    numbers = [index % LARGEST + 1 for index in range(num)]
    random.Random(seed).shuffle(numbers)
    return [example({"number": number}) for number in numbers]


def example(row: Example) -> dict[str, Any]:
    """Returns a row with the prompt and the number."""
    number = row.get("number")
    if not isinstance(number, int) or not 1 <= number <= LARGEST:
        raise ValueError(f"it needs the column number, from 1 to {LARGEST}, got {number!r:.80}")
    return {"prompt": [{"role": "user", "content": PROMPT}], "number": number}


RECIPE = make_recipe(
    Path(__file__).with_suffix(".yaml"),
    example,
    {"train": lambda: games(NUM_TRAIN, seed=1), "eval": lambda: games(NUM_HELD_OUT, seed=0)},
)
