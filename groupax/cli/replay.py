"""`groupax replay`: a recorded step again, the same or under changes, from a run or from a bundle."""

import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from groupax.cli.train import Train, command_of, inputs_of
from groupax.config import GRPOConfig
from groupax.runs.progress.named import progress_named
from groupax.settings.command_line import Positional, parsed
from groupax.terminal.printable import printable

if TYPE_CHECKING:
    from groupax.replay.bundled import Bundle
    from groupax.replay.recorded import RecordedRun
    from groupax.replay.trainer import Make, ReplayTrainer, SettingsAt, Target
    from groupax.runs.step_record import Stage


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Compute a step of a run again, and compare it with its record, or see what would have been under changes.

    The exit status is 1 if a stage differs from the record, and 0 under changes.
    """

    run: Positional[str]
    """Run folder, or a bundle that --bundle has made. Nothing of the run is changed."""
    step: int | None = None
    """The optimizer step; of a bundle the one that it has."""
    stage: Literal["rollout", "reward", "advantage", "loss", "update"] | None = None
    """First stage to compute again; those before it are taken from the record. The default is all of them."""
    with_: tuple[str, ...] = ()
    """Settings that differ, as key=value."""
    reward: tuple[str, ...] | None = None
    """Other reward functions: names of built-in ones, or module:function."""
    model: str | None = None
    """Other weights: a folder or hub id. Their optimizer starts afresh."""
    why: bool = False
    """Compute the share of each row in the gradient, and keep it in why/ of the run folder, for groupax view."""
    bundle: Path | None = None
    """Write the step with all that a replay needs into this file, such as bug.tar.zst, and replay it from there."""
    include: tuple[Literal["state", "model"], ...] | None = None
    """Parts of the bundle that may be large: the weights and the optimizer state before the step, by default if they
    are below 64 MB, and the model that the run started from, by default not."""
    base: str | None = None
    """Folder or hub id of the model that a bundle's run started from, if the bundle does not include it."""
    state: str | None = None
    """Folder of a bundle's run, or its checkpoint before the step, if the bundle does not include the state."""
    allow_code: bool = False
    """Import the functions that a bundle's settings and command name, and call its rewards and tools. Do so only with
    functions that you know."""
    max_gb: float = 8.0
    """Largest size of a bundle's unpacked content, in gigabytes."""
    progress_bar: Literal["rich", "tqdm", "json", "none"] = "none"
    """Display of the replay's progress."""


def replay(arguments: Sequence[str]) -> int:
    """Runs `groupax replay`."""
    command = parsed(Replay, "replay", arguments)
    path = Path(command.run).expanduser()
    if path.is_file():
        return _replay_bundle(command, path)
    if path.suffix == ".zst":
        raise ValueError(f"there is no file {path}")
    of_bundle = {"--base": command.base, "--state": command.state, "--allow_code": command.allow_code}
    if given := [flag for flag, value in of_bundle.items() if value]:
        raise ValueError(f"{given[0]} is for bundles, and {command.run} is no file")
    if command.step is None:
        raise ValueError("--step is missing: the optimizer step to compute again")

    from groupax.replay.recorded import recorded_run
    from groupax.replay.session import settings_of, target_of

    run = recorded_run(command.run.rstrip("/"))
    makers = maker(run, command.progress_bar), maker(run, command.progress_bar, command.model, command.reward)
    if command.bundle is not None:
        return _make_bundle(command, run, command.step, makers[0], settings_of(run))
    return _replayed(command, target_of(run, command.step, _stage(command)), makers, settings_of(run))


def _stage(command: Replay) -> "Stage | None":
    return "data" if command.stage == "rollout" else command.stage


def _replayed(
    command: Replay,
    target: "Target",
    makers: "tuple[Make, Make]",
    settings: "SettingsAt",
    weights_text: "Callable[[ReplayTrainer], str] | None" = None,
) -> int:
    """Computes a step again and prints what differs, or what is under changes; returns the exit status."""
    from groupax.replay.session import changed_settings, changed_target, replay_changed, replay_target

    run, step = target.run, target.step
    changed = changed_settings(_parsed_changes(command.with_), settings(step), command.model is not None)
    if not (changed or command.reward or command.model):
        outcome = replay_target(target, makers[0], settings, None, weights_text, command.why)
        print(outcome, flush=True)
        if outcome.shares is not None and weights_text is None:
            _print(f"kept in {outcome.shares.write(run.folder)}, for groupax view {shlex.quote(str(run.folder))}")
        return 0 if outcome.is_equal else 1
    if command.why:
        raise ValueError("--why is about the step as it was; leave out --with, --reward and --model")
    others = bool(command.reward), command.model is not None
    target = changed_target(run, step, _stage(command), changed, *others)
    scores = command.reward or (command.allow_code and run.command(step))
    if run.is_foreign and target.stage in ("data", "rollout") and not scores:
        raise ValueError("new completions have no recorded reward: give --reward, or --allow_code for that of the run")
    print(replay_changed(target, *makers, settings, changed, other_weights=others[1]), flush=True)
    return 0


def _make_bundle(command: Replay, run: "RecordedRun", step: int, make: "Make", settings: "SettingsAt") -> int:
    """Writes a bundle, replays it, and returns the exit status."""
    from groupax.replay.make_bundle import make_bundle

    assert command.bundle is not None, "a bundle is asked for"
    made = make_bundle(run, step, make, settings, command.bundle, command.include)
    print(made.outcome, flush=True)
    _print(*made.lines())
    return 0 if made.outcome.is_equal else 1


def _replay_bundle(command: Replay, path: Path) -> int:
    from groupax.replay.bundled import open_bundle
    from groupax.replay.session import target_of

    given = [flag for flag, value in {"--bundle": command.bundle, "--include": command.include}.items() if value]
    if given:
        raise ValueError(f"{given[0]} is for run folders, and {path} is a bundle already")
    with tempfile.TemporaryDirectory(prefix="groupax-bundle-") as folder:
        options = command.base, command.state, command.allow_code, command.max_gb
        bundle = open_bundle(path, Path(folder) / "bundle", *options)
        step = bundle.manifest.step
        if command.step not in (None, step):
            raise ValueError(f"{path} has step {step}, not {command.step}")
        bundle = replace(bundle, progress_bar=command.progress_bar)
        makers, first = bundle_makers(command, bundle)
        for line in bundle.about(with_code=command.allow_code):
            _print(line)
        target = target_of(bundle.run, step, first)
        return _replayed(command, target, makers, bundle.settings, bundle.weights_text)


def bundle_makers(command: Replay, bundle: "Bundle") -> "tuple[tuple[Make, Make], Stage | None]":
    """Returns what makes the trainers of a bundle, as it was and with other rewards, and the first stage to compute."""
    own: "Make" = bundle.make
    first: "Stage" = _stage(command) or bundle.stage
    if command.allow_code and bundle.run.command(bundle.manifest.step) is not None:
        inputs = inputs_of(trained_command(bundle.run, bundle.manifest.step))

        def with_code(target: "Target", args: GRPOConfig) -> "ReplayTrainer":
            tools, environments = inputs.agents.load()
            parts = {**bundle.tokenizer_part, "tools": tools, "environments": environments}
            return bundle.trainer(target, args, command.reward or inputs.rewards, parts)

        return (with_code, with_code), _stage(command)
    if command.stage in ("rollout", "reward") and bundle.stage == "advantage":
        raise ValueError(
            f"--stage {command.stage} needs the environments or functions of the run, which a bundle does not have; "
            "with --allow_code they are imported, if you have them"
        )

    def with_rewards(target: "Target", args: GRPOConfig) -> "ReplayTrainer":
        if command.model:
            return replace(bundle, base=command.model).make(target, args)
        return bundle.trainer(target, args, list(command.reward or ()), bundle.parts)

    return (own, with_rewards if command.reward or command.model else own), first


def trained_command(run: "RecordedRun", step: int) -> Train:
    """Returns the command of the process that took a step.

    Raises:
        ValueError: The run was not started by `groupax train`.
    """
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


def maker(
    run: "RecordedRun", progress_bar: str, model: str | None = None, rewards: Sequence[str] | None = None
) -> "Make":
    """Returns what makes a trainer for a target.

    Args:
        run: The recorded run, whose commands it follows.
        progress_bar: Display of its progress.
        model: Another model.
        rewards: Other reward functions.
    """

    def make(target: "Target", args: GRPOConfig) -> "ReplayTrainer":
        from groupax.replay.trainer import ReplayTrainer

        command = trained_command(run, target.step)
        command = replace(command, model=model or command.model, reward_funcs=rewards or command.reward_funcs)
        inputs = inputs_of(command)
        tools, environments = inputs.agents.load()
        dataset = inputs.dataset(command)
        fitted, _ = inputs.fitted(replace(command, args=args), dataset)
        parts: dict[str, Any] = {"tools": tools, "environments": environments, "progress": progress_named(progress_bar)}
        return ReplayTrainer(target, inputs.model, inputs.rewards, fitted, dataset, **parts)

    return make


def _parsed_changes(texts: Sequence[str]) -> Mapping[str, Any]:
    """Returns the settings of --with.

    Raises:
        ValueError: One has no value.
    """
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
