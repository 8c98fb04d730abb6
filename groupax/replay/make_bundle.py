"""Makes a bundle, and shows by replaying it that it is whole."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupax.config import GRPOConfig
from groupax.replay.archive import pack
from groupax.replay.bundle import Manifest, Part, collect_bundle, write_after
from groupax.replay.bundled import Bundle, bundle_in, open_bundle
from groupax.replay.recorded import RecordedRun, recorded_run
from groupax.replay.session import Outcome, replay_target, settings_of
from groupax.replay.trainer import Make, ReplayTrainer, SettingsAt, Target
from groupax.runs.step_record import Stage


@dataclass(frozen=True, eq=False)
class Made:
    """A bundle that was made.

    Attributes:
        path: Its file.
        num_bytes: Size of the file.
        manifest: What it is.
        outcome: What a replay of it has computed on this machine.
    """

    path: Path
    num_bytes: int
    manifest: Manifest
    outcome: Outcome

    def lines(self) -> Iterator[str]:
        """Yields what is in it, what is not, and how it is replayed, as text."""
        manifest, needs = self.manifest, ""
        yield f"{self.path}: {self.num_bytes / 1e6:.2f} MB, replayed above"
        if "model" not in manifest.includes:
            name = manifest.model or "one made in memory"
            yield f"  the model is not in it ({name}; --include model adds it)"
            needs += " --base MODEL"
        if manifest.start and "state" not in manifest.includes:
            yield f"  the weights after step {manifest.start} are not in it (--include state adds them)"
            needs += " --state RUN_OR_CHECKPOINT"
        yield f"whoever has it replays it with: groupax replay {self.path.name}{needs}"


def make_bundle(
    run: RecordedRun, step: int, make: Make, settings: SettingsAt, path: Path, include: Sequence[Part] | None = None
) -> Made:
    """Writes a bundle of a step, and replays it.

    Args:
        run: The recorded run.
        step: The step.
        make: Makes the trainer of the run.
        settings: Returns the settings of the run at a step.
        path: The file to write.
        include: Parts to include; None for the state if it is small.

    Raises:
        ValueError: The step was not recorded, or cannot be bundled.
    """
    if path.exists():
        raise ValueError(f"{path} exists already; remove it, or name another file")
    with tempfile.TemporaryDirectory(prefix="groupax-bundle-") as scratch:
        folder = Path(scratch) / "bundle"
        manifest = collect_bundle(run, step, make, settings, folder, include)
        model = None if "model" in manifest.includes else manifest.model
        bundle = bundle_in(folder, model, None if "state" in manifest.includes else str(run.folder), code=True)
        weights: list[Any] = []

        def use(trainer: ReplayTrainer) -> None:
            if "state" in manifest.includes:
                trainer.finish = lambda: weights.append(write_after(trainer, folder))

        outcome = replay_target(Target(bundle.run, step, bundle.stage), bundle.make, bundle.settings, use)
        return Made(path, pack(folder, path), manifest, outcome)


def bundle_step(
    run: str | Path,
    step: int,
    path: str | Path,
    *arguments: Any,
    args: GRPOConfig | None = None,
    include: Sequence[Part] | None = None,
    **named: Any,
) -> Made:
    """Writes a bundle of a step of a run that was started from Python.

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

    def make(target: Target, args: GRPOConfig) -> ReplayTrainer:
        return ReplayTrainer(target, *arguments, args=args, **named)

    return make_bundle(recorded, step, make, settings_of(recorded, args), Path(path), include)


def replay_bundle(
    path: str | Path, base: str | None = None, state: str | None = None, stage: Stage | None = None
) -> Outcome:
    """Replays a bundle, of which no code runs, and compares it with the record.

    Args:
        path: The file.
        base: Folder or hub id of the model that the run started from; None for the one in the bundle.
        state: Run folder or checkpoint that has the weights before the step; None for those in the bundle.
        stage: First stage to compute again; None for the first that needs no code of the run.

    Raises:
        ValueError: It is no bundle, is damaged, or lacks what is not given.
    """
    with tempfile.TemporaryDirectory(prefix="groupax-bundle-") as scratch:
        bundle: Bundle = open_bundle(Path(path), Path(scratch) / "bundle", base, state)
        target = Target(bundle.run, bundle.manifest.step, stage or bundle.stage)
        return replay_target(target, bundle.make, bundle.settings, None, bundle.weights_text)
