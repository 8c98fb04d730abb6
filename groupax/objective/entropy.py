"""The weight of the entropy bonus, and the tokens of the highest entropy. Imports no jax."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from groupax.core.settings.objective import EntropySettings


@dataclass(frozen=True)
class EntropyState:
    """The state of the entropy bonus between steps."""

    coef: float  # weight of the bonus
    last_entropy: float | None = None  # mean token entropy of the last step; None before the first


def applied_coef(state: EntropyState, control: EntropySettings) -> float:
    """Returns the weight of this step's bonus: if adaptive, 0 while the last step's entropy was above the target."""
    above = state.last_entropy is not None and state.last_entropy > control.entropy_target
    return 0.0 if control.use_adaptive_entropy and above else state.coef


def next_entropy_state(state: EntropyState, control: EntropySettings, entropy: float) -> EntropyState:
    """Raises the coefficient by delta after a step with an entropy at or below the target, and lowers it otherwise.

    Source: Skywork-OR1, arXiv:2505.22312; there the step's own entropy gates it, here the last step's.
    """
    if not control.use_adaptive_entropy:
        return EntropyState(state.coef, entropy)
    change = control.entropy_coef_delta if entropy <= control.entropy_target else -control.entropy_coef_delta
    coef = min(max(state.coef + change, control.entropy_coef_min), control.entropy_coef_max)
    return EntropyState(coef, entropy)


def top_entropy_threshold(entropies: Sequence[Float[np.ndarray, "_"]], quantile: float) -> float:
    """Computes the (1 - quantile) quantile of all entropies; tokens at or above it take part in the policy loss.

    It is taken on the host over the whole optimizer step, so that neither the number of tokens nor their micro-batches
    matter.

    Returns:
        The threshold, linear between two tokens' entropies; minus infinity without tokens.

    Source: "Beyond the 80/20 rule", arXiv:2506.01939.
    """
    values = np.sort(np.concatenate([np.zeros(0), *entropies]))
    if values.size == 0:
        return float("-inf")
    # rounded, so that a rank that is an integer up to the last bit selects exactly that token
    rank = round((values.size - 1) * (1.0 - quantile), 9)
    below = int(rank)
    above = min(below + 1, values.size - 1)
    return float(values[below] + (rank - below) * (values[above] - values[below]))
