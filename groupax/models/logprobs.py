"""Log-probs of given tokens, computed without materializing a [tokens, vocabulary] array, forward or backward.

The forward pass takes the tokens in chunks, each against the full vocabulary. The backward pass takes the vocabulary in
blocks, each for all tokens, so that the head's gradient is written once; it recomputes a block's logits from the hidden
states, and their softmax from the saved log-sum-exp of each token.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from groupax.models.execution import CPU_LOGITS
from groupax.models.layers import softcapped
from groupax.models.matmul import matmul, matmul_nt
from groupax.parallel.collectives import Axis, axis_index, psum_grad

# Fewest tokens of a chunk and fewest words of a block: smaller matmuls are slow for their size.
MIN_CHUNK_TOKENS = 64
MIN_BLOCK_WORDS = 512
# The number of words of a block is a multiple of this.
BLOCK_MULTIPLE = 64


def token_logprobs(
    hidden: Float[Array, "M D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "M"],
    temperature: float,
    entropy_gradient: bool = True,
    softcap: float | None = None,
    axis: Axis = None,
    chunk_logits: int = CPU_LOGITS,
) -> tuple[Float[Array, "M"], Float[Array, "M"]]:
    """Computes log softmax(logits / temperature)[target] and the entropy of that distribution, in nats, float32.

    Args:
        hidden: Hidden states after the final norm.
        head: Matrix of the vocabulary; the embedding itself if they are tied.
        targets: Target of each token.
        temperature: Divisor of the logits.
        entropy_gradient: Whether the entropy will be differentiated; if not, its gradient is taken to be zero.
        softcap: Logits are softcap tanh(hidden headᵀ / softcap); None leaves them at hidden headᵀ.
        axis: Mesh axis, inside a shard_map, over which the vocabulary is sharded.
        chunk_logits: Number of logits that are computed at a time.
    """
    if axis is not None:
        hidden, targets = psum_grad(hidden, axis), targets - axis_index(axis) * head.shape[0]
    return _token_logprobs(hidden, head, targets, _Logits(temperature, softcap, axis, chunk_logits), entropy_gradient)


@dataclass(frozen=True)
class _Logits:
    """The map from products to logits, softcap tanh(product / softcap) / temperature, of each device's words."""

    temperature: float
    softcap: float | None
    axis: Axis
    chunk_logits: int

    def compute(self, hidden: Array, head: Array) -> Array:
        return softcapped(matmul_nt(hidden, head), self.softcap) * self.inverse_temperature

    def slope(self, logits: Array) -> Array | np.float32:
        """Returns d logits / d product."""
        if self.softcap is None:
            return self.inverse_temperature
        tanh = logits * np.float32(self.temperature / self.softcap)
        return (1.0 - jnp.square(tanh)) * self.inverse_temperature

    @property
    def inverse_temperature(self) -> np.float32:
        return np.float32(1.0) / np.float32(self.temperature)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _token_logprobs(hidden: Array, head: Array, targets: Array, kind: _Logits, _: bool) -> tuple[Array, Array]:
    logp, entropy, _log_sum = _forward(hidden, head, targets, kind)
    return logp, entropy


def _forward(hidden: Array, head: Array, targets: Array, kind: _Logits) -> tuple[Array, Array, Array]:
    """Returns log-probs, entropies, and each token's log-sum-exp of the logits."""
    M, V = hidden.shape[0], head.shape[0]
    num_chunks = max(1, -(-M // max(MIN_CHUNK_TOKENS, kind.chunk_logits // V)))
    chunk = -(-M // num_chunks)
    pad = num_chunks * chunk - M

    def chunk_logprobs(xs: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        hidden, targets = xs
        logits = kind.compute(hidden, head)
        highest = jnp.max(logits, axis=-1, keepdims=True)
        highest = highest if kind.axis is None else lax.pmax(highest, kind.axis)
        logits = logits - highest
        exps = jnp.exp(logits)
        total, weighted = jnp.sum(exps, axis=-1), jnp.sum(exps * logits, axis=-1)
        target_logits = _target_logits(logits, targets, V, kind.axis)
        if kind.axis is not None:
            total, weighted, target_logits = lax.psum((total, weighted, target_logits), kind.axis)
        log_total = jnp.log(total)
        entropy = log_total - weighted / total
        return target_logits - log_total, entropy, log_total + highest[:, 0]

    if num_chunks == 1:
        return chunk_logprobs((hidden, targets))
    hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(num_chunks, chunk, -1)
    targets = jnp.pad(targets, (0, pad)).reshape(num_chunks, chunk)
    logp, entropy, log_sum = lax.map(chunk_logprobs, (hidden, targets))
    return logp.reshape(-1)[:M], entropy.reshape(-1)[:M], log_sum.reshape(-1)[:M]


def _target_logits(logits: Array, targets: Array, V: int, axis: Axis) -> Array:
    """Returns each token's logit of its target; 0 for targets that are other devices' words."""
    if axis is None:
        return jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    is_own = (targets >= 0) & (targets < V)
    found = jnp.take_along_axis(logits, jnp.where(is_own, targets, 0)[:, None], axis=-1)[:, 0]
    return jnp.where(is_own, found, 0.0)


def _forward_with_residuals(
    hidden: Array, head: Array, targets: Array, kind: _Logits, _: bool
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    logp, entropy, log_sum = _forward(hidden, head, targets, kind)
    return (logp, entropy), (hidden, head, targets, entropy, log_sum)


def _backward(
    kind: _Logits, entropy_gradient: bool, saved: tuple[Array, ...], cotangents: tuple[Array, Array]
) -> tuple[Array, Array, None]:
    """Computes the gradients of hidden states and head, block by block of the vocabulary.

    With p a token's distribution and H its entropy, d logp / d logit = [target] - p and
    d H / d logit = -p (log p + H).
    """
    hidden, head, targets, entropy, log_sum = saved
    d_logp, d_entropy = (x[:, None] for x in cotangents)
    M, V = hidden.shape[0], head.shape[0]
    num_blocks = -(-V // max(MIN_BLOCK_WORDS, kind.chunk_logits // M))
    block = min(V, -(-V // num_blocks // BLOCK_MULTIPLE) * BLOCK_MULTIPLE)

    def add_block(index: Array, grads: tuple[Array, Array]) -> tuple[Array, Array]:
        d_hidden, d_head = grads
        first = jnp.minimum(index * block, V - block)  # the last block starts earlier and only its new words count
        words = first + jnp.arange(block)
        block_head = lax.dynamic_slice_in_dim(head, first, block)
        logits = kind.compute(hidden, block_head)
        logp = logits - log_sum[:, None]
        p = jnp.exp(logp)
        gradient = jnp.where(targets[:, None] == words[None, :], d_logp, 0.0) - d_logp * p
        if entropy_gradient:
            gradient = gradient - d_entropy * p * (logp + entropy[:, None])
        gradient = jnp.where(words[None, :] >= index * block, gradient * kind.slope(logits), 0.0).astype(hidden.dtype)
        d_hidden = d_hidden + matmul(gradient, block_head)
        d_block = matmul(gradient.T, hidden) + lax.dynamic_slice_in_dim(d_head, first, block)
        return d_hidden, lax.dynamic_update_slice_in_dim(d_head, d_block, first, 0)

    start = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(head.shape, jnp.float32)
    d_hidden, d_head = lax.fori_loop(0, -(-V // block), add_block, start)
    return d_hidden.astype(hidden.dtype), d_head.astype(head.dtype), None


_token_logprobs.defvjp(_forward_with_residuals, _backward)
