"""The fields of TRL 1.16's `RLOOConfig`, and the reasons why some have no effect in groupax. Imports no jax."""

from dataclasses import dataclass
from typing import Any, ClassVar

from groupax.compat.trl import fields
from groupax.compat.trl.fields import GRPOFields
from groupax.compat.trl.training_arguments import TrainingArguments


@dataclass
class RLOOFields(TrainingArguments):
    """The fields of TRL's `RLOOConfig`, in the order and with the defaults of TRL's own class."""

    MAPPINGS: ClassVar[tuple[str, ...]] = GRPOFields.MAPPINGS

    learning_rate: float = 1e-6
    remove_unused_columns: bool | None = False
    model_init_kwargs: dict[str, Any] | str | None = None
    trust_remote_code: bool = False
    router_aux_loss_coef: float | None = None
    disable_dropout: bool = False
    num_generations: int = 2
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
    beta: float = 0.05
    num_iterations: int = 1
    epsilon: float = 0.2
    epsilon_high: float | None = None
    reward_weights: list[float] | None = None
    normalize_advantages: bool = False
    reward_clip_range: tuple[float, float] | None = None
    mask_truncated_completions: bool = False
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    log_completions: bool = False
    log_multimodal: bool = True
    num_completions_to_print: int | None = None
    log_unique_prompts: bool = False
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


INERT = {name: why for name, why in fields.INERT.items() if name in RLOOFields.__dataclass_fields__}
REFUSED = {name: why for name, why in fields.REFUSED.items() if name in RLOOFields.__dataclass_fields__}
ALIASES = {name: new for name, new in fields.ALIASES.items() if name in RLOOFields.__dataclass_fields__}
