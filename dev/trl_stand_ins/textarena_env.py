"""Wordle and Sudoku, with the client's interface of OpenEnv's server for TextArena."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

WORD = "crane"
SOLUTION = [[(3 * (row % 3) + row // 3 + column) % 9 + 1 for column in range(9)] for row in range(9)]


@dataclass
class TextArenaAction:
    """A message of the player."""

    message: str


class TextArenaEnv:
    """A game in this process: Sudoku if the address has that word, else Wordle."""

    def __init__(self, base_url: str) -> None:
        self.is_sudoku = "sudoku" in base_url

    def reset(self) -> Any:
        """Begins a game."""
        self.board = [
            [value if (row + column) % 3 else 0 for column, value in enumerate(line)]
            for row, line in enumerate(SOLUTION)
        ]
        self.text = self._rendered() if self.is_sudoku else "Guess a word of five letters.\n"
        return self._result(0.0, False)

    def step(self, action: TextArenaAction) -> Any:
        """Plays a message such as [crane], or [1 2 3] for row, column and number."""
        word = action.message.strip("[] ")
        if self.is_sudoku:
            return self._fill(word)
        if len(word) != len(WORD) or not word.isalpha():
            self.text += "You attempted an invalid move.\n"
            return self._result(0.0, False)
        marks = ["G" if a == b else "Y" if a in WORD else "X" for a, b in zip(word, WORD, strict=True)]
        self.text += f"{' '.join(word)}\n{' '.join(marks)}\n"
        return self._result(marks.count("G") / len(WORD), word == WORD)

    def _fill(self, move: str) -> Any:
        numbers = [int(each) for each in move.split() if each.isdecimal()]
        if len(numbers) == 3 and all(1 <= each <= 9 for each in numbers):
            row, column, value = numbers
            if not self.board[row - 1][column - 1] and SOLUTION[row - 1][column - 1] == value:
                self.board[row - 1][column - 1] = value
                self.text = self._rendered()
                return self._result(0.1, False)
        self.text = f"invalid move\n{self._rendered()}"
        return self._result(0.0, False)

    def _rendered(self) -> str:
        head = "   C1 C2 C3 | C4 C5 C6 | C7 C8 C9\n"
        lines = []
        for row, line in enumerate(self.board, 1):
            cells = [str(value) if value else "." for value in line]
            lines.append(f"R{row} " + " | ".join(" ".join(cells[first : first + 3]) for first in (0, 3, 6)))
        return head + "\n".join(lines) + "\n"

    def _result(self, reward: float, done: bool) -> Any:
        messages = [SimpleNamespace(content=self.text)]
        return SimpleNamespace(observation=SimpleNamespace(messages=messages), reward=reward, done=done)
