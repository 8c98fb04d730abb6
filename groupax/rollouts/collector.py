"""Experience: groups of completions with rewards, advantages and log-probs, for updates to train on."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from groupax.config import GRPOConfig
from groupax.data.examples import visit_order
from groupax.data.prompts import PromptSet
from groupax.engine.sequence import PolicySampler, Sampler
from groupax.episodes.play import play_episodes
from groupax.episodes.record import Record
from groupax.episodes.rules import Rules
from groupax.errors import RewardError, RunError, is_out_of_memory
from groupax.events import Emit, PhaseStarted, counted
from groupax.metrics.completions import (
    completion_metrics,
    logged_metrics,
    reward_metrics,
    scoring_metrics,
    solved_metrics,
    trl_zero_std_frac,
    with_logged,
)
from groupax.metrics.episodes import episode_metrics
from groupax.objective.advantages import Advantages
from groupax.parallel import processes
from groupax.rewards.contract import reward_matrix
from groupax.rewards.runner import RewardRunner
from groupax.rewards.scoring import Scored, score_groups
from groupax.rollouts.advantages import advantages_of
from groupax.rollouts.rows import masked_ends, row_of, row_of_branch
from groupax.rollouts.schedule import UpdateSchedule
from groupax.rollouts.state import Cursor, Experience, Group
from groupax.settings.sampling import SamplingParams
from groupax.training.adapters import PolicyLearner
from groupax.types import Metrics, Rollout, Row, TrainerState


class Collector:
    """Samples completions of a run's prompts with the learner's policy, and prepares them for updates.

    Args:
        args: Settings of the run.
        schedule: Schedule of rollouts and optimizer steps.
        prompts: Prompts of the run.
        tokenizer: Tokenizer of the prompts.
        engine: Engine that samples; its weights are set to the policy's.
        learner: Learner that computes log-probs; only its set of known shapes changes.
        runner: Runner of the reward functions, which must be entered during use.
        reward_weights: Weight of each reward function.
        correctness_reward: Name of the function whose 1.0 means solved, if any.
        num_steps: Number of optimizer steps of the run.
        rules: Tools and environments of episodes.
        emit: Receives the phases of sampling and scoring.
        records: Returns the folder where what tools and environments answer is recorded; None for nowhere.
    """

    def __init__(
        self,
        args: GRPOConfig,
        schedule: UpdateSchedule,
        prompts: PromptSet,
        tokenizer: Any,
        engine: PolicySampler,
        learner: PolicyLearner,
        runner: RewardRunner,
        reward_weights: np.ndarray,
        correctness_reward: str | None,
        num_steps: int,
        rules: Rules,
        emit: Emit,
        records: Callable[[], Path | None],
    ) -> None:
        self.args, self.schedule, self.prompts, self.tokenizer = args, schedule, prompts, tokenizer
        self.engine, self.learner, self.runner = engine, learner, runner
        self.reward_weights, self.correctness_reward, self.num_steps = reward_weights, correctness_reward, num_steps
        self.rules, self.emit, self.records = rules, emit, records

    def collect(self, cursor: Cursor, num_wanted: int = 1) -> Experience:
        """Returns a rollout by the learner's policy, ready for updates (see `sample` and `scored`).

        The result depends only on cursor and learner, of which only the set of known shapes may change.

        Args:
            cursor: Progress of the run.
            num_wanted: Number of its minibatches that the next step takes.
        """
        self.engine.params = self.learner.policy
        experience = self.sample(self.engine, cursor, cursor.step)
        self.engine.release()
        return self.scored(experience, cursor, num_wanted)

    def sample(self, engine: Sampler, cursor: Cursor, policy_version: int) -> Experience:
        """Returns groups with rewards and advantages, those to train on first; does not use the learner or its devices.

        With `filter_zero_variance` groups without signal are replaced by groups of further prompts, within the budget.
        When it is spent, they fill the rest, so that the size of a step does not change.

        Args:
            engine: Sampler with the weights to sample from.
            cursor: Progress of the run when it will train on the groups; its `num_tokens` is ignored.
            policy_version: Number of optimizer steps that these weights have seen.
        """
        args, wanted = self.args, self.schedule.prompts_per_rollout
        budget = int(wanted * args.filter_budget) if args.filter_zero_variance else wanted
        kept: list[Group] = []
        flat: list[Group] = []  # without signal
        rounds: list[Scored] = []
        while len(kept) < wanted and len(kept) + len(flat) < budget:
            num_sampled = len(kept) + len(flat)
            count = min(wanted - len(kept), budget - num_sampled)
            rounds.append(self._sample(engine, cursor, policy_version, num_sampled, count))
            for group in rounds[-1].groups:
                has_signal = not args.filter_zero_variance or not self._advantages([group]).zero_std[0]
                (kept if has_signal else flat).append(group)
        num_filled, num_sampled = wanted - len(kept), len(kept) + len(flat)
        trained, dropped = kept + flat[:num_filled], flat[num_filled:]
        groups = with_advantages(trained, self._advantages(trained)) + dropped
        self._stop_if_a_reward_never_works(rounds, cursor)
        rows = [row for group in groups for row in group]
        num_new = sum(row.num_sampled_tokens for row in rows)
        num_tokens = num_new + sum(len(each.prompt_ids) for row in rows for each in (row, *row.branches))
        metrics = self._rollout_metrics(groups) | scoring_metrics(rounds)
        metrics["epoch"] = (cursor.num_prompts + num_sampled) / len(self.prompts)
        if args.filter_zero_variance:
            metrics |= {
                "filter/sampled_prompts": float(num_sampled),
                "filter/rounds": float(len(rounds)),
                "filter/dropped_frac": len(dropped) / num_sampled,
                "filter/filled_up_frac": num_filled / wanted,
            }
        metrics["rollout/tokens_per_s"] = num_new / metrics["time/rollout_s"]
        metrics["num_tokens"] = float(
            cursor.num_tokens + num_tokens
        )  # made right by `scored`; no reward logs that name
        errors = {name: error for scored in reversed(rounds) for name, error in scored.errors.items()}
        return Experience(groups, with_logged(metrics, logged_metrics(rounds)), errors, cursor.num_prompts, num_tokens)

    def scored(self, experience: Experience, cursor: Cursor, num_wanted: int) -> Experience:
        """Returns a rollout with its minibatches and the log-probs of the reference and of the present policy.

        Args:
            experience: The rollout as it was sampled.
            cursor: Progress of the run.
            num_wanted: Number of minibatches of the next update, which computes their old log-probs itself.
        """
        self.emit(PhaseStarted("computing log-probs"))
        num_trained = self.schedule.prompts_per_rollout
        groups, metrics = experience.groups, experience.metrics
        minibatches = self.cut(groups[:num_trained])
        reference = self._reference_logprobs(minibatches)
        if reference is not None and self.args.use_kl_in_reward:
            trained, penalties = self._penalized(groups[:num_trained], minibatches, reference)
            groups, metrics = [*trained, *groups[num_trained:]], metrics | penalties
            minibatches = self.cut(trained)
        elif reference is not None:
            pairs = zip(minibatches, reference, strict=True)
            minibatches = [_with(rows, "ref_logp", values) for rows, values in pairs]
        metrics = metrics | {"num_tokens": float(cursor.num_tokens + experience.num_tokens)}
        minibatches = self._with_old_logprobs(minibatches, num_wanted)
        return replace(experience, groups=groups, minibatches=minibatches, metrics=metrics)

    def trainer_state(self, cursor: Cursor) -> TrainerState:
        """Returns the state of the run for reward functions."""
        return TrainerState(cursor.step, self.num_steps, cursor.num_prompts / len(self.prompts))

    def _sample(self, engine: Sampler, cursor: Cursor, policy_version: int, first: int, count: int) -> Scored:
        """Samples G completions of each of the next prompts, and scores them as they finish.

        Args:
            engine: Sampler with the weights to sample from.
            cursor: Progress of the run.
            policy_version: Version of these weights.
            first: Number of prompts of this rollout that were sampled before.
            count: Number of prompts to sample.
        """
        args = self.args
        visited = self.visited(cursor.num_prompts + first, count)
        self.runner.state = self.trainer_state(cursor)
        record = self._record(cursor.num_rollouts)
        groups = play_episodes(
            engine,
            self.tokenizer,
            [self.prompts.examples[i] for i in visited],
            [self.prompts.token_ids[i] for i in visited],
            sampling_params(self.args),
            step=cursor.num_rollouts,
            policy_version=policy_version,
            first_prompt=first,
            rules=self.rules,
            record=record,
            images=self.prompts.images_of(visited),
        )
        try:
            with closing(record), closing(groups):  # on an error too, which keeps them: servers would go on
                return score_groups(counted(groups, self.emit, "sampling", count, "scoring"), self.runner)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise RunError(
                f"out of memory while sampling; lower max_concurrent_rows (now {args.max_concurrent_rows}) or "
                f"kv_cache_gb (now {args.kv_cache_gb}). The devices say:\n{error}"
            ) from error

    def _record(self, number: int, is_closed: bool = False) -> Record:
        """Returns the record of a rollout's calls, of which a closed one is all that is ever answered."""
        name, process = f"rollout_{number:06d}", processes.process_index()
        keeps = any(each.takes_environments for each in self.runner.rewards)
        return Record(self.records(), name, process, keeps_environments=keeps, is_closed=is_closed)

    def _stop_if_a_reward_never_works(self, rounds: Sequence[Scored], cursor: Cursor) -> None:
        """Raises a RewardError if a reward function failed for all completions, since it or its service is broken."""
        num_completions = sum(len(group) for scored in rounds for group in scored.groups)
        for reward in self.runner.rewards:
            if sum(s.failures[reward.name] for s in rounds) == num_completions:
                error = next(s.errors[reward.name] for s in rounds if reward.name in s.errors)
                first = cursor.num_rollouts == 0
                which = "the first rollout" if first else f"the rollout of step {cursor.step + 1}"
                advice = "" if first else "\nNothing was trained on it, and a resumed run samples it again"
                raise RewardError(
                    f"the reward function {reward.name!r} failed for every completion of {which}:\n{error}{advice}"
                )

    def _rollout_metrics(self, groups: Sequence[Group]) -> Metrics:
        rows = [row for group in groups for row in group]
        names = [reward.name for reward in self.runner.rewards]
        advantages, args = self._advantages(groups), self.args
        metrics = episode_metrics(rows) if self.rules.has_turns else {}
        # what failed by no fault of the model counts nowhere else
        counted = [row for row in rows if not row.is_failure]
        metrics |= completion_metrics(counted) | reward_metrics(names, reward_matrix(names, counted), advantages)
        if args.metric_definitions == "trl":
            metrics |= trl_zero_std_frac(advantages, args.scale_rewards, args.multi_objective_aggregation)
        if self.correctness_reward:
            rewards = np.array([[row.rewards[self.correctness_reward] for row in group] for group in groups], float)
            metrics |= solved_metrics(rewards)
        return metrics | self._metrics_by_adapter(groups)

    def _metrics_by_adapter(self, groups: Sequence[Group]) -> Metrics:
        """Returns the reward of each adapter that has answered prompts; nothing where programs ask several."""
        names, metrics = [reward.name for reward in self.runner.rewards], {}
        for adapter in self.rules.adapters:
            own = [group for group in groups if group[0].adapter == adapter]
            if own and self.rules.templates is None:
                rewards = reward_matrix(names, [row for group in own for row in group if not row.is_failure])
                of_own = reward_metrics(names, rewards, self._advantages(own))
                metrics[f"adapters/{adapter}/reward"] = of_own["reward"]
        return metrics

    def _advantages(self, groups: Sequence[Group], penalty: np.ndarray | None = None) -> Advantages:
        """Returns the advantages of groups by their rewards, minus a penalty of each completion if there is one."""
        rows, names = [row for group in groups for row in group], [reward.name for reward in self.runner.rewards]
        return advantages_of(rows, names, self.reward_weights, self.args.num_generations, self.args, penalty)

    def cut(self, groups: Sequence[Group]) -> list[list[Row]]:
        """Cuts a rollout into minibatches."""
        settings = masked_ends(self.args), self.args.rollout_correction != "none"
        numbers: dict[tuple[int, bytes], int] = {}  # rows of one number share the computation of their prompt
        episodes: list[list[Row]] = []
        for index, group in enumerate(groups):
            for rollout in group:
                prompts = [each.prompt_ids.tobytes() for each in (rollout, *rollout.branches)]
                number, *others = [numbers.setdefault((index, prompt), len(numbers)) for prompt in prompts]
                row = row_of(rollout, number, *settings)
                further = zip(rollout.branches, others, strict=True)
                episodes.append([row, *(row_of_branch(*each, row, rollout.advantage) for each in further)])
        size = self.schedule.rows
        minibatches = [episodes[start : start + size] for start in range(0, len(episodes), size)]
        return [[row for rows in minibatch for row in rows] for minibatch in minibatches]

    def _reference_logprobs(self, minibatches: Sequence[list[Row]]) -> list[list[np.ndarray]] | None:
        """Returns the log-probs of the rows of each minibatch under the reference; None without a reference."""
        if self.learner.reference is None:
            return None
        with self.learner.reference_on_devices() as reference:
            return [self.learner.logprobs(reference, rows)[0] for rows in minibatches]

    def _penalized(
        self, groups: Sequence[Group], minibatches: Sequence[list[Row]], reference: Sequence[list[np.ndarray]]
    ) -> tuple[list[Group], Metrics]:
        """Returns groups with advantages by their rewards minus `beta` times their KL, and the metrics of the KL.

        Args:
            groups: Groups with advantages by their rewards alone.
            minibatches: Their rows and those of their branches, in order.
            reference: Log-probs of these rows under the reference.
        """
        pairs = zip((row for rows in minibatches for row in rows), (x for each in reference for x in each), strict=True)
        of_rows = [np.sum(row.rollout_logp - values, where=row.mask, dtype=np.float64) for row, values in pairs]
        first_rows = np.cumsum([0, *(1 + len(rollout.branches) for group in groups for rollout in group)])[:-1]
        kl = np.add.reduceat(of_rows, first_rows)
        num_tokens = sum(int(row.mask.sum()) for rows in minibatches for row in rows)
        metrics = {"kl": float(kl.sum()) / max(num_tokens, 1)}
        return with_advantages(groups, self._advantages(groups, self.args.beta * kl)), metrics

    def _with_old_logprobs(self, minibatches: list[list[Row]], num_wanted: int) -> list[list[Row]]:
        """Returns the minibatches with the log-probs of the old policy, as far as updates need them.

        Args:
            minibatches: Minibatches of a rollout.
            num_wanted: Number of those in the next update, which computes their old log-probs itself.
        """
        learner = self.learner
        # an update's own would have its dropout, against which the next pass would compare another one
        num_known = 0 if learner.dropout_rate and self.schedule.num_passes > 1 else num_wanted
        return minibatches[:num_known] + [
            _with(rows, "old_logp", learner.logprobs(learner.policy, rows)[0]) for rows in minibatches[num_known:]
        ]

    def visited(self, first: int, count: int) -> list[int]:
        """Returns the indices of the examples at these positions of the run."""
        num, args = len(self.prompts), self.args
        return visit_order(num, first, count, args.seed, args.prompt_order, self.schedule.prompts_per_epoch(num))


def sampling_params(args: GRPOConfig) -> SamplingParams:
    """Returns the sampling parameters of rollouts."""
    return args.part(SamplingParams, n=args.num_generations, max_tokens=args.max_completion_length)


def _with(rows: Sequence[Row], name: str, values: Sequence[np.ndarray]) -> list[Row]:
    """Returns the rows with one field set."""
    return [replace(row, **{name: value}) for row, value in zip(rows, values, strict=True)]


def with_advantages(groups: Sequence[Group], advantages: Advantages) -> list[Group]:
    """Returns groups whose completions have these advantages, in their order."""
    values, turns = iter(advantages.values.tolist()), iter(advantages.turns or ())

    def with_its_own(row: Rollout) -> Rollout:
        own = None if advantages.turns is None else tuple(next(turns).tolist())
        return replace(row, advantage=next(values), turn_advantages=own)

    return [[with_its_own(row) for row in group] for group in groups]
