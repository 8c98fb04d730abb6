"""The warnings that TRL logs about rewards."""

import logging

from groupax.events import Event, RolloutScored

logger = logging.getLogger(__name__)


def warn_about_rewards(event: Event) -> None:
    """Logs the first completion of a rollout for which every reward function returned None."""
    if not isinstance(event, RolloutScored):
        return
    for group in event.groups:
        for rollout in group:
            if rollout.rewards and all(value is None for value in rollout.rewards.values()) and not rollout.is_failure:
                logger.warning(
                    "All reward functions returned None for the following kwargs:\n%s\nAt least one should return a "
                    "number; this completion has an advantage of 0",
                    {**rollout.example, "completion": rollout.completion},
                )
                return
