"""The results of a run: the policy under training as a model, in folders and on the hub."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from groupax.events import Emit
from groupax.models.adapted import apply_adapter
from groupax.models.checkpoint import Model
from groupax.models.lora import count_params, trainable_params_line
from groupax.models.saving import save_adapter, save_model
from groupax.models.specs import Params
from groupax.parallel import processes
from groupax.parallel.transfer import to_host_on_primary
from groupax.rollouts.state import Cursor
from groupax.runs.checkpoints.record import stored_dtype
from groupax.runs.folder import RunFolder
from groupax.runs.model_card import shown_name
from groupax.storage.hub import push_folder
from groupax.storage.replacing import replace_card
from groupax.training.adapters import AdapterLearners, PolicyLearner


class PolicyResults:
    """What a trainer offers of the policy that it trains.

    Attributes:
        start_model: The model that the run starts from; weights that the learner has copied are dropped.
        learner: The policy under training.
        tokenizer: Tokenizer of the model.
        run_folder: Folder of the run.
        emit: Emits an event of the run.
        cursor: Progress of the run.
        num_steps: Number of optimizer steps of the run.
    """

    start_model: Model
    learner: PolicyLearner
    tokenizer: Any
    run_folder: RunFolder
    emit: Emit
    cursor: Cursor
    num_steps: int

    @abstractmethod
    def card(self) -> str:
        """Returns the card of the model."""

    def __repr__(self) -> str:
        """Returns the model, the progress and the folder in one line; fields that are not created yet are left out."""
        own = vars(self)
        parts = [shown_name(self.start_model.name)] if "start_model" in own else []
        parts += [f"step {self.cursor.step:,} of {self.num_steps:,}"] if "num_steps" in own else []
        parts += [self.run_folder.uri] if "run_folder" in own else []
        return f"<{type(self).__name__}: {', '.join(parts)}>"

    @property
    def model(self) -> Model:
        """The present policy.

        Raises:
            ValueError: the run trains several adapters (see `adapters`).
        """
        if names := adapter_names(self.learner):
            raise ValueError(f"this run has a policy for each of its adapters: use adapters[{names[0]!r}]")
        return self._model_with(self.learner.state.params, self.learner.policy)

    @property
    def adapters(self) -> dict[str, Model]:
        """The present policies of a run that trains several adapters, by their names; empty for other runs."""
        return {name: self._adapter(self.learner.state.params[name]) for name in adapter_names(self.learner)}

    def save_model(self, folder: str | Path | None = None) -> Path:
        """Saves the current policy as a Hugging Face folder, by default the run's `model/`, in its original dtype.

        If an adapter is trained, only the adapter is saved, in PEFT's format; each of several ones in a folder of its
        name. All processes must call this; the primary one writes.
        """
        params, target = self.host_params(), Path(folder or self.run_folder.path / "model")
        return processes.run_on_primary(lambda: self.write_model(params, target))

    def host_params(self) -> Params:
        """Returns the trained weights, on the primary process's host if there are several. All processes call this."""
        params = self.learner.state.params
        return to_host_on_primary(params) if processes.num_processes() > 1 else params

    def write_model(self, params: Params, folder: Path) -> Path:
        """Writes trained weights as `save_model` does, in this process."""
        if names := adapter_names(self.learner):
            for name in names:
                save_adapter(self._adapter(params[name]), folder / name, self.tokenizer, self.card())
            return folder
        if self.start_model.adapter is not None:
            return save_adapter(self._model_with(params, {}), folder, self.tokenizer, self.card())
        trained = replace(self.start_model, params={**self.learner.untrained, **params})
        dtype = jnp.dtype(stored_dtype(self.start_model))
        return save_model(trained, folder, self.tokenizer, dtype, card=self.card())

    def push_to_hub(self, repo_id: str, private: bool = True) -> str:
        """Saves the current policy in the run's `model/`, uploads it, and returns its address (see `hub.push_folder`).

        Args:
            repo_id: "owner/name".
            private: Whether a new repository is private.

        Raises:
            ValueError: the run trains several adapters, each of which is pushed by itself (`groupax push`).
        """
        if adapter_names(self.learner):
            raise ValueError("push each adapter by itself: groupax push RUN/model/NAME OWNER/REPOSITORY")
        folder = self.save_model()
        return processes.run_on_primary(lambda: push_folder(folder, repo_id, private))

    def write_card(self) -> None:
        """Rewrites the card of the run's `model/` with the evaluations since it was saved."""
        for folder in result_folders(self.run_folder.path / "model", self.learner):
            processes.run_on_primary(partial(replace_card, folder, self.card()))

    def print_trainable_parameters(self) -> None:
        """Prints the number of trained parameters in PEFT's format."""
        adapter = self.start_model.adapter
        print(trainable_params_line(*count_params(self.start_model.config, adapter and adapter.config)))

    def _model_with(self, trained: Params, policy: Params) -> Model:
        adapter = self.start_model.adapter and replace(self.start_model.adapter, trained=trained)
        return replace(self.start_model, params=policy, adapter=adapter)

    def _adapter(self, trained: Params) -> Model:
        assert self.start_model.adapter is not None, "the model has an adapter"
        return self._model_with(trained, apply_adapter(self.start_model.adapter.frozen, trained))


def adapter_names(learner: PolicyLearner) -> Sequence[str]:
    """Returns the names of the adapters that are trained together; none for a run that trains one policy."""
    return [*learner.each] if isinstance(learner, AdapterLearners) else []


def result_folders(folder: Path, learner: PolicyLearner) -> list[Path]:
    """Returns the folders of a run's results: the given one, or one in it for each of several adapters."""
    return [folder / name for name in adapter_names(learner)] or [folder]
