"""The parts of TRL's trainers besides their data: callbacks, the model, resuming, saving, reports, the accelerator."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import jax

from groupax.compat import hf
from groupax.compat.callbacks import CallbackListener, State, write_json
from groupax.compat.trl.arguments import TrainingArguments, torch_cpu
from groupax.compat.trl.layout import TRAINER_STATE, TRLFolders, check_output_dir, checkpoint_to_resume
from groupax.compat.trl.policy import Policy, TrainedModel
from groupax.core.settings.fields import nearest
from groupax.core.storage.hub import push_folder
from groupax.core.storage.replacing import check_disjoint
from groupax.core.types import Metrics
from groupax.models.weights.saving import source_folders
from groupax.parallel import processes
from groupax.parallel.runtime import configure_jax
from groupax.rewards.calls import check_name
from groupax.runs.checkpoints.store import HF

# Methods that subclasses of TRL's trainer override, and groupax never calls, by what to do instead.
_REFUSED_BY_REMEDY = {
    "gradients come from JAX: give a function in JAX as loss_type of the config, which docs/algorithm.md describes "
    "under 'Your own loss'": "_compute_loss compute_loss _get_per_token_logps_and_entropies training_step",
    "pass rollout_func to sample yourself, tools or environment_factory for turns, and reward functions for "
    "the scores, which receive log_metric and log_extra": """
        _generate _generate_and_score_completions _generate_single_turn _prepare_inputs _tool_call_loop
        _calculate_rewards""",
    "the steps, the data's order, evaluations, checkpoints and uploads are groupax's own: change the config or the "
    "dataset, act in a callback, or override log": """
        _get_train_sampler _get_eval_sampler get_train_dataloader get_eval_dataloader create_optimizer
        create_optimizer_and_scheduler create_scheduler prediction_step _inner_training_loop _save_checkpoint _save
        _prepare_dataset""",
}
REFUSED = {name: remedy for remedy, names in _REFUSED_BY_REMEDY.items() for name in names.split()}
# Methods that only scripts call, with the setting that would have TRL call them in a run.
_BY_SCRIPTS = {"evaluate": "eval_strategy", "save_model": "save_strategy"}


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

    CONFIG: ClassVar[type[TrainingArguments]]

    args: Any
    state: State
    native: Any
    eval_dataset: Any
    _trained: TrainedModel
    _revised: Metrics | None = None  # a line of the log, while a subclass may change it

    def _check(self, model: Any, args: Any, optimizers: tuple[Any, Any]) -> Any:
        """Returns the settings, after the checks of a trainer's arguments that need no model."""
        name = Path(str(getattr(model, "name", model))).name
        self.args = args = args or self.CONFIG(f"{name}-{self.CONFIG.__name__.removesuffix('Config')}")
        check_overrides(self)
        if any(each is not None for each in optimizers):
            raise ValueError(
                "optimizers of PyTorch cannot train weights of JAX: set optim, learning_rate, weight_decay and "
                "lr_scheduler_type in the config"
            )
        check_output_dir(args.output_dir)
        return args

    def _prepare(self, settings: Any, callbacks: Sequence[Any] | None) -> Any:
        """Sets the state, and returns settings with the layout of folders."""
        self._output_dir = Path(settings.output_dir).expanduser().absolute()  # a reward may change the directory
        self.state = State(
            num_train_epochs=math.ceil(self.args.num_train_epochs),
            logging_steps=settings.logging_steps,
            is_world_process_zero=processes.is_primary(),
        )
        self.callbacks = list(callbacks or [])
        self._listeners: list[Any] = []
        self._listener: CallbackListener | None = None
        self._folders = TRLFolders(
            self._output_dir, self.state, self._revise, loads_best=self.args.load_best_model_at_end
        )
        return replace(settings, output_dir=str(self._output_dir / HF.inside))

    def _finish(self, policy: Policy) -> None:
        """Connects the native trainer with the model object and the folders."""
        trainer = self.native
        check_disjoint(self._output_dir, source_folders(trainer.model))
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

    @property
    def accelerator(self) -> Any:
        """The processes of the run, with some names of accelerate's class; `num_processes` counts machines."""
        is_main = processes.is_primary()
        return SimpleNamespace(
            is_main_process=is_main,
            is_local_main_process=True,
            process_index=processes.process_index(),
            local_process_index=0,
            num_processes=processes.num_processes(),
            device=torch_cpu(),
            print=print if is_main else lambda *_, **__: None,
            wait_for_everyone=lambda: processes.all_gather_object(None),
            unwrap_model=lambda model, **_: model,
        )

    def is_world_process_zero(self) -> bool:
        """Returns whether this is the process that prints and writes."""
        return processes.is_primary()

    def is_local_process_zero(self) -> bool:
        """Returns whether this is the first process of its machine; groupax has one on each."""
        return True

    # -- callbacks

    def add_callback(self, callback: Any) -> None:
        """Adds a callback."""
        self.callbacks.append(callback)
        self._listener = None

    def remove_callback(self, callback: Any) -> None:
        """Removes a callback, or all callbacks of a class."""
        self.callbacks = [own for own in self.callbacks if own is not callback and type(own) is not callback]
        self._listener = None

    def _callback_listener(self) -> CallbackListener:
        """Returns the listener that calls the callbacks and keeps the state."""
        if self._listener is None:
            more = {"model": self.model, "processing_class": self.processing_class, "train_dataloader": None}
            steps_per_epoch, rows_per_step = self._pace()
            self._listener = CallbackListener(
                self.callbacks, self.args, steps_per_epoch, self.state, more, rows_per_step, self.log
            )
            self._folders.control = self._listener.control
        return self._listener

    def _pace(self) -> tuple[int, int]:
        """Returns the optimizer steps of an epoch, and the rows of a step."""
        raise NotImplementedError

    # -- lines of the log, which a subclass may change

    def log(self, logs: Mapping[str, Any], start_time: float | None = None) -> None:
        """Adds a line to `state.log_history` and calls the callbacks.

        Numbers that a subclass adds to a line of the run also reach the run's metrics and trackers.

        Args:
            logs: Values by name.
            start_time: Not used: the times are among the values.
        """
        del start_time
        if self._revised is None:
            self._callback_listener().record(self.native.cursor.step, logs)
            return
        for name, value in logs.items():
            check_name("log", "the name of a value", name)
            if isinstance(value, (int, float)):
                self._revised[name] = float(value)

    def _revise(self, step: int, metrics: Metrics) -> Metrics:
        """Passes metrics of the run through `log`; returns them with the numbers that it adds or changes."""
        self.state.global_step, self._revised = step, dict(metrics)
        self.log(dict(metrics))
        revised, self._revised = self._revised, None
        return revised

    # -- training, saving, uploading

    def _resume(self, resume: bool | str | None) -> bool:
        """Sets what the native trainer continues from; returns whether that is a checkpoint."""
        resume = resume or self.args.resume_from_checkpoint
        chosen = checkpoint_to_resume(resume, self._output_dir) if resume else "never"
        self.native.args = replace(self.native.args, resume=chosen)
        if (state := Path(chosen) / TRAINER_STATE).is_file():
            self.state.load_json(state)
            self.state.is_world_process_zero = processes.is_primary()
        return chosen != "never"

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Trains the policy and saves it in the run's `model/`.

        Args:
            resume_from_checkpoint: True to resume from the newest checkpoint in `output_dir`, or a checkpoint's path.
        """
        is_resumed = self._resume(resume_from_checkpoint)
        listener = self._callback_listener()
        self._listeners[:] = [self._trained, listener]
        if self.args.eval_on_start and not is_resumed:
            self.evaluate()
        result = self.native.train()
        if self.args.push_to_hub:
            self.push_to_hub()
        return TrainOutput(result.num_steps, listener.summary["train_loss"], {**result.metrics, **listener.summary})

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """Evaluates the current policy on held-out data, and returns metrics by name.

        Args:
            eval_dataset: Data, or several sets by name, or the name of one of the trainer's sets; by default those that
                the trainer was given.
            ignore_keys: Not used: there are no outputs of a model to gather.
            metric_key_prefix: Beginning of the metrics' names, before the name of a set.
        """
        del ignore_keys
        if isinstance(eval_dataset, str):
            sets = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else {}
            if eval_dataset not in sets:
                raise ValueError(f"there is no evaluation set {eval_dataset!r}{nearest(eval_dataset, sets)}")
            eval_dataset = sets[eval_dataset]
        metrics: dict[str, float] = {}
        for own in self._evaluations(eval_dataset, metric_key_prefix):
            self.log(own)
            self._callback_listener().evaluated(self.native.cursor.step, own)
            metrics |= own
        return {**metrics, "epoch": self.state.epoch}

    def _evaluations(self, dataset: Any, prefix: str) -> list[dict[str, float]]:
        """Returns the metrics of each set of a dataset; those of the trainer's own sets for None."""
        raise NotImplementedError

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Writes the current policy, or its adapter, and the tokenizer; other files in the folder are kept."""
        hf.save_policy(self.native, output_dir or self._output_dir)

    def push_to_hub(self, **inert: Any) -> str:
        """Uploads the current policy as `hub_model_id`, by default the name of `output_dir`."""
        hf.warn_inert(inert, {"commit_message", "blocking", "dataset_name", "tags"}, "push_to_hub")
        repo_id = self.args.hub_model_id or self._output_dir.name
        return push_folder(self.native.save_model(), repo_id, private=bool(self.args.hub_private_repo))

    # -- reports

    def log_metrics(self, split: str, metrics: Mapping[str, float]) -> None:
        """Prints metrics of "train" or "eval"."""
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
        folder = self._output_dir
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"{split}_results.json", metrics, indent=4)
        if combined:
            everything = folder / "all_results.json"
            earlier = json.loads(everything.read_text(encoding="utf-8")) if everything.is_file() else {}
            write_json(everything, {**earlier, **metrics}, indent=4)

    def save_state(self) -> None:
        """Writes the state with the log's lines to `trainer_state.json` in `output_dir`."""
        if self.is_world_process_zero():
            self._output_dir.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(self._output_dir / TRAINER_STATE)


def check_overrides(trainer: BaseTrainer) -> None:
    """Checks that the methods that a subclass overrides take part in the run, as far as `REFUSED` lists them.

    Raises:
        ValueError: An override would never be called; names the class, the method and what to do instead.
    """
    for cls in type(trainer).__mro__:
        for name in vars(cls).keys() & REFUSED.keys():
            raise ValueError(f"{cls.__name__} overrides {name}, which groupax would never call: {REFUSED[name]}")
    for name, setting in _BY_SCRIPTS.items():
        value = getattr(trainer.args, setting)
        if value != "no" and getattr(type(trainer), name) is not getattr(BaseTrainer, name):
            raise ValueError(
                f"{type(trainer).__name__} overrides {name}, which groupax calls in no run of its own, and {setting} "
                f"is {value!r}: set {setting}='no', and call {name} yourself, or act in a callback"
            )


def num_accelerators() -> int:
    """Returns the device count that `per_device_train_batch_size` refers to; a process on CPU counts as one device."""
    configure_jax()
    return jax.process_count() if jax.default_backend() == "cpu" else jax.device_count()
