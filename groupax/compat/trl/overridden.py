"""Subclasses of TRL's trainer: the methods that they may override, and those that they may not, with the remedy."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from groupax.config import GRPOConfig
from groupax.rewards.calls import check_name
from groupax.rewards.contract import Reward, Scores
from groupax.rewards.runner import RewardRunner
from groupax.types import Metrics, Rollout

# Methods of TRL's trainer that groupax never calls, by what to do instead.
_REFUSED_BY_REMEDY = {
    "gradients come from JAX: give a function in JAX as loss_type of the config, which docs/algorithm.md describes "
    "under 'Your own loss'": """_compute_loss compute_loss compute_loss_context_manager autocast_smart_context_manager
        _get_per_token_logps_and_entropies get_gamma_weights get_high_entropy_mask get_off_policy_mask""",
    "an optimizer step is one compiled program: change the rewards (_calculate_rewards), the loss "
    "(loss_type) or the optimizer (optimizers=...), or act in a callback's on_step_end": """training_step
        _clip_grad_norm _defer_fsdp_gradient_reduction _get_grad_norm _get_num_items_in_batch _has_mixed_mesh_grads
        _mixed_mesh_grad_norm _sync_replicated_trainable_parameters loss_is_scaled_for_ga""",
    "pass rollout_func to sample yourself, tools or environment_factory for turns, and reward functions or "
    "_calculate_rewards for the scores": """_generate _generate_and_score_completions _generate_single_turn
        _get_tool_suffix_ids _prepare_input _prepare_inputs _tokenize_prompts _tool_call_loop get_batch_samples""",
    "there is no data loader: order the rows of train_dataset yourself and set shuffle_dataset=False": """
        _get_collator_with_removed_columns _get_dataloader _get_eval_sampler _get_train_sampler _remove_unused_columns
        _set_signature_columns_if_needed get_eval_dataloader get_test_dataloader get_train_dataloader num_examples""",
    "pass optimizers=(optimizer, scheduler), or set optim and lr_scheduler_type": """create_optimizer
        create_optimizer_and_scheduler create_scheduler get_decay_parameter_names get_learning_rates
        get_optimizer_cls_and_kwargs get_optimizer_group _get_learning_rate""",
    "the loop is groupax's own: act in a callback, or override log": """_finalize_training _init_training_state
        _inner_training_loop _issue_warnings_after_load _maybe_log_save_evaluate _prepare_for_training _run_epoch
        _track_num_input_tokens _update_auto_batch_size _validate_args end set_initial_training_values store_flos
        floating_point_ops get_total_train_batch_size""",
    "evaluations sample and score like training: add a reward function, or act in a callback's on_evaluate": """
        _determine_best_metric _evaluate evaluation_loop predict prediction_step""",
    "checkpoints are groupax's own: act in a callback's on_save": """_get_output_dir _load_best_model
        _load_callback_state _load_from_checkpoint _load_optimizer_and_scheduler _load_rng_state _load_scaler _save
        _save_checkpoint _save_optimizer_and_scheduler _save_rng_state _save_scaler create_model_card""",
    "JAX places the model on the devices: see parallelism_config, fsdp and deepspeed": """_build_accelerator_args
        _move_model_to_device _prepare_context_parallel_inputs _wrap_model call_model_init
        create_accelerator_and_postprocess get_cp_size get_sp_size get_tp_size""",
    "call log_metric or log_extra, which reward functions receive": "_log_completion_extra _log_metric",
    "the model is uploaded by push_to_hub at the end": "_finish_current_push _push_from_checkpoint init_hf_repo",
    "run several trainers, one per setting": """_hp_search_setup _report_to_hp_search _tune_save_checkpoint
        hyperparameter_search""",
    "groupax sends no telemetry": "_send_telemetry",
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


# A function of groups and their scores by reward that returns the scores to use instead.
Calculate = Callable[[Sequence[Sequence[Rollout]], list[list[Scores]]], list[list[Scores]]]


class RevisedRewards(RewardRunner):
    """A runner whose scores are revised, all groups of a rollout together.

    Args:
        rewards: The rewards.
        settings: How to call them.
        calculate: The revision.
    """

    def __init__(self, rewards: Sequence[Reward], settings: GRPOConfig, calculate: Calculate) -> None:
        super().__init__(rewards, settings)
        self._calculate = calculate

    def finish(self) -> list[list[Scores]]:
        """Returns the revised scores of each group since this thread's last `finish`, by reward."""
        groups = self.groups
        scores = super().finish()
        return self._calculate(groups, scores) if groups else scores


@dataclass(frozen=True, eq=False)
class _Batch:
    """Completions that are scored together, and their rewards by the reward functions, [N, K]."""

    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    rewards: np.ndarray


class Overridable:
    """The methods of a trainer that a subclass may override."""

    native: Any
    state: Any
    args: Any
    _callback_listener: Callable[[], Any]
    _scored: _Batch | None = None  # while `_calculate_rewards` runs
    _passed: list[Mapping[str, Any]] | None = None  # to the own `log`, while a line is revised
    _revised: list[list[Mapping[str, Any]]]  # lines that the listener has not recorded yet

    def _changes(self, base: type) -> dict[str, Any]:
        """Returns what a subclass of a class of groupax changes in a run, as arguments of `TRLBatchTrainer`."""
        self._revised = []
        own = {name: getattr(type(self), name) is not getattr(base, name) for name in ("log", "_calculate_rewards")}
        return {
            "calculate_rewards": self._revise_rewards if own["_calculate_rewards"] else None,
            "revise_line": self._revise if own["log"] else None,
        }

    def log(self, logs: Mapping[str, Any], start_time: float | None = None) -> None:
        """Adds a line to `state.log_history` and calls the callbacks.

        Numbers that a subclass adds to a line of the run also reach the run's metrics and trackers.

        Args:
            logs: Values by name.
            start_time: Not used: the times are among the values.
        """
        del start_time
        if self._passed is None:
            self._callback_listener().record(self.native.cursor.step, dict(logs))
        else:
            for name in logs:
                check_name("log", "the name of a value", name)
            self._passed.append(dict(logs))

    def _calculate_rewards(
        self, inputs: Sequence[Mapping[str, Any]], prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Any:
        """Returns the rewards of completions by the reward functions, [N, K]: a tensor if PyTorch is imported.

        Args:
            inputs: The dataset's row of each completion.
            prompts: Its prompt.
            completions: The completions.
            completion_ids_list: Their tokens.

        Raises:
            ValueError: The completions are others than those that are being scored.
        """
        del inputs
        batch = self._scored
        given = list(prompts), list(completions), [list(ids) for ids in completion_ids_list]
        if batch is None or given != (batch.prompts, batch.completions, batch.completion_ids):
            raise ValueError(
                "_calculate_rewards of groupax has the rewards of the completions that were sampled; call it with "
                "these, and change what it returns, or call the reward functions yourself"
            )
        torch = sys.modules.get("torch")
        return batch.rewards if torch is None else torch.tensor(batch.rewards, dtype=torch.float32)

    def _write_line(self, step: int, metrics: Metrics) -> None:
        """Records a line of the log: as it was revised, else through `log`."""
        if self._revised:
            for logs in self._revised.pop(0):
                self._callback_listener().record(step, logs)
        else:
            self.log(dict(metrics))

    def _revise(self, step: int, metrics: Metrics) -> Metrics:
        """Passes metrics through `log`; returns them with the numbers that it adds or changes."""
        is_line = step % max(1, self.state.logging_steps) == 0 or any(name.startswith("eval_") for name in metrics)
        if not is_line:  # the last steps of a run belong to its closing line
            return metrics
        self._passed = passed = []
        try:
            self.log(dict(metrics))
        finally:
            self._passed = None
        self._revised.append(passed)
        numbers = {
            name: float(value)
            for logs in passed
            for name, value in logs.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        return {**metrics, **numbers}

    def _revise_rewards(self, groups: Sequence[Sequence[Rollout]], scores: list[list[Scores]]) -> list[list[Scores]]:
        """Returns the scores that `_calculate_rewards` gives completions, in the order of their prompts."""
        order = sorted(range(len(groups)), key=lambda index: groups[index][0].prompt_index)
        rows = [row for index in order for row in groups[index]]
        rewards = [np.stack([score.values for score in scores[index]], axis=1) for index in order]
        batch = _Batch(
            [row.prompt for row in rows],
            [row.completion for row in rows],
            [row.completion_ids.tolist() for row in rows],
            np.concatenate(rewards),
        )
        self._scored = batch
        try:
            inputs = [dict(row.example) for row in rows]
            found = self._calculate_rewards(inputs, batch.prompts, batch.completions, batch.completion_ids)
        finally:
            self._scored = None
        matrix = _as_matrix(found, batch.rewards.shape, type(self).__name__)
        revised, first = list(scores), 0
        for index in order:
            own = matrix[first : first + len(groups[index])]
            revised[index] = [_with_values(score, own[:, k]) for k, score in enumerate(scores[index])]
            first += len(groups[index])
        return revised


def _as_matrix(found: Any, shape: tuple[int, ...], name: str) -> np.ndarray:
    """Returns rewards as float64 [N, K].

    Raises:
        ValueError: They have another shape.
    """
    values = found.detach().cpu().numpy() if hasattr(found, "detach") else found
    matrix = np.asarray(values, np.float64)
    if matrix.shape != shape:
        raise ValueError(
            f"_calculate_rewards of {name} must return a reward of each completion and reward function, "
            f"{list(shape)}, got {list(matrix.shape)}"
        )
    return matrix


def _with_values(score: Scores, values: np.ndarray) -> Scores:
    if np.array_equal(values, score.values.astype(np.float32), equal_nan=True):
        return score  # only rounded to PyTorch's float32
    return replace(score, values=values, by_turn=[None] * len(values))
