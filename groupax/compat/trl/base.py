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
from groupax.compat.callbacks import CallbackListener, State, write_json
from groupax.compat.trl.arguments import TrainingArguments, torch_cpu
from groupax.compat.trl.layout import (
    TRAINER_STATE,
    TRLFolders,
    check_output_dir,
    checkpoint_to_resume,
    folders_of,
    run_folder,
)
from groupax.compat.trl.policy import Policy, TrainedModel
from groupax.core.settings.fields import nearest
from groupax.core.storage.buckets import is_remote
from groupax.core.storage.hub import push_folder
from groupax.core.storage.replacing import check_disjoint
from groupax.core.types import Metrics
from groupax.events import Event
from groupax.models.weights.saving import source_folders
from groupax.parallel import processes
from groupax.parallel.runtime import configure_jax
from groupax.rewards.calls import check_name

# Methods of TRL's trainer that groupax never calls, by what to do instead.
_REFUSED_BY_REMEDY = {
    "gradients come from JAX: give a function in JAX as loss_type of the config, which docs/algorithm.md describes "
    "under 'Your own loss'": """_compute_loss compute_loss compute_loss_context_manager autocast_smart_context_manager
        _get_per_token_logps_and_entropies get_gamma_weights get_high_entropy_mask get_off_policy_mask""",
    "pass rollout_func to sample yourself, tools or environment_factory for turns, and reward functions for "
    "the scores, which receive log_metric and log_extra": """
        _generate _generate_and_score_completions _generate_single_turn _get_tool_suffix_ids _prepare_input
        _prepare_inputs _tokenize_prompts _tool_call_loop get_batch_samples _calculate_rewards _log_completion_extra
        _log_metric""",
    "the steps, the data's order, evaluations, checkpoints and uploads are groupax's own: change the config or the "
    "dataset, act in a callback, or override log": """training_step
        _build_accelerator_args _clip_grad_norm _defer_fsdp_gradient_reduction _determine_best_metric _evaluate
        _finalize_training _finish_current_push _get_collator_with_removed_columns _get_dataloader _get_eval_sampler
        _get_grad_norm _get_learning_rate _get_num_items_in_batch _get_output_dir _get_train_sampler
        _has_mixed_mesh_grads _hp_search_setup _init_training_state _inner_training_loop _issue_warnings_after_load
        _load_best_model _load_callback_state _load_from_checkpoint _load_optimizer_and_scheduler _load_rng_state
        _load_scaler _maybe_log_save_evaluate _mixed_mesh_grad_norm _move_model_to_device
        _prepare_context_parallel_inputs _prepare_for_training _push_from_checkpoint _remove_unused_columns
        _report_to_hp_search _run_epoch _save _save_checkpoint _save_optimizer_and_scheduler _save_rng_state
        _save_scaler _send_telemetry _set_signature_columns_if_needed _sync_replicated_trainable_parameters
        _track_num_input_tokens _tune_save_checkpoint _update_auto_batch_size _validate_args _wrap_model
        call_model_init create_accelerator_and_postprocess create_model_card create_optimizer
        create_optimizer_and_scheduler create_scheduler end evaluation_loop floating_point_ops get_cp_size
        get_decay_parameter_names get_eval_dataloader get_learning_rates get_num_trainable_parameters
        get_optimizer_cls_and_kwargs get_optimizer_group get_sp_size get_test_dataloader get_total_train_batch_size
        get_tp_size get_train_dataloader hyperparameter_search init_hf_repo loss_is_scaled_for_ga metrics_format
        num_examples pop_callback predict prediction_step set_initial_training_values store_flos""",
}
REFUSED = {name: remedy for remedy, names in _REFUSED_BY_REMEDY.items() for name in names.split()}
# Methods that a run of groupax calls at no time, although scripts may, with the setting that would have TRL call them.
_BY_SCRIPTS = {
    "evaluate": ("eval_strategy", "call evaluate yourself, or act in a callback's on_evaluate"),
    "save_model": ("save_strategy", "call save_model yourself, or act in a callback's on_save"),
}


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

    CONFIG: ClassVar[type[TrainingArguments]]
    # Methods that subclasses may not override, with what to do instead.
    REFUSED_OVERRIDES: ClassVar[Mapping[str, str]] = REFUSED
    # Listeners of the native trainer besides those that call callbacks and show the model.
    WATCHES: ClassVar[tuple[Callable[[Event], Any], ...]] = ()

    args: Any
    state: State
    native: Any
    eval_dataset: Any
    _output_dir: str
    _trained: TrainedModel
    _folders: TRLFolders | None
    _passed: list[Mapping[str, Any]] | None = None  # to the own `log`, while a line is revised

    def __setattr__(self, name: str, value: Any) -> None:
        if name in REFUSED:  # a replaced method has no more effect than an overridden one
            raise AttributeError(
                f"{name} of {type(self).__name__} is assigned, which groupax would never call: {REFUSED[name]}"
            )
        super().__setattr__(name, value)

    def _check(self, base: type, model: Any, args: Any, optimizers: tuple[Any, Any]) -> Any:
        """Returns the settings, after the checks of a trainer's arguments that need no model."""
        name = Path(str(getattr(model, "name", model))).name
        self.args = args = args or self.CONFIG(f"{name}-{self.CONFIG.__name__.removesuffix('Config')}")
        check_overrides(self, base)
        if any(each is not None for each in optimizers):
            raise ValueError(
                "optimizers of PyTorch cannot train weights of JAX: set optim, learning_rate, weight_decay and "
                "lr_scheduler_type in the config"
            )
        check_output_dir(args.output_dir)
        return args

    def _prepare(self, settings: Any, callbacks: Sequence[Any] | None) -> Any:
        """Sets the state, and returns settings with the layout of folders."""
        args, where = self.args, settings.output_dir
        if not is_remote(where):  # absolute, since a reward may change the working directory
            where = str(Path(where).expanduser().absolute())
        self._output_dir = where
        self.state = State(
            num_train_epochs=math.ceil(args.num_train_epochs),
            logging_steps=settings.logging_steps,
            is_world_process_zero=processes.is_primary(),
        )
        self.callbacks = list(callbacks or [])
        self._listeners: list[Any] = []
        self._listener: CallbackListener | None = None
        self._revised: list[list[Mapping[str, Any]]] = []  # lines that the listener has not recorded yet
        self._folders = folders_of(args, self._output_dir, self.state)
        if self._folders is not None:
            more = {"save_total_limit": None, "metric_for_best_model": None}  # see `TRLFolders`
            settings = replace(settings, output_dir=run_folder(self._output_dir), **more)
        return settings

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
                self.callbacks, self.args, steps_per_epoch, self.state, more, rows_per_step, log=self._write_line
            )
            if self._folders is not None:
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
        if self._passed is None:
            self._callback_listener().record(self.native.cursor.step, dict(logs))
        else:
            for name in logs:
                check_name("log", "the name of a value", name)
            self._passed.append(dict(logs))

    def _write_line(self, step: int, metrics: Metrics) -> None:
        """Records a line of the log: as it was revised, else through `log`."""
        if self._revised:
            for logs in self._revised.pop(0):
                self._callback_listener().record(step, logs)
        else:
            self.log(dict(metrics))

    def _revise(self, step: int, metrics: Metrics) -> Metrics:
        """Passes metrics through `log`; returns them with the numbers that it adds or changes."""
        is_line = step % max(1, self.state.logging_steps) == 0 or any(name.startswith("eval_") for name in metrics)
        if not is_line:  # the last steps of a run belong to its closing line
            return metrics
        self._passed = passed = []
        try:
            self.log(dict(metrics))
        finally:
            self._passed = None
        self._revised.append(passed)
        numbers = {
            name: float(value)
            for logs in passed
            for name, value in logs.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        return {**metrics, **numbers}

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
        self._listeners[:] = [self._trained, *self.WATCHES, listener]
        self._check_sampler()
        if self.args.eval_on_start and not is_resumed:
            self.evaluate()
        result = self.native.train()
        if self.args.push_to_hub:
            self.push_to_hub()
        return TrainOutput(result.num_steps, listener.summary["train_loss"], {**result.metrics, **listener.summary})

    def _check_sampler(self) -> None:
        """Checks that the model has no method that ought to sample; not every trainer samples."""

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
        self._check_sampler()
        metrics: dict[str, float] = {}
        for own in self._evaluations(eval_dataset, metric_key_prefix):
            self._callback_listener().evaluated(self.native.cursor.step, own)
            metrics |= own
        return {**metrics, "epoch": self.state.epoch}

    def _evaluations(self, dataset: Any, prefix: str) -> list[dict[str, float]]:
        """Returns the metrics of each set of a dataset; those of the trainer's own sets for None."""
        raise NotImplementedError

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Writes the current policy, or its adapter, and the tokenizer; other files in the folder are kept."""
        if output_dir is None and is_remote(self._output_dir):
            self.native.save_model()
        else:
            hf.save_policy(self.native, output_dir or self._output_dir)

    def push_to_hub(self, **inert: Any) -> str:
        """Uploads the current policy as `hub_model_id`, by default the name of `output_dir`."""
        hf.warn_inert(inert, {"commit_message", "blocking", "dataset_name", "tags"}, "push_to_hub")
        repo_id = self.args.hub_model_id or Path(self._output_dir).name
        return push_folder(self.native.save_model(), repo_id, private=bool(self.args.hub_private_repo))

    def end(self) -> None:
        """Does nothing: the trackers have been closed when training ended."""

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
        folder = self._report_folder()
        write_json(folder / f"{split}_results.json", metrics, indent=4)
        if combined:
            everything = folder / "all_results.json"
            earlier = json.loads(everything.read_text(encoding="utf-8")) if everything.is_file() else {}
            write_json(everything, {**earlier, **metrics}, indent=4)

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


def check_overrides(trainer: Any, base: type) -> None:
    """Checks that every method of TRL's trainer that a subclass overrides takes part in the run.

    Raises:
        ValueError: An override would never be called; names the class, the method and what to do instead.
    """
    for cls in type(trainer).__mro__[: type(trainer).__mro__.index(base)]:
        refused = {} if cls.__module__.partition(".")[0] == "groupax" else base.REFUSED_OVERRIDES
        for name in vars(cls):
            if name in refused:
                raise ValueError(f"{cls.__name__} overrides {name}, which groupax would never call: {refused[name]}")
    for name, (setting, remedy) in _BY_SCRIPTS.items():
        value = getattr(trainer.args, setting)
        if value != "no" and getattr(type(trainer), name) is not getattr(base, name):
            raise ValueError(
                f"{type(trainer).__name__} overrides {name}, which groupax calls in no run of its own, and {setting} "
                f"is {value!r}: set {setting}='no', and {remedy}"
            )


def num_accelerators() -> int:
    """Returns the device count that `per_device_train_batch_size` refers to; a process on CPU counts as one device."""
    configure_jax()
    return jax.process_count() if jax.default_backend() == "cpu" else jax.device_count()
