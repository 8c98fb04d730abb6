"""HTML for notebooks: tables and curves in the colors of the page that they are on. All texts are escaped."""

import html
import math
import sys
from collections.abc import Iterable, Mapping, Sequence

from groupax.terminal.printable import printable

WIDTH, HEIGHT = 640, 150  # of a curve, in pixels
LEFT, BOTTOM, TOP = 60, 20, 10  # its margins
MAX_POINTS = 320
_CELL = "padding:2px 12px 2px 0;text-align:left;vertical-align:top;"


def in_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook, which can show HTML."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def escaped(text: object) -> str:
    """Returns a text for HTML, in which neither markup nor control characters have an effect."""
    return html.escape(printable(str(text)))


def table_html(rows: Iterable[Sequence[object]], head: Sequence[str] = (), title: str = "") -> str:
    """Returns rows of texts as a table."""
    parts = [f"<b>{escaped(title)}</b>"] if title else []
    parts.append('<table style="border-collapse:collapse;margin:4px 0 8px 0">')
    if head:
        cells = "".join(f'<th style="{_CELL}opacity:.65;font-weight:normal">{escaped(each)}</th>' for each in head)
        parts.append(f"<tr>{cells}</tr>")
    for row in rows:
        cells = (f'<td style="{_CELL}white-space:pre-wrap">{escaped(each)}</td>' for each in row)
        parts.append(f"<tr>{''.join(cells)}</tr>")
    return "".join([*parts, "</table>"])


def facts_html(facts: Mapping[str, object], title: str = "") -> str:
    """Returns labels and values as a table."""
    return table_html(facts.items(), title=title)


def details_html(summary: str, content: str) -> str:
    """Returns content, which is HTML, that opens when its summary is clicked."""
    return f"<details><summary>{escaped(summary)}</summary>{content}</details>"


def curve_html(values: Sequence[float], label: str, first: int = 1) -> str:
    """Returns a curve over steps as an SVG image; values that are not finite leave gaps.

    Args:
        values: The value of each step.
        label: Name of the value.
        first: Number of the first step.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, high, last = min(finite), max(finite), first + len(values) - 1
    across = (WIDTH - LEFT - 10) / max(len(values) - 1, 1)
    down = (HEIGHT - BOTTOM - TOP) / ((high - low) or 1.0)
    lines = [
        " ".join(f"{LEFT + across * index:.1f},{TOP + down * (high - mean):.1f}" for index, mean in part)
        for part in _connected(values)
    ]
    shapes = [f'<polyline points="{points}" fill="none" stroke="#4269d0" stroke-width="1.5"/>' for points in lines]
    labels = [
        (0, TOP + 4, "start", f"{high:.3g}"),
        (0, HEIGHT - BOTTOM, "start", f"{low:.3g}"),
        (LEFT, HEIGHT - 4, "start", f"step {first:,}"),
        (WIDTH - 10, HEIGHT - 4, "end", f"{last:,}"),
    ]
    texts = [
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="11" fill="currentColor">{text}</text>'
        for x, y, anchor, text in labels
    ]
    return (
        f"<div><b>{escaped(label)}</b></div>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" style="max-width:{WIDTH}px;width:100%" role="img" '
        f'aria-label="{escaped(label)}, from {low:.3g} to {high:.3g}, at last {values[-1]:.3g}">'
        f"{''.join([*shapes, *texts])}</svg>"
    )


def _connected(values: Sequence[float]) -> list[list[tuple[float, float]]]:
    """Returns the mean index and value of each of at most `MAX_POINTS` ranges, apart where nothing is finite."""
    size = max(1, math.ceil(len(values) / MAX_POINTS))
    parts: list[list[tuple[float, float]]] = [[]]
    for start in range(0, len(values), size):
        chunk = [value for value in values[start : start + size] if math.isfinite(value)]
        if chunk:
            parts[-1].append((min(start + (size - 1) / 2, len(values) - 1), sum(chunk) / len(chunk)))
        elif parts[-1]:
            parts.append([])
    return [[*part, *part] if len(part) == 1 else part for part in parts if part]
