"""The settings of the objective, hashable: the jitted step is specialized on them. Imports no jax."""

from dataclasses import dataclass
from typing import Literal

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
UNCLIPPED: tuple[LossType, ...] = ("cispo", "sapo", "vespo")  # for which `delta` means nothing
# Whose losses sum over tokens, so that one ratio per completion counts as often as it has tokens.
WEIGHTED_BY_LENGTH: tuple[LossType, ...] = ("bnpo", "dr_grpo", "dapo", "cispo")
ImportanceSamplingLevel = Literal["token", "sequence"]
KLEstimator = Literal["k2", "k3"]
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
    """What `policy_objective` computes. The fields are `GRPOConfig`'s of the same names.

    Attributes:
        loss_type: the per-token loss and its aggregation (`losses.LOSSES`, `aggregation.ROW_WEIGHTS`).
        importance_sampling_level: one ratio per token, or one per completion (GSPO).
        epsilon: the ratio is clipped to at least 1 - epsilon.
        epsilon_high: and to at most 1 + epsilon_high; cispo caps it at epsilon_high itself. None takes epsilon.
        delta: upper bound of the unclipped ratio (two-sided clipping); None for none.
        sapo_temperature_pos: steepness of sapo's gate where the advantage is positive.
        sapo_temperature_neg: and where it is not.
        vespo_k_pos: exponent of vespo's weight where the advantage is not negative.
        vespo_lambda_pos: and its decay.
        vespo_k_neg: exponent where the advantage is negative.
        vespo_lambda_neg: and its decay.
        beta: weight of the KL to the reference; 0 needs no reference.
        kl_estimator: k2 or k3 (`kl.ESTIMATORS`).
        use_bias_correction_kl: multiply the estimate by the ratio, which makes k3's gradient exact.
        off_policy_mask_threshold: rows with a negative advantage that drifted further leave the policy loss; None
            keeps all.
        rollout_correction: how the loss is weighted by policy over sampler (`correction`).
        rollout_correction_min: lower bound of that weight; None for none.
        rollout_correction_max: upper bound of that weight; None for none.
        entropy_bonus: the loss has an entropy term.
        router_aux_loss_coef: weight of a mixture of experts' load-balancing loss; None takes the model's own.
        temperature: of the distribution that log-probabilities are taken from.
        max_completion_length: dr_grpo's constant denominator per row.
        metric_definitions: "trl" reports the KL after its correction, and averages what a row has one value of over
            rows; "groupax" reports the KL itself, and averages over tokens.
    """

    loss_type: LossType = "dapo"
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
    kl_estimator: KLEstimator = "k3"
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
        """`epsilon_high`, or what stands in for it."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high
