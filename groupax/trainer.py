"""The trainer: GRPO as in Algorithm 1 of the paper (arXiv:2402.03300).

collect     completions of the current policy with rewards, advantages, log-probs   rollouts/collector.py
update      maximize the objective on the next minibatch of the rollout             training/learner.py
log, save   events to every sink, checkpoints                                       runs/run.py
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from groupax.core.config import GRPOConfig
from groupax.core.schedule import UpdateSchedule, update_schedule
from groupax.core.settings.sampling import SamplingParams
from groupax.core.types import Prompt, Row
from groupax.data.examples import describe_source, load_examples
from groupax.data.prompts import PromptSet
from groupax.data.tokenizer import eos_token_ids, is_conversational
from groupax.episodes.custom import as_rollout_function
from groupax.evaluation.evaluate import Evaluation, evaluate, find_correctness_reward
from groupax.events import Listener, PhaseStarted, StepStarted, TokenScores, ignore
from groupax.models.lora import LoRAConfig
from groupax.models.weights.checkpoint import Model
from groupax.parallel.preemption import PreemptionHandler
from groupax.rewards.resolve import resolve_weights
from groupax.rewards.runner import RewardRunner
from groupax.rollouts.collector import Collector, Episodes, Scoring
from groupax.rollouts.estimates import Estimate
from groupax.rollouts.pipeline import Pipeline, Policy
from groupax.rollouts.state import Cursor, Experience
from groupax.runs.build import (
    check_datasets,
    check_eval_columns,
    check_settings,
    demand_of,
    engine_for,
    eval_params,
    eval_prompts_for,
    eval_sets,
    learner_settings,
    lora_for,
    model_for,
    prompts_for,
    rewards_for,
    rules_for,
    sampler_for,
    tokenizer_for,
)
from groupax.runs.checkpoints.choose import Saved
from groupax.runs.checkpoints.fingerprint import Identity, identity_of
from groupax.runs.checkpoints.record import read_policies, restored_rollout
from groupax.runs.diagnostics import (
    Diagnose,
    logp_limit,
    num_unscored_steps,
    setup_diagnostics,
    step_diagnostics,
    stop_if_unscored,
)
from groupax.runs.header import data_name, prompt_warnings
from groupax.runs.model_card import run_card
from groupax.runs.outcome import evaluation_files, outcome
from groupax.runs.progress.display import Progress
from groupax.runs.run import Run, with_absolute_paths
from groupax.runs.step_record import step_record
from groupax.runs.trainer import Description, Trainer, TrainResult, make_learner
from groupax.training.learner import Update

DIVERGED = "Lower learning_rate, set beta above 0, or look at the rewards of these batches"  # advice


class GRPOTrainer(Trainer):
    """Trains a language model with Group Relative Policy Optimization.

    Args:
        model: Folder, hub id, or `Model`, whose own weights are not changed.
        reward_funcs: One or several reward functions or reward models, by reference or name (see docs/rewards.md).
        args: Settings; None takes the defaults.
        train_dataset: Prompts: a `datasets.Dataset`, a list of dicts, a file of rows, a folder, or a hub id, with a
            column `prompt` (see docs/datasets.md). The reward functions receive every other column.
        eval_dataset: Held-out prompts for `evaluate` and `eval_steps`, or a dict of several sets by name.
        processing_class: Tokenizer; None takes the one in the model's folder.
        reward_processing_classes: Tokenizers of the reward models, one per entry of `reward_funcs`; None takes each
            model's own.
        peft_config: A `LoRAConfig` or a `peft.LoraConfig`, to train an adapter instead of the model's weights. Without
            it a model that has an adapter continues to train that one.
        listeners: Called with every event of the run (see `groupax.events`); one that returns True ends the run.
        progress: Display of the run; None takes the one that `progress_bar` names.
        tools: Functions that the model may call (see docs/episodes.md). Their docstrings and type hints describe them.
        environments: A class of environments, of which every episode gets one, or a function that creates one; or a
            dict of several by the name in the dataset's column `environment`.
        rollout_func: A function that samples rollouts itself, in the place of turns, tools and environments: it takes a
            `RolloutRequest` and returns a `Trajectory` for each rollout (see docs/episodes.md). A `RolloutFunction`
            also names the columns that it adds for reward functions.

    Raises:
        ValueError: an argument or a setting would fail later.

    Example:
        >>> trainer = GRPOTrainer("Qwen/Qwen3-0.6B", my_reward, train_dataset="prompts.jsonl")  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    args: GRPOConfig

    def __init__(
        self,
        model: str | Path | Model,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        peft_config: Any = None,
        listeners: Sequence[Listener] = (),
        progress: Progress | None = None,
        tools: Sequence[Any] = (),
        environments: Any = None,
        rollout_func: Any = None,
    ) -> None:
        self.args = args = with_absolute_paths(args or GRPOConfig())
        self.run = Run(self, args, progress)
        self.listeners, self.progress, self.emit = listeners, self.run.progress, self.run.emit
        self.progress.shows_samples = args.log_completions
        self.run_folder = self.run.folder

        self.emit(PhaseStarted("loading the data"))
        check_settings(args)
        lora = lora_for(args, peft_config)
        check_datasets(args, train_dataset, eval_dataset)
        examples, held_out = load_examples(train_dataset, may_have_images=True), eval_sets(eval_dataset)
        own_sampling = as_rollout_function(rollout_func)
        self.rewards = rewards_for(args, reward_funcs, reward_processing_classes, examples, environments, own_sampling)
        check_eval_columns(self.rewards, examples, held_out)
        self.reward_runner = self.make_reward_runner()
        self.reward_weights = resolve_weights(args.reward_weights, self.rewards)
        self.correctness_reward = find_correctness_reward(args.correctness_reward, self.rewards)

        self.emit(PhaseStarted("loading the model"))
        self.start_model = self.make_model(model, lora)
        self.emit(PhaseStarted("encoding the prompts"))
        self.tokenizer = tokenizer_for(args, self.start_model, processing_class)
        self.eos_ids = eos_token_ids(self.tokenizer, self.start_model.generation_config, self.start_model.hf_config)
        rules = rules_for(args, self.start_model, self.tokenizer, self.eos_ids, tools, environments, own_sampling)
        source = describe_source(train_dataset, "train_dataset")
        self.prompts = prompts_for(args, self.start_model, self.tokenizer, examples, rules, dataset=source)
        self.rules = replace(rules, max_prompt_tokens=self.prompts.max_length)
        self.eval_prompts = eval_prompts_for(args, self.start_model, self.tokenizer, held_out, self.rules)

        self.emit(PhaseStarted("preparing the devices"))
        self.schedule = self.make_schedule()
        self.num_steps = self.schedule.num_steps(len(self.prompts), args.num_train_epochs, args.max_steps)
        self.prepare_devices((max(map(len, self.prompts.token_ids)), args.max_completion_length))

        self.dataset_name = data_name(train_dataset, len(examples))
        self.public_prompt: Prompt | None = None  # for the model's card; prompts may be private
        self.estimates: dict[int, dict[str, Mapping[str, Estimate]]] = {}  # of evaluation sets, by the step before them

    # -- Algorithm 1 ---------------------------------------------------------------------------------------------

    def train(self) -> TrainResult:
        """Runs the remaining steps, writes the run folder, and saves the trained model in its `model/`.

        Raises:
            DivergedError: `max_bad_steps` updates in a row were not finite. The model of before is saved.
            RewardError: a reward function failed and `reward_errors` is "raise", or it failed for every completion of a
                rollout, or no completion has had a reward in several rollouts or in the whole run.
            PreemptedError: SIGTERM or SIGINT asked the run to stop; its state is saved.
            RunError: the run cannot continue; its state is saved if there is room.
            ValueError: `resume` names a checkpoint that this run cannot continue, or no checkpoint there can be read.
            LockedError: another run works in the folder.
        """
        run = self.run
        with run.training() as stop:
            while True:
                run.evaluate_if_due()
                run.hooks.save_if_due(run)
                if run.is_over():
                    break
                stop.check()
                self.emit(StepStarted(self.cursor.step))
                if self.pipeline is not None:
                    self.pipeline.begin(self.cursor)
                rows = self.next_rows()
                update = self.update(rows)
                if not update.applied:
                    run.stop_if_diverged(rows, update, DIVERGED)
        return TrainResult(self.cursor.step, run.train_seconds, run.log.rollout_tokens_per_s, run.log.last)

    def next_rows(self) -> list[Row]:
        """Returns the rows of the next update; collects a rollout if the last one is used up."""
        return (self.experience or self.collect()).next_rows()

    def collect(self) -> Experience:
        """Samples and scores a rollout; only within a run."""
        if self.pipeline is not None:
            self.emit(PhaseStarted("waiting for the rollout"))
        with self.run.stop.cancellable(), self._shapes_kept():
            experience = (self.pipeline or self.collector).collect(self.cursor)
        self.experience = experience
        self.cursor = replace(
            self.cursor,
            num_rollouts=self.cursor.num_rollouts + 1,
            num_prompts=self.cursor.num_prompts + len(experience.groups),
            num_tokens=self.cursor.num_tokens + experience.num_tokens,
        )
        self.run.log.rollout(self.cursor.step, experience.groups, experience.metrics, experience.errors)
        return experience

    def update(self, rows: Sequence[Row]) -> Update:
        """Takes an optimizer step on rows, and logs it."""
        with self.run.updating(), self._shapes_kept():
            update = self.learner.update(rows)
            if self.pipeline is None:
                self.engine.params = self.learner.policy  # or it would keep the previous weights
            scores = self.count_as_used(update)
            num_bad_steps = 0 if update.applied else self.cursor.num_bad_steps + 1
            self.cursor = replace(self.cursor, step=self.cursor.step + 1, num_bad_steps=num_bad_steps)
        self.log(rows, update, scores)
        return update

    def count_as_used(self, update: Update) -> dict[int, TokenScores]:
        """Counts an update's rows as used, drops a rollout that is used up, and returns token scores by completion."""
        assert self.experience is not None, "there is a rollout"
        of_rows = zip(self.experience.next_indices(), map(TokenScores, update.logps, update.entropies), strict=True)
        scores = {index: each for index, each in of_rows if index is not None}
        self.experience = self.experience.after(update.logps, self.schedule.num_passes)
        return scores

    def log(self, rows: Sequence[Row], update: Update, scores: Mapping[int, TokenScores]) -> None:
        """Logs an optimizer step, and records the digests by which a replay of it is compared.

        Raises:
            RewardError: No completion has had a reward for several rollouts.
        """
        step, log = self.cursor.step, self.run.log
        staleness = step - 1 - sum(row.policy_version for row in rows) / len(rows)
        log.step(step, update.metrics | {"rollout/staleness": staleness}, scores)
        self.last_metrics = log.last
        record = step_record(self.cursor, log.rollouts, rows, update, self.learner.digest())
        self.run_folder.write_record(json.dumps(vars(record)) + "\n")
        self.stop_if_nothing_is_scored()

    def stop_if_nothing_is_scored(self) -> None:
        """Raises a RewardError if no completion had a reward in several rollouts, or in the whole run."""
        if num_unscored := num_unscored_steps(self.run.log.diagnostics.history):
            names, per_rollout = [reward.name for reward in self.rewards], self.schedule.updates_per_rollout
            stop_if_unscored(num_unscored, self.cursor.step, self.num_steps, per_rollout, names)

    @contextmanager
    def _shapes_kept(self) -> Iterator[None]:
        """Restores the known shapes if the block fails, since the rounding of the next attempt depends on them."""
        shapes = self.learner.shapes
        try:
            yield
        except BaseException:
            self.learner.shapes = shapes
            raise

    # -- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(self, params: SamplingParams | None = None, eval_dataset: Any = None) -> Evaluation:
        """Samples completions of all prompts of the `eval_dataset`s with the current policy, and scores them.

        Args:
            params: Sampling parameters; None takes the settings `eval_...`.
            eval_dataset: Prompts to evaluate on instead of the trainer's, in any form that it takes.

        Raises:
            ValueError: There are no prompts, or they lack a column that a reward function takes.
        """
        sets = self.eval_prompts if eval_dataset is None else self.encode_eval_sets(eval_dataset)
        if not sets:
            raise ValueError("there is no eval_dataset to evaluate on; give one to GRPOTrainer or to evaluate")
        if self.pipeline is not None:
            self.pipeline.settle()
        self.engine.params = self.learner.policy
        step = self.cursor.step
        when = "after training" if step >= self.num_steps else f"at step {step}" if step else "before training"
        with self.progress, self.reward_runner as runner:
            self.run.introduce()
            runner.state = self.collector.trainer_state(self.cursor)
            evaluation = Evaluation(
                {
                    name: evaluate(
                        self.engine,
                        self.collector.episodes,
                        self.collector.scoring,
                        prompts,
                        params or eval_params(self.args),
                        self.emit,
                        f"evaluating {when}: {name}",
                    )
                    for name, prompts in sets.items()
                }
            )
        if self.pipeline is None:
            self.engine.release()
        if eval_dataset is None:  # the model's card compares the same sets before and after
            self.estimates[step] = {name: each.estimates for name, each in evaluation.sets.items()}
        return evaluation

    def encode_eval_sets(self, dataset: Any) -> dict[str, PromptSet]:
        """Returns the encoded prompts of an evaluation set, or of several by name."""
        sets = eval_sets(dataset)
        check_eval_columns(self.rewards, self.prompts.examples, sets)
        return eval_prompts_for(self.args, self.start_model, self.tokenizer, sets, self.rules)

    # -- parts that a subclass may replace -----------------------------------------------------------------------

    def make_model(self, model: str | Path | Model, lora: LoRAConfig | None) -> Model:
        """Returns the model that the run starts from."""
        return model_for(self.args, model, lora)

    def prepare_devices(self, longest: tuple[int, int]) -> None:
        """Makes the parts with memory on devices; `longest` are the tokens of the longest prompt and completion."""
        args = self.args
        self.learner = make_learner(self, learner_settings(args), longest)
        expected = demand_of(args, self.schedule, longest, self.rules)
        self.engine = engine_for(
            args, self.start_model, self.learner, self.eos_ids, self.tokenizer, expected, self.rules
        )
        self.collector = self.make_collector()
        self.pipeline = Pipeline(self.collector, args.max_staleness, self.num_steps) if args.max_staleness else None

    def make_schedule(self) -> UpdateSchedule:
        """Returns how rollouts become optimizer steps."""
        return update_schedule(self.args)

    def make_reward_runner(self) -> RewardRunner:
        """Returns the runner of the rewards."""
        return RewardRunner(self.rewards, self.args)

    def make_collector(self) -> Collector:
        """Returns the collector of rollouts, from the other parts."""
        sampler = sampler_for(self.args, self.start_model, self.engine, self.learner.policy, self.run_folder.path)
        scoring = Scoring(self.reward_runner, self.reward_weights, self.correctness_reward, self.num_steps)
        return Collector(
            self.args,
            self.schedule,
            self.prompts,
            self.learner,
            sampler,
            Episodes(self.tokenizer, self.rules, self.run.records if self.rules.has_turns else lambda: None),
            scoring,
            ignore if self.args.max_staleness else self.emit,  # asynchronous rollouts are sampled in other threads
        )

    # -- what its run asks of it -----------------------------------------------------------------------------------

    @contextmanager
    def working(self, stop: PreemptionHandler) -> Iterator[None]:
        """Starts what only runs during training: the calls of rewards, and the threads that sample."""
        with self.reward_runner, self.pipeline or nullcontext():
            self.engine.before_chunk = stop.check_cancellable
            try:
                yield
            finally:
                self.engine.before_chunk = None

    def policies(self, cursor: Cursor) -> Mapping[int, Policy]:
        """Returns the earlier policies that sample coming rollouts, which a checkpoint has to keep."""
        return self.pipeline.policies(cursor) if self.pipeline else {}

    def diagnose(self) -> Diagnose:
        """Returns what finds faults of the run in its metrics."""
        return partial(step_diagnostics, logp_limit=logp_limit(self.args, str(self.learner.dtype) == "float32"))

    def identity(self) -> Identity:
        """Returns everything that a resumed run must have in common with this one."""
        return identity_of(
            self.args,
            self.start_model,
            self.tokenizer,
            self.prompts.token_ids,
            [reward.name for reward in self.rewards],
            self.num_steps,
            () if self.prompts.images is None else self.prompts.images.digests,
        )

    def restore(self, saved: Saved) -> None:
        """Continues from a checkpoint, after the learner did."""
        self.cursor = Cursor(**saved.state["cursor"])
        self.experience = restored_rollout(saved, self.collector, self.cursor)
        if self.pipeline is not None:
            self.pipeline.restore(read_policies(saved.folder, saved.state.get("policies", []), self.learner))

    def describe(self) -> Description:
        """Returns what a user should know of the run before its first step."""
        args = self.args
        cache_bytes = 0 if args.rollout_servers else self.engine.planned_bytes()
        description = self.description(self.facts(), self.schedule.rows_per_step, cache_bytes)
        findings = setup_diagnostics(args, self.eos_ids, len(self.prompts))
        return replace(description, warnings=prompt_warnings(self.prompts, self.eval_prompts), findings=findings)

    def facts(self) -> dict[str, str]:
        """Returns the data, the rewards and the steps of the run, by label."""
        args, num_rows, longest = self.args, self.schedule.rows_per_step, self.args.max_completion_length
        held_out = "".join(f", {len(each):,} held out ({name})" for name, each in self.eval_prompts.items())
        return {
            "prompts": f"{len(self.prompts):,}{held_out}",
            "rewards": ", ".join(reward.name for reward in self.rewards),
            **self.rules.names,
            "steps": f"{self.num_steps:,}, each on {num_rows:,} completions, {args.num_generations} per prompt, of at "
            f"most {longest:,} tokens ({num_rows * longest:,} together)",
        }

    def card(self) -> str:
        """Returns the card of the model."""
        trained = replace(
            self.trained(is_chat=is_conversational(self.prompts.examples[0]["prompt"])),
            rewards=[reward.name for reward in self.rewards],
            of_episodes=self.rules.names,
            held_out=self.estimates,
            outcome=outcome({}, evaluation_files(self.run_folder.path), lambda _: ([], [])),
            recipe=(self.run_folder.command or {}).get("recipe"),
            prompt=self.public_prompt,
        )
        return run_card(trained)
