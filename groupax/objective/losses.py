"""The objective of one micro-batch: ratios, the loss of each token, correction, KL, aggregation and metrics.

A `Loss` is a function from `TokenTerms` and the settings to [B, T], with its aggregation and its metrics. `LOSSES` has
the built-in ones, one line each: PPO's clip, which is below, and `variants`. Any other one works by reference: see
"Your own loss" in docs/algorithm.md.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from groupax.core.settings.objective import ObjectiveSettings
from groupax.core.settings.references import bind, reference_to, resolve
from groupax.objective.aggregation import (
    Aggregation,
    Denominators,
    LossMetrics,
    MetricSums,
    RowMax,
    RowMin,
    aggregate,
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_norm,
    sum_metrics,
    token_mean,
    zeros_like,
)
from groupax.objective.ratios import (
    LOG_RATIO_LIMIT,
    RATIOS,
    TokenTerms,
    clip_ratio,
    kl_to_reference,
    on_policy_tokens,
    rollout_correction,
)
from groupax.objective.variants import cispo_loss, cispo_metrics, sapo_loss, vespo_loss, vespo_metrics
from groupax.parallel.pytree import pytree


def no_metrics(terms: TokenTerms, settings: ObjectiveSettings) -> LossMetrics:
    """Returns no metrics."""
    del terms, settings
    return {}


@dataclass(frozen=True)
class Loss:
    """A policy loss with its aggregation and its metrics.

    Attributes:
        token_loss: (terms, settings) -> the loss of each token, [B, T].
        aggregation: (lengths, counts, settings) -> the weight of each row's token losses, [B] (see `aggregation`).
        metrics: (terms, settings) -> metrics by name; values of shape [B, T] or [B] are averaged over loss tokens,
            and `RowMin` and `RowMax` are extremes over rows.
        uses_correction: whether `token_loss` takes `terms.correction` into account. Otherwise its losses are multiplied
            by it.
    """

    token_loss: Callable[..., Any]
    aggregation: Aggregation = token_mean
    metrics: Callable[..., LossMetrics] = no_metrics
    uses_correction: bool = False

    def __call__(self, terms: TokenTerms, settings: ObjectiveSettings) -> Array:
        """Computes the loss of each token.

        Raises:
            ValueError: it does not have the shape [B, T].
        """
        token_losses = self.token_loss(terms, settings)
        if jnp.shape(token_losses) != terms.mask.shape:
            raise ValueError(
                f"loss_type {reference_to(self.token_loss)!r} must return a loss for each token, [B, T] = "
                f"{list(terms.mask.shape)}, got {list(jnp.shape(token_losses))}; the aggregation comes afterwards"
            )
        return token_losses

    def bind(self, setting: str, options: Mapping[str, Any]) -> "Loss":
        """Returns the loss with options of its `token_loss` set, also for the metrics where they take them."""
        known = inspect.signature(self.metrics).parameters
        shared = {name: value for name, value in options.items() if name in known}
        return replace(
            self,
            token_loss=bind(setting, self.token_loss, options),
            metrics=bind(setting, self.metrics, shared) if shared else self.metrics,
        )

    def __str__(self) -> str:
        home = reference_to(self.token_loss)
        module = home.partition(":")[0]
        known = vars(sys.modules[module]) if module in sys.modules else {}
        name = next((name for name, value in known.items() if value is self), None)
        return f"{module}:{name}" if name else f"{home} by {reference_to(self.aggregation)}"


def ppo_clip_loss(terms: TokenTerms, settings: ObjectiveSettings) -> Float[Array, "B T"]:
    """Computes -min(min(w, delta) A, clip(w, 1 - epsilon, 1 + epsilon_high) A).

    Source: arXiv:2402.03300, eq. 3; a higher upper bound: DAPO, arXiv:2503.14476, eq. 10; delta bounds the loss of
    tokens with negative advantage, whose ratio is otherwise unbounded: INTELLECT-2, arXiv:2505.07291, section 3.4.
    """
    bounded = terms.ratio if settings.delta is None else clip_ratio(terms.ratio, 0.0, settings.delta)
    clipped = clip_ratio(terms.ratio, 1.0 - settings.epsilon, 1.0 + settings.upper_epsilon)
    return -jnp.minimum(bounded * terms.advantage, clipped * terms.advantage)


def ppo_clip_metrics(terms: TokenTerms, settings: ObjectiveSettings) -> LossMetrics:
    """Returns the share of tokens whose clipped term is the smaller one, which therefore get no gradient."""
    low = (terms.ratio < 1.0 - settings.epsilon) & (terms.advantage < 0)
    high = (terms.ratio > 1.0 + settings.upper_epsilon) & (terms.advantage > 0)
    return {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low | high,
        "clip_ratio/low_min": RowMin(low),
        "clip_ratio/high_max": RowMax(high),
    }


# By `loss_type`; `settings.objective.LossType` has the same names.
LOSSES: dict[str, Loss] = {
    "grpo": Loss(ppo_clip_loss, seq_mean_token_mean, ppo_clip_metrics),
    "bnpo": Loss(ppo_clip_loss, token_mean, ppo_clip_metrics),
    "dr_grpo": Loss(ppo_clip_loss, seq_mean_token_sum_norm, ppo_clip_metrics),
    "dapo": Loss(ppo_clip_loss, token_mean, ppo_clip_metrics),
    "luspo": Loss(ppo_clip_loss, seq_mean_token_sum, ppo_clip_metrics),
    "cispo": Loss(cispo_loss, token_mean, cispo_metrics),
    "sapo": Loss(sapo_loss, seq_mean_token_mean),
    "vespo": Loss(vespo_loss, token_mean, vespo_metrics, uses_correction=True),
}


def find_loss(loss_type: str | Callable[..., Any], losses: Mapping[str, Loss] = LOSSES) -> Loss:
    """Returns the loss that the setting `loss_type` names; a plain function is averaged over tokens.

    Raises:
        ValueError: there is no such loss, or it cannot be called with terms and settings.
    """
    found = resolve("loss_type", loss_type, losses, ("terms", "settings"))
    return found if isinstance(found, Loss) else Loss(found)


@pytree
class LossInputs:
    """The data of these rows apart from the policy's log-probs: numpy arrays as packed, jax arrays on the devices."""

    advantages: Float[Any, "B T"]  # advantage of each token
    mask: Bool[Any, "B T"]  # tokens that count: sampled ones, without those of rows that are left out
    rollout_logp: Float[Any, "B T"]  # log-probs by the engine, under the policy that sampled the tokens
    # log-probs by the trainer, under the policy at the start of the rollout; NaN in the rows of a rollout that the
    # current policy has sampled, whose ratio is exactly 1. None if all rows are of such a rollout
    old_logp: Float[Any, "B T"] | None = None
    ref_logp: Float[Any, "B T"] | None = None  # log-probs under the reference; None if the loss has no KL term
    # log-probs under the distribution that was sampled from; None without rollout correction
    sampler_logp: Float[Any, "B T"] | None = None
    policy_mask: Bool[Any, "B T"] | None = None  # tokens of the policy loss among those that count; None for all


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
        kl, corrected = kl_to_reference(logp, _masked(inputs.ref_logp, mask), terms.ratio, settings)
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


def _count(tokens: Bool[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    return jnp.sum(tokens & mask).astype(jnp.float32)
