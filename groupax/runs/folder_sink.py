"""Writes a run's events into its folder. Imports no jax."""

from groupax.events import Diagnosed, Evaluated, Event, StepEnded
from groupax.runs.folder import RunFolder
from groupax.settings.run import RolloutLogSettings


class FolderSink:
    """Writes metrics, diagnostics, completions and evaluations.

    Args:
        completions: Which completions are kept.
        folder: The run folder.
        logging_steps: Steps between two lines of metrics.
        num_steps: Number of optimizer steps of the run.
    """

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
        self.folder.write_rollouts(step, event.rollouts, event.scores, event.metrics["reward"], kept)
        passed = step - num_last
        if num_last and passed > 0 and passed not in found and not self._is_logged(passed):
            self.folder.remove_rollouts(passed)

    def _is_logged(self, step: int) -> bool:
        is_first, is_last, every = step <= self.logging_steps, step == self.num_steps, self.completions
        is_line = is_last or step % self.logging_steps == 0
        return is_line and (is_first or is_last or step % every.log_completions_steps == 0)
