"""The rewards that environments give, as rewards of a run. Imports no jax."""

from collections.abc import Sequence
from typing import Any

from groupax.episodes.environment import environment_classes
from groupax.rewards.contract import Reward
from groupax.types import Rollout


def environment_rewards(environments: Any) -> list[Reward]:
    """Returns the rewards that environments give for turns, named after them; each applies to episodes of its own.

    Args:
        environments: Environments as `GRPOTrainer` takes them.
    """
    classes = environment_classes(environments)
    owners: dict[str, set[str]] = {}  # environments by the name of their reward
    for name, each in classes.items():
        if each.reward_name is not None:
            owners.setdefault(each.reward_name or name, set()).add(name)
    return [_reward_of(name, None if len(classes) == 1 else own) for name, own in owners.items()]


def _reward_of(name: str, environments: set[str] | None) -> Reward:
    """Returns the reward of several environments by name; None for that of the only one."""

    def rewards(rollouts: Sequence[Rollout]) -> list[list[float] | None]:
        return [
            [turn.reward for turn in rollout.turns]
            if rollout.environment_reward is not None
            and (environments is None or rollout.example.get("environment") in environments)
            else None
            for rollout in rollouts
        ]

    return Reward(name, rewards, on_device=True)  # it has the rollouts themselves, in this process
