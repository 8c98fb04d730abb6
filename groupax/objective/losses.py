"""The loss of each token, before aggregation.

A new variant is a function of `Terms` and the settings that returns [B, T], entered in `LOSSES`, with its
aggregation entered in `aggregation.ROW_WEIGHTS` and its name in `settings.LossType`.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from groupax.objective.settings import ObjectiveSettings
from groupax.pytree import pytree


@pytree
class Terms:
    """What a policy loss may look at.

    Attributes:
        logp: log-probability of each sampled token under the policy; the gradient flows through it.
        ratio: the importance ratio to the sampling policy, differentiable (see `ratios`).
        advantage: of each row, [B, 1].
        mask: which tokens count.
    """

    logp: Float[Array, "B T"]
    ratio: Float[Array, "B T"]
    advantage: Float[Array, "B 1"]
    mask: Bool[Array, "B T"]


def clipped_surrogate(terms: Terms, settings: ObjectiveSettings) -> Float[Array, "B T"]:
    """-min(min(w, delta) A, clip(w, 1 - epsilon, 1 + epsilon_high) A).

    Source: arXiv:2402.03300, eq. 3; a higher upper bound: DAPO, arXiv:2503.14476, eq. 10; delta bounds the loss of
    tokens with negative advantage, whose ratio is otherwise unbounded: INTELLECT-2, arXiv:2505.07291, section 3.4.
    """
    bounded = terms.ratio if settings.delta is None else jnp.minimum(terms.ratio, settings.delta)
    clipped = jnp.clip(terms.ratio, 1.0 - settings.epsilon, 1.0 + settings.epsilon_high)
    return -jnp.minimum(bounded * terms.advantage, clipped * terms.advantage)


# By `loss_type`.
LOSSES: dict[str, Callable[[Terms, ObjectiveSettings], Array]] = {
    "grpo": clipped_surrogate,
    "bnpo": clipped_surrogate,
    "dr_grpo": clipped_surrogate,
    "dapo": clipped_surrogate,
}
