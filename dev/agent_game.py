"""A game of three turns, on which the embedded model of agents is pretrained: it guesses a number from 1 to 7."""

from collections.abc import Mapping
from typing import Any

from groupax.tools.tool import Step

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
