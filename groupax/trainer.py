"""The trainer: GRPO as the paper's Algorithm 1 has it (arXiv:2402.03300)."""

import functools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from groupax.config import GRPOConfig
from groupax.data.examples import describe_source, load_examples
from groupax.data.sources import EVAL_SPLITS
from groupax.data.tokenizer import eos_token_ids
from groupax.errors import DivergedError, RewardError
from groupax.evaluation.evaluate import Evaluation, evaluate, find_correctness_reward
from groupax.evaluation.sets import named_sets
from groupax.events import (
    EventStream,
    Listener,
    Message,
    PhaseStarted,
    RunDescribed,
    RunEnded,
    RunStarted,
    StepStarted,
    TokenScores,
    ignore,
)
from groupax.metrics.estimates import Estimate
from groupax.models.adapted import apply_adapter
from groupax.models.checkpoint import Model, add_adapter
from groupax.models.lora import count_params, trainable_params_line
from groupax.models.saving import save_adapter, save_model, source_folders
from groupax.models.specs import Params
from groupax.parallel import processes
from groupax.parallel.compilation import compilation
from groupax.parallel.peak import memory_in_use
from groupax.parallel.preemption import PreemptionHandler, RolloutCancelled
from groupax.parallel.runtime import configure_jax
from groupax.parallel.transfer import to_host_on_primary
from groupax.rewards.resolve import check_columns, resolve_rewards, resolve_weights
from groupax.rewards.runner import RewardRunner
from groupax.rollouts.collector import Collector
from groupax.rollouts.pipeline import Pipeline
from groupax.rollouts.slices import slices_of
from groupax.rollouts.state import Cursor, Experience
from groupax.runs.build import (
    check_adapter,
    check_objective,
    check_processes,
    engine_for,
    eval_params,
    learner_settings,
    lora_for,
    model_for,
    prompts_for,
    sampler_for,
    tokenizer_for,
)
from groupax.runs.checkpoints.choose import Saved
from groupax.runs.checkpoints.fingerprint import Identity, identity_of, process_of
from groupax.runs.checkpoints.record import read_policies, read_rollout, stored_dtype, with_scores
from groupax.runs.checkpoints.saver import RunSaver, remove_download, retry_while_disk_full
from groupax.runs.diagnostics import START_STEPS, UNSCORED_ROLLOUTS, logp_limit, num_unscored_steps, setup_diagnostics
from groupax.runs.files import free_name
from groupax.runs.folder import RunFolder
from groupax.runs.header import run_facts
from groupax.runs.log import RunLog
from groupax.runs.model_card import license_of, read_card, run_card
from groupax.runs.progress.display import Progress
from groupax.runs.progress.named import primary_only, progress_named
from groupax.runs.trackers.tracker import check_trackers
from groupax.settings.rewards import RewardSettings
from groupax.settings.sampling import SamplingParams
from groupax.storage.hub import push_folder
from groupax.storage.replacing import ForeignFilesError, check_destination, replace_card
from groupax.training.buckets import Shape
from groupax.training.learner import Learner, Update
from groupax.training.state import TrainState
from groupax.types import Metrics, Row


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
        train_dataset: prompts: a `datasets.Dataset`, a list of dicts, a file of rows, a folder, or a hub id, with a
            column `prompt` (see docs/datasets.md). Every other column reaches the reward functions.
        eval_dataset: likewise, for `evaluate` and `eval_steps`; or a dict of several by name.
        processing_class: the tokenizer; by default the one in the model's folder.
        reward_processing_classes: tokenizers of the reward models, one per entry of `reward_funcs`; None takes each
            model's own.
        peft_config: a `LoRAConfig` or a `peft.LoraConfig`: an adapter is trained, and the model's weights stay as they
            are. Without it a model that has an adapter goes on training that one.
        listeners: Called with every event of the run (see `groupax.events`); one that returns True ends the run.
        progress: Display of the run; by default the one that `progress_bar` names.

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
        progress: Progress | None = None,
    ) -> None:
        self.args = args = args or GRPOConfig()
        configure_jax()
        self.progress = primary_only(progress or progress_named(args.progress_bar))
        self.progress.is_compiling = lambda: compilation().is_under_way
        self.progress.shows_samples = args.log_completions
        self.events = EventStream(self.progress)
        self.emit = emit = self.events.emit
        self._is_introduced = False
        emit(PhaseStarted("loading the data"))
        check_processes(args)
        check_objective(args)
        lora = lora_for(args, peft_config)
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
        self.reward_weights = resolve_weights(args.reward_weights, self.rewards)
        self.correctness_reward = find_correctness_reward(args.correctness_reward, self.rewards)
        check_trackers(args.report_to)
        log_bytes = None if args.rollout_log_gb is None else int(args.rollout_log_gb * 1e9)
        self._unseen: Any = None if processes.is_primary() else tempfile.TemporaryDirectory(prefix="groupax-process-")
        self.run_folder = RunFolder(self._unseen.name if self._unseen else args.output_dir, log_bytes, emit)
        self.listeners = listeners

        self._identity: Identity | None = None
        emit(PhaseStarted("loading the model"))
        self._model = model_for(args, model)
        if lora is not None:
            self._model = add_adapter(self._model, lora, args.seed)
        check_adapter(args, self._model, was_loaded=not isinstance(model, Model))
        if self._model.config.num_labels:
            raise ValueError(f"{self._model.source or 'the model'} classifies sequences; a policy needs a causal model")
        emit(PhaseStarted("encoding the prompts"))
        self.tokenizer = tokenizer_for(args, self._model, processing_class)
        self.eos_ids = eos_token_ids(self.tokenizer, self._model.generation_config, self._model.hf_config)
        name = describe_source(train_dataset, "train_dataset")
        self.prompts = prompts_for(args, self._model, self.tokenizer, train_examples, dataset=name)
        self.eval_prompts = {
            name: prompts_for(
                args,
                self._model,
                self.tokenizer,
                examples,
                args.eval_max_completion_length,
                f"eval_dataset {name!r}",
            )
            for name, examples in eval_examples.items()
        }

        emit(PhaseStarted("preparing the devices"))
        self.slices = slices_of(args)
        self.num_steps = self.slices.num_steps(len(self.prompts), args.num_train_epochs, args.max_steps)
        longest = max(map(len, self.prompts.token_ids)), args.max_completion_length
        self.learner = Learner(self._model, learner_settings(args), self.num_steps, longest)
        if self._model.adapter is not None and self.learner.frozen is not None:
            adapter = replace(self._model.adapter, frozen=self.learner.frozen)  # those loaded in another dtype can go
            self._model = replace(self._model, params=apply_adapter(adapter.frozen, adapter.trained), adapter=adapter)
        self.engine = engine_for(args, self._model, self.learner.policy, self.eos_ids, self.tokenizer)
        self.collector = Collector(
            args,
            self.slices,
            self.prompts,
            self.tokenizer,
            sampler_for(args, self._model, self.engine, self.learner.policy, self.run_folder.path),
            self.learner,
            self.reward_runner,
            self.reward_weights,
            self.correctness_reward,
            self.num_steps,
            ignore if args.max_staleness else emit,  # asynchronous rollouts are sampled in other threads
        )
        self.pipeline = Pipeline(self.collector, args.max_staleness, self.num_steps) if args.max_staleness else None
        self.cursor = Cursor()
        self.experience: Experience | None = None  # the rollout that is not used up
        # while a step takes rows of several rollouts: where the run stood, and the known shapes
        self._begun_at: tuple[Cursor, Experience | None, list[Shape]] | None = None
        self._state_before: TrainState | None = None  # while an update is under way
        self.dataset_name = train_dataset if isinstance(train_dataset, str) else f"{len(self.prompts)} prompts"
        self.last_metrics: Metrics = {}
        self.estimates: dict[int, dict[str, Mapping[str, Estimate]]] = {}  # of evaluation sets, by the step before them

    # -- Algorithm 1 ---------------------------------------------------------------------------------------------

    def train(self) -> TrainResult:
        """Run all steps that are left, write the run folder, and save the trained model in its `model/`.

        Raises:
            DivergedError: `max_bad_steps` updates in a row were not finite. The model is saved as it was before them.
            RewardError: a reward function failed and `reward_errors` is "raise", or it failed for every completion of a
                rollout, or no completion has had a reward in several rollouts or in the whole run.
            PreemptedError: SIGTERM, SIGINT or a notice of maintenance asked the run to stop; its state is saved.
            RunError: the run cannot go on; its state is saved if there is where.
            ValueError: `resume` names a checkpoint that this run cannot continue, or no checkpoint there can be read.
            LockedError: another run works in the folder.
        """
        with self.holding_folder():
            return self._train()

    @contextmanager
    def holding_folder(self) -> Iterator[None]:
        """Keep other runs out of the run folder while the block runs; such blocks may lie within each other.

        Raises:
            LockedError: another run works in it.
        """
        is_taken = processes.run_on_primary(self.run_folder.lock)
        try:
            yield
        finally:
            if is_taken:
                self.run_folder.unlock()

    def _train(self) -> TrainResult:
        memory = functools.partial(memory_in_use, self._model.mesh) if self.args.track_memory else dict
        limit = logp_limit(self.args, str(self.learner.dtype) == "float32")
        log = RunLog(self.args, self.run_folder, self.num_steps, self.events, self.listeners, memory, limit)
        try:
            watch = self._model.mesh.devices.flat[0].platform == "tpu"
            several = processes.num_processes() > 1
            with (
                self.progress,
                PreemptionHandler(watch, processes.first_not_none if several else None) as stop,
                self.reward_runner,
                self.pipeline or nullcontext(),
            ):
                self.engine.before_chunk = stop.check if several else None
                self._introduce()
                saver = self._begin(log)
                try:
                    self._loop(log, saver, stop)
                except RolloutCancelled:
                    saver.stop(*self._settled(log), stop.reason or "")
                except Exception as error:
                    if several and not isinstance(error, (RewardError, DivergedError)):  # which all processes raise
                        processes.fail(error)
                    else:
                        saver.fail(*self._settled(log), self._is_whole)
                    raise
                train_seconds = log.train_seconds
                self._end(log, saver, stop)
                self.emit(RunEnded(self.cursor.step))
        finally:
            self.engine.before_chunk = None
            log.close()
        return TrainResult(self.cursor.step, train_seconds, log.rollout_tokens_per_s, log.last)

    def _loop(self, log: RunLog, saver: RunSaver, stop: PreemptionHandler) -> None:
        while True:
            if self._evaluation_is_due:
                with stop.cancellable():
                    evaluation = self.evaluate()
                self.cursor = replace(self.cursor, evaluated_step=self.cursor.step)
                log.evaluation(self.cursor.step, evaluation)
            saver.save_if_due(self.cursor, self.experience)
            if self.cursor.step >= self.num_steps or any(processes.all_gather_object(log.ends)):
                return
            stop.check()
            self.emit(StepStarted(self.cursor.step))
            if self.pipeline is not None:
                self.pipeline.begin(self.cursor)
            rows = self._rows_of_earlier_rollouts(log, stop)
            if self.experience is None:
                self._sample_rollout(log, stop, self.slices.per_step - len(rows) // self.slices.rows)
            with self._shapes_kept():
                rows, update, scored = self._update(rows)
            staleness = self.cursor.step - 1 - sum(row.policy_version for row in rows) / len(rows)
            metrics = update.metrics | {"rollout/staleness": staleness}
            log.step(self.cursor.step, metrics, scored, update.distributions)
            self.last_metrics = log.last
            self._stop_if_nothing_is_scored(log)
            self._stop_if_diverged(stop, rows, update)

    def _rows_of_earlier_rollouts(self, log: RunLog, stop: PreemptionHandler) -> list[Row]:
        """What the next step takes of rollouts that it uses up; the rest it takes of `experience`."""
        rows: list[Row] = []
        while self._num_left < (wanted := self.slices.per_step - len(rows) // self.slices.rows):
            if self.experience is not None:
                if self._ends_an_epoch:
                    break
                self._begun_at = self._begun_at or (self.cursor, self.experience, self.learner.shapes)
                rows += self.experience.next_rows(self._num_left, rows)
                self.experience = None
            elif rows or self.slices.per_rollout * self.slices.num_passes < wanted:
                self._begun_at = self._begun_at or (self.cursor, None, self.learner.shapes)
                self._sample_rollout(log, stop, wanted)
            else:
                break
        return rows

    def _sample_rollout(self, log: RunLog, stop: PreemptionHandler, num_wanted: int) -> None:
        if self.pipeline is not None:
            self.emit(PhaseStarted("waiting for the rollout"))
        with stop.cancellable(), self._shapes_kept():
            experience = (self.pipeline or self.collector).collect(self.cursor, num_wanted)
        self._take(experience)
        log.rollout(self.cursor.step, experience.groups, experience.metrics, experience.errors)

    def _take(self, experience: Experience) -> None:
        """A rollout is there to be trained on."""
        self.experience = experience
        self.cursor = replace(
            self.cursor,
            num_rollouts=self.cursor.num_rollouts + 1,
            num_prompts=self.cursor.num_prompts + len(experience.groups),
            num_tokens=self.cursor.num_tokens + experience.num_tokens,
        )

    def _update(self, rows: list[Row]) -> tuple[Sequence[Row], Update, dict[int, TokenScores]]:
        """The next optimizer step, on these rows of earlier rollouts and the next ones of `experience`.

        Returns:
            The rows, the update, and what it computed of completions of `experience`, by their index in it.
        """
        experience = self.experience
        assert experience is not None, "there is a rollout"
        num = min(self._num_left, self.slices.per_step - len(rows) // self.slices.rows)
        batch = rows + experience.next_rows(num, rows)
        self._state_before = self.learner.state
        self.emit(PhaseStarted("updating"))
        update = self.learner.update(batch)
        if self.pipeline is None:
            self.engine.params = self.learner.policy  # or it would keep those of before
        scores = map(TokenScores, update.logps[len(rows) :], update.entropies[len(rows) :])
        scored = dict(zip(experience.next_indices(num), scores, strict=True))
        self.experience = experience.after(num, update.logps[len(rows) :])
        if not self._num_left:
            self.experience = None
        num_bad_steps = 0 if update.applied else self.cursor.num_bad_steps + 1
        self.cursor = replace(self.cursor, step=self.cursor.step + 1, num_bad_steps=num_bad_steps)
        self._begun_at = self._state_before = None
        return batch, update, scored

    @property
    def _num_left(self) -> int:
        """Slices of the rollout that are still to be trained on, in all passes."""
        return self.experience.num_left(self.slices.num_passes) if self.experience else 0

    @property
    def _ends_an_epoch(self) -> bool:
        per_epoch = self.slices.prompts_per_epoch(len(self.prompts))
        return self.args.drop_last and self.cursor.num_prompts % per_epoch == 0

    def _settled(self, log: RunLog) -> tuple[Cursor, Experience | None]:
        """Where the run stands, to be saved: a step that takes rows of several rollouts is to be begun anew."""
        if self._begun_at is not None:
            self.cursor, self.experience, self.learner.shapes = self._begun_at
            self._begun_at = None
            log.forget_rollouts()
        return self.cursor, self.experience

    def _stop_if_diverged(self, stop: PreemptionHandler, rows: Sequence[Row], update: Update) -> None:
        if update.applied:
            return
        path = processes.run_on_primary(lambda: self.run_folder.write_bad_batch(self.cursor.step, rows))
        loss, grad_norm = update.metrics["loss"], update.metrics["grad_norm"]
        self.emit(
            Message(
                f"step {self.cursor.step}: the loss ({loss}) or the gradient's norm ({grad_norm}) is not finite; the "
                f"update was skipped, its batch is in {self.run_folder.uri_of(f'bad_steps/{path.name}')}",
                warning=True,
            )
        )
        if self.cursor.num_bad_steps >= self.args.max_bad_steps:
            self._save_result()
            retry_while_disk_full(
                lambda: processes.run_on_primary(self.run_folder.sync), self.run_folder, self.emit, stop
            )
            folder, batches = processes.run_on_primary(lambda: [*map(self.run_folder.uri_of, ("model", "bad_steps"))])
            raise DivergedError(
                f"{self.cursor.num_bad_steps} updates in a row were not finite (max_bad_steps), the last one in step "
                f"{self.cursor.step}; the model as it was before them is in {folder}, their batches are in "
                f"{batches}. Lower learning_rate, set beta above 0, or look at the rewards of these batches"
            )

    def _stop_if_nothing_is_scored(self, log: RunLog) -> None:
        """A few rollouts without any reward may happen where rewards are for some prompts only; more are a mistake."""
        num_steps, step = num_unscored_steps(log.diagnostics.history), self.cursor.step
        patience = min(UNSCORED_ROLLOUTS * max(1, self.slices.steps_per_rollout), START_STEPS)
        if num_steps >= patience or num_steps == step == self.num_steps:
            names = ", ".join(repr(reward.name) for reward in self.rewards)
            raise RewardError(
                f"in steps {step - num_steps + 1} to {step} no completion had a reward: every function ({names}) "
                "returned None for every one of them. None means that a function does not apply to a completion; "
                "return a number for those that it judges, and check that the dataset has what the functions look at"
            )

    # -- beside the loop -----------------------------------------------------------------------------------------

    def _begin(self, log: RunLog) -> RunSaver:
        """Go on where `resume` says, or begin."""
        names = [reward.name for reward in self.rewards]
        if self._identity is None:
            inputs = self.tokenizer, self.prompts.token_ids, names, self.num_steps
            self._identity = identity_of(self.args, self._model, *inputs)
            if self._model.adapter is None:  # the learner has its own copies
                self._model = replace(self._model, params={})
        policies = self.pipeline.policies if self.pipeline else lambda _: {}
        saver = RunSaver(self.args, self._identity, self._model, self.run_folder, self.learner, log, policies)
        model_folder = self.run_folder.path / "model"
        metrics = self.run_folder.path / "metrics.jsonl"  # an earlier run may be moved aside, with its model
        processes.run_on_primary(
            lambda: metrics.exists() or check_destination(model_folder, source_folders(self._model))
        )
        saved = saver.begin()
        self.run_folder.write_tokenizer(self.tokenizer)
        if saved is not None:
            self._restore(saved, log)
        processes.run_on_primary(lambda: check_destination(model_folder, source_folders(self._model)))
        facts = {**self._facts, "dataset": self.dataset_name}
        self.run_folder.write_process({**process_of(self._model.mesh), "run": facts})
        self.emit(RunStarted(self.cursor.step, self.num_steps))
        self._tell_setup(log)
        return saver

    def _restore(self, saved: Saved, log: RunLog) -> None:
        self.cursor, self.experience = Cursor(**saved.state["cursor"]), None
        state = saved.state["rollout"]
        if state is not None:
            first, end = state["first_prompt"], self.cursor.num_prompts
            order = self.collector.visited(first, end - first)
            experience, scores = read_rollout(saved.folder, state, lambda index: self.prompts.examples[order[index]])
            slices = self.collector.cut(experience.groups[: self.slices.prompts_per_rollout])
            self.experience = replace(experience, slices=with_scores(slices, scores))
        if self.pipeline is not None:
            self.pipeline.restore(read_policies(saved.folder, saved.state.get("policies", []), self.learner))
        experience = self.experience
        rollouts = [row for group in experience.groups for row in group] if experience else []
        log.resume(saved.state["log"], rollouts, experience.metrics if experience else {})
        remove_download(saved)
        if self.cursor.step >= self.num_steps:
            self.emit(
                Message(
                    f"the run in {self.run_folder.uri} is complete, with {self.num_steps} steps; to train on, set a "
                    f"larger max_steps (groupax resume {self.run_folder.uri} --max_steps {2 * self.num_steps}); for "
                    "a new run, set resume='never' or another output_dir"
                )
            )

    def _end(self, log: RunLog, saver: RunSaver, stop: PreemptionHandler) -> None:
        """Save the last checkpoint, the model and what trackers wrote; as long as there is no room for them, wait."""

        def save() -> None:
            self.emit(PhaseStarted("writing the model"))
            processes.run_on_primary(self.run_folder.flush)
            saver.end(*self._settled(log))
            self._save_result()
            processes.run_on_primary(lambda: (self.run_folder.settle(), self.run_folder.sync()))

        log.close_sinks()
        retry_while_disk_full(save, self.run_folder, self.emit, stop)

    def _save_result(self) -> None:
        """Save the model in the run's `model/`, or beside it if somebody wrote into that while the run trained."""
        try:
            self.save_model()
        except ForeignFilesError as error:
            saved = self.save_model(free_name(self.run_folder.path / "model"))
            self.emit(Message(f"the model is in {saved}: {error}", warning=True))

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
        if self.pipeline is not None:
            self.pipeline.settle()
        self.engine.params = self.learner.policy
        params = params or eval_params(self.args)
        step = self.cursor.step
        when = "after training" if step >= self.num_steps else f"at step {step}" if step else "before training"
        with self.progress, self.reward_runner as runner:
            self._introduce()
            runner.state = self.collector.trainer_state(self.cursor)
            inputs = self.tokenizer, runner, self.reward_weights
            of_sets = {
                name: evaluate(
                    self.engine,
                    *inputs,
                    prompts,
                    params,
                    self.correctness_reward,
                    self.emit,
                    f"evaluating {when}: {name}",
                )
                for name, prompts in self.eval_prompts.items()
            }
        if self.pipeline is None:
            self.engine.release()
        self.estimates[self.cursor.step] = {name: each.estimates for name, each in of_sets.items()}
        return Evaluation(of_sets)

    @property
    def model(self) -> Model:
        """The policy as it is now."""
        adapter = self._model.adapter and replace(self._model.adapter, trained=self.learner.state.params)
        return replace(self._model, params=self.learner.policy, adapter=adapter)

    def save_model(self, folder: str | Path | None = None) -> Path:
        """Write the current policy as a Hugging Face folder, by default the run's `model/`, in its original dtype.

        If an adapter is trained, that is all that is written, as PEFT has it. Of several processes all must call this,
        and the first one writes.
        """
        params = self.learner.state.params
        params = to_host_on_primary(params) if processes.num_processes() > 1 else params
        return processes.run_on_primary(
            lambda: self._write_model(params, Path(folder or self.run_folder.path / "model"))
        )

    def _write_model(self, params: Params, folder: Path) -> Path:
        if self._model.adapter is not None:
            adapter = replace(self._model.adapter, trained=params)
            return save_adapter(replace(self._model, adapter=adapter), folder, self.tokenizer, self._card())
        trained = replace(self._model, params=params)
        return save_model(trained, folder, self.tokenizer, jnp.dtype(stored_dtype(self._model)), card=self._card())

    def push_to_hub(self, repo_id: str, private: bool = True) -> str:
        """Save the current policy in the run's `model/`, upload it, and return its address (see `hub.push_folder`).

        Args:
            repo_id: "owner/name".
            private: of a repository that is made.
        """
        folder = self.save_model()
        return processes.run_on_primary(lambda: push_folder(folder, repo_id, private))

    def write_card(self) -> None:
        """Write the card of the run's `model/` anew, with the evaluations that were made since it was saved."""
        processes.run_on_primary(lambda: replace_card(self.run_folder.path / "model", self._card()))

    def _card(self) -> str:
        adapter = self._model.adapter
        base = adapter.base_name if adapter else self._model.name
        return run_card(
            self.args,
            base,
            None if adapter is None else asdict(adapter.config),
            self.dataset_name,
            [reward.name for reward in self.rewards],
            self.cursor.step,
            self.last_metrics,
            self.estimates,
            bool(getattr(self.tokenizer, "chat_template", None)),
            license_of(read_card(self._model.source)),
        )

    def print_trainable_parameters(self) -> None:
        """Print how many of the model's parameters are trained, in PEFT's words."""
        adapter = self._model.adapter
        print(trainable_params_line(*count_params(self._model.config, adapter and adapter.config)))

    def _introduce(self) -> None:
        """Show once what the run is."""
        if not self._is_introduced:
            self._is_introduced = True
            facts = self._facts | {"to watch it": f"groupax view {self.run_folder.uri}"}
            self.emit(RunDescribed(self.num_steps, facts))

    @property
    def _facts(self) -> dict[str, str]:
        return run_facts(self.args, self._model, self.prompts, self.eval_prompts, self.rewards, self.num_steps)

    def _tell_setup(self, log: RunLog) -> None:
        """What the user should know before the first step."""
        if self.run_folder.moved_aside:
            self.emit(Message(f"the earlier run in {self.run_folder.uri} is now in {self.run_folder.moved_aside}"))
        sets = {"train_dataset": self.prompts} | {
            f"eval_dataset {name!r}": prompts for name, prompts in self.eval_prompts.items()
        }
        for name, prompts in sets.items():
            if prompts.num_dropped + prompts.num_truncated:
                did = f"{prompts.num_dropped} dropped, {prompts.num_truncated} truncated, {len(prompts)} left"
                self.emit(Message(f"{name} has prompts longer than {prompts.max_length} tokens: {did}", warning=True))
        log.diagnostics.report(self.cursor.step, setup_diagnostics(self.args, self.eos_ids))
