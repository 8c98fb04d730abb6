"""Estimates of KL(policy || reference) at sampled tokens, as losses.

With d = ref - logp: k1 = -d has zero expected gradient, so it is no loss and is not offered; k2 = d^2 / 2 has the
exact gradient on policy; k3 = exp(d) - d - 1 only an approximate one. After `bias_corrected` both have the exact one at
any policy. Source: J. Schulman, "Approximating KL divergence" (2020).
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from groupax.objective.ratios import clamp_log_ratio
from groupax.settings.references import resolve

# (logp, ref_logp), [B, T] each, -> the estimate at each token, [B, T].
Estimator = Callable[..., Any]


def k2(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Computes (ref - logp)^2 / 2."""
    return jnp.square(clamp_log_ratio(ref_logp - logp)) / 2


def k3(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Computes exp(d) - d - 1 with d = ref - logp; it is never negative."""
    d = clamp_log_ratio(ref_logp - logp)
    return jnp.exp(d) - d - 1.0


# By `kl_estimator`.
ESTIMATORS: dict[str, Estimator] = {"k2": k2, "k3": k3}


def find_estimator(kl_estimator: str | Estimator) -> Estimator:
    """Returns the function that the setting `kl_estimator` names.

    Raises:
        ValueError: there is no such estimator, or it cannot be called with two log-probs.
    """
    return resolve("kl_estimator", kl_estimator, ESTIMATORS, ("logp", "ref_logp"))


def bias_corrected(kl: Float[Array, "B T"], ratio: Float[Array, "B T"], estimator: Estimator) -> Float[Array, "B T"]:
    """Weights estimates by the importance ratio, so that their expected gradient is exact at any policy.

    The gradient of k2 is itself an estimate of the KL's, so its ratio is a constant. Any other estimate is one of the
    KL's value, so that the gradient flows through its ratio too.

    Args:
        kl: estimates at each token.
        ratio: importance ratio of the policy to the one that sampled; differentiable.
        estimator: the function that computed them.
    """
    return kl * (lax.stop_gradient(ratio) if estimator is k2 else ratio)
