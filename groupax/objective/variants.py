"""Token losses in place of PPO's: those of CISPO, SAPO and VESPO, and the two of supervised fine-tuning.

All are functions from `TokenTerms` and the settings to [B, T], like `losses.ppo_clip_loss`, with their metrics.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from groupax.core.settings.objective import ObjectiveSettings
from groupax.objective.aggregation import LossMetrics, row_means
from groupax.objective.ratios import LOG_RATIO_LIMIT, TokenTerms, clamp_log_ratio

_SMALLEST_WEIGHT = 1e-8


def cispo_loss(terms: TokenTerms, settings: ObjectiveSettings) -> Float[Array, "B T"]:
    """Computes -sg(min(w, epsilon_high)) A logp: every token keeps its gradient, its weight is capped.

    Source: CISPO, arXiv:2506.13585, section 3.1; its lower bound, which the paper sets out of reach, is left out.
    """
    weight = lax.stop_gradient(jnp.minimum(terms.ratio, settings.upper_epsilon))
    return -weight * terms.advantage * terms.logp


def cispo_metrics(terms: TokenTerms, settings: ObjectiveSettings) -> LossMetrics:
    """Returns the share of tokens with a positive advantage and a capped weight."""
    return {"cispo_clip_ratio": (terms.ratio > settings.upper_epsilon) & (terms.advantage > 0)}


def sapo_loss(terms: TokenTerms, settings: ObjectiveSettings) -> Float[Array, "B T"]:
    """Computes -(4 / tau) sigmoid(tau (w - 1)) A, tau by the sign of the advantage: clipping that fades in.

    Source: SAPO, arXiv:2511.20347.
    """
    tau = jnp.where(terms.advantage > 0, settings.sapo_temperature_pos, settings.sapo_temperature_neg)
    return -jax.nn.sigmoid(tau * (terms.ratio - 1.0)) * (4.0 / tau) * terms.advantage


def vespo_weight(terms: TokenTerms, settings: ObjectiveSettings) -> Float[Array, "B T"]:
    """Computes phi = exp(lambda + k log W - lambda W), where W is the ratio of the whole sequence: a product, no mean.

    phi is 1 at W = 1. The sign of a token's advantage chooses its k and lambda. A rollout correction is a factor of W.
    """
    log_weight = jnp.sum(clamp_log_ratio(terms.log_ratio), axis=-1, keepdims=True, where=terms.mask)
    if terms.correction is not None:
        log_correction = jnp.log(jnp.maximum(terms.correction, _SMALLEST_WEIGHT))
        if settings.rollout_correction.startswith("sequence_sum"):  # each token has the sum of its row
            log_weight = log_weight + log_correction[:, :1]
        else:
            log_weight = log_weight + jnp.sum(log_correction, axis=-1, keepdims=True, where=terms.mask)
    log_weight = lax.stop_gradient(jnp.clip(log_weight, math.log(_SMALLEST_WEIGHT), LOG_RATIO_LIMIT))
    positive = terms.advantage >= 0
    k = jnp.where(positive, settings.vespo_k_pos, settings.vespo_k_neg)
    decay = jnp.where(positive, settings.vespo_lambda_pos, settings.vespo_lambda_neg)
    return jnp.exp(decay + k * log_weight - decay * jnp.exp(log_weight))


def vespo_loss(terms: TokenTerms, settings: ObjectiveSettings) -> Float[Array, "B T"]:
    """Computes -phi A logp, where phi is `vespo_weight`.

    Source: VESPO, arXiv:2602.10693.
    """
    return -vespo_weight(terms, settings) * terms.advantage * terms.logp


def vespo_metrics(terms: TokenTerms, settings: ObjectiveSettings) -> LossMetrics:
    """Returns the weight of each token, or with TRL's definitions the mean of each row's under TRL's name."""
    weight = vespo_weight(terms, settings)
    if settings.metric_definitions == "trl":
        return {"vespo/phi_seq_mean": row_means(weight, terms.mask)}
    return {"vespo/phi_mean": weight}


def nll_loss(terms: TokenTerms, settings: ObjectiveSettings) -> Float[Array, "B T"]:
    """Computes -log p."""
    del settings
    return -terms.logp


def dft_loss(terms: TokenTerms, settings: ObjectiveSettings) -> Float[Array, "B T"]:
    """Computes -sg(p) log p.

    Source: Dynamic Fine-Tuning, arXiv:2508.05629.
    """
    del settings
    return -lax.stop_gradient(jnp.exp(terms.logp)) * terms.logp
