"""Estimates of KL(policy || reference) at sampled tokens, as losses.

With d = ref - logp: k1 = -d has zero expected gradient, so it is no loss and is not offered; k2 = d^2 / 2 has the
exact gradient on policy; k3 = exp(d) - d - 1 only an approximate one, and the exact one at any policy when it is
multiplied by the differentiable ratio. Source: J. Schulman, "Approximating KL divergence" (2020).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from groupax.objective.ratios import clamp_log_ratio


def k2(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """(ref - logp)^2 / 2."""
    return jnp.square(clamp_log_ratio(ref_logp - logp)) / 2


def k3(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """exp(d) - d - 1 with d = ref - logp; never negative."""
    d = clamp_log_ratio(ref_logp - logp)
    return jnp.exp(d) - d - 1.0


# By `kl_estimator`.
ESTIMATORS = {"k2": k2, "k3": k3}
