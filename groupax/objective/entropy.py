"""The weight of the entropy bonus, fixed or adaptive. Imports no jax."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EntropyControl:
    """Settings of the entropy bonus. The fields are `GRPOConfig`'s of the same names.

    Attributes:
        entropy_coef: weight of the mean token entropy in the loss; with `use_adaptive_entropy` its initial value.
        use_adaptive_entropy: whether to change the weight after every optimizer step.
        entropy_coef_min: lower bound of the weight.
        entropy_coef_max: upper bound of the weight.
        entropy_coef_delta: change of the weight per step.
        entropy_target: mean token entropy to hold, in nats.
    """

    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    entropy_coef_delta: float = 0.005
    entropy_target: float = 0.2

    @property
    def active(self) -> bool:
        """Returns whether the loss has an entropy term."""
        return self.entropy_coef != 0 or self.use_adaptive_entropy


@dataclass(frozen=True)
class EntropyState:
    """The state of the entropy bonus between steps.

    Attributes:
        coef: weight of the bonus.
        last_entropy: mean token entropy of the last step; None before the first.
    """

    coef: float
    last_entropy: float | None = None


def applied_coef(state: EntropyState, control: EntropyControl) -> float:
    """Returns the weight of this step's bonus: if adaptive, 0 while the last step's entropy was above the target."""
    above = state.last_entropy is not None and state.last_entropy > control.entropy_target
    return 0.0 if control.use_adaptive_entropy and above else state.coef


def next_entropy_state(state: EntropyState, control: EntropyControl, entropy: float) -> EntropyState:
    """Raises the coefficient by delta after a step with an entropy at or below the target, and lowers it otherwise.

    Source: Skywork-OR1, arXiv:2505.22312; there the step's own entropy gates it, here the last step's.
    """
    if not control.use_adaptive_entropy:
        return EntropyState(state.coef, entropy)
    change = control.entropy_coef_delta if entropy <= control.entropy_target else -control.entropy_coef_delta
    coef = min(max(state.coef + change, control.entropy_coef_min), control.entropy_coef_max)
    return EntropyState(coef, entropy)
