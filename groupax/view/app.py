"""The routes of the page, which answer with JSON read from run folders. Nothing is written."""

import json
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from groupax.view import groups, token_values
from groupax.view.axes import mean_and_spread, positions
from groupax.view.evaluations import item_page
from groupax.view.overview import overview, table_row
from groupax.view.prompt_index import PromptIndex
from groupax.view.rollouts import Step, StepCache, matching_rows
from groupax.view.runs import NotFoundError, Run, Runs
from groupax.view.search import search_steps
from groupax.view.series import interval_means, smoothed, thinned
from groupax.view.tokens import token_texts

STATIC = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MAX_POINTS = 20_000  # per curve and response
MAX_PROMPTS = 200
TIMES = "time/"
# A run with `time/wait_s` generates rollouts during updates, so these times are not part of the step time.
WAIT_S, OVERLAPPED = "time/wait_s", {"time/rollout_s", "time/reward_s"}


class Page:
    """The request handlers for a set of runs."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self._steps = StepCache()
        self._indexes: dict[Run, PromptIndex] = {}

    def routes(self) -> list[Route]:
        """Returns all routes of the page."""
        answers: Mapping[str, Callable[[Request], Any]] = {
            "/api/runs": self.states,
            "/api/overview": self.overview,
            "/api/table": self.table,
            "/api/names": self.names,
            "/api/series": self.series,
            "/api/band": self.band,
            "/api/times": self.times,
            "/api/config": self.config,
            "/api/diagnostics": self.diagnostics,
            "/api/steps": self.steps,
            "/api/step": self.step,
            "/api/group": self.group,
            "/api/tokens": self.tokens,
            "/api/text": self.text,
            "/api/search": self.search,
            "/api/prompts": self.prompts,
            "/api/prompt": self.prompt,
            "/api/evaluations": self.evaluations,
            "/api/items": self.items,
        }
        files = {f"/static/{file.relative_to(STATIC)}": file for file in STATIC.rglob("*") if file.suffix in TYPES}
        files["/"] = STATIC / "index.html"
        return [
            *(Route(path, _json_answer(answer)) for path, answer in answers.items()),
            *(Route(path, _file_answer(file)) for path, file in files.items()),
        ]

    def close(self) -> None:
        """Stops the background threads."""
        for index in self._indexes.values():
            index.close()

    def states(self, request: Request) -> Any:  # noqa: ARG002
        """Returns the state of every run by name."""
        self.runs.refresh()
        return {name: run.state() for name, run in self.runs.named().items()}

    def overview(self, request: Request) -> Any:
        """Returns the summary of a run."""
        return overview(self._run(request))

    def table(self, request: Request) -> Any:
        """Returns a row of the table of runs for each of the runs `run`, by default for all runs."""
        return {name: table_row(run) for name, run in self._chosen(request).items()}

    def names(self, request: Request) -> Any:
        """Returns the names of all metrics of the runs `run`, by default of all runs."""
        return sorted({name for run in self._chosen(request).values() for name in run.metric_names()})

    def series(self, request: Request) -> Any:
        """Returns the metrics `name` of the runs `run` at the positions `from` to `to` of the axis `by`.

        The curves are smoothed with the weight `smooth` and have about `points` points at most.
        """
        return {
            name: {
                metric: {"x": x.tolist(), "y": y.tolist(), "num_points": num_points}
                for metric in request.query_params.getlist("name")
                for x, y, num_points in self._curve(request, self.runs[name], metric)
            }
            for name in request.query_params.getlist("run")
        }

    def band(self, request: Request) -> Any:
        """Returns the mean of the metrics `name` over the runs `run`, with one standard deviation on either side."""
        runs = [self.runs[name] for name in request.query_params.getlist("run")]
        found = {}
        for metric in request.query_params.getlist("name"):
            curves = [(x, y) for run in runs for x, y, _ in self._curve(request, run, metric)]
            x, mean, std = mean_and_spread(curves)
            if len(x):
                ends = {"y": mean, "low": mean - std, "high": mean + std}
                kept = np.unique(np.linspace(0, len(x) - 1, _num_points(request, 1000)).astype(int))
                found[metric] = {"x": x[kept].tolist(), **{name: y[kept].tolist() for name, y in ends.items()}}
                found[metric]["num_runs"] = len(curves)
        return found

    def _curve(self, request: Request, run: Run, metric: str) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """Yields the requested curve and its number of points before thinning; nothing for a metric without points."""
        first, last = _number(request, "from", -math.inf), _number(request, "to", math.inf)
        num_points, weight = _num_points(request, 1000), _number(request, "smooth", 0.0)
        steps, y = run.series(metric)
        if not len(steps):
            return
        shown = smoothed(y, weight)
        x = positions(run, steps, request.query_params.get("by", "step"))
        inside = (x >= first) & (x <= last)
        yield *thinned(x[inside], shown[inside], num_points), int(inside.sum())

    def times(self, request: Request) -> Any:
        """Returns the step time of a run in seconds by phase; `other` is the time outside all phases."""
        run = self._run(request)
        steps, step_s = run.series("step_time")
        names = [name for name in run.metric_names() if name.startswith(TIMES) and name.endswith("_s")]
        names = [name for name in names if WAIT_S not in names or name not in OVERLAPPED]
        parts = {name.removeprefix(TIMES).removesuffix("_s"): run.series(name) for name in names}
        columns = [_aligned(steps, *part) for part in parts.values()]
        rest = step_s - sum((np.nan_to_num(column) for column in columns), np.zeros(len(steps)))
        columns.append(np.maximum(rest, 0.0))
        inside = (steps >= _number(request, "from", -math.inf)) & (steps <= _number(request, "to", math.inf))
        x, means = interval_means(steps[inside], np.stack(columns)[:, inside], _num_points(request, 300))
        return {"x": x.tolist(), "parts": dict(zip([*parts, "other"], means.tolist(), strict=True))}

    def config(self, request: Request) -> Any:  # noqa: ARG002
        """Returns the settings of every run; `fault` says why they cannot be read, if so."""
        found = {}
        for name, run in self.runs.named().items():
            try:
                found[name] = {"config": run.config(), "command": run.command(), "fault": ""}
            except ValueError as error:
                found[name] = {"config": {}, "command": {}, "fault": str(error)}
        return found

    def diagnostics(self, request: Request) -> Any:
        """Returns the diagnostics of the runs `run`, by default of all runs."""
        return {name: run.diagnostics() for name, run in self._chosen(request).items()}

    def steps(self, request: Request) -> Any:
        """Returns the steps that have a rollout log."""
        return self._run(request).rollout_steps()

    def step(self, request: Request) -> Any:
        """Returns the groups of a step, and the prompt indices of those that contain the text `q`."""
        run = self._run(request)
        step = self._step(run, _integer(request, "step"))
        query = request.query_params.get("q", "")
        matching = None
        if query:
            matching = sorted({int(step.prompt_index[row]) for row in matching_rows(step, query)})
        return {
            "groups": groups.group_summaries(step),
            "matching": matching,
            "num_rows": step.table.num_rows,
            "reward_names": list(step.rewards),
        }

    def group(self, request: Request) -> Any:
        """Returns a prompt of a step with its completions."""
        run, number = self._run(request), _integer(request, "step")
        found = groups.group(self._step(run, number), _integer(request, "prompt"))
        return {**found, "channels": token_values.token_channels(run.rollout_file(number))}

    def tokens(self, request: Request) -> Any:
        """Returns the tokens of a group with their values in a channel."""
        run, number = self._run(request), _integer(request, "step")
        sample = _integer(request, "sample") if "sample" in request.query_params else None
        channel = request.query_params.get("channel", "policy_logps")
        found = token_values.token_values(run.rollout_file(number), _integer(request, "prompt"), channel, sample)
        texts = token_texts(run.path / "tokenizer")
        rows = {index: {**row, "texts": texts.pieces(row["ids"])} for index, row in found.items()}
        return {"rows": rows, "fault": texts.fault}

    def text(self, request: Request) -> Any:
        """Returns the full text of the completion `sample`, or of the prompt if there is no `sample`.

        With `turn` it is the text of that turn of the completion, with `call` too the result of that call of the turn.
        """
        step = self._step(self._run(request), _integer(request, "step"))
        names = ("sample", "turn", "call")
        which = (_integer(request, name) if name in request.query_params else None for name in names)
        return {"text": groups.full_text(step, _integer(request, "prompt"), *which)}

    def search(self, request: Request) -> Any:
        """Returns rollouts that contain the text `q`, searching backwards from step `before` for a limited time."""
        run = self._run(request)
        query = request.query_params.get("q", "")
        if not query:
            raise ValueError("q is empty; it must be the text to search for")
        return search_steps(run, query, before=_number(request, "before", math.inf))

    def prompts(self, request: Request) -> Any:
        """Returns the prompts of all steps that contain the text `q`."""
        index = self._index(self._run(request))
        progress = index.update()
        return {"progress": progress, "prompts": index.prompts(request.query_params.get("q", ""), MAX_PROMPTS)}

    def prompt(self, request: Request) -> Any:
        """Returns the history of a prompt over all steps."""
        index = self._index(self._run(request))
        progress = index.update()
        return {"progress": progress, **index.history(request.query_params.get("key", ""))}

    def evaluations(self, request: Request) -> Any:
        """Returns the names of the evaluations that have stored items."""
        return list(self._run(request).evaluation_files())

    def items(self, request: Request) -> Any:
        """Returns a page of the items of an evaluation."""
        files, name = self._run(request).evaluation_files(), request.query_params.get("name", "")
        if name not in files:
            raise NotFoundError(f"there is no evaluation {name!r}; there are {', '.join(files) or 'none'}")
        show = request.query_params.get("show", "all")
        return item_page(files[name], _integer(request, "first", "0"), show, request.query_params.get("q", ""))

    def _chosen(self, request: Request) -> dict[str, Run]:
        names = request.query_params.getlist("run")
        return {name: self.runs[name] for name in names} if names else self.runs.named()

    def _run(self, request: Request) -> Run:
        return self.runs[request.query_params.get("run", "")]

    def _step(self, run: Run, number: int) -> Step:
        return self._steps.read(run.rollout_file(number), run.reward_weights())

    def _index(self, run: Run) -> PromptIndex:
        return self._indexes.setdefault(run, PromptIndex(run))


def make_app(runs: Runs) -> tuple[Starlette, Page]:
    """Returns the application without its guard, and its request handlers."""
    page = Page(runs)
    return Starlette(routes=page.routes()), page


def plain(value: Any) -> Any:
    """Returns the value as plain JSON types; numbers that are not finite become None."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value


def _json_answer(answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """Returns a handler that responds with JSON, and with `{"error": text}` if `answer` raises."""

    def answered(request: Request) -> Response:
        try:
            status, content = 200, answer(request)
        except NotFoundError as error:
            status, content = 404, {"error": str(error)}
        except (ValueError, OSError) as error:
            status, content = 400, {"error": str(error)}
        except Exception:  # noqa: BLE001 (the page must show that something failed; the terminal shows what)
            traceback.print_exc()
            status, content = 500, {"error": "groupax view failed; see the traceback in its terminal"}
        body = json.dumps(plain(content), allow_nan=False).encode()
        return Response(body, status, {"cache-control": "no-store"}, "application/json")

    return answered


def _file_answer(file: Path) -> Callable[[Request], Response]:
    content, kind = file.read_bytes(), TYPES[file.suffix]
    return lambda request: Response(content, 200, {"cache-control": "no-cache"}, kind)  # noqa: ARG005


def _aligned(steps: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns the values at the steps, NaN where there is none."""
    if len(x) == len(steps) and np.array_equal(x, steps):
        return y
    known = dict(zip(x.tolist(), y.tolist(), strict=True))
    return np.array([known.get(step, math.nan) for step in steps.tolist()])


def _number(request: Request, name: str, default: float) -> float:
    text = request.query_params.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ValueError(f"{name}={text!r} is not a number")
    return value


def _num_points(request: Request, default: int) -> int:
    return int(min(max(_number(request, "points", float(default)), 1), MAX_POINTS))


def _integer(request: Request, name: str, default: str = "") -> int:
    text = request.query_params.get(name, default)
    if not text.isdecimal() or len(text) > 15:
        raise ValueError(f"{name}={text!r} is not a non-negative integer")
    return int(text)
