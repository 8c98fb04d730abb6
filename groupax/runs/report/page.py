"""A report as one HTML page, and as Markdown. Imports no jax.

Prompts and completions may hold anything: all text is escaped, and the page allows no script and loads nothing.
"""

import html
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from groupax.runs.progress.display import sparkline
from groupax.runs.report.charts import bar, curve, legend, number, numbers
from groupax.runs.report.contents import Contents, Curve, Rows, shown
from groupax.runs.report.record import Answer, BeforeAndAfter
from groupax.terminal.printable import printable

NUM_SPARKS = 40  # characters of a curve in Markdown


def html_page(report: Contents) -> str:
    """Returns the report as HTML."""
    environment = _environment(shown, autoescape=True)
    environment.globals |= {"curve": curve, "legend": legend, "bar": bar, "answers": _answers}
    environment.filters["as_is"] = lambda url: Markup(html.escape(url))  # which is too long to be shown as text
    return environment.get_template("report.html.jinja").render(report=report)


def markdown(report: Contents) -> str:
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
        rows.append((name, first, sparkline(_thinned(values)), last))
    return rows


def _thinned(values: Sequence[float]) -> list[float]:
    """Returns at most `NUM_SPARKS` of the values, evenly spread, with the first and the last one."""
    if len(values) <= NUM_SPARKS:
        return list(values)
    return [values[round(index * (len(values) - 1) / (NUM_SPARKS - 1))] for index in range(NUM_SPARKS)]


def _inline(text: str) -> str:
    """Returns one line of Markdown that shows the text unchanged."""
    line = " ".join(shown(text).split())
    return "".join(f"\\{c}" if c in "\\`*_[]|~#" else html.escape(c, quote=False) for c in line)
