"""The outcome of a run so far, in sentences that claim only what its data show. Imports no jax.

Held-out prompts come first: those that became right or wrong between two evaluations. A run without them has the trend
of its rewards, and one of supervised fine-tuning its loss on held-out examples, else the trend of its loss.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from groupax.evaluation.items import Comparison, compare, estimates, read_items
from groupax.evaluation.paired import MCNEMAR, PairedDifference, p_text
from groupax.rollouts.estimates import Estimate, t_quantile

CANNOT_BELOW = 0.05  # largest pass@1 of a model that cannot do the task
MAX_STEPS, MIN_STEPS = 10, 3  # that the start and the end of a trend are means of
_ORDER = {"before": -1, "after": 1 << 62}  # of evaluations: before.SET, step_N.SET by N, after.SET

Series = Callable[[str], tuple[Sequence[float] | np.ndarray, Sequence[float] | np.ndarray]]


def held_out(files: Mapping[str, Path]) -> list[str]:
    """Returns a sentence per held-out set that was evaluated, given the files with its items by their names.

    They are named `before.SET`, `step_N.SET` and `after.SET`; the first and the last one of a set are compared.
    """
    by_set = evaluations_by_set(files)
    found = {name: _of_set(order) for name, order in by_set.items()}
    return [_named(name, text, by_set) for name, text in found.items() if text]


def outcome(
    result: Mapping[str, Any],
    files: Mapping[str, Path],
    series: Series,
    names: Iterable[str] = (),
    held_out: Callable[[Mapping[str, Path]], list[str]] = held_out,
) -> list[str]:
    """Returns a sentence per held-out set, or one about the training if there is no evaluation.

    Args:
        result: Content of `result.json`, which has the sentences of a run that has come to its end.
        files: Files with the items of evaluations, by their names.
        series: Returns the steps [S] and the values [S] of a metric, empty for an unknown one.
        names: Names of all metrics.
        held_out: Returns the sentences on evaluations.
    """
    said = result.get("verdicts")
    if isinstance(said, Mapping) and said:
        return [_named(str(name), str(text), said) for name, text in said.items()]
    name = "reward" if len(series("reward")[0]) else "loss"  # which says nothing about progress where rewards are
    losses = [_held_out_loss(*series(each), each) for each in sorted(names) if re.fullmatch(r"eval_(.*_)?loss", each)]
    return held_out(files) or list(filter(None, losses or [trend(*series(name), name)]))


def verdict(comparison: Comparison, ends: Sequence[Mapping[str, Estimate]], when: str) -> str:
    """Returns a sentence that claims only what two evaluations show.

    Args:
        comparison: Their comparison.
        ends: Estimates of the first and of the second one.
        when: Beginning of the sentence, e.g. "After 25 steps".
    """
    name = judged(comparison)
    if name not in comparison.differences:
        return "no prompt has a reward of both models by the same functions, so they cannot be compared"
    pair = comparison.differences[name]
    shown = f"{name} {pair.before:.3f} → {pair.after:.3f}"
    is_better = pair.is_clear and pair.difference.value > 0
    highest = [found["pass@1"].high for found in ends if "pass@1" in found]
    if highest and max(highest) < CANNOT_BELOW and not is_better:
        return (
            f"{when} the model cannot do this task: {shown} on {comparison.num_items:,} held-out prompts, at most "
            f"{100 * max(highest):.1f} % (95 % interval); start from a model that solves some of them"
        )
    gained, lost = (f"{number:,}" if number else "none" for number in (pair.num_gained, pair.num_lost))
    became, less = ("became right", "wrong") if pair.test == MCNEMAR else ("are right more often", "less often")
    became, less = (became, less) if name == "pass@1" else ("earn more", "less")
    doubt = "" if pair.is_clear else ", no significant difference"
    prompts = f"{comparison.num_items:,} held-out prompts"
    return f"{when} {gained} of {prompts} {became} and {lost} {less}{doubt}: {shown} ({_interval(pair)})"


def trend(steps: Sequence[float] | np.ndarray, values: Sequence[float] | np.ndarray, name: str) -> str:
    """Returns a sentence on a metric of training: its first and last steps, with Welch's interval of the change.

    Args:
        steps: [S] steps.
        values: [S] values of the metric, NaN where it is unknown.
        name: Name of the metric.

    Returns:
        The sentence; empty if no step has a value.

    Source: Welch, Biometrika 34 (1947).
    """
    at, known = np.asarray(steps, np.float64), np.asarray(values, np.float64)
    at, known = at[np.isfinite(known)], known[np.isfinite(known)]
    num = min(MAX_STEPS, len(known) // 2)
    if not len(known):
        return ""
    if num < MIN_STEPS:
        return f"After step {at[-1]:.0f} the {name} is {known[-1]:.3f}, too early for a trend; no evaluation yet"
    ends = known[:num], known[-num:]
    change = float(ends[1].mean() - ends[0].mean())
    errors = np.array([end.var(ddof=1) / num for end in ends])
    half = 0.0
    if errors.sum() > 0:
        half = t_quantile(max(1, int(errors.sum() ** 2 / (errors**2 / (num - 1)).sum()))) * math.sqrt(errors.sum())
    verb = "did not change clearly" if abs(change) <= half else "rose" if change > 0 else "fell"
    return (
        f"The {name} in training {verb}: {ends[0].mean():.3f} in steps {at[0]:.0f} to {at[num - 1]:.0f}, "
        f"{ends[1].mean():.3f} in steps {at[-num]:.0f} to {at[-1]:.0f} (difference {change:+.3f}, 95 % interval "
        f"{change - half:+.3f} to {change + half:+.3f})"
    )


def _held_out_loss(steps: Sequence[float] | np.ndarray, values: Sequence[float] | np.ndarray, name: str) -> str:
    """Returns a sentence on the loss on held-out examples; empty if no value is known."""
    known = [(value, step) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    if not known:
        return ""
    (first, start), (last, end), (lowest, at) = known[0], known[-1], min(known)
    if len(known) == 1:
        return f"After step {end:.0f} {name} on held-out examples is {last:.3f}"
    verb = "did not change" if last == first else "fell" if last < first else "rose"
    text = f"{name} on held-out examples {verb}: {first:.3f} after step {start:.0f}, {last:.3f} after step {end:.0f}"
    return f"{text}; it was lowest, {lowest:.3f}, after step {at:.0f}" if lowest < min(first, last) else text


def evaluation_files(folder: Path) -> dict[str, Path]:
    """Returns the files with the items of a run's evaluations, by their names."""
    return {file.stem: file for file in sorted((folder / "evaluations").glob("*.jsonl")) if file.is_file()}


def evaluations_by_set(files: Mapping[str, Path]) -> dict[str, list[tuple[str, Path]]]:
    """Returns the evaluations of each set in the order of training: `before`, `step_N` or `after` with its file."""
    by_set: dict[str, list[tuple[int, str, Path]]] = {}
    for name, path in files.items():
        when, _, of = name.partition(".")
        digits = when.removeprefix("step_")
        if of and (when in _ORDER or digits.isdecimal()):
            by_set.setdefault(of, []).append((_ORDER[when] if when in _ORDER else int(digits), when, path))
    return {name: [(when, path) for _, when, path in sorted(each)] for name, each in sorted(by_set.items())}


def judged(comparison: Comparison) -> str:
    """Returns the name of the metric that a verdict is about."""
    return "pass@1" if "pass@1" in comparison.differences else "reward"


def _of_set(order: Sequence[tuple[str, Path]]) -> str:
    """Returns a sentence on the evaluations of one set; empty if their files are damaged."""
    (first, _), (last, _) = order[0], order[-1]
    try:
        items, later = (read_items(path) for _, path in (order[0], order[-1]))
        if first != last:
            return verdict(compare(items, later), [estimates(items), estimates(later)], _span(first, last))
    except ValueError:  # of another version, or without an item in common
        return ""
    found = estimates(items)
    name = next((name for name in ("pass@1", "reward") if name in found), "")
    when = "Before training" if first == "before" else f"After {_shown(first)}"
    return f"{when} {name} on {found[name].num_items:,} held-out prompts is {found[name]}" if name else ""


def _span(first: str, last: str) -> str:
    end = "training" if last == "after" else _shown(last)
    return f"After {end}" if first == "before" else f"From {_shown(first)} to {'the end' if last == 'after' else end}"


def _shown(when: str) -> str:
    return f"step {int(when.removeprefix('step_'))}"


def _named(name: str, text: str, of: Mapping[str, Any]) -> str:
    return f"{name}: {text}" if len(of) > 1 else text


def _interval(pair: PairedDifference) -> str:
    each, p = pair.difference, p_text(pair.p_value)
    relation = "p" if p.startswith("<") else "p ="
    return f"difference {each.value:+.3f}, 95 % interval {each.low:+.3f} to {each.high:+.3f}, {relation} {p}"
