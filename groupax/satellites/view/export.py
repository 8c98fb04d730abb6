"""A run as one HTML file: the page of `groupax view` with the answers to what it asks, which needs no server.

The file has all curves and diagnostics, the evaluations, the settings, and the completions of a few steps with the
values of their tokens. Text of the run is data in JSON, and never markup.
"""

import base64
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
MAX_IMAGE_BYTES = 300_000  # of an image of a prompt; larger ones are left out
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
    requests = _Requests(page, name)
    requests.ask_all()
    data = {"answers": requests.answers, "at": datetime.now().astimezone().isoformat(timespec="minutes")}
    content = json.dumps(_rounded(plain(data)), allow_nan=False, default=str, separators=(",", ":"))
    content = content.replace("<", "\\u003c")  # which would end the script, or begin a comment in it
    modules = {f"groupax/{file.name}": _module(file) for file in sorted((STATIC / "js").glob("*.js"))}
    plots = _data_url((STATIC / "vendor" / "uPlot.iife.min.js").read_bytes(), "text/javascript")
    style = "\n".join((STATIC / path).read_text(encoding="utf-8") for path in ("vendor/uPlot.min.css", "style.css"))
    head = [
        f'<meta http-equiv="content-security-policy" content="{POLICY}">',
        f"<style>{style}</style>",
        f"<script>globalThis.groupaxExport = {content};</script>",
        f'<script src="{modules.pop("groupax/theme.js")}"></script>',
        f'<script src="{plots}"></script>',
        f'<script type="importmap">{json.dumps({"imports": modules})}</script>',
        '<script type="module">import "groupax/main.js";</script>',
    ]
    text = (STATIC / "index.html").read_text(encoding="utf-8")
    text = re.sub(r'<(?:link rel="stylesheet"|script)[^\n]*\n', "", text)
    text = text.replace("/static/icon.svg", _data_url((STATIC / "icon.svg").read_bytes(), "image/svg+xml"))
    text = text.replace('<html lang="en">', '<html lang="en" data-exported>')
    before, _, after = text.partition("</head>")
    return f"{before}{chr(10).join(head)}\n</head>{after}"


class _Requests:
    """The requests that the page of one run makes without being searched, with their answers.

    Attributes:
        answers: Answers by key (see `_key`); files that are damaged have none.
    """

    def __init__(self, page: Page, run: str) -> None:
        self.page, self.run = page, run
        self.answers: dict[str, Any] = {}

    def ask_all(self) -> None:
        """Asks everything."""
        self.keep(self.ask("states"), "runs")
        for path in ("names", "config", "diagnostics", "evaluations"):
            self.keep(self.ask(path), path)
        for path in ("overview", "extremes", "names", "shares", "estimates"):
            self.keep(self.ask(path, run=self.run), path, run=self.run)
        self.keep(self.ask("diagnostics", run=self.run, by="step"), "diagnostics", run=self.run)
        for name in self.ask("names"):
            curves = self.ask("series", run=self.run, name=name, points=NUM_POINTS)
            self.keep(curves[self.run].get(name), "series", run=self.run, name=name)
        self.ask_evaluations()
        self.ask_rollouts()

    def ask(self, path: str, **parameters: Any) -> Any:
        """Returns an answer; None if a file is damaged or gone."""
        pairs = [(name, str(each)) for name, each in parameters.items()]
        with np.errstate(all="ignore"), suppress(Exception):  # of files that anyone may have written
            return getattr(self.page, path)(Asked(QueryParams(pairs), self.page.runs))
        return None

    def keep(self, answer: Any, path: str, **parameters: Any) -> None:
        """Keeps an answer as that of a request, unless it is None."""
        if answer is not None:
            self.answers[_key(path, parameters)] = answer

    def ask_evaluations(self) -> None:
        """Asks for the items of the first and the last evaluation of each set, and their differences."""
        rows = [row for row in self.ask("estimates", run=self.run) or () if not row["fault"]]
        for own in rows:
            same = [row["name"] for row in rows if row["set"] == own["set"]]
            if own["name"] in same[1:-1]:
                continue
            self.ask_pages("items", tuple(SHOWN), name=own["name"])
            if len(same) > 1:
                other = same[0] if own["name"] != same[0] else same[-1]
                self.ask_pages("differences", (*KINDS, "all"), name=own["name"], before=other)

    def ask_pages(self, path: str, kinds: Sequence[str], **parameters: Any) -> None:
        """Asks for the first page of each kind of items, and of all items for more pages."""
        for show in kinds:
            for first in range(0, PAGE_ITEMS * (MAX_PAGES if show == "all" else 1), PAGE_ITEMS):
                asked = {"run": self.run, "first": first, "show": show, **parameters}
                answer = self.ask(path, **asked)
                self.keep(answer, path, **asked)
                if answer is None or first + PAGE_ITEMS >= answer["num_shown"]:
                    break

    def ask_rollouts(self) -> None:
        """Asks for groups of a few steps, first those with different rewards, and for the values of their tokens."""
        steps = np.array(self.ask("steps", run=self.run) or [], int)
        places = np.unique(np.linspace(0, len(steps) - 1, min(NUM_STEPS, len(steps))).astype(int))
        kept = [step for step in steps[places].tolist() if self.ask_step(step)]
        self.keep(kept, "steps", run=self.run)

    def ask_step(self, step: int) -> bool:
        """Asks for groups of a step, and returns whether it can be read."""
        found = self.ask("step", run=self.run, step=step)
        if found is None:
            return False
        groups = sorted(found["groups"], key=lambda group: group["zero_variance"])[:NUM_GROUPS]
        num_rows = sum(len(group["totals"]) for group in groups)
        self.keep({**found, "groups": groups, "num_rows": num_rows}, "step", run=self.run, step=step)
        for prompt in (group["prompt_index"] for group in groups):
            asked = {"run": self.run, "step": step, "prompt": prompt}
            if (group := self.ask("group", **asked)) is None:
                continue
            channel = next(iter(group["channels"]), None)
            channels = {channel: group["channels"][channel]} if channel else {}
            self.keep({**group, "channels": channels}, "group", **asked)
            if channel:
                self.keep(self.ask("tokens", channel=channel, **asked), "tokens", channel=channel, **asked)
            for name in group["images"]:
                image = self.ask("image", run=self.run, name=name)
                if image is not None and len(image.body) <= MAX_IMAGE_BYTES:
                    self.keep(_data_url(image.body, "image/png"), "image", run=self.run, name=name)
        return True


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
    return _data_url(text.encode(), "text/javascript")


def _data_url(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
