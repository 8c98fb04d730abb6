"""Gated delta nets (Qwen3-Next, Qwen3.5): linear attention with a memory per head (see `delta_rule`)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from groupax.models.config import Activation, GatedDeltaNet, ModelConfig
from groupax.models.delta_rule import delta_rule, delta_rule_step, unit_vectors
from groupax.models.layers import ACTIVATIONS, linear, rms_norm
from groupax.models.recurrence import Recurrence, State, causal_convolution
from groupax.models.specs import Params


class Inputs(NamedTuple):
    """The recurrence's inputs of a token: queries, keys and values, and the logits of step sizes and of decays."""

    mixed: Float[Array, "*M C"]
    step: Float[Array, "*M V"]
    decay: Float[Array, "*M V"]


@dataclass(frozen=True, eq=False)
class DeltaRecurrence:
    """The recurrence of a layer: a convolution, then the gated delta rule (see `Recurrence`)."""

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


def gated_delta_net(
    config: ModelConfig,
    net: GatedDeltaNet,
    weights: Params,
    h: Float[Array, "M D"],
    recur: Callable[[Recurrence, Any], tuple[Array, Any]],
) -> tuple[Float[Array, "M D"], Any]:
    """Computes a gated delta net.

    Args:
        config: Architecture of the model.
        net: Dims of the layer.
        weights: Weights of the layer.
        h: Inputs of the tokens.
        recur: Goes through the tokens, as the caller arranges them.

    Returns:
        The output of each token, and the layer's updated cache.
    """
    inputs, gate = (_fused_inputs if net.fused else _inputs)(net, weights, h)
    assert isinstance(config.activation, str), "no family clamps the activation of a delta net"
    recurrence = DeltaRecurrence(net, config.activation, weights["conv"], weights["a_log"], weights["dt_bias"])
    out, cache = recur(recurrence, inputs)
    normed = rms_norm(out, weights["delta_norm"], config.norm_eps).astype(jnp.float32)
    gated = normed * jax.nn.silu(gate.astype(jnp.float32))
    return linear(gated.astype(h.dtype).reshape(len(h), -1), weights["delta_out"]), cache


def _inputs(net: GatedDeltaNet, weights: Params, h: Float[Array, "M D"]) -> tuple[Inputs, Float[Array, "M V H"]]:
    """Returns the inputs of the recurrence, and the logits of the output's gates."""
    mixed, gate, step, decay = (linear(h, weights[name]) for name in ("mixed", "delta_gate", "step", "decay"))
    return Inputs(mixed, step, decay), gate.reshape(len(h), net.num_value_heads, net.value_dims)


def _fused_inputs(net: GatedDeltaNet, weights: Params, h: Float[Array, "M D"]) -> tuple[Inputs, Float[Array, "M V H"]]:
    """Likewise from matrices whose rows are ordered by the heads of the keys."""
    M, K, share = len(h), net.num_key_heads, net.num_value_heads // net.num_key_heads
    sizes = (net.key_dims, net.key_dims, share * net.value_dims, share * net.value_dims)
    by_head = linear(h, weights["mixed_and_gate"]).reshape(M, K, sum(sizes))
    q, k, v, gate = jnp.split(by_head, np.cumsum(sizes[:-1]).tolist(), axis=-1)
    mixed = jnp.concatenate([x.reshape(M, -1) for x in (q, k, v)], axis=-1)
    step, decay = jnp.split(linear(h, weights["step_and_decay"]).reshape(M, K, 2 * share), 2, axis=-1)
    return Inputs(mixed, step.reshape(M, -1), decay.reshape(M, -1)), gate.reshape(M, -1, net.value_dims)
