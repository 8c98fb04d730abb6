"""Settings that matter to a single step, and those that do not. Imports no jax."""

from typing import Any

# Settings of what a replay neither does nor shows.
QUIET: dict[str, Any] = {
    "eval_steps": 0,
    "report_to": (),
    "save_steps": 0,
    "save_interval_minutes": 0.0,
    "do_last_save": False,
    "metric_for_best_model": None,
    "profile": 0,
    "logging_steps": 1,
    "log_completions": True,
    "log_completions_steps": 1,
    "rollout_log_gb": None,
    "replay_state_gb": 0.0,
    "rollout_servers": (),
    "rollout_folder": None,
}
# Settings that no step depends on.
UNSEEN = frozenset({"output_dir", "resume", "progress_bar", "run_name", "project", "track_memory", *QUIET})
# Settings by which steps are numbered, and those that the saved weights and optimizer state depend on.
OF_SCHEDULE = (
    "seed",
    "num_iterations",
    "updates_per_rollout",
    "max_staleness",
    "prompt_order",
    "drop_last",
    "adapters",
)
OF_SHAPES = (
    *("lora_r", "lora_target_modules", "lora_bias", "lora_modules_to_save", "base_weights", "dtype", "optimizer"),
    *("momentum", "freeze_vision_tower"),
)
