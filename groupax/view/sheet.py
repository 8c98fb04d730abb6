"""Curves as a sheet of comma-separated values."""

import csv
import io
import math
from collections.abc import Iterator, Sequence

import numpy as np

from groupax.view.axes import positions
from groupax.view.runs import Run
from groupax.view.series import smoothed

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # beginnings of what spreadsheets compute


def csv_lines(
    runs: Sequence[tuple[str, Run]], names: Sequence[str], axis: str, inside: tuple[float, float], weight: float
) -> list[str]:
    """Returns the lines of a sheet with one line per run, metric and point; a value that is not finite is empty.

    Args:
        runs: Runs with their names.
        names: Names of the metrics.
        axis: Axis that positions are on.
        inside: First and last position.
        weight: Weight of the earlier values in a further column with smoothed values; 0 for no such column.

    Raises:
        ValueError: The axis is unknown, or the weight is out of range.
    """
    head = ["run", "metric", axis, "value", *(["smoothed"] if weight else [])]
    return [
        _line(head),
        *(_line(each) for name, run in runs for each in _points(name, run, names, axis, inside, weight)),
    ]


def _points(
    name: str, run: Run, names: Sequence[str], axis: str, inside: tuple[float, float], weight: float
) -> Iterator[list[str]]:
    for metric in names:
        steps, values = run.series(metric)
        x = positions(run, steps, axis)
        columns = [x, values, *([smoothed(values, weight)] if weight else [])]
        for row in np.flatnonzero((x >= inside[0]) & (x <= inside[1])).tolist():
            yield [_text(name), _text(metric), *(_number(column[row]) for column in columns)]


def _text(text: str) -> str:
    """Returns a foreign text that no spreadsheet takes for a formula."""
    return f"'{text}" if text.startswith(FORMULA) else text


def _number(value: float) -> str:
    return f"{float(value):.12g}" if math.isfinite(value) else ""


def _line(cells: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()
