"""The severities of diagnostics. Imports no jax."""

from typing import Literal

Severity = Literal["error", "warning", "note"]

# An error says that the run learns nothing, or not what it should; a warning that it may; a note that it wastes time.
SEVERITIES: dict[str, Severity] = {
    "no_rewards": "error",
    "rewards_equal": "error",
    "no_gradient": "error",
    "kl_runaway": "error",
    "entropy_collapse": "error",
    "reward_hacking": "error",
    "learning_rate_zero": "error",
    "environment_failures": "error",
    "filter_budget": "warning",
    "few_prompts": "warning",
    "all_truncated": "warning",
    "length_explosion": "warning",
    "logp_drift": "warning",
    "no_eos": "warning",
    "decoding_weights": "warning",
    "sequence_weights": "warning",
    "luspo_level": "warning",
    "vespo_level": "warning",
    "delta_unused": "note",
    "metric_for_best_model": "note",
    "padding_waste": "note",
    "slow_reward": "note",
}
PREFIXES: dict[str, Severity] = {"reward ": "error", "tracker_": "note"}  # of names that contain another name


def severity_of(name: str) -> Severity:
    """Returns the severity of the diagnostic with this name; `warning` for names of other versions."""
    if name in SEVERITIES:
        return SEVERITIES[name]
    for prefix, severity in PREFIXES.items():
        if name.startswith(prefix):
            return severity
    return "warning"
