"""Checks after each step that end a run which cannot succeed."""

from collections.abc import Sequence

from groupax.errors import RewardError
from groupax.events import Emit, Message
from groupax.parallel import processes
from groupax.runs.diagnostics import START_STEPS, UNSCORED_ROLLOUTS, num_unscored_steps
from groupax.runs.folder import RunFolder
from groupax.runs.log import RunLog
from groupax.training.learner import Update
from groupax.types import Row


def report_skipped_update(step: int, update: Update, rows: Sequence[Row], folder: RunFolder, emit: Emit) -> None:
    """Writes the batch of an update that was not finite, and warns of it."""
    path = processes.run_on_primary(lambda: folder.write_bad_batch(step, rows))
    loss, grad_norm = update.metrics["loss"], update.metrics["grad_norm"]
    emit(
        Message(
            f"step {step}: the loss ({loss}) or the gradient's norm ({grad_norm}) is not finite; the update was "
            f"skipped, its batch is in {folder.uri_of(f'bad_steps/{path.name}')}",
            warning=True,
        )
    )


def stop_if_nothing_is_scored(
    log: RunLog, step: int, num_steps: int, updates_per_rollout: int, rewards: Sequence[str]
) -> None:
    """Ends a run in which no completion receives a reward.

    A few rollouts without any reward may happen where rewards apply to some prompts only; more are a mistake.

    Args:
        log: Log of the run.
        step: Optimizer steps so far.
        num_steps: Optimizer steps of the run.
        updates_per_rollout: Optimizer steps on each rollout.
        rewards: Names of the reward functions.

    Raises:
        RewardError: there has been no reward for several rollouts, or in the whole run.
    """
    unscored = num_unscored_steps(log.diagnostics.history)
    patience = min(UNSCORED_ROLLOUTS * max(1, updates_per_rollout), START_STEPS)
    if unscored >= patience or unscored == step == num_steps:
        names = ", ".join(map(repr, rewards))
        raise RewardError(
            f"in steps {step - unscored + 1} to {step} no completion had a reward: every function ({names}) "
            "returned None for every one of them. None means that a function does not apply to a completion; "
            "return a number for those that it judges, and check that the dataset has what the functions look at"
        )
