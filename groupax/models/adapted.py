"""Weights with low-rank changes (LoRA, arXiv:2106.09685) of one or several adapters, which are not merged.

Several adapters stand side by side along their ranks, so that the changes of all rows are two matmuls; between the two,
a row keeps the ranks of its own adapter only.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key, UInt32

from groupax.models.matmul import dense_linear
from groupax.models.weights.nf4 import TINY, Nf4, dequantize_nf4
from groupax.parallel.pytree import pytree, static
from groupax.parallel.runtime import traced_platform

# A tree of weights, as in `models.specs`.
Params = dict[str, Any]


@pytree
class LowRank:
    """The trained factors of a low-rank change, scale b a, of a matrix [O, I].

    Attributes:
        a: Factor [R, I].
        b: Factor [O, R].
        scale: Scale of the change.
        magnitude: Trained norms [O] that the rows of the changed matrix are given (DoRA, arXiv:2402.09353); None to
            leave them as they are.
    """

    a: Any
    b: Any
    scale: float = static()
    magnitude: Any = None


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
        base: Weight [O, I]: an array, quantized, or itself adapted.
        change: Factors a [R, I] and b [O, R]; those of several adapters side by side (see `models.adapted`).
        norms: Norms of the rows of base plus change, constants of the gradient; None if the change has no magnitude.
        dropout: Dropout of the change's inputs; None outside of training.
        scales: Scale of each rank of several adapters; None for a single adapter.
        owner: Index of the adapter that each rank belongs to; None for a single adapter.
        rows: Index of the adapter that changes each row of the inputs, -1 for none; None for a single adapter.
    """

    base: Any
    change: LowRank
    norms: Float[Any, "O"] | None = None
    dropout: Dropout | None = None
    scales: Float[Any, "R"] | None = None
    owner: Int[Any, "R"] | None = None
    rows: Int[Any, "M"] | None = None


def apply_adapter(
    frozen: Params | None,
    trained: Params,
    dropout: Dropout | None = None,
    image_dropout: Dropout | None = None,
    norms: Any = None,
) -> Params:
    """Combines the base and the trained weights to the weights that the forward pass reads.

    Args:
        frozen: Base weights, which are the model without the adapter, or the weights that are not trained; None if
            everything is trained.
        trained: Subtree of the weights: `LowRank` changes, arrays that replace the base's, and None for the base's own.
        dropout: Dropout of the changes' inputs in the language model, by token.
        image_dropout: That in the part that sees images, by tile.
        norms: The `row_norms`, which one shard of the weights does not tell; None to compute them.
    """
    if frozen is None:
        return trained
    norms = row_norms(frozen, trained) if norms is None else norms
    parts = {name: x for name, x in trained.items() if name != "vision"}
    applied = _apply(frozen, parts, norms, dropout, "")
    if "vision" not in trained:
        return applied
    vision = _apply(frozen.get("vision"), trained["vision"], norms["vision"], image_dropout, "/vision")
    return {**applied, "vision": vision}


def _apply(base: Any, trained: Any, norms: Any, dropout: Dropout | None, path: str) -> Any:
    if base is None:  # what is trained as a whole
        return trained
    if isinstance(trained, LowRank):
        if dropout is not None:
            dropout = replace(dropout, key=jax.random.fold_in(dropout.key, zlib.crc32(path.encode())))
        return AdaptedWeight(base, trained, norms, dropout)
    if isinstance(trained, dict):
        names = trained.keys()
        return {**base, **{n: _apply(base.get(n), trained[n], norms[n], dropout, f"{path}/{n}") for n in names}}
    if isinstance(trained, list):
        layers = enumerate(zip(base, trained, norms, strict=True))
        return [_apply(*each, dropout, f"{path}/{index}") for index, each in layers]
    return base if trained is None else trained


def row_norms(base: Any, trained: Any) -> Any:
    """Returns the norms [O] of the rows of each matrix whose change has a magnitude, None for every other weight."""
    if isinstance(trained, dict):
        return {name: row_norms(None if base is None else base.get(name), x) for name, x in trained.items()}
    if isinstance(trained, list):
        return [row_norms(*each) for each in zip(base or [None] * len(trained), trained, strict=True)]
    if not isinstance(trained, LowRank) or trained.magnitude is None:
        return None
    is_abstract = isinstance(trained.magnitude, jax.ShapeDtypeStruct)
    return trained.magnitude if is_abstract else norms_of(base, trained)


@jax.jit
def norms_of(base: Any, change: LowRank) -> Float[Array, "O"]:
    """Returns the norms of the rows of a changed matrix, in float32, as constants of the gradient."""
    return lax.stop_gradient(jnp.linalg.norm(_changed(base, change), axis=1))


def _changed(base: Any, change: LowRank) -> Float[Array, "O I"]:
    b, a = change.b.astype(jnp.float32), change.a.astype(jnp.float32)
    return dense(base, jnp.float32) + change.scale * jnp.einsum("or,ri->oi", b, a)


def dense(weight: Any, dtype: Any) -> Float[Array, "..."]:
    """Dequantizes a weight and adds its low-rank change, in float32, then casts it."""
    if isinstance(weight, AdaptedWeight):
        changed = _changed(weight.base, weight.change)
        if weight.norms is not None:
            changed = changed * row_factors(weight)[:, None]
        return changed.astype(dtype)
    if isinstance(weight, Nf4):
        return dequantize_nf4(weight, dtype)
    return weight.astype(dtype)


def row_factors(weight: AdaptedWeight) -> Float[Array, "O"]:
    """Returns the factors, in float32, that give the rows of a changed matrix the norms of the change's magnitude."""
    assert weight.norms is not None, "the change has a magnitude"
    return weight.change.magnitude.astype(jnp.float32) / jnp.maximum(weight.norms, TINY)


def without_changes(params: Params) -> Params:
    """Returns the base of adapted weights; other weights stay as they are."""
    is_adapted = lambda x: isinstance(x, AdaptedWeight)  # noqa: E731
    return jax.tree.map(lambda x: x.base if is_adapted(x) else x, params, is_leaf=is_adapted)


def change_inputs(x: Float[Array, "*M I"], weight: AdaptedWeight) -> Float[Array, "*M I"]:
    """Returns the inputs of a weight's change, some of which are dropped in training."""
    return x if weight.dropout is None else _apply_dropout(x, weight.dropout)


def low_rank_linear(x: Float[Array, "*M I"], weight: AdaptedWeight) -> Float[Array, "*M O"]:
    """Computes scale b a x, scaled between the two matmuls, where no compiler fuses the scale with an addition."""
    # Or XLA multiplies by both matrices at once, of which it makes a copy; that pays with many rows only.
    if traced_platform() == "gpu" and math.prod(x.shape[:-1]) < weight.change.b.shape[0]:
        x = lax.optimization_barrier(x)
    inner = dense_linear(x, weight.change.a)
    if weight.owner is None:
        inner = inner * jnp.asarray(weight.change.scale, x.dtype)
    else:
        assert weight.rows is not None, "several adapters need to know which one each row is for"
        own = weight.rows[:, None] == weight.owner[None, :]
        inner = jnp.where(own, inner * jnp.asarray(weight.scales, x.dtype)[None, :], 0)
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


def stack_adapters(base: Params, adapters: Sequence[Params]) -> Params:
    """Returns the base with several adapters, of which `select_adapters` chooses one for each row.

    Args:
        adapters: The changes of the adapters, at least one. They may differ in rank, scale and modules.

    Raises:
        ValueError: One of them has magnitudes, biases or modules that are trained in full.
    """
    for each in adapters:
        _check_changes(each)
    return _with_changes(base, _joined(list(adapters)))


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
    leaves = jax.tree.leaves(trained, is_leaf=lambda x: isinstance(x, LowRank))
    if not all(isinstance(leaf, LowRank) and leaf.magnitude is None for leaf in leaves):
        raise ValueError(
            "adapters that share a batch have low-rank changes alone: without modules_to_save and use_dora, and with "
            "bias 'none'; merge the others"
        )


@jax.jit
def _joined(adapters: list[Params]) -> Any:
    """Returns the changes of all adapters side by side, as adapted weights without a base."""

    def join(found: list[tuple[int, Any]]) -> Any:
        first = found[0][1]
        if isinstance(first, dict):
            names = dict.fromkeys(name for _, trained in found for name in trained)
            return {name: join([(i, trained[name]) for i, trained in found if name in trained]) for name in names}
        if isinstance(first, list):
            return [join([(i, trained[layer]) for i, trained in found]) for layer in range(len(first))]
        scales = jnp.concatenate([jnp.full(len(each.a), each.scale, jnp.float32) for _, each in found])
        owner = jnp.concatenate([jnp.full(len(each.a), index, jnp.int32) for index, each in found])
        return AdaptedWeight(None, side_by_side([each for _, each in found], 1.0), scales=scales, owner=owner)

    return join(list(enumerate(adapters)))


def side_by_side(changes: Sequence[LowRank], scale: float) -> LowRank:
    """Returns the sum of changes, given that they have the same scale, as one of the sum of their ranks."""
    a = jnp.concatenate([each.a for each in changes], axis=0)
    return LowRank(a, jnp.concatenate([each.b for each in changes], axis=1), scale, changes[0].magnitude)


def _with_changes(base: Any, changes: Any) -> Any:
    if isinstance(changes, dict):
        return {**base, **{name: _with_changes(base[name], each) for name, each in changes.items()}}
    if isinstance(changes, list):
        return [_with_changes(own, each) for own, each in zip(base, changes, strict=True)]
    return replace(changes, base=base)
