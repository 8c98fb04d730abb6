"""Models with a few of the layers of another, from whose programs those of the whole model are extrapolated.

Where each layer is a part of the program of its own, compilers take seconds per layer. Layers of one kind cost the same
operations and kernels, so that a program with two of them and one with four tell what all of them cost. The memory of
an unrolled program grows by less than that with each layer, so that it is overestimated rather than underestimated.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from groupax.models.config import ModelConfig
from groupax.models.lora import LoRAConfig, adapter_specs
from groupax.models.specs import model_specs

# Layers of each kind in the smallest of the models, whose first and last layers are compiled with what precedes and
# follows them, and how many more of one kind the others have, which are compiled as all others are.
_SMALLEST, _MORE = 2, 2


@dataclass(frozen=True)
class FewLayers:
    """A model with a few of the layers of another.

    Attributes:
        config: Config of the model.
        weight: Its share: what the other costs is the sum of what these models cost, times their weights.
    """

    config: ModelConfig
    weight: float


def few_layers(config: ModelConfig, lora: LoRAConfig | None = None) -> list[FewLayers]:
    """Returns models with a few layers that together tell what a model costs; the model itself if that is no larger.

    The first has two layers of each kind (all of a kind with up to three), and each of the others two more of one kind.

    Args:
        config: Config of the model.
        lora: Config of the adapter to train; layers that it treats differently are of different kinds.
    """
    whole, kinds = [FewLayers(config, 1.0)], _kinds(config, lora)
    numbers = Counter(kinds)
    smallest = {kind: _SMALLEST if number >= _SMALLEST + _MORE else number for kind, number in numbers.items()}
    weights = {kind: (number - _SMALLEST) / _MORE for kind, number in numbers.items() if number > smallest[kind]}
    if sum(smallest.values()) + _MORE >= config.num_layers:
        return whole
    models = [FewLayers(_of_kinds(config, kinds, smallest), 1 - sum(weights.values()))]
    for kind, weight in weights.items():
        models.append(FewLayers(_of_kinds(config, kinds, {**smallest, kind: _SMALLEST + _MORE}), weight))
    try:
        found = set().union(*(_kinds(model.config, lora) for model in models))
    except ValueError:  # the adapter names a layer that only the whole model has
        return whole
    return models if found == set(numbers) else whole


def extrapolated(models: Sequence[FewLayers], values: Sequence[float]) -> float:
    """Returns a quantity of the whole model, given that of each of the models; it is not negative."""
    return max(0.0, sum(model.weight * value for model, value in zip(models, values, strict=True)))


def _of_kinds(config: ModelConfig, kinds: Sequence[Hashable], numbers: Counter[Any] | dict[Any, int]) -> ModelConfig:
    """Returns a model with these numbers of layers of each kind, the first ones."""
    left, layers = dict(numbers), []
    for layer, kind in enumerate(kinds):
        if left[kind]:
            left[kind] -= 1
            layers.append(layer)
    experts, recurrent = (
        part and replace(part, layers=tuple(new for new, layer in enumerate(layers) if layer in part.layers))
        for part in (config.experts, config.recurrent)
    )
    return replace(
        config,
        num_layers=len(layers),
        ropes=tuple(config.ropes[layer] for layer in layers),
        windows=tuple(config.windows[layer] for layer in layers),
        experts=experts,
        recurrent=recurrent,
    )


def _kinds(config: ModelConfig, lora: LoRAConfig | None) -> list[Hashable]:
    """Returns what distinguishes each layer: positions, window, and the shapes of its weights and of its adapter's."""
    tables = [model_specs(config), *([adapter_specs(config, lora)] if lora else [])]
    weights = [tuple(_shapes(table["layers"][layer]) for table in tables) for layer in range(config.num_layers)]
    return list(zip(config.ropes, config.windows, weights, strict=True))


def _shapes(weights: Any) -> Hashable:
    return tuple(
        (jax.tree_util.keystr(path), spec.shape) for path, spec in jax.tree_util.tree_leaves_with_path(weights)
    )
