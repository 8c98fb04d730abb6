"""Importance ratios of the policy to the policy that sampled the completions."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

LOG_RATIO_LIMIT = 20.0  # exp(20) is 5e8: larger ratios carry no information, and exp must not overflow


def clamp_log_ratio(log_ratio: Float[Array, "*M"]) -> Float[Array, "*M"]:
    """Clamps log-ratios to [-20, 20]; every log-ratio passes here before exp."""
    return jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def clip_ratio(ratio: Float[Array, "*M"], low: float, high: float) -> Float[Array, "*M"]:
    """Clips ratios to [low, high], with gradient 1 at both bounds, so that on-policy ratios have it at any bounds."""
    return jnp.where(ratio < low, low, jnp.where(ratio > high, high, ratio))


def token_ratio(log_ratio: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Computes w_t = exp(r_t), r = logp - old."""
    del mask
    return jnp.exp(clamp_log_ratio(log_ratio))


def sequence_ratio(log_ratio: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Computes w = exp(mean of r_t over the row's tokens), the same for all of them (GSPO, arXiv:2507.18071, eq. 7)."""
    lengths = jnp.maximum(jnp.sum(mask, axis=-1), 1).astype(log_ratio.dtype)
    mean = jnp.sum(log_ratio, axis=-1, where=mask) / lengths
    return jnp.broadcast_to(jnp.exp(clamp_log_ratio(mean))[:, None], log_ratio.shape)


def sequence_sum_ratio(log_ratio: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Computes w = exp(sum of r_t over the row's tokens): the ratio of whole completions, the same for all tokens.

    Source: RLOO, arXiv:2402.14740, where a completion is one action.
    """
    total = jnp.sum(log_ratio, axis=-1, where=mask)
    return jnp.broadcast_to(jnp.exp(clamp_log_ratio(total))[:, None], log_ratio.shape)


def sequence_token_ratio(log_ratio: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Computes the value of `sequence_ratio` with the gradient of each token's own log-prob (GSPO-token, eq. 13).

    So a token learns from its own advantage, where `sequence_ratio` gives all tokens the gradient of the row's mean.
    """
    own = jnp.exp(log_ratio - lax.stop_gradient(log_ratio))  # exactly 1
    return lax.stop_gradient(sequence_ratio(log_ratio, mask)) * own


# By `importance_sampling_level`.
RATIOS = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "sequence_token": sequence_token_ratio,
    "sequence_sum": sequence_sum_ratio,
}
