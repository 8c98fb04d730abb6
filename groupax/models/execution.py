"""Execution of a pass over many tokens: settings, which may change rounding, and loops over layers."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from groupax.core.settings.compute import Checkpointing, ReduceDtype

# Logits that are computed at a time. Blocks of this size stay in a CPU's cache; an accelerator reads the vocabulary's
# matrix again for each block, and has memory for 256 MiB.
CPU_LOGITS = 1 << 21
ACCELERATOR_LOGITS = 1 << 26


@dataclass(frozen=True)
class FusedAttention:
    """A fused attention kernel (see `models.kernels.fused_attention`).

    Attributes:
        kernel: "splash" on TPUs, "cudnn" on NVIDIA GPUs.
        emulated: Whether the kernel is emulated by operations that every device has, for tests.
    """

    kernel: Literal["splash", "cudnn"]
    emulated: bool = False


@dataclass(frozen=True)
class Execution:
    """The execution settings of a pass.

    Attributes:
        checkpointing: What the backward pass recomputes (see `core.settings.compute.Checkpointing`).
        scan_layers: Whether layers of the same kind share one compiled program, which scans over their stacked weights.
        chunk_logits: Number of logits that are computed at a time.
        attention: Attention kernel; None for plain attention.
        reduce_dtype: Dtype in which devices add up the gradients of weights that are sharded over fsdp.
    """

    checkpointing: Checkpointing = "none"
    scan_layers: bool = False
    chunk_logits: int = CPU_LOGITS
    attention: FusedAttention | None = None
    reduce_dtype: ReduceDtype = "float32"


# One program per layer and no checkpointing, as the engine runs it.
DIRECT = Execution()


def execution_for(
    platform: str,
    checkpointing: Checkpointing,
    scan_layers: bool | None = None,
    attention: FusedAttention | None = None,
    reduce_dtype: ReduceDtype = "float32",
) -> Execution:
    """Returns the execution settings for a platform.

    Args:
        scan_layers: Whether to scan layers; None scans on accelerators, whose compilers take seconds per layer.
    """
    on_cpu = platform == "cpu"
    scans = not on_cpu if scan_layers is None else scan_layers
    chunk = CPU_LOGITS if on_cpu else ACCELERATOR_LOGITS
    return Execution(checkpointing, scans, chunk, attention, reduce_dtype)


# layer(x, weights, index) -> (x, extra output)
Layer = Callable[[Array, Any, int], tuple[Array, Any]]


def repeating_pattern(kinds: Sequence[Hashable]) -> tuple[int, int, int]:
    """Returns the first layer, the period and the number of repeats of a pattern of layers, all 0 without one.

    It is the pattern that leaves the fewest layers to be compiled.

    Args:
        kinds: The kind of each layer; layers of equal kinds can share a program.
    """
    best, fewest = (0, 0, 0), len(kinds)
    for period in range(1, len(kinds) // 2 + 1):
        is_equal = [kinds[index] == kinds[index + period] for index in range(len(kinds) - period)]
        for first in range(len(is_equal)):
            length = next((n for n, each in enumerate(is_equal[first:]) if not each), len(is_equal) - first)
            repeats = 1 + length // period
            compiled = len(kinds) - period * (repeats - 1)
            if repeats > 1 and compiled < fewest:
                best, fewest = (first, period, repeats), compiled
    return best


def apply_layers(layer: Layer, x: Array, layers: Sequence[Any], kinds: Sequence[Hashable]) -> tuple[Array, list[Any]]:
    """Applies all layers to x and returns the result with the extra output of each layer.

    Args:
        layer: Function of one layer; it may depend on the index only through the layer's kind. It is called once for
            each layer of the first period and for each layer outside of the pattern.
        kinds: Kind of each layer. Only layers whose weights agree in structure, shape and dtype share a program.
    """
    forms = [(kind, _form(weights)) for kind, weights in zip(kinds, layers, strict=True)]
    first, period, repeats = repeating_pattern(forms)
    extras, index = [], 0
    while index < len(layers):
        if index == first and repeats:
            end = first + period * repeats
            periods = [layers[start : start + period] for start in range(first, end, period)]
            x, pattern_extras = _scan_periods(layer, x, periods, first)
            extras += pattern_extras
            index = end
        else:
            x, extra = layer(x, layers[index], index)
            extras.append(extra)
            index += 1
    return x, extras


def _form(weights: Any) -> Hashable:
    leaves, structure = jax.tree.flatten(weights)
    return structure, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)


def _scan_periods(layer: Layer, x: Array, periods: list[Sequence[Any]], first: int) -> tuple[Array, list[Any]]:
    """Scans over periods of layers. Weights are stacked for it, except for arrays that all periods share."""
    structure = jax.tree.structure(periods[0])
    columns = list(zip(*map(jax.tree.leaves, periods), strict=True))
    is_shared = [all(leaf is column[0] for leaf in column) for column in columns]
    stacked = [jnp.stack(column) for column, shared in zip(columns, is_shared, strict=True) if not shared]

    def apply_period(x: Array, stacked: list[Array]) -> tuple[Array, list[Any]]:
        slices = iter(stacked)
        leaves = [column[0] if shared else next(slices) for column, shared in zip(columns, is_shared, strict=True)]
        extras = []
        for index, weights in enumerate(jax.tree.unflatten(structure, leaves), start=first):
            x, extra = layer(x, weights, index)
            extras.append(extra)
        return x, extras

    x, extras = lax.scan(apply_period, x, stacked)
    return x, [jax.tree.map(lambda leaf, n=n: leaf[n], each) for n in range(len(periods)) for each in extras]
