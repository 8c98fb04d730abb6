"""The common base of trainers: what they answer to the run that they own, and the policy as a model to save."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from groupax.core.storage.hub import push_folder
from groupax.core.storage.replacing import replace_card
from groupax.core.types import Metrics
from groupax.events import Emit, Listener
from groupax.models.adapted import apply_adapter, without_changes
from groupax.models.lora import count_params, trainable_params_line
from groupax.models.specs import Params
from groupax.models.weights.checkpoint import Model
from groupax.models.weights.saving import save_adapter, save_model
from groupax.parallel import processes
from groupax.parallel.collectives import to_host_on_primary
from groupax.parallel.preemption import PreemptionHandler
from groupax.rollouts.pipeline import Policy
from groupax.rollouts.state import Cursor, Experience
from groupax.runs.checkpoints.choose import Saved
from groupax.runs.checkpoints.fingerprint import Identity
from groupax.runs.checkpoints.record import stored_dtype
from groupax.runs.diagnostics import Diagnose
from groupax.runs.folder import RunFolder
from groupax.runs.header import memory_facts, model_facts, recomputation
from groupax.runs.log import Evaluation
from groupax.runs.model_card import Trained, license_of, read_card, shown_name
from groupax.runs.progress.display import headline_text
from groupax.training.learner import Learner, LearnerSettings


@dataclass(frozen=True)
class Description:
    """The facts of a run that a user should know before its first step, most of them by label."""

    facts: Mapping[str, str]  # which its record has too
    plans: Mapping[str, str]  # the memory that it plans to use; likewise
    warnings: Sequence[str] = ()  # texts
    findings: Mapping[str, str] = field(default_factory=dict)  # what is wrong with its settings (see `diagnostics`)


@dataclass(frozen=True)
class TrainResult:
    """The result of `GRPOTrainer.train`.

    Attributes:
        num_steps: Optimizer steps.
        train_seconds: Wall time of the loop with evaluations and checkpoints, without loading and saving the model,
            including that of earlier processes of the run.
        rollout_tokens_per_s: Sampled tokens per second of sampling.
        metrics: Metrics of the last logged step.
    """

    num_steps: int
    train_seconds: float
    rollout_tokens_per_s: float
    metrics: Metrics

    def __repr__(self) -> str:
        """Returns the main figures in one line."""
        figures = f"{self.num_steps:,} steps in {self.train_seconds:.1f} s, {self.rollout_tokens_per_s:,.0f} tokens/s"
        return f"<TrainResult: {figures} of sampling, {headline_text(self.metrics)}>"


class Trainer(ABC):
    """The common base of trainers: the state of its loop, answers to its run, and the policy as its result.

    Attributes:
        args: Settings.
        listeners: Called with every event of the run; one that returns True ends the run.
        emit: Emits an event of the run.
        run_folder: Folder of the run.
        start_model: The model that the run starts from; weights that the learner has copied are dropped.
        learner: The policy under training.
        tokenizer: Tokenizer of the model.
        dataset_name: Source of the training data, for people.
        num_steps: Number of optimizer steps of the run.
        cursor: Progress of the run.
        experience: The rollout that is not used up, if there are rollouts.
        last_metrics: Metrics of the last logged step.
    """

    listeners: Sequence[Listener]
    emit: Emit
    run_folder: RunFolder
    start_model: Model
    learner: Learner
    tokenizer: Any
    dataset_name: str
    num_steps: int
    cursor = Cursor()
    experience: Experience | None = None
    last_metrics: Metrics = {}  # noqa: RUF012 - replaced, never changed
    args: Any

    @abstractmethod
    def describe(self) -> Description:
        """Returns what a user should know of the run before its first step."""

    @abstractmethod
    def identity(self) -> Identity:
        """Returns everything that a resumed run must have in common with this one."""

    @abstractmethod
    def diagnose(self) -> Diagnose:
        """Returns what finds faults of the run in its metrics."""

    @abstractmethod
    def restore(self, saved: Saved) -> None:
        """Continues from a checkpoint, after the learner did."""

    @abstractmethod
    def evaluate(self) -> Evaluation:
        """Evaluates the present policy on held-out data."""

    @abstractmethod
    def card(self) -> str:
        """Returns the card of the model."""

    def trained(self, is_chat: bool) -> Trained:
        """Returns what every card says of the model; prompts may be formatted with the tokenizer's chat template."""
        model, adapter = self.start_model, self.start_model.adapter
        base, config = (model.name, None) if adapter is None else (adapter.base_name, asdict(adapter.config))
        license_id, step = license_of(read_card(model.source)), self.cursor.step
        return Trained(self.args, base, config, self.dataset_name, (), step, self.last_metrics, is_chat, license_id)

    def description(self, facts: Mapping[str, str], num_rows: int, cache_bytes: int = 0) -> Description:
        """Returns a description with these facts and those of every run, for updates of `num_rows` rows.

        A rollout plans to use `cache_bytes` of a device's memory.
        """
        learner, choice = self.learner, self.args.gradient_checkpointing
        facts = {**model_facts(self.start_model), "data": self.dataset_name, **facts}
        facts |= recomputation(choice, learner.execution.checkpointing)
        return Description(facts, memory_facts(learner, num_rows, cache_bytes))

    def working(self, stop: PreemptionHandler) -> AbstractContextManager[object]:
        """Starts what only runs during training, and stops it at the end."""
        del stop
        return nullcontext()

    def policies(self, cursor: Cursor) -> Mapping[int, Policy]:
        """Returns earlier policies that a checkpoint has to keep."""
        del cursor
        return {}

    # -- the policy ------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        """Returns the model, the progress and the folder in one line; fields that are not created yet are left out."""
        own = vars(self)
        parts = [shown_name(self.start_model.name)] if "start_model" in own else []
        parts += [f"step {self.cursor.step:,} of {self.num_steps:,}"] if "num_steps" in own else []
        parts += [self.run_folder.uri] if "run_folder" in own else []
        return f"<{type(self).__name__}: {', '.join(parts)}>"

    @property
    def model(self) -> Model:
        """The present policy."""
        return self._model_with(self.learner.state.params, self.learner.policy)

    def save_model(self, folder: str | Path | None = None) -> Path:
        """Saves the current policy as a Hugging Face folder, by default the run's `model/`, in its original dtype.

        If an adapter is trained, only the adapter is saved, in PEFT's format. All processes must call this; the primary
        one writes.
        """
        model, target = self.model_to_write(), Path(folder or self.run_folder.path / "model")
        return processes.run_on_primary(lambda: self.write_model(model, target))

    def model_to_write(self) -> Model:
        """Returns the policy without the weights that are not saved, of several processes on the primary's host.

        All processes must call this.
        """
        adapter = self.start_model.adapter
        parts = self.learner.state.params, adapter and adapter.removed
        trained, removed = to_host_on_primary(parts) if processes.num_processes() > 1 else parts
        if adapter is None:
            return replace(self.start_model, params={**self.learner.untrained, **trained})
        return replace(self.start_model, params={}, adapter=replace(adapter, trained=trained, removed=removed))

    def write_model(self, model: Model, folder: Path) -> Path:
        """Writes a `model_to_write` as `save_model` does, in this process."""
        if model.adapter is not None:
            return save_adapter(model, folder, self.tokenizer, self.card())
        dtype = jnp.dtype(stored_dtype(self.start_model))
        return save_model(model, folder, self.tokenizer, dtype, card=self.card())

    def push_to_hub(self, repo_id: str, private: bool = True) -> str:
        """Saves the current policy in the run's `model/`, uploads it to "owner/name", and returns its address.

        A new repository is private by default.
        """
        folder = self.save_model()
        return processes.run_on_primary(lambda: push_folder(folder, repo_id, private))

    def write_card(self) -> None:
        """Rewrites the card of the run's `model/` with the evaluations since it was saved."""
        processes.run_on_primary(partial(replace_card, self.run_folder.path / "model", self.card()))

    def print_trainable_parameters(self) -> None:
        """Prints the number of trained parameters in PEFT's format."""
        adapter = self.start_model.adapter
        print(trainable_params_line(*count_params(self.start_model.config, adapter and adapter.config)))

    def _model_with(self, trained: Params, policy: Params) -> Model:
        adapter = self.start_model.adapter and replace(self.start_model.adapter, trained=trained)
        return replace(self.start_model, params=policy, adapter=adapter)


def make_learner(trainer: Trainer, settings: LearnerSettings, longest: tuple[int, int]) -> Learner:
    """Returns the learner of a trainer's model."""
    model = trainer.start_model
    learner = Learner(model, settings, trainer.num_steps, longest)
    if model.adapter is not None and learner.frozen is not None:
        base = without_changes(learner.frozen)
        adapter = replace(model.adapter, frozen=base)  # frees those loaded in another dtype
        trainer.start_model = replace(model, params=apply_adapter(learner.frozen, adapter.trained), adapter=adapter)
    return learner
