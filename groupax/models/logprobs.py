"""Log-probabilities of given tokens, without ever holding [tokens, vocabulary]."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from groupax.models.layers import einsum_f32, sum_last

# Logits in flight, in numbers: chunks of this size stay in a CPU's cache and are small on an accelerator.
CHUNK_LOGITS = 1 << 21


def token_logprobs(
    hidden: Float[Array, "M D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "M"],
    temperature: float,
) -> tuple[Float[Array, "M"], Float[Array, "M"]]:
    """log softmax(hidden head' / temperature)[target] and the entropy of that distribution, in nats, float32.

    The tokens are taken in chunks of about `CHUNK_LOGITS` logits; the backward pass computes a chunk's logits
    again instead of keeping them.
    """
    M, V = hidden.shape[0], head.shape[0]
    num_chunks = max(1, -(-M * V // CHUNK_LOGITS))
    chunk = -(-M // num_chunks)
    pad = num_chunks * chunk - M

    # a product, as in the engine's sampler: a division by a constant may round differently
    inverse_temperature = np.float32(1.0) / np.float32(temperature)

    @jax.checkpoint
    def chunk_logprobs(xs: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden, targets = xs
        logits = einsum_f32("md,vd->mv", hidden, head) * inverse_temperature
        logits = logits - lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
        exps = jnp.exp(logits)
        total = sum_last(exps)[:, 0]
        target_logits = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        return target_logits - jnp.log(total), jnp.log(total) - jnp.sum(exps * logits, axis=-1) / total

    if num_chunks == 1:
        return chunk_logprobs((hidden, targets))
    hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(num_chunks, chunk, -1)
    targets = jnp.pad(targets, (0, pad)).reshape(num_chunks, chunk)
    logps, entropies = lax.map(chunk_logprobs, (hidden, targets))
    return logps.reshape(-1)[:M], entropies.reshape(-1)[:M]
