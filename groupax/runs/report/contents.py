"""The contents of a report, independent of its format. Imports no jax."""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, get_args

from groupax.core.terminal.printable import printable
from groupax.evaluation.paired import p_text
from groupax.rollouts.completions import first_and_last
from groupax.runs.diagnostics import Severity, severity_of
from groupax.runs.model_card import shown_name
from groupax.runs.progress.display import headline
from groupax.runs.report.record import RunRecord
from groupax.runs.rollout_log import beginning

OF_EPISODES = ("episodes/turns", "episodes/streams", "episodes/turns_per_stream")
# Metrics to draw together, by title; a star stands for any name.
CURVES = {
    "reward": ("reward",),
    "reward functions": ("rewards/*/mean",),
    "loss": ("loss",),
    "evaluation": ("eval_*pass@1", "eval_*reward", "eval_*loss"),
    "KL to the reference, nats": ("kl",),
    "entropy, nats": ("entropy",),
    "completion length, tokens": ("completions/mean_length", "completions/max_length"),
    "turns and streams of tokens per episode, turns per stream": OF_EPISODES,
    "truncated, zero-variance groups": ("completions/clipped_ratio", "frac_reward_zero_std"),
    "clipped tokens": ("clip_ratio/region_mean",),
    "gradient norm": ("grad_norm",),
    "learning rate": ("learning_rate",),
    "tokens/s": ("rollout/tokens_per_s", "train/tokens_per_s"),
    "engine against trainer, nats": ("rollout/logp_diff_mean",),
    "padding": ("padding_frac",),
    "memory, bytes": ("memory/peak_bytes", "memory/process_bytes", "memory/arrays_bytes"),
}
TIMES = {"time/rollout_s": "sampling", "time/reward_s": "waiting for rewards", "time/train_s": "update"}
TIMES_OF_SUPERVISED = {"time/train_s": "update"}
TIMES_AHEAD = {
    "time/wait_s": "waiting for rollouts",
    "time/train_s": "update",
}  # asynchronous rollouts
EVALUATED = ("eval_*pass@1", "eval_*reward", "eval_*rewards/*", "eval_*loss", "eval_*completions/mean_length")
TEXT_CHARACTERS = 4000

Rows = list[tuple[str, ...]]


@dataclass(frozen=True)
class Curve:
    """Values by name over steps."""

    title: str
    steps: Sequence[float]
    series: Mapping[str, Sequence[float]]


def contents_of(run: RunRecord, price_per_hour: float | None = None) -> dict[str, Any]:
    """Returns the contents of a run's report by name, as the templates show them. Tables have a head as first row.

    Args:
        run: Record of the run.
        price_per_hour: Price of a device, or of the machine if it trains on CPU.
    """
    changes = [(name, *(f"{count:,}" for count in counts)) for name, counts in run.changes.items()]
    settings = [(name, _plain(value), _plain(default)) for name, (value, default) in run.settings.items()]
    return {
        "title": f"groupax run {run.name}",
        "subject": _subject(run),
        "command": repeating_command(run.command, run.settings) if run.command else "",
        "summary": _summary(run, price_per_hour),
        "verdicts": [f"{name}: {text}" for name, text in ((run.result or {}).get("verdicts") or {}).items()],
        "diagnostics": _by_severity(run.diagnostics),
        "curves": _curves(run),
        "samples": run.samples,
        "evaluations": _evaluations(run),
        "changes": [("held-out prompts that were answered", "better", "worse", "alike"), *changes],
        "times": _times(_time_split(run)),
        "settings": [("setting", "value", "default"), *settings],
        "hardware": _hardware(run),
    }


def shown(text: str) -> str:
    """Returns a foreign text with visible control characters, cut to a readable length."""
    return printable(beginning(text, TEXT_CHARACTERS))


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


def _by_severity(diagnostics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = [{**each, "severity": severity_of(str(each["name"]))} for each in diagnostics]
    return sorted(found, key=lambda each: get_args(Severity).index(each["severity"]))


def _subject(run: RunRecord) -> Rows:
    """Returns what was trained on what."""
    facts = run.processes[-1].get("run", {}) if run.processes else {}
    command = run.command or {}
    recipe = _recipe(command)
    model = facts.get("model") or command.get("model") or (recipe and recipe.model)
    rewards = command.get("reward_funcs") or (recipe.reward_funcs if recipe else [])
    named = {
        "model": model and shown_name(model),
        "parameters": facts.get("parameters"),
        "recipe": command.get("recipe"),
        "data": facts.get("data") or command.get("dataset"),
        "held-out prompts": ", ".join(command.get("eval_dataset") or []),
        "prompts": facts.get("prompts"),
        "examples": facts.get("examples"),
        "reward functions": weighted(facts.get("rewards") or ", ".join(rewards), run.settings.get("reward_weights")),
        "steps": facts.get("steps"),
        "command": None if command else "none: the run was started from Python",
    }
    return [("", ""), *((label, str(value)) for label, value in named.items() if value)]


def weighted(rewards: str, weights: Any) -> str:
    """Returns the names of the reward functions, with their weights if the setting is given as (value, default)."""
    names, given = rewards.split(", "), (weights or (None,))[0]
    if not isinstance(given, list) or len(given) != len(names):
        return rewards
    return ", ".join(f"{name} x {weight:g}" for name, weight in zip(names, given, strict=True))


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


def _summary(run: RunRecord, price_per_hour: float | None) -> Rows:
    last = run.metrics[-1]
    seconds = run.total("step_time")
    count, kind = run.num_paid
    hours = count * seconds / 3600
    rows = [("", ""), ("optimizer steps", f"{run.num_steps:,}")]
    for name in (headline(last), "pass@1", "kl", "entropy", "completions/mean_length", *OF_EPISODES):
        if values := [value for each in run.metrics if (value := each.get(name)) is not None]:
            rows.append((name, _trend(values)))
    rows += [
        ("sampled tokens" if "reward" in last else "tokens", f"{last.get('num_tokens', math.nan):,.0f}"),
        ("time in steps", _duration(seconds)),
        (f"{kind} hours", f"{hours:.3g} ({count} x {seconds / 3600:.3g} h)"),
    ]
    if price_per_hour is not None:
        rows.append(("cost", f"{hours * price_per_hour:,.2f} at {price_per_hour:g} per {kind} hour"))
    return [*rows, ("diagnostics", str(len(run.diagnostics)))]


def _trend(values: Sequence[float]) -> str:
    """Returns the means of the first and of the last logged values."""
    first, last, num = first_and_last(values)
    before, after = numbers([first, last])
    where = "first and last logged step" if num == 1 else f"means of the first and last {num} logged steps"
    return f"{before} → {after} ({where})"


def _evaluations(run: RunRecord) -> Rows:
    """Returns the estimates before and after training, or else those of the first and the last evaluation."""
    rows: Rows = [("set", "", "before, 95 % interval", "after", "difference", "p")]
    for name, each in ((run.result or {}).get("sets") or {}).items():
        for estimate, pair in each["comparison"]["differences"].items():
            change = pair["difference"]
            value, low, high = (_signed(change.get(key)) for key in ("value", "low", "high"))
            interval = f"{value} [{low}, {high}]"
            both = [_with_interval(each.get(when), estimate, pair[when]) for when in ("before", "after")]
            rows.append((name, estimate, *both, interval, p_text(pair["p_value"])))
    if len(rows) == 1 and run.evaluations:
        first, last = run.evaluations[0], run.evaluations[-1]
        rows = [("", f"step {first['step']:.0f}", f"step {last['step']:.0f}")]
        names = (name for name in last if any(fnmatchcase(name, pattern) for pattern in EVALUATED))
        rows += [(name.removeprefix("eval_"), *_logged((first, last), name)) for name in names]
    return rows if len(rows) > 1 else []


def _logged(lines: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """Returns a metric of evaluations during training, with its intervals if it has them."""
    cells = numbers([line.get(name, math.nan) for line in lines])
    for index, line in enumerate(lines):
        low, high = (line.get(f"{name}_{end}", math.nan) for end in ("low", "high"))
        if not math.isnan(low + high):
            cells[index] = f"{line[name]:.3f} [{low:.3f}, {high:.3f}]"
    return cells


def _curves(run: RunRecord) -> list[Curve]:
    curves = []
    for title, patterns in CURVES.items():
        lines = run.evaluations if title == "evaluation" else run.metrics
        names = dict.fromkeys(name for line in (*lines[:1], *lines[-1:]) for name in line)
        found = [name for pattern in patterns for name in names if fnmatchcase(name, pattern)]
        if title == "loss" and "reward" in names:  # GRPO's says nothing about progress
            continue
        series = {name: [line.get(name, math.nan) for line in lines] for name in found}
        series = {name: values for name, values in series.items() if any(map(math.isfinite, values))}
        if series:
            curves.append(Curve(title, [line["step"] for line in lines], series))
    return curves


def _time_split(run: RunRecord) -> dict[str, float]:
    """Returns the seconds of a run by activity."""
    times = TIMES if "time/rollout_s" in run.metrics[-1] else TIMES_OF_SUPERVISED
    times = TIMES_AHEAD if any("time/wait_s" in line for line in run.metrics) else times
    split = {label: run.total(name) for name, label in times.items()}
    return split | {"the rest": max(0.0, run.total("step_time") - sum(split.values()))}


def _times(split: Mapping[str, float]) -> Rows:
    total = sum(split.values()) or 1.0
    return [("", "time", "share")] + [
        (name, _duration(seconds), f"{100 * seconds / total:.0f} %") for name, seconds in split.items()
    ]


def _hardware(run: RunRecord) -> Rows:
    rows: Rows = [("process", "devices", "processor", "software")] if run.processes else []
    for process in run.processes:
        versions = ", ".join(f"{name} {version}" for name, version in process.get("versions", {}).items())
        mesh = ", ".join(f"{axis} {size}" for axis, size in (process.get("mesh") or {}).items() if size != 1)
        devices = f"{process.get('num_devices')} x {process.get('kind')}" + (f", mesh {mesh}" if mesh else "")
        processor = f"{process.get('processor')}, {process.get('cores')} cores"
        commit = f", program at commit {process['commit']}" if process.get("commit") else ""
        software = f"Python {process.get('python')}, {versions}{commit}"
        rows.append((f"since {process.get('started_at')}", devices, processor, software))
    return rows


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _with_interval(estimates: Any, name: str, value: float | None) -> str:
    """Returns a value with its interval, if there is one."""
    known = (estimates or {}).get(name) or {}
    low, high = known.get("low"), known.get("high")
    if value is None or low is None or high is None:
        return "-" if value is None or math.isnan(value) else f"{value:.3f}"
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.3f}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.2f} h"
