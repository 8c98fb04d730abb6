"""Finds the step that made a metric fulfil a condition, and what differs there from what the run's inputs give now."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from groupax.config import GRPOConfig
from groupax.replay.expression import Condition
from groupax.replay.session import Make, Outcome, replay_target
from groupax.replay.trainer import Target


def first_line(lines: Sequence[Mapping[str, Any]], condition: Condition) -> tuple[int, int]:
    """Returns the first step whose metrics fulfil a condition, and the step of the line of metrics before it.

    Raises:
        ValueError: No step does, or a metric does not exist.
    """
    missing = [name for name in condition.metrics if not any(name in line for line in lines)]
    if missing:
        raise ValueError(f"there is no metric {missing[0]!r} in metrics.jsonl")
    before = 0
    for line in lines:
        if condition.holds(line):
            return int(line["step"]), before
        before = int(line["step"])
    raise ValueError(f"no step up to {before} fulfils the condition")


def parting_step(target: Target, make: Make, args: GRPOConfig, steps: Sequence[int]) -> Iterator[Outcome]:
    """Yields steps, computed again in their order, up to the first that is not the recorded one."""
    for step in steps:
        outcome = replay_target(replace(target, step=step), make, args)
        yield outcome
        if not outcome.is_equal:
            return
