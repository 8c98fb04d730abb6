"""Collects experience: groups of completions with rewards, advantages and log-probs, for updates to train on."""

from collections.abc import Callable, Generator, Mapping
from collections.abc import Sequence as Many
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from groupax.core.config import GRPOConfig
from groupax.core.errors import RewardError, RunError, is_out_of_memory
from groupax.core.schedule import UpdateSchedule
from groupax.core.settings.objective import AdvantageSettings
from groupax.core.settings.sampling import SamplingParams
from groupax.core.types import Metrics, Rollout, Row, TrainerState
from groupax.data.examples import visit_order
from groupax.data.prompts import PromptSet
from groupax.data.tokenizer import decode, special_token_ids
from groupax.engine.sequence import PolicySampler, Sampler, Sequence
from groupax.episodes.environment import warn_of_failure
from groupax.episodes.episode import stacked_experts
from groupax.episodes.play import Prompts, fault_of, play_episodes
from groupax.episodes.record import Record
from groupax.episodes.rules import SINGLE_TURNS, Rules
from groupax.events import Emit, PhaseStarted, counted, ignore
from groupax.objective.advantages import Advantages, find_advantage_estimator, group_advantages
from groupax.parallel import processes
from groupax.rewards.contract import reward_matrix
from groupax.rewards.runner import RewardRunner, Scored
from groupax.rollouts.completions import (
    completion_metrics,
    episode_metrics,
    logged_metrics,
    reward_metrics,
    solved_metrics,
    trl_zero_std_frac,
    with_logged,
)
from groupax.rollouts.state import Cursor, Experience, Group, masked_ends, row_of
from groupax.training.learner import Learner


@dataclass(frozen=True, eq=False)
class Episodes:
    """The parts that turn prompts into completions."""

    tokenizer: Any  # tokenizer of the prompts
    rules: Rules  # tools and environments
    # returns the folder where what tools and environments answer is recorded; None for nowhere
    records: Callable[[], Path | None] = lambda: None


@dataclass(frozen=True, eq=False)
class Scoring:
    """The parts that give completions rewards."""

    runner: RewardRunner  # runner of the reward functions, which must be entered during use
    weights: np.ndarray  # weight of each reward function
    correctness_reward: str | None = None  # name of the function whose 1.0 means solved, if any
    num_steps: int = 0  # number of optimizer steps of the run, which reward functions may see


@dataclass(eq=False)
class Collector:
    """Samples completions of a run's prompts with the learner's policy, and prepares them for updates.

    Attributes:
        args: Settings of the run.
        schedule: Schedule of rollouts and optimizer steps.
        prompts: Prompts of the run.
        learner: Learner that computes log-probs; only its set of known shapes changes.
        engine: Engine that samples; its weights are set to the policy's.
        episodes: How it samples.
        scoring: How it scores.
        emit: Receives the phases of sampling and scoring.
        params, masked_ends: Sampling parameters, and ends without a loss, by `args`.
        num_prompts, prompts_per_epoch: Prompts of the dataset, and those that an epoch visits.
    """

    args: GRPOConfig
    schedule: UpdateSchedule
    prompts: PromptSet
    learner: Learner
    engine: PolicySampler
    episodes: Episodes
    scoring: Scoring
    emit: Emit = ignore

    def __post_init__(self) -> None:
        self.params, self.masked_ends = sampling_params(self.args), masked_ends(self.args)
        self.num_prompts = len(self.prompts)
        self.prompts_per_epoch = self.schedule.prompts_per_epoch(self.num_prompts)

    def collect(self, cursor: Cursor) -> Experience:
        """Returns a rollout by the learner's policy.

        This is the part of Algorithm 1 before its updates (arXiv:2402.03300): `sample`, `score` and the advantages in
        `rollout`, then `with_logprobs`. The result depends only on cursor and learner, of which only the set of known
        shapes may change.
        """
        self.engine.params = self.learner.policy
        experience = self.rollout(self.engine, cursor, cursor.step)
        self.engine.release()
        return self.with_logprobs(experience, cursor)

    def rollout(self, sampler: Sampler, cursor: Cursor, policy_version: int) -> Experience:
        """Returns groups with rewards and advantages, those to train on first; does not use the learner or its devices.

        With `filter_zero_variance` groups without signal are replaced by groups of further prompts, within the budget.
        When it is spent, they fill the rest, so that the size of a step does not change.
        """
        filters, wanted = self.args.filter_zero_variance, self.schedule.prompts_per_rollout
        budget = int(wanted * self.args.filter_budget) if filters else wanted
        kept: list[Group] = []
        flat: list[Group] = []  # without signal
        rounds: list[Scored] = []
        runner = self.scoring.runner
        while len(kept) < wanted and (first := len(kept) + len(flat)) < budget:
            count = min(wanted - len(kept), budget - first)
            sampled = self.sample(sampler, cursor, policy_version, first, count)  # o_1, ..., o_G of each prompt
            runner.state = self.trainer_state(cursor)
            with closing(sampled):  # r, while further groups are sampled
                rounds.append(runner.score(counted(sampled, self.emit, "sampling", count, "scoring")))
            for group in rounds[-1].groups:
                (flat if filters and self.advantages([group]).zero_std[0] else kept).append(group)
        num_filled = wanted - len(kept)
        trained, dropped = kept + flat[:num_filled], flat[num_filled:]
        groups = with_advantages(trained, self.advantages(trained)) + dropped  # A
        errors = {name: error for scored in reversed(rounds) for name, error in scored.errors.items()}
        if errors:
            self._stop_if_a_reward_never_works(rounds, errors, cursor)
        metrics: Metrics = {
            "time/rollout_s": sum(scored.rollout_s for scored in rounds),
            "time/reward_s": sum(scored.reward_s for scored in rounds),
        }
        for name in runner.names:
            metrics[f"rewards/{name}/failures"] = float(sum(scored.failures[name] for scored in rounds))
        if filters:
            metrics |= {
                "filter/sampled_prompts": float(len(groups)),
                "filter/rounds": float(len(rounds)),
                "filter/dropped_frac": len(dropped) / len(groups),
                "filter/filled_up_frac": num_filled / wanted,
            }
        experience = self.experience(groups, cursor, metrics, errors)
        if any(scored.logged for scored in rounds):
            return replace(experience, metrics=with_logged(experience.metrics, logged_metrics(rounds)))
        return experience

    def sample(
        self, sampler: Sampler, cursor: Cursor, policy_version: int, first: int, count: int
    ) -> Generator[Group, None, None]:
        """Yields the G completions of each of the next prompts as soon as they have ended.

        Raises:
            RunError: The devices have too little memory.
        """
        visited, rules = self.visited(cursor.num_prompts + first, count), self.episodes.rules
        own = self.prompts
        prompts = Prompts(
            [own.examples[index] for index in visited],
            [own.token_ids[index] for index in visited],
            own.images_of(visited) if own.images is not None else (),
            first,
        )
        number, record = cursor.num_rollouts, self.record(cursor.num_rollouts) if rules.has_turns else None
        try:
            yield from sample_groups(
                sampler, self.episodes.tokenizer, prompts, self.params, number, policy_version, rules, record
            )
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            args = self.args
            raise RunError(
                f"out of memory while sampling; lower max_concurrent_rows (now {args.max_concurrent_rows}) or "
                f"kv_cache_gb (now {args.kv_cache_gb}). The devices say:\n{error}"
            ) from error

    def advantages(self, groups: Many[Group], penalty: np.ndarray | None = None) -> Advantages:
        """Returns the advantages of groups by their rewards, minus a penalty of each completion if there is one."""
        rows = [row for group in groups for row in group]
        weights, num_generations = self.scoring.weights, self.args.num_generations
        return advantages_of(rows, self.scoring.runner.names, weights, num_generations, self.args, penalty)

    def with_logprobs(self, experience: Experience, cursor: Cursor) -> Experience:
        """Returns a sampled rollout with its minibatches and the log-probs of the reference and the present policy."""
        self.emit(PhaseStarted("computing log-probs"))
        learner, num_trained = self.learner, self.schedule.prompts_per_rollout
        trained, metrics = experience.groups[:num_trained], experience.metrics
        minibatches = self.cut(trained)
        if learner.reference is not None:
            with learner.reference_on_devices() as reference:
                ref_logps = [learner.logprobs(reference, rows)[0] for rows in minibatches]
            if self.args.use_kl_in_reward:
                trained, penalties = self._penalized(trained, minibatches, ref_logps)
                minibatches, metrics = self.cut(trained), metrics | penalties
            else:
                pairs = zip(minibatches, ref_logps, strict=True)
                minibatches = [_with(rows, "ref_logp", values) for rows, values in pairs]
        # the next update computes its own, but with its dropout, against which the next pass would compare another one
        num_own = 0 if learner.dropout_rate and self.schedule.num_passes > 1 else 1
        minibatches[num_own:] = [
            _with(rows, "old_logp", learner.logprobs(learner.policy, rows)[0]) for rows in minibatches[num_own:]
        ]
        groups = [*trained, *experience.groups[num_trained:]]
        metrics = metrics | {"num_tokens": float(cursor.num_tokens + experience.num_tokens)}
        return replace(experience, groups=groups, minibatches=minibatches, metrics=metrics)

    def _penalized(
        self, groups: Many[Group], minibatches: Many[list[Row]], reference: Many[list[np.ndarray]]
    ) -> tuple[list[Group], Metrics]:
        """Returns groups with advantages by their rewards minus `beta` times their KL, and the metrics of the KL."""
        pairs = zip((row for rows in minibatches for row in rows), (x for each in reference for x in each), strict=True)
        of_rows = [np.sum(row.rollout_logp - values, where=row.mask, dtype=np.float64) for row, values in pairs]
        first_rows = np.cumsum([0, *(1 + len(rollout.branches) for group in groups for rollout in group)])[:-1]
        kl = np.add.reduceat(of_rows, first_rows)
        num_tokens = sum(int(row.mask.sum()) for rows in minibatches for row in rows)
        metrics = {"kl": float(kl.sum()) / max(num_tokens, 1)}
        return with_advantages(groups, self.advantages(groups, self.args.beta * kl)), metrics

    # -- parts of a rollout ----------------------------------------------------------------------------------------

    def visited(self, first: int, count: int) -> list[int]:
        """Returns the indices of the examples at these positions of the run."""
        args = self.args
        return visit_order(self.num_prompts, first, count, args.seed, args.prompt_order, self.prompts_per_epoch)

    def cut(self, groups: Many[Group]) -> list[list[Row]]:
        """Cuts a rollout into minibatches of rows; those of one prompt share a number and its computation."""
        size, with_sampler_logps = self.schedule.rows, self.args.rollout_correction != "none"
        episodes: list[list[Row]] = []
        numbers: dict[tuple[int, bytes], int] = {}
        for index, group in enumerate(groups):
            for rollout in group:
                prompts = [each.prompt_ids.tobytes() for each in (rollout, *rollout.branches)]
                own = [numbers.setdefault((index, prompt), len(numbers)) for prompt in prompts]
                pairs = zip((None, *rollout.branches), own, strict=True)
                episodes.append(
                    [row_of(rollout, number, self.masked_ends, with_sampler_logps, branch) for branch, number in pairs]
                )
        minibatches = [episodes[start : start + size] for start in range(0, len(episodes), size)]
        return [[row for rows in minibatch for row in rows] for minibatch in minibatches]

    def trainer_state(self, cursor: Cursor) -> TrainerState:
        """Returns the state of the run for reward functions."""
        return TrainerState(cursor.step, self.scoring.num_steps, cursor.num_prompts / self.num_prompts)

    def record(self, number: int, is_closed: bool = False) -> Record:
        """Returns the record of a rollout's calls, of which a closed one is all that is ever answered."""
        name, process = f"rollout_{number:06d}", processes.process_index()
        keeps = any(each.takes_environments for each in self.scoring.runner.rewards)
        return Record(self.episodes.records(), name, process, keeps_environments=keeps, is_closed=is_closed)

    def experience(
        self, groups: list[Group], cursor: Cursor, metrics: Metrics, errors: Mapping[str, str]
    ) -> Experience:
        """Returns groups as a rollout, without log-probs, with the metrics of completions, rewards and episodes."""
        rows, names, rules = [row for group in groups for row in group], self.scoring.runner.names, self.episodes.rules
        kept = [row for row in rows if not row.is_failure]  # others failed by no fault of the model
        args, advantages = self.args, self.advantages(groups)
        own = episode_metrics(rows) if rules.has_turns else {}
        own |= completion_metrics(kept) | reward_metrics(names, reward_matrix(names, kept), advantages)
        if args.metric_definitions == "trl":
            own |= trl_zero_std_frac(advantages, args.scale_rewards, args.multi_objective_aggregation)
        if reward := self.scoring.correctness_reward:
            own |= solved_metrics(np.array([[row.rewards[reward] for row in group] for group in groups], float))
        metrics = own | metrics | {"epoch": (cursor.num_prompts + len(groups)) / self.num_prompts}
        num_new = sum(row.num_sampled_tokens for row in rows)
        num_tokens = num_new + sum(len(each.prompt_ids) for row in rows for each in (row, *row.branches))
        if metrics["time/rollout_s"]:
            metrics["rollout/tokens_per_s"] = num_new / metrics["time/rollout_s"]
        metrics["num_tokens"] = float(cursor.num_tokens + num_tokens)  # final in `with_logprobs`; no reward may log it
        return Experience(groups, metrics, errors, cursor.num_prompts, num_tokens)

    def _stop_if_a_reward_never_works(self, rounds: Many[Scored], errors: Mapping[str, str], cursor: Cursor) -> None:
        """Raises a RewardError if a reward function failed for all completions, since it or its service is broken."""
        num_completions = sum(len(group) for scored in rounds for group in scored.groups)
        for name, error in errors.items():
            if sum(scored.failures[name] for scored in rounds) == num_completions:
                is_first = cursor.num_rollouts == 0
                which = "the first rollout" if is_first else f"the rollout of step {cursor.step + 1}"
                advice = "" if is_first else "\nNothing was trained on it, and a resumed run samples it again"
                raise RewardError(
                    f"the reward function {name!r} failed for every completion of {which}:\n{error}{advice}"
                )


def sample_groups(
    sampler: Sampler,
    tokenizer: Any,
    prompts: Prompts,
    params: SamplingParams,
    step: int,
    policy_version: int = 0,
    rules: Rules = SINGLE_TURNS,
    record: Record | None = None,
) -> Generator[Group, None, None]:
    """Yields the group of each prompt as soon as its last completion, or episode, has ended.

    A stop string that is a special token is treated as a stop token, since servers may omit it from their texts.

    Args:
        sampler: Sampler with the weights to sample from.
        tokenizer: Tokenizer that decodes the completions.
        prompts: The prompts.
        params: Sampling parameters; `n` is the size of a group, `max_tokens` counts all tokens after the prompt.
        step: Number that distinguishes rollouts with the same seed.
        policy_version: Version of the weights, which is recorded in each rollout.
        rules: Tools and environments (see `play_episodes`).
        record: Answers of tools and environments from before the run was resumed, to which new ones are added.
    """
    if params.stop:
        assert not isinstance(params.stop_token_ids, int), "made a tuple of one when it was set"
        special = special_token_ids(tokenizer, params.stop)
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *special))
    if rules.rollout_func is not None or rules.has_turns:
        yield from play_episodes(sampler, tokenizer, prompts, params, step, policy_version, rules, record)
        return
    sequences = sampler.sequences(list(prompts.token_ids), params, step, prompts.first)
    rows = [prompts.rows[index] for index in range(len(prompts.token_ids))]
    for sequence in sequences:
        number = sequence.prompt_index - prompts.first
        sequence.images = prompts.images[number] if prompts.images else None
    groups: dict[int, list[Sequence]] = {}
    with closing(sampler.session()) as session:
        session.submit(sequences)
        while session.busy:
            for sequence, _ in session.step():
                if sequence.finish_reason:
                    groups.setdefault(sequence.prompt_index, []).append(sequence)
            for index in [index for index, group in groups.items() if len(group) == params.n]:
                group = sorted(groups.pop(index), key=lambda sequence: sequence.sample_index)
                texts = decode(tokenizer, [sequence.tokens for sequence in group])
                row = rows[index - prompts.first]
                yield [_rollout_of(*each, row, policy_version, rules) for each in zip(group, texts, strict=True)]


def _rollout_of(
    sequence: Sequence, text: str, example: Mapping[str, Any], policy_version: int, rules: Rules
) -> Rollout:
    """Returns a plain completion. One that the engine gave up is a failure, which counts nowhere."""
    assert sequence.finish_reason is not None, "it has ended"
    tokens, logps, reason = sequence.tokens, (sequence.policy_logps, sequence.sampler_logps), sequence.finish_reason
    if sequence.fault:
        reason = "env_error"
        warn_of_failure(rules.warned, "a completion", "is left out of its group", fault_of(sequence))
        if not tokens:  # one that counts nowhere, since a rollout has at least one
            tokens, logps = [int(sequence.prompt[-1])], ([0.0], [0.0])
    return Rollout(
        prompt_index=sequence.prompt_index,
        sample_index=sequence.sample_index,
        example=example,
        prompt_ids=sequence.prompt,
        completion_ids=np.asarray(tokens, np.int32),
        policy_logps=np.asarray(logps[0], np.float32),
        sampler_logps=np.asarray(logps[1], np.float32),
        finish_reason=reason,
        policy_version=policy_version,
        text=text,
        mask=np.full(len(tokens), bool(sequence.tokens)),
        images=sequence.images,
        experts=stacked_experts(sequence.experts) if sequence.experts else None,
    )


def sampling_params(args: GRPOConfig) -> SamplingParams:
    """Returns the sampling parameters of rollouts."""
    return args.part(SamplingParams, n=args.num_generations, max_tokens=args.max_completion_length)


def advantages_of(
    rollouts: Many[Rollout],
    names: Many[str],
    weights: np.ndarray,
    num_generations: int,
    settings: AdvantageSettings | Any,
    penalty: np.ndarray | None = None,
) -> Advantages:
    """Returns the advantages of completions by their rewards."""
    rewards = reward_matrix(names, rollouts)
    totals = np.where(np.isnan(rewards).all(axis=1), np.nan, np.nansum(rewards * weights, axis=1))
    if settings.reward_clip_range is not None:
        low, high = settings.reward_clip_range
        rewards, weights = np.clip(totals, low, high)[:, None], np.ones(1)
    if penalty is not None:
        column = np.where(np.isnan(totals), np.nan, -penalty)
        rewards, weights = np.column_stack([rewards, column]), np.append(weights, 1.0)
    scale, aggregation = settings.scale_rewards, settings.multi_objective_aggregation
    named = settings.advantage_estimator
    estimator = None if named == "grpo" else find_advantage_estimator(named)
    advantages = group_advantages(rewards, weights, num_generations, scale, aggregation, estimator)
    return replace(advantages, rewards=totals)


def with_advantages(groups: Many[Many[Rollout]], advantages: Advantages) -> list[Group]:
    """Returns groups whose completions have these advantages, in their order."""
    values = iter(advantages.values.tolist())
    return [[replace(row, advantage=next(values)) for row in group] for group in groups]


def _with(rows: Many[Row], name: str, values: Many[np.ndarray]) -> list[Row]:
    """Returns the rows with one field set."""
    return [replace(row, **{name: value}) for row, value in zip(rows, values, strict=True)]
