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
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from groupax.runs.report.record import changed_settings
from groupax.settings.objective import UNCLIPPED
from groupax.types import FAILURES, TRUNCATIONS
from groupax.view import groups, token_values
from groupax.view.axes import mean_and_spread, placed, positions
from groupax.view.distributions import Distributions
from groupax.view.evaluation_table import EvaluationTable
from groupax.view.evaluations import item_page
from groupax.view.images import read_image
from groupax.view.overview import best_and_worst, machine_of, overview, table_row
from groupax.view.prompt_index import PromptIndex
from groupax.view.rollouts import Step, StepCache
from groupax.view.runs import NotFoundError, Run, Runs
from groupax.view.search import Query, exported, search_steps
from groupax.view.series import smoothed, thinned
from groupax.view.sheet import csv_lines
from groupax.view.timeline import shares, timeline
from groupax.view.tokens import token_texts
from groupax.view.why import why

STATIC = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MAX_POINTS = 20_000  # per curve and response
MAX_PROMPTS = 200
REFRESH_S = 0.2  # time limit of reading what runs have written; the page asks again


class Page:
    """The request handlers for a set of runs."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self._steps = StepCache()
        self._indexes: dict[Run, PromptIndex] = {}
        self._evaluations = EvaluationTable()
        self._distributions: dict[Run, Distributions] = {}

    def routes(self) -> list[Route]:
        """Returns all routes of the page."""
        answers: Mapping[str, Callable[[Request], Any]] = {
            "/api/runs": self.states,
            "/api/overview": self.overview,
            "/api/extremes": self.extremes,
            "/api/table": self.table,
            "/api/names": self.names,
            "/api/series": self.series,
            "/api/band": self.band,
            "/api/timeline": self.timeline,
            "/api/distributions": self.distributions,
            "/api/config": self.config,
            "/api/diagnostics": self.diagnostics,
            "/api/steps": self.steps,
            "/api/step": self.step,
            "/api/group": self.group,
            "/api/tokens": self.tokens,
            "/api/text": self.text,
            "/api/why": self.why,
            "/api/search": self.search,
            "/api/prompts": self.prompts,
            "/api/prompt": self.prompt,
            "/api/evaluations": self.evaluations,
            "/api/estimates": self.estimates,
            "/api/differences": self.differences,
            "/api/items": self.items,
        }
        files = {f"/static/{file.relative_to(STATIC)}": file for file in STATIC.rglob("*") if file.suffix in TYPES}
        files["/"] = STATIC / "index.html"
        return [
            Route("/api/csv", self.csv),
            Route("/api/export", self.export),
            Route("/api/image", self.image),
            *(Route(path, _json_answer(answer)) for path, answer in answers.items()),
            *(Route(path, _file_answer(file)) for path, file in files.items()),
        ]

    def close(self) -> None:
        """Stops the background threads."""
        for index in self._indexes.values():
            index.close()

    def states(self, request: Request) -> Any:  # noqa: ARG002
        """Returns the state of every run by name."""
        self.runs.refresh(REFRESH_S)
        return {name: run.state() for name, run in self.runs.named().items()}

    def overview(self, request: Request) -> Any:
        """Returns the summary of a run."""
        return overview(self._run(request))

    def extremes(self, request: Request) -> Any:
        """Returns the best and the worst completion of the last logged step; empty if there is none."""
        run = self._run(request)
        steps = run.rollout_steps()
        return best_and_worst(self._step(run, steps[-1]), steps[-1]) if steps else {}

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

    def csv(self, request: Request) -> Response:
        """Returns all points of the metrics `name` of the runs `run` as CSV, at the positions `from` to `to` of `by`.

        With a weight `smooth` the lines have the smoothed value too.
        """
        try:
            axis = request.query_params.get("by", "step")
            first, last = _number(request, "from", -math.inf), _number(request, "to", math.inf)
            weight = _number(request, "smooth", 0.0)
            runs = [(name, self.runs[name]) for name in request.query_params.getlist("run")]
            lines = csv_lines(runs, request.query_params.getlist("name"), axis, (first, last), weight)
        except ValueError as error:
            return Response(f"{error}\n", 404 if isinstance(error, NotFoundError) else 400, media_type="text/plain")
        headers = {"content-disposition": "attachment", "cache-control": "no-store"}  # the page names the file
        return Response("".join(lines).encode(errors="backslashreplace"), 200, headers, "text/csv")

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

    def timeline(self, request: Request) -> Any:
        """Returns the phases of the `num` steps up to `last` on a time axis, and the shares of phases in all steps."""
        run = self._run(request)
        found = timeline(run, _number(request, "last", math.inf), _integer(request, "num", "20"))
        return {**found, "shares": shares(run)}

    def distributions(self, request: Request) -> Any:
        """Returns the distributions of a run's completions over steps, as far as they are read."""
        run = self._run(request)
        return self._distributions.setdefault(run, Distributions(run)).read()

    def config(self, request: Request) -> Any:  # noqa: ARG002
        """Returns the settings of every run, its machine and versions, and the defaults of the settings that differ.

        `fault` says why the settings cannot be read, if so.
        """
        found = {}
        for name, run in self.runs.named().items():
            try:
                config, command, fault = run.config(), run.command(), ""
            except ValueError as error:
                config, command, fault = {}, {}, str(error)
            defaults = {setting: default for setting, (_, default) in changed_settings(config).items()}
            machine = machine_of(run)
            found[name] = {
                "config": config,
                "command": command,
                "defaults": defaults,
                "machine": machine,
                "fault": fault,
            }
        return found

    def diagnostics(self, request: Request) -> Any:
        """Returns the diagnostics of the runs `run`, by default of all runs; `x` is their position on the axis `by`."""
        axis = request.query_params.get("by")
        runs = self._chosen(request).items()
        return {name: run.diagnostics() if axis is None else placed(run, run.diagnostics(), axis) for name, run in runs}

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
            matching = sorted({int(step.prompt_index[row]) for row, _ in Query(query).rows(step)})
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
        prompt, bounds = _integer(request, "prompt"), _loss_bounds(run)
        found = token_values.token_values(run.rollout_file(number), prompt, channel, sample, bounds)
        texts = token_texts(run.path / "tokenizer")
        rows = {index: {**row, "texts": texts.pieces(row["ids"])} for index, row in found.items()}
        return {"rows": rows, "fault": texts.fault}

    def why(self, request: Request) -> Any:
        """Returns what the update of a step was made of: rows by their share of the gradient, tokens, findings."""
        return why(self._run(request), _integer(request, "step"))

    def text(self, request: Request) -> Any:
        """Returns the full text of the completion `sample`, or of the prompt if there is no `sample`.

        With `turn` it is the text of that turn of the completion, with `call` too the result of that call of the turn.
        """
        step = self._step(self._run(request), _integer(request, "step"))
        names = ("sample", "turn", "call")
        which = (_integer(request, name) if name in request.query_params else None for name in names)
        return {"text": groups.full_text(step, _integer(request, "prompt"), *which)}

    def search(self, request: Request) -> Any:
        """Returns rollouts that match a query, searching backwards from step `before`, its row `first`, for a while."""
        before, first = _number(request, "before", math.inf), _integer(request, "first", "0")
        return search_steps(self._run(request), _query(request), before, first, self._steps.read)

    def export(self, request: Request) -> Response:
        """Returns all rollouts that match a query as a file of JSON Lines."""
        try:
            run, query = self._run(request), _query(request)
        except ValueError as error:
            return Response(f"{error}\n", 404 if isinstance(error, NotFoundError) else 400, media_type="text/plain")
        name = f"step_{query.step[0]:.0f}" if query.step[0] == query.step[1] else "rollouts"
        headers = {"content-disposition": f'attachment; filename="{name}.jsonl"', "cache-control": "no-store"}
        return StreamingResponse(exported(run, query), 200, headers, "application/jsonl")

    def prompts(self, request: Request) -> Any:
        """Returns the prompts of all steps that contain the text `q`."""
        index = self._index(self._run(request))
        progress = index.update()
        query, order = request.query_params.get("q", ""), request.query_params.get("order", "frequent")
        return {"progress": progress, "prompts": index.prompts(query, MAX_PROMPTS, order)}

    def prompt(self, request: Request) -> Any:
        """Returns the history of a prompt over all steps."""
        index = self._index(self._run(request))
        progress = index.update()
        return {"progress": progress, **index.history(request.query_params.get("key", ""))}

    def evaluations(self, request: Request) -> Any:
        """Returns the names of the evaluations that have stored items, of the runs `run`, by default of all runs."""
        return {name: list(run.evaluation_files()) for name, run in self._chosen(request).items()}

    def estimates(self, request: Request) -> Any:
        """Returns the estimates of every evaluation of a run."""
        return self._evaluations.rows(self._run(request).evaluation_files())

    def image(self, request: Request) -> Response:
        """Responds with the image `name` of a run's prompts, as a PNG file."""
        try:
            content = read_image(self._run(request).path, request.query_params.get("name", ""))
        except NotFoundError as error:
            return Response(str(error), 404, media_type="text/plain")
        except (ValueError, OSError) as error:
            return Response(str(error), 400, media_type="text/plain")
        return Response(content, 200, {"cache-control": "private, max-age=86400"}, "image/png")

    def differences(self, request: Request) -> Any:
        """Returns a comparison of the evaluations `before` and `name`, with a page of their items.

        The evaluation `before` is one of the run `before_run`, by default of the run of the other evaluation.
        """
        run = self._run(request)
        other = self.runs[request.query_params["before_run"]] if "before_run" in request.query_params else run
        before, after = _evaluation(other, request, "before"), _evaluation(run, request, "name")
        show, query = request.query_params.get("show", "all"), request.query_params.get("q", "")
        return self._evaluations.differences(before, after, show, _integer(request, "first", "0"), query)

    def items(self, request: Request) -> Any:
        """Returns a page of the items of an evaluation."""
        path, show = _evaluation(self._run(request), request, "name"), request.query_params.get("show", "all")
        return item_page(path, _integer(request, "first", "0"), show, request.query_params.get("q", ""))

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
    if isinstance(value, int | str):  # most values are, and the test for a mapping is slow
        return value
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


def _number(request: Request, name: str, default: float) -> float:
    text = request.query_params.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ValueError(f"{name}={text!r} is not a number")
    return value


def _evaluation(run: Run, request: Request, parameter: str) -> Path:
    files, name = run.evaluation_files(), request.query_params.get(parameter, "")
    if name not in files:
        raise NotFoundError(f"there is no evaluation {name!r}; there are {', '.join(files) or 'none'}")
    return files[name]


def _query(request: Request) -> Query:
    """Returns the query for completions that a request has."""
    ranges = {
        name: (_number(request, f"min_{name}", -math.inf), _number(request, f"max_{name}", math.inf))
        for name in ("reward", "length", "advantage", "step")
    }
    given = request.query_params
    return Query(given.get("q", ""), given.get("regex") == "1", **ranges, end=given.get("end", ""))


def _loss_bounds(run: Run) -> token_values.LossBounds:
    """Returns the tokens to which a run's loss gives no gradient; all have one if its settings cannot be read."""
    try:
        config = run.config()
        ends = config["mask_truncated_completions"]
        masked = FAILURES | frozenset((TRUNCATIONS if ends else ()) if isinstance(ends, bool) else ends)
        if config["loss_type"] in UNCLIPPED or config["importance_sampling_level"] != "token":
            return token_values.LossBounds(masked_ends=masked)
        low, high, delta = config["epsilon"], config["epsilon_high"], config["delta"]
        bounds = 1 - float(low), 1 + float(low if high is None else high), math.inf if delta is None else float(delta)
        return token_values.LossBounds(*bounds, masked_ends=masked)
    except (KeyError, TypeError, ValueError):
        return token_values.NO_BOUNDS


def _num_points(request: Request, default: int) -> int:
    return int(min(max(_number(request, "points", float(default)), 1), MAX_POINTS))


def _integer(request: Request, name: str, default: str = "") -> int:
    text = request.query_params.get(name, default)
    if not text.isdecimal() or len(text) > 15:
        raise ValueError(f"{name}={text!r} is not a non-negative integer")
    return int(text)
