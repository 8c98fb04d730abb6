"""EasyDeL's `GRPOConfig` and its translation to a native config."""

from typing import Any, ClassVar

from groupax.compat.easydel.fields import ALIASES, DEFAULTS, INERT, REFUSED
from groupax.compat.easydel.names import SCHEDULES, EasyDeLOptimizers, named
from groupax.compat.fields import Fields, ForeignConfig, as_native, matching_eval_sampling, scale_rewards
from groupax.settings.fields import nearest

# Settings with the same name and meaning in groupax.
SAME = (
    "seed",
    "num_iterations",
    "max_prompt_length",
    "temperature",
    "top_p",
    "repetition_penalty",
    "loss_type",
    "beta",
    "epsilon",
    "epsilon_high",
    "delta",
    "importance_sampling_level",
    "mask_truncated_completions",
    "top_entropy_quantile",
    "sync_ref_model",
    "ref_model_mixup_alpha",
    "ref_model_sync_steps",
    "learning_rate",
    "warmup_steps",
    "warmup_ratio",
    "weight_decay",
    "save_total_limit",
    "save_optimizer_state",
    "do_last_save",
    "weight_distribution_log_steps",
)
# Names in `extra_optimizer_kwargs`, with those of groupax.
OPTIMIZER_KWARGS = {"b1": "adam_beta1", "b2": "adam_beta2", "eps": "adam_epsilon"}


class GRPOConfig(ForeignConfig):
    """EasyDeL's config. A setting without effect in groupax is accepted with a warning that gives the reason.

    Raises:
        TypeError: A setting is unknown.
        ValueError: A setting cannot be honoured.
    """

    FIELDS: ClassVar[Fields] = Fields("EasyDeL", DEFAULTS, INERT, ALIASES, REFUSED)

    def to_native(self) -> Any:
        """Returns the native config.

        Raises:
            ValueError: A setting is not supported by groupax.
        """
        settings = {name: getattr(self, name) for name in SAME}
        settings |= {
            "output_dir": f"{str(self.save_directory or 'EasyDeL-Checkpoints').rstrip('/')}/{self.model_name}",
            "max_completion_length": self._completion_length(),
            "chat_template_kwargs": dict(self.chat_template_kwargs or {}),
            "num_train_epochs": self.num_train_epochs,
            "max_steps": self.max_training_steps or -1,
            "prompts_per_step": self.total_batch_size,
            "num_generations": self.num_return_sequences,
            "prompt_order": "shuffled" if self.shuffle_train_dataset else "dataset",
            "prompt_overflow": "truncate_left",
            "top_k": self.top_k or 0,
            "min_p": self.min_p or 0.0,
            "use_bias_correction_kl": False,
            "scale_rewards": scale_rewards(self.scale_rewards),
            "reward_weights": None if self.reward_weights is None else tuple(self.reward_weights),
            "optimizer": named(self.optimizer, EasyDeLOptimizers, "optimizer"),
            "lr_scheduler_type": SCHEDULES[named(self.scheduler, SCHEDULES, "scheduler")],
            "learning_rate_end": self.learning_rate_end or 0.0,
            "max_grad_norm": self.clip_grad or 0.0,
            "eval_steps": self.evaluation_steps or 0,
            "save_steps": self.save_steps or 0,
            "save_interval_minutes": self.save_interval_minutes or 0.0,
            "resume": "auto" if self.resume_if_possible else "never",
            "logging_steps": self.log_steps,
            "progress_bar": self.progress_bar_type,
            "report_to": ("wandb",) if self.use_wandb else (),
            "run_name": self.wandb_name or self.model_name,
            "project": f"EasyDeL-{self.model_name}",
            "track_memory": bool(self.track_memory),
        }
        settings |= self._optimizer_settings()
        return as_native(settings | matching_eval_sampling(settings, self.num_return_sequences))

    def _completion_length(self) -> int:
        """Returns the longest completion; without one what `max_length` leaves.

        Raises:
            ValueError: Prompts and completions can be longer than `max_length`.
        """
        if self.max_length is None:
            return self.max_completion_length
        left = self.max_length - self.max_prompt_length
        longest = self.given.get("max_completion_length", left)
        if left < 1 or longest > left:
            raise ValueError(
                f"max_length {self.max_length} is too short for max_prompt_length {self.max_prompt_length} and "
                f"max_completion_length {self.max_completion_length}"
            )
        return longest

    def _optimizer_settings(self) -> dict[str, Any]:
        """Returns the native settings for `extra_optimizer_kwargs`.

        Raises:
            ValueError: One of them is not a setting of groupax.
        """
        given = dict(self.extra_optimizer_kwargs or {})
        for name in given:
            if name not in OPTIMIZER_KWARGS:
                raise ValueError(
                    f"extra_optimizer_kwargs has {name!r}; groupax knows {', '.join(OPTIMIZER_KWARGS)}"
                    f"{nearest(name, OPTIMIZER_KWARGS)}"
                )
        return {OPTIMIZER_KWARGS[name]: value for name, value in given.items()}
