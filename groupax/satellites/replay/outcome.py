"""A step that was computed again, its comparison with the record, and the text about it."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from groupax.core.terminal.printable import printable
from groupax.runs.step_record import STAGES, Stage, StepRecord
from groupax.satellites.replay.trainer import Target

Columns = Mapping[str, Sequence[Any]]  # of a step's completions, as in the rollout log
SHOWN_CHARACTERS, SHOWN_PLACES = 80, 8
# Columns in which a stage may differ, with their names in a text.
LABELS: Mapping[Stage, Mapping[str, str]] = {
    "data": {"prompt": "prompt"},
    "rollout": {
        "completion_ids": "the token",
        "finish_reason": "finish_reason",
        "policy_logps": "the sampler's log-prob",
        "sampler_logps": "the log-prob of the truncated distribution",
    },
    "advantage": {"advantage": "advantage"},
    "loss": {"trainer_logps": "the trainer's log-prob"},
}


@dataclass(frozen=True)
class StageResult:
    """The comparison of a stage.

    Attributes:
        stage: Its name.
        is_equal: Whether all of its bits are those of the record.
        text: What differs; empty where nothing does.
        places: Numbers of the groups that differ, of the loss those of the update's rows.
    """

    stage: Stage
    is_equal: bool
    text: str = ""
    places: tuple[int, ...] = ()


def compare_step(
    then: StepRecord, now: StepRecord, columns_then: Columns | None, columns_now: Columns | None
) -> list[StageResult]:
    """Returns the comparison of each stage.

    Args:
        then: The record.
        now: The record of the same step, computed again.
        columns_then: The recorded completions; None if they were not kept.
        columns_now: The completions of the step, computed again.
    """
    results = []
    for stage in STAGES:
        a, b = getattr(then, stage), getattr(now, stage)
        numbers = _numbers(stage, then, now)
        if a == b and (stage == "update" or not numbers):  # the learning rate shows in the weights, if they have moved
            results.append(StageResult(stage, is_equal=True))
            continue
        places: tuple[int, ...] = ()
        if isinstance(a, tuple):
            places = tuple(i for i, pair in enumerate(itertools.zip_longest(a, b)) if pair[0] != pair[1])
        more = f" and {len(places) - SHOWN_PLACES} more" if len(places) > SHOWN_PLACES else ""
        listed = ", ".join(map(str, places[:SHOWN_PLACES])) + more
        named = [f"{'rows' if stage == 'loss' else 'groups'} {listed}"] if places else []
        found: list[str] = []
        if columns_then is not None and columns_now is not None:
            found = _differences(stage, columns_then, columns_now)
        results.append(StageResult(stage, False, "; ".join([*named, *numbers, *found]) or "other bits", places))
    return results


def _numbers(stage: Stage, then: StepRecord, now: StepRecord) -> list[str]:
    """Returns the numbers of a step's record that differ, as texts."""
    names = {"loss": {"loss_value": "loss", "grad_norm": "grad_norm"}, "update": {"learning_rate": "learning_rate"}}
    found = []
    for name, label in names.get(stage, {}).items():
        a, b = ("not finite" if value is None else _shown(value) for value in (getattr(then, name), getattr(now, name)))
        if getattr(then, name) != getattr(now, name):
            found.append(f"{label} {a} in the run, {b} now")
    return found or (["other weights"] if stage == "update" else [])


def _differences(stage: Stage, then: Columns, now: Columns) -> list[str]:
    """Returns the first difference in each column of a stage that differs, as texts; of a rollout in the first one."""
    labels = LABELS.get(stage, {})
    if stage == "reward":
        labels = {name: name.removeprefix("rewards/") for name in [*then, *now] if name.startswith("rewards/")}
    texts = [_difference(then, now, name, label) for name, label in labels.items()]
    found = [text for text in texts if text]
    if stage == "rollout":
        return found[:1]  # where tokens differ, so do all log-probs after them
    return found or (["a column of the dataset other than the prompt"] if stage == "data" else [])


def _difference(then: Columns, now: Columns, name: str, label: str) -> str:
    """Returns the first row, and of a list the first token, whose value of a column differs; empty if there is none."""
    if (name in then) != (name in now):
        return f"{label} is {'only in the run' if name in then else 'not in the run'}"
    pairs = list(zip(then.get(name, ()), now.get(name, ()), strict=False))
    rows = [row for row, (a, b) in enumerate(pairs) if not _is_same(a, b)]
    if not rows:
        return ""
    a, b = pairs[rows[0]]
    place = f"row {rows[0]} (group {then['prompt_index'][rows[0]]}, sample {then['sample_index'][rows[0]]})"
    size = ""
    if isinstance(a, list) and isinstance(b, list):
        at = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if not _is_same(x, y)), min(len(a), len(b)))
        place += f", token {at}"
        a, b = (values[at] if at < len(values) else None for values in (a, b))
        if isinstance(a, float):
            size = f", by {_largest([pairs[row] for row in rows]):.2g} at most"
    return f"{label} of {place}: {_shown(a)} in the run, {_shown(b)} now ({len(rows)} rows{size})"


def _is_same(a: Any, b: Any) -> bool:
    """Returns whether two values are equal, or both NaN."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return a == b or (a != a and b != b)


def _largest(pairs: Sequence[tuple[Any, Any]]) -> float:
    """Returns the largest difference between the numbers of two lists, over all pairs that have both."""
    largest = 0.0
    for a, b in pairs:
        if a is not None and b is not None:
            size = min(len(a), len(b))
            sizes = np.abs(np.asarray(a[:size], np.float64) - np.asarray(b[:size], np.float64))
            largest = max(largest, float(np.fmax.reduce(sizes, initial=0.0)))
    return largest


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.8g}"
    text = "none" if value is None else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


@dataclass(frozen=True)
class Outcome:
    """A step that was computed again.

    Attributes:
        target: The step.
        first_step: Step after which the replay started.
        columns: Its completions, as in the rollout log.
        metrics: Its metrics.
        stages: Comparison with the run's.
        parted_at: First earlier step whose weights were not the run's; None if they all were.
        sampled: Earlier rollouts that were sampled again because they were not kept, by number.
        machine: How the machine and the libraries differ from those of the run.
    """

    target: Target
    first_step: int
    columns: Columns
    metrics: Mapping[str, Any]
    stages: tuple[StageResult, ...]
    parted_at: int | None
    sampled: tuple[int, ...]
    machine: tuple[str, ...]

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.target.step

    @property
    def is_equal(self) -> bool:
        """True if every stage has the bits of the run."""
        return self.parted_at is None and all(stage.is_equal for stage in self.stages)

    def __str__(self) -> str:
        return "\n".join(map(printable, comparison(self)))


def comparison(outcome: Outcome) -> Iterator[str]:
    """Yields the lines of a replay: every stage with its first difference."""
    yield f"step {outcome.step}, after {outcome.step - 1 - outcome.first_step} updates on recorded rollouts:"
    if outcome.target.run.settings(outcome.step).get("rollout_servers") and outcome.target.stage != "data":
        yield "  servers sampled its completions, which are those of the record; --stage rollout samples them here"
    if outcome.sampled:
        yield f"  rollouts {', '.join(map(str, outcome.sampled))} were not kept and have been sampled again"
    for change in outcome.machine:
        yield f"  {change}: sums may round differently"
    if outcome.parted_at is not None:
        yield f"  the weights already differ after step {outcome.parted_at}"
    for stage in outcome.stages:
        yield f"  {stage.stage:10} {'equal' if stage.is_equal else f'DIFFERS: {stage.text}'}"
