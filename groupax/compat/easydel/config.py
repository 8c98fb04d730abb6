"""EasyDeL's `GRPOConfig` and enums, as settings of groupax."""

import copy
import dataclasses
from enum import StrEnum
from typing import Any

from groupax.compat.fields import (
    Arguments,
    arguments,
    as_native,
    former,
    inert,
    matching_eval_sampling,
    refused,
    same,
    scale_rewards,
)
from groupax.settings.fields import nearest


class EasyDeLOptimizers(StrEnum):
    """The optimizers."""

    ADAMW = "adamw"
    ADAFACTOR = "adafactor"
    LION = "lion"
    MUON = "muon"
    SGD = "sgd"


class EasyDeLSchedulers(StrEnum):
    """The learning-rate schedules."""

    NONE = "none"
    LINEAR = "linear"
    COSINE = "cosine"


class EasyDeLGradientCheckPointers(StrEnum):
    """The policies of gradient checkpointing."""

    NONE = ""
    EVERYTHING_SAVEABLE = "everything_saveable"
    NOTHING_SAVEABLE = "nothing_saveable"
    CHECKPOINT_DOTS = "checkpoint_dots"
    CHECKPOINT_DOTS_WITH_NO_BATCH_DMIS = "checkpoint_dots_with_no_batch_dims"


class AttentionMechanisms(StrEnum):
    """The attention implementations."""

    AUTO = "auto"
    VANILLA = "vanilla"
    FLASH_ATTN2 = "flash_attn2"
    SPLASH = "splash"
    RING = "ring"
    CUDNN = "cudnn"
    BLOCKWISE = "blockwise"
    SDPA = "sdpa"
    CUDA_FLASH_ATTN2 = "cuda_flash_attn2"
    PAGED_ATTENTION = "paged_attention"


SCHEDULES = {"none": "constant", "": "constant", "constant": "constant", "linear": "linear", "cosine": "cosine"}
CHECKPOINTING = {
    "": "none",
    "none": "none",
    "everything_saveable": "none",
    "nothing_saveable": "full",
    "checkpoint_dots": "dots",
    "checkpoint_dots_with_no_batch_dims": "dots",
}
# Names in `extra_optimizer_kwargs`, with those of groupax.
OPTIMIZER_KWARGS = {"b1": "adam_beta1", "b2": "adam_beta2", "eps": "adam_epsilon"}


def named(value: Any, known: Any, setting: str) -> str:
    """Returns the value of an enum member as lower-case text.

    Args:
        value: Member or its value; None means "none".
        known: Valid members or values.
        setting: Name of the setting, for the error message.

    Raises:
        ValueError: The value is not one of `known`.
    """
    names = [str(getattr(each, "value", each)) for each in known]
    text = str(getattr(value, "value", "none" if value is None else value)).lower()
    if text not in names:
        raise ValueError(
            f"{setting} {text!r} is not supported; choose from {', '.join(filter(None, names))}{nearest(text, names)}"
        )
    return text


_reported = inert("one process reports, to metrics.jsonl and rollouts/ in save_directory, and to wandb with use_wandb")
_every_log = inert("metrics.jsonl receives a line every log_steps")
_distributed = inert("distributions cover all trained weights, and every line of metrics has the gradient norm")
_rendered = inert("conversations are rendered by the chat template, and strings are used unchanged")
_indexed = inert("prompts are tokenized once and selected by index")
_derived = inert("the mesh is derived from the model, and compiled programs from the shapes")
_decided = inert("the trainer's methods decide what runs")
_sampled = inert("rollouts are sampled by groupax's own engine, in slots and pages that follow from the memory")
_previewed = inert(
    "there are no previews: samples of rollouts are shown and logged, and evaluations sample every prompt"
)
_chunked = inert("log-probs are computed in chunks that fit, which do not change them")
_offloaded = inert("offloading is a setting of the native trainer")
_merged = inert("adapters are saved as adapters, and save_pretrained writes the merged model")
_BENCHMARKS = "groupax runs no lm-eval: pass an eval_dataset and set evaluation_steps, or evaluate the checkpoints"
_PENALTIES = "groupax samples rollouts without these penalties; use repetition_penalty"
_SAMPLING = "set temperature, top_p, top_k, min_p or repetition_penalty instead"
_QUANTIZATION = (
    "groupax trains without simulating quantization; a quantized base with an adapter is quantization_config of "
    "from_pretrained"
)
_PRUNING = "groupax neither prunes nor sparsifies"
_LIMITS = "set max_training_steps, or num_train_epochs"
_START = "a run starts at its first step or resumes from its own checkpoint"


@arguments("EasyDeL")
class GRPOConfig(Arguments):
    """EasyDeL's config. A setting without effect in groupax is accepted with a warning that gives the reason.

    Attributes:
        given: Names of the settings that were given a value, even their default.

    Raises:
        TypeError: A setting is unknown.
        ValueError: A setting cannot be honoured.
    """

    model_name: str = "GRPOTrainer"
    save_directory: Any = "EasyDeL-Checkpoints"
    seed: int = same(0)
    num_train_epochs: float = 10
    max_training_steps: int | None = None
    total_batch_size: int = 32
    num_return_sequences: int = 4
    num_iterations: int = same(1)
    max_length: int | None = None
    max_prompt_length: int = same(512)
    max_completion_length: int = 256
    temperature: float = same(1.0)
    top_p: float = same(1.0)
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float = same(1.0)
    loss_type: str = same("dapo")
    beta: float = same(0.04)
    epsilon: float = same(0.2)
    epsilon_high: float | None = same(None)
    delta: float | None = same(None)
    importance_sampling_level: str = same("token")
    scale_rewards: Any = "group"
    reward_weights: Any = None
    mask_truncated_completions: bool = same(False)
    top_entropy_quantile: float = same(1.0)
    chat_template_kwargs: Any = None
    sync_ref_model: bool = same(False)
    ref_model_mixup_alpha: float = same(0.9)
    ref_model_sync_steps: int = same(64)
    optimizer: Any = "adamw"
    scheduler: Any = "none"
    learning_rate: float = same(1e-6)
    learning_rate_end: float | None = None
    warmup_steps: int = same(0)
    warmup_ratio: float = same(0.0)
    weight_decay: float = same(0.01)
    clip_grad: float | None = None
    extra_optimizer_kwargs: Any = dataclasses.field(default_factory=dict)
    shuffle_train_dataset: bool = True
    evaluation_steps: int | None = None
    save_steps: int | None = None
    save_interval_minutes: float | None = None
    save_total_limit: int | None = same(None)
    save_optimizer_state: bool = same(True)
    do_last_save: bool = same(True)
    resume_if_possible: bool = True
    log_steps: int = 10
    progress_bar_type: str = "tqdm"
    use_wandb: bool = False
    wandb_name: str | None = None
    track_memory: Any = False
    weight_distribution_log_steps: int = same(0)
    tools: Any = None

    # without effect
    log_all_workers: bool = _reported(False)
    report_metrics: bool = _reported(True)
    wandb_entity: str | None = inert("wandb reads it from WANDB_ENTITY")(None)
    report_steps: int = _every_log(5)
    verbose: bool = _every_log(True)
    weight_distribution_pattern: str = _distributed(".*")
    log_grad_norms: bool = _distributed(True)
    metrics_to_show_in_rich_pbar: Any = _distributed(None)
    gradient_accumulation_steps: int = inert(
        "a step is automatically split into micro-batches that fit, which do not change its gradient"
    )(1)
    skip_apply_chat_template: bool = _rendered(False)
    dataset_num_proc: int | None = _rendered(None)
    remove_unused_columns: bool = _rendered(False)
    dataloader_num_workers: int = _indexed(0)
    dataloader_pin_memory: bool = _indexed(False)
    use_data_collator: bool = _indexed(True)
    use_grain: bool = _indexed(True)
    offload_dataset: bool = _indexed(False)
    ids_to_pop_from_dataset: Any = _indexed([])
    truncation_mode: str = _indexed("keep_end")
    grain_shard_index: int | None = _indexed(None)
    grain_shard_count: int | None = _indexed(None)
    shuffle_seed_train: int = _indexed(64871)
    eval_batch_size: int | None = _indexed(None)
    max_evaluation_steps: int | None = _indexed(None)
    auto_shard_states: bool = _derived(True)
    backend: str | None = _derived(None)
    performance_mode: bool = _derived(False)
    low_mem_usage: bool = _derived(True)
    jax_distributed_config: Any = _derived(None)
    process_zero_is_admin: bool = _derived(True)
    step_partition_spec: Any = _derived(None)
    tx_mu_dtype: Any = _derived(None)
    init_tx: bool = _derived(True)
    aux_loss_enabled: bool = _derived(False)
    do_train: bool = _decided(True)
    do_eval: bool = _decided(False)
    is_fine_tuning: bool = _decided(True)
    trainer_prefix: str = _decided("GRPO")
    remove_ckpt_after_load: bool = _decided(False)
    train_on_inputs: bool = _decided(True)
    model_parameters: Any = _decided(None)
    state_apply_fn_kwarguments_to_model: Any = _decided(None)
    use_esurge_generation: bool = _sampled(True)
    esurge_use_tqdm: bool = _sampled(True)
    esurge_hbm_utilization: float = _sampled(0.45)
    esurge_max_num_seqs: int | None = _sampled(None)
    esurge_max_num_seq_buckets: Any = _sampled(None)
    esurge_min_input_pad: int | None = _sampled(None)
    esurge_page_size: int = _sampled(32)
    esurge_silent_mode: bool = _sampled(True)
    esurge_runner_verbose: bool = _sampled(False)
    esurge_max_num_batched_tokens: int | None = _sampled(None)
    esurge_enable_prefix_caching: bool | None = _sampled(None)
    esurge_data_parallelism_axis: str | None = _sampled(None)
    generation_shard_inputs: bool = _sampled(True)
    generation_interval: int | None = _previewed(None)
    generation_prompts: Any = _previewed([])
    generation_use_train_prompts: bool = _previewed(False)
    generation_num_prompts: int = _previewed(1)
    generation_dataset_prompt_field: str = _previewed("prompt")
    generation_seed: int | None = _previewed(None)
    generation_preview_print: bool = _previewed(False)
    generation_log_to_wandb: bool = _previewed(True)
    log_training_generations_to_wandb: bool = _previewed(True)
    lmhead_chunksize: int | None = _chunked(None)
    ref_logps_chunk_size: int | None = _chunked(None)
    completion_chunk_size: int | None = _chunked(None)
    logprob_vocab_chunk_size: int | None = _chunked(None)
    offload_device_type: str = _offloaded("cpu")
    offload_device_index: int = _offloaded(0)
    merge_lora_before_save: bool = _merged(True)
    merge_lora_before_tpu_preemption_save: bool = _merged(False)
    save_tpu_preemption_checkpoints: bool = inert("a run that is preempted saves a checkpoint")(True)

    # refused
    benchmark_interval: int | None = refused(None, _BENCHMARKS)
    benchmarks: Any = refused([], _BENCHMARKS)
    presence_penalty: float = refused(0.0, _PENALTIES)
    frequency_penalty: float = refused(0.0, _PENALTIES)
    generation_presence_penalty: float | None = refused(None, _PENALTIES)
    generation_frequency_penalty: float | None = refused(None, _PENALTIES)
    generation_kwargs: Any = refused(None, _SAMPLING)
    generation_extra_kwargs: Any = refused(None, _SAMPLING)
    generation_config_overrides: Any = refused(None, _SAMPLING)
    generation_do_sample: bool | None = refused(
        None, "a trainer always samples, as greedy completions would all be the same"
    )
    custom_scheduler: Any = refused(None, "set scheduler to none, linear or cosine")
    frozen_parameters: Any = refused(
        None, "adapters are how groupax trains some weights only: load a model with one (load_model, add_adapter)"
    )
    quantization_mode: Any = refused(None, _QUANTIZATION)
    quantization_group_size: int | None = refused(None, _QUANTIZATION)
    quantization_bits: int | None = refused(None, _QUANTIZATION)
    quantization_block: Any = refused(None, _QUANTIZATION)
    tensor_straight_through: Any = refused(None, _QUANTIZATION)
    straight_through_emulator: Any = refused(None, _QUANTIZATION)
    pruning_module: Any = refused(None, _PRUNING)
    sparsify_module: bool = refused(False, _PRUNING)
    sparse_module_type: str = refused("bcoo", _PRUNING)
    per_epoch_training_steps: int | None = refused(None, _LIMITS)
    per_epoch_evaluation_steps: int | None = refused(None, _LIMITS)
    training_time_limit: str | None = refused(None, _LIMITS)
    step_start_point: int | None = refused(None, _START)
    force_step_start_point: bool = refused(False, _START)
    max_loss_completion_tokens: int | None = refused(
        None, "mask_truncated_completions leaves out completions that are too long"
    )
    loss_config: Any = refused(None, "loss_type, beta, epsilon and the like choose the loss")
    watchers: Any = refused([], "weight_distribution_log_steps logs the distributions of weights")

    # alternative names, and those of sampling, which override the others in EasyDeL
    num_generations: int | None = former("num_return_sequences")
    max_steps: int | None = former("max_training_steps")
    max_sequence_length: int | None = former("max_length")
    lr_scheduler_type: Any = former("scheduler")
    generation_temperature: float | None = former("temperature")
    generation_top_p: float | None = former("top_p")
    generation_top_k: int | None = former("top_k")
    generation_repetition_penalty: float | None = former("repetition_penalty")
    generation_num_return_sequences: int | None = former("num_return_sequences")
    generation_max_new_tokens: int | None = former("max_completion_length")

    def __init__(self, **settings: Any) -> None:
        vars(self).update(copy.deepcopy(dict(self.FIELDS.defaults)), given=set())
        for name, value in settings.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in vars(self):
            self.given.add(name)

    def to_native(self) -> Any:
        """Returns the native config.

        Raises:
            ValueError: A setting is not supported by groupax.
        """
        if self.max_training_steps == 0:
            raise ValueError("max_training_steps=0 trains nothing; leave it out to train for num_train_epochs")
        given = dict(self.extra_optimizer_kwargs or {})
        for name in given:
            if name not in OPTIMIZER_KWARGS:
                raise ValueError(
                    f"extra_optimizer_kwargs has {name!r}; groupax knows {', '.join(OPTIMIZER_KWARGS)}"
                    f"{nearest(name, OPTIMIZER_KWARGS)}"
                )
        settings = {
            **self.same_settings(),
            "output_dir": f"{str(self.save_directory or 'EasyDeL-Checkpoints').rstrip('/')}/{self.model_name}",
            "max_completion_length": self._completion_length(),
            "chat_template_kwargs": dict(self.chat_template_kwargs or {}),
            "num_train_epochs": self.num_train_epochs,
            "max_steps": -1 if self.max_training_steps is None else self.max_training_steps,
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
            **{OPTIMIZER_KWARGS[name]: value for name, value in given.items()},
        }
        return as_native(settings | matching_eval_sampling(settings, self.num_return_sequences))

    def _completion_length(self) -> int:
        """Returns the longest completion; without one what `max_length` leaves.

        Raises:
            ValueError: Prompts and completions can be longer than `max_length`.
        """
        if self.max_length is None:
            return self.max_completion_length
        left = self.max_length - self.max_prompt_length
        longest = self.max_completion_length if "max_completion_length" in self.given else left
        if left < 1 or longest > left:
            raise ValueError(
                f"max_length {self.max_length} is too short for max_prompt_length {self.max_prompt_length} and "
                f"max_completion_length {self.max_completion_length}"
            )
        return longest


for _name in GRPOConfig.FIELDS.of("former"):
    delattr(GRPOConfig, _name)  # so that reading it reads the current name
