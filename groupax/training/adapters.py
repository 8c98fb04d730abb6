"""Several adapters of one base, each with a learner of its own."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np

from groupax.core.types import Metrics, Row
from groupax.models.adapted import Changes, apply_adapter, stack_adapters
from groupax.models.execution import Execution
from groupax.models.specs import Params
from groupax.models.weights.checkpoint import Model
from groupax.parallel.collectives import weights_digest
from groupax.training.learner import Learner, LearnerSettings, Update
from groupax.training.state import TrainState

SUMMED = ("loss_tokens", "micro_batches", "time/train_s")
LARGEST = ("update_skipped", "memory/peak_bytes")
OF_ALL = ("padding_frac", "micro_batches", "mfu")  # metrics of the work, like those with these prefixes
PREFIXES = ("time/", "train/", "memory/")


class AdapterLearners:
    """The learners of several adapters of one base, in the place of a `Learner`.

    Each adapter is updated with the rows that it has sampled, by its own optimizer, with its own clipping and its own
    denominators, as in a run of its own. Adapters without rows in a step stay as they are.

    Args:
        model: Base with a new adapter, which all of them start as.
        names: Names of the adapters.
        settings: How updates are computed.
        num_steps: Optimizer steps of the learning rate schedule.
        longest: Tokens of the longest prompt and of the longest completion to expect; 0 for unknown.

    Attributes:
        each: Learner of each adapter, by its name. They share the base.
        state: Master weights and optimizer states, by the names of the adapters.
        policy: Weights in compute dtype with all adapters, for the engine.
    """

    def __init__(
        self,
        model: Model,
        names: Sequence[str],
        settings: LearnerSettings,
        num_steps: int,
        longest: tuple[int, int] = (0, 0),
    ) -> None:
        self.each: dict[str, Learner] = {}
        for name in names:
            self.each[name] = learner = Learner(model, settings, num_steps, longest)
            assert model.adapter is not None, "the model has an adapter"
            assert learner.frozen is not None, "its base is frozen"
            adapter = replace(model.adapter, frozen=learner.frozen)
            model = replace(model, params=apply_adapter(adapter.frozen, adapter.trained), adapter=adapter)
        first = self._first
        self.config, self.mesh, self.settings, self.dtype = first.config, first.mesh, first.settings, first.dtype
        self.frozen, self.dropout_rate, self.reference = first.frozen, first.dropout_rate, first.reference
        self.is_adapter, self.untrained, self.features = first.is_adapter, first.untrained, first.features
        for learner in self.each.values():
            learner.features = self.features
        self.state = self._state()
        self.policy = self._policy()

    @property
    def _first(self) -> Learner:
        return next(iter(self.each.values()))

    @property
    def execution(self) -> Execution:
        """The settings with which programs are executed."""
        return self._first.execution

    @property
    def shapes(self) -> Any:
        """Shapes of the micro-batches of each learner so far, by its name."""
        return {name: learner.shapes for name, learner in self.each.items()}

    @shapes.setter
    def shapes(self, shapes: Any) -> None:
        for name, learner in self.each.items():
            learner.shapes = shapes[name]

    @property
    def device_lock(self) -> AbstractContextManager[object]:
        """Held while a program runs."""
        return self._first.device_lock

    @device_lock.setter
    def device_lock(self, lock: AbstractContextManager[object]) -> None:
        for learner in self.each.values():
            learner.device_lock = lock

    def restore(self, state: TrainState, reference: Params | None) -> None:
        """Continues from saved states."""
        for name, learner in self.each.items():
            learner.restore(TrainState(state.params[name], state.opt_state[name]), reference)
        self.state, self.policy = self._state(), self._policy()

    def reference_on_devices(self) -> AbstractContextManager[Params]:
        """Puts the reference's weights on the devices for the duration of the block."""
        return self._first.reference_on_devices()

    def update(self, rows: Sequence[Row]) -> Update:
        """Takes an optimizer step of each adapter that has rows."""
        updates = {name: self.each[name].update(own) for name, own in self._split(rows)}
        self.state, self.policy = self._state(), self._policy()
        scores = {name: zip(update.logps, update.entropies, strict=True) for name, update in updates.items()}
        # of the base's own turns only their log-probs as they were sampled are known
        nothing = ((row.rollout_logp, np.zeros(len(row.completion), np.float32)) for row in rows if not row.adapter)
        pairs = [next(scores[row.adapter] if row.adapter else nothing) for row in rows]
        distributions = {
            f"{kind}/{name}": values
            for name, update in updates.items()
            for kind, values in update.distributions.items()
        }
        applied = all(update.applied for update in updates.values())
        metrics = _merged({name: update.metrics for name, update in updates.items()})
        return Update(metrics, applied, [logp for logp, _ in pairs], [entropy for _, entropy in pairs], distributions)

    def digest(self) -> str:
        """Returns a digest of the trained weights of all adapters, which does not depend on their sharding."""
        with self.device_lock:
            return weights_digest(self.state.params)

    def snapshot(self) -> Params:
        """Returns the trained weights of all adapters in compute dtype as they are now."""
        return {name: learner.snapshot() for name, learner in self.each.items()}

    def policy_of(self, snapshot: Params) -> Params:
        """Returns the weights of a snapshot in the form that the engine samples from."""
        assert self.frozen is not None, "the base is frozen"
        changes = [Changes(snapshot[name], self.frozen.scale) for name in self.each]
        return stack_adapters(self.frozen.params, changes)

    def logprobs(self, params: Params, rows: Sequence[Row]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Computes log-probs and entropies as `Learner.logprobs` does, under `policy` those of each row's adapter."""
        is_policy = params is self.policy
        found = {}
        for name, own in self._split(rows):
            learner = self.each[name]
            logps, entropies = learner.logprobs(learner.policy if is_policy else params, own)
            found[name] = zip(logps, entropies, strict=True)
        nothing = ((row.rollout_logp, np.zeros(len(row.completion), np.float32)) for row in rows if not row.adapter)
        pairs = [next(found[row.adapter] if row.adapter else nothing) for row in rows]
        return [logp for logp, _ in pairs], [entropy for _, entropy in pairs]

    def _split(self, rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
        """Yields the rows of each adapter that has any."""
        for name in self.each:
            own = [row for row in rows if row.adapter == name]
            if own:
                yield name, own

    def _state(self) -> TrainState:
        states = {name: learner.state for name, learner in self.each.items()}
        params = {name: state.params for name, state in states.items()}
        return TrainState(params, {name: state.opt_state for name, state in states.items()})

    def _policy(self) -> Params:
        return self.policy_of({name: learner.trained() for name, learner in self.each.items()})


# What computes the updates of a run.
PolicyLearner = Learner | AdapterLearners


def _merged(metrics: Mapping[str, Metrics]) -> Metrics:
    """Returns the metrics of a step: means over all loss tokens, sums and maxima, and those of each adapter."""
    if not metrics:  # the base alone has spoken
        return {"loss": 0.0, "grad_norm": 0.0, "update_skipped": 0.0, "loss_tokens": 0.0}
    counts = np.array([each["loss_tokens"] for each in metrics.values()])
    weights = counts / counts.sum() if counts.any() else np.full(len(counts), 1 / len(counts))
    merged: Metrics = {}
    for name in dict.fromkeys(name for each in metrics.values() for name in each):
        known = [(each[name], weight) for each, weight in zip(metrics.values(), weights, strict=True) if name in each]
        values, own = (np.array(pair, float) for pair in zip(*known, strict=True))
        if name in SUMMED:
            merged[name] = float(values.sum())
        elif name in LARGEST:
            merged[name] = float(values.max())
        else:
            merged[name] = float(np.average(values, weights=own if own.any() else None))
    for adapter, each in metrics.items():
        of_adapter = {name: value for name, value in each.items() if not name.startswith((*PREFIXES, *OF_ALL))}
        merged |= {f"adapters/{adapter}/{name}": value for name, value in of_adapter.items()}
    return merged
