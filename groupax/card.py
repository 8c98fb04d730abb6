"""Model cards: the `README.md` of a model's folder, which the hub shows. Imports no jax."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupax.config import GRPOConfig
from groupax.metrics import Metrics

# What of a run a reader wants to know first, by the names of `GRPOConfig`.
_SETTINGS = (
    "loss_type",
    "beta",
    "prompts_per_step",
    "num_generations",
    "max_completion_length",
    "temperature",
    "optimizer",
    "learning_rate",
    "lr_scheduler_type",
    "base_weights",
    "seed",
)
_METRICS = ("reward", "pass@1", "completions/mean_length", "entropy", "kl")


def run_card(
    args: GRPOConfig,
    base: str | None,
    adapter: Mapping[str, Any] | None,
    dataset: str,
    rewards: Sequence[str],
    num_steps: int,
    metrics: Metrics,
) -> str:
    """The card of a model that a run has trained.

    Args:
        args: the run's settings.
        base: the model that it began with; None for one that was made in memory.
        adapter: the settings of the adapter that was trained, if it was one.
        dataset: what the prompts are from.
        rewards: names of the reward functions.
        num_steps: optimizer steps so far.
        metrics: of the last logged step.
    """
    what = "A LoRA adapter for" if adapter else "A fine-tune of"
    rows = [("prompts", dataset), ("rewards", ", ".join(rewards)), ("optimizer steps", str(num_steps))]
    rows += [(name, str(getattr(args, name))) for name in _SETTINGS]
    rows += [(f"adapter: {name}", str(value)) for name, value in (adapter or {}).items()]
    rows += [(f"{name} (last step)", f"{metrics[name]:.4g}") for name in _METRICS if name in metrics]
    text = (
        f"{what} `{shown_name(base)}`, trained with Group Relative Policy Optimization by "
        f"[groupax](https://pypi.org/project/groupax).\n\n{_table(rows)}"
    )
    return card("GRPO run", text, base, is_adapter=adapter is not None)


def derived_card(how: str, base: str | None, of_source: str | None) -> str:
    """The card of a model that was made of another one, with what that one's card says behind it.

    Args:
        how: what was done, a sentence.
        base: what it was made of.
        of_source: the `README.md` of what it was made of, if there is one.
    """
    body = "" if of_source is None else "\n\n" + _without_front(of_source)
    return card("Model", how + body, base)


def card(title: str, text: str, base: str | None, is_adapter: bool = False) -> str:
    """A card with the metadata that the hub reads."""
    front = ["tags:", "- groupax", "- grpo", f"library_name: {'peft' if is_adapter else 'transformers'}"]
    if base and shown_name(base) == base:
        front += [f"base_model: {json.dumps(base)}"]
    return "\n".join(["---", *front, "pipeline_tag: text-generation", "---", "", f"# {title}", "", text, ""])


def shown_name(model: str | None) -> str:
    """A hub id as it is, and of a folder its own name: where it lies is nobody's business."""
    if model is None:
        return "a model made in memory"
    return Path(model).name if Path(model).is_absolute() or Path(model).exists() else model


def _table(rows: Sequence[tuple[str, str]]) -> str:
    lines = [f"| {name} | {value.replace('|', '/')} |" for name, value in rows]
    return "\n".join(["| | |", "|---|---|", *lines])


def _without_front(text: str) -> str:
    parts = text.split("---\n", 2)
    return (parts[2] if text.startswith("---\n") and len(parts) == 3 else text).strip()
