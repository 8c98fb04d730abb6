"""Weights with low-rank changes (LoRA, arXiv:2106.09685) of one or several adapters, which are not merged.

Several adapters stand side by side along their ranks, so that the changes of all rows are two matmuls; between the two,
a row keeps the ranks of its own adapter only.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key, UInt32

from groupax.models.matmul import dense_linear
from groupax.parallel.pytree import pytree
from groupax.parallel.runtime import traced_platform

# A tree of weights, as in `models.specs`.
Params = dict[str, Any]


@pytree
class LowRank:
    """The trained factors of a low-rank change, scale b a, of a matrix [O, I]."""

    a: Any
    b: Any


@pytree
class Dropout:
    """Dropout of the changes' inputs. It depends on weight, token and input, but not on the micro-batch.

    Attributes:
        key: PRNG key of the update, from which `apply_adapter` derives one per weight.
        tokens: Number of each of the M tokens of the pass, or tiles of its images, the same wherever it is computed.
        rate: Fraction of the inputs that is dropped.
    """

    key: Key[Array, ""]
    tokens: UInt32[Any, "M"]
    rate: Float[Any, ""]


@pytree
class AdaptedWeight:
    """A weight of the forward pass: the unchanged base plus the change scale b a.

    Attributes:
        base: Array or quantized weight [O, I].
        change: Factors a [R, I] and b [O, R]; those of several adapters side by side (see `models.adapted`).
        scale: Scale of the change; of several adapters that of each rank.
        dropout: Dropout of the change's inputs; None outside of training.
        owner: Index of the adapter that each rank belongs to; None for a single adapter.
        rows: Index of the adapter that changes each row of the inputs, -1 for none; None for a single adapter.
    """

    base: Any
    change: LowRank
    scale: Float[Any, "*R"]
    dropout: Dropout | None = None
    owner: Int[Any, "R"] | None = None
    rows: Int[Any, "M"] | None = None


@pytree
class FrozenBase:
    """The values that stay constant while an adapter is trained.

    Attributes:
        params: Base weights, which are the model without the adapter; or the weights that are not trained.
        scale: Scale of all changes.
    """

    params: Params
    scale: Float[Any, ""]


def apply_adapter(
    frozen: FrozenBase | None, trained: Params, dropout: Dropout | None = None, image_dropout: Dropout | None = None
) -> Params:
    """Combines the base and the trained weights to the weights that the forward pass reads.

    Args:
        frozen: Base; None if everything is trained.
        trained: Subtree of the weights: `LowRank` changes, and arrays that replace the base's.
        dropout: Dropout of the changes' inputs in the language model, by token.
        image_dropout: That in the part that sees images, by tile.
    """
    if frozen is None:
        return trained
    parts = {name: x for name, x in trained.items() if name != "vision"}
    applied = _apply(frozen.params, parts, frozen.scale, dropout, "")
    if "vision" not in trained:
        return applied
    vision = _apply(frozen.params.get("vision"), trained["vision"], frozen.scale, image_dropout, "/vision")
    return {**applied, "vision": vision}


def _apply(base: Any, trained: Any, scale: Any, dropout: Dropout | None, path: str) -> Any:
    if base is None:  # what is trained as a whole
        return trained
    if isinstance(trained, LowRank):
        if dropout is not None:
            dropout = replace(dropout, key=jax.random.fold_in(dropout.key, zlib.crc32(path.encode())))
        return AdaptedWeight(base, trained, scale, dropout)
    if isinstance(trained, dict):
        adapted = {name: _apply(base.get(name), x, scale, dropout, f"{path}/{name}") for name, x in trained.items()}
        return {**base, **adapted}
    if isinstance(trained, list):
        pairs = enumerate(zip(base, trained, strict=True))
        return [_apply(b, t, scale, dropout, f"{path}/{index}") for index, (b, t) in pairs]
    return trained


def low_rank_linear(x: Float[Array, "*M I"], weight: AdaptedWeight) -> Float[Array, "*M O"]:
    """Computes scale b a x, scaled between the two matmuls, where no compiler fuses the scale with an addition."""
    if weight.dropout is not None:
        x = _apply_dropout(x, weight.dropout)
    # Or XLA multiplies by both matrices at once, of which it makes a copy; that pays with many rows only.
    if traced_platform() == "gpu" and math.prod(x.shape[:-1]) < weight.change.b.shape[0]:
        x = lax.optimization_barrier(x)
    inner = dense_linear(x, weight.change.a)
    if weight.owner is None:
        inner = inner * jnp.asarray(weight.scale, x.dtype)
    else:
        assert weight.rows is not None, "several adapters need to know which one each row is for"
        own = weight.rows[:, None] == weight.owner[None, :]
        inner = jnp.where(own, inner * jnp.asarray(weight.scale, x.dtype)[None, :], 0)
    return dense_linear(inner, weight.change.b)


def _apply_dropout(x: Float[Array, "M *N I"], dropout: Dropout) -> Float[Array, "M *N I"]:
    """Drops inputs of each token, or of each of the N patches of a tile."""
    fold_in = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    keys = fold_in(dropout.key, dropout.tokens)
    if x.ndim == 3:
        keys = jax.vmap(fold_in, in_axes=(0, None))(keys, jnp.arange(x.shape[1])).reshape(-1)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, x.shape[-1:]))(keys).reshape(x.shape)
    factor = jnp.where(uniform < dropout.rate, 0.0, 1.0 / (1.0 - dropout.rate))
    return x * factor.astype(x.dtype)


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


def changes_of(trained: Params, scale: Any, dtype: Any) -> Changes:
    """Returns the changes of an adapter, by its trained weights and its scale, in a dtype.

    Raises:
        ValueError: It has biases or modules that are trained in full.
    """
    _check_changes(trained)
    return Changes(jax.tree.map(lambda x: x.astype(dtype), trained), scale)


def check_finite_changes(trained: Params) -> None:
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
        adapters: The adapters, at least one. They may differ in rank, scale and modules.

    Raises:
        ValueError: One of them has biases or modules that are trained in full.
    """
    for each in adapters:
        _check_changes(each.trained)
    return _with_changes(base, _joined([(each.trained, np.float32(each.scale)) for each in adapters]))


def select_adapters(params: Params, rows: Int[Array, "M"] | None) -> Params:
    """Returns the weights for a forward pass over M tokens.

    Args:
        rows: Index of each token's adapter, -1 for the base; None leaves weights without several adapters as they are.
    """
    if rows is None:
        return params
    is_adapted = lambda x: isinstance(x, AdaptedWeight)  # noqa: E731
    return jax.tree.map(lambda x: replace(x, rows=rows) if is_adapted(x) else x, params, is_leaf=is_adapted)


def _check_changes(trained: Params) -> None:
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
