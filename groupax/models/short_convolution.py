"""Gated short convolutions (LFM2): a token's channels are gated, convolved with those of the tokens before, gated."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from groupax.models.layers import linear
from groupax.models.recurrence import Recurrence, State, causal_convolution
from groupax.models.specs import Params


@dataclass(frozen=True, eq=False)
class Convolution:
    """The recurrence of such a layer, whose state is the last inputs of its convolution (see `Recurrence`)."""

    weight: Float[Array, "C 1 W"]
    bias: Float[Array, "C"] | None

    def scan(
        self, state: State, inputs: Float[Array, "B T C"], is_token: Bool[Array, "B T"]
    ) -> tuple[Float[Array, "B T C"], State]:
        """Convolves the inputs of T columns."""
        inputs = jnp.where(is_token[..., None], inputs, 0)
        out, last = causal_convolution(self.weight, self.bias, state.inputs, inputs)
        return out.astype(inputs.dtype), state._replace(inputs=last)

    def step(self, state: State, inputs: Float[Array, "B C"]) -> tuple[Float[Array, "B C"], State]:
        """Convolves the inputs of another token."""
        out, last = causal_convolution(self.weight, self.bias, state.inputs, inputs[:, None])
        return out[:, 0].astype(inputs.dtype), state._replace(inputs=last)


def short_convolution(
    weights: Params, h: Float[Array, "M D"], recur: Callable[[Recurrence, Any], tuple[Array, Any]]
) -> tuple[Float[Array, "M D"], Any]:
    """Computes a gated short convolution.

    Args:
        weights: Weights of the layer.
        h: Inputs of the tokens.
        recur: Goes through the tokens, as the caller arranges them.

    Returns:
        The output of each token, and the layer's updated cache.
    """
    before, after, x = jnp.split(linear(h, weights["conv_in"], weights.get("conv_in_bias")), 3, axis=-1)
    out, cache = recur(Convolution(weights["conv"], weights.get("conv_bias")), before * x)
    return linear(after * out, weights["conv_out"], weights.get("conv_out_bias")), cache
