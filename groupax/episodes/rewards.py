"""The rewards that environments give, as rewards of a run. Imports no jax."""

from collections.abc import Sequence
from typing import Any

from groupax.episodes.environment import environment_classes
from groupax.rewards.contract import Reward
from groupax.types import Rollout


def environment_rewards(environments: Any) -> list[Reward]:
    """Returns a reward for each environment, named after it: those of the turns of that environment's episodes.

    Args:
        environments: Environments as `GRPOTrainer` takes them.
    """
    names = list(environment_classes(environments))
    return [_reward_of(name, is_only=len(names) == 1) for name in names]


def _reward_of(name: str, is_only: bool) -> Reward:
    def rewards(rollouts: Sequence[Rollout]) -> list[list[float] | None]:
        return [
            [turn.reward for turn in rollout.turns]
            if rollout.environment_reward is not None and (is_only or rollout.example.get("environment") == name)
            else None
            for rollout in rollouts
        ]

    return Reward(name, rewards, on_device=True)  # it has the rollouts themselves, in this process
