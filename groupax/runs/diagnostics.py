"""Findings: what is off in a run, why, and what to do about it. Imports no jax."""

import math
from collections.abc import Mapping, Sequence

from groupax.config import GRPOConfig
from groupax.settings.objective import UNCLIPPED, WEIGHTED_BY_LENGTH

UNSCORED_ROLLOUTS = 3  # in a row, after which a run without any reward ends
PATIENCE_STEPS = 5  # a finding about metrics needs this many steps in a row
START_STEPS = 10  # what has changed since the start is told by the means of so many steps then and now
KL_RUNAWAY = 1.0  # nats per token
LOGP_DRIFT = 0.05  # bfloat16 alone makes about 0.01
FLOAT32_LOGP_DRIFT = 1e-5  # float32 alone makes about 1e-6
COLLAPSED = 0.1  # of the entropy at the start
PADDING_WASTE = 0.6  # of the tokens that are computed
SLOW_REWARD, SLOW_REWARD_S = 0.3, 0.1  # of the steps' time, and seconds per step
REWARD_CHANGE = 0.5  # standard deviations of a reward
LONGER, MORE_CLIPPED = 1.5, 0.25  # times the length at the start, and share of completions

Steps = Sequence[Mapping[str, float]]


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
    if args.importance_sampling_level == "sequence" and args.loss_type in WEIGHTED_BY_LENGTH:
        findings["sequence_weights"] = (
            f"with importance_sampling_level 'sequence' the loss_type {args.loss_type!r} sums over tokens, which "
            "weights each sequence by its completion length; for GSPO's objective set loss_type='grpo'"
        )
    if args.delta is not None and args.loss_type in UNCLIPPED:
        findings["delta_unused"] = f"delta {args.delta} has no effect with loss_type {args.loss_type!r}; leave it unset"
    if args.loss_type == "vespo" and args.importance_sampling_level != "token":
        findings["vespo_level"] = (
            "loss_type 'vespo' forms its own weight per completion; importance_sampling_level changes the KL term only"
        )
    return findings


def reward_findings(errors: Mapping[str, str]) -> dict[str, str]:
    """Findings about reward functions that failed, by name.

    Args:
        errors: by reward, what went wrong first.
    """
    return {
        f"reward {name}": f"the reward function {name!r} failed; its completions go without that reward (told once, "
        f"counted in rewards/{name}/failures):\n{error}"
        for name, error in errors.items()
    }


def logp_limit(args: GRPOConfig, is_float32: bool) -> float:
    """Returns by how much engine and trainer may differ in a token's log-prob, in the mean over a step's tokens.

    Args:
        args: of the run.
        is_float32: whether the forward pass of updates computes in float32.
    """
    same = args.decoding_weights == args.base_weights == "same" and args.kv_cache_dtype in ("same", "float32")
    return FLOAT32_LOGP_DRIFT if is_float32 and same and not args.rollout and not args.lora_dropout else LOGP_DRIFT


def step_findings(history: Sequence[Mapping[str, float]], logp_limit: float = LOGP_DRIFT) -> dict[str, str]:
    """Findings in the metrics of the steps so far, by name.

    Args:
        history: metrics of the run's first `START_STEPS` steps and of the last ones (see `remembered`).
        logp_limit: see the function of that name.
    """
    recent = history[-PATIENCE_STEPS:]
    findings: dict[str, str] = {}
    if num_unscored_steps(history):
        findings["no_rewards"] = (
            f"no completion of this step has a reward: {_listed(_reward_names(recent[-1]))} returned None for every "
            "one, so that the step teaches nothing; None means that a function does not apply, so check that the "
            "dataset has what the functions look at"
        )
    if len(recent) < PATIENCE_STEPS:
        return findings
    for look in (_of_rewards, _of_lengths, _of_policy, _of_efficiency):
        findings |= look(recent)
    findings |= _of_agreement(recent, logp_limit)
    if len(history) >= 2 * START_STEPS:
        findings |= _since_the_start(history[:START_STEPS], history[-START_STEPS:])
    return findings


def num_unscored_steps(history: Sequence[Mapping[str, float]]) -> int:
    """Returns how many of the last steps in a row had no completion with a reward.

    Args:
        history: as `step_findings` takes it, so that the answer is at most `START_STEPS` in long runs.
    """
    scored = (index for index, metrics in enumerate(reversed(history)) if not _is_unscored(metrics))
    return next(scored, len(history))


def remembered(history: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """What `step_findings` needs of the steps so far."""
    return [*history[:START_STEPS], *history[START_STEPS:][-START_STEPS:]]


def _of_rewards(recent: Steps) -> dict[str, str]:
    findings = {}
    scored = [metrics for metrics in recent if not _is_unscored(metrics)]
    if scored and all(metrics["frac_reward_zero_std"] == 1.0 for metrics in recent):
        findings["rewards_equal"] = (
            f"for {PATIENCE_STEPS} steps all completions of each prompt got the same reward (mean "
            f"{scored[-1]['reward']:.3g}), so there is nothing to learn from; check the reward function on the samples "
            "in rollouts/, or use prompts that the model solves sometimes but not always"
        )
    if min(_values(recent, "filter/filled_up_frac")) > 0.5:
        findings["filter_budget"] = (
            f"for {PATIENCE_STEPS} steps more than half of the groups had no signal although filter_budget times as "
            "many prompts were sampled; the prompts are too easy or too hard for the model"
        )
    return findings


def _of_lengths(recent: Steps) -> dict[str, str]:
    if not all(metrics["completions/clipped_ratio"] == 1.0 for metrics in recent):
        return {}
    return {
        "all_truncated": f"for {PATIENCE_STEPS} steps no completion ended by itself: all hit max_completion_length "
        f"({recent[-1]['completions/max_length']:.0f} tokens); raise it, or check that the model ends its answers "
        "(chat template, end-of-sequence token)"
    }


def _of_policy(recent: Steps) -> dict[str, str]:
    findings = {}
    kl = _values(recent, "kl")
    if min(kl) > KL_RUNAWAY:
        findings["kl_runaway"] = (
            f"for {PATIENCE_STEPS} steps the KL to the reference was above {KL_RUNAWAY:g} nats per token (now "
            f"{kl[-1]:.3g}): the policy has left the starting model; lower learning_rate, raise beta, or look for "
            "rewards that nonsense can get"
        )
    if all(metrics["learning_rate"] == 0.0 for metrics in recent):
        findings["learning_rate_zero"] = (
            f"for {PATIENCE_STEPS} steps the learning rate was 0, so the model did not change; set learning_rate, or "
            "learning_rate_end if the schedule has come to its end"
        )
    return findings


def _of_agreement(recent: Steps, limit: float) -> dict[str, str]:
    drift = _values(recent, "rollout/logp_diff_mean")
    if min(drift) <= limit or "time/wait_s" in recent[-1]:  # rollouts made ahead: the policy has moved since
        return {}
    return {
        "logp_drift": f"for {PATIENCE_STEPS} steps engine and trainer disagreed on the log-probs of tokens by "
        f"{drift[-1]:.3g} on average (rollout/logp_diff_mean, above {limit:g}), so that updates are off policy; set "
        "rollout_correction, e.g. to 'token_truncate', or decoding_weights='same' and kv_cache_dtype='same'"
    }


def _of_efficiency(recent: Steps) -> dict[str, str]:
    findings = {}
    padding = _values(recent, "padding_frac")
    if min(padding) > PADDING_WASTE:
        findings["padding_waste"] = (
            f"for {PATIENCE_STEPS} steps more than {PADDING_WASTE:.0%} of what updates computed was padding (now "
            f"{padding[-1]:.0%}); a step has too few tokens for micro_batch_tokens: lower that, or raise "
            "prompts_per_step or num_generations"
        )
    waited, taken = sum(_values(recent, "time/reward_s")), sum(_values(recent, "step_time"))
    if "time/wait_s" in recent[-1]:  # rollouts are made ahead: training waits for rewards no longer than for these
        waited = min(waited, sum(_values(recent, "time/wait_s")))
    if waited > SLOW_REWARD * taken and waited > SLOW_REWARD_S * PATIENCE_STEPS:
        findings["slow_reward"] = (
            f"in {PATIENCE_STEPS} steps training waited {waited:.1f} s of {taken:.1f} s for rewards; raise "
            "reward_concurrency, set reward_workers for functions that compute, make functions that wait async, or set "
            "reward_batch='group', so that they run while others decode, or max_staleness=1, so that they run while "
            "updates do"
        )
    return findings


def _since_the_start(start: Steps, recent: Steps) -> dict[str, str]:
    findings = {}
    entropy, entropy_then = _mean(recent, "entropy"), _mean(start, "entropy")
    reward, reward_then = _mean(recent, "reward"), _mean(start, "reward")
    if entropy < COLLAPSED * entropy_then and not reward > reward_then + 0.1 * _mean(start, "reward_std"):
        findings["entropy_collapse"] = (
            f"the entropy fell from {entropy_then:.3g} to {entropy:.3g} nats per token, and the reward has not risen "
            f"({reward_then:.3g}, now {reward:.3g}): completions hardly differ any more; lower learning_rate, set "
            "entropy_coef, e.g. to 0.001, raise epsilon_high, e.g. to 0.28, or the temperature"
        )
    changes = _reward_changes(start, recent)
    risen = [name for name, change in changes.items() if change > REWARD_CHANGE]
    fallen = [name for name, change in changes.items() if change < -REWARD_CHANGE]
    if risen and fallen:
        findings["reward_hacking"] = (
            f"the reward {_listed(risen)} has risen while {_listed(fallen)} has fallen: the policy may have found a "
            "way to get the one without the other; read the completions with the highest reward, and weigh the "
            "functions otherwise (reward_weights) or make them depend on each other"
        )
    length, length_then = _mean(recent, "completions/mean_length"), _mean(start, "completions/mean_length")
    clipped, clipped_then = _mean(recent, "completions/clipped_ratio"), _mean(start, "completions/clipped_ratio")
    if length > LONGER * length_then and clipped > clipped_then + MORE_CLIPPED:
        findings["length_explosion"] = (
            f"completions have grown from {length_then:.0f} to {length:.0f} tokens, and {clipped:.0%} of them are cut "
            f"off ({clipped_then:.0%} at the start): length may be what is rewarded; look at the longest ones, add a "
            "length reward (docs/rewards.md), set loss_type='dr_grpo', or mask_truncated_completions"
        )
    return findings


def _reward_changes(start: Steps, recent: Steps) -> dict[str, float]:
    """By how many standard deviations each reward function's mean has changed."""
    names = _reward_names(recent[-1])
    changes = {}
    for name in names if len(names) > 1 else ():
        std = max(_mean(start, f"rewards/{name}/std"), _mean(recent, f"rewards/{name}/std"))
        change = _mean(recent, f"rewards/{name}/mean") - _mean(start, f"rewards/{name}/mean")
        changes[name] = change / std if std > 0 else 0.0
    return changes


def _reward_names(metrics: Mapping[str, float]) -> list[str]:
    prefix, suffix = "rewards/", "/mean"
    names = (name for name in metrics if name.startswith(prefix) and name.endswith(suffix))
    return [name[len(prefix) : -len(suffix)] for name in names]


def _is_unscored(metrics: Mapping[str, float]) -> bool:
    return metrics.get("rewards/unscorable_frac") == 1.0


def _values(steps: Steps, name: str) -> list[float]:
    """Of a metric that some steps may not have; 0 there."""
    return [metrics.get(name, 0.0) for metrics in steps]


def _mean(steps: Steps, name: str) -> float:
    """Over the steps in which the metric is a number; NaN if it is one in none of them."""
    known = [metrics[name] for metrics in steps if name in metrics and math.isfinite(metrics[name])]
    return sum(known) / len(known) if known else math.nan


def _listed(names: Sequence[str]) -> str:
    return " and ".join(repr(name) for name in names)
