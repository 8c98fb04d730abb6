"""Which rows of which rollouts an optimizer step trains on. Imports no jax.

A rollout's rows are cut into slices of equal size, and each optimizer step takes the next slices of the series
that all passes over all rollouts make. With whole `prompts_per_step` and `updates_per_rollout` a step takes one slice.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from groupax.config import GRPOConfig

MOST_PARTS = 10_000  # of a whole, in fractions that are given as floats


@dataclass(frozen=True)
class Slices:
    """How rollouts become optimizer steps.

    Attributes:
        prompts_per_rollout: P of a rollout.
        per_rollout: slices that a rollout's rows are cut into.
        per_step: slices that an optimizer step takes.
        rows: of a slice.
        num_passes: over each rollout.
        drop_last: an epoch ends with a whole rollout, and with a step, however few slices it has.
    """

    prompts_per_rollout: int
    per_rollout: int
    per_step: int
    rows: int
    num_passes: int
    drop_last: bool

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps on each rollout, if a step takes one slice."""
        return self.per_rollout * self.num_passes // self.per_step

    def prompts_per_epoch(self, num_examples: int) -> int:
        """Prompts that an epoch visits.

        Raises:
            ValueError: an epoch has to end with a whole rollout, and there are not enough prompts for one.
        """
        if not self.drop_last:
            return num_examples
        if num_examples < self.prompts_per_rollout:
            raise ValueError(
                f"the dataset has {num_examples} prompts and a rollout takes {self.prompts_per_rollout}, of which an "
                "epoch visits whole ones (drop_last); lower prompts_per_step or updates_per_rollout"
            )
        return num_examples - num_examples % self.prompts_per_rollout

    def num_steps(self, num_examples: int, num_epochs: float | int, max_steps: int) -> int:
        """Optimizer steps of a run: `max_steps`, or what it takes to visit every prompt `num_epochs` times."""
        prompts = self.prompts_per_epoch(num_examples)
        if max_steps > 0:
            return max_steps
        if self.drop_last:
            slices = prompts // self.prompts_per_rollout * self.per_rollout * self.num_passes
            return math.ceil(num_epochs * math.ceil(slices / self.per_step))
        prompts_per_step = Fraction(self.prompts_per_rollout * self.per_step, self.per_rollout)
        return (
            max(1, math.ceil(num_examples * Fraction(num_epochs).limit_denominator(MOST_PARTS) / prompts_per_step))
            * self.num_passes
        )


def slices_of(args: GRPOConfig) -> Slices:
    """The slices that `prompts_per_step`, `num_generations`, `updates_per_rollout` and `num_iterations` ask for.

    Raises:
        ValueError: they cut a prompt or a completion.
    """
    prompts = Fraction(args.prompts_per_step).limit_denominator(MOST_PARTS)
    updates = Fraction(args.updates_per_rollout).limit_denominator(MOST_PARTS)
    of_rollout = prompts * updates
    rows = prompts * args.num_generations / updates.denominator
    if of_rollout.denominator != 1 or rows.denominator != 1 or rows < 1:
        raise ValueError(
            f"prompts_per_step {args.prompts_per_step} and updates_per_rollout {args.updates_per_rollout} make "
            f"rollouts of {of_rollout} prompts and steps of {prompts * args.num_generations} completions, cut "
            f"into {updates.numerator} and {updates.denominator} parts of {rows}; these must be whole numbers"
        )
    return Slices(
        int(of_rollout), updates.numerator, updates.denominator, int(rows), args.num_iterations, args.drop_last
    )
