"""Estimates of KL(policy || reference) at sampled tokens, as losses.

With d = ref - logp: k1 = -d has zero expected gradient, so it is no loss and is not offered; k2 = d^2 / 2 has the
exact gradient on policy; k3 = exp(d) - d - 1 only an approximate one. `bias_corrected`, both have the exact one at any
policy. Source: J. Schulman, "Approximating KL divergence" (2020).
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from groupax.objective.ratios import clamp_log_ratio


def k2(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """(ref - logp)^2 / 2."""
    return jnp.square(clamp_log_ratio(ref_logp - logp)) / 2


def k3(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """exp(d) - d - 1 with d = ref - logp; never negative."""
    d = clamp_log_ratio(ref_logp - logp)
    return jnp.exp(d) - d - 1.0


def bias_corrected(kl: Float[Array, "B T"], ratio: Float[Array, "B T"], estimator: str) -> Float[Array, "B T"]:
    """The estimates weighted by the ratio: of k3 the product has the exact gradient, of k2 its own has.

    Args:
        kl: by one of the estimators.
        ratio: of the policy to the one that sampled; differentiable.
        estimator: its name.
    """
    return kl * (lax.stop_gradient(ratio) if estimator == "k2" else ratio)


# By `kl_estimator`.
ESTIMATORS = {"k2": k2, "k3": k3}
