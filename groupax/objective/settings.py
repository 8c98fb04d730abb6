"""The settings of the objective, hashable: the jitted step is specialized on them. Imports no jax."""

from dataclasses import dataclass
from typing import Literal

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo"]
ImportanceSamplingLevel = Literal["token", "sequence"]
KLEstimator = Literal["k2", "k3"]


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """What `policy_objective` computes.

    Attributes:
        loss_type: the per-token loss and its aggregation (`losses.LOSSES`, `aggregation.ROW_WEIGHTS`).
        importance_sampling_level: one ratio per token, or one per completion (GSPO).
        epsilon: the ratio is clipped to at least 1 - epsilon.
        epsilon_high: and to at most 1 + epsilon_high.
        delta: upper bound of the unclipped ratio (two-sided clipping); None for none.
        beta: weight of the KL to the reference; 0 needs no reference.
        kl_estimator: k2 or k3 (`kl.ESTIMATORS`).
        use_bias_correction_kl: multiply the estimate by the ratio, which makes k3's gradient exact.
        temperature: of the distribution that log-probabilities are taken from.
        max_completion_length: dr_grpo's constant denominator per row.
    """

    loss_type: LossType = "dapo"
    importance_sampling_level: ImportanceSamplingLevel = "token"
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    kl_estimator: KLEstimator = "k3"
    use_bias_correction_kl: bool = True
    temperature: float = 1.0
    max_completion_length: int = 256
