"""The part of TRL's trainers that does not depend on their data: callbacks, the model, resuming, saving, uploading."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from groupax.compat import hf
from groupax.compat.callbacks import CallbackListener, State
from groupax.compat.trl.layout import Flow, TRLFolders, checkpoint_to_resume, flow_of, run_folder
from groupax.compat.trl.overrides import check_assigned
from groupax.compat.trl.policy import Policy, TrainedModel, adapter_settings
from groupax.compat.trl.reports import TRAINER_STATE, Reports
from groupax.models.saving import source_folders
from groupax.parallel.runtime import configure_jax
from groupax.settings.fields import nearest
from groupax.storage.buckets import is_remote
from groupax.storage.hub import push_folder
from groupax.storage.replacing import check_disjoint
from groupax.types import Metrics


class TrainOutput(NamedTuple):
    """The result of `train`, like transformers' class."""

    global_step: int
    training_loss: float
    metrics: Mapping[str, float]


class BaseTrainer(Reports):
    """The part of a trainer that does not depend on its data.

    Attributes:
        native: The native trainer.
        callbacks: Callbacks of transformers.
        eval_dataset: Evaluation set or sets that the trainer was given.
    """

    native: Any
    eval_dataset: Any
    _trained: TrainedModel
    _flow: Flow | None

    def __setattr__(self, name: str, value: Any) -> None:
        check_assigned(self, name)
        super().__setattr__(name, value)

    def _prepare(self, args: Any, settings: Any, policy: Policy, callbacks: Sequence[Any] | None) -> tuple[Any, Policy]:
        """Sets the state, and returns settings and policy with the layout of folders and a quantized base."""
        self.args, where = args, settings.output_dir
        if not is_remote(where):  # absolute, since a reward may change the working directory
            where = str(Path(where).expanduser().absolute())
        self._output_dir = where
        self.state = State(num_train_epochs=math.ceil(args.num_train_epochs), logging_steps=settings.logging_steps)
        self.callbacks = list(callbacks or [])
        self._listeners: list[Any] = []
        self._listener: CallbackListener | None = None
        self._flow = flow_of(args, self._output_dir, self.state)
        if self._flow is not None:
            more = {"save_total_limit": None, "metric_for_best_model": None}  # see `Flow`
            settings = replace(settings, output_dir=run_folder(self._output_dir), **more)
        if policy.weights != "same":
            settings = replace(settings, base_weights=policy.weights, **adapter_settings(policy.peft_config))
            policy = replace(policy, peft_config=None)
        return settings, policy

    def _finish(self, policy: Policy, has_eval_sets: bool) -> None:
        """Connects the native trainer with the model object and the folders."""
        trainer = self.native
        check_disjoint(Path(self._output_dir), () if self._flow is None else source_folders(trainer.model))
        if self._flow is not None:
            trainer.run.hooks = TRLFolders(self._flow, has_eval_sets)
        self._trained = TrainedModel(policy.owner, trainer)
        self.args.warn_about_mesh(trainer.model)
        self.state.max_steps = trainer.num_steps

    @property
    def model(self) -> Any:
        """The policy: the given model object, which is trained in place, or a `compat.hf` model of a given name."""
        return self._trained.model

    @property
    def processing_class(self) -> Any:
        """The tokenizer of the policy."""
        return self.native.tokenizer

    def add_callback(self, callback: Any) -> None:
        """Adds a callback."""
        self.callbacks.append(callback)
        self._listener = None

    def remove_callback(self, callback: Any) -> None:
        """Removes a callback, or all callbacks of a class."""
        self.callbacks = [own for own in self.callbacks if own is not callback and type(own) is not callback]
        self._listener = None

    def pop_callback(self, callback: Any) -> Any:
        """Removes a callback, or the first one of a class, and returns it; None if there is none."""
        found = next((own for own in self.callbacks if own is callback or type(own) is callback), None)
        if found is not None:
            self.callbacks = [own for own in self.callbacks if own is not found]
            self._listener = None
        return found

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Writes the current policy, or its adapter, and the tokenizer; other files in the folder are kept.

        Args:
            output_dir: Folder to write to; by default that of the settings.
        """
        if output_dir is None and is_remote(self._output_dir):
            self.native.save_model()
        else:
            hf.save_policy(self.native, output_dir or self._output_dir)

    def push_to_hub(self, **inert: Any) -> str:
        """Uploads the current policy as `hub_model_id`, by default the name of `output_dir`."""
        hf.warn_inert(inert, {"commit_message", "blocking", "token", "revision", "dataset_name", "tags"}, "push_to_hub")
        repo_id = self.args.hub_model_id or Path(self._output_dir).name
        return push_folder(self.native.save_model(), repo_id, private=bool(self.args.hub_private_repo))

    def _resume(self, resume: bool | str | None) -> bool:
        """Sets what the native trainer continues from; returns whether that is a checkpoint."""
        resume = resume or self.args.resume_from_checkpoint
        chosen = checkpoint_to_resume(resume, self._output_dir) if resume else "never"
        self.native.args = replace(self.native.args, resume=chosen)
        if (state := Path(chosen) / TRAINER_STATE).is_file():
            self.state.load_json(state)
        return chosen != "never"

    def _output(self, result: Any, listener: CallbackListener) -> TrainOutput:
        """Returns the result of a training that has ended."""
        self._trained.report_cost(result.train_seconds)
        if self.args.push_to_hub:
            self.push_to_hub()
        return TrainOutput(result.num_steps, listener.summary["train_loss"], {**result.metrics, **listener.summary})

    def _new_listener(
        self, steps_per_epoch: int, rows_per_step: int, log: Callable[[int, Metrics], None] | None = None
    ) -> CallbackListener:
        """Returns the listener that calls the callbacks and keeps the state."""
        more = {"model": self.model, "processing_class": self.processing_class, "train_dataloader": None}
        inputs = self.callbacks, self.args, steps_per_epoch, self.state, more, rows_per_step
        listener = CallbackListener(*inputs, log=log)
        if self._flow is not None:
            self._flow.control = listener.control
        return listener

    def _eval_set(self, name: str) -> Any:
        if not isinstance(self.eval_dataset, Mapping) or name not in self.eval_dataset:
            known = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else ()
            raise ValueError(f"there is no evaluation set {name!r}; give a dataset, or its name{nearest(name, known)}")
        return self.eval_dataset[name]


def num_accelerators() -> int:
    """Returns the device count that `per_device_train_batch_size` refers to; a process on CPU counts as one device."""
    configure_jax()
    return jax.process_count() if jax.default_backend() == "cpu" else jax.device_count()
