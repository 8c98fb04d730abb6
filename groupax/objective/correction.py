"""The importance correction for rollouts that were not sampled from the policy that trains on them.

There are two causes: truncated sampling (top-p, top-k, min-p), which draws from another distribution, and an engine
whose arithmetic differs from the trainer's.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from groupax.objective.ratios import clamp_log_ratio
from groupax.settings.objective import ObjectiveSettings


def rollout_correction(
    old_logp: Float[Array, "B T"],
    sampler_logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    settings: ObjectiveSettings,
) -> Float[Array, "B T"]:
    """Computes rho = exp(d), d = old - sampler, within bounds and without a gradient.

    `rollout_correction` names the level and the treatment of values out of bounds. "token" takes d of each token,
    "sequence" the mean of d over the row, "sequence_sum" its sum, which grows with length. "truncate" moves rho to the
    nearest bound, "mask" sets it to 0.

    Source: E. L. Ionides, "Truncated importance sampling" (2008), brought to this use by F. Yao et al., "Your
    efficient RL framework secretly brings you off-policy RL training" (2025).
    """
    level, _, bound = settings.rollout_correction.rpartition("_")
    d = lax.stop_gradient(jnp.where(mask, old_logp - sampler_logp, 0.0))
    if level != "token":
        d = jnp.sum(d, axis=-1, keepdims=True)
        if level == "sequence":
            d = d / jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1).astype(d.dtype)
    rho = jnp.exp(clamp_log_ratio(d))
    low, high = settings.rollout_correction_min, settings.rollout_correction_max
    if bound == "truncate":
        rho = jnp.clip(rho, low, high)
    else:
        outside = jnp.zeros(rho.shape, bool)
        outside = outside if low is None else outside | (rho < low)
        outside = outside if high is None else outside | (rho > high)
        rho = jnp.where(outside, 0.0, rho)
    return jnp.broadcast_to(rho, mask.shape)
