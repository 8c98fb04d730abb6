"""The summary of a training run: evaluations before and after as tables, verdicts and a file."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from groupax.core.settings.sampling import SamplingParams
from groupax.core.terminal.printable import one_line, printable
from groupax.core.types import Metrics, Prompt
from groupax.data.tokenizer import is_conversational, last_text
from groupax.evaluation.evaluate import Evaluation, SetEvaluation
from groupax.evaluation.items import Comparison, Item, compare
from groupax.evaluation.paired import p_text
from groupax.rollouts.completions import first_and_last
from groupax.rollouts.estimates import Estimate
from groupax.runs.outcome import judged, outcome, verdict
from groupax.runs.trainer import TrainResult
from groupax.sft import SFTResult

NUM_SAMPLES = 2

MANY_WITHOUT_SIGNAL = 0.5  # share of groups from which on dynamic sampling is worth a try
SOLVED_ABOVE = 0.95  # smallest pass@1 of a model that has little to learn


def write_report(
    before: Evaluation, after: Evaluation, result: TrainResult, train_prompts: Mapping[str, int], folder: Path
) -> list[Any]:
    """Writes `result.json` into the run folder, and returns what to `show` to the user.

    `train_prompts` has the numbers of prompts of the training that were `used`, `dropped` and `truncated`.
    """
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    logged = [metrics for metrics in map(json.loads, lines) if "reward" in metrics]
    rewards = [metrics["reward"] for metrics in logged if metrics["reward"] is not None]  # null without any reward
    shown: list[Any] = [f"\nmean reward by step\n{text_curve(rewards)}"] if rewards else []
    sets, verdicts, solved = {}, {}, {}
    for name, each in after.sets.items():
        earlier = before.sets[name]
        comparison = compare(earlier.items, each.items)
        text = verdict(comparison, [earlier.estimates, each.estimates], f"After {result.num_steps:,} steps")
        verdicts[name] = text + _pointer(comparison, rewards, earlier.params)
        sets[name] = {
            "prompts": {kind: int(each.metrics[f"prompts{key}"]) for kind, key in _COUNTS.items()},
            "completions_truncated": {
                "before": round(earlier.metrics["completions/clipped_ratio"], 4),
                "after": round(each.metrics["completions/clipped_ratio"], 4),
            },
            "before": plain_estimates(earlier.estimates),
            "after": plain_estimates(each.estimates),
            "comparison": plain_differences(comparison),
        }
        title = f"{name}: before and after, {comparison.num_items} held-out prompts"
        shown += [difference_table(title, comparison, earlier.metrics, each.metrics), _samples(earlier, each)]
        if len(after.sets) == 1 and "pass@1" in each.estimates:
            solved = {f"pass_at_1_{when}": sets[name][when]["pass@1"]["value"] for when in ("before", "after")}
    summary = {
        **solved,
        "steps": result.num_steps,
        "train_seconds": round(result.train_seconds, 2),
        "rollout_tokens_per_s": round(result.rollout_tokens_per_s, 1),
        "verdicts": verdicts,
        "train_prompts": dict(train_prompts),
        "train_completions_truncated": _mean_of(logged, "completions/clipped_ratio"),
        "train_groups_without_signal": _mean_of(logged, "frac_reward_zero_std"),
        "sets": sets,
    }
    (folder / "result.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return [*shown, _omissions(summary), *outcome(summary, {}, lambda _: ([], []))]


def next_commands(uri: str, prompt: Prompt, result: TrainResult | SFTResult, flags: str = "") -> list[str]:
    """Returns a text with commands for a finished run, given one of its prompts and the flags of its environments."""
    raw = "" if is_conversational(prompt) else " --raw"
    model, run = shlex.quote(f"{uri.rstrip('/')}/model"), shlex.quote(uri)
    prompt_text = shlex.quote(one_line(last_text(prompt), 60))
    minutes, seconds = divmod(round(result.train_seconds), 60)
    return [
        f"{result.num_steps:,} steps in {minutes}:{seconds:02d}; the model is in {model}\n"
        f"  groupax view {run}\n"
        f"  groupax generate --model {model}{raw}{flags} --prompt {prompt_text}\n"
        f"  groupax report {run}"
    ]


def show(parts: Sequence[Any]) -> None:
    """Prints texts and rich tables."""
    from groupax.core.terminal.tables import output_console

    console = output_console()
    for part in parts:
        if isinstance(part, str):
            console.print(printable(part), markup=False, soft_wrap=True)
        else:
            console.print(part)


def difference_table(title: str, comparison: Comparison, before: Metrics, after: Metrics) -> Any:
    """Returns a rich table of the estimates of two evaluations and their differences; intervals take a wide terminal.

    The metrics before and after are for lengths and truncation.
    """
    from groupax.core.terminal.tables import Fitting, stacked, table_of

    rows = []
    for name, pair in comparison.differences.items():
        rows.append((name, f"{pair.before:.3f}", f"{pair.after:.3f}", f"{pair.difference}", p_text(pair.p_value)))
    for name in ("completions/mean_length", "completions/clipped_ratio"):
        if name in before and name in after:
            rows.append((name, f"{before[name]:.3f}", f"{after[name]:.3f}", "", ""))
    changes = [f"{pair.difference.value:+.3f}" for pair in comparison.differences.values()]
    changes += [""] * (len(rows) - len(changes))
    short = [(*row[:3], change) for row, change in zip(rows, changes, strict=True)]
    return Fitting(
        table_of(title, ("", "before", "after", "difference", "p"), rows),
        table_of(title, ("", "before", "after", "difference"), short),
        stacked(title, [(name, f"{then} → {now}  {change}".rstrip()) for name, then, now, change in short]),
    )


def estimate_table(title: str, estimates: Mapping[str, Estimate]) -> Any:
    """Returns a rich table of estimates with their intervals."""
    from groupax.core.terminal.tables import Fitting, stacked, table_of

    rows = [
        (name, f"{each.value:.4f}", f"{each.low:.4f} to {each.high:.4f}", each.method, f"{each.num_items:,}")
        for name, each in estimates.items()
    ]
    columns, left = ("", "mean", "95 % interval", "method", "items"), ("", "95 % interval", "method")
    return Fitting(
        table_of(title, columns, rows, left),
        table_of(title, columns[:3], [row[:3] for row in rows], left),
        stacked(title, [(name, f"{mean} (95 %: {interval})") for name, mean, interval, *_ in rows]),
    )


def text_curve(values: Sequence[float]) -> str:
    """Returns the values as a bar chart of characters, with the range on the left."""
    if not values:
        return ""
    width, height = 64, 8
    columns = np.array([chunk.mean() for chunk in np.array_split(np.asarray(values), min(width, len(values)))])
    low, high = float(columns.min()), float(columns.max())
    eighths = np.rint((columns - low) / ((high - low) or 1.0) * (8 * height - 1)).astype(int) + 1
    rows = []
    for level in range(height - 1, -1, -1):
        filled = np.clip(eighths - 8 * level, 0, 8)
        label = f"{high:8.3f} " if level == height - 1 else f"{low:8.3f} " if level == 0 else " " * 9
        rows.append(label + "".join(" ▁▂▃▄▅▆▇█"[eighth] for eighth in filled))
    return "\n".join(rows)


def plain_estimates(estimates: Mapping[str, Estimate]) -> dict[str, Any]:
    """Returns estimates for JSON, with null for NaN."""
    return {name: _finite(asdict(each)) for name, each in estimates.items()}


def plain_differences(comparison: Comparison) -> dict[str, Any]:
    """Returns a comparison for JSON."""
    differences = {
        name: _finite({**asdict(pair), "difference": _finite(asdict(pair.difference))})
        for name, pair in comparison.differences.items()
    }
    return {
        "items": comparison.num_items,
        "only_before": comparison.num_only_before,
        "only_after": comparison.num_only_after,
        "differences": differences,
    }


_COUNTS = {"used": "", "dropped": "_dropped", "truncated": "_truncated", "unscorable": "_unscorable"}


def _pointer(comparison: Comparison, rewards: Sequence[float], params: SamplingParams) -> str:
    """Returns what to look at if held-out prompts are not answered better, given the reward in training."""
    name = judged(comparison)
    pair = comparison.differences.get(name)
    if pair is None or len(rewards) < 2 or (pair.is_clear and pair.difference.value > 0):
        return ""
    if name == "pass@1" and pair.before > SOLVED_ABOVE and not pair.is_clear:
        return ""
    first, last, _ = first_and_last(rewards)
    trend = f"from {first:.3f} to {last:.3f}"
    if last <= first:
        return f"; the reward in training did not rise ({trend}): see docs/troubleshooting.md"
    if pair.is_clear:
        return (
            f"; the reward in training rose {trend}, so the policy may have learned what these prompts do not reward: "
            "compare the training prompts with these, and read the completions (docs/hacked_reward.md)"
        )
    is_greedy = params.temperature == 0
    greedy = "; answers here are greedy, and sampled ones may improve first (eval_temperature)" if is_greedy else ""
    return f"; the reward in training rose {trend}: more steps may show it here{greedy}"


def _mean_of(logged: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [metrics[name] for metrics in logged if metrics.get(name) is not None]
    return round(float(np.mean(values)), 4) if values else None


def _omissions(summary: Mapping[str, Any]) -> str:
    """Returns a line per dataset about long prompts, truncated completions and groups without signal."""
    counts, clipped = summary["train_prompts"], summary["train_completions_truncated"]
    rows = [("training", counts, clipped)]
    rows += [(name, each["prompts"], each["completions_truncated"]["after"]) for name, each in summary["sets"].items()]
    lines = [
        f"{name}: {counts['used']:,} prompts; too long: {counts['dropped']:,} dropped, {counts['truncated']:,} cut"
        + ("" if clipped is None else f"; completions cut off at the limit: {_percent(clipped)}")
        for name, counts, clipped in rows
    ]
    without_signal = summary["train_groups_without_signal"]
    if without_signal is not None:
        lines[0] += f"; groups without signal, whose completions all got one reward: {_percent(without_signal)}"
        if without_signal > MANY_WITHOUT_SIGNAL:
            lines[0] += " (filter_zero_variance samples other prompts in their place)"
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _finite(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and not np.isfinite(value) else value for key, value in record.items()
    }


def _samples(before: SetEvaluation, after: SetEvaluation) -> Any:
    """Returns a table of prompts that were not solved before and are now."""
    from rich.text import Text

    from groupax.core.terminal.tables import SAMPLE_COLUMNS, Fitting, empty_table, stacked

    title, headers = "example completions, before and after", ("prompt", "before", "after")
    table = empty_table(title, show_lines=True)
    for header in headers:
        table.add_column(header, overflow="fold", min_width=SAMPLE_COLUMNS)

    def merit(item: Item) -> tuple[bool, float]:
        return bool(item.completions[0].solved), item.completions[0].reward or 0.0

    pairs = list(zip(before.items, after.items, strict=True))
    gained = sorted((pair for pair in pairs if merit(pair[1]) > merit(pair[0])), key=lambda pair: not merit(pair[1])[0])
    entries = []
    for first, second in (gained or pairs)[:NUM_SAMPLES]:
        shown = (last_text(first.prompt), first.completions[0].text, second.completions[0].text)
        texts = [one_line(text, 400) for text in shown]
        table.add_row(*map(Text, texts))
        entries += zip(headers, texts, strict=True)
    return Fitting(table, stacked(title, entries, show_lines=True))
