"""Layers with a recurrent state in place of keys and values: gated delta nets and short convolutions.

A recurrence goes through the tokens of a sequence in their order. Its state, of a fixed size, is all that later tokens
know of earlier ones. The layers compute everything else token by token; the caller of `decoder.forward` decides which
tokens follow which.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from groupax.models.config import Activation, GatedDeltaNet, ModelConfig
from groupax.models.layers import ACTIVATIONS, linear, norm
from groupax.models.matmul import matmul, matmul_nt
from groupax.models.specs import Params


class State(NamedTuple):
    """The states of B sequences, in float32.

    Attributes:
        inputs: The last W inputs of a causal convolution over W + 1 tokens.
        memory: Sums of products of R keys' dims, of all heads, and V values' dims; no rows without a memory.
    """

    inputs: Float[Array, "B W C"]
    memory: Float[Array, "B R V"]


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
    """Convolves the inputs of each channel with its own weights, the last of which is for the newest token.

    Args:
        weight, bias: Weights and bias of each channel.
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


class Inputs(NamedTuple):
    """The recurrence's inputs of a token: queries, keys and values, and the logits of step sizes and of decays."""

    mixed: Float[Array, "*M C"]
    step: Float[Array, "*M V"]
    decay: Float[Array, "*M V"]


@dataclass(frozen=True, eq=False)
class DeltaRecurrence:
    """A convolution, then the gated delta rule."""

    net: GatedDeltaNet
    activation: Activation
    conv: Float[Array, "C 1 W"]
    a_log: Float[Array, "V"]
    dt_bias: Float[Array, "V"]

    def scan(self, state: State, inputs: Inputs, is_token: Bool[Array, "B T"]) -> tuple[Float[Array, "B T V H"], State]:
        """Goes through T columns, chunk by chunk."""
        mixed = jnp.where(is_token[..., None], inputs.mixed, 0)
        convolved, last = causal_convolution(self.conv, None, state.inputs, mixed)
        g, b = (jnp.where(is_token[..., None], x, 0) for x in self._gates(inputs))
        out, memory = delta_rule(self._by_head(state.memory), *self._heads(inputs, convolved), g, b)
        return out.astype(mixed.dtype), State(last, memory.reshape(state.memory.shape))

    def step(self, state: State, inputs: Inputs) -> tuple[Float[Array, "B V H"], State]:
        """Goes through one token of each sequence."""
        convolved, last = causal_convolution(self.conv, None, state.inputs, inputs.mixed[:, None])
        heads = self._heads(inputs, convolved[:, 0])
        out, memory = delta_rule_step(self._by_head(state.memory), *heads, *self._gates(inputs))
        return out.astype(inputs.mixed.dtype), State(last, memory.reshape(state.memory.shape))

    def _by_head(self, memory: Float[Array, "B R V"]) -> Float[Array, "B N K V"]:
        return memory.reshape(len(memory), self.net.num_value_heads, self.net.key_dims, self.net.value_dims)

    def _gates(self, inputs: Inputs) -> tuple[Float[Array, "*M V"], Float[Array, "*M V"]]:
        """Returns the logarithms of decays, and the step sizes."""
        decay = inputs.decay.astype(jnp.float32)
        rate, bias = (jnp.broadcast_to(x, decay.shape) for x in (jnp.exp(self.a_log), self.dt_bias))
        g = -rate * jax.nn.softplus(decay + bias)
        return g, jax.nn.sigmoid(inputs.step).astype(jnp.float32)

    def _heads(
        self, inputs: Inputs, convolved: Float[Array, "*M C"]
    ) -> tuple[Float[Array, "*M V K"], Float[Array, "*M V K"], Float[Array, "*M V H"]]:
        """Returns queries and keys, repeated for the heads of values, and values."""
        net, lead = self.net, convolved.shape[:-1]
        # in the dtype of the layer, as in transformers
        x = ACTIVATIONS[self.activation](convolved).astype(inputs.mixed.dtype).astype(jnp.float32)
        size = net.num_key_heads * net.key_dims
        q, k, v = x[..., :size], x[..., size : 2 * size], x[..., 2 * size :]
        q, k = (unit_vectors(each.reshape(*lead, net.num_key_heads, net.key_dims)) for each in (q, k))
        q = q * np.float32(net.key_dims**-0.5)
        share = net.num_value_heads // net.num_key_heads
        q, k = (jnp.repeat(each, share, axis=-2) for each in (q, k))
        return q, k, v.reshape(*lead, net.num_value_heads, net.value_dims)


@dataclass(frozen=True, eq=False)
class Convolution:
    """The recurrence of a short convolution (LFM2), whose state is the convolution's last inputs."""

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


# The recurrence of a layer, with the layer's weights. `scan` goes through columns of tokens, of which those without a
# token change no state, and `step` through one more token of each sequence. The tokens of a sequence are neighbours; if
# its last column has none, nothing may continue it.
Recurrence = DeltaRecurrence | Convolution


def recurrent_layer(
    config: ModelConfig,
    weights: Params,
    h: Float[Array, "M D"],
    recur: Callable[[Recurrence, Any], tuple[Array, Any]],
) -> tuple[Float[Array, "M D"], Any]:
    """Computes what a layer has in place of attention.

    Args:
        recur: Goes through the tokens, as the caller arranges them.

    Returns:
        The output of each token, and the layer's updated cache.
    """
    net = config.recurrent
    if not isinstance(net, GatedDeltaNet):  # a token's channels are gated, convolved with those before, and gated
        before, after, x = jnp.split(linear(h, weights["conv_in"], weights.get("conv_in_bias")), 3, axis=-1)
        out, cache = recur(Convolution(weights["conv"], weights.get("conv_bias")), before * x)
        return linear(after * out, weights["conv_out"], weights.get("conv_out_bias")), cache
    inputs, gate = (_fused_inputs if net.fused else _inputs)(net, weights, h)
    assert isinstance(config.activation, str), "no family clamps the activation of a delta net"
    recurrence = DeltaRecurrence(net, config.activation, weights["conv"], weights["a_log"], weights["dt_bias"])
    out, cache = recur(recurrence, inputs)
    normed = norm(out, weights["delta_norm"], config.norm_eps, "rms").astype(jnp.float32)
    gated = normed * jax.nn.silu(gate.astype(jnp.float32))
    return linear(gated.astype(h.dtype).reshape(len(h), -1), weights["delta_out"]), cache


def _inputs(net: GatedDeltaNet, weights: Params, h: Float[Array, "M D"]) -> tuple[Inputs, Float[Array, "M V H"]]:
    """Returns the inputs of the recurrence, and the logits of the output's gates."""
    mixed, gate, step, decay = (linear(h, weights[name]) for name in ("mixed", "delta_gate", "step", "decay"))
    return Inputs(mixed, step, decay), gate.reshape(len(h), net.num_value_heads, net.value_dims)


def _fused_inputs(net: GatedDeltaNet, weights: Params, h: Float[Array, "M D"]) -> tuple[Inputs, Float[Array, "M V H"]]:
    """Returns the same from matrices whose rows are ordered by the heads of the keys."""
    M, K, share = len(h), net.num_key_heads, net.num_value_heads // net.num_key_heads
    sizes = (net.key_dims, net.key_dims, share * net.value_dims, share * net.value_dims)
    by_head = linear(h, weights["mixed_and_gate"]).reshape(M, K, sum(sizes))
    q, k, v, gate = jnp.split(by_head, np.cumsum(sizes[:-1]).tolist(), axis=-1)
    mixed = jnp.concatenate([x.reshape(M, -1) for x in (q, k, v)], axis=-1)
    step, decay = jnp.split(linear(h, weights["step_and_decay"]).reshape(M, K, 2 * share), 2, axis=-1)
    return Inputs(mixed, step.reshape(M, -1), decay.reshape(M, -1)), gate.reshape(M, -1, net.value_dims)


# The gated delta rule (arXiv:2412.06464): S <- exp(g) S, then S <- S + k (b (v - k^T S)), and the output is q^T S. In
# chunks the changes follow from a triangular system (arXiv:2406.06484, section 3.2); its inverse is made of products of
# blocks: LAPACK's solver, which XLA calls on CPUs, can wait forever where several devices of one process call it.
CHUNK = 64
LEAF = 16  # columns of matrices that are inverted whole


def delta_rule_step(
    memory: Float[Array, "B N K V"],
    q: Float[Array, "B N K"],
    k: Float[Array, "B N K"],
    v: Float[Array, "B N V"],
    g: Float[Array, "B N"],
    b: Float[Array, "B N"],
) -> tuple[Float[Array, "B N V"], Float[Array, "B N K V"]]:
    """Returns the outputs of one token of each head, and the memories after it.

    Products are sums of elements: they do not depend on the number of sequences.
    """
    memory = memory * jnp.exp(g)[..., None, None]
    known = jnp.sum(memory * k[..., None], axis=-2)
    memory = memory + k[..., None] * ((v - known) * b[..., None])[..., None, :]
    return jnp.sum(memory * q[..., None], axis=-2), memory


def delta_rule(
    memory: Float[Array, "B N K V"],
    q: Float[Array, "B T N K"],
    k: Float[Array, "B T N K"],
    v: Float[Array, "B T N V"],
    g: Float[Array, "B T N"],
    b: Float[Array, "B T N"],
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N K V"]]:
    """Returns the outputs of T tokens, and the memories after them. A token with g and b of 0 changes nothing.

    The last chunk ends with the last column, so that further chunks without tokens in front change no bit.
    """
    # TPUs and GPUs would otherwise round the factors of products to fewer bits
    with jax.default_matmul_precision("highest"):
        return _by_chunk(memory, q, k, v, g, b)


def _by_chunk(
    memory: Array, q: Array, k: Array, v: Array, g: Array, b: Array
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N K V"]]:
    B, T, N, V = v.shape
    C = min(CHUNK, 1 << max(0, T - 1).bit_length())
    num = -(-T // C)

    def chunked(x: Array) -> Array:  # [B, T, N, ...] -> [num, B, N, C, ...]
        padded = jnp.pad(x, ((0, 0), (num * C - T, 0), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(B, num, C, *x.shape[2:]), (1, 3), (0, 2))

    q, k, v, g, b = (chunked(x) for x in (q, k, v, g, b))
    decay = jnp.cumsum(g, axis=-1)  # logarithm of the decay from the chunk's beginning until each token
    is_causal = jnp.tril(jnp.ones((C, C), bool))
    between = jnp.exp(jnp.where(is_causal, decay[..., :, None] - decay[..., None, :], -jnp.inf))
    k_steps = k * b[..., None]
    # what a token adds depends on the chunk's tokens before it: (I + system) added = v b - (k b decay) memory
    system = jnp.tril(matmul_nt(k_steps, k) * between, -1)
    sides = jnp.concatenate([v * b[..., None], k_steps * jnp.exp(decay)[..., None]], axis=-1)
    solved = matmul(unit_triangular_inverse(system), sides)
    added, read = solved[..., :V], solved[..., V:]
    scores = matmul_nt(q, k) * between
    q_decayed = q * jnp.exp(decay)[..., None]
    k_remaining = (k * jnp.exp(decay[..., -1:] - decay)[..., None]).swapaxes(-1, -2)
    whole = jnp.exp(decay[..., -1])[..., None, None]

    def chunk(memory: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
        added, read, scores, q_decayed, k_remaining, whole = xs
        added = added - matmul(read, memory)
        out = matmul(q_decayed, memory) + matmul(scores, added)
        return memory * whole + matmul(k_remaining, added), out

    memory, out = lax.scan(chunk, memory, (added, read, scores, q_decayed, k_remaining, whole))
    out = jnp.moveaxis(out, (0, 2), (1, 3)).reshape(B, num * C, N, V)
    return out[:, num * C - T :], memory


def unit_vectors(x: Float[Array, "*M K"]) -> Float[Array, "*M K"]:
    """Returns x divided by its length, whose square is raised by 1e-6."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def unit_triangular_inverse(lower: Float[Array, "*M C C"]) -> Float[Array, "*M C C"]:
    """Returns the inverse of I + lower, for a strictly lower triangular matrix of a power of two of columns.

    The inverse of a matrix of blocks [A, 0; L, B] is [A', 0; -B' L A', B'], with the inverses A' and B' of A and B.
    """
    C = lower.shape[-1]
    if C > LEAF:
        half = C // 2
        blocks = jnp.stack([lower[..., :half, :half], lower[..., half:, half:]])
        first, second = unit_triangular_inverse(blocks)
        below = -matmul(matmul(second, lower[..., half:, :half]), first)
        above = jnp.concatenate([first, jnp.zeros_like(below)], axis=-1)
        return jnp.concatenate([above, jnp.concatenate([below, second], axis=-1)], axis=-2)
    row, column = np.indices((C, C))
    inverse, size = jnp.broadcast_to(jnp.eye(C, dtype=lower.dtype), lower.shape), 1
    while size < C:  # all blocks of a size at once
        is_below = (row // (2 * size) == column // (2 * size)) & (row // size > column // size)
        between = jnp.where(is_below, lower, 0)
        change = between if size == 1 else matmul(matmul(inverse, between), inverse)
        inverse, size = inverse - change, 2 * size
    return inverse
