"""Everything that a run tells while it trains: progress, metrics and rollouts on disk, findings, trackers."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal

import numpy as np

from groupax.config import GRPOConfig
from groupax.evaluation.evaluate import Evaluation
from groupax.metrics.completions import of_rollouts, window_mean, with_logged
from groupax.parallel import processes
from groupax.parallel.compilation import compilation
from groupax.runs.diagnostics import LOGP_DRIFT, remembered, reward_findings, step_findings
from groupax.runs.folder import RunFolder
from groupax.runs.profiling import Profile
from groupax.runs.progress import Progress
from groupax.runs.rollout_log import TokenScores
from groupax.runs.trackers.background import CLOSE_S, BackgroundTracker, Call
from groupax.runs.trackers.tracker import TrackedRun, finite, samples_of
from groupax.types import Metrics, Rollout

MOST_SAMPLES = 16  # completions of a step that trackers are told
SAMPLES_INTERVAL_S = 30.0  # between two such tables
TRACKER = "tracker_"  # begins the names of findings about trackers

Event = Literal["begin", "step_begin", "step_end", "log", "evaluate", "end"]
# Is told of an event, the optimizer steps that were made, and metrics if there are any. A run ends after the step at
# which one returns True.
Listener = Callable[[Event, int, Metrics], bool | None]


class RunLog:
    """Tells of one run.

    Args:
        args: what to show and how often to write.
        folder: where to write.
        num_steps: optimizer steps of the run.
        listeners: who else is told.
        memory: measures what memory is in use, after every step.
        progress: shows the run; None for nothing but the log.

    Attributes:
        ends: a listener wants the run to end.
    """

    def __init__(
        self,
        args: GRPOConfig,
        folder: RunFolder,
        num_steps: int,
        listeners: Sequence[Listener] = (),
        memory: Callable[[], Metrics] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.args, self.folder, self.num_steps = args, folder, num_steps
        self.listeners, self.ends, self.memory = listeners, False, memory
        self.trackers: list[BackgroundTracker] = []
        self.samples_told_s = float("-inf")
        self.progress = progress or Progress()
        self.history: list[Mapping[str, float]] = []
        self.window: list[Metrics] = []
        self.told: set[str] = set()
        self.last: Metrics = {}
        self.num_sampled_tokens = self.rollout_s = 0.0
        self.rollouts: list[Rollout] = []  # that were sampled last: for one step together, or before several
        self.rollout_metrics: Metrics = {}
        self.sampled: list[Metrics] = []  # of each rollout since the last step
        self.totals_before = 0.0, 0.0  # tokens and seconds of rollouts when that ended
        self.first_row = 0  # of the last rollout, among `rollouts`
        self.evaluated: Metrics = {}
        self.fault = ""
        self.started_s = self.step_started_s = time.perf_counter()
        self.compiled_before_s = compilation().seconds
        self.profile = Profile(folder.path / "profile", args.profile)
        self.logp_limit = LOGP_DRIFT  # what engine and trainer may differ by (see `health.logp_limit`)

    @property
    def rollout_tokens_per_s(self) -> float:
        """Of the run so far."""
        return self.num_sampled_tokens / self.rollout_s if self.rollout_s else 0.0

    @property
    def train_seconds(self) -> float:
        """Wall time so far, that of earlier processes of the run included."""
        return time.perf_counter() - self.started_s

    def state(self) -> dict[str, Any]:
        """What a resumed run's log depends on, as plain data."""
        return {
            "history": self.history,
            "window": self.window,
            "told": sorted(name for name in self.told if not name.startswith(TRACKER)),  # a new process has new ones
            "last": self.last,
            "evaluated": self.evaluated,
            "num_sampled_tokens": self.num_sampled_tokens,
            "rollout_s": self.rollout_s,
            "train_seconds": self.train_seconds,
        }

    def resume(self, state: Mapping[str, Any], rollouts: Sequence[Rollout], metrics: Metrics) -> None:
        """Go on from an earlier `state`, in the middle of the updates on a rollout if there is one.

        Args:
            state: of the log.
            rollouts: of the rollout in progress.
            metrics: of that rollout.
        """
        self.history, self.window, self.told = list(state["history"]), list(state["window"]), set(state["told"])
        self.last, self.evaluated = state["last"], state["evaluated"]
        self.num_sampled_tokens, self.rollout_s = self.totals_before = state["num_sampled_tokens"], state["rollout_s"]
        self.started_s = time.perf_counter() - state["train_seconds"]
        self.rollouts, self.rollout_metrics = list(rollouts), _without_times(metrics)

    def begin_tracking(self, step: int) -> None:
        """Open the trackers that `report_to` names; the run folder is prepared, and so many steps are made."""
        name = self.args.run_name or PurePath(self.folder.place.rstrip("/")).name
        config = self.args.to_dict()
        run = TrackedRun(self.folder.id, name, self.args.project, self.folder.path, config, step)
        self.trackers = [BackgroundTracker(tracker, run) for tracker in self.args.report_to]

    def rollout(
        self, step: int, groups: Sequence[Sequence[Rollout]], metrics: Metrics, reward_errors: Mapping[str, str]
    ) -> None:
        """Groups were sampled and scored; their metrics belong to each optimizer step on them, times to the next.

        Several rollouts for one step are told of together.
        """
        self.findings(step, reward_findings(reward_errors))
        rows = [row for group in groups for row in group]
        earlier = self.rollouts if self.sampled else []
        self.rollouts, self.first_row = [*earlier, *rows], len(earlier)
        self.sampled.append(metrics)
        self.rollout_metrics = of_rollouts(self.sampled)
        self.num_sampled_tokens += sum(len(row.completion_ids) for row in rows)
        self.rollout_s += metrics["time/rollout_s"]
        if self.args.log_completions:
            self.progress.sample(max(groups, key=lambda group: max(row.advantage for row in group)))

    def forget_rollouts(self) -> None:
        """The rollouts since the last step will be made again."""
        self.num_sampled_tokens, self.rollout_s = self.totals_before
        self.sampled = []

    def step(
        self,
        step: int,
        metrics: Metrics,
        scored: Mapping[int, TokenScores] | None = None,
        distributions: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """An optimizer step ended.

        Args:
            step: its number.
            metrics: of the update.
            scored: what the update computed of completions of the last rollout, by their index in it.
            distributions: what was measured of the weights, by name.
        """
        now_s = time.perf_counter()
        compiled_s = compilation().seconds
        times = {"step_time": now_s - self.step_started_s, "time/compile_s": compiled_s - self.compiled_before_s}
        own = {"step": float(step), **metrics, **times}
        metrics = with_logged(own, self.rollout_metrics)
        metrics |= self.memory() if self.memory else {}
        self.step_started_s, self.compiled_before_s = now_s, compiled_s
        self.history = remembered([*self.history, metrics])
        found = step_findings(self.history, self.logp_limit)
        metrics |= {"health/num_findings": float(len(found)), **{f"health/{name}": 1.0 for name in found}}
        self.window.append(metrics)
        self.progress.step(step, metrics)
        self.findings(step, found)
        if step % self.args.logging_steps == 0 or step == self.num_steps:
            is_first = not self.last
            self.last = window_mean(self.window, self.args.metric_definitions)
            self.window = []
            self._write_metrics(step, self.last)
            if self.args.log_completions:
                if is_first or step % self.args.log_completions_steps == 0 or step == self.num_steps:
                    found_at = {self.first_row + index: scores for index, scores in (scored or {}).items()}
                    self.folder.write_rollouts(step, self.rollouts, found_at, metrics["reward"])
                self._tell_samples(step)
            self.tell_fault()
            self.event("log", step, self.last)
        if distributions:
            self._track(lambda tracker: tracker.histograms(step, distributions))
        if self.profile.step_ended(step):
            self.message(f"the trace of {self.args.profile} steps is in {self.folder.place_of('profile')}")
        self.rollout_metrics, self.sampled = _without_times(self.rollout_metrics), []
        self.totals_before = self.num_sampled_tokens, self.rollout_s
        self.event("step_end", step, metrics)

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """The policy was evaluated."""
        self.evaluated = {f"eval_{name}": value for name, value in evaluation.metrics.items()}
        self._write_metrics(step, {"step": float(step), **self.evaluated})
        for name, each in evaluation.sets.items():
            if self.args.log_completions:
                self.folder.write_items(f"step_{step:06d}.{name}", each.items)
            shown = [key for key in ("pass@1", "reward") if key in each.estimates]
            told = ", ".join(f"{key} {each.estimates[key]}" for key in shown) or "no reward applies"
            self.message(f"step {step}: {name} ({len(each.items)} prompts): {told}")
        self.findings(step, reward_findings(evaluation.errors))
        self.event("evaluate", step, self.evaluated)

    def event(self, name: Event, step: int, metrics: Metrics | None = None) -> None:
        """Tell the listeners."""
        for listener in self.listeners:
            if listener(name, step, metrics or {}):
                self.ends = True

    def tell_fault(self) -> None:
        """Tell when the run folder can no longer be written to, when it can again, and what became of it."""
        notices, self.folder.notices = self.folder.notices, []
        for notice in notices:
            self.message(notice, warning=True)
        fault, self.fault = self.fault, self.folder.fault
        if self.fault and not fault:
            self.message(
                f"{self.folder.place} cannot be written to: {self.fault}. Metrics and rollouts wait in memory, and "
                "training goes on; make room or mend the folder",
                warning=True,
            )
        elif fault and not self.fault:
            dropped = f", but {self.folder.num_dropped} tables of rollouts" if self.folder.num_dropped else ""
            self.message(f"{self.folder.place} can be written to again; what waited is there{dropped}")

    def findings(self, step: int, findings: Mapping[str, str]) -> None:
        """Warn of what is off, of each finding once."""
        for name, text in findings.items():
            if name not in self.told:
                self.told.add(name)
                self.message(text, warning=True)
                self.folder.write_finding(step, name, text)
                self._track(lambda tracker, name=name, text=text: tracker.finding(step, name, text))

    def message(self, text: str, warning: bool = False) -> None:
        """Something that the user should read; of several processes the first one tells it."""
        if processes.is_primary():
            self.progress.message(text, warning)

    def end_tracking(self) -> None:
        """Write the trace if one is under way, and end the trackers: they get `CLOSE_S` to write and send what they
        have, all of them together."""
        self.profile.close()
        for tracker in self.trackers:
            tracker.finish()
        deadline_s = time.monotonic() + CLOSE_S
        for tracker in self.trackers:
            tracker.wait(deadline_s)
        self._tell_tracker_faults(int(self.last.get("step", 0)))
        self.trackers = []

    def close(self) -> None:
        """The run ended."""
        self.end_tracking()

    def _write_metrics(self, step: int, metrics: Metrics) -> None:
        self.folder.write_metrics(metrics)
        told = finite(metrics)
        self._track(lambda tracker: tracker.metrics(step, told))
        self._tell_tracker_faults(step)

    def _tell_samples(self, step: int) -> None:
        """Completions of the step for the trackers, now and then."""
        if time.monotonic() - self.samples_told_s < SAMPLES_INTERVAL_S and step != self.num_steps:
            return
        self.samples_told_s, rollouts = time.monotonic(), self.rollouts
        self._track(lambda tracker: tracker.samples(samples_of(step, rollouts, MOST_SAMPLES)))

    def _track(self, call: Call) -> None:
        for tracker in self.trackers:
            tracker.tell(call)

    def _tell_tracker_faults(self, step: int) -> None:
        for each in self.trackers:
            faults = each.faults.copy()  # its thread may add one
            self.findings(step, {f"{TRACKER}{each.name}_{kind}": fault for kind, fault in faults.items()})


def _without_times(metrics: Metrics) -> Metrics:
    """Metrics of a rollout whose seconds were told."""
    return {name: 0.0 if name.startswith("time/") else value for name, value in metrics.items()}
