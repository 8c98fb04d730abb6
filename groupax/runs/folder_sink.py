"""Writes a run's events into its folder. Imports no jax."""

from groupax.events import Diagnosed, Evaluated, Event, StepEnded
from groupax.runs.folder import RunFolder
from groupax.settings.reporting import RolloutLogSettings


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
            case StepEnded(logged=dict() as metrics, step=step):
                self.folder.write_metrics(metrics)
                if event.rollouts and self._keeps_completions(step):
                    self.folder.write_rollouts(step, event.rollouts, event.scores, event.metrics["reward"])
            case Evaluated(step=step):
                self.folder.write_metrics({"step": float(step), **event.metrics})
                for name, each in event.sets.items() if self.completions.log_completions else ():
                    self.folder.write_items(f"step_{step:06d}.{name}", each.items)
            case Diagnosed():
                self.folder.write_diagnostic(event.step, event.name, event.text)
            case _:
                pass

    def _keeps_completions(self, step: int) -> bool:
        is_first, is_last, every = step <= self.logging_steps, step == self.num_steps, self.completions
        return every.log_completions and (is_first or is_last or step % every.log_completions_steps == 0)
