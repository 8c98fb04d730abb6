"""Turns the steps, rollouts and evaluations of a run into events, and connects the sinks of a run."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import jax

from groupax.core.config import RunConfig
from groupax.core.settings.run import RolloutLogSettings
from groupax.core.types import Metrics, Rollout
from groupax.events import (
    Diagnosed,
    Emit,
    Evaluated,
    Event,
    EventStream,
    Listener,
    Message,
    RolloutScored,
    StepEnded,
    TokenScores,
)
from groupax.parallel import processes
from groupax.parallel.runtime import compilation
from groupax.rollouts.completions import window_mean, with_logged
from groupax.rollouts.state import Experience
from groupax.runs.diagnostics import Diagnose, Diagnostics, step_diagnostics
from groupax.runs.folder import RunFolder
from groupax.runs.trackers.sink import Trackers


@runtime_checkable
class Evaluation(Protocol):
    """An evaluation of the policy: its metrics, and what it has of each evaluation set."""

    @property
    def metrics(self) -> Metrics:
        """The metrics of all sets."""
        ...

    @property
    def sets(self) -> Mapping[str, Any]:
        """The results by name of the set."""
        ...

    @property
    def errors(self) -> Mapping[str, str]:
        """The first error of each reward function that failed, by name."""
        ...


class RunLog:
    """Emits the events of one run and keeps what the metrics of a resumed run depend on.

    The sinks are, in this order: those that the stream has already (the terminal), diagnostics, the run folder,
    trackers, the profiler, and the user's listeners. Only the primary process writes completions, reports to trackers
    and profiles.

    Args:
        args, folder, num_steps: The run's settings, its folder and the number of its optimizer steps.
        events: The stream; it loses the run's sinks again when the log is closed.
        listeners: The user's sinks.
        memory: Measures the memory in use after every step.
        diagnose: See `Diagnostics`.

    Attributes:
        last: Metrics of the last logged step.
        evaluated: Metrics of the last evaluation.
        revise: Function of a step and of the metrics to log, which returns those that replace them.
        ends: Whether a listener has asked for the end of the run.
    """

    def __init__(
        self,
        args: RunConfig,
        folder: RunFolder,
        num_steps: int,
        events: EventStream,
        listeners: Sequence[Listener] = (),
        memory: Callable[[], Metrics] = dict,
        diagnose: Diagnose = step_diagnostics,
    ) -> None:
        completions = args.part(RolloutLogSettings)
        if not processes.is_primary():
            args, completions = replace(args, report_to=(), profile=0), replace(completions, log_completions=False)
        self.args, self.num_steps, self.memory = args, num_steps, memory
        self.listeners, self.ends = listeners, False
        self.revise: Callable[[int, Metrics], Metrics] = lambda _, metrics: metrics
        self.emit, self._events, self._earlier_sinks = events.emit, events, list(events.sinks)
        self.diagnostics = Diagnostics(self.emit, diagnose)
        self.trackers = Trackers(args, folder, num_steps, self.emit, completions.log_completions)
        self.profile = Profile(folder, args.profile, self.emit)
        files = FolderSink(completions, folder, args.logging_steps, num_steps)
        events.sinks += [self.diagnostics, files]
        if args.report_to:
            events.sinks.append(self.trackers)
        if args.profile:
            events.sinks.append(self.profile)
        events.sinks.append(self._call_listeners)

        self.window: list[Metrics] = []
        self.last: Metrics = {}
        self.evaluated: Metrics = {}
        self.num_sampled_tokens = self.rollout_s = 0.0
        self.rollouts: list[Rollout] = []  # sampled last
        self.rollout_metrics: Metrics = {}
        self.started_s = self.step_started_s = time.perf_counter()
        compiled = compilation()
        self.compiled_before_s = compiled.seconds
        self.compiled_at_start = compiled.seconds, compiled.num_programs, compiled.num_large_programs

    @property
    def rollout_tokens_per_s(self) -> float:
        """Sampled tokens per second of sampling, over the run so far."""
        return self.num_sampled_tokens / self.rollout_s if self.rollout_s else 0.0

    @property
    def train_seconds(self) -> float:
        """Wall time so far, including that of earlier processes of the run."""
        return time.perf_counter() - self.started_s

    def state(self) -> dict[str, Any]:
        """Returns what the log of a resumed run depends on, as plain data."""
        return {
            "history": self.diagnostics.history,
            "diagnosed": sorted(self.diagnostics.reported),
            "window": self.window,
            "last": self.last,
            "evaluated": self.evaluated,
            "num_sampled_tokens": self.num_sampled_tokens,
            "rollout_s": self.rollout_s,
            "train_seconds": self.train_seconds,
        }

    def resume(self, state: Mapping[str, Any], experience: Experience | None) -> None:
        """Restores an earlier `state`, with the completions and the metrics of the rollout in progress, if any."""
        self.diagnostics.history = list(state["history"])
        self.diagnostics.reported = set(state["diagnosed"])
        self.window, self.last, self.evaluated = list(state["window"]), state["last"], state["evaluated"]
        self.num_sampled_tokens, self.rollout_s = state["num_sampled_tokens"], state["rollout_s"]
        self.started_s = time.perf_counter() - state["train_seconds"]
        if experience is not None:
            self.rollouts = [row for group in experience.groups for row in group]
            self.rollout_metrics = _without_times(experience.metrics)

    def rollout(
        self, step: int, groups: Sequence[Sequence[Rollout]], metrics: Metrics, errors: Mapping[str, str]
    ) -> None:
        """Emits that groups were sampled and scored.

        Their metrics belong to each optimizer step on them, their times to the next one.
        """
        self.rollouts, self.rollout_metrics = [row for group in groups for row in group], metrics
        self.num_sampled_tokens += sum(row.num_sampled_tokens for row in self.rollouts)
        self.rollout_s += metrics["time/rollout_s"]
        self.emit(RolloutScored(step, groups, metrics, errors))

    def step(
        self,
        step: int,
        metrics: Metrics,
        scores: Mapping[int, TokenScores] | None = None,
    ) -> None:
        """Emits that an optimizer step is complete.

        Args:
            step: Its number.
            metrics: Metrics of the update.
            scores: Token scores of completions of the last rollout, by index into that rollout.
        """
        now_s, compiled, at_start = time.perf_counter(), compilation(), self.compiled_at_start
        times = {
            "step_time": now_s - self.step_started_s,
            "time/compile_s": compiled.seconds - self.compiled_before_s,
            "compile/total_s": compiled.seconds - at_start[0],
            "compile/num_programs": float(compiled.num_programs - at_start[1]),
            "compile/num_large_programs": float(compiled.num_large_programs - at_start[2]),
        }
        self.step_started_s, self.compiled_before_s = now_s, compiled.seconds
        metrics = with_logged({"step": float(step), **metrics, **times}, self.rollout_metrics) | self.memory()
        metrics = metrics | self.diagnostics.measure(metrics)
        self.window.append(metrics)
        logged = None
        if step % self.args.logging_steps == 0 or step == self.num_steps:
            logged = self.last = self.revise(step, window_mean(self.window, self.args.metric_definitions))
            self.window = []
        self.rollout_metrics = _without_times(self.rollout_metrics)
        self.emit(StepEnded(step, metrics, logged, self.rollouts, scores or {}))

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Emits that the policy was evaluated."""
        self.evaluated = self.revise(step, {f"eval_{name}": value for name, value in evaluation.metrics.items()})
        self.emit(Evaluated(step, self.evaluated, evaluation.sets, evaluation.errors))

    def close_sinks(self) -> None:
        """Writes a trace that is under way, and gives the trackers time to write and send what they have."""
        self.profile.close()
        self.trackers.close()

    def close(self) -> None:
        """Closes the run's sinks and removes them from the stream."""
        self.close_sinks()
        self._events.sinks = self._earlier_sinks

    def _call_listeners(self, event: Event) -> None:
        for listener in self.listeners:
            if listener(event):
                self.ends = True


class FolderSink:
    """Writes metrics, diagnostics, evaluations and the completions that the settings keep into the run folder."""

    def __init__(self, completions: RolloutLogSettings, folder: RunFolder, logging_steps: int, num_steps: int) -> None:
        self.completions, self.folder = completions, folder
        self.logging_steps, self.num_steps = logging_steps, num_steps

    def __call__(self, event: Event) -> None:
        """Writes what the event has for the folder."""
        match event:
            case StepEnded():
                if event.logged is not None:
                    self.folder.write_metrics(event.logged)
                if event.rollouts and self.completions.log_completions:
                    self._write_rollouts(event)
            case Evaluated(step=step):
                self.folder.write_metrics({"step": float(step), **event.metrics})
                for name, each in event.sets.items() if self.completions.log_completions else ():
                    self.folder.write_items(f"step_{step:06d}.{name}", each.items)
            case Diagnosed():
                self.folder.write_diagnostic(event.step, event.name, event.text)
            case _:
                pass

    def _write_rollouts(self, event: StepEnded) -> None:
        """Writes the completions of a step that is logged or may be replayed, and removes those that no longer may."""
        step, num_last = event.step, self.completions.replay_steps
        num_last = 0 if self.folder.remote else num_last  # nothing is removed from a bucket again
        found = self.folder.steps_with_findings() if num_last else frozenset()
        if event.metrics.get("update_skipped") and num_last:
            found |= {step}
        if not num_last and not self._is_logged(step):
            return
        kept = found | {*range(step - num_last + 1, step)}
        self.folder.write_rollouts(step, event.rollouts, event.scores, kept)
        passed = step - num_last
        if num_last and passed > 0 and passed not in found and not self._is_logged(passed):
            self.folder.remove_rollouts(passed)

    def _is_logged(self, step: int) -> bool:
        is_first, is_last, every = step <= self.logging_steps, step == self.num_steps, self.completions
        is_line = is_last or step % self.logging_steps == 0
        return is_line and (is_first or is_last or step % every.log_completions_steps == 0)


WARM_UP_STEPS = 2  # which compile


class Profile:
    """A sink that traces `num_steps` steps after the first ones into `profile/` of the run folder; 0 traces none."""

    def __init__(self, folder: RunFolder, num_steps: int, emit: Emit) -> None:
        self.folder, self.num_steps, self.emit = folder, num_steps, emit
        self.first: int | None = None

    def __call__(self, event: Event) -> None:
        """Starts or ends the trace after a step."""
        if not self.num_steps or not isinstance(event, StepEnded):
            return
        if self.first is None and event.step >= WARM_UP_STEPS:
            self.first = event.step
            jax.profiler.start_trace(self.folder.path / "profile", create_perfetto_trace=True)
        elif self.first is not None and event.step == self.first + self.num_steps:
            self.emit(Message(f"the trace of {self.num_steps} steps is in {self.folder.uri_of('profile')}"))
            self.close()

    def close(self) -> None:
        """Writes the trace if one is under way."""
        if self.first is not None and self.num_steps:
            jax.profiler.stop_trace()
            self.num_steps = 0


def _without_times(metrics: Metrics) -> Metrics:
    """Returns the metrics of a rollout whose seconds were reported."""
    return {name: 0.0 if name.startswith("time/") else value for name, value in metrics.items()}
