"""The distance by which an update moves the policy on the tokens of its own step."""

from collections.abc import Sequence

import numpy as np

from groupax.replay.moments import Moment
from groupax.replay.trainer import ReplayTrainer
from groupax.types import Row


def observe_move(trainer: ReplayTrainer, found: list[float]) -> None:
    """Has a trainer measure the KL between the policies before and after the update of its target, into a list.

    It is the mean of exp(d) - 1 - d over the tokens that the step trains on, d being the change of a token's log-prob.
    """
    rows: list[Row] = []
    before: list[np.ndarray] = []

    def begin(step: int, moment: Moment) -> None:
        del step
        rows[:] = moment.rows
        before[:] = _logps(trainer, rows)

    def end() -> None:
        changes = [b - a for a, b in zip(before, _logps(trainer, rows), strict=True)]
        sampled = np.concatenate([change[row.mask] for change, row in zip(changes, rows, strict=True)])
        found.append(float(np.mean(np.expm1(sampled) - sampled)) if sampled.size else 0.0)

    trainer.observe, trainer.finish = begin, end


def _logps(trainer: ReplayTrainer, rows: Sequence[Row]) -> list[np.ndarray]:
    learner = trainer.learner
    return [each.astype(np.float64) for each in learner.logprobs(learner.policy, rows)[0]]
