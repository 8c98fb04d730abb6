"""Replays of runs that were started from Python: functions that take the arguments of the run's `GRPOTrainer`.

Runs that `groupax train` started know these, and are replayed by `groupax replay` and `groupax bisect`.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupax.config import GRPOConfig
from groupax.replay.bisect import Bisection, bisected
from groupax.replay.bundled import open_bundle
from groupax.replay.causes import parsed_condition
from groupax.replay.changed import changed_settings, changed_target, replay_changed
from groupax.replay.make_bundle import Made, Part, make_bundle
from groupax.replay.outcome import Outcome
from groupax.replay.recorded import recorded_run
from groupax.replay.session import replay_target, settings_of, target_of
from groupax.replay.trainer import Make, ReplayTrainer, Target
from groupax.runs.step_record import Stage


def replay_step(
    run: str | Path,
    step: int,
    *arguments: Any,
    args: GRPOConfig | None = None,
    stage: Stage | None = None,
    why: bool = False,
    changes: Mapping[str, Any] | None = None,
    other_rewards: Any = None,
    other_model: Any = None,
    **named: Any,
) -> Outcome:
    """Computes a step of a run again, and compares it with its record, or under changes with what it was.

    Args:
        run: The run folder, which is not changed, but for its `why/`.
        step: The optimizer step.
        arguments: Model and reward functions, as the run's `GRPOTrainer` had them.
        args: Settings of the run; None takes those in its folder, and shows no progress.
        stage: First stage to compute again; those before it are taken from the record. None for all that this machine
            computes, or under changes for the first that these reach.
        why: Whether to compute the shares of rows in the gradient, and to keep them for `groupax view`.
        changes: Settings that differ, by name.
        other_rewards: Reward functions that score the recorded completions instead of the run's.
        other_model: A model that samples and is trained instead of the run's, with a fresh optimizer.
        named: Further arguments of the run's `GRPOTrainer`, such as `train_dataset`.

    Returns:
        The outcome, which prints as what differs.

    Raises:
        ValueError: The step was not recorded, the run is another one, or a setting cannot be used.

    Example:
        >>> outcome = replay_step("runs/one", 812, model, reward, train_dataset=prompts)  # doctest: +SKIP
        >>> print(outcome, outcome.is_equal)  # doctest: +SKIP
        >>> changed = replay_step("runs/one", 812, model, reward, changes={"beta": 0.1})  # doctest: +SKIP
    """
    recorded = recorded_run(run)
    settings, given = settings_of(recorded, args), _by_name(arguments, named)
    if changes is None and other_rewards is None and other_model is None:
        outcome = replay_target(target_of(recorded, step, stage), _maker(given), settings, why=why)
        if outcome.shares is not None:
            outcome.shares.write(recorded.folder)
        return outcome
    if why:
        raise ValueError("why=True is about the step as it was; leave out changes, other_rewards and other_model")
    others = {"reward_funcs": other_rewards, "model": other_model}
    make = _maker({**given, **{name: value for name, value in others.items() if value is not None}})
    changed = changed_settings(changes or {}, settings(step), other_model is not None)
    target = changed_target(recorded, step, stage, changed, other_rewards is not None, other_model is not None)
    return replay_changed(target, _maker(given), make, settings, changed, other_model is not None)


def bisect_run(
    run: str | Path, until: str, *arguments: Any, args: GRPOConfig | None = None, window: int = 8, **named: Any
) -> Bisection:
    """Finds the first step of a run whose metrics fulfil a condition, and the update and the rows that made it so.

    Args:
        run: The run folder, which is not changed.
        until: The condition, such as "kl > 1" or "grad_norm > 10 or loss is nan".
        arguments: Model and reward functions, as the run's `GRPOTrainer` had them.
        args: Settings of the run; None takes those in its folder, and shows no progress.
        window: Number of steps to compute again, of which the last one is the first that fulfils the condition.
        named: Further arguments of the run's `GRPOTrainer`, such as `train_dataset`.

    Returns:
        What was found, which prints as text.

    Raises:
        ValueError: No step fulfils the condition, or the run is another one.

    Example:
        >>> print(bisect_run("runs/one", "kl > 1", model, reward, train_dataset=prompts))  # doctest: +SKIP
    """
    recorded = recorded_run(run)
    make = _maker(_by_name(arguments, named))
    return bisected(recorded, parsed_condition(until), make, settings_of(recorded, args), window)


def bundle_step(
    run: str | Path,
    step: int,
    path: str | Path,
    *arguments: Any,
    args: GRPOConfig | None = None,
    include: Sequence[Part] | None = None,
    **named: Any,
) -> Made:
    """Writes a bundle of a step of a run.

    Args:
        run: The run folder, which is not changed.
        step: The optimizer step.
        path: The file to write, such as "bug.tar.zst".
        arguments: Model and reward functions, as the run's `GRPOTrainer` had them.
        args: Settings of the run; None takes those in its folder, and shows no progress.
        include: "state", "model" or both; None for the state if it is small.
        named: Further arguments of the run's `GRPOTrainer`, such as `train_dataset`.

    Raises:
        ValueError: The step was not recorded, or cannot be bundled.

    Example:
        >>> bundle_step("runs/one", 812, "bug.tar.zst", model, reward, train_dataset=prompts)  # doctest: +SKIP
    """
    recorded = recorded_run(run)
    make = _maker(_by_name(arguments, named))
    return make_bundle(recorded, step, make, settings_of(recorded, args), Path(path), include)


def replay_bundle(
    path: str | Path,
    base: str | None = None,
    state: str | None = None,
    stage: Stage | None = None,
    allow_code: bool = False,
) -> Outcome:
    """Replays a bundle, whose rewards and tools' answers are those of the record, and compares it with that.

    Args:
        path: The file.
        base: Folder or hub id of the model that the run started from; None for the one in the bundle.
        state: Run folder or checkpoint that has the weights before the step; None for those in the bundle.
        stage: First stage to compute again; None for the first that needs no code of the run.
        allow_code: Whether to import the functions that its settings name, such as an own loss. Do so only with
            functions that you know.

    Raises:
        ValueError: It is no bundle, is damaged, or lacks what is not given.
    """
    with tempfile.TemporaryDirectory(prefix="groupax-bundle-") as scratch:
        bundle = open_bundle(Path(path), Path(scratch) / "bundle", base, state, allow_code)
        target = Target(bundle.run, bundle.manifest.step, stage or bundle.stage)
        return replay_target(target, bundle.make, bundle.settings, weights_text=bundle.weights_text)


def _by_name(arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    if len(arguments) > 2:
        raise TypeError(f"model and reward functions may be given by position, got {len(arguments)} positions")
    return {**dict(zip(("model", "reward_funcs"), arguments, strict=False)), **named}


def _maker(given: Mapping[str, Any]) -> Make:
    def make(target: Target, args: GRPOConfig) -> ReplayTrainer:
        return ReplayTrainer(target, args=args, **given)

    return make
