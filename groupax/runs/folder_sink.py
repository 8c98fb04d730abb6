"""Writes a run's events into its folder. Imports no jax."""

from groupax.config import GRPOConfig
from groupax.events import Diagnosed, Evaluated, Event, StepEnded
from groupax.runs.folder import RunFolder


class FolderSink:
    """Writes metrics, diagnostics, completions and evaluations.

    Args:
        args: The run's settings.
        folder: The run folder.
        num_steps: Number of optimizer steps of the run.
    """

    def __init__(self, args: GRPOConfig, folder: RunFolder, num_steps: int) -> None:
        self.args, self.folder, self.num_steps = args, folder, num_steps

    def __call__(self, event: Event) -> None:
        """Writes what the event has for the folder."""
        match event:
            case StepEnded(logged=dict() as metrics, step=step):
                self.folder.write_metrics(metrics)
                if self._keeps_completions(step):
                    self.folder.write_rollouts(step, event.rollouts, event.scores, event.metrics["reward"])
            case Evaluated(step=step):
                self.folder.write_metrics({"step": float(step), **event.metrics})
                for name, each in event.sets.items() if self.args.log_completions else ():
                    self.folder.write_items(f"step_{step:06d}.{name}", each.items)
            case Diagnosed():
                self.folder.write_diagnostic(event.step, event.name, event.text)
            case _:
                pass

    def _keeps_completions(self, step: int) -> bool:
        is_first, is_last = step <= self.args.logging_steps, step == self.num_steps
        return self.args.log_completions and (is_first or is_last or step % self.args.log_completions_steps == 0)
