"""An adapter that calls transformers' callbacks on run events. Imports no jax."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from groupax.compat.fields import warn
from groupax.events import CheckpointSaved, Evaluated, Event, RunEnded, RunStarted, StepEnded, StepStarted
from groupax.types import Metrics

NEVER_CALLED = ("on_epoch_begin", "on_epoch_end", "on_substep_end", "on_optimizer_step", "on_pre_optimizer_step")


@dataclass
class State:
    """The progress of a run, with the fields of `transformers.TrainerState`."""

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    num_train_epochs: int = 0
    logging_steps: int = 0
    train_batch_size: int = 0
    log_history: list[dict[str, float]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True

    def to_json(self) -> str:
        """Returns the content of `trainer_state.json`, which transformers' class reads."""
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"

    def restore(self, text: str) -> None:
        """Takes the values of a `trainer_state.json`; names that this class does not have are skipped."""
        names = {field.name for field in fields(self)}
        for name, value in json.loads(text).items():
            if name in names:
                setattr(self, name, value)


@dataclass
class Control:
    """The requests of callbacks, with the fields of `transformers.TrainerControl`."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False


class CallbackListener:
    """An event listener that calls transformers' callbacks and stops the run when one sets `should_training_stop`.

    Args:
        callbacks: Objects with `on_...` methods, or their classes.
        args: First argument of every callback method.
        steps_per_epoch: Number of optimizer steps in an epoch, from which `state.epoch` is computed.
        state: Progress of the run, which the listener keeps up to date.
        more: Further keyword arguments of every callback method.
    """

    def __init__(
        self, callbacks: Sequence[Any], args: Any, steps_per_epoch: int, state: State, more: dict[str, Any]
    ) -> None:
        self.callbacks = [callback() if isinstance(callback, type) else callback for callback in callbacks]
        self.args, self.steps_per_epoch, self.state, self.more = args, steps_per_epoch, state, more
        self.control, self.warned = Control(), False
        for callback in self.callbacks:
            self._warn_never_called(callback)
            self._call(callback, "on_init_end")

    def __call__(self, event: Event) -> bool:
        """Calls the callbacks' methods for a run event; returns whether the run should stop."""
        match event:
            case RunStarted(step=step):
                self._call_all("on_train_begin", step)
            case StepStarted(step=step):
                self._call_all("on_step_begin", step)
            case StepEnded(step=step, logged=logged):
                self._call_all("on_step_end", step)
                if logged is not None:
                    self._log(step, logged)
                    self._call_all("on_log", step, logs=dict(logged))
            case Evaluated(step=step, metrics=metrics):
                self._log(step, metrics)
                self._call_all("on_evaluate", step, metrics=dict(metrics))
                self._remember_best(step, metrics)
            case CheckpointSaved(step=step):
                self._call_all("on_save", step)
            case RunEnded(step=step):
                self._call_all("on_train_end", step)
            case _:
                pass
        if (self.control.should_save or self.control.should_evaluate) and not self.warned:
            self.warned = True
            warn(
                "a callback requests a checkpoint or an evaluation, which groupax ignores; set save_steps and "
                "eval_steps instead. A callback can only stop the run (should_training_stop)"
            )
        return self.control.should_training_stop or self.control.should_epoch_stop

    def _call_all(self, method: str, step: int, **more: Any) -> None:
        self.state.global_step, self.state.epoch = step, step / self.steps_per_epoch
        for callback in self.callbacks:
            self._call(callback, method, more)

    def _log(self, step: int, metrics: Metrics) -> None:
        self.state.log_history.append({"step": step, "epoch": step / self.steps_per_epoch, **metrics})

    def _remember_best(self, step: int, metrics: Metrics) -> None:
        # Runs after the callbacks, which compare an evaluation with the best one before it.
        name = getattr(self.args, "metric_for_best_model", None)
        value = metrics.get(f"eval_{name.removeprefix('eval_')}") if name else None
        if value is None:
            return
        best = self.state.best_metric
        if best is None or (value < best if self.args.greater_is_better is False else value > best):
            self.state.best_metric, self.state.best_global_step = value, step

    def _call(self, callback: Any, method: str, more: dict[str, Any] | None = None) -> None:
        if hasattr(callback, method):
            control = getattr(callback, method)(self.args, self.state, self.control, **self.more, **(more or {}))
            self.control = control or self.control

    def _warn_never_called(self, callback: Any) -> None:
        classes = [cls for cls in type(callback).__mro__ if not cls.__module__.startswith("transformers.")]
        own = [name for name in NEVER_CALLED if any(name in vars(cls) for cls in classes)]
        if own:
            warn(
                f"{type(callback).__name__}'s {', '.join(own)} will not be called: groupax has events for steps, "
                "logs, evaluations, checkpoints, and the start and end of a run"
            )
