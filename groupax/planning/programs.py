"""The programs of a run, and the bytes of arrays on a device."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from groupax.parallel.collectives import is_on_host


class DoesNotFitError(Exception):
    """No device has enough memory for a run's arrays, regardless of its programs.

    Attributes:
        in_rollout: Whether the rollout's weights, keys and values do not fit, rather than the resident arrays.
    """

    def __init__(self, message: str, in_rollout: bool) -> None:
        super().__init__(message)
        self.in_rollout = in_rollout


@dataclass(frozen=True, eq=False)
class Program:
    """A program of a run.

    Attributes:
        name: Name of the function.
        trace: Traces the function.
        arguments: Its arguments by kind; small ones are left out.
        runs: Number of runs in a rollout and the updates on it.
        loop_steps: Number of iterations of loops whose ends depend on what they compute.
        transferred_bytes: Bytes to and from the host in one run, for each device.
        scans_layers: Whether its layers are a loop, so that it compiles quickly whatever their number.
    """

    name: str
    trace: Callable[[], Any]
    arguments: Mapping[str, Any]
    runs: int
    loop_steps: int = 1
    transferred_bytes: float = 0.0
    scans_layers: bool = False

    @cached_property
    def traced(self) -> Any:
        """The traced function, to be compiled and counted."""
        return self.trace()


def device_bytes(trees: Mapping[str, Any]) -> float:
    """Returns the bytes of these arrays on each device; those without a sharding are replicated."""
    return sum((_shard_bytes(leaf) for leaf in jax.tree.leaves(dict(trees)) if not is_on_host(leaf)), 0.0)


def host_bytes(trees: Mapping[str, Any]) -> float:
    """Returns the bytes of these arrays in host memory, for each device."""
    return sum((_shard_bytes(leaf) for leaf in jax.tree.leaves(dict(trees)) if is_on_host(leaf)), 0.0)


def _shard_bytes(x: Any) -> float:
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return float(math.prod(shape) * np.dtype(x.dtype).itemsize)
