"""The loss of each token, before aggregation.

A new variant is a function of `Terms` and the settings that returns [B, T], entered in `LOSSES`, with its
aggregation entered in `aggregation.ROW_WEIGHTS` and its name in `settings.LossType`.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from groupax.objective.ratios import LOG_RATIO_LIMIT, clamp_log_ratio
from groupax.parallel.pytree import pytree
from groupax.settings.objective import ObjectiveSettings


@pytree
class Terms:
    """What a policy loss may look at.

    Attributes:
        logp: log-probability of each sampled token under the policy; the gradient flows through it.
        log_ratio: to the policy at the start of the rollout, per token, not clamped.
        ratio: the importance ratio, per token or per row, differentiable (see `ratios`).
        advantage: of each row, [B, 1].
        mask: which tokens count.
        correction: weight of policy over sampler (see `correction`); None without one.
    """

    logp: Float[Array, "B T"]
    log_ratio: Float[Array, "B T"]
    ratio: Float[Array, "B T"]
    advantage: Float[Array, "B 1"]
    mask: Bool[Array, "B T"]
    correction: Float[Array, "B T"] | None = None


def clipped_surrogate(terms: Terms, settings: ObjectiveSettings) -> Float[Array, "B T"]:
    """-min(min(w, delta) A, clip(w, 1 - epsilon, 1 + epsilon_high) A).

    Source: arXiv:2402.03300, eq. 3; a higher upper bound: DAPO, arXiv:2503.14476, eq. 10; delta bounds the loss of
    tokens with negative advantage, whose ratio is otherwise unbounded: INTELLECT-2, arXiv:2505.07291, section 3.4.
    """
    bounded = terms.ratio if settings.delta is None else jnp.minimum(terms.ratio, settings.delta)
    clipped = jnp.clip(terms.ratio, 1.0 - settings.epsilon, 1.0 + settings.upper_epsilon)
    return -jnp.minimum(bounded * terms.advantage, clipped * terms.advantage)


def capped_reinforce(terms: Terms, settings: ObjectiveSettings) -> Float[Array, "B T"]:
    """-sg(min(w, epsilon_high)) A logp: every token keeps its gradient, its weight is capped.

    Source: CISPO, arXiv:2506.13585, section 3.1; its lower bound, which the paper sets out of reach, is left out.
    """
    weight = lax.stop_gradient(jnp.minimum(terms.ratio, settings.upper_epsilon))
    return -weight * terms.advantage * terms.logp


def soft_gate(terms: Terms, settings: ObjectiveSettings) -> Float[Array, "B T"]:
    """-(4 / tau) sigmoid(tau (w - 1)) A, tau by the advantage's sign: clipping that fades in.

    Source: SAPO, arXiv:2511.20347.
    """
    tau = jnp.where(terms.advantage > 0, settings.sapo_temperature_pos, settings.sapo_temperature_neg)
    return -jax.nn.sigmoid(tau * (terms.ratio - 1.0)) * (4.0 / tau) * terms.advantage


def gamma_weight(terms: Terms, settings: ObjectiveSettings) -> Float[Array, "B 1"]:
    """phi = exp(lambda + k log W - lambda W), 1 at W = 1, with W the ratio of the whole sequence: a product, no mean.

    k and lambda go by the advantage's sign. Where there is a rollout correction it is part of W.
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


def gamma_weighted_reinforce(terms: Terms, settings: ObjectiveSettings) -> Float[Array, "B T"]:
    """-phi A logp, with `gamma_weight` as phi.

    Source: VESPO, arXiv:2602.10693.
    """
    return -gamma_weight(terms, settings) * terms.advantage * terms.logp


_SMALLEST_WEIGHT = 1e-8

# By `loss_type`.
LOSSES: dict[str, Callable[[Terms, ObjectiveSettings], Array]] = {
    "grpo": clipped_surrogate,
    "bnpo": clipped_surrogate,
    "dr_grpo": clipped_surrogate,
    "dapo": clipped_surrogate,
    "luspo": clipped_surrogate,
    "cispo": capped_reinforce,
    "sapo": soft_gate,
    "vespo": gamma_weighted_reinforce,
}
