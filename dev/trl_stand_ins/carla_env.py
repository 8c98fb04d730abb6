"""A car before pedestrians, with the client's interface of OpenEnv's server for CARLA."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


@dataclass
class CarlaAction:
    """A manoeuvre."""

    action_type: str
    lane_direction: str = ""


class CarlaEnv:
    """A scenario in which braking or another lane avoids a collision."""

    def __init__(self, base_url: str, connect_timeout_s: int, message_timeout_s: int) -> None:
        self.base_url = base_url

    def reset(self, scenario_name: str) -> Any:
        """Begins the scenario."""
        self.distance, self.speed, self.is_safe = 20.0, 40.0, False
        return self._result()

    def step(self, action: CarlaAction) -> Any:
        """Advances the time."""
        self.is_safe |= action.action_type != "observe"
        self.distance -= 5.0
        return self._result()

    def _result(self) -> Any:
        hit = self.distance <= 0 and not self.is_safe
        done = self.distance <= 0
        actors = [{"type": "pedestrian", "distance": self.distance, "position": "ahead"}]
        observation = SimpleNamespace(
            speed_kmh=self.speed,
            nearby_actors=actors,
            collision_detected=hit,
            collided_with="pedestrian" if hit else None,
            rubric_reward=float(self.is_safe),
        )
        return SimpleNamespace(observation=observation, reward=float(self.is_safe), done=done)
