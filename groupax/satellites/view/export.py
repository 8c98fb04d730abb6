"""A run as one HTML file: the page of `groupax view` with the answers to what it asks, which needs no server.

The file has all curves and diagnostics, the evaluations, the settings, and the completions of a few steps with the
values of their tokens. Text of the run is data in JSON, and never markup.
"""

import base64
import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.responses import Response
from starlette.routing import Route

from groupax.core.storage.folders import replacing_file
from groupax.satellites.view.app import NOT_STORED, STATIC, Asked, Page
from groupax.satellites.view.evaluations import KINDS, PAGE_ITEMS, SHOWN
from groupax.satellites.view.runs import Runs, plain

NUM_STEPS, NUM_GROUPS = 4, 6  # steps with completions, and groups of each
NUM_POINTS = 400  # of a curve
MAX_PAGES = 8  # of items of an evaluation
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)
Parameters = Mapping[str, Any]


def make_app(runs: Runs) -> Starlette:
    """Returns the application of the page without its guard; each run can be had as a file."""
    page = Page(runs)

    def export(asked: Asked) -> Response:
        file = re.sub(r"[^\w.-]+", "_", asked.run.path.name, flags=re.ASCII)
        headers = {"content-disposition": f'attachment; filename="{file}.html"'}
        return Response(exported(page, asked.text("run")), 200, NOT_STORED | headers, "text/html")

    return Starlette(routes=[*page.routes(), Route("/api/export", page.answering(export))])


def write_export(run_dir: Path, to: Path) -> int:
    """Writes a run as one HTML file, and returns its number of bytes.

    Raises:
        ValueError: The folder has no run, or more than one.
    """
    runs = Runs([run_dir])
    runs.refresh()
    names = list(runs.named())
    if len(names) != 1:
        raise ValueError(f"{run_dir} has {len(names)} runs ({', '.join(names[:5])}); export one of them")
    text = exported(Page(runs), names[0])
    to.parent.mkdir(parents=True, exist_ok=True)
    with replacing_file(to) as partial:
        return partial.write_text(text, encoding="utf-8", errors="backslashreplace")


def exported(page: Page, name: str) -> str:
    """Returns the HTML file of the run of this name."""
    answers = {_key(path, asked): answer for path, asked, answer in _answers(page, name)}
    data = {"answers": answers, "at": datetime.now().astimezone().isoformat(timespec="minutes")}
    # "<" never ends the script, nor begins a comment in it
    content = json.dumps(_rounded(plain(data)), allow_nan=False, default=str, separators=(",", ":")).replace(
        "<", "\\u003c"
    )
    modules = {f"groupax/{file.name}": _module(file) for file in sorted((STATIC / "js").glob("*.js"))}
    style = "\n".join((STATIC / path).read_text(encoding="utf-8") for path in ("vendor/uPlot.min.css", "style.css"))
    scripts = [
        f"<script>globalThis.groupaxExport = {content};</script>",
        f'<script src="{modules.pop("groupax/theme.js")}"></script>',
        f'<script src="{_data_url(STATIC / "vendor" / "uPlot.iife.min.js")}"></script>',
        f'<script type="importmap">{json.dumps({"imports": modules})}</script>',
        '<script type="module">import "groupax/main.js";</script>',
    ]
    head = [f'<meta http-equiv="content-security-policy" content="{POLICY}">', f"<style>{style}</style>", *scripts]
    text = (
        (STATIC / "index.html").read_text(encoding="utf-8").replace("/static/icon.svg", _data_url(STATIC / "icon.svg"))
    )
    text = re.sub(r'<(?:link rel="stylesheet"|script)[^\n]*\n', "", text)
    text = text.replace('<html lang="en">', '<html lang="en" data-exported>')
    before, _, after = text.partition("</head>")
    return f"{before}{chr(10).join(head)}\n</head>{after}"


def _answers(page: Page, run: str) -> Iterator[tuple[str, Parameters, Any]]:
    """Yields path, parameters and answer of each request that the page of one run makes without being searched."""

    def ask(path: str, **parameters: Any) -> tuple[str, Parameters, Any]:
        pairs = [(name, str(each)) for name, each in parameters.items()]
        with np.errstate(all="ignore"):
            return path, parameters, getattr(page, path)(Asked(QueryParams(pairs), page.runs))

    _, _, states = ask("states")
    yield "runs", {}, states
    for path in ("overview", "extremes", "names", "shares", "estimates"):
        yield ask(path, run=run)
    for path in ("names", "config", "diagnostics", "evaluations"):
        yield ask(path)
    path, _, found = ask("diagnostics", run=run, by="step")
    yield path, {"run": run}, found
    _, _, names = ask("names")
    for metric in names:
        _, _, found = ask("series", run=run, name=metric, points=NUM_POINTS)
        yield "series", {"run": run, "name": metric}, found[run].get(metric)
    yield from _evaluations(ask, run)
    yield from _rollouts(ask, run)


def _evaluations(ask: Any, run: str) -> Iterator[tuple[str, Parameters, Any]]:
    """Yields the items of each evaluation, and the differences between the first and the last one of a set."""
    _, _, rows = ask("estimates", run=run)
    for own in rows:
        same = [row["name"] for row in rows if row["set"] == own["set"] and not row["fault"]]
        if own["name"] in same[1:-1] or own["fault"]:
            continue
        kinds: list[tuple[str, Parameters, tuple[str, ...]]] = [("items", {}, tuple(SHOWN))]
        if len(same) > 1:
            other = same[0] if own["name"] != same[0] else same[-1]
            kinds.append(("differences", {"before": other}, (*KINDS, "all")))
        for path, more, shows in kinds:
            for show in shows:
                for number in range(MAX_PAGES):
                    first = number * PAGE_ITEMS
                    answer = ask(path, run=run, name=own["name"], first=first, show=show, **more)
                    yield answer
                    if first + PAGE_ITEMS >= answer[2]["num_shown"] or show != "all":
                        break


def _rollouts(ask: Any, run: str) -> Iterator[tuple[str, Parameters, Any]]:
    """Yields a few steps with a few groups, first those with different rewards, and the values of their tokens."""
    _, _, steps = ask("steps", run=run)
    chosen = (
        [steps[place] for place in np.unique(np.linspace(0, len(steps) - 1, NUM_STEPS).astype(int))] if steps else []
    )
    yield "steps", {"run": run}, chosen
    for step in chosen:
        path, asked, found = ask("step", run=run, step=step)
        groups = sorted(found["groups"], key=lambda group: group["zero_variance"])[:NUM_GROUPS]
        yield path, asked, {**found, "groups": groups, "num_rows": sum(len(group["totals"]) for group in groups)}
        for prompt in (group["prompt_index"] for group in groups):
            path, asked, group = ask("group", run=run, step=step, prompt=prompt)
            channel = next(iter(group["channels"]), None)
            yield path, asked, {**group, "channels": {channel: group["channels"][channel]} if channel else {}}
            if channel:
                yield ask("tokens", run=run, step=step, prompt=prompt, channel=channel)


def _key(path: str, parameters: Parameters) -> str:
    """Returns the key of an answer, as `api.js` computes it."""
    pairs = sorted([name, str(each)] for name, each in parameters.items() if each != "")
    return json.dumps([path, pairs], ensure_ascii=False, separators=(",", ":"))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def _module(file: Path) -> str:
    """Returns a module as a URL; modules of URLs have no place that "./" could start from, but names."""
    text = re.sub(r'from "\./([\w.]+)"', r'from "groupax/\1"', file.read_text(encoding="utf-8"))
    return f"data:text/javascript;base64,{base64.b64encode(text.encode()).decode()}"


def _data_url(file: Path) -> str:
    kind = {".svg": "image/svg+xml", ".js": "text/javascript"}[file.suffix]
    return f"data:{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"
