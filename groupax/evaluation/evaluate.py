"""Evaluation of a model on held-out prompts: sampling, scoring and estimates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from groupax.core.settings.fields import check_known
from groupax.core.settings.sampling import SamplingParams
from groupax.core.types import Metrics, Rollout
from groupax.data.prompts import PromptSet
from groupax.engine.sequence import Sampler
from groupax.episodes.play import Prompts
from groupax.evaluation.items import ACCURACY_REWARDS, ONLY_SET, Item, estimates, make_items
from groupax.events import Emit, counted, ignore
from groupax.rewards.contract import Reward
from groupax.rewards.runner import Scored
from groupax.rollouts.collector import Episodes, Scoring, sample_groups
from groupax.rollouts.completions import completion_metrics, episode_metrics, logged_metrics, with_logged
from groupax.rollouts.estimates import Estimate


@dataclass(frozen=True, eq=False)
class SetEvaluation:
    """The results of a model on one evaluation set.

    Attributes:
        items: Each prompt with its completions, in the order of the set.
        estimates: pass@k, maj@n, the reward and each reward function, with 95 % intervals.
        metrics: The estimates and their intervals, lengths, truncation, ends and calls of episodes, failures and
            omitted prompts, as plain numbers.
        params: Sampling parameters.
        correctness_reward: Reward whose 1 means that a completion is correct.
        errors: First error of each reward that failed.
        groups: Scored completions of each prompt, with their tokens.
    """

    items: Sequence[Item]
    estimates: Mapping[str, Estimate]
    metrics: Metrics
    params: SamplingParams
    correctness_reward: str | None
    errors: Mapping[str, str]
    groups: Sequence[Sequence[Rollout]] = ()

    def text(self) -> str:
        """Returns the number of prompts and the estimates with their intervals in one line."""
        shown = ", ".join(f"{name} {each}" for name, each in self.estimates.items())
        return f"{len(self.items):,} prompts: {shown or 'no reward applies'}"

    def __repr__(self) -> str:
        return f"<SetEvaluation: {self.text()}>"


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The results of a model on its evaluation sets.

    Attributes:
        sets: Results by name of the set.
    """

    sets: Mapping[str, SetEvaluation]

    def __repr__(self) -> str:
        """Returns the estimates of each set in one line."""
        start = f"<{type(self).__name__}: "
        lines = (f"{name}, {each.text()}" for name, each in self.sets.items())
        return start + f"\n{' ' * len(start)}".join(lines) + ">"

    @property
    def metrics(self) -> Metrics:
        """The metrics of all sets. If the sets have names, they precede those of the metrics."""
        if set(self.sets) == {ONLY_SET}:
            return dict(self.sets[ONLY_SET].metrics)
        return {f"{name}_{metric}": value for name, each in self.sets.items() for metric, value in each.metrics.items()}

    @property
    def errors(self) -> Mapping[str, str]:
        """An error of each reward that failed in one of the sets."""
        return {name: error for each in self.sets.values() for name, error in each.errors.items()}

    @property
    def broken_rewards(self) -> list[str]:
        """The names of rewards that failed and that no completion of any set has."""
        items = [item for each in self.sets.values() for item in each.items]
        rewards = [completion.rewards for item in items for completion in item.completions]
        return [name for name in self.errors if all(own.get(name) is None for own in rewards)]


def evaluate(
    sampler: Sampler,
    episodes: Episodes,
    scoring: Scoring,
    prompts: PromptSet,
    params: SamplingParams,
    emit: Emit = ignore,
    phase: str = "evaluating",
) -> SetEvaluation:
    """Samples `params.n` completions of every prompt and scores them.

    Args:
        sampler: Sampler with the weights to evaluate.
        episodes: How prompts become completions.
        scoring: How completions get rewards. Without a correctness reward there are no pass@k and maj@n.
        prompts: Evaluation set.
        params: Sampling parameters.
        emit: Receives the phases of sampling and scoring.
        phase: Name of the sampling phase.

    Raises:
        RewardError: A call failed, and the runner's settings are to raise.
    """
    rules, names, correctness_reward = episodes.rules, scoring.runner.names, scoring.correctness_reward
    asked = Prompts(prompts.examples, prompts.token_ids, prompts.images_of(range(len(prompts))))
    groups = sample_groups(sampler, episodes.tokenizer, asked, params, step=0, rules=rules)
    scored = scoring.runner.score(counted(groups, emit, phase, len(prompts), f"{phase}, scoring"))
    items = make_items(scored.groups, names, scoring.weights, correctness_reward)
    found = estimates(items)
    of_episodes = episode_metrics([row for group in scored.groups for row in group]) if rules.has_turns else {}
    metrics = (
        _metrics(found, scored, names)
        | of_episodes
        | {
            "prompts": float(len(items)),
            "prompts_dropped": float(prompts.num_dropped),
            "prompts_truncated": float(prompts.num_truncated),
            "prompts_unscorable": float(sum(not item.is_scorable for item in items)) if correctness_reward else 0.0,
        }
    )
    metrics = with_logged(metrics, logged_metrics([scored]))
    return SetEvaluation(items, found, metrics, params, correctness_reward, scored.errors, scored.groups)


def _metrics(found: Mapping[str, Estimate], scored: Scored, names: Sequence[str]) -> Metrics:
    metrics: Metrics = {}
    for name, estimate in found.items():
        metrics |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    for name in ("reward", *(f"rewards/{name}/mean" for name in names)):
        metrics.setdefault(name, float("nan"))
    metrics |= {f"rewards/{name}/failures": float(count) for name, count in scored.failures.items() if count}
    return metrics | completion_metrics([row for group in scored.groups for row in group])


def find_correctness_reward(name: str | None, rewards: Sequence[Reward]) -> str | None:
    """Returns the reward whose 1 means that a completion is correct: `name`, or else the first built-in one.

    Raises:
        ValueError: `name` is not one of the rewards.
    """
    names = [reward.name for reward in rewards]
    if name is not None:
        check_known(name, names, f"correctness_reward is {name!r}, which is not a reward function of the run")
    return name or next((each for each in names if each in ACCURACY_REWARDS), None)
