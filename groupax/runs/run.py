"""A run: its model, data and parts, and what is written of it."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from groupax.config import GRPOConfig
from groupax.data.examples import Examples, describe_source, load_examples
from groupax.data.prompts import PromptSet
from groupax.data.sources import EVAL_SPLITS
from groupax.data.tokenizer import eos_token_ids
from groupax.engine.plan import Demand
from groupax.episodes.custom import as_rollout_function
from groupax.episodes.record import FOLDER as RECORDS
from groupax.episodes.rewards import environment_rewards
from groupax.evaluation.evaluate import find_correctness_reward
from groupax.evaluation.sets import named_sets
from groupax.events import (
    EventStream,
    Listener,
    Message,
    PhaseStarted,
    RunDescribed,
    RunStarted,
    ignore,
)
from groupax.metrics.estimates import Estimate
from groupax.models.adapted import apply_adapter
from groupax.models.checkpoint import Model, add_adapter
from groupax.models.lora import LoRAConfig, count_params, trainable_params_line
from groupax.models.saving import save_adapter, save_model, source_folders
from groupax.models.specs import Params
from groupax.parallel import processes
from groupax.parallel.compilation import compilation
from groupax.parallel.preemption import PreemptionHandler
from groupax.parallel.runtime import configure_jax
from groupax.parallel.transfer import to_host_on_primary
from groupax.rewards.contract import ENVIRONMENTS, Reward
from groupax.rewards.resolve import check_columns, resolve_rewards, resolve_weights
from groupax.rewards.runner import RewardRunner
from groupax.rollouts.collector import Collector
from groupax.rollouts.pipeline import Pipeline
from groupax.rollouts.schedule import UpdateSchedule, update_schedule
from groupax.rollouts.state import Cursor, Experience
from groupax.runs.build import (
    check_adapter,
    check_objective,
    check_processes,
    engine_for,
    learner_settings,
    lora_for,
    model_for,
    prompts_for,
    rules_for,
    sampler_for,
    tokenizer_for,
)
from groupax.runs.checkpoints.choose import Saved
from groupax.runs.checkpoints.fingerprint import Identity, identity_of, process_of
from groupax.runs.checkpoints.record import read_policies, read_rollout, stored_dtype, with_scores
from groupax.runs.checkpoints.saver import RunSaver, remove_download, retry_while_disk_full
from groupax.runs.diagnostics import setup_diagnostics
from groupax.runs.files import free_name
from groupax.runs.folder import RunFolder
from groupax.runs.header import run_facts
from groupax.runs.log import RunLog
from groupax.runs.model_card import license_of, read_card, run_card
from groupax.runs.progress.display import Progress
from groupax.runs.progress.named import primary_only, progress_named
from groupax.runs.trackers.tracker import check_trackers
from groupax.storage.buckets import is_remote
from groupax.storage.hub import push_folder
from groupax.storage.replacing import ForeignFilesError, check_destination, replace_card
from groupax.training.learner import Learner
from groupax.training.state import TrainState
from groupax.types import Metrics


class Run:
    """The parts of a run, as its settings ask for them, its start, end and results.

    The arguments are those of `GRPOTrainer`, which adds the loop.
    """

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
        self.args = args = args or GRPOConfig()
        configure_jax()
        self.progress = primary_only(progress or progress_named(args.progress_bar))
        self.progress.is_compiling = lambda: compilation().is_under_way
        self.progress.shows_samples = args.log_completions
        self.listeners, self.events = listeners, EventStream(self.progress)
        self.emit = self.events.emit
        self._is_introduced = False
        self._identity: Identity | None = None

        self.emit(PhaseStarted("loading the data"))
        check_processes(args)
        check_objective(args)
        lora = lora_for(args, peft_config)
        train_examples, eval_examples = self._load_data(train_dataset, eval_dataset)
        own = environment_rewards(environments)
        is_one_process = not args.reward_workers and processes.num_processes() == 1  # environments stay in theirs
        more = (ENVIRONMENTS,) if environments is not None and is_one_process else ()
        own_sampling = as_rollout_function(rollout_func)
        more += () if own_sampling is None else tuple(own_sampling.columns)
        self._load_rewards(reward_funcs, reward_processing_classes, train_examples, eval_examples, own, more)
        self._open_folder()
        self.emit(PhaseStarted("loading the model"))
        self._load_model(model, lora)
        self.emit(PhaseStarted("encoding the prompts"))
        self.tokenizer = tokenizer_for(args, self._model, processing_class)
        self.eos_ids = eos_token_ids(self.tokenizer, self._model.generation_config, self._model.hf_config)
        source = describe_source(train_dataset, "train_dataset")
        parts = tools, environments, own_sampling
        self.rules = rules_for(args, self._model, self.tokenizer, self.eos_ids, *parts)
        self.prompts = prompts_for(args, self._model, self.tokenizer, train_examples, self.rules, dataset=source)
        self.rules = replace(self.rules, max_prompt_tokens=self.prompts.max_length)
        self.eval_prompts = {name: self._encode_eval_prompts(name, each) for name, each in eval_examples.items()}
        self.emit(PhaseStarted("preparing the devices"))
        self.schedule = self.make_schedule()
        self.num_steps = self.schedule.num_steps(len(self.prompts), args.num_train_epochs, args.max_steps)
        self._build_parts()

        self.cursor = Cursor()
        self.experience: Experience | None = None  # the rollout that is not used up
        self._state_before: TrainState | None = None  # while an update is under way
        self.dataset_name = train_dataset if isinstance(train_dataset, str) else f"{len(self.prompts)} prompts"
        self.last_metrics: Metrics = {}
        self.estimates: dict[int, dict[str, Mapping[str, Estimate]]] = {}  # of evaluation sets, by the step before them

    # -- its parts -----------------------------------------------------------------------------------------------

    def make_schedule(self) -> UpdateSchedule:
        """Returns how rollouts become optimizer steps."""
        return update_schedule(self.args)

    def _load_data(self, train_dataset: Any, eval_dataset: Any) -> tuple[Examples, dict[str, Examples]]:
        if train_dataset is None:
            raise ValueError("train_dataset is missing; give a Dataset, a list of dicts, a file or a hub id")
        train_examples = load_examples(train_dataset)
        eval_examples = {} if eval_dataset is None else _load_eval_sets(eval_dataset)
        if self.args.eval_steps and not eval_examples:
            raise ValueError(f"eval_steps is {self.args.eval_steps}, but there is no eval_dataset")
        return train_examples, eval_examples

    def _load_rewards(
        self,
        functions: Any,
        tokenizers: Any,
        train_examples: Examples,
        eval_examples: Mapping[str, Examples],
        own: Sequence[Reward],
        more: Sequence[str],
    ) -> None:
        args, columns = self.args, [name for name in train_examples[0] if name != "prompt"]
        given = [] if functions is None and own else resolve_rewards(functions, [*columns, *more], tokenizers)
        clashes = {reward.name for reward in given} & {reward.name for reward in own}
        if clashes:
            raise ValueError(f"a reward function and an environment are both named {', '.join(clashes)}; rename one")
        self.rewards = [*given, *own]
        for name, examples in eval_examples.items():
            check_columns(self.rewards, columns, examples[0], f"eval_dataset {name!r}")
        self.reward_runner = self.make_reward_runner()
        self.reward_weights = resolve_weights(args.reward_weights, self.rewards)
        self.correctness_reward = find_correctness_reward(args.correctness_reward, self.rewards)

    def make_reward_runner(self) -> RewardRunner:
        """Returns the runner of the rewards."""
        return RewardRunner(self.rewards, self.args)

    def _open_folder(self) -> None:
        args = self.args
        check_trackers(args.report_to)
        log_bytes = None if args.rollout_log_gb is None else int(args.rollout_log_gb * 1e9)
        # other processes than the primary one write to a folder that nobody sees
        self._unseen: Any = None if processes.is_primary() else tempfile.TemporaryDirectory(prefix="groupax-process-")
        self.run_folder = RunFolder(self._unseen.name if self._unseen else args.output_dir, log_bytes, self.emit)

    def _load_model(self, model: str | Path | Model, lora: LoRAConfig | None) -> None:
        self._model = model_for(self.args, model)
        if lora is not None:
            self._model = add_adapter(self._model, lora, self.args.seed)
        check_adapter(self.args, self._model, was_loaded=not isinstance(model, Model))
        if self._model.config.num_labels:
            raise ValueError(f"{self._model.source or 'the model'} classifies sequences; a policy needs a causal model")

    def encode_eval_sets(self, dataset: Any) -> dict[str, PromptSet]:
        """Returns the encoded prompts of an evaluation set, or of several by name.

        Raises:
            ValueError: There are no prompts, or they lack a column that a reward function takes.
        """
        sets, columns = _load_eval_sets(dataset), [name for name in self.prompts.examples[0] if name != "prompt"]
        for name, examples in sets.items():
            check_columns(self.rewards, columns, examples[0], f"eval_dataset {name!r}")
        return {name: self._encode_eval_prompts(name, examples) for name, examples in sets.items()}

    def _encode_eval_prompts(self, name: str, examples: Examples) -> PromptSet:
        length, name = self.args.eval_max_completion_length, f"eval_dataset {name!r}"
        return prompts_for(self.args, self._model, self.tokenizer, examples, self.rules, length, name)

    def _build_parts(self) -> None:
        args = self.args
        longest = max(map(len, self.prompts.token_ids)), args.max_completion_length
        self.learner = Learner(self._model, learner_settings(args), self.num_steps, longest)
        if self._model.adapter is not None and self.learner.frozen is not None:
            adapter = replace(self._model.adapter, frozen=self.learner.frozen)  # frees those loaded in another dtype
            self._model = replace(self._model, params=apply_adapter(adapter.frozen, adapter.trained), adapter=adapter)
        groups = (args.num_generations,) * self.schedule.prompts_per_rollout
        expected = Demand(groups, longest[0] - 1, longest[1])
        if self.rules.has_turns:  # later turns have prompts of their own, with the turns before them
            expected = Demand((1,) * sum(groups), sum(longest) - 1, longest[1])
        has_turns = self.rules.has_turns
        policy = self.learner.policy
        self.engine = engine_for(args, self._model, policy, self.eos_ids, self.tokenizer, expected, has_turns)
        self.collector = Collector(
            args,
            self.schedule,
            self.prompts,
            self.tokenizer,
            sampler_for(args, self._model, self.engine, self.learner.policy, self.run_folder.path),
            self.learner,
            self.reward_runner,
            self.reward_weights,
            self.correctness_reward,
            self.num_steps,
            self.rules,
            ignore if args.max_staleness else self.emit,  # asynchronous rollouts are sampled in other threads
            self._records,
        )
        self.pipeline = Pipeline(self.collector, args.max_staleness, self.num_steps) if args.max_staleness else None

    def _records(self) -> Path | None:
        """Returns the folder where calls of tools are recorded; a bucket would only have them when it is too late."""
        if is_remote(self.args.output_dir) or not self.rules.has_turns:
            return None
        return self.run_folder.records if processes.is_primary() else Path(self.args.output_dir).expanduser() / RECORDS

    # -- its start and end ---------------------------------------------------------------------------------------

    @contextmanager
    def holding_folder(self) -> Iterator[None]:
        """Keeps other runs out of the run folder while the block runs; such blocks may be nested.

        Raises:
            LockedError: another run works in it.
        """
        is_taken = processes.run_on_primary(self.run_folder.lock)
        try:
            yield
        finally:
            if is_taken:
                self.run_folder.unlock()

    def _describe(self) -> Identity:
        """Returns everything that a resumed run must have in common with this one."""
        names = [reward.name for reward in self.rewards]
        return identity_of(self.args, self._model, self.tokenizer, self.prompts.token_ids, names, self.num_steps)

    def _begin(self, log: RunLog) -> RunSaver:
        """Resumes from the checkpoint that `resume` names, or starts."""
        if self._identity is None:
            self._identity = self._describe()
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
        self._report_setup(log)
        return saver

    def _restore(self, saved: Saved, log: RunLog) -> None:
        self.cursor, self.experience = Cursor(**saved.state["cursor"]), None
        state = saved.state["rollout"]
        if state is not None:
            first, end = state["first_prompt"], self.cursor.num_prompts
            order = self.collector.visited(first, end - first)
            experience, scores = read_rollout(saved.folder, state, lambda index: self.prompts.examples[order[index]])
            minibatches = self.collector.cut(experience.groups[: self.schedule.prompts_per_rollout])
            self.experience = replace(experience, minibatches=with_scores(minibatches, scores))
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
        """Saves the last checkpoint, the model and the trackers' files; waits as long as the disk is full."""

        def save() -> None:
            self.emit(PhaseStarted("writing the model"))
            processes.run_on_primary(self.run_folder.flush)
            saver.end(*self._settled(log))
            self._save_result()
            processes.run_on_primary(lambda: (self.run_folder.settle(), self.run_folder.sync()))

        log.close_sinks()
        retry_while_disk_full(save, self.run_folder, self.emit, stop)

    def _save_result(self) -> None:
        """Saves the model in the run's `model/`, or next to it if somebody wrote into that during the run."""
        try:
            self.save_model()
        except ForeignFilesError as error:
            saved = self.save_model(free_name(self.run_folder.path / "model"))
            self.emit(Message(f"the model is in {saved}: {error}", warning=True))

    def _settled(self, log: RunLog) -> tuple[Cursor, Experience | None]:
        """Returns the state of the run that a checkpoint saves."""
        del log
        return self.cursor, self.experience

    @property
    def _is_whole(self) -> bool:
        """Returns whether cursor, rollout and learner belong together; they do not if an update failed half-way."""
        state = self._state_before
        leaves = jax.tree.leaves(state)
        return state is None or (state is self.learner.state and not any(leaf.is_deleted() for leaf in leaves))

    # -- its results -----------------------------------------------------------------------------------------------

    @property
    def model(self) -> Model:
        """The present policy."""
        adapter = self._model.adapter and replace(self._model.adapter, trained=self.learner.state.params)
        return replace(self._model, params=self.learner.policy, adapter=adapter)

    def save_model(self, folder: str | Path | None = None) -> Path:
        """Saves the current policy as a Hugging Face folder, by default the run's `model/`, in its original dtype.

        If an adapter is trained, only the adapter is saved, in PEFT's format. All processes must call this; the primary
        one writes.
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
        """Saves the current policy in the run's `model/`, uploads it, and returns its address (see `hub.push_folder`).

        Args:
            repo_id: "owner/name".
            private: Whether a new repository is private.
        """
        folder = self.save_model()
        return processes.run_on_primary(lambda: push_folder(folder, repo_id, private))

    def write_card(self) -> None:
        """Rewrites the card of the run's `model/` with the evaluations since it was saved."""
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
            self.rules.names,
        )

    def print_trainable_parameters(self) -> None:
        """Prints the number of trained parameters in PEFT's format."""
        adapter = self._model.adapter
        print(trainable_params_line(*count_params(self._model.config, adapter and adapter.config)))

    def _introduce(self) -> None:
        """Emits the facts of the run once."""
        if not self._is_introduced:
            self._is_introduced = True
            facts = self._facts | {"to watch it": f"groupax view {self.run_folder.uri}"}
            self.emit(RunDescribed(self.num_steps, facts))

    @property
    def _facts(self) -> dict[str, str]:
        data = self.prompts, self.eval_prompts, self.rewards
        chosen = self.learner.execution.checkpointing
        counts = self.num_steps, self.schedule.rows_per_step
        return run_facts(self.args, self._model, *data, *counts, chosen, self.rules.names)

    def _report_setup(self, log: RunLog) -> None:
        """Reports what the user should know before the first step."""
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


def _load_eval_sets(dataset: Any) -> dict[str, Examples]:
    sets = named_sets(dataset)
    return {name: load_examples(each, f"eval_dataset {name!r}", EVAL_SPLITS) for name, each in sets.items()}
