"""The routes of the page, which answer with JSON read from run folders. Nothing is written."""

import json
import math
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from groupax.runs.report import changed_settings
from groupax.satellites.view import curves, groups, token_values
from groupax.satellites.view.evaluations import differences, estimate_rows, item_page
from groupax.satellites.view.overview import best_and_worst, machine_of, overview, table_row
from groupax.satellites.view.rollouts import Step, cached_step
from groupax.satellites.view.runs import NotFoundError, Run, Runs, plain
from groupax.satellites.view.search import PromptIndex, Query, search_steps

STATIC = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MAX_POINTS = 20_000  # per curve and response
MAX_PROMPTS = 200
REFRESH_S = 0.2  # time limit of reading what runs have written; the page asks again
NOT_STORED = {"cache-control": "no-store"}


class Asked:
    """The parameters of a request, checked where they are read."""

    def __init__(self, given: QueryParams, runs: Runs) -> None:
        self.given, self.runs = given, runs

    @property
    def run(self) -> Run:
        """The run `run`."""
        return self.runs[self.text("run")]

    @property
    def chosen(self) -> dict[str, Run]:
        """The runs `run`, by default all runs, by name."""
        names = self.given.getlist("run")
        return {name: self.runs[name] for name in names} if names else self.runs.named()

    def text(self, name: str, default: str = "") -> str:
        """Returns a text."""
        return self.given.get(name, default)

    def number(self, name: str, default: float) -> float:
        """Returns a number, which may be infinite."""
        text = self.given.get(name)
        try:
            value = default if text is None else float(text)
        except ValueError:
            value = math.nan
        if math.isnan(value):
            raise ValueError(f"{name}={text!r} is not a number")
        return value

    def integer(self, name: str, default: str = "") -> int:
        """Returns a natural number."""
        text = self.given.get(name, default)
        if not text.isdecimal() or len(text) > 15:
            raise ValueError(f"{name}={text!r} is not a non-negative integer")
        return int(text)

    def integer_or_none(self, name: str) -> int | None:
        """Returns a natural number; None if it is not given."""
        return self.integer(name) if name in self.given else None

    @property
    def num_points(self) -> int:
        """The most points of a curve."""
        return int(min(max(self.number("points", 1000.0), 1), MAX_POINTS))

    @property
    def span(self) -> tuple[float, float]:
        """The first and the last position."""
        return self.number("from", -math.inf), self.number("to", math.inf)

    @property
    def query(self) -> Query:
        """The query for completions."""
        ranges = {
            name: (self.number(f"min_{name}", -math.inf), self.number(f"max_{name}", math.inf))
            for name in ("reward", "length", "advantage", "step")
        }
        return Query(self.text("q"), self.text("regex") == "1", **ranges, end=self.text("end"))

    def curve(self, run: Run, metric: str) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """Yields the requested curve and its number of points before thinning; nothing for a metric without points."""
        steps, y = run.series(metric)
        if len(steps):
            shown = curves.smoothed(y, self.number("smooth", 0.0))
            x = curves.positions(run, steps, self.text("by", "step"))
            inside = (x >= self.span[0]) & (x <= self.span[1])
            yield *curves.thinned(x[inside], shown[inside], self.num_points), int(inside.sum())

    def evaluation(self, run: Run, name: str) -> Path:
        """Returns the file of the evaluation that a parameter names."""
        files, chosen = run.evaluation_files(), self.text(name)
        if chosen not in files:
            raise NotFoundError(f"there is no evaluation {chosen!r}; there are {', '.join(files) or 'none'}")
        return files[chosen]


class Page:
    """The request handlers for a set of runs; each answers at /api/ and its name."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self._indexes: dict[Run, PromptIndex] = {}

    def routes(self) -> list[Route]:
        """Returns all routes of the page."""
        answers = [
            *(self.overview, self.extremes, self.table, self.names, self.series, self.band, self.shares),
            *(self.config, self.diagnostics, self.steps, self.step, self.group, self.tokens),
            *(self.text, self.search, self.prompts, self.prompt, self.evaluations, self.estimates),
            *(self.differences, self.items, self.image),
        ]
        files = {f"/static/{file.relative_to(STATIC)}": file for file in STATIC.rglob("*") if file.suffix in TYPES}
        files["/"] = STATIC / "index.html"
        return [
            Route("/api/runs", self.answering(self.states)),
            *(Route(f"/api/{answer.__name__}", self.answering(answer)) for answer in answers),
            *(Route(path, _file_answer(file)) for path, file in files.items()),
        ]

    def states(self, _: Asked) -> Any:
        """Returns the state of every run by name."""
        self.runs.refresh(REFRESH_S)
        return {name: run.state() for name, run in self.runs.named().items()}

    def overview(self, asked: Asked) -> Any:
        """Returns the summary of a run."""
        return overview(asked.run)

    def extremes(self, asked: Asked) -> Any:
        """Returns the best and the worst completion of the last logged step; empty if there is none."""
        steps = asked.run.rollout_steps()
        return best_and_worst(self._step(asked.run, steps[-1]), steps[-1]) if steps else {}

    def table(self, asked: Asked) -> Any:
        """Returns a row of the table of runs for each of the chosen runs."""
        return {name: table_row(run) for name, run in asked.chosen.items()}

    def names(self, asked: Asked) -> Any:
        """Returns the names of all metrics of the chosen runs."""
        return sorted({name for run in asked.chosen.values() for name in run.metric_names()})

    def series(self, asked: Asked) -> Any:
        """Returns the metrics `name` of the runs `run` at the positions `from` to `to` of the axis `by`.

        The curves are smoothed with the weight `smooth` and have about `points` points at most.
        """
        return {
            name: {
                metric: {"x": x.tolist(), "y": y.tolist(), "num_points": num_points}
                for metric in asked.given.getlist("name")
                for x, y, num_points in asked.curve(self.runs[name], metric)
            }
            for name in asked.given.getlist("run")
        }

    def band(self, asked: Asked) -> Any:
        """Returns the mean of the metrics `name` over the runs `run`, with one standard deviation on either side."""
        runs = [self.runs[name] for name in asked.given.getlist("run")]
        found = {}
        for metric in asked.given.getlist("name"):
            known = [(x, y) for run in runs for x, y, _ in asked.curve(run, metric)]
            x, mean, std = curves.mean_and_spread(known)
            if len(x):
                ends = {"y": mean, "low": mean - std, "high": mean + std}
                kept = np.unique(np.linspace(0, len(x) - 1, asked.num_points).astype(int))
                found[metric] = {"x": x[kept].tolist(), **{name: y[kept].tolist() for name, y in ends.items()}}
                found[metric]["num_runs"] = len(known)
        return found

    def shares(self, asked: Asked) -> Any:
        """Returns the shares of phases in all steps."""
        return curves.shares(asked.run)

    def config(self, _: Asked) -> Any:
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
            known = {"config": config, "command": command, "defaults": defaults, "machine": machine_of(run)}
            found[name] = {**known, "fault": fault}
        return found

    def diagnostics(self, asked: Asked) -> Any:
        """Returns the diagnostics of the chosen runs; `x` is their position on the axis `by`, if that is given."""
        axis, chosen = asked.given.get("by"), asked.chosen.items()
        return {
            name: run.diagnostics() if axis is None else curves.placed(run, run.diagnostics(), axis)
            for name, run in chosen
        }

    def steps(self, asked: Asked) -> Any:
        """Returns the steps that have a rollout log."""
        return asked.run.rollout_steps()

    def step(self, asked: Asked) -> Any:
        """Returns the groups of a step, and the prompt indices of those that contain the text `q`."""
        step, query = self._step(asked.run, asked.integer("step")), asked.text("q")
        matching = sorted({int(step.prompt_index[row]) for row, _ in Query(query).rows(step)}) if query else None
        found = {"groups": groups.group_summaries(step), "matching": matching}
        return {**found, "num_rows": step.table.num_rows, "reward_names": list(step.rewards)}

    def group(self, asked: Asked) -> Any:
        """Returns a prompt of a step with its completions."""
        run, number = asked.run, asked.integer("step")
        found = groups.group(self._step(run, number), asked.integer("prompt"))
        return {**found, "channels": token_values.token_channels(run.rollout_file(number))}

    def tokens(self, asked: Asked) -> Any:
        """Returns the tokens of a group, or of its completion `sample`, with their values in a channel."""
        run, prompt, sample = asked.run, asked.integer("prompt"), asked.integer_or_none("sample")
        file, channel = run.rollout_file(asked.integer("step")), asked.text("channel", "policy_logps")
        found = token_values.token_values(file, prompt, channel, sample)
        texts = token_values.token_texts(run.path / "tokenizer")
        rows = {index: {**row, "texts": texts.pieces(row["ids"])} for index, row in found.items()}
        return {"rows": rows, "fault": texts.fault}

    def text(self, asked: Asked) -> Any:
        """Returns the full text of the completion `sample`, or of the prompt if there is no `sample`.

        With `turn` it is the text of that turn of the completion, with `call` too the result of that call of the turn.
        """
        step = self._step(asked.run, asked.integer("step"))
        sample, turn, call = (asked.integer_or_none(name) for name in ("sample", "turn", "call"))
        return {"text": groups.full_text(step, asked.integer("prompt"), sample, turn, call)}

    def search(self, asked: Asked) -> Any:
        """Returns rollouts that match a query, searching backwards from step `before`, its row `first`, for a while."""
        before, first = asked.number("before", math.inf), asked.integer("first", "0")
        return search_steps(asked.run, asked.query, before, first, cached_step)

    def prompts(self, asked: Asked) -> Any:
        """Returns the prompts of all steps that contain the text `q`, with `show` unsolved those never solved."""
        index = self._index(asked.run)
        progress = index.update()
        order, only_unsolved = asked.text("order", "frequent"), asked.text("show") == "unsolved"
        return {"progress": progress, **index.prompts(asked.text("q"), MAX_PROMPTS, order, only_unsolved)}

    def prompt(self, asked: Asked) -> Any:
        """Returns the history of a prompt over all steps."""
        index = self._index(asked.run)
        progress = index.update()
        return {"progress": progress, **index.history(asked.text("key"))}

    def evaluations(self, asked: Asked) -> Any:
        """Returns the names of the evaluations of the chosen runs that have stored items."""
        return {name: list(run.evaluation_files()) for name, run in asked.chosen.items()}

    def estimates(self, asked: Asked) -> Any:
        """Returns the estimates of every evaluation of a run."""
        return estimate_rows(asked.run.evaluation_files())

    def image(self, asked: Asked) -> Response:
        """Responds with the image `name` of a run's prompts, as a PNG file."""
        content = groups.read_image(asked.run.path, asked.text("name"))
        return Response(content, 200, {"cache-control": "private, max-age=86400"}, "image/png")

    def differences(self, asked: Asked) -> Any:
        """Returns a comparison of the evaluations `before` and `name`, with a page of their items.

        The evaluation `before` is one of the run `before_run`, by default of the run of the other evaluation.
        """
        other = self.runs[asked.text("before_run")] if "before_run" in asked.given else asked.run
        before, after = asked.evaluation(other, "before"), asked.evaluation(asked.run, "name")
        first, query = asked.integer("first", "0"), asked.text("q")
        return differences(before, after, asked.text("show", "all"), first, query)

    def items(self, asked: Asked) -> Any:
        """Returns a page of the items of an evaluation."""
        path = asked.evaluation(asked.run, "name")
        return item_page(path, asked.integer("first", "0"), asked.text("show", "all"), asked.text("q"))

    def _step(self, run: Run, number: int) -> Step:
        return cached_step(run.rollout_file(number), run.reward_weights())

    def _index(self, run: Run) -> PromptIndex:
        return self._indexes.setdefault(run, PromptIndex(run))

    def answering(self, answer: Callable[[Asked], Any]) -> Callable[[Request], Response]:
        """Returns a handler that responds with what is answered, as JSON unless it is a response.

        If `answer` raises, the response is `{"error": text}`.
        """

        def answered(request: Request) -> Response:
            try:
                with np.errstate(all="ignore"):  # of numbers that no run of ours has
                    content = answer(Asked(request.query_params, self.runs))
                if isinstance(content, Response):
                    return content
                status, body = 200, json.dumps(plain(content), allow_nan=False, default=str)
            except (ValueError, OSError) as error:
                if isinstance(error.__cause__, ArithmeticError | AttributeError | LookupError | TypeError):
                    traceback.print_exc()  # of a damaged file, or a fault of ours
                gone = (NotFoundError, FileNotFoundError)  # a run may go while it is read
                status = 404 if isinstance(error, gone) or isinstance(error.__cause__, gone) else 400
                body = json.dumps({"error": str(error)})
            except Exception as error:  # noqa: BLE001 (the page must show that something failed)
                traceback.print_exc()
                fault = f"{type(error).__name__}: {error}; a file of the run may be damaged"
                status = 500
                body = json.dumps({"error": f"groupax view failed ({fault}). Its terminal has the traceback"})
            return Response(body, status, NOT_STORED, "application/json")

        return answered


def _file_answer(file: Path) -> Callable[[Request], Response]:
    content, kind = file.read_bytes(), TYPES[file.suffix]
    return lambda _: Response(content, 200, {"cache-control": "no-cache"}, kind)
