"""Subclasses of TRL's trainer: the methods that they may not override, with the remedy."""

from typing import Any

# Methods of TRL's trainer that groupax never calls, by what to do instead.
_REFUSED_BY_REMEDY = {
    "gradients come from JAX: give a function in JAX as loss_type of the config, which docs/algorithm.md describes "
    "under 'Your own loss'": """_compute_loss compute_loss compute_loss_context_manager autocast_smart_context_manager
        _get_per_token_logps_and_entropies get_gamma_weights get_high_entropy_mask get_off_policy_mask""",
    "pass rollout_func to sample yourself, tools or environment_factory for turns, and reward functions for "
    "the scores, which receive log_metric and log_extra": """
        _generate _generate_and_score_completions _generate_single_turn _get_tool_suffix_ids _prepare_input
        _prepare_inputs _tokenize_prompts _tool_call_loop get_batch_samples _calculate_rewards _log_completion_extra
        _log_metric""",
    "the steps, the data's order, evaluations, checkpoints and uploads are groupax's own: change the config or the "
    "dataset, act in a callback, or override log": """training_step
        _build_accelerator_args _clip_grad_norm _defer_fsdp_gradient_reduction _determine_best_metric _evaluate
        _finalize_training _finish_current_push _get_collator_with_removed_columns _get_dataloader _get_eval_sampler
        _get_grad_norm _get_learning_rate _get_num_items_in_batch _get_output_dir _get_train_sampler
        _has_mixed_mesh_grads _hp_search_setup _init_training_state _inner_training_loop _issue_warnings_after_load
        _load_best_model _load_callback_state _load_from_checkpoint _load_optimizer_and_scheduler _load_rng_state
        _load_scaler _maybe_log_save_evaluate _mixed_mesh_grad_norm _move_model_to_device
        _prepare_context_parallel_inputs _prepare_for_training _push_from_checkpoint _remove_unused_columns
        _report_to_hp_search _run_epoch _save _save_checkpoint _save_optimizer_and_scheduler _save_rng_state
        _save_scaler _send_telemetry _set_signature_columns_if_needed _sync_replicated_trainable_parameters
        _track_num_input_tokens _tune_save_checkpoint _update_auto_batch_size _validate_args _wrap_model
        call_model_init create_accelerator_and_postprocess create_model_card create_optimizer
        create_optimizer_and_scheduler create_scheduler end evaluation_loop floating_point_ops get_cp_size
        get_decay_parameter_names get_eval_dataloader get_learning_rates get_optimizer_cls_and_kwargs
        get_optimizer_group get_sp_size get_test_dataloader get_total_train_batch_size get_tp_size
        get_train_dataloader hyperparameter_search init_hf_repo loss_is_scaled_for_ga metrics_format num_examples
        predict prediction_step set_initial_training_values store_flos""",
}
REFUSED = {name: remedy for remedy, names in _REFUSED_BY_REMEDY.items() for name in names.split()}
# Methods that a run of groupax calls at no time, although scripts may, with the setting that would have TRL call them.
_BY_SCRIPTS = {
    "evaluate": ("eval_strategy", "call evaluate yourself, or act in a callback's on_evaluate"),
    "save_model": ("save_strategy", "call save_model yourself, or act in a callback's on_save"),
}


def check_overrides(trainer: Any, base: type) -> None:
    """Checks that every method of TRL's trainer that a subclass overrides takes part in the run.

    Args:
        trainer: Trainer, whose class may be a subclass.
        base: The class of groupax.

    Raises:
        ValueError: An override would never be called; names the class, the method and what to do instead.
    """
    for cls in type(trainer).__mro__[: type(trainer).__mro__.index(base)]:
        refused = {} if cls.__module__.partition(".")[0] == "groupax" else base.REFUSED_OVERRIDES
        for name in vars(cls):
            if name in refused:
                raise ValueError(f"{cls.__name__} overrides {name}, which groupax would never call: {refused[name]}")
    for name, (setting, remedy) in _BY_SCRIPTS.items():
        value = getattr(trainer.args, setting)
        if value != "no" and getattr(type(trainer), name) is not getattr(base, name):
            raise ValueError(
                f"{type(trainer).__name__} overrides {name}, which groupax calls in no run of its own, and {setting} "
                f"is {value!r}: set {setting}='no', and {remedy}"
            )
