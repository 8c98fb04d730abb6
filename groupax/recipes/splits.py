"""Endless problems of a split, for recipes that generate their data. Imports no jax."""

import random
from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

Split = Literal["train", "held_out"]
Problem = TypeVar("Problem")


def draw_split(
    draw: Callable[[random.Random], Problem], is_held_out: Callable[[Problem], bool], seed: int, split: Split
) -> Iterator[Problem]:
    """Yields random problems of a split, without end; they depend on the seed and the split alone.

    Args:
        draw: Draws a problem of either split.
        is_held_out: Returns whether a problem is in the held-out split.
        seed: Seed of the problems.
        split: Split to draw from.

    Raises:
        ValueError: `split` is unknown.
    """
    if split not in ("train", "held_out"):
        raise ValueError(f"split must be 'train' or 'held_out', got {split!r}")
    rng = random.Random(f"{split} {seed}")
    while True:
        problem = draw(rng)
        if is_held_out(problem) == (split == "held_out"):
            yield problem
