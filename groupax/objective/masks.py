"""Masks of tokens in the policy loss. The KL, the denominators and the metrics keep all of them."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float


def on_policy_tokens(
    logp: Float[Array, "B T"],
    rollout_logp: Float[Array, "B T"],
    advantage: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    threshold: float,
) -> Bool[Array, "B T"]:
    """Keeps tokens with A >= 0, and all tokens of rows with mean_t(rollout_logp - logp) <= threshold.

    What it drops are the bad turns of rows that have become unlikely.

    Args:
        logp: log-probs under the policy.
        rollout_logp: log-probs under the policy that sampled the tokens.
        advantage: advantage of each token.
        mask: tokens that count.
        threshold: largest mean drift, in nats.

    Source: DeepSeek-V3.2, arXiv:2512.02556, eq. 9.
    """
    lengths = jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1).astype(logp.dtype)
    drift = jnp.sum(rollout_logp - lax.stop_gradient(logp), axis=-1, keepdims=True, where=mask) / lengths
    return (advantage >= 0) | (drift <= threshold)


def top_entropy_threshold(entropies: Sequence[Float[np.ndarray, "_"]], quantile: float) -> float:
    """Computes the (1 - quantile) quantile of all entropies; tokens at or above it take part in the policy loss.

    It is taken on the host over the whole optimizer step, so that neither the number of tokens nor their micro-batches
    matter.

    Args:
        entropies: entropies of the loss tokens of each row.
        quantile: share of tokens to keep; 1 keeps all, 0 the highest.

    Returns:
        The threshold, linear between two tokens' entropies; minus infinity without tokens.

    Source: "Beyond the 80/20 rule", arXiv:2506.01939.
    """
    values = np.sort(np.concatenate([np.zeros(0), *entropies]))
    if values.size == 0:
        return float("-inf")
    # rounded, so that a rank that is an integer up to the last bit selects exactly that token
    rank = round((values.size - 1) * (1.0 - quantile), 9)
    below = int(rank)
    above = min(below + 1, values.size - 1)
    return float(values[below] + (rank - below) * (values[above] - values[below]))
