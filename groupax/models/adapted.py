"""A matrix with a low-rank change beside it (LoRA, arXiv:2106.09685), and how the two become a model's weights."""

import zlib
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt32

from groupax.models.matmul import dense_linear
from groupax.parallel.pytree import pytree

# A tree of weights, as in `models.specs`.
Params = dict[str, Any]


@pytree
class LowRank:
    """The change scale b a of a matrix [O, I]: what LoRA trains."""

    a: Any
    b: Any


@pytree
class Dropout:
    """Which inputs of the changes are left out, by weight, token and input; it does not depend on the micro-batch.

    Attributes:
        key: of the update; `joined` makes one for each weight of it.
        tokens: a number for each of the M tokens of the pass, the same wherever the token is computed.
        rate: how many of the inputs are left out.
    """

    key: Key[Array, ""]
    tokens: UInt32[Any, "M"]
    rate: Float[Any, ""]


@pytree
class AdaptedWeight:
    """A weight of the forward pass: the base, multiplied as it is, and beside it scale b a.

    Attributes:
        base: an array [O, I], or a quantized one.
        change: a [R, I] and b [O, R].
        scale: of the change.
        dropout: None outside of training.
    """

    base: Any
    change: LowRank
    scale: Float[Any, ""]
    dropout: Dropout | None = None


@pytree
class FrozenBase:
    """What does not change while an adapter is trained.

    Attributes:
        params: the base's weights; with the adapter switched off they are the model.
        scale: of all changes.
    """

    params: Params
    scale: Float[Any, ""]


def apply_adapter(frozen: FrozenBase | None, trained: Params, dropout: Dropout | None = None) -> Params:
    """The weights that the forward pass reads: the base's, with what is trained beside them or in their places.

    Args:
        frozen: None if everything is trained.
        trained: some of the tree of weights: `LowRank`s, and arrays that replace the base's.
        dropout: of the changes' inputs.
    """
    return trained if frozen is None else _joined(frozen.params, trained, frozen.scale, dropout, "")


def _joined(base: Any, trained: Any, scale: Any, dropout: Dropout | None, path: str) -> Any:
    if isinstance(trained, LowRank):
        if dropout is not None:
            dropout = replace(dropout, key=jax.random.fold_in(dropout.key, zlib.crc32(path.encode())))
        return AdaptedWeight(base, trained, scale, dropout)
    if isinstance(trained, dict):
        own = {name: _joined(base[name], x, scale, dropout, f"{path}/{name}") for name, x in trained.items()}
        return {**base, **own}
    if isinstance(trained, list):
        pairs = enumerate(zip(base, trained, strict=True))
        return [_joined(b, t, scale, dropout, f"{path}/{index}") for index, (b, t) in pairs]
    return trained


def low_rank_linear(x: Float[Array, "*M I"], weight: AdaptedWeight) -> Float[Array, "*M O"]:
    """scale b a x. The scale multiplies between two products, where no compiler joins it with an addition."""
    if weight.dropout is not None:
        x = _dropped(x, weight.dropout)
    inner = dense_linear(x, weight.change.a) * jnp.asarray(weight.scale, x.dtype)
    return dense_linear(inner, weight.change.b)


def _dropped(x: Float[Array, "M I"], dropout: Dropout) -> Float[Array, "M I"]:
    keys = jax.vmap(lambda token: jax.random.fold_in(dropout.key, token))(dropout.tokens)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, x.shape[1:]))(keys)
    factor = jnp.where(uniform < dropout.rate, 0.0, 1.0 / (1.0 - dropout.rate))
    return x * factor.astype(x.dtype)
