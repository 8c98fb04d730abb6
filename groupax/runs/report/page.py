"""A report as one HTML page, and as Markdown. Imports no jax.

Prompts and completions may hold anything: all text is escaped, and the page allows no script and loads nothing.
"""

import html
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from groupax.runs.progress.display import sparkline
from groupax.runs.report.contents import Curve, Rows, contents_of, number, numbers, shown
from groupax.runs.report.record import Answer, BeforeAndAfter, read_run
from groupax.terminal.printable import one_line, printable

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 420, 190, 74, 32, 10
MOST_POINTS = 300
MAX_TITLE = 28  # characters of the title of a vertical axis
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


def thinned(values: Sequence[float]) -> list[float]:
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
    """Returns lines over steps; empty if no value is finite.

    Args:
        title: Title of the vertical axis, and for screen readers.
        steps: Steps, [N].
        series: Values by name, [N] each; NaN leaves a gap.
    """
    values = np.array([list(each) for each in series.values()], float)
    known = values[np.isfinite(values)]
    if not known.size:
        return Markup()
    low, high = float(known.min()), float(known.max())
    spread = (high - low) or max(abs(high), 1.0) * 0.1
    first, last = float(steps[0]), float(steps[-1])

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - 8) * (0.5 if last == first else (step - first) / (last - first))

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - low) / spread)

    ticks = list(dict.fromkeys((low, (low + high) / 2, high)))
    parts = [
        f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{y(at):.1f}" y2="{y(at):.1f}" class="grid"/>'
        f'<text x="{LEFT - 6}" y="{y(at) + 4:.1f}" text-anchor="end">{label}</text>'
        for at, label in zip(ticks, numbers(ticks), strict=True)
    ]
    parts += [
        f'<text x="{x(at):.1f}" y="{HEIGHT - 18}" text-anchor="{anchor}">{at:,.0f}</text>'
        for at, anchor in dict.fromkeys([(first, "start"), (last, "end")])
    ]
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts += [
        f'<text x="{(LEFT + WIDTH - 8) / 2}" y="{HEIGHT - 4}" text-anchor="middle">optimizer step</text>',
        f'<text x="12" y="{middle}" transform="rotate(-90 12 {middle})" text-anchor="middle">'
        f"{html.escape(one_line(title, MAX_TITLE))}</text>",
    ]
    for index, row in enumerate(values):
        color = PALETTE[index % len(PALETTE)]
        for points in _pieces(np.asarray(steps, float), row):
            line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
            if len(points) == 1:
                [(step, value)] = points
                parts.append(f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.5" fill="{color}"/>')
            else:
                parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.6"/>')
    label = html.escape(f"{title}: {', '.join(series)}, from {number(low)} to {number(high)}")
    return Markup(f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>')


def legend(names: Iterable[str]) -> Markup:
    """Returns the colours of a curve's series."""
    marks = [
        f'<span><i style="background:{PALETTE[index % len(PALETTE)]}"></i>{html.escape(name)}</span>'
        for index, name in enumerate(names)
    ]
    return Markup(f'<div class="legend">{"".join(marks)}</div>')


def _pieces(steps: np.ndarray, values: np.ndarray) -> list[list[tuple[float, float]]]:
    """Returns the points between gaps; of long series the minimum and the maximum of each stretch."""
    stretch = math.ceil(len(steps) / MOST_POINTS)
    pieces: list[list[tuple[float, float]]] = [[]]
    for start in range(0, len(steps), stretch):
        part, at = values[start : start + stretch], steps[start : start + stretch]
        finite = np.flatnonzero(np.isfinite(part))
        if not finite.size:
            pieces.append([])
            continue
        extremes = sorted({int(finite[part[finite].argmin()]), int(finite[part[finite].argmax()])})
        pieces[-1] += [(float(at[index]), float(part[index])) for index in extremes]
    return [piece for piece in pieces if piece]
