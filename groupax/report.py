"""What a run came to: before and after, as a table, a curve and a file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from groupax.evaluate import Evaluation
from groupax.progress import printable
from groupax.trainer import TrainResult

NUM_SAMPLES = 2


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two evaluations on the same prompts, around a run.

    Attributes:
        before, after: of the starting and of the trained model.
        result: of the training between them.
        solved_by: the reward function whose 1 means that a problem is solved.
    """

    before: Evaluation
    after: Evaluation
    result: TrainResult
    solved_by: str

    def summary(self) -> dict[str, float]:
        """The numbers of `result.json`."""
        name = f"rewards/{self.solved_by}/mean"
        return {
            "pass_at_1_before": self.before.metrics[name],
            "pass_at_1_after": self.after.metrics[name],
            "steps": self.result.num_steps,
            "train_seconds": round(self.result.train_seconds, 2),
            "rollout_tokens_per_s": round(self.result.rollout_tokens_per_s, 1),
        }


def write_report(comparison: Comparison, folder: Path) -> None:
    """Print the comparison, and write `result.json` and, if matplotlib is there, `reward.png` into the run folder."""
    from rich.console import Console

    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    logged = [metrics for metrics in map(json.loads, lines) if "reward" in metrics]
    steps, rewards = [metrics["step"] for metrics in logged], [metrics["reward"] for metrics in logged]
    (folder / "result.json").write_text(json.dumps(comparison.summary(), indent=2) + "\n", encoding="utf-8")
    console = Console(highlight=False)
    console.print(f"\nmean reward by step\n{text_curve(rewards)}", markup=False)
    console.print(_table(comparison))
    console.print(_samples(comparison))
    if _plot(steps, rewards, folder / "reward.png"):
        console.print(f"reward curve: {folder / 'reward.png'}", soft_wrap=True)
    console.print(f"result: {folder / 'result.json'}   model: {folder / 'model'}", soft_wrap=True)


def text_curve(values: Sequence[float], width: int = 64, height: int = 8) -> str:
    """The values as a bar chart of characters, with the range at the left."""
    if not values:
        return ""
    columns = np.array([chunk.mean() for chunk in np.array_split(np.asarray(values), min(width, len(values)))])
    low, high = float(columns.min()), float(columns.max())
    eighths = np.rint((columns - low) / ((high - low) or 1.0) * (8 * height - 1)).astype(int) + 1
    rows = []
    for level in range(height - 1, -1, -1):
        filled = np.clip(eighths - 8 * level, 0, 8)
        label = f"{high:8.3f} " if level == height - 1 else f"{low:8.3f} " if level == 0 else " " * 9
        rows.append(label + "".join(" ▁▂▃▄▅▆▇█"[eighth] for eighth in filled))
    return "\n".join(rows)


def _table(comparison: Comparison) -> Any:
    from rich.table import Table

    table = Table(title=f"before and after, {len(comparison.before.rollouts)} held-out prompts", title_justify="left")
    for header in ("", "before", "after"):
        table.add_column(header, justify="left" if header == "" else "right")
    before, after = comparison.before.metrics, comparison.after.metrics
    table.add_row("pass@1", *(f"{metrics[f'rewards/{comparison.solved_by}/mean']:.3f}" for metrics in (before, after)))
    for name in before:
        if name.startswith("rewards/") or name in ("reward", "completions/mean_length", "completions/clipped_ratio"):
            table.add_row(name, f"{before[name]:.3f}", f"{after[name]:.3f}")
    return table


def _samples(comparison: Comparison) -> Any:
    """Problems that were not solved before and are now."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="two answers, before and after", title_justify="left", show_lines=True)
    for header in ("prompt", "before", "after"):
        table.add_column(header, overflow="fold")
    pairs = list(zip(comparison.before.rollouts, comparison.after.rollouts, strict=True))
    name = comparison.solved_by
    gained = [pair for pair in pairs if (pair[1].rewards[name] or 0) > (pair[0].rewards[name] or 0)]
    for before, after in (gained or pairs)[:NUM_SAMPLES]:
        prompt = before.prompt if isinstance(before.prompt, str) else before.prompt[-1]["content"]
        table.add_row(*(Text(printable(text, 400)) for text in (prompt, before.text, after.text)))
    return table


def _plot(steps: Sequence[float], rewards: Sequence[float], path: Path) -> bool:
    """Write the reward curve; False if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, rewards)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("mean reward")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    return True
