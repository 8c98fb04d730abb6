"""Findings: what is off in a run, why, and what to do about it. Imports no jax."""

from collections.abc import Mapping, Sequence

from groupax.config import GRPOConfig

PATIENCE_STEPS = 5  # a finding about metrics needs this many steps in a row


def setup_findings(args: GRPOConfig, eos_ids: Sequence[int]) -> dict[str, str]:
    """Findings that can be told before the first step, by name."""
    findings = {}
    if args.learning_rate == 0:
        findings["learning_rate_zero"] = "learning_rate is 0, so the model will not change; set it, e.g. to 1e-6"
    if not eos_ids:
        findings["no_eos"] = (
            "neither the tokenizer nor the model's configs name an end-of-sequence token, so every completion runs to "
            "max_completion_length; set tokenizer.eos_token"
        )
    if args.decoding_weights != "same" and args.rollout_correction == "none":
        findings["decoding_weights"] = (
            f"rollouts decode with {args.decoding_weights} weights, which are not quite the policy's, and nothing "
            "makes up for it; set rollout_correction, e.g. to 'token_truncate'"
        )
    if args.loss_type == "luspo" and args.importance_sampling_level != "sequence":
        findings["luspo_level"] = (
            "loss_type 'luspo' is meant for one ratio per completion; set importance_sampling_level='sequence'"
        )
    if args.loss_type == "vespo" and args.importance_sampling_level != "token":
        findings["vespo_level"] = (
            "loss_type 'vespo' forms its own weight per completion; importance_sampling_level changes the KL term only"
        )
    return findings


def step_findings(history: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Findings in the metrics of the steps so far, by name."""
    recent = history[-PATIENCE_STEPS:]
    if len(recent) < PATIENCE_STEPS:
        return {}
    findings = {}
    if all(metrics["frac_reward_zero_std"] == 1.0 for metrics in recent):
        findings["rewards_equal"] = (
            f"for {PATIENCE_STEPS} steps all completions of each prompt got the same reward (mean "
            f"{recent[-1]['reward']:.3g}), so there is nothing to learn from; check the reward function on the samples "
            "in rollouts/, or use prompts that the model solves sometimes but not always"
        )
    if all(metrics["completions/clipped_ratio"] == 1.0 for metrics in recent):
        findings["all_truncated"] = (
            f"for {PATIENCE_STEPS} steps no completion ended by itself: all hit max_completion_length "
            f"({recent[-1]['completions/max_length']:.0f} tokens); raise it, or check that the model ends its answers "
            "(chat template, end-of-sequence token)"
        )
    filled_up = [metrics.get("filter/filled_up_frac", 0.0) for metrics in recent]
    if min(filled_up) > 0.5:
        findings["filter_budget"] = (
            f"for {PATIENCE_STEPS} steps more than half of the groups had no signal although filter_budget times as "
            "many prompts were sampled; the prompts are too easy or too hard for the model"
        )
    return findings
