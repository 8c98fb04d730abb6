"""Reads the record of a run from its folder. Imports no jax."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupax.core.config import config_class
from groupax.core.storage.folders import MAX_LOG_BYTES, read_file, run_folder_in
from groupax.core.types import Metrics
from groupax.evaluation.items import Completion, Item, read_items
from groupax.runs.rollout_log import prompt_text

MAX_SAMPLES = 4


@dataclass(frozen=True)
class Answer:
    """A completion; `reward` is the sum over reward functions, None if none applies."""

    text: str
    reward: float | None


@dataclass(frozen=True)
class BeforeAndAfter:
    """Completions of a prompt, early and late in a run.

    Attributes:
        prompt: The prompt as text.
        before, after: One completion each.
        when: Their origins, e.g. ("step 1", "step 120").
    """

    prompt: str
    before: Answer
    after: Answer
    when: tuple[str, str]


@dataclass(frozen=True)
class RunRecord:
    """The record of a run.

    Attributes:
        name: Name of its folder.
        metrics: Lines of training, by step.
        evaluations: Lines of evaluations during training, with `eval_...`.
        settings: Value and default of each setting that differs from its default.
        processes: what worked on it (see `runs.header`).
        diagnostics: Records with `step`, `name`, `text`.
        result: Content of `result.json`, if it exists.
        samples: Completions early and late, of the same prompts if possible.
        changes: Numbers of held-out prompts that were answered better, worse and alike in the last evaluation, compared
            with the first, by set: by the correctness where it is known, else by the reward of the first completion.
        command: Content of `command.json`: the command line without settings, if `groupax train` started the run.
    """

    name: str
    metrics: Sequence[Metrics]
    evaluations: Sequence[Metrics]
    settings: Mapping[str, tuple[Any, Any]]
    processes: Sequence[Mapping[str, Any]]
    diagnostics: Sequence[Mapping[str, Any]]
    result: Mapping[str, Any] | None
    samples: Sequence[BeforeAndAfter]
    changes: Mapping[str, tuple[int, int, int]]
    command: Mapping[str, Any] | None

    @property
    def num_steps(self) -> int:
        """Number of complete optimizer steps."""
        return int(self.metrics[-1]["step"])

    def total(self, name: str) -> float:
        """Returns the sum of a metric over all steps; a line has the mean over the steps since the line before."""
        steps = [0.0, *(line["step"] for line in self.metrics)]
        parts = [
            (now - before) * line.get(name, 0.0)
            for before, now, line in zip(steps, steps[1:], self.metrics, strict=False)
        ]
        return sum(part for part in parts if math.isfinite(part))

    @property
    def num_paid(self) -> tuple[int, str]:
        """Number and name of what is paid by the hour: accelerators one by one, CPUs as a machine."""
        last = self.processes[-1] if self.processes else {}
        if last.get("platform", "cpu") == "cpu":
            return 1, "machine"
        return int(last["num_devices"]), "device"


def read_run(folder: Path) -> RunRecord:
    """Returns the record of a run, during the run or afterwards.

    Args:
        folder: The run folder.

    Raises:
        ValueError: The folder has no run, or its run has no logged step yet.
    """
    folder = run_folder_in(folder)
    if not (folder / "metrics.jsonl").is_file():
        raise ValueError(f"{folder} is not a run folder: it has no metrics.jsonl")
    lines = _json_lines(folder / "metrics.jsonl")
    metrics = [line for line in lines if "loss" in line and "step" in line]
    if not metrics:
        raise ValueError(f"the run in {folder} has not come to a logged step yet; its metrics.jsonl has no line")
    config, files = _json(folder / "config.json") or {}, _twice(folder / "evaluations")
    pairs = {name: _items_of_both(*both) for name, both in files.items()}
    return RunRecord(
        name=folder.resolve().name,
        metrics=metrics,
        evaluations=[line for line in lines if any(name.startswith("eval_") for name in line)],
        settings=changed_settings(config),
        processes=(_json(folder / "run.json") or {}).get("processes", []),
        diagnostics=[line for line in _json_lines(folder / "diagnostics.jsonl") if "text" in line],
        result=_json(folder / "result.json"),
        samples=_of_evaluations(pairs, files) or _of_rollouts(folder / "rollouts"),
        changes=_changes(pairs),
        command=_json(folder / "command.json"),
    )


def changed_settings(config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns value and default of each setting of a `config.json` that differs from its default."""
    defaults = json.loads(json.dumps(config_class(config)().to_dict()))
    return {name: (value, defaults.get(name)) for name, value in config.items() if value != defaults.get(name)}


def _of_evaluations(
    pairs: Mapping[str, Sequence[tuple[Item, Item]]], files: Mapping[str, tuple[Path, Path]]
) -> list[BeforeAndAfter]:
    """Returns the items that gained most and the one that lost most, of the first set that was evaluated twice."""
    for name, both in pairs.items():
        when = _when(files[name][0]), _when(files[name][1])
        found = {
            prompt_text(first.prompt): BeforeAndAfter(prompt_text(first.prompt), _answer(first), _answer(second), when)
            for first, second in both
        }
        ordered = sorted(found.values(), key=lambda pair: (_gain(pair) * -1, pair.prompt))
        lost = [pair for pair in ordered[-1:] if _gain(pair) < 0]
        if ordered:
            return [*dict.fromkeys(ordered[: MAX_SAMPLES - len(lost)] + lost)]  # a single one may be both
    return []


def _gain(pair: BeforeAndAfter) -> float:
    return (pair.after.reward or 0.0) - (pair.before.reward or 0.0)


def _changes(pairs: Mapping[str, Sequence[tuple[Item, Item]]]) -> dict[str, tuple[int, int, int]]:
    """Returns the numbers of items that are better, worse and alike, of each set that was evaluated twice."""
    changes = {}
    for name, both in pairs.items():
        gains = [_score(second.completions[0]) - _score(first.completions[0]) for first, second in both]
        better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
        if gains:
            changes[name] = better, worse, len(gains) - better - worse
    return changes


def _score(completion: Completion) -> float:
    return (completion.reward or 0.0) if completion.solved is None else float(completion.solved)


def _items_of_both(before: Path, after: Path) -> list[tuple[Item, Item]]:
    """Returns the items that two files share; none if a file is damaged or was written by another version."""
    try:
        earlier, later = ({item.key: item for item in read_items(path)} for path in (before, after))
    except ValueError:
        return []
    return [(item, later[key]) for key, item in earlier.items() if key in later]


def _twice(folder: Path) -> dict[str, tuple[Path, Path]]:
    """Returns the earliest and the latest file of each set: `before.SET`, `step_N.SET` by N, `after.SET`."""
    order = {"before": -1, "after": 1 << 62}
    by_set: dict[str, list[tuple[int, Path]]] = {}
    for path in folder.glob("*.jsonl"):
        start, _, name = path.stem.partition(".")
        number = start.removeprefix("step_")
        if name and (start in order or number.isdigit()):
            by_set.setdefault(name, []).append((order[start] if start in order else int(number), path))
    return {name: (min(files)[1], max(files)[1]) for name, files in sorted(by_set.items()) if len(files) > 1}


def _when(path: Path) -> str:
    start = path.stem.partition(".")[0]
    number = start.removeprefix("step_")
    return f"step {int(number)}" if number.isdigit() else f"{start} training"


def _answer(item: Any) -> Answer:
    first = item.completions[0]
    return Answer(first.text, first.reward)


def _of_rollouts(folder: Path) -> list[BeforeAndAfter]:
    """Returns the first completions of prompts in the first and the last file, of the same prompts if there are any."""
    files = sorted(folder.glob("step_*.parquet"))
    if len(files) < 2:
        return []
    early, late, nothing = _first_answers(files[0]), _first_answers(files[-1]), Answer("", None)
    when = f"step {int(files[0].stem.rpartition('_')[2])}", f"step {int(files[-1].stem.rpartition('_')[2])}"
    half = MAX_SAMPLES // 2
    chosen = sorted(early.keys() & late.keys())[:MAX_SAMPLES] or [*list(early)[:half], *list(late)[:half]]
    return [BeforeAndAfter(each, early.get(each, nothing), late.get(each, nothing), when) for each in chosen]


def _first_answers(path: Path) -> dict[str, Answer]:
    """Returns the first completion of each prompt; nothing if the file cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if not path.is_file():
            return {}
        names = pq.read_schema(path).names
        rewards = [name for name in names if name.startswith("rewards/")]
        rows = pq.read_table(path, columns=["prompt", "completion", "sample_index", *rewards]).to_pylist()
    except (OSError, pa.ArrowException):
        return {}
    answers: dict[str, Answer] = {}
    for row in rows:
        if row["sample_index"] == 0:
            known = [row[name] for name in rewards if row[name] is not None]
            answers.setdefault(row["prompt"], Answer(row["completion"], float(sum(known)) if known else None))
    return answers


def _json(path: Path) -> dict[str, Any] | None:
    """Returns the object in a file; None if there is none."""
    try:
        content = json.loads(read_file(path).decode(errors="replace"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the objects in a file of lines, null as NaN, without damaged lines."""
    try:
        text = read_file(path, MAX_LOG_BYTES).decode(errors="replace")
    except OSError:
        return []
    lines = []
    for line in text.split("\n"):
        try:
            record = json.loads(line) if line else None
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            lines.append({name: math.nan if value is None else value for name, value in record.items()})
    return lines
