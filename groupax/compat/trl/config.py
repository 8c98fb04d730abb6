"""TRL's `GRPOConfig` and its translation to a native config."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from groupax.compat.arguments import arguments
from groupax.compat.fields import (
    EVAL_SAMPLING,
    as_native,
    interval_steps,
    matching_eval_sampling,
    parse_mapping,
    scale_rewards,
    warn,
)
from groupax.compat.trl.advice import warn_about_losses
from groupax.compat.trl.batches import TRLSchedule, trl_schedule
from groupax.compat.trl.fields import ALIASES, INERT, REFUSED, GRPOFields
from groupax.compat.trl.generation import generation_settings, vllm_settings
from groupax.compat.trl.optimizer import optimizer_settings
from groupax.compat.trl.run_settings import RunArguments
from groupax.settings.fields import shown

# Settings with the same name and meaning in groupax.
SAME = (
    "seed",
    "num_train_epochs",
    "max_steps",
    "num_generations",
    "num_iterations",
    "temperature",
    "repetition_penalty",
    "loss_type",
    "beta",
    "epsilon",
    "epsilon_high",
    "delta",
    "importance_sampling_level",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
    "use_bias_correction_kl",
    "sync_ref_model",
    "ref_model_mixup_alpha",
    "ref_model_sync_steps",
    "multi_objective_aggregation",
    "top_entropy_quantile",
    "off_policy_mask_threshold",
    "entropy_coef",
    "use_adaptive_entropy",
    "entropy_coef_min",
    "entropy_coef_max",
    "entropy_coef_delta",
    "entropy_target",
    "router_aux_loss_coef",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "log_completions",
    "max_prompt_length",
)
# TRL's settings behind native settings of another name, for error messages.
NAMES = {
    "prompts_per_step": "per_device_train_batch_size * gradient_accumulation_steps / num_generations",
    "updates_per_rollout": "steps_per_generation / gradient_accumulation_steps",
    "eval_num_generations": "num_generations_eval",
    **{f"eval_{name}": name for name in EVAL_SAMPLING},
    "learning_rate_end": "lr_scheduler_kwargs",
    "warmup_ratio": "warmup_steps below 1, or warmup_ratio",
    "rollout_correction_min": "vllm_importance_sampling_clip_min",
    "rollout_correction_max": "vllm_importance_sampling_clip_max",
    "decoding_tp": "vllm_tensor_parallel_size",
    "max_tool_turns": "max_tool_calling_iterations",
}
# TRL ends an episode at a malformed call and at a result that does not fit, and has no other limits than tokens.
EPISODES: dict[str, Any] = {
    "malformed_calls": "end",
    "overlong_results": "end",
    "max_turns": 10**5,
    "tool_timeout_s": 600.0,
}
# Settings that count completions or micro-batches; checked before they are multiplied.
COUNTS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
    "num_generations",
    "num_generations_eval",
    "per_device_eval_batch_size",
)
MAX_COUNT = 10**7


class Batches(NamedTuple):
    """The sizes that TRL's batch settings resolve to.

    Attributes:
        rows: Completions of a micro-batch, over all devices.
        accumulated: Micro-batches of an optimizer step.
        generated: Micro-batches of a generation.
    """

    rows: int
    accumulated: int
    generated: int


@arguments("TRL", INERT, REFUSED, ALIASES)
@dataclass
class GRPOConfig(GRPOFields, RunArguments):
    """TRL's config. A setting without effect in groupax is accepted with a warning that gives the reason.

    Raises:
        TypeError: A field is unknown.
        ValueError: A field cannot be honoured.
    """

    __repr__ = RunArguments.__repr__  # with what differs from the defaults only

    def batches(self, num_devices: int = 1) -> Batches:
        """Resolves the batch settings for a number of devices.

        Raises:
            ValueError: The settings are inconsistent.
        """
        for name in COUNTS:
            value = getattr(self, name)
            if value != self.FIELDS.defaults[name] and not (isinstance(value, int) and 1 <= value <= MAX_COUNT):
                raise ValueError(f"{name} must be a whole number between 1 and {MAX_COUNT:,}, got {shown(value)}")
        rows = self.per_device_train_batch_size * num_devices
        accumulated, generated = self.gradient_accumulation_steps, self.steps_per_generation
        if self.generation_batch_size is not None:
            if generated is not None:
                raise ValueError("generation_batch_size and steps_per_generation are both set; leave one of them out")
            if self.generation_batch_size % rows:
                raise ValueError(
                    f"generation_batch_size {self.generation_batch_size} must be a multiple of the completions of a "
                    f"micro-batch, {rows} (per_device_train_batch_size {self.per_device_train_batch_size} on "
                    f"{num_devices} devices)"
                )
            generated = self.generation_batch_size // rows
        if generated is None:
            generated = accumulated
            while rows * generated % self.num_generations:
                generated += accumulated
            if generated > accumulated:
                warn(
                    f"an optimizer step has {rows * accumulated} completions, which is not a multiple of "
                    f"num_generations {self.num_generations}: steps_per_generation is {generated}, so that "
                    f"{generated // accumulated} steps train on a generation"
                )
        if rows * generated % self.num_generations:
            raise ValueError(
                f"a generation has {rows * generated} completions ({rows} in each of {generated} micro-batches), which "
                f"is not a multiple of num_generations {self.num_generations}; per_device_train_batch_size counts "
                "completions"
            )
        return Batches(rows, accumulated, generated)

    def schedule(self, num_devices: int = 1) -> TRLSchedule:
        """Returns how rollouts become optimizer steps on this number of devices."""
        return trl_schedule(*self.batches(num_devices), self.num_generations, self.num_iterations)

    def to_native(self, num_devices: int = 1, num_prompts: int | None = None) -> Any:
        """Returns the native config.

        Args:
            num_devices: Number of devices that `per_device_train_batch_size` applies to.
            num_prompts: Number of prompts in the dataset; needed if evaluations or checkpoints happen every epoch.

        Raises:
            ValueError: A setting is not supported by groupax.
        """
        warn_about_losses(self)
        if self.off_policy_mask_threshold == 0:
            raise ValueError(
                "off_policy_mask_threshold=0 would mask completions by the rounding between sampling and training; set "
                "it above that, e.g. to 0.01, or leave it out"
            )
        rows, accumulated, generated = self.batches(num_devices)
        settings = {name: getattr(self, name) for name in SAME}
        settings |= {
            "masked_rows_in_denominator": True,
            "metric_definitions": "trl",
            "reward_scope": "rollout",
            "output_dir": self.output_dir,
            "prompts_per_step": max(1, round(rows * accumulated / self.num_generations)),  # see `schedule`
            "updates_per_rollout": max(1, round(generated / accumulated)),
            "prompt_order": "shuffled_by_torch" if self.shuffle_dataset else "dataset",
            "drop_last": True,
            "max_completion_length": self.max_completion_length,
            "chat_template_kwargs": parse_mapping(self.chat_template_kwargs, "chat_template_kwargs"),
            "prompt_overflow": "truncate_left" if self.max_prompt_length else "error",
            "top_k": self.top_k if self.top_k and self.top_k > 0 else 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "min_p": self.min_p or 0.0,
            "scale_rewards": scale_rewards(self.scale_rewards),
            "reward_weights": tuple(self.reward_weights)
            if isinstance(self.reward_weights, Sequence)
            else self.reward_weights,
            "max_grad_norm": self.max_grad_norm or 0.0,
            # a call or its result that ends an episode counts as finished there
            "mask_truncated_completions": ("length",) if self.mask_truncated_completions else False,
            **EPISODES,
            "max_tool_turns": self.max_tool_calling_iterations,
            **self.compute_settings(),
            **self.reporting_settings(),
            **optimizer_settings(self),
            **generation_settings(self),
            **vllm_settings(self),
        }
        settings |= matching_eval_sampling(settings, self.num_generations_eval or self.num_generations)
        if (self.entropy_coef or self.use_adaptive_entropy) and self.top_entropy_quantile < 1:
            warn(
                f"top_entropy_quantile={self.top_entropy_quantile} masks the policy loss; the entropy bonus is a mean "
                "over all loss tokens, where TRL takes it over the kept ones"
            )
        if self.top_entropy_quantile < 1 and accumulated > 1:
            warn(
                f"top_entropy_quantile={self.top_entropy_quantile} keeps tokens by a threshold of each optimizer step, "
                f"where TRL has one of each of its {accumulated} micro-batches"
            )
        if self.loss_type == "cispo" and self.epsilon_high is None:
            warn(
                f"loss_type 'cispo' without epsilon_high caps ratios at epsilon = {self.epsilon}, as TRL does, which "
                "scales the loss of on-policy tokens by that; set epsilon_high, e.g. to 5.0"
            )
            settings["epsilon_high"] = self.epsilon
        every = self.schedule(num_devices).num_steps(num_prompts, 1, -1) if num_prompts else 1
        settings["eval_steps"] = interval_steps(
            self.eval_strategy, self.eval_steps or self.logged_every(), every, "eval_strategy"
        )
        settings |= self.saving_settings(every)
        return as_native(settings, NAMES)
