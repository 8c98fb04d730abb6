"""EasyDeL's `GRPOConfig` and its translation to a native config."""

from typing import Any, ClassVar

from groupax.compat.easydel.fields import ALIASES, DEFAULTS, INERT
from groupax.compat.easydel.names import SCHEDULES, EasyDeLOptimizers, named
from groupax.compat.fields import Fields, ForeignConfig, as_native, matching_eval_sampling, scale_rewards

# Settings with the same name and meaning in groupax.
SAME = (
    "seed",
    "num_iterations",
    "max_prompt_length",
    "max_completion_length",
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
    "sync_ref_model",
    "ref_model_mixup_alpha",
    "ref_model_sync_steps",
    "learning_rate",
    "warmup_steps",
    "weight_decay",
    "save_total_limit",
    "save_optimizer_state",
    "do_last_save",
    "weight_distribution_log_steps",
)


class GRPOConfig(ForeignConfig):
    """EasyDeL's config. A setting without effect in groupax is accepted with a warning that gives the reason."""

    FIELDS: ClassVar[Fields] = Fields("EasyDeL", DEFAULTS, INERT, ALIASES)

    def to_native(self) -> Any:
        """Returns the native config.

        Raises:
            ValueError: A setting is not supported by groupax.
        """
        settings = {name: getattr(self, name) for name in SAME}
        settings |= {
            "output_dir": f"{str(self.save_directory or 'EasyDeL-Checkpoints').rstrip('/')}/{self.model_name}",
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
        return as_native(settings | matching_eval_sampling(settings, self.num_return_sequences))
