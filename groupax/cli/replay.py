"""`groupax replay`: a recorded step again, the same or under changes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from groupax.cli.resume import resumed_command
from groupax.cli.train import Train, inputs_of
from groupax.config import GRPOConfig
from groupax.runs.progress.named import progress_named
from groupax.settings.command_line import parsed
from groupax.terminal.printable import printable

if TYPE_CHECKING:
    from groupax.replay.session import Outcome
    from groupax.replay.trainer import ReplayTrainer, Target
    from groupax.runs.step_record import Stage


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Compute a step of a run again, and compare it with its record, or see what would have been under changes.

    The exit status is 1 if a stage differs from the record, and 0 under changes.
    """

    run_dir: tyro.conf.Positional[str]
    """Run folder. Nothing in it is changed."""
    step: int
    """The optimizer step."""
    stage: Literal["rollout", "reward", "advantage", "loss", "update"] = "rollout"
    """First stage to compute again; those before it are taken from the record."""
    with_: Annotated[tuple[str, ...], tyro.conf.arg(name="with")] = ()
    """Settings that differ, as key=value."""
    reward: tuple[str, ...] | None = None
    """Other reward functions: names of built-in ones, or module:function."""
    model: str | None = None
    """Other weights: a folder or hub id. Their optimizer starts afresh."""
    progress_bar: Literal["rich", "tqdm", "json", "none"] = "none"
    """Display of the replay's progress."""


def replay(arguments: Sequence[str]) -> int:
    """Runs `groupax replay`."""
    command = parsed(Replay, "replay", arguments)

    from groupax.replay.recorded import recorded_run
    from groupax.replay.session import replay_changed, replay_target
    from groupax.replay.show import changes, comparison
    from groupax.replay.trainer import Target

    run = recorded_run(command.run_dir.rstrip("/"))
    trained = trained_command(str(run.folder))
    target = Target(run, command.step, "data" if command.stage == "rollout" else command.stage)
    settings = changed_settings(command.with_, trained.args)
    own = maker(trained, command.progress_bar)
    if not (settings or command.reward or command.model):
        outcome = replay_target(target, own, trained.args)
        return _report(comparison(outcome), outcome)
    begin: "Stage" = "rollout" if command.model else "reward" if command.reward else "update"
    target = replace(target, stage=begin)
    other = replace(trained, model=command.model or trained.model)
    other = replace(other, reward_funcs=command.reward or trained.reward_funcs)
    makers = own, maker(other, command.progress_bar)
    outcome = replay_changed(target, *makers, trained.args, settings, other_weights=command.model is not None)
    logged = next((line for line in run.metrics if line["step"] == command.step and "loss" in line), {})
    first: "Stage" = next((stage.stage for stage in outcome.stages if not stage.is_equal), "update")
    _report(changes(outcome, run.table(command.step), logged, first), outcome)
    return 0


def trained_command(run: str) -> Train:
    """Returns the command that started a run.

    Raises:
        ValueError: The run was not started by `groupax train`.
    """
    try:
        command = resumed_command(run)
    except ValueError as error:
        if "started from Python" not in str(error):
            raise
        raise ValueError(
            f"the run in {run} was started from Python; replay it there: groupax.replay_step({run!r}, step, ...) "
            "with the arguments of its GRPOTrainer"
        ) from error
    if not isinstance(command, Train):
        raise ValueError(f"the run in {run} is one of groupax sft, whose steps are not recorded")
    return command


def maker(command: Train, progress_bar: str) -> "Callable[[Target, GRPOConfig], ReplayTrainer]":
    """Returns what makes a trainer of the command for a target."""

    def make(target: "Target", args: GRPOConfig) -> "ReplayTrainer":
        from groupax.replay.trainer import ReplayTrainer

        inputs = inputs_of(command)
        tools, environments = inputs.agents.load()
        dataset = inputs.dataset(command)
        fitted, _ = inputs.fitted(replace(command, args=args), dataset)
        given = inputs.model, inputs.rewards, fitted, dataset
        parts: dict[str, Any] = {"tools": tools, "environments": environments}
        return ReplayTrainer(target, *given, progress=progress_named(progress_bar), **parts)

    return make


def changed_settings(texts: Sequence[str], args: GRPOConfig) -> Mapping[str, Any]:
    """Returns the settings of --with, as values.

    Raises:
        ValueError: One is no setting, or has a value of another type.
    """
    import yaml

    given = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--with takes key=value, got {text!r}")
        given[key] = yaml.safe_load(value)
    changed = GRPOConfig.from_mapping({**vars(args), **given})
    return {key: getattr(changed, key) for key in given}


def _report(lines: Any, outcome: "Outcome") -> int:
    for line in lines:
        print(printable(line))
    return 0 if outcome.is_equal else 1
