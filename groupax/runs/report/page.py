"""A report as one HTML page, and as Markdown. Imports no jax.

Prompts and completions may hold anything: all text is escaped, and the page allows no script and loads nothing.
"""

import html
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from groupax.core.terminal.printable import printable
from groupax.runs.progress.display import sparkline
from groupax.runs.report.contents import Curve, Rows, contents_of, number, numbers, shown
from groupax.runs.report.record import Answer, BeforeAndAfter, read_run

WIDTH, HEIGHT, MOST_POINTS = 420, 140, 300  # of a curve
PALETTE = ("#2f6fde", "#d9632a", "#2a9d6f", "#a44bc4", "#c2a400", "#d13d6b")
NUM_SPARKS = 40  # characters of a curve in Markdown


def write_run_report(folder: Path, to: Path | None = None, price_per_hour: float | None = None) -> tuple[Path, Path]:
    """Writes `report.html` and `report.md`.

    Args:
        folder: The run folder.
        to: Folder for the two files; None for the run folder.
        price_per_hour: Price of a device, or of the machine if it trains on CPU.

    Returns:
        The two files.

    Raises:
        ValueError: The folder has no run, or its run has no logged step yet.
    """
    report = contents_of(read_run(folder), price_per_hour)
    to = to or folder
    to.mkdir(parents=True, exist_ok=True)
    files = to / "report.html", to / "report.md"
    for path, text in zip(files, (html_page(report), markdown(report)), strict=True):
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    return files


def html_page(report: Mapping[str, Any]) -> str:
    """Returns the report as HTML."""
    environment = _environment(shown, autoescape=True)
    environment.globals |= {"curve": curve, "legend": legend, "answers": _answers}
    return environment.get_template("report.html.jinja").render(report=report)


def markdown(report: Mapping[str, Any]) -> str:
    """Returns the report as Markdown, with curves as lines of characters."""
    environment = _environment(_inline, autoescape=False)
    environment.globals |= {"table": table, "code": code, "sparklines": sparklines, "texts": _texts}
    environment.filters["escaped"] = lambda text: Markup(html.escape(shown(text)))
    return environment.get_template("report.md.jinja").render(report=report)


def _environment(visible: Callable[[str], str], autoescape: bool) -> Environment:
    """Returns an environment whose templates show all text through `visible`, except markup."""

    def finalize(value: Any) -> Any:
        return value if isinstance(value, Markup) or not isinstance(value, str) else visible(value)

    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=autoescape,
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _answers(pair: BeforeAndAfter) -> list[tuple[str, Answer]]:
    both = zip(pair.when, (pair.before, pair.after), strict=True)
    return [(f"{when}{_reward(answer)}", answer) for when, answer in both if answer.text or answer.reward is not None]


def _reward(answer: Answer) -> str:
    return "" if answer.reward is None else f", reward {number(answer.reward)}"


def _texts(pair: BeforeAndAfter) -> list[tuple[str, str]]:
    return [("prompt", pair.prompt), *((label, answer.text) for label, answer in _answers(pair))]


def table(rows: Rows) -> Markup:
    """Returns a Markdown table whose first row is the head; "None." without others."""
    lines = [f"| {' | '.join(map(_inline, row))} |" for row in rows]
    return Markup("\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) if len(rows) > 1 else "None.")


def code(text: str) -> Markup:
    """Returns a Markdown block of code with the text unchanged, between fences that are longer than any in it."""
    visible = printable(text)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", visible)), default=0))
    return Markup(f"{fence}\n{visible}\n{fence}")


def sparklines(curves: Sequence[Curve]) -> Rows:
    """Returns a table of curves as lines of characters, with their first and last values."""
    rows: Rows = [("", "first", "", "last")]
    for name, values in (item for each in curves for item in each.series.items()):
        known = [value for value in values if math.isfinite(value)]
        first, last = numbers([known[0], known[-1]])
        rows.append((name, first, sparkline(thinned(values)), last))
    return rows


def thinned(values: Sequence[Any]) -> list[Any]:
    """Returns at most `NUM_SPARKS` of the values, evenly spread, with the first and the last one."""
    if len(values) <= NUM_SPARKS:
        return list(values)
    return [values[round(index * (len(values) - 1) / (NUM_SPARKS - 1))] for index in range(NUM_SPARKS)]


def _inline(text: str) -> str:
    """Returns one line of Markdown that shows the text unchanged."""
    line = " ".join(shown(text).split())
    return "".join(f"\\{c}" if c in "\\`*_[]|~#" else html.escape(c, quote=False) for c in line)


# -- curves as inline SVG, in the colours of the page around them


def curve(title: str, steps: Sequence[float], series: Mapping[str, Sequence[float]]) -> Markup:
    """Returns lines over steps, with the range of both; empty if no value is finite.

    Args:
        title: Title for screen readers.
        steps: Steps, [N].
        series: Values by name, [N] each; NaN leaves a gap.
    """
    known = [value for values in series.values() for value in values if math.isfinite(value)]
    if not known:
        return Markup()
    low, high = min(known), max(known)
    spread, length = (high - low) or 1.0, (steps[-1] - steps[0]) or 1.0
    lines = []
    for color, values in zip(itertools.cycle(PALETTE), series.values(), strict=False):
        drawn = _extremes([*zip(steps, values, strict=True)])
        for is_known, run in itertools.groupby(drawn, lambda point: math.isfinite(point[1])):
            if is_known:
                ends = [(WIDTH * (x - steps[0]) / length, HEIGHT * (high - y) / spread) for x, y in run]
                points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (ends if len(ends) > 1 else 2 * ends))
                lines.append(f'<polyline points="{points}" stroke="{color}"/>')
    label = f"{title}: {', '.join(series)}, from {number(low)} to {number(high)}"
    range_of = f"{number(low)} to {number(high)}, steps {steps[0]:,.0f} to {steps[-1]:,.0f}"
    return Markup(
        f'<svg viewBox="-2 -2 {WIDTH + 4} {HEIGHT + 4}" role="img" aria-label="{html.escape(label)}">{"".join(lines)}'
        f"</svg><small>{range_of}</small>"
    )


def _extremes(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the points, or of each stretch the lowest and the highest one, so that no spike is lost."""
    if len(points) <= MOST_POINTS:
        return [*points]
    size, found = math.ceil(2 * len(points) / MOST_POINTS), []
    for first in range(0, len(points), size):
        stretch = points[first : first + size]
        known = sorted((point for point in stretch if math.isfinite(point[1])), key=lambda point: point[1])
        found += sorted({known[0], known[-1]}) if known else stretch[:1]
    return found


def legend(names: Iterable[str]) -> Markup:
    """Returns the colours of a curve's series."""
    marks = [
        f'<span><i style="background:{color}"></i>{html.escape(name)}</span>'
        for color, name in zip(itertools.cycle(PALETTE), names, strict=False)
    ]
    return Markup(f'<div class="legend">{"".join(marks)}</div>')
