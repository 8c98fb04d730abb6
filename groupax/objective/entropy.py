"""The weight of the entropy bonus, fixed or adaptive. Imports no jax."""

from dataclasses import dataclass

from groupax.settings.objective import EntropySettings


@dataclass(frozen=True)
class EntropyState:
    """The state of the entropy bonus between steps.

    Attributes:
        coef: weight of the bonus.
        last_entropy: mean token entropy of the last step; None before the first.
    """

    coef: float
    last_entropy: float | None = None


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
