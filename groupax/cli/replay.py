"""`groupax replay`: a recorded step again, the same or under changes."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from groupax.cli.train import Train, command_of, inputs_of
from groupax.core.config import GRPOConfig
from groupax.core.settings.command_line import Positional, parsed
from groupax.core.terminal.printable import printable
from groupax.runs.progress.named import progress_named

if TYPE_CHECKING:
    from groupax.runs.step_record import Stage
    from groupax.satellites.replay.recorded import RecordedRun
    from groupax.satellites.replay.trainer import Make, ReplayTrainer, Target


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Compute a step of a run again, and compare it with its record, or see what would have been under changes.

    The exit status is 1 if a stage differs from the record, and 0 under changes.
    """

    run: Positional[str]
    """Run folder, of which nothing is changed."""
    step: int
    """The optimizer step to compute again."""
    stage: Literal["rollout", "reward", "advantage", "loss", "update"] | None = None
    """First stage to compute again; those before it are taken from the record. The default is all of them."""
    with_: tuple[str, ...] = ()
    """Settings that differ, as key=value."""
    reward: tuple[str, ...] | None = None
    """Other reward functions: names of built-in ones, or module:function."""
    why: bool = False
    """Compute the share of each row in the gradient, and keep it in why/ of the run folder, for groupax view."""
    progress_bar: Literal["rich", "json", "none"] = "none"
    """Display of the replay's progress."""


def replay(arguments: Sequence[str]) -> int:
    """Runs `groupax replay`, and returns the exit status."""
    command = parsed(Replay, "replay", arguments)

    from groupax.satellites.replay.recorded import recorded_run
    from groupax.satellites.replay.session import (
        changed_settings,
        changed_target,
        replay_changed,
        replay_target,
        settings_of,
        target_of,
    )

    run, step = recorded_run(command.run.rstrip("/")), command.step
    stage: "Stage | None" = "data" if command.stage == "rollout" else command.stage
    own, settings = maker(run, command.progress_bar), settings_of(run)
    changed = changed_settings(_parsed_changes(command.with_), settings(step))
    if not (changed or command.reward):
        outcome = replay_target(target_of(run, step, stage), own, settings, why=command.why)
        print(outcome, flush=True)
        if outcome.shares is not None:
            _print(f"kept in {outcome.shares.write(run.folder)}, for groupax view {shlex.quote(str(run.folder))}")
        return 0 if outcome.is_equal else 1
    if command.why:
        raise ValueError("--why is about the step as it was; leave out --with and --reward")
    target = changed_target(run, step, stage, changed, bool(command.reward))
    other = maker(run, command.progress_bar, command.reward)
    print(replay_changed(target, own, other, settings, changed), flush=True)
    return 0


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


def maker(run: "RecordedRun", progress_bar: str, rewards: Sequence[str] | None = None) -> "Make":
    """Returns what makes a trainer for a target by the commands of its run, maybe with other reward functions."""

    def make(target: "Target", args: GRPOConfig) -> "ReplayTrainer":
        from groupax.satellites.replay.trainer import ReplayTrainer

        command = trained_command(run, target.step)
        command = replace(command, reward_funcs=rewards or command.reward_funcs)
        inputs = inputs_of(command)
        tools, environments = inputs.agents.load()
        dataset = inputs.dataset(command)
        fitted, _ = inputs.fitted(replace(command, args=args), dataset)
        parts: dict[str, Any] = {"tools": tools, "environments": environments, "progress": progress_named(progress_bar)}
        return ReplayTrainer(target, inputs.model, inputs.rewards, fitted, dataset, **parts)

    return make


def _parsed_changes(texts: Sequence[str]) -> Mapping[str, Any]:
    """Returns the settings of --with."""
    import yaml

    given = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--with takes key=value, got {text!r}")
        given[key] = yaml.safe_load(value)
    return given


def _print(*lines: str) -> None:
    print(*map(printable, lines), sep="\n", flush=True)
