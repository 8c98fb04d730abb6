"""The objective of one micro-batch: ratios, policy loss, masks, correction, KL, aggregation, and what to report."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from groupax.objective.aggregation import Denominators, aggregate
from groupax.objective.correction import rollout_correction
from groupax.objective.kl import ESTIMATORS, bias_corrected
from groupax.objective.losses import LOSSES, Terms, capped_reinforce, clipped_surrogate, gamma_weight
from groupax.objective.masks import on_policy_rows
from groupax.objective.metrics import Tally, empty_tally
from groupax.objective.ratios import LOG_RATIO_LIMIT, RATIOS
from groupax.parallel.pytree import pytree
from groupax.settings.objective import ObjectiveSettings


@pytree
class Evidence:
    """What is known of these rows beside the policy's log-probs: numpy's arrays as packed, jax's on the devices.

    Attributes:
        advantages: of each row.
        mask: tokens that count.
        rollout_logp: under the policy as it was when the tokens were sampled, by the engine.
        old_logp: under the policy at the start of the rollout, by the trainer; NaN in the rows of a rollout that the
            policy has just sampled, and None if that is all of them: their ratio is exactly 1.
        ref_logp: under the reference; None if `beta` is 0.
        sampler_logp: under the distribution that was drawn from; None without rollout correction.
        policy_mask: tokens of the policy loss among those that count; None for all.
    """

    advantages: Float[Any, "B"]
    mask: Bool[Any, "B T"]
    rollout_logp: Float[Any, "B T"]
    old_logp: Float[Any, "B T"] | None = None
    ref_logp: Float[Any, "B T"] | None = None
    sampler_logp: Float[Any, "B T"] | None = None
    policy_mask: Bool[Any, "B T"] | None = None


def policy_objective(
    logp: Float[Array, "B T"],
    entropy: Float[Array, "B T"],
    evidence: Evidence,
    counts: Denominators,
    settings: ObjectiveSettings,
    entropy_coef: Float[Array, ""] | float = 0.0,
) -> tuple[Float[Array, ""], Tally]:
    """The loss of these rows as their share of the optimizer step's, and their share of its metrics.

    Args:
        logp: of the sampled tokens under the policy; differentiable.
        entropy: of the policy's distribution at each token, in nats; differentiable.
        evidence: everything else about the rows.
        counts: denominators of the whole step.
        settings: which objective.
        entropy_coef: weight of the entropy bonus; without effect unless `settings.entropy_bonus`.
    """
    mask, advantage = evidence.mask, evidence.advantages[:, None]

    def counted(x: Float[Array, "B T"]) -> Float[Array, "B T"]:
        # what stands in masked places has no say, not even as NaN in a gradient
        return jnp.where(mask, x, 0.0)

    logp, entropy = counted(logp), counted(entropy)
    rollout_logp = counted(evidence.rollout_logp)
    old_logp = counted(old_logprobs(logp, evidence))
    log_ratio = logp - old_logp
    ratio = RATIOS[settings.importance_sampling_level](log_ratio, mask)
    correction = None
    if evidence.sampler_logp is not None:
        correction = rollout_correction(old_logp, counted(evidence.sampler_logp), mask, settings)
    terms = Terms(logp, log_ratio, ratio, advantage, mask, correction)
    tally = _tally(terms, entropy, counts, settings)

    token_losses = LOSSES[settings.loss_type](terms, settings)
    if settings.off_policy_mask_threshold is not None:
        kept = on_policy_rows(logp, rollout_logp, advantage, mask, settings.off_policy_mask_threshold)
        token_losses = jnp.where(kept, token_losses, 0.0)
        tally.sums["off_policy_masked_frac"] = _count(jnp.broadcast_to(~kept, mask.shape), mask)
    if evidence.policy_mask is not None:
        token_losses = jnp.where(evidence.policy_mask, token_losses, 0.0)
    if correction is not None and settings.loss_type != "vespo":  # where it is part of the weight
        token_losses = token_losses * correction
    if evidence.ref_logp is not None:
        kl = ESTIMATORS[settings.kl_estimator](logp, counted(evidence.ref_logp))
        corrected = bias_corrected(kl, ratio, settings.kl_estimator) if settings.use_bias_correction_kl else kl
        tally.sums["kl"] = jnp.sum(corrected if settings.metric_definitions == "trl" else kl, where=mask)
        token_losses = token_losses + settings.beta * corrected
    loss = aggregate(token_losses, mask, counts, settings)
    if settings.entropy_bonus:
        loss = loss - entropy_coef * jnp.sum(entropy, where=mask) / counts.num_tokens
    return loss, tally


def old_logprobs(logp: Float[Array, "B T"], evidence: Evidence) -> Float[Array, "B T"]:
    """Log-probs under the policy at the start of each row's rollout; this very policy's where that is the one."""
    logp = lax.stop_gradient(logp)
    return logp if evidence.old_logp is None else jnp.where(jnp.isnan(evidence.old_logp), logp, evidence.old_logp)


def empty_objective_tally(settings: ObjectiveSettings) -> Tally:
    """The tally of no rows, with the metrics that `policy_objective` reports under these settings."""
    sums, minima, maxima = ["entropy", "ratio/clamped_frac"], [], []
    loss = LOSSES[settings.loss_type]
    if loss is clipped_surrogate:
        sums += ["clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"]
        minima, maxima = ["clip_ratio/low_min"], ["clip_ratio/high_max"]
    if loss is capped_reinforce:
        sums += ["cispo_clip_ratio"]
    if settings.loss_type == "vespo":
        sums += [_phi_name(settings)]
    if settings.beta > 0:
        sums += ["kl"]
    if settings.off_policy_mask_threshold is not None:
        sums += ["off_policy_masked_frac"]
    if settings.rollout_correction != "none":
        sums += ["rollout/correction_mean"]
    return empty_tally(sums, minima, maxima)


def _phi_name(settings: ObjectiveSettings) -> str:
    return "vespo/phi_seq_mean" if settings.metric_definitions == "trl" else "vespo/phi_mean"


def _tally(terms: Terms, entropy: Float[Array, "B T"], counts: Denominators, settings: ObjectiveSettings) -> Tally:
    mask = terms.mask
    in_trl = settings.metric_definitions == "trl"

    def total(x: Array, per_row: bool) -> Float[Array, ""]:
        """The sum over tokens; of a number per row, what the mean over rows is such a sum of."""
        x = jnp.broadcast_to(x, mask.shape).astype(jnp.float32)
        return (
            jnp.sum(_row_means(x, mask)) * (counts.num_tokens / counts.num_rows)
            if in_trl and per_row
            else jnp.sum(x, where=mask)
        )

    of_rows = settings.importance_sampling_level == "sequence"
    sums = {
        "entropy": jnp.sum(entropy, where=mask),
        "ratio/clamped_frac": _count(jnp.abs(terms.log_ratio) > LOG_RATIO_LIMIT, mask),
    }
    minima, maxima = {}, {}
    loss = LOSSES[settings.loss_type]
    if loss is clipped_surrogate:
        # tokens whose clipped term is the smaller one, which therefore get no gradient
        low = (terms.ratio < 1.0 - settings.epsilon) & (terms.advantage < 0)
        high = (terms.ratio > 1.0 + settings.upper_epsilon) & (terms.advantage > 0)
        sums["clip_ratio/low_mean"] = total(low, of_rows)
        sums["clip_ratio/high_mean"] = total(high, of_rows)
        sums["clip_ratio/region_mean"] = total(low | high, of_rows)
        shares = [_row_means(x.astype(jnp.float32), mask) for x in (low, high)]
        minima["clip_ratio/low_min"] = jnp.min(shares[0], initial=jnp.inf, where=jnp.any(mask, axis=-1))
        maxima["clip_ratio/high_max"] = jnp.max(shares[1], initial=-jnp.inf, where=jnp.any(mask, axis=-1))
    if loss is capped_reinforce:
        sums["cispo_clip_ratio"] = total((terms.ratio > settings.upper_epsilon) & (terms.advantage > 0), of_rows)
    if settings.loss_type == "vespo":
        sums[_phi_name(settings)] = total(gamma_weight(terms, settings), True)
    if terms.correction is not None:
        sums["rollout/correction_mean"] = jnp.sum(terms.correction, where=mask)
    return Tally(sums, minima, maxima)


def _count(tokens: Bool[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    return jnp.sum(tokens & mask).astype(jnp.float32)


def _row_means(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B"]:
    lengths = jnp.maximum(jnp.sum(mask, axis=-1), 1)
    return jnp.sum(x, axis=-1, where=mask) / lengths.astype(jnp.float32)
