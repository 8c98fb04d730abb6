"""What a program of a run is, and the bytes that arrays take on a device."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from groupax.parallel.memory import is_on_host


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
        transferred_bytes: that go to the hosts and come from there in one run, for each device.
    """

    name: str
    traced: jax.stages.Traced
    arguments: Mapping[str, Any]
    runs: int
    loop_steps: int = 1
    transferred_bytes: float = 0.0


def own_bytes(trees: Mapping[str, Any]) -> float:
    """Of these arrays in the memory of each device; those without a place lie whole on all."""
    return sum((_part_bytes(leaf) for leaf in jax.tree.leaves(dict(trees)) if not is_on_host(leaf)), 0.0)


def host_bytes(trees: Mapping[str, Any]) -> float:
    """Of these arrays in the memory of the hosts, for each device."""
    return sum((_part_bytes(leaf) for leaf in jax.tree.leaves(dict(trees)) if is_on_host(leaf)), 0.0)


def _part_bytes(x: Any) -> float:
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return float(math.prod(shape) * np.dtype(x.dtype).itemsize)
