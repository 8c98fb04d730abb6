"""The optimizer steps of a run: how many there are, and how rollouts become steps. Imports no jax."""

import math
from dataclasses import dataclass
from fractions import Fraction

from groupax.core.config import GRPOConfig, SFTConfig

MAX_DENOMINATOR = 10_000  # of a number of epochs


@dataclass(frozen=True)
class UpdateSchedule:
    """A schedule of optimizer steps: each update takes the next minibatch of the passes over a rollout."""

    prompts_per_rollout: int  # prompts that each rollout trains on
    minibatches: int  # minibatches that the rows of a rollout are cut into
    rows: int  # rows of a minibatch
    num_passes: int  # passes over each rollout
    drop_last: bool  # whether an epoch drops its last incomplete rollout

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps on each rollout, in all passes."""
        return self.minibatches * self.num_passes

    @property
    def rows_per_step(self) -> int:
        """Completions of an optimizer step."""
        return self.rows

    def prompts_per_epoch(self, num_examples: int) -> int:
        """Returns the number of prompts that an epoch visits.

        Raises:
            ValueError: there are fewer prompts than a rollout takes, and the incomplete rollout is dropped.
        """
        if not self.drop_last:
            return num_examples
        if num_examples < self.prompts_per_rollout:
            raise ValueError(
                f"the dataset has {num_examples} prompts and a rollout takes {self.prompts_per_rollout}, which leaves "
                "nothing of an epoch (drop_last); lower prompts_per_step or updates_per_rollout"
            )
        return num_examples - num_examples % self.prompts_per_rollout

    def num_steps(self, num_examples: int, num_epochs: float | int, max_steps: int) -> int:
        """Returns the optimizer steps of a run: `max_steps`, or those that visit every prompt `num_epochs` times."""
        prompts = self.prompts_per_epoch(num_examples)
        if max_steps > 0:
            return max_steps
        if self.drop_last:
            return math.ceil(num_epochs * (prompts // self.prompts_per_rollout) * self.updates_per_rollout)
        epochs = _exact(num_epochs)
        return max(1, math.ceil(num_examples * epochs * self.minibatches / self.prompts_per_rollout)) * self.num_passes


def update_schedule(args: GRPOConfig) -> UpdateSchedule:
    """Returns the schedule that the settings ask for."""
    return UpdateSchedule(
        args.prompts_per_step * args.updates_per_rollout,
        args.updates_per_rollout,
        args.prompts_per_step * args.num_generations,
        args.num_iterations,
        args.drop_last,
    )


def supervised_steps(args: SFTConfig, num_sequences: int) -> tuple[int, int]:
    """Returns the optimizer steps of an epoch over sequences, and those of a run of supervised fine-tuning.

    Raises:
        ValueError: there are fewer sequences than a step takes, and the incomplete step is dropped.
    """
    size = args.batch_size
    steps = num_sequences // size if args.drop_last else -(-num_sequences // size)
    if not steps:
        raise ValueError(
            f"the dataset has {num_sequences} sequences and a step takes {size}, which leaves nothing of an epoch "
            "(drop_last); lower batch_size"
        )
    return steps, args.max_steps if args.max_steps > 0 else max(1, math.ceil(_exact(args.num_train_epochs) * steps))


def _exact(num_epochs: float | int) -> Fraction:
    """Returns a number of epochs without its rounding, which would add a step to 0.1 epochs of 10 steps."""
    return Fraction(num_epochs).limit_denominator(MAX_DENOMINATOR)
