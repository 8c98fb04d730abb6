"""What a program of a run is, and the bytes that arrays take on a device."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


class UnfitError(Exception):
    """A run that no device has memory for, whatever its programs take.

    Attributes:
        in_rollout: it is the rollout's weights, keys and values that do not fit; else what is always there.
    """

    def __init__(self, message: str, in_rollout: bool) -> None:
        super().__init__(message)
        self.in_rollout = in_rollout


@dataclass(frozen=True, eq=False)
class Program:
    """A program of a run.

    Attributes:
        name: of the function.
        traced: to be compiled and counted.
        arguments: of it, by what they are; arrays of no kind are left out.
        runs: in a rollout and the updates on it.
        loop_steps: of its loops whose ends depend on what they compute.
    """

    name: str
    traced: jax.stages.Traced
    arguments: Mapping[str, Any]
    runs: int
    loop_steps: int = 1


def own_bytes(trees: Mapping[str, Any]) -> float:
    """Of these arrays on each device; those without a place lie whole on all."""
    return sum(_own_bytes(leaf) for leaf in jax.tree.leaves(dict(trees)))


def _own_bytes(x: Any) -> float:
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return float(math.prod(shape) * np.dtype(x.dtype).itemsize)
