"""The trainer: GRPO as the paper's Algorithm 1 has it (arXiv:2402.03300)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from groupax.batch import Row
from groupax.card import run_card
from groupax.checkpoints.choose import Saved
from groupax.checkpoints.identity import identity_of
from groupax.checkpoints.record import read_rollout, stored_dtype, with_scores
from groupax.checkpoints.saver import RunSaver, patiently, remove_download
from groupax.config import GRPOConfig
from groupax.data import EVAL_SPLITS, Examples, PromptSet, encode_examples, load_examples, prompt_limit, visit_order
from groupax.engine.engine import Engine
from groupax.engine.params import SamplingParams
from groupax.errors import DivergedError, RewardError, RunError, is_out_of_memory
from groupax.evaluation.evaluate import Evaluation, evaluate, which_solves
from groupax.evaluation.sets import named_sets
from groupax.health import setup_findings
from groupax.hub import push_folder
from groupax.learner import Learner, LearnerSettings, Update
from groupax.metrics import Metrics, completion_metrics, reward_metrics, scoring_metrics, solved_metrics
from groupax.models.adapted import joined
from groupax.models.checkpoint import Model, add_adapter, load_model, save_adapter, save_model
from groupax.models.lora import LoRAConfig, counts, lora_config, trainable_line
from groupax.objective.advantages import Advantages, group_advantages
from groupax.objective.entropy import EntropyControl
from groupax.objective.settings import ObjectiveSettings
from groupax.optimizer import OptimizerSettings, ScheduleSettings
from groupax.preemption import AbandonedError, StopRequests
from groupax.rewards.contract import TrainerState, check_columns, resolve_rewards, reward_matrix, weights_of
from groupax.rewards.runner import RewardRunner, RewardSettings
from groupax.rewards.scoring import Scored, score_groups
from groupax.rollout import Rollout, rollout
from groupax.run_log import Listener, RunLog
from groupax.run_state import Cursor, Experience, Group
from groupax.slices import slices_of
from groupax.step import TrainState
from groupax.tokenizer import eos_token_ids, load_tokenizer, prepare_tokenizer
from groupax.tracking import RunFolder


@dataclass(frozen=True)
class TrainResult:
    """What `GRPOTrainer.train` did.

    Attributes:
        num_steps: optimizer steps.
        train_seconds: wall time of the loop, evaluation and checkpoints included, loading and saving the model not;
            that of earlier processes of the run included.
        rollout_tokens_per_s: sampled tokens over the time spent sampling.
        metrics: of the last logged step.
    """

    num_steps: int
    train_seconds: float
    rollout_tokens_per_s: float
    metrics: Metrics


class GRPOTrainer:
    """Trains a language model with Group Relative Policy Optimization.

    Args:
        model: a folder, a hub id, or a `Model`. A `Model`'s own weights stay as they are.
        reward_funcs: one or several reward functions or reward models, by reference or name (see docs/rewards.md).
        args: settings; the defaults if None.
        train_dataset: prompts: a `datasets.Dataset`, a list of dicts, a .jsonl, .json or .parquet file, a folder, or a
            hub id, with a column `prompt`. Every other column reaches the reward functions.
        eval_dataset: likewise, for `evaluate` and `eval_steps`; or a dict of several by name.
        processing_class: the tokenizer; by default the one in the model's folder.
        reward_processing_classes: tokenizers of the reward models, one per entry of `reward_funcs`; None takes each
            model's own.
        peft_config: a `LoRAConfig` or a `peft.LoraConfig`: an adapter is trained, and the model's weights stay as they
            are. Without it a model that has an adapter goes on training that one.
        listeners: are told what happens while it trains, and can end the run (see `run_log.Listener`).

    Raises:
        ValueError: anything about these that could only fail later.

    Example:
        >>> trainer = GRPOTrainer("Qwen/Qwen3-0.6B", my_reward, train_dataset="prompts.jsonl")  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    def __init__(
        self,
        model: str | Path | Model,
        reward_funcs: Any,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        peft_config: Any = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        self.args = args = args or GRPOConfig()
        lora = _lora(args, peft_config)
        if train_dataset is None:
            raise ValueError("train_dataset is missing; give a Dataset, a list of dicts, a file or a hub id")
        train_examples = load_examples(train_dataset)
        eval_examples = {
            name: load_examples(dataset, f"eval_dataset {name!r}", EVAL_SPLITS)
            for name, dataset in ({} if eval_dataset is None else named_sets(eval_dataset)).items()
        }
        if args.eval_steps and not eval_examples:
            raise ValueError(f"eval_steps is {args.eval_steps}, but there is no eval_dataset")
        columns = [name for name in train_examples[0] if name != "prompt"]
        self.rewards = resolve_rewards(reward_funcs, columns, reward_processing_classes)
        for name, examples in eval_examples.items():
            check_columns(self.rewards, columns, examples[0], f"eval_dataset {name!r}")
        self.reward_runner = RewardRunner(self.rewards, args.part(RewardSettings))
        self.reward_weights = weights_of(args.reward_weights, self.rewards)
        self.solved_by = which_solves(args.solved_by, self.rewards)
        self.run_folder, self.listeners = RunFolder(args.output_dir), listeners

        self.model = model if isinstance(model, Model) else load_model(model, weights=args.base_weights)
        if lora is not None:
            self.model = add_adapter(self.model, lora, args.seed)
        self._check_adapter(loaded=not isinstance(model, Model))
        if self.model.config.num_labels:
            raise ValueError(f"{self.model.source or 'the model'} classifies sequences; a policy needs a causal model")
        self.tokenizer = self._tokenizer(processing_class)
        self.eos_ids = eos_token_ids(self.tokenizer, self.model.generation_config, self.model.hf_config)
        self.prompts = self._encode(train_examples)
        self.eval_prompts = {
            name: self._encode(examples, args.eval_max_completion_length) for name, examples in eval_examples.items()
        }

        self.slices = slices_of(args)
        self.num_steps = self.slices.num_steps(len(self.prompts), args.num_train_epochs, args.max_steps)
        longest = max(map(len, self.prompts.token_ids)), args.max_completion_length
        self.learner = Learner(self.model, learner_settings(args), self.num_steps, longest)
        if self.model.adapter is not None and self.learner.frozen is not None:
            adapter = replace(self.model.adapter, frozen=self.learner.frozen)  # those loaded in another dtype can go
            self.model = replace(self.model, params=joined(adapter.frozen, adapter.trained), adapter=adapter)
        self.engine = Engine(
            self.model.config,
            self.learner.policy,
            self.model.mesh,
            self.eos_ids,
            max_slots=args.max_concurrent_rows,
            kv_bytes=None if args.kv_cache_gb is None else int(args.kv_cache_gb * 1e9),
            kv_dtype=None if args.kv_cache_dtype == "same" else args.kv_cache_dtype,
            weights=args.decoding_weights,
        )
        self.cursor = Cursor()
        self.experience: Experience | None = None  # the rollout that is not used up
        self._begun_at: tuple[Cursor, Experience | None] | None = None  # while a step takes rows of several rollouts
        self._state_before: TrainState | None = None  # while an update is under way
        self.dataset_name = train_dataset if isinstance(train_dataset, str) else f"{len(self.prompts)} prompts"
        self.last_metrics: Metrics = {}

    # -- Algorithm 1 ---------------------------------------------------------------------------------------------

    def train(self) -> TrainResult:
        """Run all steps that are left, write the run folder, and save the trained model in its `model/`.

        Raises:
            DivergedError: `max_bad_steps` updates in a row were not finite. The model is saved as it was before them.
            RewardError: a reward function failed and `reward_errors` is "raise", or it failed for every completion of a
                rollout.
            PreemptedError: SIGTERM, SIGINT or a notice of maintenance asked the run to stop; its state is saved.
            RunError: the run cannot go on; its state is saved if there is where.
            ValueError: `resume` names a checkpoint that this run cannot continue.
        """
        log = RunLog(self.args, self.run_folder, self.num_steps, self.listeners)
        try:
            with StopRequests(self.model.mesh.devices.flat[0].platform == "tpu") as stop, self.reward_runner:
                saver = self._begin(log)
                log.event("begin", self.cursor.step)
                try:
                    self._loop(log, saver, stop)
                except AbandonedError:
                    saver.stop(*self._place, stop.reason or "")
                except Exception:
                    saver.fail(*self._place, self._is_whole)
                    raise
                train_seconds = log.train_seconds
                self._end(log, saver, stop)
                log.event("end", self.cursor.step)
        finally:
            log.close()
        return TrainResult(self.cursor.step, train_seconds, log.rollout_tokens_per_s, log.last)

    def _loop(self, log: RunLog, saver: RunSaver, stop: StopRequests) -> None:
        while True:
            if self._evaluation_is_due:
                with stop.abandonable():
                    evaluation = self.evaluate()
                self.cursor = replace(self.cursor, evaluated_step=self.cursor.step)
                log.evaluation(self.cursor.step, evaluation)
            saver.save_if_due(self.cursor, self.experience)
            if self.cursor.step >= self.num_steps or log.ends:
                return
            stop.check()
            log.event("step_begin", self.cursor.step)
            rows = self._rows_of_earlier_rollouts(log, stop)
            if self.experience is None:
                self._sample_rollout(log, stop, self.slices.per_step - len(rows) // self.slices.rows)
            with self._shapes_kept():
                rows, update = self._update(rows)
            log.step(self.cursor.step, update.metrics)
            self.last_metrics = log.last
            self._stop_if_diverged(log, rows, update)

    def _rows_of_earlier_rollouts(self, log: RunLog, stop: StopRequests) -> list[Row]:
        """What the next step takes of rollouts that it uses up; the rest it takes of `experience`."""
        rows: list[Row] = []
        while self._num_left < (wanted := self.slices.per_step - len(rows) // self.slices.rows):
            if self.experience is not None:
                if self._ends_an_epoch:
                    break
                self._begun_at = self._begun_at or (self.cursor, self.experience)
                rows += self._next_rows(self._num_left, len(rows))
                self.experience = None
            elif rows or self.slices.per_rollout * self.slices.num_passes < wanted:
                self._begun_at = self._begun_at or (self.cursor, None)
                self._sample_rollout(log, stop, wanted)
            else:
                break
        return rows

    def _sample_rollout(self, log: RunLog, stop: StopRequests, num_wanted: int) -> None:
        with stop.abandonable(), self._shapes_kept():
            experience = self._collect(num_wanted)
        self._take(experience)
        log.rollout(experience.groups, experience.metrics, experience.errors)

    def _collect(self, num_wanted: int = 1) -> Experience:
        """A rollout: groups with their rewards and advantages, those to train on first.

        Args:
            num_wanted: slices that the next step takes of it.

        With `filter_zero_variance` groups without signal make room for groups of further prompts, as long as the
        budget lasts. What it leaves open is filled up with them, so that a step keeps its size.

        A function of cursor and learner, whose known shapes alone may change.
        """
        args, wanted = self.args, self.slices.prompts_per_rollout
        budget = int(wanted * args.filter_budget) if args.filter_zero_variance else wanted
        kept: list[Group] = []
        flat: list[Group] = []  # without signal
        rounds: list[Scored] = []
        while len(kept) < wanted and len(kept) + len(flat) < budget:
            num_sampled = len(kept) + len(flat)
            rounds.append(self._sample(num_sampled, min(wanted - len(kept), budget - num_sampled)))
            for group in rounds[-1].groups:
                has_signal = not args.filter_zero_variance or not self._advantages([group]).zero_std[0]
                (kept if has_signal else flat).append(group)
        num_filled, num_sampled = wanted - len(kept), len(kept) + len(flat)
        trained, dropped = kept + flat[:num_filled], flat[num_filled:]
        groups = _with_advantages(trained, self._advantages(trained).values) + dropped
        self._stop_if_a_reward_never_works(rounds)
        rows = [row for group in groups for row in group]
        num_new = sum(len(row.completion_ids) for row in rows)
        num_tokens = num_new + sum(len(row.prompt_ids) for row in rows)
        metrics = self._rollout_metrics(groups) | scoring_metrics(rounds)
        metrics |= {
            "epoch": (self.cursor.num_prompts + num_sampled) / len(self.prompts),
            "num_tokens": float(self.cursor.num_tokens + num_tokens),
        }
        if args.filter_zero_variance:
            metrics |= {
                "filter/sampled_prompts": float(num_sampled),
                "filter/rounds": float(len(rounds)),
                "filter/dropped_frac": len(dropped) / num_sampled,
                "filter/filled_up_frac": num_filled / wanted,
            }
        metrics["rollout/tokens_per_s"] = num_new / metrics["time/rollout_s"]
        errors = {name: error for scored in reversed(rounds) for name, error in scored.errors.items()}
        slices = self._scored(self._cut(groups[:wanted]), num_wanted)
        return Experience(groups, metrics, errors, self.cursor.num_prompts, num_tokens, slices)

    def _take(self, experience: Experience) -> None:
        """A rollout is there to be trained on."""
        self.experience = experience
        self.cursor = replace(
            self.cursor,
            num_rollouts=self.cursor.num_rollouts + 1,
            num_prompts=self.cursor.num_prompts + len(experience.groups),
            num_tokens=self.cursor.num_tokens + experience.num_tokens,
        )

    def _rollout_metrics(self, groups: Sequence[Group]) -> Metrics:
        rows = [row for group in groups for row in group]
        names = [reward.name for reward in self.rewards]
        metrics = completion_metrics(rows) | reward_metrics(names, reward_matrix(names, rows), self._advantages(groups))
        if self.solved_by:
            solved = [[row.rewards[self.solved_by] == 1.0 for row in group] for group in groups]
            metrics |= solved_metrics(np.array(solved))
        return metrics

    def _sample(self, first: int, count: int) -> Scored:
        """G completions of each of the next prompts, from the current policy, scored as they end.

        Args:
            first: prompts of this rollout that were sampled before.
            count: prompts to sample.
        """
        args = self.args
        visited = self._visited(self.cursor.num_prompts + first, count)
        self.engine.params = self.learner.policy
        self.reward_runner.state = TrainerState(
            self.cursor.step, self.num_steps, self.cursor.num_prompts / len(self.prompts)
        )
        groups = rollout(
            self.engine,
            self.tokenizer,
            [self.prompts.examples[i] for i in visited],
            [self.prompts.token_ids[i] for i in visited],
            self.sampling_params,
            step=self.cursor.num_rollouts,
            policy_version=self.cursor.step,
            first_prompt=first,
        )
        try:
            return score_groups(groups, self.reward_runner)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise RunError(
                f"out of memory while sampling; lower max_concurrent_rows (now {args.max_concurrent_rows}) or "
                f"kv_cache_gb (now {args.kv_cache_gb}). The devices say:\n{error}"
            ) from error

    def _stop_if_a_reward_never_works(self, rounds: Sequence[Scored]) -> None:
        """A function that fails for all of a rollout is broken, or what it asks is down: no prompts for that."""
        num_completions = sum(len(group) for scored in rounds for group in scored.groups)
        for reward in self.rewards:
            if sum(s.failures[reward.name] for s in rounds) == num_completions:
                error = next(s.errors[reward.name] for s in rounds if reward.name in s.errors)
                first = self.cursor.num_rollouts == 0
                which = "the first rollout" if first else f"the rollout of step {self.cursor.step + 1}"
                advice = "" if first else "\nNothing was trained on it, and a resumed run samples it again"
                raise RewardError(
                    f"the reward function {reward.name!r} failed for every completion of {which}:\n{error}{advice}"
                )

    def _advantages(self, groups: Sequence[Group]) -> Advantages:
        rows = [row for group in groups for row in group]
        return group_advantages(
            reward_matrix([reward.name for reward in self.rewards], rows),
            self.reward_weights,
            self.args.num_generations,
            self.args.scale_rewards,
            self.args.multi_objective_aggregation,
        )

    def _cut(self, groups: Sequence[Group]) -> list[list[Row]]:
        """The slices of a rollout."""
        rows = [self._row(index, row) for index, group in enumerate(groups) for row in group]
        return [rows[start : start + self.slices.rows] for start in range(0, len(rows), self.slices.rows)]

    def _scored(self, slices: list[list[Row]], num_wanted: int) -> list[list[Row]]:
        """The slices with log-probs of reference and old policy, but for the old ones that the next update will know.

        Args:
            slices: of a rollout.
            num_wanted: how many the next update takes.
        """
        learner = self.learner
        if learner.reference is not None:
            slices = [_with(part, "ref_logp", learner.logprobs(learner.reference, part)[0]) for part in slices]
        slices[num_wanted:] = [
            _with(part, "old_logp", learner.logprobs(learner.policy, part)[0]) for part in slices[num_wanted:]
        ]
        return slices

    def _next_rows(self, num: int, num_before: int) -> list[Row]:
        """The rows of the rollout's next slices.

        Args:
            num: of slices.
            num_before: rows of other rollouts in the same step, from whose groups these are told apart.
        """
        experience = self.experience
        assert experience is not None, "there is a rollout"
        places = [(experience.num_used + index) % len(experience.slices) for index in range(num)]
        rows = [row for place in places for row in experience.slices[place]]
        return [replace(row, group=row.group + num_before) for row in rows] if num_before else rows

    def _update(self, rows: list[Row]) -> tuple[Sequence[Row], Update]:
        """The next optimizer step, on these rows of earlier rollouts and the next ones of `experience`."""
        experience = self.experience
        assert experience is not None, "there is a rollout"
        num = min(self._num_left, self.slices.per_step - len(rows) // self.slices.rows)
        batch = rows + self._next_rows(num, len(rows))
        self._state_before = self.learner.state
        update = self.learner.update(batch)
        slices, logps = list(experience.slices), iter(update.logps[len(rows) :])
        for place in range(experience.num_used, experience.num_used + num):
            part = slices[place % len(slices)]
            own = [next(logps) for _ in part]
            if part[0].old_logp is None:
                slices[place % len(slices)] = _with(part, "old_logp", own)
        self.experience = replace(experience, slices=slices, num_used=experience.num_used + num)
        if not self._num_left:
            self.experience = None
        num_bad_steps = 0 if update.made else self.cursor.num_bad_steps + 1
        self.cursor = replace(self.cursor, step=self.cursor.step + 1, num_bad_steps=num_bad_steps)
        self._begun_at = self._state_before = None
        return batch, update

    @property
    def _num_left(self) -> int:
        """Slices of the rollout that are still to be trained on, in all passes."""
        experience = self.experience
        return len(experience.slices) * self.slices.num_passes - experience.num_used if experience else 0

    @property
    def _ends_an_epoch(self) -> bool:
        per_epoch = self.slices.prompts_per_epoch(len(self.prompts))
        return self.args.whole_epochs and self.cursor.num_prompts % per_epoch == 0

    @property
    def _place(self) -> tuple[Cursor, Experience | None]:
        """Where the run stands: a step that takes rows of several rollouts is begun anew."""
        return self._begun_at or (self.cursor, self.experience)

    def _visited(self, first: int, count: int) -> list[int]:
        """The examples at positions of the run."""
        num, args = len(self.prompts), self.args
        return visit_order(num, first, count, args.seed, args.prompt_order, self.slices.prompts_per_epoch(num))

    def _row(self, index: int, row: Rollout) -> Row:
        counts = not (self.args.mask_truncated_completions and row.finish_reason == "length")
        return Row(
            group=index,
            prompt=row.prompt_ids,
            completion=row.completion_ids,
            mask=np.full(len(row.completion_ids), counts),
            advantage=row.advantage,
            rollout_logp=row.policy_logps,
            sampler_logp=None if self.args.rollout_correction == "none" else row.sampler_logps,
        )

    def _stop_if_diverged(self, log: RunLog, rows: Sequence[Row], update: Update) -> None:
        if update.made:
            return
        path = self.run_folder.write_bad_batch(self.cursor.step, rows)
        loss, grad_norm = update.metrics["loss"], update.metrics["grad_norm"]
        log.message(
            f"step {self.cursor.step}: the loss ({loss}) or the gradient's norm ({grad_norm}) is not finite; the "
            f"update was skipped, its batch is in {path}",
            warning=True,
        )
        if self.cursor.num_bad_steps >= self.args.max_bad_steps:
            folder = self.save_model()
            raise DivergedError(
                f"{self.cursor.num_bad_steps} updates in a row were not finite (max_bad_steps), the last one in step "
                f"{self.cursor.step}; the model as it was before them is in {folder}, their batches are in "
                f"{path.parent}. Lower learning_rate, set beta above 0, or look at the rewards of these batches"
            )

    # -- beside the loop -----------------------------------------------------------------------------------------

    def _begin(self, log: RunLog) -> RunSaver:
        """Go on where `resume` says, or begin."""
        names = [reward.name for reward in self.rewards]
        identity = identity_of(self.args, self.model, self.tokenizer, self.prompts.token_ids, names, self.num_steps)
        saver = RunSaver(self.args, identity, self.model, self.run_folder, self.learner, log)
        saved = saver.begin()
        self.run_folder.write_tokenizer(self.tokenizer)
        if saved is not None:
            self._restore(saved, log)
        self._tell_setup(log)
        return saver

    def _restore(self, saved: Saved, log: RunLog) -> None:
        self.cursor, self.experience = Cursor(**saved.state["cursor"]), None
        state = saved.state["rollout"]
        if state is not None:
            first, end = state["first_prompt"], self.cursor.num_prompts
            order = self._visited(first, end - first)
            experience, scores = read_rollout(saved.folder, state, lambda index: self.prompts.examples[order[index]])
            slices = self._cut(experience.groups[: self.slices.prompts_per_rollout])
            self.experience = replace(experience, slices=with_scores(slices, scores))
        experience = self.experience
        rollouts = [row for group in experience.groups for row in group] if experience else []
        log.resume(saved.state["log"], rollouts, experience.metrics if experience else {})
        remove_download(saved)
        if self.cursor.step >= self.num_steps:
            log.message(
                f"the run in {self.run_folder.place} is complete; for a new one set resume='never' or another "
                "output_dir"
            )

    def _end(self, log: RunLog, saver: RunSaver, stop: StopRequests) -> None:
        """Save the last checkpoint and the model; as long as there is no room for them, wait."""

        def save() -> None:
            saver.end(self.cursor)
            self.save_model()
            self.run_folder.settle()
            self.run_folder.sync()

        patiently(save, self.run_folder.place, log.message, stop)

    @contextmanager
    def _shapes_kept(self) -> Iterator[None]:
        """If the block fails, the next try begins with the same known shapes, which its rounding depends on."""
        shapes = self.learner.shapes
        try:
            yield
        except BaseException:
            self.learner.shapes = shapes
            raise

    @property
    def _is_whole(self) -> bool:
        """Whether cursor, rollout and learner belong together: not if an update failed half-way."""
        state = self._state_before
        leaves = jax.tree.leaves(state)
        return state is None or (state is self.learner.state and not any(leaf.is_deleted() for leaf in leaves))

    @property
    def _evaluation_is_due(self) -> bool:
        step, every = self.cursor.step, self.args.eval_steps
        return every > 0 and step % every == 0 and self.cursor.evaluated_step < step

    def evaluate(self, params: SamplingParams | None = None) -> Evaluation:
        """Sample completions of all prompts of the `eval_dataset`s with the current policy, and score them.

        Args:
            params: how to sample; by default as the settings `eval_...` say.
        """
        if not self.eval_prompts:
            raise ValueError("there is no eval_dataset to evaluate on; give one to GRPOTrainer")
        self.engine.params = self.learner.policy
        params = params or self._eval_params()
        with self.reward_runner as runner:
            return Evaluation(
                {
                    name: evaluate(
                        self.engine, self.tokenizer, runner, self.reward_weights, prompts, params, self.solved_by
                    )
                    for name, prompts in self.eval_prompts.items()
                }
            )

    def save_model(self, folder: str | Path | None = None) -> Path:
        """Write the current policy as a Hugging Face folder, by default the run's `model/`, in its original dtype.

        If an adapter is trained, that is all that is written, as PEFT has it.
        """
        folder = folder or self.run_folder.path / "model"
        if self.model.adapter is not None:
            adapter = replace(self.model.adapter, trained=self.learner.state.params)
            return save_adapter(replace(self.model, adapter=adapter), folder, self.tokenizer, self._card())
        trained = replace(self.model, params=self.learner.state.params)
        return save_model(trained, folder, self.tokenizer, jnp.dtype(stored_dtype(self.model)), card=self._card())

    def push_to_hub(self, repo_id: str, private: bool = True) -> str:
        """Save the current policy in the run's `model/`, upload it, and return its address (see `hub.push_folder`).

        Args:
            repo_id: "owner/name".
            private: of a repository that is made.
        """
        return push_folder(self.save_model(), repo_id, private)

    def _card(self) -> str:
        adapter = self.model.adapter
        base = adapter.base_name if adapter else self.model.name
        settings = {} if adapter is None else asdict(adapter.config)
        names = [reward.name for reward in self.rewards]
        return run_card(self.args, base, settings, self.dataset_name, names, self.cursor.step, self.last_metrics)

    def print_trainable_parameters(self) -> None:
        """Print how many of the model's parameters are trained, in PEFT's words."""
        adapter = self.model.adapter
        print(trainable_line(*counts(self.model.config, adapter and adapter.config)))

    def _check_adapter(self, loaded: bool) -> None:
        args, adapter = self.args, self.model.adapter
        if args.base_weights != "same" and (adapter is None or not loaded):
            raise ValueError(
                f"base_weights {args.base_weights!r} quantizes the base of an adapter while it is loaded: give the "
                "model as a folder or hub id, and set lora_r, e.g. to 16"
            )
        if adapter is not None and args.sync_ref_model:
            raise ValueError("sync_ref_model moves the reference, which of an adapter is its base; set it to False")

    def _tokenizer(self, processing_class: Any) -> Any:
        if processing_class is not None:
            return prepare_tokenizer(processing_class, self.args.chat_template)
        if self.model.source is None:
            raise ValueError("a model that was made in memory has no tokenizer; give one as processing_class")
        return load_tokenizer(self.model.source, self.args.chat_template)

    def _encode(self, examples: Examples, max_completion_length: int | None = None) -> PromptSet:
        name = "max_completion_length" if max_completion_length is None else "eval_max_completion_length"
        length = max_completion_length or self.args.max_completion_length
        limit = prompt_limit(self.model.config.max_positions, length, self.args.max_prompt_length, name)
        return encode_examples(examples, self.tokenizer, limit, self.args.prompt_overflow)

    @property
    def sampling_params(self) -> SamplingParams:
        """How rollouts are sampled."""
        args = self.args
        return SamplingParams(
            n=args.num_generations,
            max_tokens=args.max_completion_length,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
            seed=args.seed,
        )

    def _eval_params(self) -> SamplingParams:
        args = self.args
        return replace(
            self.sampling_params,
            n=args.eval_num_generations,
            max_tokens=args.eval_max_completion_length or args.max_completion_length,
            temperature=args.eval_temperature,
            top_k=args.eval_top_k,
            top_p=args.eval_top_p,
            min_p=args.eval_min_p,
        )

    def _tell_setup(self, log: RunLog) -> None:
        """What the user should know before the first step."""
        if self.run_folder.moved_aside:
            log.message(f"the earlier run in {self.run_folder.path} is now in {self.run_folder.moved_aside}")
        sets = {"train_dataset": self.prompts} | {
            f"eval_dataset {name!r}": prompts for name, prompts in self.eval_prompts.items()
        }
        for name, prompts in sets.items():
            if prompts.num_dropped + prompts.num_truncated:
                did = f"{prompts.num_dropped} dropped, {prompts.num_truncated} truncated, {len(prompts)} left"
                log.message(f"{name} has prompts longer than {prompts.max_length} tokens: {did}", warning=True)
        log.findings(setup_findings(self.args, self.eos_ids))


def _with(rows: Sequence[Row], name: str, values: Sequence[np.ndarray]) -> list[Row]:
    """The rows with a field of theirs set."""
    return [replace(row, **{name: value}) for row, value in zip(rows, values, strict=True)]


def _with_advantages(groups: Sequence[Group], advantages: np.ndarray) -> list[Group]:
    by_group = advantages.reshape(len(groups), -1)
    return [
        [replace(row, advantage=float(value)) for row, value in zip(group, values, strict=True)]
        for group, values in zip(groups, by_group, strict=True)
    ]


def _lora(args: GRPOConfig, peft_config: Any) -> LoRAConfig | None:
    """The adapter asked for, by either way."""
    if peft_config is not None:
        if args.lora_r:
            raise ValueError(f"peft_config and lora_r ({args.lora_r}) both ask for an adapter; leave lora_r at 0")
        return lora_config(peft_config)
    if not args.lora_r:
        return None
    return LoRAConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=args.lora_target_modules,
        bias=args.lora_bias,
        use_rslora=args.use_rslora,
        modules_to_save=args.lora_modules_to_save,
    )


def learner_settings(args: GRPOConfig) -> LearnerSettings:
    """The part of the settings that says how updates are computed."""
    entropy = args.part(EntropyControl)
    return args.part(
        LearnerSettings,
        objective=args.part(ObjectiveSettings, entropy_bonus=entropy.active),
        entropy=entropy,
        optimizer=args.part(OptimizerSettings),
        schedule=args.part(ScheduleSettings),
    )
