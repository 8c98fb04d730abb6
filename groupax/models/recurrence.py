"""Layers with a recurrent state in place of keys and values: what they share.

A recurrence goes through the tokens of a sequence in their order. Its state, of a fixed size, is all that later tokens
know of earlier ones. The layers compute everything else token by token; the caller of `decoder.forward` decides which
tokens follow which.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from groupax.models.config import GatedDeltaNet, ModelConfig


class State(NamedTuple):
    """The states of B sequences, in float32.

    Attributes:
        inputs: The last W inputs of a causal convolution over W + 1 tokens.
        memory: Sums of products of R keys' dims, of all heads, and V values' dims; no rows without a memory.
    """

    inputs: Float[Array, "B W C"]
    memory: Float[Array, "B R V"]


@runtime_checkable
class Recurrence(Protocol):
    """The recurrence of a layer, with the layer's weights.

    Inputs are a tree of arrays with a number of leading dims: of sequences and tokens, or of sequences alone.
    """

    def scan(self, state: State, inputs: Any, is_token: Bool[Array, "B T"]) -> tuple[Float[Array, "B T ..."], State]:
        """Returns the outputs of T columns of B sequences, and the states after them.

        Args:
            state: The states before.
            inputs: Inputs of the columns.
            is_token: The columns that have a token; the others change no state. The tokens of a sequence are
                neighbours; if its last column has none, nothing may continue it.
        """
        ...

    def step(self, state: State, inputs: Any) -> tuple[Float[Array, "B ..."], State]:
        """Returns the outputs of another token of each sequence, and the states after it."""
        ...


def empty_state(config: ModelConfig, num: int) -> State:
    """Returns the states of sequences without any token, in one layer."""
    recurrent = config.recurrent
    assert recurrent is not None, "the model has recurrent layers"
    if isinstance(recurrent, GatedDeltaNet):
        rows, columns = recurrent.num_value_heads * recurrent.key_dims, recurrent.value_dims
        return State(jnp.zeros((num, recurrent.size - 1, recurrent.mixed_dims)), jnp.zeros((num, rows, columns)))
    return State(jnp.zeros((num, recurrent.size - 1, config.hidden_size)), jnp.zeros((num, 0, 0)))


def causal_convolution(
    weight: Float[Array, "C 1 W"],
    bias: Float[Array, "C"] | None,
    before: Float[Array, "B P C"],
    inputs: Float[Array, "B T C"],
) -> tuple[Float[Array, "B T C"], Float[Array, "B P C"]]:
    """Convolves the inputs of each channel with its own weights, of which the last is for the newest token.

    Args:
        weight: Weights of the channels.
        bias: Bias of each channel.
        before: The inputs before, one fewer than there are weights.
        inputs: The inputs; columns without a token must be 0.

    Returns:
        The outputs, in float32, and the inputs to go on from.
    """
    T, W = inputs.shape[1], weight.shape[2]
    seen = jnp.concatenate([before, inputs.astype(jnp.float32)], axis=1)
    factors = weight.astype(jnp.float32)
    out = sum(seen[:, first : first + T] * factors[None, None, :, 0, first] for first in range(W))
    assert isinstance(out, Array), "there is a weight"
    out = out if bias is None else out + bias.astype(jnp.float32)[None, None, :]
    return out, seen[:, T:]
