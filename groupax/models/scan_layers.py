"""Layers in a row that are alike, or alternate in the same way, as a loop: compiled once, whatever their number."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


@dataclass(frozen=True)
class LayerPattern:
    """Layers from `first` on that come in periods of `period`, so many `times`; the others come before and behind."""

    first: int
    period: int
    times: int

    @property
    def end(self) -> int:
        """The first layer behind them."""
        return self.first + self.period * self.times


def find_repeating_pattern(kinds: Sequence[Hashable]) -> LayerPattern:
    """The repeat that leaves the fewest layers to be compiled.

    Args:
        kinds: of each layer; layers of equal kinds are alike.
    """
    best, fewest = LayerPattern(0, 0, 0), len(kinds)
    for period in range(1, len(kinds) // 2 + 1):
        alike = [kinds[index] == kinds[index + period] for index in range(len(kinds) - period)]
        for first in range(len(alike)):
            length = next((n for n, each in enumerate(alike[first:]) if not each), len(alike) - first)
            times = 1 + length // period
            compiled = len(kinds) - period * (times - 1)
            if times > 1 and compiled < fewest:
                best, fewest = LayerPattern(first, period, times), compiled
    return best


def apply_layers(
    layer: Callable[[Array, Any, int], tuple[Array, Any]], x: Array, layers: Sequence[Any], kinds: Sequence[Hashable]
) -> tuple[Array, list[Any]]:
    """x through all layers, and what each of them gives besides.

    Args:
        layer: layer(x, weights, index), which depends on the index by the layer's kind only. Called once for each layer
            of the first period, and for each layer outside of the repeat.
        x: what goes through.
        layers: the weights of each.
        kinds: of each; layers that are alike have weights of one structure, shape and dtype too.
    """
    repeat = find_repeating_pattern([(kind, _form(weights)) for kind, weights in zip(kinds, layers, strict=True)])
    extras, index = [], 0
    while index < len(layers):
        if index == repeat.first and repeat.times:
            x, of_repeat = _scanned(layer, x, layers, repeat)
            extras += of_repeat
            index = repeat.end
        else:
            x, extra = layer(x, layers[index], index)
            extras.append(extra)
            index += 1
    return x, extras


def _form(weights: Any) -> Hashable:
    leaves, structure = jax.tree.flatten(weights)
    return structure, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)


def _scanned(
    layer: Callable[[Array, Any, int], tuple[Array, Any]], x: Array, layers: Sequence[Any], repeat: LayerPattern
) -> tuple[Array, list[Any]]:
    """x through the layers of a repeat. Their weights are copied into one piece, but for what all of them share."""
    first, period = repeat.first, repeat.period
    periods = [layers[begin : begin + period] for begin in range(first, repeat.end, period)]
    structure = jax.tree.structure(periods[0])
    columns = list(zip(*map(jax.tree.leaves, periods), strict=True))
    is_shared = [all(leaf is column[0] for leaf in column) for column in columns]
    own = [jnp.stack(column) for column, shared in zip(columns, is_shared, strict=True) if not shared]

    def through_period(x: Array, own: list[Array]) -> tuple[Array, list[Any]]:
        mine = iter(own)
        leaves = [column[0] if shared else next(mine) for column, shared in zip(columns, is_shared, strict=True)]
        extras = []
        for index, weights in enumerate(jax.tree.unflatten(structure, leaves), start=first):
            x, extra = layer(x, weights, index)
            extras.append(extra)
        return x, extras

    x, extras = lax.scan(through_period, x, own)
    return x, [jax.tree.map(lambda leaf, n=n: leaf[n], each) for n in range(repeat.times) for each in extras]
