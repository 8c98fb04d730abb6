"""The objective of one micro-batch: ratios, policy loss, masks, correction, KL, aggregation and metrics."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from groupax.core.settings.objective import ObjectiveSettings
from groupax.core.settings.references import reference_to
from groupax.objective.aggregation import Denominators, aggregate
from groupax.objective.losses import TokenTerms, find_loss, on_policy_tokens
from groupax.objective.metrics import MetricSums, sum_metrics, zeros_like
from groupax.objective.ratios import LOG_RATIO_LIMIT, RATIOS, bias_corrected, find_estimator, rollout_correction
from groupax.parallel.pytree import pytree


@pytree
class LossInputs:
    """The data of these rows apart from the policy's log-probs: numpy arrays as packed, jax arrays on the devices.

    Attributes:
        advantages: advantage of each token.
        mask: tokens that count: sampled ones, without those of rows that are left out.
        rollout_logp: log-probs by the engine, under the policy that sampled the tokens.
        old_logp: log-probs by the trainer, under the policy at the start of the rollout; NaN in the rows of a rollout
            that the current policy has sampled, whose ratio is exactly 1. None if all rows are of such a rollout.
        ref_logp: log-probs under the reference; None if the loss has no KL term.
        sampler_logp: log-probs under the distribution that was sampled from; None without rollout correction.
        policy_mask: tokens of the policy loss among those that count; None for all.
    """

    advantages: Float[Any, "B T"]
    mask: Bool[Any, "B T"]
    rollout_logp: Float[Any, "B T"]
    old_logp: Float[Any, "B T"] | None = None
    ref_logp: Float[Any, "B T"] | None = None
    sampler_logp: Float[Any, "B T"] | None = None
    policy_mask: Bool[Any, "B T"] | None = None


def policy_objective(
    logp: Float[Array, "B T"],
    entropy: Float[Array, "B T"],
    inputs: LossInputs,
    counts: Denominators,
    settings: ObjectiveSettings,
    entropy_coef: Float[Array, ""] | float = 0.0,
) -> tuple[Float[Array, ""], MetricSums]:
    """Computes these rows' share of the loss of the optimizer step, and their share of its metrics.

    Args:
        logp: log-probs of the sampled tokens under the policy; differentiable.
        entropy: entropy of the policy's distribution at each token, in nats; differentiable.
        inputs: everything else about the rows.
        counts: denominators of the whole step.
        settings: of the objective.
        entropy_coef: weight of the entropy bonus; without effect unless `settings.entropy_bonus`.
    """
    mask, loss = inputs.mask, find_loss(settings.loss_type)
    logp, entropy = _masked(logp, mask), _masked(entropy, mask)
    terms = _terms(logp, entropy, inputs, settings)
    in_trl = settings.metric_definitions == "trl"
    tokens_per_row = counts.num_tokens / counts.num_rows if in_trl else None
    of_sequences = settings.importance_sampling_level != "token"
    metrics = sum_metrics(loss.metrics(terms, settings), mask, tokens_per_row, of_sequences)
    metrics.sums["entropy"] = jnp.sum(entropy, where=mask)
    metrics.sums["ratio/clamped_frac"] = _count(jnp.abs(terms.log_ratio) > LOG_RATIO_LIMIT, mask)
    if terms.correction is not None:
        metrics.sums["rollout/correction_mean"] = jnp.sum(terms.correction, where=mask)

    token_losses = loss(terms, settings)
    if settings.off_policy_mask_threshold is not None:
        rollout_logp = _masked(inputs.rollout_logp, mask)
        kept = on_policy_tokens(logp, rollout_logp, terms.advantage, mask, settings.off_policy_mask_threshold)
        token_losses = jnp.where(kept, token_losses, 0.0)
        metrics.sums["off_policy_masked_frac"] = _count(~kept, mask)
    if inputs.policy_mask is not None:
        token_losses = jnp.where(inputs.policy_mask, token_losses, 0.0)
    if terms.correction is not None and not loss.uses_correction:
        token_losses = token_losses * terms.correction
    if inputs.ref_logp is not None:
        kl, corrected = _kl(terms, _masked(inputs.ref_logp, mask), settings)
        metrics.sums["kl"] = jnp.sum(corrected if in_trl else kl, where=mask)
        token_losses = token_losses + settings.beta * corrected
    total = aggregate(token_losses, mask, counts, settings, loss.aggregation)
    if settings.entropy_bonus:
        total = total - entropy_coef * jnp.sum(entropy, where=mask) / counts.num_tokens
    return total, metrics


def old_logprobs(logp: Float[Array, "B T"], inputs: LossInputs) -> Float[Array, "B T"]:
    """Returns log-probs under the policy at the start of each row's rollout; `logp` itself where that is the same."""
    logp = lax.stop_gradient(logp)
    return logp if inputs.old_logp is None else jnp.where(jnp.isnan(inputs.old_logp), logp, inputs.old_logp)


def zero_metrics(settings: ObjectiveSettings) -> MetricSums:
    """Returns the metrics of no rows, with the names that `policy_objective` reports under these settings.

    Raises:
        ValueError: the settings name a loss or an estimator that does not exist, or that returns the wrong shape.
    """

    def of_two_rows() -> MetricSums:
        token = jnp.zeros((2, 3))
        ref_logp = token if settings.has_kl_loss else None
        sampler_logp = token if settings.rollout_correction != "none" else None
        inputs = LossInputs(token, token > 0, token, None, ref_logp, sampler_logp)
        counts = Denominators(jnp.float32(1.0), jnp.float32(1.0))
        return policy_objective(token, token, inputs, counts, settings)[1]

    return zeros_like(jax.eval_shape(of_two_rows))


def _masked(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    # masked values have no effect, not even as NaN in a gradient
    return jnp.where(mask, x, 0.0)


def _terms(
    logp: Float[Array, "B T"], entropy: Float[Array, "B T"], inputs: LossInputs, settings: ObjectiveSettings
) -> TokenTerms:
    mask = inputs.mask
    old_logp = _masked(old_logprobs(logp, inputs), mask)
    log_ratio = logp - old_logp
    correction = None
    if inputs.sampler_logp is not None:
        correction = rollout_correction(old_logp, _masked(inputs.sampler_logp, mask), mask, settings)
    ratio = RATIOS[settings.importance_sampling_level](log_ratio, mask)
    advantage = _masked(inputs.advantages, mask)
    return TokenTerms(logp, log_ratio, ratio, advantage, mask, lax.stop_gradient(entropy), correction)


def _kl(
    terms: TokenTerms, ref_logp: Float[Array, "B T"], settings: ObjectiveSettings
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Estimates the KL at each token, without and with the bias correction that the settings ask for.

    Raises:
        ValueError: the estimator does not return the shape [B, T].
    """
    estimator = find_estimator(settings.kl_estimator)
    kl = estimator(terms.logp, ref_logp)
    if jnp.shape(kl) != terms.mask.shape:
        raise ValueError(
            f"kl_estimator {reference_to(estimator)!r} must return an estimate for each token, [B, T] = "
            f"{list(terms.mask.shape)}, got {list(jnp.shape(kl))}"
        )
    return kl, bias_corrected(kl, terms.ratio, estimator) if settings.use_bias_correction_kl else kl


def _count(tokens: Bool[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    return jnp.sum(tokens & mask).astype(jnp.float32)
