"""Replays of bundles, which come from somebody else: no code of theirs runs unless the user asks for it.

Rewards and answers of tools are those of the record. Settings that name functions are refused, and so are models and
states that the bundle only refers to, until the user says where these are.
"""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from groupax.config import GRPOConfig
from groupax.data.images import has_only_urls
from groupax.data.tokenizer import load_tokenizer
from groupax.episodes.record import NOT_RECORDED
from groupax.events import Message
from groupax.models.lora import LoRAConfig
from groupax.parallel.runtime import configure_jax
from groupax.replay.bundle import TREES, Manifest, check_state, plain_json, read_manifest, unpack
from groupax.replay.outcome import Outcome
from groupax.replay.recorded import RecordedRun, recorded_run
from groupax.replay.session import replay_target, target_of
from groupax.replay.trainer import ReplayCollector, ReplayTrainer, Target
from groupax.runs.checkpoints import arrays
from groupax.runs.checkpoints.fingerprint import Identity
from groupax.runs.checkpoints.store import OWN, STATE, seal
from groupax.runs.files import parsed_record
from groupax.runs.step_record import Stage
from groupax.settings.objective import AdvantageEstimator, KLEstimator, LossType
from groupax.storage.folders import read_file
from groupax.terminal.printable import error_line, one_line
from groupax.tools.tool import Tool
from groupax.types import Rollout

# Settings that may name a function, and the names that import none. Anything else is taken for one.
FUNCTIONS = {
    "loss_type": get_args(LossType),
    "kl_estimator": get_args(KLEstimator),
    "advantage_estimator": get_args(AdvantageEstimator),
}


@dataclass(frozen=True, eq=False)
class Bundle:
    """An unpacked bundle.

    Attributes:
        folder: Its folder.
        manifest: What it is.
        run: What it has of the run.
        base: Folder or hub id of the model that the run started from.
        progress_bar: Display of the replay's progress.
    """

    folder: Path
    manifest: Manifest
    run: RecordedRun
    base: str
    progress_bar: str = "none"

    def settings(self, step: int) -> GRPOConfig:
        """Returns the settings of the run at a step."""
        of_replay = {"output_dir": str(self.folder / "replay"), "resume": "never", "progress_bar": self.progress_bar}
        return GRPOConfig.from_mapping({**self.run.settings(step), **of_replay})

    @property
    def stage(self) -> Stage:
        """The first stage that can be computed again without code of the run."""
        if not self.manifest.plays or self._rewards_by_turn:
            return "advantage"
        return target_of(self.run, self.manifest.step).stage

    @property
    def _rewards_by_turn(self) -> bool:
        table = self.run.table(self.manifest.step)
        return table is not None and any('"rewards": {"' in text for text in table.get("turns", ()) if text)

    @property
    def tokenizer_part(self) -> dict[str, Any]:
        """The run's tokenizer, as an argument of the trainer."""
        return {"processing_class": load_tokenizer(self.folder / "run" / "tokenizer")}

    @property
    def parts(self) -> dict[str, Any]:
        """Arguments of a trainer whose tools answer from the record."""
        return {**self.tokenizer_part, "tools": [_recorded_tool(each) for each in self.manifest.tools]}

    def about(self, with_code: bool) -> list[str]:
        """Returns what the bundle is, as lines of text.

        Args:
            with_code: Whether rewards and tools are called.
        """
        manifest = self.manifest
        lines = [f"step {manifest.step} of {one_line(manifest.run)}, written by groupax {manifest.groupax}"]
        if self.stage == "advantage" and not with_code:
            lines += ["completions and rewards are those of the record: they need code of the run (--allow_code)"]
        elif not with_code:
            tools = " and answers of tools" if manifest.tools else ""
            lines += [f"rewards{tools} are those of the record (--allow_code, --reward compute them)"]
        return lines

    def make(self, target: Target, args: GRPOConfig) -> "BundleTrainer":
        """Returns the trainer for a target, whose rewards and tools answer from the record."""
        table = self.run.table(target.step) or {}
        rewards = [RecordedReward(name, table) for name in self.manifest.rewards]
        return self.trainer(target, args, rewards, self.parts)

    def trainer(self, target: Target, args: GRPOConfig, rewards: Any, parts: Mapping[str, Any]) -> "BundleTrainer":
        """Returns the trainer for a target.

        Args:
            target: The target.
            args: Settings.
            rewards: Reward functions.
            parts: Further arguments of the trainer by name.
        """
        num_steps = self.run.process(target.step).get("num_steps", self.manifest.num_steps)
        args = replace(args, max_steps=num_steps, chat_template=None)
        adapter = self.manifest.identity.get("adapter")
        lora = _lora(adapter) if adapter and not args.lora_r else None
        rows = _rows(self.folder / "rows.jsonl", self.manifest)
        return BundleTrainer(self.manifest, target, self.base, rewards, args, rows, peft_config=lora, **parts)

    def weights_text(self, trainer: ReplayTrainer) -> str:
        """Returns how the weights after the step differ from the run's; empty if they do not, or are not known."""
        path = self.folder / "after.safetensors"
        return weights_difference(path, trainer) if path.is_file() else ""


def open_bundle(
    archive: Path,
    folder: Path,
    base: str | None = None,
    state: str | None = None,
    code: bool = False,
    max_gb: float = 8,
) -> Bundle:
    """Unpacks a bundle.

    Args:
        archive: The file.
        folder: New folder for its content.
        base: Folder or hub id of the model that the run started from; None for the one in the bundle.
        state: Run folder or checkpoint that has the weights before the step; None for those in the bundle.
        code: Whether settings may name functions, which are then imported.
        max_gb: Most gigabytes that are unpacked.

    Raises:
        ValueError: It is no bundle, is damaged or too large, or lacks what is not given.
    """
    if not 0 < max_gb < float("inf"):
        raise ValueError(f"max_gb must be a finite number above 0, got {max_gb}")
    unpack(archive, folder, int(max_gb * 1e9))
    return bundle_in(folder, base, state, code)


def bundle_in(folder: Path, base: str | None, state: str | None, code: bool) -> Bundle:
    """Returns the bundle in a folder (see `open_bundle`)."""
    configure_jax()  # before its arrays are read, which fixes the number of devices
    manifest, run = read_manifest(folder), replace(recorded_run(folder / "run"), is_foreign=True)
    settings = [run.config, *(each.get("settings", {}) for each in run.processes)]
    values = [(name, each[name]) for each in settings for name in FUNCTIONS if name in each]
    named = {name: value for name, value in values if value not in FUNCTIONS[name]}
    if named and not code:
        listed = ", ".join(f"{name} {value!r:.80}" for name, value in named.items())
        raise ValueError(
            f"the bundle's run computes with functions of its own: {listed}. If you have them and trust them, replay "
            "it with --allow_code, which imports them"
        )
    if (folder / "model" / "adapter_config.json").exists():
        raise ValueError("the bundle's model is an adapter, whose base it names: give --base instead")
    own = folder / "model"
    if not own.is_dir() and base is None:
        raise ValueError(
            f"the model that the run started from is not in the bundle, it is {manifest.origin}: give --base with its "
            "folder or hub id"
        )
    if manifest.start:
        _place_state(folder, manifest, state)
    return Bundle(folder, manifest, run, str(base or own))


def _place_state(folder: Path, manifest: Manifest, state: str | None) -> None:
    if state is None and _is_state(folder / "state"):
        restore_state(folder, manifest)
        return
    name = OWN.name_of(manifest.start)
    place = folder / "run" / "checkpoints" / name
    if state is None:
        raise ValueError(
            f"the weights before step {manifest.step} are not in the bundle: they follow from {name} of the run "
            f"{manifest.run!r:.200}; give --state with that run's folder or a copy of the checkpoint"
        )
    given = Path(state).expanduser()
    found = [path for path in (given, *(given / each / name for each in ("checkpoints", "states"))) if _is_state(path)]
    if not found:
        raise ValueError(f"--state {state}: there is no checkpoint {name}")
    step = parsed_record(read_file(found[0] / STATE)).get("step")
    if step != manifest.start:
        raise ValueError(
            f"--state {state} is the state after step {step}, and that after step {manifest.start} is needed"
        )
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(found[0].resolve())


def _is_state(folder: Path) -> bool:
    return (folder / STATE).is_file()


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


@dataclass(frozen=True, eq=False)
class RecordedReward:
    """A reward that is what the run had for a completion with the same tokens, and None for another one.

    Attributes:
        name: Name of the reward.
        table: The recorded completions.
    """

    name: str
    table: Mapping[str, Sequence[Any]]

    def rewards(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        """Returns the reward of each completion, [B], None where there is none."""
        known: dict[tuple[int, int], tuple[Any, Any]] = {}
        if f"rewards/{self.name}" in self.table:
            columns = (self.table[each] for each in ("prompt_index", "sample_index", "completion_ids"))
            for prompt, sample, ids, value in zip(*columns, self.table[f"rewards/{self.name}"], strict=True):
                known[prompt, sample] = ids, value
        values = np.full(len(rollouts), None, object)
        for index, rollout in enumerate(rollouts):
            ids, value = known.get((rollout.prompt_index, rollout.sample_index), (None, None))
            if rollout.completion_ids.tolist() == ids:
                values[index] = value
        return values


class BundleTrainer(ReplayTrainer):
    """A `ReplayTrainer` of a bundle.

    Args:
        manifest: The bundle.
        target: What to repeat.
        arguments: Those of `ReplayTrainer`.
        named: Likewise.
    """

    def __init__(self, manifest: Manifest, target: Target, *arguments: Any, **named: Any) -> None:
        self.manifest = manifest
        super().__init__(target, *arguments, **named)

    def make_collector(self) -> BundleCollector:
        """Returns a collector of the prompts in the bundle."""
        return BundleCollector(super().make_collector(), self.manifest.visits, self.manifest.num_examples)

    def identity(self) -> Identity:
        """Returns the identity of the run; says so if the model is not its model."""
        own, then = self.own_identity(), self.manifest.identity
        if self.target.is_changed:
            return own if self.target.identity is None else self.target.identity
        if own["model"] != then.get("model"):
            raise ValueError(
                f"{self.model_name} is another model than the run's, which is {self.manifest.origin}: give that one as "
                "--base"
            )
        if own["weights"] != then.get("weights"):
            self.emit(Message(f"the weights of {self.model_name} are not those the run started from", warning=True))
        return then


def weights_difference(path: Path, trainer: ReplayTrainer) -> str:
    """Returns how the trained weights differ from those in a file: the largest difference and that of the norms."""
    from safetensors.numpy import load_file

    then = load_file(path)
    now = {name: np.asarray(leaf) for name, leaf in arrays.named_leaves(trainer.learner.state.params).items()}
    if then.keys() != now.keys() or any(then[name].shape != now[name].shape for name in now):
        return "other weights than those in the bundle"
    differences = {name: np.abs(now[name].astype(np.float64) - then[name].astype(np.float64)) for name in now}
    count = sum(int((each > 0).sum()) for each in differences.values())
    if not count:
        return ""
    name = max(differences, key=lambda each: differences[each].max(initial=0.0))
    size = sum(float(np.square(each).sum()) for each in differences.values()) ** 0.5
    norm = sum(float(np.square(each.astype(np.float64)).sum()) for each in then.values()) ** 0.5
    total = sum(each.size for each in differences.values())
    return (
        f"{count} of {total} weights differ, by {differences[name].max():.2g} at most (in {name}), together "
        f"{size / norm:.2g} of their norm"
    )


def _rows(path: Path, manifest: Manifest) -> list[Any]:
    rows = [plain_json(line, "rows.jsonl") for line in path.read_bytes().splitlines()] if path.is_file() else []
    if not all(isinstance(row, dict) and has_only_urls(row) for row in rows):
        raise ValueError("rows.jsonl of the bundle has a row that is no mapping, or an image that is not in it")
    last = max(manifest.visits.values(), default=0)
    if last >= len(rows):
        raise ValueError(f"rows.jsonl of the bundle has {len(rows)} rows, and the step visited its row {last}")
    return rows


def _recorded_tool(about: Mapping[str, Any]) -> Tool:
    """Returns a tool that is never called: what is not in the record has this text as its result."""
    schema = about["schema"]

    def answer(**arguments: Any) -> str:
        del arguments
        return NOT_RECORDED

    def answer_of(owner: Any, **arguments: Any) -> str:
        del owner
        return answer(**arguments)

    opens = bool(about["opens"])
    more: dict[str, Any] = {"takes_owner": True, "open": lambda seed: seed} if opens else {}
    limits = {"parallel": bool(about["parallel"]), "timeout_s": about["timeout_s"]}
    return Tool(schema["function"]["name"], answer_of if opens else answer, schema, **limits, **more)


def _lora(content: Mapping[str, Any]) -> LoRAConfig:
    try:
        return LoRAConfig(**content)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the adapter that bundle.json describes is none: {error_line(error)}") from error


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
