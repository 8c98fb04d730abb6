"""The settings of the objective, hashable: the jitted step is specialized on them. Imports no jax."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

ClippedLossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]  # which `epsilon` and `delta` clip
LossType = Literal[ClippedLossType, "cispo", "sapo", "vespo"]
CLIPPED: tuple[str, ...] = get_args(ClippedLossType)
UNCLIPPED: tuple[str, ...] = tuple(name for name in get_args(LossType) if name not in CLIPPED)
# Losses that are summed over tokens, so that one ratio per completion counts once for each of its tokens.
WEIGHTED_BY_LENGTH: tuple[LossType, ...] = ("bnpo", "dr_grpo", "dapo", "cispo")
ImportanceSamplingLevel = Literal["token", "sequence"]
KLEstimator = Literal["k2", "k3"]
AdvantageEstimator = Literal["grpo"]
MetricDefinitions = Literal["groupax", "trl"]
ScaleRewards = Literal["group", "batch", "none"]
MultiObjectiveAggregation = Literal["sum_then_normalize", "normalize_then_sum"]
RolloutCorrection = Literal[
    "none",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "sequence_sum_truncate",
    "sequence_sum_mask",
]


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """The settings of `policy_objective`. The fields are `GRPOConfig`'s of the same names.

    Attributes:
        loss_type: a name of `losses.LOSSES`, a "module:attribute" reference, a function or a `losses.Loss`.
        importance_sampling_level: one importance ratio per token, or one per completion (GSPO).
        epsilon: lower clipping range: the ratio is clipped to at least 1 - epsilon.
        epsilon_high: upper clipping range: the ratio is clipped to at most 1 + epsilon_high. cispo caps the ratio at
            epsilon_high itself. None takes epsilon.
        delta: upper bound of the ratio for negative advantages (two-sided clipping); None for none.
        sapo_temperature_pos: steepness of sapo's gate for positive advantages.
        sapo_temperature_neg: steepness of sapo's gate for the others.
        vespo_k_pos: exponent of vespo's weight for advantages that are not negative.
        vespo_lambda_pos: decay of vespo's weight for advantages that are not negative.
        vespo_k_neg: exponent of vespo's weight for negative advantages.
        vespo_lambda_neg: decay of vespo's weight for negative advantages.
        beta: weight of the KL to the reference; 0 needs no reference.
        kl_estimator: a name of `kl.ESTIMATORS`, a "module:function" reference or a function.
        use_bias_correction_kl: multiply the estimate by the ratio, which makes k3's gradient exact.
        off_policy_mask_threshold: mean fall of the log-prob beyond which rows with a negative advantage leave the
            policy loss; None keeps all.
        rollout_correction: level and kind of the weight of policy over sampler (see `correction`).
        rollout_correction_min: lower bound of that weight; None for none.
        rollout_correction_max: upper bound of that weight; None for none.
        entropy_bonus: whether the loss has an entropy term.
        router_aux_loss_coef: weight of the load-balancing loss of a mixture of experts; None takes the model's own.
        temperature: of the distribution that log-probs are taken from.
        max_completion_length: dr_grpo's constant denominator per row.
        metric_definitions: "trl" reports the KL after its correction and averages values per row over rows;
            "groupax" reports the KL itself and averages over tokens.
    """

    loss_type: LossType | str | Callable[..., Any] = "dapo"
    importance_sampling_level: ImportanceSamplingLevel = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    beta: float = 0.0
    kl_estimator: KLEstimator | str | Callable[..., Any] = "k3"
    use_bias_correction_kl: bool = True
    off_policy_mask_threshold: float | None = None
    rollout_correction: RolloutCorrection = "none"
    rollout_correction_min: float | None = None
    rollout_correction_max: float | None = 3.0
    entropy_bonus: bool = False
    router_aux_loss_coef: float | None = None
    temperature: float = 1.0
    max_completion_length: int = 256
    metric_definitions: MetricDefinitions = "groupax"

    @property
    def upper_epsilon(self) -> float:
        """Returns `epsilon_high`, or `epsilon` where it is not set."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high
