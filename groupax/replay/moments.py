"""A learner as it is before an update, on the host, to which it can return."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from groupax.objective.entropy import EntropyState
from groupax.rollouts.state import Cursor, Experience
from groupax.training.adapters import AdapterLearners, PolicyLearner
from groupax.training.learner import Learner
from groupax.types import Rollout, Row


@dataclass(frozen=True, eq=False)
class Moment:
    """A run before an update.

    Attributes:
        rows: Rows of the update.
        indices: Index of each row's completion among those of the rollout; a further stream of an episode has None.
        experience: The rollout that the rows are of.
        cursor: Progress of the run before that rollout, if this is the first update on it, else before the update.
        state: Weights and optimizer state.
        reference: Weights of the reference, if it moves.
        progress: Number of updates and state of the entropy bonus of each learner.
    """

    rows: Sequence[Row]
    indices: Sequence[int | None]
    experience: Experience
    cursor: Cursor
    state: Any
    reference: Any
    progress: Sequence[tuple[int, EntropyState]]

    @property
    def completions(self) -> list[Rollout]:
        """The completions of the rollout."""
        return [rollout for group in self.experience.groups for rollout in group]

    def parts(self) -> dict[int, list[int]]:
        """Returns the indices of the rows of each completion, by the completion's index."""
        parts: dict[int, list[int]] = {}
        number = 0
        for row, index in enumerate(self.indices):
            number = number if index is None else index
            parts.setdefault(number, []).append(row)
        return parts


def moment_of(learner: PolicyLearner, experience: Experience, cursor: Cursor) -> Moment:
    """Returns the present moment before the next update on a rollout."""
    moves = not isinstance(learner, AdapterLearners) and learner.settings.sync_ref_model
    return Moment(
        experience.next_rows(),
        experience.next_indices(),
        experience,
        cursor,
        _copied(learner.state),
        _copied(learner.reference) if moves else None,
        [(each.num_updates, each.entropy) for each in _each(learner)],
    )


def return_to(learner: PolicyLearner, moment: Moment) -> None:
    """Gives a learner the weights and the optimizer state of a moment; shapes that it knows stay known."""
    reference = None if moment.reference is None else _placed(moment.reference)
    learner.restore(_placed(moment.state), reference)
    for each, (num_updates, entropy) in zip(_each(learner), moment.progress, strict=True):
        each.num_updates, each.entropy = num_updates, entropy


def _each(learner: PolicyLearner) -> list[Learner]:
    return [*learner.each.values()] if isinstance(learner, AdapterLearners) else [learner]


@dataclass(frozen=True, eq=False)
class _Placed:
    array: np.ndarray
    sharding: Any


def _copied(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: _Placed(np.array(leaf, copy=True), leaf.sharding), tree)


def _placed(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.device_put(leaf.array, leaf.sharding), tree)
