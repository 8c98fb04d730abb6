"""Curves and bars as inline SVG, in the colours of the page around them. Imports no jax."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from markupsafe import Markup

from groupax.terminal.printable import one_line

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 420, 190, 74, 32, 10
MOST_POINTS = 300
MAX_TITLE = 28  # characters of the title of a vertical axis
PALETTE = ("#2f6fde", "#d9632a", "#2a9d6f", "#a44bc4", "#c2a400", "#d13d6b")


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


def bar(parts: Mapping[str, float]) -> Markup:
    """Returns a bar that is divided in proportion to the values."""
    total, left, pieces = sum(parts.values()) or 1.0, 0.0, []
    for index, (name, value) in enumerate(parts.items()):
        width = 100 * value / total
        pieces.append(
            f'<rect x="{left:.2f}" width="{width:.2f}" height="6" fill="{PALETTE[index % len(PALETTE)]}">'
            f"<title>{html.escape(name)}: {width:.0f} %</title></rect>"
        )
        left += width
    label = html.escape(", ".join(f"{name} {100 * value / total:.0f} %" for name, value in parts.items()))
    attributes = f'viewBox="0 0 100 6" preserveAspectRatio="none" class="bar" role="img" aria-label="{label}"'
    return Markup(f"<svg {attributes}>{''.join(pieces)}</svg>")


def number(value: float) -> str:
    """Returns the number in few characters."""
    for size, unit in ((1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def numbers(values: Sequence[float]) -> list[str]:
    """Returns numbers that are compared with each other, with the same decimals where none of them becomes 0."""
    finite = [abs(value) for value in values if math.isfinite(value)]
    largest = max(finite, default=0.0)
    decimals = 2 - math.floor(math.log10(largest)) if 0 < largest < 1000 else 0
    if not 0 < decimals <= 6 or any(0 < value < 0.5 * 10**-decimals for value in finite):
        return [number(value) for value in values]
    return [f"{value:.{decimals}f}" for value in values]


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
