"""Everything that a run tells while it trains: progress, metrics and rollouts on disk, findings."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from groupax.config import GRPOConfig
from groupax.evaluation.evaluate import Evaluation
from groupax.health import step_findings
from groupax.metrics import Metrics, window_mean
from groupax.profiling import Profile
from groupax.progress import PROGRESS_BARS
from groupax.rollout import Rollout
from groupax.tracking import RunFolder

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

    Attributes:
        ends: a listener wants the run to end.
    """

    def __init__(self, args: GRPOConfig, folder: RunFolder, num_steps: int, listeners: Sequence[Listener] = ()) -> None:
        self.args, self.folder, self.num_steps = args, folder, num_steps
        self.listeners, self.ends = listeners, False
        self.progress = PROGRESS_BARS[args.progress_bar](num_steps)
        self.history: list[Metrics] = []
        self.window: list[Metrics] = []
        self.told: set[str] = set()
        self.last: Metrics = {}
        self.num_sampled_tokens = self.rollout_s = 0.0
        self.rollouts: Sequence[Rollout] = []
        self.rollout_metrics: Metrics = {}
        self.evaluated: Metrics = {}
        self.fault = ""
        self.started_s = self.step_started_s = time.perf_counter()
        self.profile = Profile(folder.path / "profile", args.profile)

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
            "told": sorted(self.told),
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
        self.num_sampled_tokens, self.rollout_s = state["num_sampled_tokens"], state["rollout_s"]
        self.started_s = time.perf_counter() - state["train_seconds"]
        self.rollouts, self.rollout_metrics = rollouts, metrics

    def rollout(self, groups: Sequence[Sequence[Rollout]], metrics: Metrics, reward_errors: Mapping[str, str]) -> None:
        """Groups were sampled and scored; their metrics belong to each optimizer step on them."""
        self.findings(
            {
                f"reward {name}": f"the reward function {name!r} failed; its completions go without that reward (told "
                f"once, counted in rewards/{name}/failures):\n{error}"
                for name, error in reward_errors.items()
            }
        )
        self.rollouts, self.rollout_metrics = [row for group in groups for row in group], metrics
        self.num_sampled_tokens += sum(len(row.completion_ids) for row in self.rollouts)
        self.rollout_s += metrics["time/rollout_s"]
        if self.args.log_completions:
            self.progress.sample(max(groups, key=lambda group: max(row.advantage for row in group)))

    def step(self, step: int, metrics: Metrics) -> None:
        """An optimizer step ended."""
        now_s = time.perf_counter()
        metrics = {"step": float(step), **metrics, **self.rollout_metrics, "step_time": now_s - self.step_started_s}
        self.step_started_s = now_s
        self.history = [*self.history[-20:], metrics]
        self.window.append(metrics)
        self.progress.step(step, metrics)
        self.findings(step_findings(self.history))
        if step % self.args.logging_steps == 0 or step == self.num_steps:
            self.last = window_mean(self.window)
            self.window = []
            self.folder.write_metrics(self.last)
            if self.args.log_completions:
                self.folder.write_rollouts(step, self.rollouts)
            self.tell_fault()
            self.event("log", step, self.last)
        if self.profile.step_ended(step):
            self.message(f"the trace of {self.args.profile} steps is in {self.profile.folder}")
        self.event("step_end", step, metrics)

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """The policy was evaluated."""
        self.evaluated = {f"eval_{name}": value for name, value in evaluation.metrics.items()}
        self.folder.write_metrics({"step": float(step), **self.evaluated})
        for name, each in evaluation.sets.items():
            if self.args.log_completions:
                self.folder.write_items(f"step_{step:06d}.{name}", each.items)
            shown = [key for key in ("pass@1", "reward") if key in each.estimates]
            told = ", ".join(f"{key} {each.estimates[key]}" for key in shown) or "no reward applies"
            self.progress.message(f"step {step}: {name} ({len(each.items)} prompts): {told}")
        self.event("evaluate", step, self.evaluated)

    def event(self, name: Event, step: int, metrics: Metrics | None = None) -> None:
        """Tell the listeners."""
        for listener in self.listeners:
            if listener(name, step, metrics or {}):
                self.ends = True

    def tell_fault(self) -> None:
        """Tell when the run folder can no longer be written to, and when it can again."""
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

    def findings(self, findings: Mapping[str, str]) -> None:
        """Warn of what is off, of each finding once."""
        for name, text in findings.items():
            if name not in self.told:
                self.told.add(name)
                self.progress.message(text, warning=True)

    def message(self, text: str, warning: bool = False) -> None:
        """Something that the user should read."""
        self.progress.message(text, warning)

    def close(self) -> None:
        """The run ended."""
        self.profile.close()
        self.progress.close()
