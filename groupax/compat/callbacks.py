"""An adapter that calls transformers' callbacks on run events. Imports no jax."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from groupax.core.settings.fields import check_known
from groupax.core.types import Metrics
from groupax.events import CheckpointSaved, Evaluated, Event, RunEnded, RunStarted, StepEnded, StepStarted
from groupax.rewards.calls import check_name
from groupax.rollouts.completions import window_mean

# Metrics of a step that the last line of a log, which is about the whole run, has not.
OF_ONE_STEP = ("loss", "grad_norm", "learning_rate")


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

    def save_to_json(self, path: str | os.PathLike[str]) -> None:
        """Writes all fields to a file, in the format of transformers' `trainer_state.json`."""
        write_json(path, asdict(self), indent=2)

    def load_json(self, path: str | os.PathLike[str]) -> None:
        """Takes the values of a `trainer_state.json`; names that this class does not have are skipped."""
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        vars(self).update({name: value for name, value in content.items() if name in vars(self)})


@dataclass
class Control:
    """The requests of callbacks, with the fields of `transformers.TrainerControl`.

    A request for a log is not heard: logs are written every `logging_steps`.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def take(self, name: str) -> bool:
        """Returns whether something was requested, and takes the request back."""
        requested = getattr(self, name)
        setattr(self, name, False)
        return requested


class CallbackListener:
    """An event listener that calls transformers' callbacks and stops the run when one sets `should_training_stop`.

    Args:
        callbacks: Objects with `on_...` methods, or their classes.
        args: First argument of every callback method.
        steps_per_epoch: Number of optimizer steps in an epoch, from which `state.epoch` is computed.
        state: Progress of the run, which the listener keeps up to date.
        more: Further keyword arguments of every callback method.
        rows_per_step: Number of completions of an optimizer step.
        log: Function that receives the line about the whole run in the place of `record`, which it calls itself.

    Attributes:
        summary: Metrics of the whole run, once it has ended.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        args: Any,
        steps_per_epoch: int,
        state: State,
        more: dict[str, Any],
        rows_per_step: int,
        log: Callable[[Metrics], None],
    ) -> None:
        self.callbacks = [callback() if isinstance(callback, type) else callback for callback in callbacks]
        self.args, self.steps_per_epoch, self.state, self.more = args, steps_per_epoch, state, more
        self.control, self.rows_per_step = Control(), rows_per_step
        self.log = log
        self.losses: list[float] = []
        self.started_s = time.perf_counter()
        self.window: list[Metrics] = []  # of the steps since the last line
        self.summary: Metrics = {}
        self._call_all("on_init_end", state.global_step)

    def __call__(self, event: Event) -> bool:
        """Calls the callbacks' methods for a run event; returns whether the run should stop."""
        match event:
            case RunStarted(step=step):
                vars(self.control).update(vars(Control()))
                self.losses, self.window = [], []
                self.started_s = time.perf_counter()
                self._call_all("on_train_begin", step)
            case StepStarted(step=step):
                if step % self.steps_per_epoch == 0:
                    self._call_all("on_epoch_begin", step)
                self._call_all("on_step_begin", step)
            case StepEnded(step=step, metrics=metrics, logged=logged):
                self.losses.append(metrics["loss"])
                self.window.append(metrics)
                self._call_all("on_step_end", step)
                if step % self.steps_per_epoch == 0:
                    self._call_all("on_epoch_end", step)
                if logged is not None and step % max(1, self.state.logging_steps) == 0:  # `_close` logs what is left
                    self.window.clear()
                    self.record(step, logged)
            case Evaluated(step=step, metrics=metrics):
                self.record(step, metrics)
                self.evaluated(step, metrics)
                self._remember_best(step, metrics)
            case CheckpointSaved(step=step):
                self._call_all("on_save", step)
            case RunEnded(step=step):
                if step % self.steps_per_epoch:  # the last epoch was not whole
                    self._call_all("on_epoch_end", step)
                self._close()
                self._call_all("on_train_end", step)
            case _:
                pass
        return self.control.should_training_stop or self.control.should_epoch_stop

    def evaluated(self, step: int, metrics: Metrics) -> None:
        """Calls the callbacks after an evaluation."""
        self._call_all("on_evaluate", step, metrics=dict(metrics))

    def _call_all(self, method: str, step: int, **more: Any) -> None:
        self.state.global_step, self.state.epoch = step, step / self.steps_per_epoch
        for callback in self.callbacks:
            if hasattr(callback, method):
                control = getattr(callback, method)(self.args, self.state, self.control, **self.more, **more)
                if control is not None and control is not self.control:
                    vars(self.control).update(vars(control))

    def record(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds a line to the log and calls the callbacks."""
        for name in metrics:
            check_name("log", "the name of a value", name)
        logs = {"epoch": step / self.steps_per_epoch, **metrics}
        self.state.log_history.append({**logs, "step": step})
        self._call_all("on_log", step, logs=logs)

    def _close(self) -> None:
        """Logs the line about the whole run, with the metrics of steps since the last line, as transformers does."""
        seconds, num_steps = time.perf_counter() - self.started_s, len(self.losses)
        rest = window_mean(self.window, "trl") if self.window else {}
        self.summary = {
            "train_runtime": round(seconds, 4),
            "train_samples_per_second": round(num_steps * self.rows_per_step / seconds, 3),
            "train_steps_per_second": round(num_steps / seconds, 3),
            "train_loss": sum(self.losses) / max(num_steps, 1),
            **{name: value for name, value in rest.items() if name not in OF_ONE_STEP},
        }
        self.log(self.summary)

    def _remember_best(self, step: int, metrics: Metrics) -> None:
        # Runs after the callbacks, which compare an evaluation with the best one before it.
        name = self.args.metric_for_best_model
        if name is None:
            return
        name = f"eval_{name.removeprefix('eval_')}"
        check_known(name, metrics, f"metric_for_best_model is {name!r}, which evaluations do not have")
        value = metrics[name]
        best = self.state.best_metric
        if best is None or (value > best if self.args.greater_is_better else value < best):
            self.state.best_metric, self.state.best_global_step = value, step


def write_json(path: str | os.PathLike[str], values: Mapping[str, Any], indent: int) -> None:
    """Writes plain data, with null, which JSON has, in the place of NaN and infinities."""
    finite = json.loads(json.dumps(values), parse_constant=lambda _: None)
    Path(path).write_text(json.dumps(finite, indent=indent, sort_keys=True) + "\n", encoding="utf-8")
