"""Makes a bundle, and shows by replaying it that it is whole."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupax.replay.archive import pack
from groupax.replay.bundle import Part, collect_bundle, write_after
from groupax.replay.bundled import bundle_in
from groupax.replay.manifest import Manifest
from groupax.replay.outcome import Outcome
from groupax.replay.recorded import RecordedRun
from groupax.replay.session import replay_target
from groupax.replay.trainer import Make, ReplayTrainer, SettingsAt, Target


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
            yield f"  the model is not in it ({manifest.origin}; --include model adds it)"
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
    if path.exists() or path.is_symlink():
        raise ValueError(f"{path} exists already; remove it, or name another file")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"{path} cannot be written: {path.parent} is no folder that can be written to")
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
        if not outcome.stages[-1].is_equal:  # these weights are not the run's
            (folder / "after.safetensors").unlink(missing_ok=True)
        return Made(path, pack(folder, path), manifest, outcome)
