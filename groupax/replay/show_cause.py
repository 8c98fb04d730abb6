"""Texts about the cause of a metric that went wrong, and about shares of rows in a gradient."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from groupax.replay.causes import Cause
from groupax.runs.rollout_log import beginning, prompt_text
from groupax.training.influence import Influence
from groupax.types import Rollout

SHOWN_ROWS = 8
FACTS = ("learning_rate", "grad_norm", "loss")


def cause_lines(cause: Cause, names: Sequence[str], until: str) -> Iterator[str]:
    """Yields the lines of a cause.

    Args:
        cause: The cause.
        names: Metrics of the condition.
        until: The condition.
    """
    shown, step = cause.shown_at, cause.step
    yield f"step {shown} under the weights before each step:"
    yield f"  {'step':>6}" + "".join(f"{name:>24}" for name in names)
    for number, metrics in sorted(cause.under.items()):
        yield f"  {number:6}" + "".join(f"{_number(metrics.get(name)):>24}" for name in names)
    facts = ", ".join(f"{name} {_number(cause.metrics.get(name))}" for name in FACTS)
    if step < shown:
        yield f"the update of step {step} did it ({facts})"
    else:
        yield f"step {shown} is so under all of these weights: its own rows do it ({facts})"
    if cause.left_out:
        prompts = dict.fromkeys(cause.rollouts[index].prompt_index for index in cause.group)
        of = f"prompt {next(iter(prompts))}" if len(prompts) == 1 else f"prompts {', '.join(map(str, prompts))}"
        if cause.group and cause.group != cause.left_out:
            yield f"without the {len(cause.group)} rows of {of} {_values(cause.without_group, names)}"
        yield f"without these rows of step {step} {_values(cause.without, names)}:"
        for index in cause.left_out[:SHOWN_ROWS]:
            yield f"  {place(cause.rollouts[index], index)}"
        if len(cause.left_out) > SHOWN_ROWS:
            yield f"  and {len(cause.left_out) - SHOWN_ROWS} more"
    else:
        yield f"{until} stays whichever half of its groups is left out: it is the update as a whole, not single rows"
    yield f"rows of step {step} by their share of the gradient:"
    yield from share_lines(cause.influence, cause.completions, cause.rollouts)
    yield f"({cause.num_updates} updates were computed for this)"


def _values(metrics: Any, names: Sequence[str]) -> str:
    return ", ".join(f"{name} is {_number(metrics.get(name))}" for name in names)


def share_lines(influence: Influence, completions: Sequence[int], rollouts: Sequence[Rollout]) -> Iterator[str]:
    """Yields the completions with the largest shares of a gradient.

    Args:
        influence: Their influence.
        completions: Their indices.
        rollouts: All completions of the rollout.
    """
    rows = sorted(zip(completions, influence.shares, influence.norms, strict=True), key=_most)
    yield "     share   norm of its gradient"
    for index, share, norm in rows[:SHOWN_ROWS]:
        yield f"  {_percent(share):>8}   {_number(norm):>10}   {place(rollouts[index], index)}"
    if len(rows) > SHOWN_ROWS:
        rest = [share for _, share, _ in rows[SHOWN_ROWS:] if share == share]
        yield f"  {_percent(sum(rest)):>8}   of the {len(rows) - SHOWN_ROWS} others together"


def place(rollout: Rollout, index: int) -> str:
    """Returns a completion's place in its step with its reward, its advantage and its beginning."""
    rewards = ", ".join(f"{name} {_number(value)}" for name, value in rollout.rewards.items())
    text = json.dumps(beginning(f"{prompt_text(rollout.prompt)[-40:]}{rollout.text}", 80), ensure_ascii=False)
    return (
        f"row {index} (prompt {rollout.prompt_index}, sample {rollout.sample_index}; {rewards}; advantage "
        f"{_number(rollout.advantage)}) {text}"
    )


def why_record(step: int, influence: Influence, completions: Sequence[int], rollouts: Sequence[Rollout]) -> Any:
    """Returns the influence of a step's completions as plain data, for its file in `why/`."""
    rows = zip(completions, influence.shares, influence.norms, strict=True)
    return {
        "step": step,
        "norm": influence.norm,
        "rows": [
            {
                "prompt_index": rollouts[index].prompt_index,
                "sample_index": rollouts[index].sample_index,
                "share": _finite(share),
                "norm": _finite(norm),
            }
            for index, share, norm in rows
        ],
    }


def _most(row: tuple[int, float, float]) -> tuple[bool, float]:
    share = row[1]
    return share == share, 0.0 if share != share else -abs(share)


def _finite(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None


def _percent(share: float) -> str:
    return "not finite" if share != share else f"{100 * share:.1f} %"


def _number(value: Any) -> str:
    if value is None or value != value:
        return "not finite"
    return f"{value:.5g}"
