"""EasyDeL's `GRPOConfig` and enums, as settings of groupax."""

from enum import StrEnum
from typing import Any

from groupax.compat.fields import Arguments, arguments, scale_rewards, warn
from groupax.core.settings.fields import nearest

EasyDeLOptimizers = StrEnum("EasyDeLOptimizers", "ADAMW ADAFACTOR LION MUON SGD")
EasyDeLSchedulers = StrEnum("EasyDeLSchedulers", "NONE LINEAR COSINE")
AttentionMechanisms = StrEnum(
    "AttentionMechanisms",
    "AUTO VANILLA FLASH_ATTN2 SPLASH RING CUDNN BLOCKWISE SDPA CUDA_FLASH_ATTN2 PAGED_ATTENTION",
)
EasyDeLGradientCheckPointers = StrEnum(
    "EasyDeLGradientCheckPointers", "NONE EVERYTHING_SAVEABLE NOTHING_SAVEABLE CHECKPOINT_DOTS"
)
SCHEDULES = {"none": "constant", "": "constant", "constant": "constant", "linear": "linear", "cosine": "cosine"}
CHECKPOINTING = {"": "none", "none": "none", "everything_saveable": "none", "nothing_saveable": "full"}
CHECKPOINTING |= {"checkpoint_dots": "dots", "checkpoint_dots_with_no_batch_dims": "dots"}


def named(value: Any, known: Any, setting: str) -> str:
    """Returns the value of an enum member as lower-case text; None means "none"."""
    names = [str(getattr(each, "value", each)) for each in known]
    text = str(getattr(value, "value", "none" if value is None else value)).lower()
    if text not in names:
        raise ValueError(
            f"{setting} {text!r} is not supported; choose from {', '.join(filter(None, names))}{nearest(text, names)}"
        )
    return text


# Settings of EasyDeL's pages by the reason why they have no effect.
_INERT = {
    "wandb reads it from WANDB_ENTITY": "wandb_entity=None",
    "metrics.jsonl receives a line every log_steps": "report_steps=5 verbose=True",
    "a step is automatically split into micro-batches that fit, which do not change its gradient": """
        gradient_accumulation_steps=1""",
    "conversations are rendered by the chat template, and strings are used unchanged": """
        skip_apply_chat_template=False dataset_num_proc=None remove_unused_columns=False""",
    "the mesh is derived from the model, and compiled programs from the shapes": """
        auto_shard_states=True performance_mode=False low_mem_usage=True""",
    "the norms of weights are not logged": "weight_distribution_log_steps=50",
    "the trainer's methods decide what runs": "do_train=True do_eval=False is_fine_tuning=True",
}


@arguments("EasyDeL", inert=_INERT)
class GRPOConfig(Arguments):
    """EasyDeL's config. A setting without effect in groupax is accepted with a warning that gives the reason.

    Raises:
        TypeError: A setting is unknown.
        ValueError: A setting cannot be honoured.
    """

    model_name: str = "GRPOTrainer"
    save_directory: Any = "EasyDeL-Checkpoints"
    seed: int = 0
    num_train_epochs: float = 10
    max_training_steps: int | None = None
    total_batch_size: int = 32
    num_return_sequences: int = 4
    num_iterations: int = 1
    max_prompt_length: int = 512
    max_completion_length: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    loss_type: str = "dapo"
    beta: float = 0.04
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    importance_sampling_level: str = "token"
    scale_rewards: Any = "group"
    reward_weights: Any = None
    mask_truncated_completions: bool = False
    top_entropy_quantile: float = 1.0
    chat_template_kwargs: Any = None
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.9
    ref_model_sync_steps: int = 64
    optimizer: Any = "adamw"
    scheduler: Any = "none"
    learning_rate: float = 1e-6
    learning_rate_end: float | None = None
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    weight_decay: float = 0.01
    clip_grad: float | None = None
    shuffle_train_dataset: bool = True
    evaluation_steps: int | None = None
    save_steps: int | None = None
    save_interval_minutes: float | None = None
    save_total_limit: int | None = None
    save_optimizer_state: bool = True
    do_last_save: bool = True
    resume_if_possible: bool = True
    log_steps: int = 10
    progress_bar_type: str = "tqdm"
    use_wandb: bool = False
    wandb_name: str | None = None
    track_memory: Any = False

    def to_native(self) -> Any:
        """Returns the native config."""
        if self.max_training_steps == 0:
            raise ValueError("max_training_steps=0 trains nothing; leave it out to train for num_train_epochs")
        schedule = SCHEDULES[named(self.scheduler, SCHEDULES, "scheduler")]
        if self.learning_rate_end and schedule == "constant":
            warn(f"learning_rate_end={self.learning_rate_end} changes nothing in groupax without a scheduler")
        settings = {
            "output_dir": f"{str(self.save_directory or 'EasyDeL-Checkpoints').rstrip('/')}/{self.model_name}",
            "chat_template_kwargs": dict(self.chat_template_kwargs or {}),
            "max_steps": -1 if self.max_training_steps is None else self.max_training_steps,
            "prompts_per_step": self.total_batch_size,
            "num_generations": self.num_return_sequences,
            "eval_num_generations": self.num_return_sequences,
            "prompt_order": "shuffled" if self.shuffle_train_dataset else "dataset",
            "prompt_overflow": "truncate_left",
            "top_k": self.top_k or 0,
            "min_p": self.min_p or 0.0,
            "use_bias_correction_kl": False,
            "scale_rewards": scale_rewards(self.scale_rewards),
            "reward_weights": None if self.reward_weights is None else tuple(self.reward_weights),
            "optimizer": named(self.optimizer, EasyDeLOptimizers, "optimizer"),
            "lr_scheduler_type": schedule,
            "learning_rate_end": self.learning_rate_end or 0.0,
            "max_grad_norm": self.clip_grad or 0.0,
            "eval_steps": self.evaluation_steps or 0,
            "save_steps": self.save_steps or 0,
            "save_interval_minutes": self.save_interval_minutes or 0.0,
            "resume": "auto" if self.resume_if_possible else "never",
            "logging_steps": self.log_steps,
            "progress_bar": "rich" if self.progress_bar_type == "tqdm" else self.progress_bar_type,
            "report_to": ("wandb",) if self.use_wandb else (),
            "run_name": self.wandb_name or self.model_name,
            "project": f"EasyDeL-{self.model_name}",
            "track_memory": bool(self.track_memory),
        }
        return self.as_native(settings)
