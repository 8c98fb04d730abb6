"""The warnings that TRL logs about settings and rewards."""

import logging
from typing import Any

from groupax.events import Event, RolloutScored

logger = logging.getLogger(__name__)
SUMMED_OVER_TOKENS = ("bnpo", "dr_grpo", "dapo", "cispo")


def warn_about_losses(args: Any) -> None:
    """Logs what is unusual about a loss and the level of its importance ratios.

    Args:
        args: TRL's config.
    """
    loss, level = args.loss_type, args.importance_sampling_level
    if loss == "luspo" and level != "sequence":
        logger.warning("loss_type 'luspo' is meant for importance_sampling_level 'sequence', it is %r", level)
    if loss == "vespo" and level != "token":
        logger.warning(
            "loss_type 'vespo' computes a ratio of whole sequences itself; leave importance_sampling_level at 'token', "
            "it is %r",
            level,
        )
    if level == "sequence" and loss in SUMMED_OVER_TOKENS:
        logger.warning(
            "importance_sampling_level 'sequence' with loss_type %r sums over tokens, which weights each sequence by "
            "its completion length; for the objective of GSPO set loss_type='grpo'",
            loss,
        )


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
