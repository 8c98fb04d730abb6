"""The rollouts of a replay: recorded ones until a step, and from there on as much again as is asked for."""

import itertools
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from groupax.episodes.record import Record
from groupax.models.specs import Params
from groupax.replay.recorded import RecordedRun
from groupax.rewards.scoring import score_groups
from groupax.rollouts.collector import Collector
from groupax.rollouts.pipeline import Policy
from groupax.rollouts.rows import with_advantages
from groupax.rollouts.state import Cursor, Experience, Group
from groupax.runs.step_record import Stage


class ReplayCollector(Collector):
    """A collector that takes rollouts from a record.

    Args:
        collector: The collector of the run, whose parts it takes.
        run: The recorded run.
        targets: Numbers of the rollouts that are computed again.
        stage: First stage of these rollouts to compute again; what comes before it is recorded.
        makes_calls: Whether tools and environments are called for what is not in the record, as under changes.

    Attributes:
        policies: Policies that sample rollouts, by the number of the rollout, where these are not the learner's.
        sampled: Numbers of the rollouts that were sampled.
    """

    def __init__(self, collector: Collector, run: RecordedRun, targets: range, stage: Stage, makes_calls: bool) -> None:
        super().__init__(**vars(collector))
        self.run, self.targets, self.stage, self.makes_calls = run, targets, stage, makes_calls
        self.policies: dict[int, Policy] = {}
        self.sampled: list[int] = []

    def collect(self, cursor: Cursor, num_wanted: int = 1) -> Experience:
        """Returns the recorded rollout, or the same one computed again, ready for updates."""
        number = cursor.num_rollouts
        groups = None if self.samples(number) else self._recorded(cursor)
        experience = self._sampled(cursor) if groups is None else self._replayed(groups, cursor)
        return self.with_logprobs(experience, cursor, num_wanted)

    def sampled_again(self, cursor: Cursor) -> Experience:
        """Returns the rollout of a cursor, sampled by the present policy."""
        return self.with_logprobs(self._sampled(cursor), cursor, 1)

    def shifts(self, experience: Experience, left_out: Collection[int]) -> list[float]:
        """Returns by how much each completion's advantage changes if some had never been.

        It is 0 where they do not follow from a group's rewards alone: with returns of turns and a KL in the reward.

        Args:
            experience: A rollout.
            left_out: Indices of the completions among all of it.
        """
        groups = experience.groups[: self.schedule.prompts_per_rollout]
        rest = sum(len(group) for group in experience.groups[self.schedule.prompts_per_rollout :])
        places = itertools.count()
        without = [
            [replace(row, rewards=dict.fromkeys(row.rewards)) if next(places) in left_out else row for row in group]
            for group in groups
        ]
        if self.args.turn_credit == "returns" or self.args.use_kl_in_reward:
            return [0.0] * next(places) + [0.0] * rest
        before, after = (self.advantages(each).values for each in (groups, without))
        return [*np.nan_to_num(after - before).tolist(), *[0.0] * rest]

    def samples(self, number: int) -> bool:
        """Returns whether a rollout is sampled again although it may be recorded."""
        return number in self.targets and self.stage in ("data", "rollout")

    def needs_policy(self, number: int) -> bool:
        """Returns whether a rollout is sampled, as asked for or because it was not kept."""
        return self.samples(number) or not self.run.keeps(self._steps(number))

    def policy_version(self, number: int) -> int:
        """Returns the number of optimizer steps that the policy of a rollout has seen."""
        return max(0, number * self.schedule.updates_per_rollout - self.args.max_staleness)

    def _steps(self, number: int) -> range:
        size = self.schedule.updates_per_rollout
        return range(number * size + 1, (number + 1) * size + 1)

    def _sampled(self, cursor: Cursor) -> Experience:
        number = cursor.num_rollouts
        self.sampled.append(number)
        self._copy_calls(number)
        policy = self.policies.pop(number, None)
        version = self.policy_version(number) if self.args.max_staleness else cursor.step
        self.engine.params = self._weights(policy)
        experience = self.rollout(self.engine, cursor, version if policy is None else policy.version)
        self.engine.params = self.learner.policy
        self.engine.release()
        return experience

    def _asked(self, number: int) -> bool:
        """Returns whether tools or environments answered in a rollout; True if that is not known."""
        table = next((table for step in self._steps(number) if (table := self.run.table(step)) is not None), None)
        return table is None or self.episodes.rules.has_environments or '"calls": [{' in "".join(table.get("turns", ()))

    def _weights(self, policy: Policy | None) -> Params:
        return self.learner.policy if policy is None else self.learner.policy_of(policy.trained)

    def record(self, number: int, is_closed: bool = False) -> Record:
        """Returns the record of a rollout's calls, to which none is added unless it may be made."""
        return super().record(number, is_closed or not self.makes_calls)

    def _copy_calls(self, number: int) -> None:
        """Copies what tools answered into the folder of the replay, where it is looked up.

        Raises:
            ValueError: The answers were not kept, and no call may be made.
        """
        folder, files = self.episodes.records(), self.run.calls(number)
        if folder is not None and not files and not self.makes_calls and self._asked(number):
            raise ValueError(
                f"what tools and environments answered in rollout {number} is not in {self.run.folder}/calls any more, "
                "and a replay calls none: start from what was kept of it, with --stage reward or a later one"
            )
        if folder is not None and files:
            folder.mkdir(parents=True, exist_ok=True)
            for path in files:
                shutil.copy(path, folder)

    def _recorded(self, cursor: Cursor) -> list[Group] | None:
        def examples(count: int) -> Sequence[Mapping]:
            return [self.prompts.examples[index] for index in self.visited(cursor.num_prompts, count)]

        groups = self.run.groups(self._steps(cursor.num_rollouts), examples)
        if groups is None or self.prompts.images is None:
            return groups
        images = self.prompts.images_of(self.visited(cursor.num_prompts, len(groups)))
        return [[replace(row, images=images[row.prompt_index]) for row in group] for group in groups]

    def _replayed(self, groups: list[Group], cursor: Cursor) -> Experience:
        """Returns recorded groups as a rollout, with rewards and advantages again where this is asked for."""
        errors: Mapping[str, str] = {}
        num_trained, stage = self.schedule.prompts_per_rollout, self.stage
        is_target = cursor.num_rollouts in self.targets
        if is_target and stage == "reward":
            self.scoring.runner.state = self.trainer_state(cursor)
            scored = score_groups(
                [[replace(row, rewards={}) for row in group] for group in groups], self.scoring.runner
            )
            groups, errors = scored.groups, scored.errors
        if is_target and stage in ("reward", "advantage"):
            trained = groups[:num_trained]
            groups = with_advantages(trained, self.advantages(trained)) + groups[num_trained:]
        return self.experience(groups, cursor, {"time/rollout_s": 0.0, "time/reward_s": 0.0}, errors)
