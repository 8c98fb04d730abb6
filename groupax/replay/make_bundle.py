"""Makes a bundle, and shows by replaying it that it is whole."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from groupax.config import GRPOConfig
from groupax.data.images import as_urls, has_images, with_images
from groupax.replay.bundle import FORMAT, TREES, Manifest, RecordedTool, pack
from groupax.replay.bundled import bundle_in
from groupax.replay.outcome import Outcome
from groupax.replay.recorded import RecordedRun, recorded_run
from groupax.replay.session import arguments_by_name, maker_of, replay_target, settings_of
from groupax.replay.trainer import Make, ReplayTrainer, SettingsAt, Target, first_of_rollout, prepared
from groupax.runs.checkpoints import arrays
from groupax.runs.checkpoints.fingerprint import versions
from groupax.runs.checkpoints.store import OWN, STATE
from groupax.runs.header import process_of
from groupax.runs.rollout_log import RolloutLog
from groupax.runs.step_record import NAME, row_digest

Part = Literal["state", "model"]
SMALL_STATE_BYTES = 64 * 2**20  # of a state that is included without being asked for
FILES = ("config.json", "run.json", "command.json", "diagnostics.jsonl")


def collect_bundle(
    run: RecordedRun, step: int, make: Make, settings: SettingsAt, folder: Path, include: Sequence[Part] | None = None
) -> Manifest:
    """Writes the files of a bundle into a new folder.

    The state before the step's rollout comes from a replay up to it.

    Args:
        run: The recorded run.
        step: The step.
        make: Makes the trainer of the run.
        settings: Returns the settings of the run at a step.
        folder: The folder.
        include: Parts to include; None for the state if it is small.

    Raises:
        ValueError: The step was not recorded, or its dataset has what JSON and PNG cannot hold.
    """
    target = Target(run, step)
    target.check()
    start = first_of_rollout(step, settings(step))
    folder.mkdir(parents=True)
    if start:
        target = Target(run, start, "update", saves=True)
    with prepared(target, make, settings) as (ready, args):
        trainer = make(ready, args)
        identity = trainer.own_identity()
        num_bytes = 3 * sum(leaf.nbytes for leaf in arrays.named_leaves(trainer.learner.state.params).values())
        includes: list[str] = [*(("state",) * (num_bytes <= SMALL_STATE_BYTES) if include is None else include)]
        if trainer.model_name is None:  # there is nothing that one could refer to
            includes.append("model")
        includes = [*dict.fromkeys(includes)]
        if "model" in includes:
            _write_model(trainer, folder / "model")
        if start and "state" in includes:
            trainer.train()
            identity = trainer.run.identity  # that the state has
            _check_state(trainer, run, start)
            _write_state(trainer.run_folder.path / "checkpoints" / OWN.name_of(start), folder / "state")
            first = start
        else:
            saved = run.checkpoint(start)
            first = 0 if saved is None else saved.step
        visits = _write_rows(trainer, run, range(_num_prompts(run, first), _num_prompts(run, step)), folder)
        rules = trainer.rules
        plays = not rules.has_environments and rules.rollout_func is None
        manifest = Manifest(
            format=FORMAT,
            groupax=versions()["groupax"],
            step=step,
            start=first,
            run=str(run.folder.resolve()),
            model=str(trainer.model_name or ""),
            num_steps=trainer.num_steps,
            num_examples=len(trainer.prompts),
            visits=visits,
            rewards=[reward.name for reward in trainer.rewards],
            tools=_tools_of(trainer) if plays else [],
            identity=identity,
            includes=includes,
            plays=plays,
        )
        _copy_run(run, step, first, folder / "run")
    if not run.keeps([step]):
        _write_completions(run, step, make, settings, folder / "run" / "rollouts")
    (folder / "bundle.json").write_text(json.dumps(asdict(manifest), indent=1) + "\n", encoding="utf-8")
    return manifest


def _num_prompts(run: RecordedRun, step: int) -> int:
    return run.records[step].num_prompts if step else 0


def _check_state(trainer: ReplayTrainer, run: RecordedRun, step: int) -> None:
    """Checks that a trainer has the weights that the run had after a step.

    Raises:
        ValueError: It has others, with which a bundle would not be of this run.
    """
    now = RecordedRun(trainer.run_folder.path).records.get(step)
    if now is not None and now.update != run.records[step].update:
        changes = run.machine_changes(step, process_of(trainer.learner.mesh))
        raise ValueError(
            f"the weights after step {step} come out otherwise here than in {run.folder}, so that a bundle with them "
            f"would not show what the run did: {'; '.join(changes) or 'groupax replay shows where they part'}. Make it "
            "on such a machine, or from a step whose checkpoint was kept (save_steps)"
        )


def _write_state(checkpoint: Path, folder: Path) -> None:
    from safetensors.numpy import save_file

    folder.mkdir()
    shutil.copy(checkpoint / STATE, folder / STATE)
    for name in TREES:
        if (checkpoint / name).is_dir():
            save_file(_contiguous(arrays.read_on_host(checkpoint / name)), folder / f"{name}.safetensors")


def write_after(trainer: ReplayTrainer, folder: Path) -> None:
    """Writes the weights after a step into the folder of its bundle."""
    from safetensors.numpy import save_file

    save_file(_contiguous(arrays.named_leaves(trainer.learner.state.params)), folder / "after.safetensors")


def _contiguous(tree: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.ascontiguousarray(leaf).reshape(leaf.shape) for name, leaf in tree.items()}


def _tools_of(trainer: ReplayTrainer) -> list[RecordedTool]:
    tools = (tool for setup in trainer.rules.setups.values() for tool in setup.tools.values())
    return [
        RecordedTool(
            schema=dict(tool.schema),
            is_async=tool.is_async,
            parallel=tool.parallel,
            timeout_s=tool.timeout_s,
            opens=tool.open is not None,
        )
        for tool in tools
    ]


def _write_rows(trainer: ReplayTrainer, run: RecordedRun, positions: range, folder: Path) -> dict[str, int]:
    """Writes the rows that are visited at these positions, and the one with the longest prompt.

    Returns:
        The index of the row among these by the position.
    """
    prompts = trainer.prompts
    visited = [trainer.collector.visited(position, 1)[0] for position in positions]
    longest = max(range(len(prompts)), key=lambda index: len(prompts.token_ids[index]))
    indices = [*dict.fromkeys([*visited, longest])]
    lines = []
    for index in indices:
        row = dict(prompts.examples[index])
        sees = has_images(row)
        line = json.dumps(as_urls(row) if sees else row, default=repr)
        again = json.loads(line)
        if row_digest(with_images(again, f"row {index}") if sees else again) != row_digest(row):
            raise ValueError(f"row {index} of the dataset of {run.folder} has values that JSON and PNG cannot hold")
        lines.append(line + "\n")
    (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    return {str(position): indices.index(index) for position, index in zip(positions, visited, strict=True)}


def _copy_run(run: RecordedRun, step: int, start: int, folder: Path) -> None:
    """Copies what a run has of the steps after `start` up to `step`."""
    folder.mkdir()
    for name in FILES:
        if (run.folder / name).is_file():
            shutil.copy(run.folder / name, folder / name)
    if (run.folder / "tokenizer").is_dir():
        shutil.copytree(run.folder / "tokenizer", folder / "tokenizer")
    records = [json.dumps(vars(record)) + "\n" for number, record in sorted(run.records.items()) if number <= step]
    (folder / NAME).write_text("".join(records), encoding="utf-8")
    lines = [json.dumps(line) + "\n" for line in run.metrics if line["step"] <= step]
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    kept, log = RolloutLog(folder / "rollouts"), RolloutLog(run.folder / "rollouts")
    kept.folder.mkdir()
    last = run.records[step].num_rollouts
    for number, record in run.records.items():  # a rollout may be kept by a later step than this one
        is_used = number > start and (number <= step or record.num_rollouts == last)
        if is_used and log.path(number).is_file():
            shutil.copy(log.path(number), kept.path(number))
    first = run.records[start].num_rollouts if start else 0
    for number in range(first, last):
        for path in run.calls(number):
            (folder / "calls").mkdir(exist_ok=True)
            shutil.copy(path, folder / "calls")


def _write_completions(run: RecordedRun, step: int, make: Make, settings: SettingsAt, folder: Path) -> None:
    """Writes the completions of a step that were not kept, as a replay computes them.

    Raises:
        ValueError: It computes others.
    """
    with prepared(Target(run, step), make, settings) as (ready, args):
        trainer = make(ready, args)
        trainer.train()
        now, then = RecordedRun(trainer.run_folder.path), run.records[step]
        if (now.records[step].rollout, now.records[step].reward) != (then.rollout, then.reward):
            raise ValueError(
                f"the completions of step {step} were not kept in {run.folder}, and others come out here, so that a "
                "bundle would not show what the run did; groupax replay shows where they part"
            )
        shutil.copy(RolloutLog(now.folder / "rollouts").path(step), folder)


def _write_model(trainer: ReplayTrainer, folder: Path) -> None:
    source = trainer.model_source
    if source is None:
        trainer.save_start(folder)
        return
    if (source / "adapter_config.json").is_file():
        raise ValueError(f"{source} is an adapter, which names its base by a path; leave it out: it is given by --base")
    folder.mkdir()
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in (".json", ".safetensors", ".txt", ".model", ".jinja"):
            shutil.copy(path.resolve(), folder / path.name)


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
    make = maker_of(arguments_by_name(arguments, named))
    return make_bundle(recorded, step, make, settings_of(recorded, args), Path(path), include)
