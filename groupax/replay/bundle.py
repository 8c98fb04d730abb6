"""Bundles: one step of a run with all that a replay of it needs, as a file that can be sent.

    bundle.json            what this is, and what is not in it
    rows.jsonl             the rows of the dataset that the step visited, and the one with the longest prompt; images
                           are PNG files in data: URLs
    run/                   of the run's folder: settings, machine, metrics, digests, completions, answers of tools
    state/                 weights and optimizer state before the step's rollout, if included
    after.safetensors      weights after the step, if the state is included
    model/                 the model that the run started from, if included
    sha256.json            digests of all of these

Arrays are safetensors, everything else is JSON or Parquet: nothing in a bundle is code.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from groupax.data.images import as_urls, has_images, with_images
from groupax.replay.collector import ReplayCollector
from groupax.replay.manifest import FORMAT, Manifest
from groupax.replay.recorded import RecordedRun
from groupax.replay.state import check_state
from groupax.replay.trainer import Make, ReplayTrainer, SettingsAt, Target, first_of_rollout, prepared
from groupax.runs.checkpoints import arrays
from groupax.runs.checkpoints.fingerprint import Identity, versions
from groupax.runs.checkpoints.store import OWN, STATE, seal
from groupax.runs.process import process_of
from groupax.runs.rollout_log import RolloutLog
from groupax.runs.step_record import NAME, row_digest

Part = Literal["state", "model"]
SMALL_STATE_BYTES = 64 * 2**20  # of a state that is included without being asked for
FILES = ("config.json", "run.json", "command.json", "diagnostics.jsonl")
TREES = ("params", "optimizer", "reference", "policies")


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
        num_bytes = 3 * sum(leaf.nbytes for leaf in _leaves(trainer.learner.state.params))
        includes = ["state"] * (num_bytes <= SMALL_STATE_BYTES) if include is None else [*dict.fromkeys(include)]
        if trainer.model_name is None and "model" not in includes:  # there is nothing that one could refer to
            includes = [*includes, "model"]
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
        manifest = _manifest(trainer, run, step, first, includes, identity)
        _write_rows(trainer, run, folder / "rows.jsonl", manifest)
        _copy_run(run, step, first, folder / "run")
    if not run.keeps([step]):
        _write_completions(run, step, make, settings, folder / "run" / "rollouts")
    (folder / "bundle.json").write_text(json.dumps(asdict(manifest), indent=1) + "\n", encoding="utf-8")
    return manifest


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


def _leaves(tree: Any) -> list[Any]:
    return [*arrays.named_leaves(tree).values()]


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

    leaves = arrays.named_leaves(trainer.learner.state.params)
    save_file(_contiguous({name: np.asarray(leaf) for name, leaf in leaves.items()}), folder / "after.safetensors")


def _contiguous(tree: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.ascontiguousarray(leaf).reshape(leaf.shape) for name, leaf in tree.items()}


def _manifest(
    trainer: ReplayTrainer, run: RecordedRun, step: int, start: int, includes: Sequence[str], identity: Identity
) -> Manifest:
    collector, prompts = trainer.collector, trainer.prompts
    before = run.records[start].num_prompts if start else 0
    positions = range(before, run.records[step].num_prompts)
    visited = [collector.visited(position, 1)[0] for position in positions]
    longest = max(range(len(prompts)), key=lambda index: len(prompts.token_ids[index]))
    local = {index: number for number, index in enumerate(dict.fromkeys([*visited, longest]))}
    rules = trainer.rules
    plays = not rules.has_environments and rules.rollout_func is None
    return Manifest(
        FORMAT,
        versions()["groupax"],
        step,
        start,
        str(run.folder.resolve()),
        str(trainer.model_name or ""),
        trainer.num_steps,
        len(prompts),
        {str(position): local[index] for position, index in zip(positions, visited, strict=True)},
        [reward.name for reward in trainer.rewards],
        _tools_of(trainer) if plays else [],
        identity,
        includes,
        plays,
    )


def _tools_of(trainer: ReplayTrainer) -> list[Mapping[str, Any]]:
    tools = [tool for setup in trainer.rules.setups.values() for tool in setup.tools.values()]
    return [
        {
            "schema": tool.schema,
            "is_async": tool.is_async,
            "parallel": tool.parallel,
            "timeout_s": tool.timeout_s,
            "opens": tool.open is not None,
        }
        for tool in tools
    ]


def _write_rows(trainer: ReplayTrainer, run: RecordedRun, path: Path, manifest: Manifest) -> None:
    prompts, collector = trainer.prompts, trainer.collector
    indices: dict[int, int] = {}
    for position, local in manifest.visits.items():
        indices[local] = collector.visited(int(position), 1)[0]
    longest = max(range(len(prompts)), key=lambda index: len(prompts.token_ids[index]))
    ordered = [indices[local] for local in range(len(indices))]
    lines = []
    for index in [*ordered, *([] if longest in ordered else [longest])]:
        row = dict(prompts.examples[index])
        sees = has_images(row)
        line = json.dumps(as_urls(row) if sees else row, default=repr)
        again = json.loads(line)
        if row_digest(with_images(again, f"row {index}") if sees else again) != row_digest(row):
            raise ValueError(f"row {index} of the dataset of {run.folder} has values that JSON and PNG cannot hold")
        lines.append(line + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def _copy_run(run: RecordedRun, step: int, start: int, folder: Path) -> None:
    """Copies what a run has of the steps after `start` up to `step`."""
    folder.mkdir()
    for name in FILES:
        if (run.folder / name).is_file():
            shutil.copy(run.folder / name, folder / name)
    if (run.folder / "tokenizer").is_dir():
        shutil.copytree(run.folder / "tokenizer", folder / "tokenizer")
    records = [record.line() for number, record in sorted(run.records.items()) if number <= step]
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


def restore_state(folder: Path, manifest: Manifest) -> None:
    """Writes the state of an unpacked bundle as a checkpoint of its run folder.

    Raises:
        ValueError: It is damaged, or of another run.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    check_state(folder / "state", manifest)
    place = folder / "run" / "checkpoints" / OWN.name_of(manifest.start)
    place.mkdir(parents=True)
    shutil.copy(folder / "state" / STATE, place / STATE)
    for name in TREES:
        path = folder / "state" / f"{name}.safetensors"
        if path.is_file():
            try:
                tree = load_file(path)
            except SafetensorError as error:
                raise ValueError(f"state/{path.name} of the bundle is damaged: {error}") from error
            arrays.start_writing(place / name, tree)()
    seal(place)


class BundleCollector(ReplayCollector):
    """A `ReplayCollector` whose prompts are the few that a bundle has.

    Args:
        collector: Collector of the replay.
        visits: Index of a prompt by its position in the run.
        num_examples: Number of rows of the run's dataset.
    """

    def __init__(self, collector: ReplayCollector, visits: Mapping[str, int], num_examples: int) -> None:
        vars(self).update(vars(collector))
        self.visits, self.num_examples = visits, num_examples

    def visited(self, first: int, count: int) -> list[int]:
        """Returns the indices of the examples at these positions of the run.

        Raises:
            ValueError: The bundle does not have one.
        """
        found = [self.visits.get(str(position)) for position in range(first, first + count)]
        if any(index is None for index in found):
            raise ValueError("the replay asks for prompts that the bundle does not have: its step visited others")
        return [index for index in found if index is not None]
