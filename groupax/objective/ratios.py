"""Importance ratios, corrections and estimates of the KL, per token, and `TokenTerms`, the inputs of a loss."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from groupax.core.settings.objective import ObjectiveSettings
from groupax.core.settings.references import reference_to, resolve
from groupax.parallel.pytree import pytree

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


# By `importance_sampling_level`.
RATIOS = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "sequence_sum": sequence_sum_ratio,
}


# Estimates of KL(policy || reference) at sampled tokens, as losses: (logp, ref_logp), [B, T] each, -> [B, T].
#
# With d = ref - logp: k1 = -d has zero expected gradient, so it is not offered as a loss; k2 = d^2 / 2 has the exact
# gradient on policy; k3 = exp(d) - d - 1 only an approximate one. After `bias_corrected` both have the exact one at any
# policy. Source: J. Schulman, "Approximating KL divergence" (2020).
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
    """
    return kl * (lax.stop_gradient(ratio) if estimator is k2 else ratio)


def kl_to_reference(
    logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"], ratio: Float[Array, "B T"], settings: ObjectiveSettings
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Estimates the KL at each token, without and with the bias correction that the settings ask for.

    Raises:
        ValueError: the estimator does not return the shape [B, T].
    """
    estimator = find_estimator(settings.kl_estimator)
    kl = estimator(logp, ref_logp)
    if jnp.shape(kl) != logp.shape:
        raise ValueError(
            f"kl_estimator {reference_to(estimator)!r} must return an estimate for each token, [B, T] = "
            f"{list(logp.shape)}, got {list(jnp.shape(kl))}"
        )
    return kl, bias_corrected(kl, ratio, estimator) if settings.use_bias_correction_kl else kl


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


def on_policy_tokens(
    logp: Float[Array, "B T"],
    rollout_logp: Float[Array, "B T"],
    advantage: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    threshold: float,
) -> Bool[Array, "B T"]:
    """Keeps tokens with A >= 0, and all tokens of rows with mean_t(rollout_logp - logp) <= threshold.

    What it drops are the bad turns of rows that have become unlikely.

    Source: DeepSeek-V3.2, arXiv:2512.02556, eq. 9.
    """
    lengths = jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1).astype(logp.dtype)
    drift = jnp.sum(rollout_logp - lax.stop_gradient(logp), axis=-1, keepdims=True, where=mask) / lengths
    return (advantage >= 0) | (drift <= threshold)


@pytree
class TokenTerms:
    """The inputs of a policy loss.

    Attributes:
        logp: log-prob of each sampled token under the policy; the gradient flows through it.
        log_ratio: `logp` minus the log-prob under the policy at the start of the rollout, per token, not clamped.
        ratio: importance ratio, per token or per row, differentiable (see `RATIOS`).
        advantage: advantage of each token, 0 where the mask is False; it may differ between the turns of a row.
        mask: tokens that count; the values of the others are finite and without effect.
        entropy: entropy of the policy's distribution at each token, in nats, without a gradient.
        correction: weight of policy over sampler (see `rollout_correction`); None without `rollout_correction`.
    """

    logp: Float[Array, "B T"]
    log_ratio: Float[Array, "B T"]
    ratio: Float[Array, "B T"]
    advantage: Float[Array, "B T"]
    mask: Bool[Array, "B T"]
    entropy: Float[Array, "B T"]
    correction: Float[Array, "B T"] | None = None
