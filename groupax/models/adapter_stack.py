"""Several adapters of one base in one tree of weights, each for its own rows of a batch.

The factors of all adapters stand side by side along their ranks, so that the changes of all rows are two matmuls, as
those of a single adapter. Between the two, a row keeps the ranks of its own adapter only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from groupax.models.adapted import AdaptedWeight, LowRank, Params
from groupax.models.lora import Adapter


@dataclass(frozen=True, eq=False)
class Changes:
    """The low-rank changes of one adapter.

    Attributes:
        trained: Its weights, in the structure of `lora.adapter_specs`.
        scale: Scale of the changes.
    """

    trained: Params
    scale: Any


def has_only_changes(trained: Params) -> bool:
    """Checks that an adapter has low-rank changes alone, no biases and no modules that are trained in full."""
    leaves = jax.tree.leaves(trained, is_leaf=lambda x: isinstance(x, LowRank))
    return all(isinstance(leaf, LowRank) for leaf in leaves)


def changes_of(adapter: Adapter, dtype: Any) -> Changes:
    """Returns the changes of an adapter in a dtype.

    Raises:
        ValueError: It has biases or modules that are trained in full.
    """
    _check(adapter.trained)
    return Changes(jax.tree.map(lambda x: x.astype(dtype), adapter.trained), adapter.config.scale)


def check_finite(trained: Params) -> None:
    """Checks that an adapter cannot spoil the rows of others, whose masked ranks still are multiplied by its weights.

    Raises:
        ValueError: A weight is not finite.
    """
    if not bool(_is_finite(trained)):
        raise ValueError("the adapter has weights that are not finite, which would spoil other rows of its batches")


@jax.jit
def _is_finite(trained: Params) -> Array:
    return jnp.all(jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(trained)]))


def stack_adapters(base: Params, adapters: Sequence[Changes]) -> Params:
    """Returns the base with several adapters, of which `select_adapters` chooses one for each row.

    Args:
        base: Weights of the model, which are not copied.
        adapters: The adapters, at least one. They may differ in rank, scale and modules.

    Raises:
        ValueError: One of them has biases or modules that are trained in full.
    """
    for each in adapters:
        _check(each.trained)
    return _with_changes(base, _joined([(each.trained, np.float32(each.scale)) for each in adapters]))


def select_adapters(params: Params, rows: Int[Array, "M"] | None) -> Params:
    """Returns the weights for a forward pass over M tokens.

    Args:
        params: What `stack_adapters` has returned.
        rows: Index of each token's adapter, -1 for the base; None leaves weights without several adapters as they are.
    """
    if rows is None:
        return params
    is_adapted = lambda x: isinstance(x, AdaptedWeight)  # noqa: E731
    return jax.tree.map(lambda x: replace(x, rows=rows) if is_adapted(x) else x, params, is_leaf=is_adapted)


def _check(trained: Params) -> None:
    if not has_only_changes(trained):
        raise ValueError(
            "adapters that share a batch have low-rank changes alone: without modules_to_save, and with bias 'none'"
        )


@jax.jit
def _joined(adapters: list[tuple[Params, Any]]) -> Any:
    """Returns the changes of all adapters side by side, as adapted weights without a base."""

    def join(found: list[tuple[int, Any, Any]]) -> Any:
        first = found[0][1]
        if isinstance(first, dict):
            names = dict.fromkeys(name for _, trained, _ in found for name in trained)
            return {name: join([(i, t[name], scale) for i, t, scale in found if name in t]) for name in names}
        if isinstance(first, list):
            return [join([(i, t[layer], scale) for i, t, scale in found]) for layer in range(len(first))]
        a = jnp.concatenate([each.a for _, each, _ in found], axis=0)
        b = jnp.concatenate([each.b for _, each, _ in found], axis=1)
        scale = jnp.concatenate([jnp.full(len(each.a), scale) for _, each, scale in found])
        owner = jnp.concatenate([jnp.full(len(each.a), index, jnp.int32) for index, each, _ in found])
        return AdaptedWeight(None, LowRank(a, b), scale, owner=owner)

    return join([(index, trained, scale) for index, (trained, scale) in enumerate(adapters)])


def _with_changes(base: Any, changes: Any) -> Any:
    if isinstance(changes, dict):
        return {**base, **{name: _with_changes(base[name], each) for name, each in changes.items()}}
    if isinstance(changes, list):
        return [_with_changes(own, each) for own, each in zip(base, changes, strict=True)]
    return replace(changes, base=base)
