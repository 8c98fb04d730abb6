"""The fields of TRL 1.16's `GRPOConfig`, and the reasons why some have no effect in groupax. Imports no jax."""

from dataclasses import dataclass
from typing import Any, ClassVar

from groupax.compat.fields import scale_rewards
from groupax.compat.trl import training_arguments
from groupax.compat.trl.training_arguments import TrainingArguments

# Fields without effect in groupax, by reason.
_INERT_BY_REASON: dict[str, tuple[str, ...]] = {
    "sampling is done by groupax's own engine or server": (
        "cache_implementation",
        "vllm_model_impl",
        "vllm_enable_sleep_mode",
        "vllm_server_timeout",
        "vllm_group_port",
        "vllm_gpu_memory_utilization",
        "vllm_max_model_length",
        "vllm_device",
        "vllm_dtype",
        "vllm_max_model_len",
        "vllm_enable_prefix_caching",
        "use_transformers_continuous_batching",
        "transformers_continuous_batching_config",
        "use_transformers_paged",
        "ds3_gather_for_generation",
    ),
    "tokens are packed without padding": ("pad_to_multiple_of",),
    "programs are compiled by XLA": ("use_liger_loss",),
    "logits and losses are float32": ("cast_lm_head_to_fp32",),
    "groupax never runs code from a model's folder": ("trust_remote_code",),
    "images are logged wherever completions are, once each": ("log_multimodal",),
    "its display shows a sample group now and then, and all completions of logged steps are in "
    "output_dir/groupax/rollouts": (
        "num_completions_to_print",
        "log_unique_prompts",
    ),
}
_HONOURED = ("eval_on_start", "per_device_eval_batch_size")  # by this trainer, if not by the others
_INERT_OF_ALL = {name: why for name, why in training_arguments.INERT.items() if name not in _HONOURED}
INERT = _INERT_OF_ALL | {name: why for why, names in _INERT_BY_REASON.items() for name in names}
# Fields that cannot be honoured, with the reason and what to do instead.
REFUSED = training_arguments.REFUSED | {
    "log_completions_hub_repo": "log_completions=True writes them to output_dir; upload that folder after the run",
}
# Current names of fields that were renamed.
ALIASES = training_arguments.ALIASES | {
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
}


@dataclass
class GRPOFields(TrainingArguments):
    """The fields of TRL's `GRPOConfig`, in the order and with the defaults of TRL's own class."""

    MAPPINGS: ClassVar[tuple[str, ...]] = (
        *TrainingArguments.MAPPINGS,
        "model_init_kwargs",
        "generation_kwargs",
        "chat_template_kwargs",
        "transformers_continuous_batching_config",
    )

    learning_rate: float = 1e-6
    remove_unused_columns: bool | None = False
    model_init_kwargs: dict[str, Any] | str | None = None
    trust_remote_code: bool = False
    router_aux_loss_coef: float | None = None
    disable_dropout: bool = False
    cast_lm_head_to_fp32: bool = False
    num_generations: int = 8
    num_generations_eval: int | None = None
    max_completion_length: int | None = 512
    ds3_gather_for_generation: bool = True
    shuffle_dataset: bool | None = True
    pad_to_multiple_of: int | str | None = "auto"
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    generation_kwargs: dict[str, Any] | str | None = None
    chat_template_kwargs: dict[str, Any] | str | None = None
    repetition_penalty: float = 1.0
    cache_implementation: str | None = None
    use_vllm: bool = False
    vllm_mode: str = "colocate"
    vllm_model_impl: str = "vllm"
    vllm_enable_sleep_mode: bool = False
    vllm_structured_outputs_regex: str | None = None
    vllm_server_base_url: str | None = None
    vllm_server_host: str = "0.0.0.0"
    vllm_server_port: int = 8000
    vllm_server_timeout: float = 240.0
    vllm_group_port: int = 51216
    vllm_gpu_memory_utilization: float = 0.3
    vllm_max_model_length: int | None = None
    vllm_tensor_parallel_size: int = 1
    beta: float = 0.0
    num_iterations: int = 1
    epsilon: float = 0.2
    delta: float | None = None
    epsilon_high: float | None = None
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    importance_sampling_level: str = "token"
    reward_weights: list[float] | None = None
    multi_objective_aggregation: str = "sum_then_normalize"
    scale_rewards: str = "group"
    loss_type: str = "dapo"
    mask_truncated_completions: bool = False
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    entropy_coef_delta: float = 0.005
    entropy_target: float = 0.2
    max_tool_calling_iterations: int | None = None
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None
    off_policy_mask_threshold: float | None = None
    use_bias_correction_kl: bool = True
    log_completions: bool = False
    log_multimodal: bool = True
    num_completions_to_print: int | None = None
    log_unique_prompts: bool = False
    log_completions_hub_repo: str | None = None
    use_transformers_continuous_batching: bool = False
    transformers_continuous_batching_config: dict[str, Any] | str | None = None
    use_transformers_paged: bool = False
    # fields of earlier versions of TRL
    max_prompt_length: int | None = None
    use_liger_loss: bool = False
    vllm_device: str = "auto"
    vllm_dtype: str = "auto"
    vllm_max_model_len: int | None = None
    vllm_enable_prefix_caching: bool | None = None
    vllm_guided_decoding_regex: str | None = None
    vllm_importance_sampling_cap: float | None = None

    def __post_init__(self) -> None:
        """Derives what TRL derives from other fields."""
        super().__post_init__()
        self.scale_rewards = scale_rewards(self.scale_rewards)
