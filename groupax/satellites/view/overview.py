"""The summary of one run: what it is, its progress, and what training has changed."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from groupax.core.settings.run import UNSEEN
from groupax.runs.outcome import outcome
from groupax.runs.report import changed_settings, repeating_command
from groupax.satellites.view.curves import WAIT_S
from groupax.satellites.view.evaluations import sentences
from groupax.satellites.view.rollouts import PREVIEW_CHARACTERS, Step, shown_prompt
from groupax.satellites.view.runs import Run

RECENT_STEPS = 30  # whose median time the remaining time is estimated from
COMPILING_FRAC = 0.1  # of a step's time; steps that compile more are left out of the estimate
WAITING_FRAC = 0.05  # of a step's time, from which on updates count as waiting for rollouts
NUM_STEPS = re.compile(r"([0-9][0-9,]{,15}), each")
TRAINING = "training prompts"  # the set of changes that are not held out
MAX_MEAN_STEPS = 10  # of the means at the start and the end of training
MAX_CHANGES = 12  # estimates of a set
SAMPLE_CHARACTERS = 1200  # of a completion
SHOWN_FACTS = ("model", "parameters", "data", "prompts", "examples", "rewards", "steps", "devices")


def overview(run: Run) -> dict[str, Any]:
    """Returns the summary of a run.

    Returns:
        facts: Texts by label: model, data, rewards, command, hardware, versions, commit.
        progress: `step`, `num_steps`, `elapsed_s`, `remaining_s`, `tokens`, `started_at`, None where unknown; `fleet`.
        outcome: What came of it so far, in sentences.
        changes: Estimates before and after training, with their intervals (see `_changes`).
    """
    config, command = _or_empty(run.config), _or_empty(run.command)
    processes = _processes(run)
    progress, changes = _progress(run, config, processes), list(_changes(run))
    said = outcome(run.record("result.json"), run.evaluation_files(), run.series, run.metric_names(), sentences)
    facts = _facts(run, config, command, processes)
    return {"facts": facts, "progress": progress, "outcome": said, "changes": changes}


def best_and_worst(step: Step, number: int) -> dict[str, dict[str, Any]]:
    """Returns the completions of a step with the highest and the lowest total reward; empty if none has a reward.

    Args:
        step: The step.
        number: Its number.

    Returns:
        `best` and `worst`, each with `step`, `prompt_index`, `sample_index`, `total`, `prompt` and `text`, the
        beginnings of the texts.
    """
    if np.isnan(step.total).all():
        return {}
    rows = {"best": int(np.nanargmax(step.total)), "worst": int(np.nanargmin(step.total))}
    return {
        which: {
            "step": number,
            "prompt_index": int(step.prompt_index[row]),
            "sample_index": step.value("sample_index", row),
            "total": step.total[row],
            "prompt": shown_prompt(step.text("prompt", row)[0])[:PREVIEW_CHARACTERS],
            "text": step.text("completion", row, 4 * SAMPLE_CHARACTERS)[0][:SAMPLE_CHARACTERS],
        }
        for which, row in rows.items()
    }


def machine_of(run: Run) -> dict[str, str]:
    """Returns hardware and versions of a run's last process as texts by label."""
    process = (_processes(run) or [{}])[-1]
    known = {**_hardware(process), "Python": process.get("python"), **_mapping(process.get("versions"))}
    return {str(label): str(text) for label, text in known.items() if text}


def table_row(run: Run) -> dict[str, Any]:
    """Returns the summary of a run as a row of a table of runs; None for what is not known."""
    name = next((each for each in ("reward", "loss") if each in run.metric_names()), "reward")
    values = run.series(name)[1]
    values = values[~np.isnan(values)]
    return {
        "metric": name,
        "last": float(values[-1]) if values.size else None,
        "best": float(values.max() if name == "reward" else values.min()) if values.size else None,
        "held_out": next((change for change in _changes(run) if change["set"] != TRAINING), None),
        **_progress(run, _or_empty(run.config), _processes(run)),
    }


def _hardware(process: Mapping[str, Any]) -> dict[str, Any]:
    processor = process.get("processor")
    return {
        "devices": _mapping(process.get("run")).get("devices"),
        "mesh": ", ".join(f"{axis} {size}" for axis, size in _mapping(process.get("mesh")).items() if size != 1),
        "processor": f"{processor}, {process.get('cores')} cores" if processor else "",
        "commit": process.get("commit"),
    }


def _facts(
    run: Run, config: Mapping[str, Any], command: Mapping[str, Any], processes: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    process = processes[-1] if processes else {}
    known, versions, hardware = _mapping(process.get("run")), _mapping(process.get("versions")), _hardware(process)
    software = [f"Python {process['python']}"] if process.get("python") else []
    found = {
        "recipe": command.get("recipe"),
        "model": known.get("model") or command.get("model"),
        "parameters": known.get("parameters"),
        "data": known.get("data") or command.get("dataset"),
        "prompts": known.get("prompts"),
        "examples": known.get("examples"),
        "rewards": _weighted(known.get("rewards"), run.reward_weights()),
        **{name: value for name, value in known.items() if name not in SHOWN_FACTS},
        "steps": known.get("steps"),
        "command": _command(command, config),
        **{name: hardware[name] for name in ("devices", "mesh", "processor")},
        "software": ", ".join([*software, *(f"{name} {version}" for name, version in versions.items())]),
        "commit": hardware["commit"],
        "continued": process.get("started_at") if len(processes) > 1 else None,
        "ended before": "; ".join(str(each["end"]).partition("\n")[0] for each in processes[:-1] if each.get("end")),
        "changed settings": "; ".join(_changed_settings(processes)),
        "folder": str(run.path),
    }
    return {label: str(text) for label, text in found.items() if text}


def _changed_settings(processes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the settings that differ from those of the process before, for each that continued the run with others."""
    for before, after in itertools.pairwise(processes):
        then, now = _mapping(before.get("settings")), _mapping(after.get("settings"))
        names = [name for name in now if name not in UNSEEN and name in then and then[name] != now[name]]
        if names:
            changed = ", ".join(f"{name} {then[name]} → {now[name]}" for name in names)
            yield f"after step {after.get('step')}: {changed}"


def _command(command: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    try:
        return repeating_command(command, changed_settings(config)) if command else ""
    except (AttributeError, KeyError, TypeError, ValueError):  # of another version
        return ""


def _weighted(rewards: Any, weights: Sequence[float] | None) -> str:
    """Returns the names of the reward functions, with their weights unless all are 1."""
    names = str(rewards).split(", ") if rewards else []
    if weights is None or len(weights) != len(names) or set(weights) == {1.0}:
        return ", ".join(names)
    return ", ".join(f"{name} × {weight:g}" for name, weight in zip(names, weights, strict=True))


def _progress(run: Run, config: Mapping[str, Any], processes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    steps, step_s = run.series("step_time")
    gaps = np.diff(steps, prepend=0.0)
    step = float(steps[-1]) if len(steps) else None
    num_steps = num_steps_of(config, processes[-1] if processes else {})
    tokens = run.series("num_tokens")[1]
    remaining_s = None
    if step is not None and num_steps is not None and run.state()["status"] in ("live", "quiet"):
        remaining_s = _median_step_s(run, steps, step_s) * max(num_steps - step, 0)
    return {
        "step": step,
        "num_steps": num_steps,
        "elapsed_s": float(np.nansum(gaps * step_s)) if len(steps) else None,
        "remaining_s": remaining_s,
        "tokens": float(tokens[-1]) if len(tokens) else None,
        "started_at": processes[0].get("started_at") if processes else None,
        "fleet": _fleet(run, config),
    }


def _fleet(run: Run, config: Mapping[str, Any]) -> str:
    """Returns who waits for whom where rollouts are sampled ahead or by servers, in the last steps; else nothing."""
    servers = config.get("rollout_servers")
    parts = [f"{len(servers)} rollout servers"] if isinstance(servers, list) and servers else []
    names = (WAIT_S, "step_time", "time/rollout_s", "rollout/staleness")
    recent = [run.series(name)[1][-RECENT_STEPS:] for name in names]
    if all(np.isfinite(values).any() for values in recent):
        wait_s, step_s, rollout_s, staleness = (float(np.nanmean(values)) for values in recent)
        frac = wait_s / step_s if step_s else 0.0
        who = "updates wait for rollouts" if frac > WAITING_FRAC else "rollouts wait for updates, which wait"
        parts += [f"{who} {100 * frac:.0f} % of the time", f"a rollout takes {rollout_s:.3g} s, a step {step_s:.3g} s"]
        parts += [f"rollouts are {staleness:.3g} steps old, of at most {config.get('max_staleness')}"]
    return " · ".join(parts)


def num_steps_of(config: Mapping[str, Any], process: Mapping[str, Any]) -> int | None:
    """Returns the number of optimizer steps that the run will have; None if it is not known."""
    steps = config.get("max_steps")
    if isinstance(steps, int) and 0 < steps < 1 << 53:
        return steps
    match = NUM_STEPS.match(str(_mapping(process.get("run")).get("steps", "")))
    return int(match[1].replace(",", "")) if match else None


def _median_step_s(run: Run, steps: np.ndarray, step_s: np.ndarray) -> float:
    """Returns the median time of the last steps, without those that compiled."""
    compile_steps, compile_s = run.series("time/compile_s")
    compiling = np.zeros(len(steps), bool)
    _, own, others = np.intersect1d(steps, compile_steps, return_indices=True)
    compiling[own] = compile_s[others] > COMPILING_FRAC * step_s[own]
    recent = step_s[~compiling][-RECENT_STEPS:]
    recent = recent[~np.isnan(recent)]
    return float(np.median(recent)) if recent.size else math.nan


def _changes(run: Run) -> Iterator[dict[str, Any]]:
    """Yields one record per estimate: `set`, `name`, `before` and `after` with intervals, `difference`, `p_value`.

    The evaluations before and after training come first, then those during training, else the training rewards, in the
    mean over the first and the last steps.
    """
    found = False
    for name, each in _mapping(_mapping(run.record("result.json")).get("sets")).items():
        differences = _mapping(_mapping(_mapping(each).get("comparison")).get("differences"))
        ends = {end: _mapping(_mapping(each).get(end)) for end in ("before", "after")}
        for estimate, pair in list(differences.items())[:MAX_CHANGES]:
            pair, found = _mapping(pair), True
            yield {
                "set": name,
                "name": estimate,
                **{end: _interval(ends[end].get(estimate), pair.get(end)) for end in ends},
                "difference": _interval(pair.get("difference"), None),
                "p_value": pair.get("p_value"),
                "when": ["before training", "after training"],
            }
    if not found:
        yield from _logged_changes(run)


def _logged_changes(run: Run) -> Iterator[dict[str, Any]]:
    names = run.metric_names()
    evaluated = [name for name in names if name.startswith("eval_") and f"{name}_low" in names]
    evaluated += [name for name in names if re.fullmatch(r"eval_(.*_)?loss", name)]
    rewards = [each for each in ("reward", "pass@1") if each in names]
    for name in (evaluated or rewards or [each for each in ("loss",) if each in names])[:MAX_CHANGES]:
        steps, values = run.series(name)
        bounds = [run.series(f"{name}_{end}")[1] for end in ("low", "high")]
        # A single step of training has few prompts, so that it says little.
        num = 1 if name in evaluated else max(1, min(MAX_MEAN_STEPS, len(steps) // 4))
        pairs = []
        for place, part in ((0, slice(num)), (-1, slice(-num, None))):
            low, high = (float(bound[place]) if len(bound) == len(values) else None for bound in bounds)
            pairs.append({"value": float(np.mean(values[part])), "low": low, "high": high})
        yield {
            "set": "" if name in evaluated else TRAINING,
            "name": name.removeprefix("eval_"),
            "before": pairs[0],
            "after": pairs[1],
            "difference": {"value": pairs[1]["value"] - pairs[0]["value"], "low": None, "high": None},
            "p_value": None,
            "when": [_shown_steps(steps[:num]), _shown_steps(steps[-num:])],
        }


def _shown_steps(steps: np.ndarray) -> str:
    return f"step {steps[0]:.0f}" if len(steps) == 1 else f"steps {steps[0]:.0f} to {steps[-1]:.0f}"


def _interval(estimate: Any, value: Any) -> dict[str, Any]:
    estimate = _mapping(estimate)
    return {"value": estimate.get("value", value), "low": estimate.get("low"), "high": estimate.get("high")}


def _processes(run: Run) -> list[Mapping[str, Any]]:
    """Returns the processes that `run.json` records, those that continued the run last."""
    processes = run.record("run.json").get("processes")
    return [_mapping(each) for each in processes] if isinstance(processes, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _or_empty(read: Any) -> Mapping[str, Any]:
    try:
        return read()
    except ValueError:
        return {}
