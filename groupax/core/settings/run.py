"""Settings of a run as a whole: its folder and length, reports, checkpoints and evaluations. Imports no jax."""

from dataclasses import dataclass
from typing import Any, Literal

from groupax.core.settings.fields import nearest, ranged, setting
from groupax.core.settings.sampling import EvalSamplingSettings

PromptOrder = Literal["shuffled", "shuffled_by_torch", "seeded_by_epoch", "dataset"]


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Folder, seed, length and data order of a run."""

    output_dir: str = setting("runs/grpo", resume="free")
    """Run folder, local or in a bucket (s3://, gs://): config.json, metrics.jsonl, rollouts/, checkpoints/ and the
    trained model/. An earlier run in it is continued if it is the same run (see resume), and otherwise moved aside."""
    seed: int = ranged(0, 2**63 - 1, resume="fixed")
    """Seed of data order and sampling. The same seed gives the same run on the same machine."""
    num_train_epochs: float = ranged(3.0, 1e6)
    """Passes over the dataset; ignored if max_steps is set."""
    max_steps: int = ranged(-1, 10**9, low=1, also=-1, because="-1 follows num_train_epochs")
    """Optimizer steps; -1 follows num_train_epochs."""
    max_bad_steps: int = ranged(3, 10**9, low=1, resume="free")
    """Stop after this many consecutive updates that were skipped because the loss or a gradient was not finite."""

    def check(self) -> None:
        """Raises a ValueError if there would be nothing to train."""
        if self.max_steps == -1 and not self.num_train_epochs:
            raise ValueError(
                "num_train_epochs is 0 and max_steps -1, so that there is nothing to train; set one of them"
            )


@dataclass(frozen=True, kw_only=True)
class PromptOrderSettings:
    """The order in which a run visits its prompts."""

    prompt_order: PromptOrder = setting("shuffled", resume="fixed")
    """Order of the prompts in an epoch: a new permutation each epoch, one that PyTorch's generator draws, in one
    sequence for the seed ("shuffled_by_torch") or for seed + epoch ("seeded_by_epoch"), or the order of the dataset."""
    drop_last: bool = setting(False, resume="fixed")
    """Drop the last incomplete rollout of each epoch, as a PyTorch DataLoader does with drop_last; otherwise rollouts
    continue into the next epoch."""


MetricDefinitions = Literal["groupax", "trl"]
TRACKERS = ("wandb", "tensorboard", "trackio")


@dataclass(frozen=True, kw_only=True)
class ReportingSettings:
    """Logs, displays and trackers of a run."""

    logging_steps: int = ranged(1, 10**9, low=1, resume="free")
    """Write metrics (means over these steps) and rollouts every this many steps."""
    metric_definitions: MetricDefinitions = setting("groupax", resume="explicit")
    """Definition of the metrics that TRL defines differently: "trl" as in TRL 1.16, see docs/algorithm.md."""
    profile: int = ranged(0, 10**6, resume="free")
    """Trace this many steps, from the third step on, into profile/ of the run folder, for Perfetto or XProf."""
    progress_bar: Literal["rich", "json", "none"] = setting("rich", resume="free")
    """Display of the run's progress."""
    report_to: tuple[str, ...] = setting((), resume="free")
    """Trackers to report to, in addition to the run folder: wandb, tensorboard, trackio, or the
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
    first and the newest one. None for no limit."""
    replay_steps: int = ranged(16, 10**6, resume="free")
    """Keep the rollouts of this many last steps too, and of every step with a diagnosis or an update that was skipped,
    whatever logging_steps, log_completions_steps and rollout_log_gb say, so that groupax replay has their inputs. 0
    leaves it to those."""


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


@dataclass(frozen=True, kw_only=True)
class EvaluationSchedule:
    """Schedule of evaluations."""

    eval_steps: int = ranged(0, 10**9, resume="free")
    """Evaluate on eval_dataset every this many steps during training; 0 never does. Before and after training, groupax
    train evaluates in any case."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(EvaluationSchedule, EvalSamplingSettings):
    """Schedule, number of completions and sampling of evaluations."""

    eval_num_generations: int = ranged(1, 2**16, low=1, resume="free")
    """Completions per prompt in evaluation; above 1, pass@k up to this k and maj@k of all are reported."""
    eval_max_completion_length: int | None = ranged(None, 10**9, low=1, resume="free")
    """Longest completion in evaluation; None takes max_completion_length."""
    correctness_reward: str | None = setting(None, resume="free")
    """Reward function whose 1 means that a completion is correct, for pass@k and solved groups; None takes the first
    built-in one of that kind, e.g. gsm8k_accuracy, if there is one."""

    def check(self) -> None:
        """Raises a ValueError for several greedy completions of a prompt."""
        if self.eval_num_generations > 1 and self.eval_temperature == 0:
            raise ValueError(
                f"eval_num_generations is {self.eval_num_generations}, but at eval_temperature 0 all completions of a "
                "prompt are the same; set eval_temperature, e.g. to 0.8"
            )


# Settings of what a replay neither does nor shows.
QUIET: dict[str, Any] = {
    "eval_steps": 0,
    "report_to": (),
    "save_steps": 0,
    "save_interval_minutes": 0.0,
    "do_last_save": False,
    "metric_for_best_model": None,
    "profile": 0,
    "logging_steps": 1,
    "log_completions": True,
    "log_completions_steps": 1,
    "rollout_log_gb": None,
    "rollout_servers": (),
    "rollout_folder": None,
}
# Settings that no step depends on.
UNSEEN = frozenset({"output_dir", "resume", "progress_bar", "run_name", "project", "track_memory", *QUIET})
