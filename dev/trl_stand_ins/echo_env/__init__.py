"""An environment that returns messages, with the client's interface of OpenEnv's server."""

from types import SimpleNamespace
from typing import Any


class EchoEnv:
    """An echo in this process."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    def step(self, action: Any) -> Any:
        """Returns the message and, as the reward, its length."""
        return SimpleNamespace(
            observation=SimpleNamespace(echoed_message=action.message, reward=0.1 * len(action.message))
        )
