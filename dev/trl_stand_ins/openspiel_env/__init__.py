"""The game Catch, with the client's interface of OpenEnv's server for OpenSpiel."""

import random
from types import SimpleNamespace
from typing import Any

ROWS, COLUMNS = 10, 5


class OpenSpielEnv:
    """A game of Catch in this process."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    def reset(self) -> Any:
        """Begins a game with the ball at the top."""
        self.row, self.ball, self.paddle = 0, random.choice((1, 2, 3)), COLUMNS // 2
        return self._result()

    def step(self, action: Any) -> Any:
        """Moves the paddle by `action_id` - 1, and the ball down."""
        self.paddle = min(max(self.paddle + action.action_id - 1, 0), COLUMNS - 1)
        self.row += ROWS - 1
        return self._result()

    def close(self) -> None:
        """Does nothing."""

    def _result(self) -> Any:
        done = self.row >= ROWS - 1
        grid = [0.0] * (ROWS * COLUMNS)
        grid[min(self.row, ROWS - 1) * COLUMNS + self.ball] = 1.0
        grid[(ROWS - 1) * COLUMNS + self.paddle] = 1.0
        reward = (1.0 if self.ball == self.paddle else -1.0) if done else 0.0
        return SimpleNamespace(observation=SimpleNamespace(info_state=grid, done=done), reward=reward, done=done)
