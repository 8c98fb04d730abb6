"""The fields of transformers' `TrainingArguments` that every trainer of TRL 1.16 has. Imports no jax."""

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

from groupax.compat.arguments import Arguments
from groupax.compat.trl.argument_methods import ArgumentMethods, absence

# Fields without effect in groupax, by reason.
_INERT_BY_REASON: dict[str, tuple[str, ...]] = {
    "one process drives all local devices, without PyTorch's launcher": (
        "accelerator_config",
        "ddp_find_unused_parameters",
        "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers",
        "ddp_static_graph",
        "ddp_backend",
        "ddp_timeout",
        "local_rank",
        "log_on_each_node",
        "save_on_each_node",
        "use_cpu",
        "no_cuda",
        "average_tokens_across_devices",
    ),
    "there is no data loader: prompts are tokenized once and selected by index": (
        "dataloader_drop_last",
        "dataloader_num_workers",
        "dataloader_pin_memory",
        "dataloader_persistent_workers",
        "dataloader_prefetch_factor",
        "dataloader_multiprocessing_context",
        "dataloader_in_order",
        "train_sampling_strategy",
        "length_column_name",
        "group_by_length",
        "data_seed",
        "label_names",
    ),
    "reward functions receive every column, and the model only the prompt": (
        "remove_unused_columns",
        "include_for_metrics",
        "prediction_loss_only",
    ),
    "weights are sharded over a mesh, without units to wrap": ("fsdp_config",),
    "programs are compiled by XLA": (
        "torch_compile",
        "torch_compile_backend",
        "torch_compile_mode",
        "use_liger_kernel",
        "liger_kernel_config",
        "tf32",
        "torch_empty_cache_steps",
        "full_determinism",
        "use_cache",
        "debug",
        "skip_memory_metrics",
    ),
    "gradient_checkpointing has no options: True recomputes every layer": (
        "gradient_checkpointing_kwargs",
        "activation_checkpointing_kwargs",
    ),
    "only adapters have dropout, and logits and losses are float32": ("label_smoothing_factor",),
    "trackers write to output_dir/groupax": ("logging_dir",),
    "the log has a line every logging_steps, with the numbers as they are": (
        "logging_first_step",
        "logging_nan_inf_filter",
        "include_num_input_tokens_seen",
    ),
    "groupax logs what changes the result, as warnings": ("log_level", "log_level_replica"),
    "evaluation uses every prompt once, with num_generations_eval completions and the settings of training": (
        "per_device_eval_batch_size",
        "eval_do_concat_batches",
        "eval_use_gather_object",
        "eval_accumulation_steps",
        "batch_eval_metrics",
        "bf16_full_eval",
        "fp16_full_eval",
    ),
    "train() trains and evaluate() evaluates": ("do_train", "do_eval", "do_predict"),
    "checkpoints have safetensors and groupax's own state, and those of an earlier run are moved aside": (
        "enable_jit_checkpoint",
        "overwrite_output_dir",
        "save_safetensors",
    ),
    "the model is uploaded once, at the end, with the token in HF_TOKEN": (
        "hub_token",
        "hub_strategy",
        "hub_always_push",
        "hub_revision",
    ),
}
INERT = {name: why for why, names in _INERT_BY_REASON.items() for name in names}
# Fields that cannot be honoured, with the reason and what to do instead.
REFUSED: dict[str, str] = {
    "auto_find_batch_size": "micro-batches are sized for the memory at hand; leave it out",
    "ignore_data_skip": "a resumed run continues with the prompts after those of its checkpoint; leave it out",
    "neftune_noise_alpha": "groupax adds no noise to embeddings; leave it out",
    "optim_args": "set learning_rate, weight_decay, adam_beta1, adam_beta2 and adam_epsilon",
    "optim_target_modules": "groupax has no GaLore, APOLLO or LOMO; choose another optim, or train an adapter",
    "restore_callback_states_from_checkpoint": "checkpoints do not have the state of callbacks; save it in on_save",
    "trackio_space_id": "trackio reads it from the environment; set TRACKIO_SPACE_ID",
    "trackio_bucket_id": "trackio reads it from the environment; set TRACKIO_BUCKET_ID",
    "trackio_static_space_id": "trackio copies spaces itself; do so after the run",
}
# Current names of fields that were renamed.
ALIASES = {"evaluation_strategy": "eval_strategy"}


@dataclass
class TrainingArguments(ArgumentMethods, Arguments):
    """The arguments of every trainer of TRL, in the order and with the defaults of TRL's own class."""

    # Fields that may be given as JSON text.
    MAPPINGS: ClassVar[tuple[str, ...]] = (
        "accelerator_config",
        "deepspeed",
        "lr_scheduler_kwargs",
    )

    output_dir: str | None = None
    per_device_train_batch_size: int = 8
    num_train_epochs: float = 3.0
    max_steps: int = -1
    learning_rate: float = 5e-5
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict[str, Any] | str | None = None
    warmup_steps: float = 0
    optim: str = "adamw_torch_fused"
    optim_args: str | None = None
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-08
    optim_target_modules: list[str] | str | None = None
    gradient_accumulation_steps: int = 1
    average_tokens_across_devices: bool = True
    max_grad_norm: float = 1.0
    label_smoothing_factor: float = 0.0
    bf16: bool | None = None
    fp16: bool = False
    bf16_full_eval: bool = False
    fp16_full_eval: bool = False
    tf32: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_kwargs: dict[str, Any] | str | None = None
    gradient_checkpointing: bool = True
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = None
    torch_compile: bool = False
    torch_compile_backend: str | None = None
    torch_compile_mode: str | None = None
    use_liger_kernel: bool = False
    liger_kernel_config: dict[str, bool] | None = None
    use_cache: bool = False
    neftune_noise_alpha: float | None = None
    torch_empty_cache_steps: int | None = None
    auto_find_batch_size: bool = False
    logging_strategy: str = "steps"
    logging_steps: float = 10
    logging_first_step: bool = False
    log_on_each_node: bool = True
    logging_nan_inf_filter: bool = True
    include_num_input_tokens_seen: str = "no"
    log_level: str = "passive"
    log_level_replica: str = "warning"
    disable_tqdm: bool | None = None
    report_to: list[str] | str | None = "none"
    run_name: str | None = None
    project: str = "huggingface"
    trackio_space_id: str | None = None
    trackio_bucket_id: str | None = None
    trackio_static_space_id: str | None = None
    eval_strategy: str = "no"
    eval_steps: float | None = None
    eval_delay: float = 0
    per_device_eval_batch_size: int = 8
    prediction_loss_only: bool = False
    eval_on_start: bool = False
    eval_do_concat_batches: bool = True
    eval_use_gather_object: bool = False
    eval_accumulation_steps: int | None = None
    include_for_metrics: list[str] = field(default_factory=list)
    batch_eval_metrics: bool = False
    save_only_model: bool = False
    save_strategy: str = "steps"
    save_steps: float = 500
    save_on_each_node: bool = False
    save_total_limit: int | None = None
    enable_jit_checkpoint: bool = False
    push_to_hub: bool = False
    hub_token: str | None = None
    hub_private_repo: bool | None = None
    hub_model_id: str | None = None
    hub_strategy: str = "every_save"
    hub_always_push: bool = False
    hub_revision: str | None = None
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    ignore_data_skip: bool = False
    restore_callback_states_from_checkpoint: bool = False
    full_determinism: bool = False
    seed: int = 42
    data_seed: int | None = None
    use_cpu: bool = False
    accelerator_config: dict[str, Any] | str | None = None
    parallelism_config: Any = None
    dataloader_drop_last: bool = False
    dataloader_num_workers: int = 0
    dataloader_pin_memory: bool = True
    dataloader_persistent_workers: bool = False
    dataloader_prefetch_factor: int | None = None
    dataloader_multiprocessing_context: str | None = None
    dataloader_in_order: bool = True
    remove_unused_columns: bool | None = False
    label_names: list[str] | None = None
    train_sampling_strategy: str = "random"
    length_column_name: str = "length"
    ddp_find_unused_parameters: bool | None = None
    ddp_bucket_cap_mb: int | None = None
    ddp_broadcast_buffers: bool | None = None
    ddp_static_graph: bool | None = None
    ddp_backend: str | None = None
    ddp_timeout: int = 1800
    fsdp: str | None = None
    fsdp_config: dict[str, Any] | str | None = None
    deepspeed: dict[str, Any] | str | None = None
    debug: str = ""
    skip_memory_metrics: bool = True
    do_train: bool = False
    do_eval: bool = False
    do_predict: bool = False
    resume_from_checkpoint: str | None = None
    local_rank: int = -1
    # fields of earlier versions of transformers
    warmup_ratio: float = 0.0
    logging_dir: str | None = None
    no_cuda: bool = False
    group_by_length: bool = False
    overwrite_output_dir: bool = False
    save_safetensors: bool = True
    evaluation_strategy: str | None = None

    @staticmethod
    def why_absent(name: str) -> str | None:
        """Returns why an attribute of transformers' class does not exist; None if that class has no such one."""
        return absence(name)

    def __post_init__(self) -> None:
        """Reads JSON texts, and derives what transformers derives from other fields.

        Raises:
            ValueError: A JSON text cannot be read.
        """
        if self.output_dir is None:
            self.output_dir = "trainer_output"
        for name in ("deepspeed", "run_name", "metric_for_best_model"):  # whose empty texts mean None there
            if getattr(self, name) == "":
                setattr(self, name, None)
        for name in self.MAPPINGS:
            value = getattr(self, name)
            if isinstance(value, str) and value.startswith("{"):  # other texts are paths
                try:
                    setattr(self, name, json.loads(value))
                except ValueError as error:
                    raise ValueError(f"{name} is not valid JSON: {error}") from error
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            self.metric_for_best_model = "loss"
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")
