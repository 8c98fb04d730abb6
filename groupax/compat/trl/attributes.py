"""Attributes of TRL's trainer that functions, callbacks and subclasses of scripts read."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from groupax.compat import hf
from groupax.compat.trl.reports import Reports
from groupax.compat.trl.tensors import high_entropy_mask, off_policy_mask
from groupax.events import Event, RolloutScored
from groupax.models.lora import count_params
from groupax.settings.fields import nearest
from groupax.training.step import router_loss_coef
from groupax.types import Rollout

# Settings that TRL's trainer also has as attributes.
FROM_ARGS = (
    "beta",
    "chat_template_kwargs",
    "importance_sampling_level",
    "log_completions",
    "loss_type",
    "mask_truncated_completions",
    "max_completion_length",
    "max_tool_calling_iterations",
    "min_p",
    "multi_objective_aggregation",
    "num_generations",
    "num_iterations",
    "off_policy_mask_threshold",
    "repetition_penalty",
    "scale_rewards",
    "shuffle_dataset",
    "temperature",
    "top_entropy_quantile",
    "top_k",
    "top_p",
    "use_adaptive_entropy",
    "use_vllm",
    "vllm_mode",
)


class LastRollout:
    """A listener that remembers the completions of the last rollout."""

    def __init__(self) -> None:
        self.rollouts: Sequence[Rollout] = ()

    def __call__(self, event: Event) -> None:
        """Remembers the completions of a rollout."""
        if isinstance(event, RolloutScored):
            self.rollouts = [rollout for group in event.groups for rollout in group]

    def as_columns(self) -> dict[str, Any]:
        """Returns the completions in the form of TRL's log of completions."""
        extra: dict[str, list[Any]] = {}
        rewards: dict[str, list[float]] = {}
        for rollout in self.rollouts:
            for name, value in rollout.extra.items():
                extra.setdefault(name, []).append(value)
            for name, reward in rollout.rewards.items():
                rewards.setdefault(name, []).append(float("nan") if reward is None else float(reward))
        return {
            "images": [],
            "prompt": [rollout.prompt for rollout in self.rollouts],
            "completion": [rollout.completion for rollout in self.rollouts],
            "rewards": rewards,
            "advantages": [rollout.advantage for rollout in self.rollouts],
            "extra": extra,
        }


class Attributes(Reports):
    """The attributes of a trainer.

    Attributes:
        native: The native trainer.
        reward_processing_classes: Tokenizers of the reward models, one per reward function; None for the model's own.
    """

    native: Any
    reward_processing_classes: list[Any]
    _last_rollout: LastRollout

    def __getattr__(self, name: str) -> Any:
        if name not in FROM_ARGS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{nearest(name, FROM_ARGS)}")
        return getattr(self.args, name)

    @property
    def reward_func_names(self) -> list[str]:
        """The names of the rewards, those of environments last."""
        return [reward.name for reward in self.native.rewards]

    @property
    def reward_weights(self) -> np.ndarray:
        """The weights of the rewards."""
        return self.native.reward_weights

    @property
    def num_generations_eval(self) -> int:
        """The number of completions of a prompt in evaluations."""
        return self.native.args.eval_num_generations

    @property
    def epsilon_low(self) -> float:
        """The lower clipping range."""
        return self.args.epsilon

    @property
    def epsilon_high(self) -> float:
        """The upper clipping range."""
        return self.args.epsilon if self.args.epsilon_high is None else self.args.epsilon_high

    @property
    def ref_model(self) -> hf.CausalLM | None:
        """The reference as it is now; None without `beta`, and for an adapter, whose reference is its base."""
        learner = self.native.learner
        if learner.reference is None or learner.is_adapter:
            return None
        return hf.CausalLM(replace(self.native.model, params=learner.reference))

    @property
    def entropy_coef(self) -> float:
        """The coefficient of the entropy bonus for the next step."""
        return self.native.learner.entropy.coef

    @property
    def aux_loss_enabled(self) -> bool:
        """True if the load-balancing loss of a mixture of experts is part of the loss."""
        learner = self.native.learner
        return bool(learner.config.experts) and router_loss_coef(learner.config, learner.settings.objective) != 0

    @property
    def _logs(self) -> Mapping[str, Any]:
        """The completions of the last rollout, as TRL's log of completions has them."""
        return self._last_rollout.as_columns()

    def get_num_trainable_parameters(self) -> int:
        """Returns the number of weights that are trained."""
        model = self.native.model
        return count_params(model.config, model.adapter and model.adapter.config)[0]

    def get_high_entropy_mask(self, entropies: Any, mask: Any, threshold: float) -> Any:
        """Returns which tokens have an entropy of at least a quantile of all of them, as PyTorch's booleans.

        Args:
            entropies: [B, T] entropies.
            mask: [B, T] tokens that count.
            threshold: The quantile.
        """
        return high_entropy_mask(self.accelerator, entropies, mask, threshold)

    @staticmethod
    def get_off_policy_mask(
        advantages: Any, per_token_logps: Any, sampling_per_token_logps: Any, mask: Any, off_policy_threshold: float
    ) -> Any:
        """Returns 1 for the rows that `off_policy_mask_threshold` keeps and 0 for the others, [B, 1].

        Args:
            advantages: [B, 1] advantages.
            per_token_logps: [B, T] log-probs under the policy.
            sampling_per_token_logps: [B, T] log-probs under the policy that sampled.
            mask: [B, T] tokens that count.
            off_policy_threshold: Largest mean drift of rows with a negative advantage.
        """
        return off_policy_mask(advantages, per_token_logps, sampling_per_token_logps, mask, off_policy_threshold)
