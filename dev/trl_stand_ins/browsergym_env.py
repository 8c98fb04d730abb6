"""A page with buttons, with the client's interface of OpenEnv's server for BrowserGym."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


@dataclass
class BrowserGymAction:
    """An action in BrowserGym's language."""

    action_str: str


class BrowserGymEnv:
    """A page whose button 13 is to be clicked."""

    _ws = None

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    def connect(self) -> None:
        """Does nothing."""

    def reset(self, task_name: str) -> Any:
        """Shows the page."""
        return self._result(f"Task: {task_name}. Click the button.", False)

    def step(self, action: BrowserGymAction) -> Any:
        """Ends the task when the right button is clicked."""
        return self._result("Click the button.", action.action_str == "click('13')")

    def _result(self, goal: str, done: bool) -> Any:
        observation = SimpleNamespace(
            goal=goal, axtree_txt="[13] button 'Click Me!'", text="", error="", last_action_error=False, done=done
        )
        return SimpleNamespace(observation=observation, reward=float(done), done=done)
