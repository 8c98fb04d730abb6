"""The objective of one micro-batch: ratios, policy loss, KL, aggregation, and what to report of them."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from groupax.objective.aggregation import Denominators, aggregate
from groupax.objective.kl import ESTIMATORS
from groupax.objective.losses import LOSSES, Terms
from groupax.objective.ratios import LOG_RATIO_LIMIT, RATIOS
from groupax.objective.settings import ObjectiveSettings

# Sums over loss tokens, by metric; divided by the step's number of tokens when they are reported.
TokenSums = dict[str, Array]
TOKEN_SUMS = (
    "entropy",
    "kl",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "ratio/clamped_frac",
)


def policy_objective(
    logp: Float[Array, "B T"],
    entropy: Float[Array, "B T"],
    old_logp: Float[Array, "B T"] | None,
    ref_logp: Float[Array, "B T"] | None,
    advantages: Float[Array, "B"],
    mask: Bool[Array, "B T"],
    counts: Denominators,
    settings: ObjectiveSettings,
) -> tuple[Float[Array, ""], TokenSums]:
    """The loss of these rows as their share of the optimizer step's, and sums of its metrics over tokens.

    Args:
        logp: of the sampled tokens under the policy; differentiable.
        entropy: of the policy's distribution at each token, in nats.
        old_logp: under the policy at the start of the rollout; None on policy, where the ratio is exactly 1.
        ref_logp: under the reference; None if `beta` is 0.
        advantages: of each row.
        mask: tokens that count.
        counts: denominators of the whole step.
        settings: which objective.
    """
    # what stands in masked places has no say, not even as NaN in a gradient
    logp, entropy = jnp.where(mask, logp, 0.0), jnp.where(mask, entropy, 0.0)
    old_logp = None if old_logp is None else jnp.where(mask, old_logp, 0.0)
    ref_logp = None if ref_logp is None else jnp.where(mask, ref_logp, 0.0)
    log_ratio = logp - (lax.stop_gradient(logp) if old_logp is None else old_logp)
    ratio = RATIOS[settings.importance_sampling_level](log_ratio, mask)
    terms = Terms(logp, ratio, advantages[:, None], mask)
    token_losses = LOSSES[settings.loss_type](terms, settings)
    sums = _clip_sums(terms, settings) | {
        "kl": jnp.float32(0.0),
        "entropy": jnp.sum(entropy),
        "ratio/clamped_frac": jnp.sum(jnp.abs(log_ratio) > LOG_RATIO_LIMIT).astype(jnp.float32),
    }
    if ref_logp is not None:
        kl = ESTIMATORS[settings.kl_estimator](logp, ref_logp)
        sums["kl"] = jnp.sum(kl)
        token_losses = token_losses + settings.beta * (kl * ratio if settings.use_bias_correction_kl else kl)
    return aggregate(token_losses, mask, counts, settings), sums


def _clip_sums(terms: Terms, settings: ObjectiveSettings) -> TokenSums:
    """Tokens whose clipped term is the smaller one, which therefore get no gradient, by side."""
    low = (terms.ratio < 1.0 - settings.epsilon) & (terms.advantage < 0)
    high = (terms.ratio > 1.0 + settings.epsilon_high) & (terms.advantage > 0)

    def count(where: Bool[Array, "B T"]) -> Array:
        return jnp.sum(where, where=terms.mask).astype(jnp.float32)

    return {
        "clip_ratio/low_mean": count(low),
        "clip_ratio/high_mean": count(high),
        "clip_ratio/region_mean": count(low | high),
    }
