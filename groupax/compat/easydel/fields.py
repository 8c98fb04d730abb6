"""The fields of EasyDeL's `GRPOConfig`, their defaults, and the reasons why some have no effect. Imports no jax."""

from typing import Any

# Fields with an effect in groupax, with EasyDeL's defaults; a `vInference` may set sampling fields too.
MEANINGFUL: dict[str, Any] = {
    "model_name": "GRPOTrainer",
    "save_directory": "EasyDeL-Checkpoints",
    "seed": 0,
    "num_train_epochs": 10,
    "max_training_steps": None,
    "total_batch_size": 32,
    "num_return_sequences": 4,
    "num_iterations": 1,
    "max_length": None,
    "max_prompt_length": 512,
    "max_completion_length": 256,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "min_p": None,
    "repetition_penalty": 1.0,
    "loss_type": "dapo",
    "beta": 0.04,
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "importance_sampling_level": "token",
    "scale_rewards": "group",
    "reward_weights": None,
    "mask_truncated_completions": False,
    "top_entropy_quantile": 1.0,
    "chat_template_kwargs": None,
    "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.9,
    "ref_model_sync_steps": 64,
    "optimizer": "adamw",
    "scheduler": "none",
    "learning_rate": 1e-6,
    "learning_rate_end": None,
    "warmup_steps": 0,
    "warmup_ratio": 0.0,
    "weight_decay": 0.01,
    "clip_grad": None,
    "extra_optimizer_kwargs": {},
    "shuffle_train_dataset": True,
    "evaluation_steps": None,
    "save_steps": None,
    "save_interval_minutes": None,
    "save_total_limit": None,
    "save_optimizer_state": True,
    "do_last_save": True,
    "resume_if_possible": True,
    "log_steps": 10,
    "progress_bar_type": "tqdm",
    "use_wandb": False,
    "wandb_name": None,
    "track_memory": False,
    "weight_distribution_log_steps": 0,
    "tools": None,
}
# Fields without effect in groupax, grouped by the reason, with EasyDeL's defaults.
_INERT_BY_REASON: dict[str, dict[str, Any]] = {
    "one process reports, to metrics.jsonl and rollouts/ in save_directory, and to wandb with use_wandb": {
        "log_all_workers": False,
        "report_metrics": True,
    },
    "wandb reads it from WANDB_ENTITY": {"wandb_entity": None},
    "metrics.jsonl receives a line every log_steps": {"report_steps": 5, "verbose": True},
    "distributions cover all trained weights, and every line of metrics has the gradient norm": {
        "weight_distribution_pattern": ".*",
        "log_grad_norms": True,
        "metrics_to_show_in_rich_pbar": None,
    },
    "a step is automatically split into micro-batches that fit, which do not change its gradient": {
        "gradient_accumulation_steps": 1
    },
    "conversations are rendered by the chat template, and strings are used unchanged": {
        "skip_apply_chat_template": False,
        "dataset_num_proc": None,
        "remove_unused_columns": False,
    },
    "prompts are tokenized once and selected by index": {
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "use_data_collator": True,
        "use_grain": True,
        "offload_dataset": False,
        "ids_to_pop_from_dataset": [],
        "truncation_mode": "keep_end",
        "grain_shard_index": None,
        "grain_shard_count": None,
        "shuffle_seed_train": 64871,
        "eval_batch_size": None,
        "max_evaluation_steps": None,
    },
    "the mesh is derived from the model, and compiled programs from the shapes": {
        "auto_shard_states": True,
        "backend": None,
        "performance_mode": False,
        "low_mem_usage": True,
        "jax_distributed_config": None,
        "process_zero_is_admin": True,
        "step_partition_spec": None,
        "tx_mu_dtype": None,
        "init_tx": True,
        "aux_loss_enabled": False,
    },
    "the trainer's methods decide what runs": {
        "do_train": True,
        "do_eval": False,
        "is_fine_tuning": True,
        "trainer_prefix": "GRPO",
        "remove_ckpt_after_load": False,
        "train_on_inputs": True,
        "model_parameters": None,
        "state_apply_fn_kwarguments_to_model": None,
    },
    "rollouts are sampled by groupax's own engine, in slots and pages that follow from the memory": {
        "use_esurge_generation": True,
        "esurge_use_tqdm": True,
        "esurge_hbm_utilization": 0.45,
        "esurge_max_num_seqs": None,
        "esurge_max_num_seq_buckets": None,
        "esurge_min_input_pad": None,
        "esurge_page_size": 32,
        "esurge_silent_mode": True,
        "esurge_runner_verbose": False,
        "esurge_max_num_batched_tokens": None,
        "esurge_enable_prefix_caching": None,
        "esurge_data_parallelism_axis": None,
        "generation_shard_inputs": True,
    },
    "there are no previews: samples of rollouts are shown and logged, and evaluations sample every prompt": {
        "generation_interval": None,
        "generation_prompts": [],
        "generation_use_train_prompts": False,
        "generation_num_prompts": 1,
        "generation_dataset_prompt_field": "prompt",
        "generation_seed": None,
        "generation_preview_print": False,
        "generation_log_to_wandb": True,
        "log_training_generations_to_wandb": True,
    },
    "log-probs are computed in chunks that fit, which do not change them": {
        "lmhead_chunksize": None,
        "ref_logps_chunk_size": None,
        "completion_chunk_size": None,
        "logprob_vocab_chunk_size": None,
    },
    "offloading is a setting of the native trainer": {"offload_device_type": "cpu", "offload_device_index": 0},
    "adapters are saved as adapters, and save_pretrained writes the merged model": {
        "merge_lora_before_save": True,
        "merge_lora_before_tpu_preemption_save": False,
    },
    "a run that is preempted saves a checkpoint": {"save_tpu_preemption_checkpoints": True},
}
# Fields that may only have their default, grouped by the reason, with EasyDeL's defaults.
_REFUSED_BY_REASON: dict[str, dict[str, Any]] = {
    "groupax runs no lm-eval: pass an eval_dataset and set evaluation_steps, or evaluate the checkpoints": {
        "benchmark_interval": None,
        "benchmarks": [],
    },
    "groupax samples rollouts without these penalties; use repetition_penalty": {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "generation_presence_penalty": None,
        "generation_frequency_penalty": None,
    },
    "set temperature, top_p, top_k, min_p or repetition_penalty instead": {
        "generation_kwargs": None,
        "generation_extra_kwargs": None,
        "generation_config_overrides": None,
    },
    "a trainer always samples, as greedy completions would all be the same": {"generation_do_sample": None},
    "set scheduler to none, linear or cosine": {"custom_scheduler": None},
    "adapters are how groupax trains some weights only: load a model with one (load_model, add_adapter)": {
        "frozen_parameters": None
    },
    "groupax trains without simulating quantization; a quantized base with an adapter is quantization_config of "
    "from_pretrained": {
        "quantization_mode": None,
        "quantization_group_size": None,
        "quantization_bits": None,
        "quantization_block": None,
        "tensor_straight_through": None,
        "straight_through_emulator": None,
    },
    "groupax neither prunes nor sparsifies": {
        "pruning_module": None,
        "sparsify_module": False,
        "sparse_module_type": "bcoo",
    },
    "set max_training_steps, or num_train_epochs": {
        "per_epoch_training_steps": None,
        "per_epoch_evaluation_steps": None,
        "training_time_limit": None,
    },
    "a run starts at its first step or resumes from its own checkpoint": {
        "step_start_point": None,
        "force_step_start_point": False,
    },
    "mask_truncated_completions leaves out completions that are too long": {"max_loss_completion_tokens": None},
    "loss_type, beta, epsilon and the like choose the loss": {"loss_config": None},
    "weight_distribution_log_steps logs the distributions of weights": {"watchers": []},
}
REFUSED = {name: why for why, names in _REFUSED_BY_REASON.items() for name in names}
INERT = {name: why for why, names in _INERT_BY_REASON.items() for name in names}
DEFAULTS = MEANINGFUL | {
    name: default
    for names in (*_INERT_BY_REASON.values(), *_REFUSED_BY_REASON.values())
    for name, default in names.items()
}
# Alternative names of fields, and those of sampling, which override the others in EasyDeL.
ALIASES = {
    "num_generations": "num_return_sequences",
    "max_steps": "max_training_steps",
    "max_sequence_length": "max_length",
    "lr_scheduler_type": "scheduler",
    "generation_temperature": "temperature",
    "generation_top_p": "top_p",
    "generation_top_k": "top_k",
    "generation_repetition_penalty": "repetition_penalty",
    "generation_num_return_sequences": "num_return_sequences",
    "generation_max_new_tokens": "max_completion_length",
}
