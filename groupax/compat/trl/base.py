"""The parts of TRL's trainers besides their data: callbacks, the model, resuming, saving, reports, the accelerator."""

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax

from groupax.compat import hf
from groupax.compat.callbacks import CallbackListener, State
from groupax.compat.trl.arguments import torch_cpu
from groupax.compat.trl.layout import TRAINER_STATE, TRLFolders, checkpoint_to_resume, folders_of, run_folder
from groupax.compat.trl.overridden import REFUSED
from groupax.compat.trl.policy import Policy, TrainedModel, adapter_settings
from groupax.metrics.completions import json_numbers
from groupax.models.lora import count_params
from groupax.models.weights.saving import source_folders
from groupax.parallel import processes
from groupax.parallel.runtime import configure_jax
from groupax.settings.fields import nearest
from groupax.storage.buckets import is_remote
from groupax.storage.hub import push_folder
from groupax.storage.replacing import check_disjoint
from groupax.types import Metrics


class Accelerator:
    """The processes of a run, with the names of accelerate's class.

    One process uses all devices of its machine, so `num_processes` counts machines. Tensors of scripts are on the CPU.
    """

    is_local_main_process, local_process_index = True, 0  # each machine has one process
    num_processes = property(lambda _: processes.num_processes())
    process_index = property(lambda _: processes.process_index())
    is_main_process = property(lambda _: processes.is_primary())
    device = property(lambda _: torch_cpu())

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer.accelerator has no {name!r}: groupax trains with JAX, without accelerate; what it offers is "
            f"{', '.join(each for each in dir(type(self)) if not each.startswith('_'))}"
        )

    def print(self, *values: Any, **named: Any) -> None:
        """Prints in the main process only."""
        if self.is_main_process:
            print(*values, **named)

    def wait_for_everyone(self) -> None:
        """Waits until all processes have come to this call."""
        processes.all_gather_object(None)

    def unwrap_model(self, model: Any, **_: Any) -> Any:
        """Returns the model itself, which nothing wraps."""
        return model


class TrainOutput(NamedTuple):
    """The result of `train`, like transformers' class."""

    global_step: int
    training_loss: float
    metrics: Mapping[str, float]


class BaseTrainer:
    """The part of a trainer that does not depend on its data.

    Attributes:
        args: Settings.
        state: Progress of the run.
        native: The native trainer.
        callbacks: Callbacks of transformers.
        eval_dataset: Evaluation set or sets that the trainer was given.
    """

    # Methods that subclasses may not override, with what to do instead.
    REFUSED_OVERRIDES: ClassVar[Mapping[str, str]] = REFUSED

    args: Any
    state: State
    native: Any
    eval_dataset: Any
    _output_dir: str
    _trained: TrainedModel
    _folders: TRLFolders | None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in REFUSED:  # a replaced method has no more effect than an overridden one
            raise AttributeError(
                f"{name} of {type(self).__name__} is assigned, which groupax would never call: {REFUSED[name]}"
            )
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
        self._folders = folders_of(args, self._output_dir, self.state)
        if self._folders is not None:
            more = {"save_total_limit": None, "metric_for_best_model": None}  # see `TRLFolders`
            settings = replace(settings, output_dir=run_folder(self._output_dir), **more)
        if policy.weights != "same":
            settings = replace(settings, base_weights=policy.weights, **adapter_settings(policy.peft_config))
            policy = replace(policy, peft_config=None)
        return settings, policy

    def _finish(self, policy: Policy, has_eval_sets: bool) -> None:
        """Connects the native trainer with the model object and the folders."""
        trainer = self.native
        check_disjoint(Path(self._output_dir), () if self._folders is None else source_folders(trainer.model))
        if self._folders is not None:
            self._folders.has_eval_sets = has_eval_sets
            trainer.run.hooks = self._folders
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

    @functools.cached_property
    def accelerator(self) -> Accelerator:
        """The processes of the run, with the names of accelerate's class."""
        return Accelerator()

    def is_world_process_zero(self) -> bool:
        """Returns whether this is the process that prints and writes."""
        return processes.is_primary()

    def is_local_process_zero(self) -> bool:
        """Returns whether this is the first process of its machine; groupax has one on each."""
        return True

    def get_num_trainable_parameters(self) -> int:
        """Returns the number of weights that are trained."""
        model = self.native.model
        return count_params(model.config, model.adapter and model.adapter.config)[0]

    # -- callbacks

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
            self.remove_callback(found)
        return found

    def _new_listener(
        self, steps_per_epoch: int, rows_per_step: int, log: Callable[[int, Metrics], None] | None = None
    ) -> CallbackListener:
        """Returns the listener that calls the callbacks and keeps the state."""
        more = {"model": self.model, "processing_class": self.processing_class, "train_dataloader": None}
        listener = CallbackListener(
            self.callbacks, self.args, steps_per_epoch, self.state, more, rows_per_step, log=log
        )
        if self._folders is not None:
            self._folders.control = listener.control
        return listener

    # -- training, saving, uploading

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
        if self.args.push_to_hub:
            self.push_to_hub()
        return TrainOutput(result.num_steps, listener.summary["train_loss"], {**result.metrics, **listener.summary})

    def _eval_set(self, name: str) -> Any:
        sets = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else {}
        if name not in sets:
            raise ValueError(f"there is no evaluation set {name!r}; give a dataset, or its name{nearest(name, sets)}")
        return sets[name]

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

    def end(self) -> None:
        """Does nothing: the trackers have been closed when training ended."""

    # -- reports

    def log_metrics(self, split: str, metrics: Mapping[str, float]) -> None:
        """Prints metrics.

        Args:
            split: What they are about, e.g. "train" or "eval".
            metrics: Values by name.
        """
        if self.is_world_process_zero():
            print(f"***** {split} metrics *****")
            for name, value in sorted(metrics.items()):
                print(f"  {name} = {round(value, 4) if isinstance(value, float) else value}")

    def save_metrics(self, split: str, metrics: Mapping[str, float], combined: bool = True) -> None:
        """Writes metrics to a file in `output_dir`.

        Args:
            split: What they are about; the file is `<split>_results.json`.
            metrics: Values by name.
            combined: Whether to add them to `all_results.json` too.
        """
        if not self.is_world_process_zero():
            return
        folder = self._report_folder()
        _write(folder / f"{split}_results.json", metrics)
        if combined:
            everything = folder / "all_results.json"
            earlier = json.loads(everything.read_text(encoding="utf-8")) if everything.is_file() else {}
            _write(everything, {**earlier, **metrics})

    def save_state(self) -> None:
        """Writes the state with the log's lines to `trainer_state.json` in `output_dir`."""
        if self.is_world_process_zero():
            self.state.save_to_json(self._report_folder() / TRAINER_STATE)

    def _report_folder(self) -> Path:
        if is_remote(self._output_dir):
            raise ValueError(f"output_dir is a bucket, {self._output_dir}; these files need a local folder")
        folder = Path(self._output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def check_optimizers(optimizers: tuple[Any, Any]) -> None:
    """Raises a ValueError if a script gives an optimizer or a scheduler of PyTorch."""
    if any(each is not None for each in optimizers):
        raise ValueError(
            "optimizers of PyTorch cannot train weights of JAX: set optim, learning_rate, weight_decay and "
            "lr_scheduler_type in the config"
        )


def num_accelerators() -> int:
    """Returns the device count that `per_device_train_batch_size` refers to; a process on CPU counts as one device."""
    configure_jax()
    return jax.process_count() if jax.default_backend() == "cpu" else jax.device_count()


def _write(path: Path, metrics: Mapping[str, float]) -> None:
    path.write_text(json.dumps(json_numbers(metrics), indent=4, sort_keys=True) + "\n", encoding="utf-8")
