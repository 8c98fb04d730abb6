"""Diagnostics: what is wrong with a run, why, and how to fix it. Imports no jax."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from groupax.core.config import GRPOConfig
from groupax.core.errors import RewardError
from groupax.core.settings.objective import WEIGHTED_BY_LENGTH
from groupax.core.types import Metrics
from groupax.events import Diagnosed, Emit, Evaluated, Event, RolloutScored, StepEnded
from groupax.parallel.kernels import kernel_faults

UNSCORED_ROLLOUTS = 3  # in a row, after which a run without any reward ends
PATIENCE_STEPS = 5  # a diagnosis from metrics needs this many steps in a row
START_STEPS = 10  # changes since the start compare the means of this many steps then and now
KL_RUNAWAY = 1.0  # nats per token
LOGP_DRIFT = 0.05  # bfloat16 alone causes about 0.01
FLOAT32_LOGP_DRIFT = 1e-5  # float32 alone causes about 1e-6
COLLAPSED = 0.1  # of the entropy at the start
EARLY_STEPS = 3  # of the start, compared with the last `PATIENCE_STEPS` while there are too few for `START_STEPS`
DECIDED, SPREAD = 0.6, 0.7  # share of the groups with equal rewards, and of the start's spread between all completions
NO_GRADIENT = 1e-8  # norm of a gradient that changes nothing
SLOW_REWARD, SLOW_REWARD_S = 0.3, 0.1  # of the steps' time, and seconds per step
REWARD_CHANGE = 0.5  # standard deviations of a reward
LONGER, SHORTER, MORE_CLIPPED = 1.5, 0.4, 0.25  # times the length at the start, and share of completions
FAILED = 0.2  # of the episodes

# An error says that the run learns nothing, or not what it should; a warning that it may; a note that it wastes time.
Severity = Literal["error", "warning", "note"]
SEVERITIES: dict[str, Severity] = {
    **dict.fromkeys(("no_rewards", "rewards_equal", "no_gradient", "kl_runaway", "entropy_collapse"), "error"),
    **dict.fromkeys(("reward_hacking", "learning_rate_zero", "environment_failures", "not_finite"), "error"),
    **dict.fromkeys(("filter_budget", "few_prompts", "all_truncated", "length_explosion", "logp_drift"), "warning"),
    **dict.fromkeys(("signal_lost", "length_collapse", "no_eos", "tool_failures", "decoding_weights"), "warning"),
    "sequence_weights": "warning",
    **dict.fromkeys(("metric_for_best_model", "slow_reward"), "note"),
}
PREFIXES: dict[str, Severity] = {"reward ": "error", "tracker_": "note"}  # of names that contain another name

Steps = Sequence[Mapping[str, float]]
Diagnose = Callable[[Steps], dict[str, str]]  # metrics of steps -> texts by name


def severity_of(name: str) -> Severity:
    """Returns the severity of the diagnostic with this name; `warning` for names of other versions."""
    if name in SEVERITIES:
        return SEVERITIES[name]
    for prefix, severity in PREFIXES.items():
        if name.startswith(prefix):
            return severity
    return "warning"


class Diagnostics:
    """Looks for what is wrong with a run and emits a `Diagnosed` event once per diagnosis, by `step_diagnostics`."""

    def __init__(self, emit: Emit, diagnose: Diagnose | None = None) -> None:
        self.emit, self.diagnose = emit, diagnose or step_diagnostics
        self.history: list[Mapping[str, float]] = []  # metrics of the run's first steps and its last ones
        self.reported: set[str] = set()  # names of diagnostics, by earlier processes of the run too
        self._found: dict[str, str] = {}  # in the last step

    def measure(self, metrics: Metrics) -> Metrics:
        """Adds a step to the history and returns the diagnostics that apply to it as metrics `health/...`."""
        self.history = remembered([*self.history, metrics])
        self._found = self.diagnose(self.history)
        return {"health/num_diagnostics": float(len(self._found)), **{f"health/{name}": 1.0 for name in self._found}}

    def __call__(self, event: Event) -> None:
        """Reports what a step or a failed reward function reveals."""
        if isinstance(event, StepEnded) and self._found:
            self.report(event.step, self._found)
        elif isinstance(event, RolloutScored | Evaluated) and event.errors:
            self.report(event.step, reward_diagnostics(event.errors))

    def report(self, step: int, found: Mapping[str, str]) -> None:
        """Emits those of the diagnostics, texts by name, that were not reported before."""
        for name, text in found.items():
            if name not in self.reported:
                self.reported.add(name)
                self.emit(Diagnosed(step, name, text))


def setup_diagnostics(args: GRPOConfig, eos_ids: Sequence[int], num_prompts: int | None = None) -> dict[str, str]:
    """Returns the diagnostics of the settings, the kernels and, if given, the number of prompts: texts by name."""
    found = {
        f"kernel/{name}": f"the kernel is left out, since {fault}; the plain form takes its place, see groupax doctor"
        for name, fault in kernel_faults().items()
    }
    wanted = args.prompts_per_step * args.updates_per_rollout
    if num_prompts is not None and num_prompts < wanted:
        found["few_prompts"] = (
            f"a rollout takes {wanted:,} prompts (prompts_per_step * updates_per_rollout) and the dataset has "
            f"{num_prompts:,}, so each is sampled {wanted / num_prompts:.3g} times, {args.num_generations:,} "
            "completions each time; lower prompts_per_step, or raise num_generations for more completions of a prompt"
        )
    if args.learning_rate == 0:
        found["learning_rate_zero"] = "learning_rate is 0, so the model will not change; set it, e.g. to 1e-6"
    if not eos_ids:
        found["no_eos"] = (
            "neither the tokenizer nor the model's configs define an end-of-sequence token, so every completion runs "
            "to max_completion_length; set tokenizer.eos_token"
        )
    if args.decoding_weights != "same" and args.rollout_correction == "none":
        found["decoding_weights"] = (
            f"rollouts decode with {args.decoding_weights} weights, which differ from the policy's, and nothing "
            "corrects for it; set rollout_correction, e.g. to 'token_truncate'"
        )
    if args.importance_sampling_level != "token" and args.loss_type in WEIGHTED_BY_LENGTH:
        found["sequence_weights"] = (
            f"with importance_sampling_level {args.importance_sampling_level!r} the loss_type {args.loss_type!r} sums "
            "over tokens, which weights each sequence by its completion length; for GSPO's objective set "
            "loss_type='grpo'"
        )
    return found


def supervised_diagnostics(history: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Returns the diagnostics of the metrics of supervised fine-tuning, as `step_diagnostics` does for GRPO."""
    recent = history[-PATIENCE_STEPS:]
    if len(recent) < PATIENCE_STEPS:
        return {}
    return _learning_rate(recent)


def reward_diagnostics(errors: Mapping[str, str]) -> dict[str, str]:
    """Returns the diagnostics of reward functions that failed, by the first error of each."""
    return {
        f"reward {name}": f"the reward function {name!r} failed; its completions go without that reward (reported "
        f"once, counted in rewards/{name}/failures):\n{error}"
        for name, error in errors.items()
    }


def tracker_diagnostics(errors: Mapping[str, str]) -> dict[str, str]:
    """Returns the diagnostics of trackers that failed, by the error of each."""
    return {
        f"tracker_{name}_failed": f"{name} failed and receives nothing more ({error}); training continues, and "
        "metrics.jsonl has everything"
        for name, error in errors.items()
    }


def skipped_update(step: int, metrics: Mapping[str, float], batch: str) -> dict[str, str]:
    """Returns the diagnosis of an update that was skipped, by the metrics of its step and the file with its batch."""
    loss, norm = metrics["loss"], metrics["grad_norm"]
    text = f"step {step}: the loss ({loss}) or the gradient's norm ({norm}) is not finite; the update was skipped, its "
    return {"not_finite": f"{text}batch is in {batch}; if this continues, lower learning_rate or max_grad_norm"}


def logp_limit(args: GRPOConfig, is_float32: bool) -> float:
    """Returns the tolerated difference between the engine's and the trainer's log-probs, averaged over a step's tokens.

    `is_float32` says whether the forward pass of updates computes in float32.
    """
    same = args.decoding_weights == args.base_weights == "same" and args.kv_cache_dtype in ("same", "float32")
    is_exact = is_float32 and same and not args.rollout_servers and not args.lora_dropout
    return FLOAT32_LOGP_DRIFT if is_exact else LOGP_DRIFT


def step_diagnostics(history: Sequence[Mapping[str, float]], logp_limit: float = LOGP_DRIFT) -> dict[str, str]:
    """Returns the diagnostics of the metrics so far, as `remembered` keeps them, texts by name (see `logp_limit`)."""
    recent = history[-PATIENCE_STEPS:]
    found: dict[str, str] = {}
    if num_unscored_steps(history):
        found["no_rewards"] = (
            f"no completion of this step has a reward: {_listed(_reward_names(recent[-1]))} returned None for every "
            "one, so the step has no learning signal; None means that a function does not apply, so check that the "
            "dataset has what the functions look at"
        )
    if len(recent) < PATIENCE_STEPS:
        return found
    found |= _of_last_steps(recent, logp_limit) | _gradient(history[:-PATIENCE_STEPS], recent)
    if len(history) >= 2 * START_STEPS:
        start, late = history[:START_STEPS], history[-START_STEPS:]
        found |= _entropy(start, late) or _signal(start, late)
        found |= _trends(start, late)
    elif len(history) >= EARLY_STEPS + PATIENCE_STEPS:
        found |= _entropy(history[:EARLY_STEPS], recent)
    differed = any(metrics["frac_reward_zero_std"] < 1.0 for metrics in history[:-PATIENCE_STEPS])
    if differed and found.keys() & {"no_gradient", "entropy_collapse"}:  # which explain why rewards are equal now
        found.pop("rewards_equal", None)
    return found


def num_unscored_steps(history: Sequence[Mapping[str, float]]) -> int:
    """Returns the number of last steps in a row without any reward, at most `START_STEPS` in long runs."""
    scored = (index for index, metrics in enumerate(reversed(history)) if not _is_unscored(metrics))
    return next(scored, len(history))


def stop_if_unscored(unscored: int, step: int, num_steps: int, updates_per_rollout: int, names: Sequence[str]) -> None:
    """Raises a RewardError if no completion had a reward in several rollouts, or in the `num_steps` of the whole run.

    The last `unscored` steps had no reward. A few such rollouts may happen where rewards apply to some prompts only;
    more are a mistake.
    """
    patience = min(UNSCORED_ROLLOUTS * max(1, updates_per_rollout), START_STEPS)
    if unscored >= patience or unscored == step == num_steps:
        raise RewardError(
            f"in steps {step - unscored + 1} to {step} no completion had a reward: every function "
            f"({', '.join(map(repr, names))}) returned None for every one of them. None means that a function does not "
            "apply to a completion; return a number for those that it judges, and check that the dataset has what the "
            "functions look at"
        )


def remembered(history: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Returns the part of the history that `step_diagnostics` needs."""
    return [*history[:START_STEPS], *history[START_STEPS:][-START_STEPS:]]


def _of_last_steps(recent: Steps, limit: float) -> dict[str, str]:
    """Returns the diagnostics of steps in a row, as far as they need no others."""
    found: dict[str, str] = {}
    last, scored = recent[-1], [metrics for metrics in recent if not _is_unscored(metrics)]
    if scored and all(metrics["frac_reward_zero_std"] == 1.0 for metrics in recent):
        found["rewards_equal"] = (
            f"for {PATIENCE_STEPS} steps all completions of each prompt got the same reward (mean "
            f"{scored[-1]['reward']:.3g}), so there is nothing to learn from; check the reward function on the samples "
            "in rollouts/, or use prompts that the model solves sometimes but not always"
        )
    if min(_values(recent, "filter/filled_up_frac")) > 0.5:
        found["filter_budget"] = (
            f"for {PATIENCE_STEPS} steps more than half of the groups had no signal although filter_budget times as "
            "many prompts were sampled; the prompts are too easy or too hard for the model"
        )
    ends = {name.removeprefix("stop/"): share for name, share in last.items() if name.startswith("stop/")}
    if all(metrics["completions/clipped_ratio"] == 1.0 for metrics in recent) and ends:
        shares = ", ".join(f"{end} {share:.0%}" for end, share in ends.items() if share > 0)
        found["all_truncated"] = (
            f"for {PATIENCE_STEPS} steps a limit ended every episode ({shares}); raise max_turns, max_tool_calls, "
            "max_turn_tokens or max_completion_length, whichever it was, or check that the model ends its turns (chat "
            "template, end-of-sequence token)"
        )
    elif all(metrics["completions/clipped_ratio"] == 1.0 for metrics in recent):
        found["all_truncated"] = (
            f"for {PATIENCE_STEPS} steps no completion ended with a stop token: all reached max_completion_length "
            f"({last['completions/max_length']:.0f} tokens); raise it, or check that the model ends its answers (chat "
            "template, end-of-sequence token)"
        )
    failed, timed_out = (_values(recent, f"stop/{end}") for end in ("env_error", "timeout"))
    if min(map(sum, zip(failed, timed_out, strict=True))) > FAILED:
        found["environment_failures"] = (
            f"for {PATIENCE_STEPS} steps more than {FAILED:.0%} of the episodes were left out: in the last one the "
            f"environments of {failed[-1]:.0%} failed and those of {timed_out[-1]:.0%} took longer than "
            "tool_timeout_s; the warnings have their errors"
        )
    if min(_values(recent, "tools/failure_frequency")) == 1.0:
        found["tool_failures"] = (
            f"for {PATIENCE_STEPS} steps every call of a tool failed; read the results of the calls in rollouts/, and "
            "check the tools, or that the model sees how to call them"
        )
    kl = _values(recent, "kl")
    if min(kl) > KL_RUNAWAY:
        found["kl_runaway"] = (
            f"for {PATIENCE_STEPS} steps the KL to the reference was above {KL_RUNAWAY:g} nats per token (now "
            f"{kl[-1]:.3g}): the policy has left the starting model; lower learning_rate, raise beta, or look for "
            "rewards that nonsense can earn"
        )
    found |= _learning_rate(recent)
    is_asynchronous = "time/wait_s" in last  # then rollouts are of earlier policies
    drift = _values(recent, "rollout/logp_diff_mean")
    if min(drift) > limit and not is_asynchronous:
        found["logp_drift"] = (
            f"for {PATIENCE_STEPS} steps engine and trainer disagreed on the log-probs of tokens by {drift[-1]:.3g} on "
            f"average (rollout/logp_diff_mean, above {limit:g}), so that updates are off policy; set "
            "rollout_correction, e.g. to 'token_truncate', or decoding_weights='same' and kv_cache_dtype='same'"
        )
    waited, taken = sum(_values(recent, "time/reward_s")), sum(_values(recent, "step_time"))
    if is_asynchronous:  # training waits for these at most
        waited = min(waited, sum(_values(recent, "time/wait_s")))
    if waited > SLOW_REWARD * taken and waited > SLOW_REWARD_S * PATIENCE_STEPS:
        found["slow_reward"] = (
            f"in {PATIENCE_STEPS} steps training waited {waited:.1f} s of {taken:.1f} s for rewards; raise "
            "reward_concurrency, set reward_workers for functions that compute, make functions that wait async, or set "
            "reward_scope='group', so that they run while others decode, or max_staleness=1, so that they run while "
            "updates do"
        )
    return found


def _learning_rate(recent: Steps) -> dict[str, str]:
    if any(metrics["learning_rate"] != 0.0 for metrics in recent):
        return {}
    return {
        "learning_rate_zero": f"for {PATIENCE_STEPS} steps the learning rate was 0, so the model did not change; set "
        "learning_rate, or learning_rate_end if the schedule has ended"
    }


def _gradient(before: Steps, recent: Steps) -> dict[str, str]:
    """Returns a diagnostic of steps without a gradient, unless the policy has learned all that its rewards ask for."""
    norms = [metrics.get("grad_norm", math.inf) for metrics in recent]
    is_at_rest = any(metrics["learning_rate"] == 0.0 for metrics in recent)
    if not max(norms) <= NO_GRADIENT or any(map(_is_unscored, recent)) or is_at_rest:
        return {}
    if any(metrics["frac_reward_zero_std"] < 1.0 for metrics in recent):
        return {
            "no_gradient": f"for {PATIENCE_STEPS} steps the gradient was 0 (grad_norm at most {max(norms):.2g}) "
            "although rewards differ within groups, so the model does not change; check that the loss has tokens "
            "(mask_truncated_completions, masks of rollouts), that advantages do not cancel (reward_weights), that "
            "ratios are not all clipped (epsilon), and that the trained weights take part in the forward pass (LoRA)"
        }
    learned = [metrics for metrics in before if metrics.get("grad_norm", 0.0) > NO_GRADIENT]
    reward, reward_then = _mean(recent, "reward"), _mean(learned, "reward")
    if not reward < reward_then:
        return {}
    return {
        "no_gradient": f"for {PATIENCE_STEPS} steps the gradient was 0 (grad_norm), because all completions of each "
        f"prompt get the same reward, which was not so before: the mean reward fell from {reward_then:.3g} to "
        f"{reward:.3g}. Updates have broken the policy, and it cannot recover by itself; start again, or resume from "
        "an earlier checkpoint, with a lower learning_rate, warmup_ratio or a smaller max_grad_norm"
    }


def _entropy(start: Steps, recent: Steps) -> dict[str, str]:
    entropy, entropy_then = _mean(recent, "entropy"), _mean(start, "entropy")
    reward, reward_then = _mean(recent, "reward"), _mean(start, "reward")
    if not entropy <= COLLAPSED * entropy_then or reward > reward_then + 0.1 * _mean(start, "reward_std"):
        return {}
    return {
        "entropy_collapse": f"the entropy fell from {entropy_then:.3g} to {entropy:.3g} nats per token, and the reward "
        f"has not risen ({reward_then:.3g}, now {reward:.3g}): completions hardly differ any more; lower "
        "learning_rate, set entropy_coef, e.g. to 0.001, raise epsilon_high, e.g. to 0.28, or the temperature"
    }


def _signal(start: Steps, recent: Steps) -> dict[str, str]:
    """Returns a diagnostic of runs in which most prompts have come to be solved always or never."""
    equal, equal_then = _mean(recent, "frac_reward_zero_std"), _mean(start, "frac_reward_zero_std")
    spread = _mean(recent, "reward_std") > SPREAD * _mean(start, "reward_std")  # not where all are solved
    if not (max(DECIDED, 2 * equal_then) < equal < 1.0 and spread):
        return {}
    return {
        "signal_lost": f"in {equal:.0%} of the groups all completions have the same reward ({equal_then:.0%} at the "
        "start), although prompts differ in theirs: most are solved always or never, and teach nothing; the entropy "
        f"went from {_mean(start, 'entropy'):.3g} to {_mean(recent, 'entropy'):.3g} nats per token. Raise the "
        "temperature or num_generations, set entropy_coef, e.g. to 0.001, or filter_zero_variance, or end the run"
    }


def _trends(start: Steps, recent: Steps) -> dict[str, str]:
    found = {}
    changes = _reward_changes(start, recent)
    risen = [name for name, change in changes.items() if change > REWARD_CHANGE]
    fallen = [name for name, change in changes.items() if change < -REWARD_CHANGE]
    if risen and fallen:
        found["reward_hacking"] = (
            f"the reward {_listed(risen)} has risen while {_listed(fallen)} has fallen: the policy may have found a "
            "way to get the one without the other; read the completions with the highest reward, and weight the "
            "functions differently (reward_weights) or make them depend on each other"
        )
    length, length_then = _mean(recent, "completions/mean_length"), _mean(start, "completions/mean_length")
    clipped, clipped_then = _mean(recent, "completions/clipped_ratio"), _mean(start, "completions/clipped_ratio")
    if length > LONGER * length_then and clipped > clipped_then + MORE_CLIPPED:
        found["length_explosion"] = (
            f"completions have grown from {length_then:.0f} to {length:.0f} tokens, and {clipped:.0%} of them are cut "
            f"off ({clipped_then:.0%} at the start): length may be what is rewarded; look at the longest ones, add a "
            "length reward (docs/rewards.md), set loss_type='dr_grpo', or mask_truncated_completions"
        )
    if length < SHORTER * length_then and clipped_then < MORE_CLIPPED:
        found["length_collapse"] = (
            f"completions have shrunk from {length_then:.0f} to {length:.0f} tokens: texts that say little may earn "
            "the rewards; read the completions with the highest reward, and let a reward ask for what they lack"
        )
    return found


def _reward_changes(start: Steps, recent: Steps) -> dict[str, float]:
    """Returns the change of each reward function's mean in standard deviations."""
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
    """Returns a metric of each step, 0 where a step does not have it."""
    return [metrics.get(name, 0.0) for metrics in steps]


def _mean(steps: Steps, name: str) -> float:
    """Returns the mean over the steps in which the metric is a finite number; NaN if there is none."""
    known = [metrics[name] for metrics in steps if name in metrics and math.isfinite(metrics[name])]
    return sum(known) / len(known) if known else math.nan


def _listed(names: Sequence[str]) -> str:
    return " and ".join(repr(name) for name in names)
