"""Settings of logs, trackers and displays. Imports no jax."""

from dataclasses import dataclass
from typing import Literal

from groupax.settings.fields import nearest, ranged, setting

MetricDefinitions = Literal["groupax", "trl"]
TRACKERS = ("wandb", "tensorboard", "trackio", "jsonl")


@dataclass(frozen=True, kw_only=True)
class ReportingSettings:
    """Logs, displays and trackers of a run."""

    logging_steps: int = ranged(1, 10**9, low=1, resume="free")
    """Write metrics (means over these steps) and rollouts every this many steps."""
    metric_definitions: MetricDefinitions = setting("groupax", resume="explicit")
    """Definition of the metrics that TRL defines differently: "trl" as in TRL 1.16, see docs/algorithm.md."""
    profile: int = ranged(0, 10**6, resume="free")
    """Trace this many steps, from the third step on, into profile/ of the run folder, for Perfetto or XProf."""
    progress_bar: Literal["rich", "tqdm", "json", "none"] = setting("rich", resume="free")
    """Display of the run's progress."""
    report_to: tuple[str, ...] = setting((), resume="free")
    """Trackers to report to, in addition to the run folder: wandb, tensorboard, trackio, jsonl, or the
    "module:attribute" reference of a tracker. See docs/monitoring.md."""
    run_name: str | None = setting(None, resume="free")
    """Name of the run in trackers; None takes the name of the run folder."""
    project: str = setting("groupax", resume="free")
    """Project of the run in wandb and trackio."""
    track_memory: bool = setting(False, resume="free")
    """Measure the memory in use after every step, in addition to its peak."""

    def check(self) -> None:
        """Raises a ValueError for a tracker that does not exist or is named twice."""
        for name in self.report_to:
            if name not in TRACKERS and ":" not in name:
                raise ValueError(
                    f"report_to must be of {', '.join(TRACKERS)}, or trackers of your own as 'module:class', got "
                    f"{name!r}{nearest(name, TRACKERS)}"
                )
        if len(set(self.report_to)) < len(self.report_to):
            raise ValueError(f"report_to names a tracker twice: {', '.join(self.report_to)}")


@dataclass(frozen=True, kw_only=True)
class RolloutLogSettings:
    """The completions that a run shows and keeps."""

    log_completions: bool = setting(True, resume="free")
    """Show a sample group now and then, and keep the rollouts of logged steps in the run folder."""
    log_completions_steps: int = ranged(1, 10**9, low=1, resume="free")
    """Keep the rollouts of logged steps that are multiples of this, and of the first and the last step."""
    rollout_log_gb: float | None = ranged(20.0, 1e9, resume="free")
    """Size limit of rollouts/ in GB. Beyond it steps are removed such that the others are evenly spaced, but never the
    first, the newest and the best one. None for no limit."""
    replay_steps: int = ranged(16, 10**6, resume="free")
    """Keep the rollouts of this many last steps too, and of every step with a diagnosis or an update that was skipped,
    whatever logging_steps, log_completions_steps and rollout_log_gb say, so that groupax replay has their inputs. 0
    leaves it to those."""
    replay_state_gb: float = ranged(1.0, 1e9, resume="free")
    """Size limit of states/ in GB: states of the run between its checkpoints, from which groupax replay starts. Models
    whose state exceeds a third of it have none; 0 keeps none."""
