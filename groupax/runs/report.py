"""A report of a run in Markdown, from the files in its folder: `groupax report`. Imports no jax.

Prompts and completions may hold anything: all text is escaped, or in blocks of code with longer fences than any in it.
"""

import html
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any, get_args

from groupax.core.config import config_class
from groupax.core.storage.folders import MAX_LOG_BYTES, read_file, run_folder_in
from groupax.core.terminal.printable import printable
from groupax.core.types import Metrics
from groupax.evaluation.items import Item, read_items
from groupax.evaluation.paired import p_text
from groupax.rollouts.completions import first_and_last
from groupax.runs.diagnostics import Severity, severity_of
from groupax.runs.ending import ending_of
from groupax.runs.files import parsed_record, read_record
from groupax.runs.model_card import shown_name, weighted
from groupax.runs.outcome import evaluation_files, evaluations_by_set, outcome
from groupax.runs.progress.display import clock, headline, short_number, sparkline
from groupax.runs.rollout_log import beginning, prompt_text

MAX_SAMPLES, TEXT_CHARACTERS, NUM_SPARKS = 4, 4000, 40
# Metrics that are shown as curves; a star stands for any name.
CURVES = (
    "reward",
    "rewards/*/mean",
    "kl",
    "entropy",
    "completions/mean_length",
    "completions/clipped_ratio",
    "frac_reward_zero_std",
    "episodes/turns",
    "grad_norm",
    "learning_rate",
    "rollout/tokens_per_s",
    "train/tokens_per_s",
    "rollout/logp_diff_mean",
    "memory/peak_bytes",
)
EVALUATED = ("eval_*pass@1", "eval_*reward", "eval_*rewards/*", "eval_*loss", "eval_*completions/mean_length")
TIMES = {"time/rollout_s": "sampling", "time/reward_s": "waiting for rewards", "time/train_s": "update"}
TIMES_AHEAD = {"time/wait_s": "waiting for rollouts", "time/train_s": "update"}  # asynchronous rollouts

Rows = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Sample:
    """A prompt with completions of it, early and late in a run: origin, text and reward of each."""

    prompt: str
    answers: Sequence[tuple[str, str, float | None]]


@dataclass(frozen=True)
class RunRecord:
    """The record of a run.

    Attributes:
        name: Name of its folder.
        metrics: Lines of training, by step.
        evaluations: Lines of evaluations during training, with `eval_...`.
        outcome: What came of it, in sentences.
        settings: Value and default of each setting that differs from its default.
        processes: Records of the processes that worked on it (see `runs.header`).
        ending: How it ended, in a sentence; empty while it is in progress.
        diagnostics: Records with `step`, `name`, `text`.
        result: Content of `result.json`; empty if there is none.
        samples: Completions of held-out prompts early and late.
        command: Content of `command.json`: the command line without settings; empty if the run was started from Python.
    """

    name: str
    metrics: Sequence[Metrics]
    evaluations: Sequence[Metrics]
    outcome: Sequence[str]
    settings: Mapping[str, tuple[Any, Any]]
    processes: Sequence[Mapping[str, Any]]
    ending: str
    diagnostics: Sequence[Mapping[str, Any]]
    result: Mapping[str, Any]
    samples: Sequence[Sample]
    command: Mapping[str, Any]

    def total(self, name: str) -> float:
        """Returns the sum of a metric over all steps; a line has the mean over the steps since the line before."""
        steps = [0.0, *(line["step"] for line in self.metrics)]
        parts = [
            (now - before) * line.get(name, 0.0)
            for before, now, line in zip(steps, steps[1:], self.metrics, strict=False)
        ]
        return sum(part for part in parts if math.isfinite(part))


def write_report(folder: Path, to: Path | None = None) -> Path:
    """Writes `report.md` into the run folder, or into the folder `to`, and returns its path.

    Raises:
        ValueError: The folder has no run, or its run has no logged step yet.
    """
    text, path = markdown(read_run(folder)), (to or folder) / "report.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="backslashreplace")
    return path


# -- the record, which may be of a run that is in progress


def read_run(folder: Path) -> RunRecord:
    """Returns the record of a run, during the run or afterwards.

    Raises:
        ValueError: The folder has no run, or its run has no logged step yet.
    """
    folder = run_folder_in(folder)
    if not (folder / "metrics.jsonl").is_file():
        raise ValueError(f"{folder} is not a run folder: it has no metrics.jsonl")
    lines = _json_lines(folder / "metrics.jsonl")
    metrics = [line for line in lines if "loss" in line and "step" in line]
    if not metrics:
        raise ValueError(f"the run in {folder} has not come to a logged step yet; its metrics.jsonl has no line")
    result = read_record(folder / "result.json")
    return RunRecord(
        name=folder.resolve().name,
        metrics=metrics,
        evaluations=[line for line in lines if any(name.startswith("eval_") for name in line)],
        outcome=outcome(result, evaluation_files(folder), lambda name: _series(lines, name), {*chain(*lines)}),
        settings=changed_settings(read_record(folder / "config.json")),
        processes=read_record(folder / "run.json").get("processes", []),
        ending=ending_of(folder).sentence,
        diagnostics=[line for line in _json_lines(folder / "diagnostics.jsonl") if "text" in line],
        result=result,
        samples=_samples_of(folder),
        command=read_record(folder / "command.json"),
    )


def changed_settings(config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns value and default of each setting of a `config.json` that differs from its default."""
    defaults = json.loads(json.dumps(config_class(config)().to_dict()))
    return {name: (value, defaults.get(name)) for name, value in config.items() if value != defaults.get(name)}


def _series(metrics: Sequence[Metrics], name: str) -> tuple[Sequence[float], Sequence[float]]:
    known = [line for line in metrics if name in line]
    return [line["step"] for line in known], [line[name] for line in known]


def _samples_of(folder: Path) -> list[Sample]:
    """Returns the items that gained most and the one that gained least, of the first set that was evaluated twice."""
    for files in evaluations_by_set(evaluation_files(folder)).values():
        first, last = files[0][1], files[-1][1]
        try:
            early, late = ({item.key: item for item in read_items(path)} for path in (first, last))
        except ValueError:  # damaged, or of another version
            continue
        both = [(item, late[key]) for key, item in early.items() if key in late]
        if first != last and both:
            both.sort(key=lambda pair: (_reward(pair[0]) - _reward(pair[1]), prompt_text(pair[0].prompt)))
            chosen = both if len(both) <= MAX_SAMPLES else [*both[: MAX_SAMPLES - 1], both[-1]]
            return [Sample(prompt_text(then.prompt), [_said(first, then), _said(last, now)]) for then, now in chosen]
    return []


def _reward(item: Item) -> float:
    return item.completions[0].reward or 0.0


def _said(path: Path, item: Item) -> tuple[str, str, float | None]:
    start = path.stem.partition(".")[0]
    when = f"{start} training" if start in ("before", "after") else f"step {int(start.removeprefix('step_'))}"
    return when, item.completions[0].text, item.completions[0].reward


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the objects in a file of lines, null as NaN, without damaged lines."""
    try:
        lines = read_file(path, MAX_LOG_BYTES).split(b"\n")
    except OSError:
        return []
    records = filter(None, map(parsed_record, lines))
    return [{name: math.nan if value is None else value for name, value in each.items()} for each in records]


# -- what the report says of it


def markdown(run: RunRecord) -> str:
    """Returns the report of a run."""
    severities = get_args(Severity)
    found = [(severity_of(str(each["name"])), each) for each in run.diagnostics]
    found.sort(key=lambda pair: severities.index(pair[0]))
    diagnostics = [
        f"* **{_inline(str(each['name']))}**, {severity}, step {_inline(str(each.get('step')))}: "
        f"{_inline(str(each['text']))}"
        for severity, each in found
    ]
    settings = [(name, *map(_plain, values)) for name, values in run.settings.items()]
    curves = [(name, short_number(low), sparks, short_number(high)) for name, low, sparks, high in _curves(run)]
    parts = [
        f"# groupax run {_inline(run.name)}",
        *(f"**{_inline(text)}**" for text in run.outcome),
        _table([("", ""), *_subject(run)]),
        _code(repeating_command(run.command, run.settings)) if run.command else "",
        _table([("", ""), *_summary(run)]),
        *(["## Evaluation", _table(rows)] if (rows := _evaluations(run)) else []),
        "## Diagnostics",
        "\n".join(diagnostics) or "None.",
        "## Curves over optimizer steps",
        _table([("", "first", "", "last"), *curves]),
        *(["## Completions early and late", *_samples(run.samples)] if run.samples else []),
        "## Time",
        _table([("", "time", "share"), *_times(run)]),
        "## Settings that differ from the defaults",
        _table([("setting", "value", "default"), *settings]),
        "## Hardware and software",
        _table([("process", "devices", "processor", "software"), *map(_hardware, run.processes)]),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _subject(run: RunRecord) -> Rows:
    """Returns what was trained on what."""
    facts, command = (run.processes[-1].get("run", {}) if run.processes else {}), run.command
    recipe = _recipe(command)
    model = facts.get("model") or command.get("model") or (recipe and recipe.model)
    rewards = command.get("reward_funcs") or (recipe.reward_funcs if recipe else [])
    names = str(facts["rewards"]).split(", ") if facts.get("rewards") else rewards
    weights = run.settings.get("reward_weights", (None,))[0]
    named = {
        "model": model and shown_name(model),
        "parameters": facts.get("parameters"),
        "recipe": command.get("recipe"),
        "data": facts.get("data") or command.get("dataset"),
        "held-out prompts": ", ".join(command.get("eval_dataset") or []),
        "prompts": facts.get("prompts"),
        "examples": facts.get("examples"),
        "reward functions": weighted(names, weights if isinstance(weights, list) else None),
        "steps": facts.get("steps"),
        "command": None if command else "none: the run was started from Python",
    }
    return [(label, str(value)) for label, value in named.items() if value]


def repeating_command(command: Mapping[str, Any], settings: Mapping[str, tuple[Any, Any]]) -> str:
    """Returns the command line that repeats a run.

    Args:
        command: Content of `command.json`.
        settings: Value and default of each setting that differs from its default.
    """
    recipe = _recipe(command)
    own = json.loads(json.dumps(dict(recipe.config))) if recipe else {}
    options = {name: value for name, value in command.items() if value}
    options |= {name: value for name, (value, _) in settings.items() if name not in own or own[name] != value}
    verb = "train" if "reward_funcs" in command else "sft"
    return " ".join([f"groupax {verb}", *(_option(name, value) for name, value in options.items())])


def _recipe(command: Mapping[str, Any]) -> Any:
    """Returns the `Recipe` of a command, None for none; imported here, since every trainer imports reports."""
    from groupax.recipes import RECIPES, load_recipe

    return load_recipe(command["recipe"]) if command.get("recipe") in RECIPES else None


def _option(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no_{name}"
    values = value if isinstance(value, list) else [value]
    texts = (json.dumps(each) if isinstance(each, dict) else str(each) for each in values)
    return " ".join([f"--{name}", *map(shlex.quote, texts)])


def _summary(run: RunRecord) -> Rows:
    last = run.metrics[-1]
    rows = [("optimizer steps", f"{last['step']:,.0f}")]
    for name in (headline(last), "pass@1", "kl", "entropy", "completions/mean_length", "episodes/turns"):
        if values := [value for line in run.metrics if (value := line.get(name)) is not None]:
            first, late, num = first_and_last(values)
            where = "first and last logged step" if num == 1 else f"means of the first and last {num} logged steps"
            rows.append((name, f"{short_number(first)} → {short_number(late)} ({where})"))
    tokens = "sampled tokens" if "reward" in last else "tokens"
    rows += [(tokens, f"{last.get('num_tokens', math.nan):,.0f}"), ("time in steps", clock(run.total("step_time")))]
    rows += [("how it ended", run.ending)] if run.ending else []
    return [*rows, ("diagnostics", str(len(run.diagnostics)))]


def _evaluations(run: RunRecord) -> Rows:
    """Returns the estimates before and after training, or else those of the first and the last evaluation."""
    rows: list[Sequence[str]] = []
    for name, each in (run.result.get("sets") or {}).items():
        for estimate, pair in each["comparison"]["differences"].items():
            value, low, high = (_decimals(pair["difference"].get(key), "+") for key in ("value", "low", "high"))
            both = (_decimals(pair[when]) for when in ("before", "after"))
            rows.append((name, estimate, *both, f"{value} [{low}, {high}]", p_text(pair["p_value"])))
    if rows:
        return [("set", "", "before", "after", "difference, 95 % interval", "p"), *rows]
    if run.evaluations:
        both = run.evaluations[0], run.evaluations[-1]
        names = (name for name in both[1] if any(fnmatchcase(name, pattern) for pattern in EVALUATED))
        rows = [(name.removeprefix("eval_"), *(_decimals(line.get(name)) for line in both)) for name in names]
        return [("", *(f"step {line['step']:.0f}" for line in both)), *rows]
    return []


def _curves(run: RunRecord) -> Iterator[tuple[str, float, str, float]]:
    """Yields the name, the first value, a line of characters, and the last value of each curve."""
    own = CURVES if "reward" in run.metrics[-1] else (*CURVES, "loss")  # GRPO's loss says nothing about progress
    for lines, patterns in ((run.metrics, own), (run.evaluations, EVALUATED)):
        names = dict.fromkeys(name for line in (*lines[:1], *lines[-1:]) for name in line)
        for name in (name for pattern in patterns for name in names if fnmatchcase(name, pattern)):
            values = [line.get(name, math.nan) for line in lines]
            if known := [value for value in values if math.isfinite(value)]:
                yield name, known[0], sparkline(values, NUM_SPARKS), known[-1]


def _samples(samples: Sequence[Sample]) -> Iterator[str]:
    for sample in samples:
        yield f"prompt\n\n{_code(sample.prompt)}"
        for when, text, reward in sample.answers:
            yield f"{when}{'' if reward is None else f', reward {short_number(reward)}'}\n\n{_code(text)}"


def _times(run: RunRecord) -> Rows:
    """Returns the seconds of a run by activity."""
    last, total = run.metrics[-1], run.total("step_time")
    times = TIMES_AHEAD if "time/wait_s" in last else TIMES
    split = {label: run.total(name) for name, label in times.items() if name in last}
    split["the rest"] = max(0.0, total - sum(split.values()))
    whole = sum(split.values()) or 1.0
    return [(name, clock(seconds), f"{100 * seconds / whole:.0f} %") for name, seconds in split.items()]


def _hardware(process: Mapping[str, Any]) -> Sequence[str]:
    versions = ", ".join(f"{name} {version}" for name, version in process.get("versions", {}).items())
    mesh = ", ".join(f"{axis} {size}" for axis, size in (process.get("mesh") or {}).items() if size != 1)
    devices = f"{process.get('num_devices')} x {process.get('kind')}" + (f", mesh {mesh}" if mesh else "")
    processor = f"{process.get('processor')}, {process.get('cores')} cores"
    commit = f", program at commit {process['commit']}" if process.get("commit") else ""
    software = f"Python {process.get('python')}, {versions}{commit}"
    return f"since {process.get('started_at')}", devices, processor, software


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _decimals(value: float | None, sign: str = "") -> str:
    return "-" if value is None or math.isnan(value) else f"{value:{sign}.3f}"


def _table(rows: Rows) -> str:
    """Returns a table whose first row is the head; "None." without others."""
    lines = [f"| {' | '.join(map(_inline, row))} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) if len(rows) > 1 else "None."


def _inline(text: str) -> str:
    """Returns one line that shows the text unchanged."""
    line = " ".join(printable(beginning(text, TEXT_CHARACTERS)).split())
    return "".join(f"\\{c}" if c in "\\`*_[]|~#" else html.escape(c, quote=False) for c in line)


def _code(text: str) -> str:
    """Returns a block of code with the text unchanged, between fences that are longer than any in it."""
    visible = printable(beginning(text, TEXT_CHARACTERS))
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", visible)), default=0))
    return f"{fence}\n{visible}\n{fence}"
