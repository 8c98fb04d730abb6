"""Compares a step with its record, stage by stage. Imports no jax."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from groupax.runs.step_record import STAGES, Stage, StepRecord

Columns = Mapping[str, Sequence[Any]]  # of a step's completions, as in the rollout log


@dataclass(frozen=True)
class StageResult:
    """The comparison of a stage.

    Attributes:
        stage: Its name.
        is_equal: Whether all of its bits are those of the record.
        text: The first difference, and the number and size of all of them; empty where there is none.
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
        numbers = _NUMBERS.get(stage, _nothing)(then, now)
        if a == b and (stage == "update" or not numbers):  # the learning rate shows in the weights, if they have moved
            results.append(StageResult(stage, is_equal=True))
            continue
        places = _differing(a, b) if isinstance(a, tuple) else ()
        both = None if columns_then is None or columns_now is None else (columns_then, columns_now)
        found = [*numbers, *([] if both is None else _DETAILS[stage](*both))]
        named = [f"{'rows' if stage == 'loss' else 'groups'} {_listed(places)}"] if places else []
        results.append(StageResult(stage, False, "; ".join([*named, *found]) or "other bits", places))
    return results


def _differing(a: Sequence[str], b: Sequence[str]) -> tuple[int, ...]:
    longest = max(len(a), len(b))
    return tuple(i for i in range(longest) if i >= len(a) or i >= len(b) or a[i] != b[i])


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} and {len(numbers) - 8} more" if len(numbers) > 8 else shown


def _nothing(*_: Any) -> list[str]:
    return []


def _loss_numbers(then: StepRecord, now: StepRecord) -> list[str]:
    pairs = {"loss": (then.loss_value, now.loss_value), "grad_norm": (then.grad_norm, now.grad_norm)}
    return [f"{name} {_number(a)} in the run, {_number(b)} now" for name, (a, b) in pairs.items() if a != b]


def _update_numbers(then: StepRecord, now: StepRecord) -> list[str]:
    if then.learning_rate == now.learning_rate:
        return ["other weights"]
    return [f"learning_rate {_number(then.learning_rate)} in the run, {_number(now.learning_rate)} now"]


_NUMBERS: dict[Stage, Callable[[StepRecord, StepRecord], list[str]]] = {
    "loss": _loss_numbers,
    "update": _update_numbers,
}


def _data(then: Columns, now: Columns) -> list[str]:
    found = _first_value(then, now, "prompt")
    return found or ["a column of the dataset other than the prompt"]


def _rollouts(then: Columns, now: Columns) -> list[str]:
    tokens = _tokens(then, now, "completion_ids", "token", exact=True)
    ends = _first_value(then, now, "finish_reason")
    if tokens or ends:
        return [*tokens, *ends]
    return _tokens(then, now, "policy_logps", "the sampler's log-probs") or _tokens(
        then, now, "sampler_logps", "the log-probs of the truncated distribution"
    )


def _rewards(then: Columns, now: Columns) -> list[str]:
    names = dict.fromkeys(name for columns in (then, now) for name in columns if name.startswith("rewards/"))
    return [text for name in names for text in _first_value(then, now, name)]


def _advantages(then: Columns, now: Columns) -> list[str]:
    return _first_value(then, now, "advantage")


def _losses(then: Columns, now: Columns) -> list[str]:
    return _tokens(then, now, "trainer_logps", "the trainer's log-probs")


_DETAILS: dict[Stage, Callable[[Columns, Columns], list[str]]] = {
    "data": _data,
    "rollout": _rollouts,
    "reward": _rewards,
    "advantage": _advantages,
    "loss": _losses,
    "update": _nothing,
}


def _first_value(then: Columns, now: Columns, name: str) -> list[str]:
    """Returns the first row whose value of a column differs, as a text; empty if there is none."""
    if (name in then) != (name in now):
        return [f"{name} is {'only in the run' if name in then else 'not in the run'}"]
    if name not in then:
        return []
    rows = [index for index, pair in enumerate(zip(then[name], now[name], strict=False)) if not _same(*pair)]
    if not rows:
        return []
    first = rows[0]
    a, b = _shown(then[name][first]), _shown(now[name][first])
    return [f"{name.removeprefix('rewards/')} of {_place(then, first)}: {a} in the run, {b} now ({len(rows)} rows)"]


def _tokens(then: Columns, now: Columns, name: str, label: str, exact: bool = False) -> list[str]:
    """Returns the first token whose value of a column differs, and the number and size of the differences."""
    first, num_rows, num_tokens, num_all, largest = "", 0, 0, 0, 0.0
    for row, (a, b) in enumerate(zip(then.get(name, ()), now.get(name, ()), strict=False)):
        if a is None or b is None:
            continue
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        size = min(len(x), len(y))
        differs = ~((x[:size] == y[:size]) | (np.isnan(x[:size]) & np.isnan(y[:size])))
        num_all += size
        if not differs.any() and len(x) == len(y):
            continue
        num_rows += 1
        num_tokens += int(differs.sum())
        at = int(differs.argmax()) if differs.any() else size
        if not exact and differs.any():
            largest = max(largest, float(np.nanmax(np.abs(x[:size] - y[:size]))))
        values = f"{_at(x, at, exact)} in the run, {_at(y, at, exact)} now"
        first = first or f"{label} of {_place(then, row)}, token {at}: {values}"
    if not first:
        return []
    size = "" if exact else f" of {num_all}, by {largest:.2g} at most"
    return [f"{first} ({num_rows} rows, {num_tokens} tokens{size})"]


def _at(values: np.ndarray, index: int, exact: bool) -> str:
    if index >= len(values):
        return "none"
    return str(int(values[index])) if exact else f"{values[index]:.8g}"


def _place(columns: Columns, row: int) -> str:
    return f"row {row} (group {columns['prompt_index'][row]}, sample {columns['sample_index'][row]})"


def _same(a: Any, b: Any) -> bool:
    both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
    return both_nan or a == b


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.8g}"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.8g}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
