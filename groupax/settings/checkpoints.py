"""Settings of checkpoints. Imports no jax."""

from dataclasses import dataclass

from groupax.settings.fields import ranged, setting


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Schedule and retention of checkpoints, and the one to resume from."""

    save_steps: int = ranged(0, 10**9, resume="free")
    """Save a checkpoint every this many steps; 0 saves by time only."""
    save_interval_minutes: float = ranged(10.0, 1e7, resume="free")
    """Save a checkpoint when this many minutes have passed since the last one; 0 saves by steps only."""
    save_total_limit: int | None = ranged(2, 10**6, resume="free")
    """Checkpoints to keep, the newest ones; 0 or None keeps all."""
    save_optimizer_state: bool = setting(True, resume="free")
    """Save the optimizer state; checkpoints without it are smaller, but a resumed run differs from an uninterrupted
    one."""
    do_last_save: bool = setting(True, resume="free")
    """Save a checkpoint at the end of the run too, from which a longer run can continue."""
    metric_for_best_model: str | None = setting(None, resume="free")
    """Also keep the checkpoint with the best value of this metric, e.g. "eval_reward"."""
    greater_is_better: bool = setting(True, resume="free")
    """Take the highest value of metric_for_best_model as the best one; otherwise the lowest."""
    resume: str = setting("auto", resume="free")
    """Checkpoint to resume from: "auto" takes the newest intact one in output_dir if it belongs to the same run,
    "never" starts from scratch, and the path of a run or a checkpoint resumes that one with this run's settings."""
