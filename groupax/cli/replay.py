"""`groupax replay`: a recorded step again."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from groupax.cli.train import Train, command_of, inputs_of
from groupax.core.config import GRPOConfig
from groupax.core.settings.command_line import Positional, parsed
from groupax.runs.progress.named import progress_named

if TYPE_CHECKING:
    from groupax.runs.step_record import Stage
    from groupax.satellites.replay.recorded import RecordedRun
    from groupax.satellites.replay.trainer import Make, ReplayTrainer, Target


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Compute a step of a run again, and compare it with its record.

    The exit status is 1 if a stage differs from the record.
    """

    run: Positional[str]
    """Run folder, of which nothing is changed."""
    step: int
    """The optimizer step to compute again."""
    stage: Literal["rollout", "reward", "advantage", "loss", "update"] | None = None
    """First stage to compute again; those before it are taken from the record. The default is all of them."""
    progress_bar: Literal["rich", "json", "none"] = "none"
    """Display of the replay's progress."""


def replay(arguments: Sequence[str]) -> int:
    """Runs `groupax replay`, and returns the exit status."""
    command = parsed(Replay, "replay", arguments)

    from groupax.satellites.replay.recorded import recorded_run
    from groupax.satellites.replay.session import replay_steps, target_of

    run = recorded_run(command.run.rstrip("/"))
    stage: "Stage | None" = "data" if command.stage == "rollout" else command.stage
    target = target_of(run, command.step, stage)
    [outcome] = replay_steps(target, maker(run, command.progress_bar))
    print(outcome, flush=True)
    return 0 if outcome.is_equal else 1


def trained_command(run: "RecordedRun", step: int) -> Train:
    """Returns the command of the process that took a step, if `groupax train` started it."""
    folder, recorded = str(run.folder), run.command(step)
    if recorded is None:
        raise ValueError(
            f"the run in {folder} was started from Python; replay it there: groupax.replay_step({folder!r}, {step}, "
            "...) with the arguments of its GRPOTrainer"
        )
    command = command_of(recorded, run.settings(step), folder)
    if not isinstance(command, Train):
        raise ValueError(f"the run in {folder} is one of groupax sft, whose steps are not recorded")
    return command


def maker(run: "RecordedRun", progress_bar: str) -> "Make":
    """Returns what makes a trainer for a target by the commands of its run."""

    def make(target: "Target", args: GRPOConfig) -> "ReplayTrainer":
        from groupax.satellites.replay.trainer import ReplayTrainer

        command = trained_command(run, target.step)
        inputs = inputs_of(command)
        tools, environments = inputs.agents.load()
        dataset = inputs.dataset(command)
        fitted, _ = inputs.fitted(replace(command, args=args), dataset)
        parts: dict[str, Any] = {"tools": tools, "environments": environments, "progress": progress_named(progress_bar)}
        return ReplayTrainer(target, inputs.model, inputs.rewards, fitted, dataset, **parts)

    return make
