"""A report as one HTML page that needs nothing else, and as Markdown. Imports no jax.

Prompts and completions may hold anything; all text is escaped, and the page allows no script and loads nothing.
"""

import html
import math
from collections.abc import Sequence

from groupax.runs.progress.rich import sparkline
from groupax.runs.report.charts import bar, curve, legend, number
from groupax.runs.report.contents import Contents, Curve, Rows, shown
from groupax.runs.report.record import Answer, BeforeAndAfter

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; } th, td { text-align: left; vertical-align: top; padding: .2em .8em .2em 0; }
th { font-weight: 600; } tr + tr td { border-top: 1px solid #8884; }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)); gap: 1em; }
figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
svg text { font-size: 11px; fill: currentColor; } .grid { stroke: #8885; }
svg.bar { height: 14px; } .legend { font-size: .85em; } .legend span { margin-right: 1em; }
.legend i { display: inline-block; width: .7em; height: .7em; margin-right: .35em; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #8881; padding: .6em; margin: .2em 0; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1em; } .diagnostic { border-left: 4px solid #d9632a; }
.diagnostic { padding: .3em .8em; margin: .6em 0; } .wide { overflow-x: auto; }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html_page(report: Contents) -> str:
    """The report as HTML."""
    parts = [f"<h1>{_escaped(report.title)}</h1>", _html_table(report.subject), _html_table(report.summary)]
    parts += [f"<p><b>{_escaped(text)}</b></p>" for text in report.verdicts]
    if report.evaluations:
        parts += ["<h2>Evaluation</h2>", _html_table(report.evaluations)]
    parts.append("<h2>Diagnostics</h2>")
    parts += [
        f'<div class="diagnostic"><b>{_escaped(str(each["name"]))}</b>, step {_escaped(str(each["step"]))}<br>'
        f"{_escaped(str(each['text']))}</div>"
        for each in report.diagnostics
    ] or ["<p>None.</p>"]
    parts += ["<h2>Curves</h2>", '<div class="curves">', *map(_figure, report.curves), "</div>"]
    if report.samples:
        parts += ["<h2>Completions early and late</h2>", *map(_html_sample, report.samples)]
    parts += ["<h2>Time</h2>", bar(report.time_split), legend(list(report.time_split)), _html_table(report.times)]
    parts += ["<h2>Settings that are not the defaults</h2>", _html_table(report.settings)]
    parts += ["<h2>Hardware and software</h2>", _html_table(report.hardware)]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{_escaped(report.title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def markdown(report: Contents) -> str:
    """The report as Markdown; curves are lines of characters."""
    parts = [f"# {_inline(report.title)}", _markdown_table(report.subject), _markdown_table(report.summary)]
    parts += [f"**{_inline(text)}**" for text in report.verdicts]
    if report.evaluations:
        parts += ["## Evaluation", _markdown_table(report.evaluations)]
    parts.append("## Diagnostics")
    parts += [
        f"* `{each['name']}`, step {each['step']}: {_inline(str(each['text']))}" for each in report.diagnostics
    ] or ["None."]
    rows: Rows = [("", "first", "", "last")]
    rows += [row for each in report.curves for row in _spark_rows(each)]
    parts += ["## Curves", _markdown_table(rows)]
    if report.samples:
        parts += ["## Completions early and late", *map(_markdown_sample, report.samples)]
    parts += ["## Time", _markdown_table(report.times)]
    parts += ["## Settings that are not the defaults", _markdown_table(report.settings)]
    parts += ["## Hardware and software", _markdown_table(report.hardware)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _figure(each: Curve) -> str:
    names = list(each.series)
    drawn = curve(each.title, each.steps, each.series)
    key = legend(names) if len(names) > 1 else ""
    return f"<figure><figcaption>{_escaped(each.title)}</figcaption>{drawn}{key}</figure>"


def _html_table(rows: Rows) -> str:
    if len(rows) < 2:
        return "<p>None.</p>"
    head = "".join(f"<th>{_escaped(cell)}</th>" for cell in rows[0]) if any(rows[0]) else ""
    body = "".join("<tr>" + "".join(f"<td>{_escaped(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f'<div class="wide"><table>{f"<tr>{head}</tr>" if head else ""}{body}</table></div>'


def _html_sample(pair: BeforeAndAfter) -> str:
    halves = [
        f"<div>{_escaped(when)}{_reward(answer)}<pre>{_escaped(answer.text)}</pre></div>"
        for when, answer in _answers(pair)
    ]
    return f'<p>prompt</p><pre>{_escaped(pair.prompt)}</pre><div class="pair">{"".join(halves)}</div>'


def _markdown_sample(pair: BeforeAndAfter) -> str:
    parts = [("prompt", pair.prompt)]
    parts += [(f"{when}{_reward(answer)}", answer.text) for when, answer in _answers(pair)]
    return "\n\n".join(f"{label}:\n\n<pre>\n{_escaped(text)}\n</pre>" for label, text in parts)


def _answers(pair: BeforeAndAfter) -> list[tuple[str, Answer]]:
    both = zip(pair.when, (pair.before, pair.after), strict=True)
    return [(when, answer) for when, answer in both if answer.text or answer.reward is not None]


def _reward(answer: Answer) -> str:
    return "" if answer.reward is None else f", reward {number(answer.reward)}"


def _markdown_table(rows: Rows) -> str:
    if len(rows) < 2:
        return "None."
    lines = [f"| {' | '.join(map(_inline, row))} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _spark_rows(each: Curve) -> Rows:
    rows: Rows = []
    for name, values in each.series.items():
        known = [value for value in values if math.isfinite(value)]
        rows.append((name, number(known[0]), sparkline(_thinned(values)), number(known[-1])))
    return rows


def _thinned(values: Sequence[float], most: int = 40) -> list[float]:
    """Of many values some that are evenly spread, the first and the last one among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]


def _escaped(text: str) -> str:
    return html.escape(shown(text))


def _inline(text: str) -> str:
    """One line of Markdown that shows the text as it is."""
    line = " ".join(shown(text).split())
    return "".join(f"\\{c}" if c in "\\`*_[]|~#" else html.escape(c, quote=False) for c in line)
