"""The settings of the objective, hashable: the jitted step is specialized on them. Imports no jax."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from groupax.core.settings.fields import like, ranged, setting, shown
from groupax.core.settings.rollouts import PromptSettings
from groupax.core.settings.run import MetricDefinitions, ReportingSettings
from groupax.core.settings.sampling import RolloutSamplingSettings
from groupax.core.types import Truncation

ClippedLossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]  # which `epsilon` and `delta` clip
LossType = Literal[ClippedLossType, "cispo", "sapo", "vespo"]
CLIPPED: tuple[str, ...] = get_args(ClippedLossType)
UNCLIPPED: tuple[str, ...] = tuple(name for name in get_args(LossType) if name not in CLIPPED)
# Losses that are summed over tokens, so that one ratio per completion counts once for each of its tokens.
WEIGHTED_BY_LENGTH: tuple[LossType, ...] = ("bnpo", "dr_grpo", "dapo", "cispo")
ImportanceSamplingLevel = Literal["token", "sequence", "sequence_sum"]
KLEstimator = Literal["k2", "k3"]
AdvantageEstimator = Literal["grpo", "rloo"]
ScaleRewards = Literal["group", "batch", "none"]
MaskableEnd = Literal[Truncation, "parse_error"]
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
class LossSettings:
    """The loss of the policy. See docs/algorithm.md."""

    loss_type: LossType | str | Callable[..., Any] = "dapo"
    """Policy loss and aggregation of the token losses: a built-in name, or your own as "module:function",
    "module:function(option=1)", a function or a `Loss`. See docs/algorithm.md."""
    beta: float = ranged(0.0, 1e6, resume="fixed_zero")
    """Weight of the KL to the reference model; 0 loads no reference."""
    epsilon: float = ranged(0.2, 1e6)
    """Lower clipping range: the importance ratio is clipped to at least 1 - epsilon."""
    epsilon_high: float | None = ranged(None, 1e6)
    """Upper clipping range: the importance ratio is clipped to at most 1 + epsilon_high; None takes epsilon. cispo caps
    the ratio at epsilon_high itself."""
    delta: float | None = ranged(None, 1e6)
    """Upper bound of the importance ratio for negative advantages (two-sided clipping); None for none."""
    importance_sampling_level: ImportanceSamplingLevel = "token"
    """One importance ratio per token, or one per completion (GSPO). "sequence_sum" is the ratio of the probabilities of
    whole completions (RLOO), which GSPO takes to the power of one over the length."""
    sapo_temperature_pos: float = ranged(1.0, 1e6, low=1e-6)
    """Steepness of sapo's gate for positive advantages."""
    sapo_temperature_neg: float = ranged(1.05, 1e6, low=1e-6)
    """Steepness of sapo's gate for all other advantages."""
    vespo_k_pos: float = ranged(2.0, 1e3)
    """Exponent of vespo's weight for advantages that are not negative."""
    vespo_lambda_pos: float = ranged(3.0, 1e3)
    """Decay of vespo's weight for advantages that are not negative."""
    vespo_k_neg: float = ranged(3.0, 1e3)
    """Exponent of vespo's weight for negative advantages."""
    vespo_lambda_neg: float = ranged(2.0, 1e3)
    """Decay of vespo's weight for negative advantages."""
    kl_estimator: KLEstimator | str | Callable[..., Any] = "k3"
    """Estimator of the KL to the reference: k2, k3, or a function of the log-probs of policy and reference."""
    use_kl_in_reward: bool = False
    """Subtract beta times the KL of a completion from its reward, instead of adding the KL of each token to the loss.
    That KL is the sum of log(policy / reference) over the tokens, by the policy that sampled them."""
    use_bias_correction_kl: bool = True
    """Multiply the KL estimate by the importance ratio, which makes k3's gradient exact."""
    off_policy_mask_threshold: float | None = ranged(None, 1e6)
    """Mask completions with a negative advantage whose mean log-prob fell by more than this; None masks none."""
    rollout_correction: RolloutCorrection = "none"
    """Importance correction: weights the loss by policy over sampler, per token or per sequence, truncated or masked
    beyond the bounds."""
    rollout_correction_min: float | None = ranged(None, 1e6)
    """Lower bound of the weight of rollout_correction; None for none."""
    rollout_correction_max: float | None = ranged(3.0, 1e6, low=1e-6)
    """Upper bound of the weight of rollout_correction; None for none."""
    router_aux_loss_coef: float | None = ranged(None, 1e3)
    """Weight of the load-balancing loss of a mixture of experts; None takes that of the model's config.json."""

    @property
    def has_kl_loss(self) -> bool:
        """Returns whether the loss has a KL term."""
        return self.beta > 0 and not self.use_kl_in_reward

    @property
    def upper_epsilon(self) -> float:
        """Returns `epsilon_high`, or `epsilon` where it is not set."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def check(self) -> None:
        """Raises a ValueError for bounds that contradict each other."""
        if self.loss_type == "cispo" and self.epsilon_high is None:
            raise ValueError(
                f"for loss_type 'cispo' epsilon_high caps the ratio itself; it is not set, and epsilon = {self.epsilon}"
                " instead would weaken every on-policy token; set it, e.g. epsilon_high=5.0"
            )
        if self.delta is not None and self.loss_type in CLIPPED and not self.delta > 1 + self.upper_epsilon:
            raise ValueError(
                f"delta bounds the ratio of tokens with negative advantage far above the clipping at "
                f"{1 + self.upper_epsilon:g}, and on-policy ratios are 1; it is {self.delta}; set it, e.g. to 4.0"
            )
        low, high = self.rollout_correction_min, self.rollout_correction_max
        if low is not None and high is not None and low > high:
            raise ValueError(f"rollout_correction_min {low} is above rollout_correction_max {high}")


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings(LossSettings):
    """Everything that `policy_objective` depends on, hashable.

    Attributes:
        entropy_bonus: whether the loss has an entropy term.
        temperature: temperature of the distribution that log-probs are taken from.
        max_completion_length: constant denominator per row of dr_grpo.
        metric_definitions: definition of the metrics that TRL defines differently.
    """

    entropy_bonus: bool = False
    temperature: float = like(RolloutSamplingSettings, "temperature")
    max_completion_length: int = like(PromptSettings, "max_completion_length")
    metric_definitions: MetricDefinitions = like(ReportingSettings, "metric_definitions")


@dataclass(frozen=True, kw_only=True)
class EntropySettings:
    """The weight of the entropy bonus, fixed or adaptive."""

    entropy_coef: float = ranged(0.0, 1e3, low=-1e3)
    """Weight of the mean token entropy in the loss; the initial weight with use_adaptive_entropy."""
    use_adaptive_entropy: bool = False
    """Raise the weight while the entropy is below entropy_target, and lower it above."""
    entropy_coef_min: float = ranged(0.0, 1e3, low=-1e3)
    """Lower bound of the adaptive weight."""
    entropy_coef_max: float = ranged(1.0, 1e3, low=-1e3)
    """Upper bound of the adaptive weight."""
    entropy_coef_delta: float = ranged(0.005, 1e3)
    """Change of the adaptive weight per update."""
    entropy_target: float = ranged(0.2, 100)
    """Mean token entropy to hold, in nats; set it near the `entropy` of the first steps."""

    @property
    def has_entropy_bonus(self) -> bool:
        """Returns whether the loss has an entropy term."""
        return self.entropy_coef != 0 or self.use_adaptive_entropy

    def check(self) -> None:
        """Raises a ValueError if the bounds are reversed."""
        if self.entropy_coef_min > self.entropy_coef_max:
            raise ValueError(
                f"entropy_coef_min {self.entropy_coef_min} is above entropy_coef_max {self.entropy_coef_max}"
            )


@dataclass(frozen=True, kw_only=True)
class AdvantageSettings:
    """Advantages of completions."""

    advantage_estimator: AdvantageEstimator | str | Callable[..., Any] = "grpo"
    """Computes advantages from rewards: "grpo", by scale_rewards and multi_objective_aggregation, "rloo", against the
    mean of the group's other completions, or a function of the rewards [B, K], their weights [K] and num_generations
    that returns [B]."""
    scale_rewards: ScaleRewards = "group"
    """Divide advantages by the standard deviation of the rewards in the group, in the batch, or not at all."""
    multi_objective_aggregation: MultiObjectiveAggregation = "sum_then_normalize"
    """Normalize the sum of several rewards, or normalize each of them before the sum (GDPO)."""
    reward_weights: tuple[float, ...] | None = ranged(None, 1e6, low=-1e6)
    """One weight per reward function; None gives each the weight 1."""
    reward_clip_range: tuple[float, float] | None = ranged(None, 1e6, low=-1e6)
    """Lowest and highest weighted sum of a completion's rewards that advantages are computed from; None for any."""

    def check(self) -> None:
        """Raises a ValueError for settings that the estimator does not use."""
        for name in ("scale_rewards", "multi_objective_aggregation"):
            default = AdvantageSettings.__dataclass_fields__[name].default
            if self.advantage_estimator != "grpo" and getattr(self, name) != default:
                raise ValueError(
                    f"{name} {getattr(self, name)!r} is for advantage_estimator 'grpo', and it is "
                    f"{shown(self.advantage_estimator)}; leave {name} at {default!r}"
                )
        if self.multi_objective_aggregation == "normalize_then_sum" and self.scale_rewards != "group":
            raise ValueError(
                f"multi_objective_aggregation 'normalize_then_sum' normalizes by group and batch itself; leave "
                f"scale_rewards at 'group', got {self.scale_rewards!r}"
            )
        if self.reward_clip_range is not None:
            self._check_clip_range(self.reward_clip_range)

    def _check_clip_range(self, bounds: Sequence[float]) -> None:
        if len(bounds) != 2 or not bounds[0] < bounds[1]:
            raise ValueError(f"reward_clip_range must be a lower and a higher number, got {shown(tuple(bounds))}")
        if self.multi_objective_aggregation == "normalize_then_sum":
            raise ValueError(
                "reward_clip_range clips the sum of the rewards, and multi_objective_aggregation 'normalize_then_sum' "
                "normalizes each of them; leave one of them out"
            )


@dataclass(frozen=True, kw_only=True)
class MaskSettings:
    """Completions and tokens that are trained on."""

    mask_truncated_completions: bool | tuple[MaskableEnd, ...] = False
    """Mask completions in the loss that a limit ended, such as max_completion_length or max_turns; or only those with
    the listed ends. They still count in their group's mean."""
    masked_rows_in_denominator: bool = False
    """Divide the losses of grpo, sapo, dr_grpo and luspo by all rows, including those that mask_truncated_completions
    masks, as TRL does. By default they are divided by the other rows, so that masking does not weaken the step."""
    top_entropy_quantile: float = ranged(1.0, 1)
    """Train on this fraction of the tokens, those with the highest entropy; below 1 it costs a forward pass a step."""


@dataclass(frozen=True, kw_only=True)
class ReferenceSettings:
    """Updates of the reference model."""

    sync_ref_model: bool = False
    """Move the reference model towards the policy every ref_model_sync_steps updates."""
    ref_model_mixup_alpha: float = ranged(0.6, 1)
    """Weight of the policy in the new reference model."""
    ref_model_sync_steps: int = ranged(512, 10**9, low=1)
    """Updates between two moves of the reference model."""
    offload_reference: bool = setting(False, resume="free")
    """Keep the reference model in host memory and move it to the devices to score a rollout."""
