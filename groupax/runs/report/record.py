"""Reads the record of a run from its folder. Imports no jax."""

import base64
import io
import json
import math
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groupax.config import config_class
from groupax.data.images import read_image, save_png
from groupax.evaluation.items import Completion, Item, read_items
from groupax.runs.rollout_log import prompt_text
from groupax.storage.folders import MAX_LOG_BYTES, read_file, run_folder_in
from groupax.types import Metrics

MAX_SAMPLES = 4
MAX_FLIPPED = 8  # items that became worse, and as many that became better
IMAGE = re.compile(r"images/[0-9a-f]{64}\.png")
MAX_IMAGE_BYTES = 1 << 26
MAX_IMAGE_SIDE = 384  # pixels; larger images are shown smaller
MAX_IMAGES = 8  # of a prompt
MAX_TABLES = 40  # of rollouts that are searched for a prompt


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
        images: Images of the prompt as `data:` URLs.
    """

    prompt: str
    before: Answer
    after: Answer
    when: tuple[str, str]
    images: Sequence[str] = ()


@dataclass(frozen=True)
class Flipped:
    """Items of a set that were answered worse, or better, than before.

    Attributes:
        shown: Some of them from the whole range of differences, the worst ones first.
        total: Number of all of them.
    """

    shown: Sequence[BeforeAndAfter]
    total: int


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
        flipped: Held-out items that were answered worse or better, by set.
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
    flipped: Mapping[str, Flipped]
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


class NoStepsError(ValueError):
    """A folder has no run, or one without a logged step."""


def read_run(folder: Path, has_samples: bool = True) -> RunRecord:
    """Returns the record of a run, during the run or afterwards.

    Args:
        folder: The run folder.
        has_samples: Whether to read completions and held-out items too.

    Raises:
        NoStepsError: The folder has no run, or its run has no logged step yet.
    """
    folder = run_folder_in(folder)
    if not (folder / "metrics.jsonl").is_file():
        raise NoStepsError(f"{folder} is no run folder: it has no metrics.jsonl")
    lines = _json_lines(folder / "metrics.jsonl")
    metrics = [line for line in lines if "loss" in line and "step" in line]
    if not metrics:
        raise NoStepsError(f"the run in {folder} has not come to a logged step yet; its metrics.jsonl has no line")
    config = _json(folder / "config.json") or {}
    return RunRecord(
        name=folder.resolve().name,
        metrics=metrics,
        evaluations=[line for line in lines if any(name.startswith("eval_") for name in line)],
        settings=changed_settings(config),
        processes=(_json(folder / "run.json") or {}).get("processes", []),
        diagnostics=[line for line in _json_lines(folder / "diagnostics.jsonl") if "text" in line],
        result=_json(folder / "result.json"),
        samples=_samples(folder) if has_samples else [],
        changes=_changes(folder / "evaluations"),
        flipped=_flipped(folder / "evaluations") if has_samples else {},
        command=_json(folder / "command.json"),
    )


def changed_settings(config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns value and default of each setting of a `config.json` that differs from its default."""
    defaults = json.loads(json.dumps(config_class(config)().to_dict()))
    return {name: (value, defaults.get(name)) for name, value in config.items() if value != defaults.get(name)}


def _samples(folder: Path) -> list[BeforeAndAfter]:
    """Returns completions of held-out prompts, or else, or if their images are not in the folder, of the rollouts."""
    samples = _of_evaluations(folder / "evaluations")
    if not samples or any(not (folder / name).is_file() for pair in samples for name in _image_names(pair.prompt)):
        samples = _of_rollouts(folder / "rollouts") or samples
    return [replace(pair, images=_image_urls(folder, pair.prompt)) for pair in samples]


def _of_evaluations(folder: Path) -> list[BeforeAndAfter]:
    """Returns the items that gained most and the one that lost most, of the first set that was evaluated twice."""
    for before, after in _twice(folder):
        when = _when(before), _when(after)
        by_prompt = {
            prompt_text(first.prompt): (_answer(first), _answer(second))
            for first, second in _items_of_both(before, after)
        }
        pairs = [BeforeAndAfter(prompt, *answers, when) for prompt, answers in by_prompt.items()]
        ordered = sorted(pairs, key=lambda pair: ((pair.before.reward or 0) - (pair.after.reward or 0), pair.prompt))
        lost = [pair for pair in ordered[-1:] if (pair.after.reward or 0) < (pair.before.reward or 0)]
        if ordered:
            return ordered[: MAX_SAMPLES - len(lost)] + lost
    return []


def _changes(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Returns the numbers of items that are better, worse and alike, of each set that was evaluated twice."""
    changes = {}
    for before, after in _twice(folder):
        scores = [tuple(_score(item.completions[0]) for item in pair) for pair in _items_of_both(before, after)]
        better, worse = (sum(sign * (late - early) > 0 for early, late in scores) for sign in (1, -1))
        if scores:
            changes[before.stem.partition(".")[2]] = better, worse, len(scores) - better - worse
    return changes


def _flipped(folder: Path) -> dict[str, Flipped]:
    """Returns items of each set that are worse and better than before, chosen evenly from each of the two."""
    flipped = {}
    for before, after in _twice(folder):
        when = _when(before), _when(after)
        changed = []
        for first, second in _items_of_both(before, after):
            difference = _score(second.completions[0]) - _score(first.completions[0])
            if difference:
                pair = BeforeAndAfter(prompt_text(first.prompt), _answer(first), _answer(second), when)
                changed.append((difference, pair))
        changed.sort(key=lambda each: (each[0], each[1].prompt))
        worse = [pair for difference, pair in changed if difference < 0]
        better = [pair for difference, pair in reversed(changed) if difference > 0]
        if changed:
            shown = _evenly(worse, MAX_FLIPPED) + _evenly(better, MAX_FLIPPED)
            flipped[before.stem.partition(".")[2]] = Flipped(shown, len(changed))
    return flipped


def _evenly(items: Sequence[BeforeAndAfter], count: int) -> list[BeforeAndAfter]:
    """Returns this many of the items, evenly spread, with the first and the last one; all of them if they are fewer."""
    if len(items) <= count:
        return list(items)
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


def _score(completion: Completion) -> float:
    return (completion.reward or 0.0) if completion.solved is None else float(completion.solved)


def _items_of_both(before: Path, after: Path) -> list[tuple[Item, Item]]:
    """Returns the items that two files share; none if a file is damaged or was written by another version."""
    try:
        earlier, later = ({item.key: item for item in read_items(path)} for path in (before, after))
    except ValueError:
        return []
    return [(item, later[key]) for key, item in earlier.items() if key in later]


def _twice(folder: Path) -> list[tuple[Path, Path]]:
    """Returns the earliest and the latest file of each set: `before.SET`, `step_N.SET` by N, `after.SET`."""
    order = {"before": -1, "after": 1 << 62}
    by_set: dict[str, list[tuple[int, Path]]] = {}
    for path in folder.glob("*.jsonl"):
        start, _, name = path.stem.partition(".")
        number = start.removeprefix("step_")
        if name and (start in order or number.isdigit()):
            by_set.setdefault(name, []).append((order[start] if start in order else int(number), path))
    ordered = [sorted(files) for _, files in sorted(by_set.items())]
    return [(files[0][1], files[-1][1]) for files in ordered if len(files) > 1]


def _when(path: Path) -> str:
    start = path.stem.partition(".")[0]
    number = start.removeprefix("step_")
    return f"step {int(number)}" if number.isdigit() else f"{start} training"


def _answer(item: Any) -> Answer:
    first = item.completions[0]
    return Answer(first.text, first.reward)


def _of_rollouts(folder: Path) -> list[BeforeAndAfter]:
    """Returns the first completions of prompts that were visited early and late; else of other prompts."""
    files = sorted(folder.glob("step_*.parquet"))
    if len(files) < 2:
        return []
    first = _first_answers(files[0])
    pairs: dict[str, BeforeAndAfter] = {}
    last: dict[str, Answer] = {}
    for path in reversed(files[1:][-MAX_TABLES:]):
        later = _first_answers(path)
        last = last or later
        for prompt in first.keys() & later.keys() - pairs.keys():
            pairs[prompt] = BeforeAndAfter(prompt, first[prompt], later[prompt], (_step(files[0]), _step(path)))
        if len(pairs) >= MAX_SAMPLES:
            break
    if pairs:
        return [pairs[prompt] for prompt in sorted(pairs)][:MAX_SAMPLES]
    nothing, when = Answer("", None), (_step(files[0]), _step(files[-1]))
    early = [BeforeAndAfter(prompt, answer, nothing, when) for prompt, answer in first.items()]
    late = [BeforeAndAfter(prompt, nothing, answer, when) for prompt, answer in last.items()]
    return early[: MAX_SAMPLES // 2] + late[: MAX_SAMPLES // 2]


def _step(path: Path) -> str:
    return f"step {int(path.stem.rpartition('_')[2])}"


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


def _image_names(prompt: str) -> list[str]:
    """Returns the names of the images' files of a prompt as text (see `rollout_log.prompt_text`)."""
    if not prompt.startswith("[{"):
        return []
    try:
        return list(_named(json.loads(prompt)))[:MAX_IMAGES]
    except (RecursionError, ValueError):
        return []


def _image_urls(folder: Path, prompt: str) -> list[str]:
    """Returns the images of a prompt as PNG files in `data:` URLs, without those that cannot be read.

    Args:
        folder: The run folder.
        prompt: The prompt as text.
    """
    urls = (_image_url(folder / name) for name in _image_names(prompt))
    return [url for url in urls if url]


def _named(messages: Any) -> Iterator[str]:
    for message in messages if isinstance(messages, list) else ():
        parts = message.get("content") if isinstance(message, dict) else None
        for part in parts if isinstance(parts, list) else ():
            name = part.get("image") if isinstance(part, dict) and part.get("type") == "image" else None
            if isinstance(name, str) and IMAGE.fullmatch(name):
                yield name


def _image_url(path: Path) -> str:
    """Returns a file decoded and encoded again as PNG, made smaller if it is large; empty if it is unreadable."""
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_IMAGE_BYTES:
            return ""
        image = read_image(path.read_bytes(), path.name).copy()
        image.thumbnail((MAX_IMAGE_SIDE, MAX_IMAGE_SIDE))
    except (ImportError, OSError, ValueError):
        return ""
    file = io.BytesIO()
    save_png(image, file)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
