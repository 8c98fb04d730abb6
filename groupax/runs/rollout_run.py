"""A run with rollouts: its data, rewards, episodes, engine and collector."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from groupax.config import GRPOConfig
from groupax.data.examples import Examples, describe_source, load_examples
from groupax.data.files import EVAL_SPLITS
from groupax.data.prompts import PromptSet
from groupax.data.tokenizer import eos_token_ids, is_conversational
from groupax.engine.scheduler import Demand
from groupax.episodes.custom import as_rollout_function
from groupax.episodes.environment import environment_rewards
from groupax.episodes.record import FOLDER as RECORDS
from groupax.evaluation.evaluate import find_correctness_reward
from groupax.evaluation.items import named_sets
from groupax.events import Listener, Message, PhaseStarted, ignore
from groupax.metrics.estimates import Estimate
from groupax.models.weights.checkpoint import Model
from groupax.models.weights.quantize import require_quantizer
from groupax.parallel import processes
from groupax.parallel.preemption import PreemptionHandler
from groupax.rewards.contract import ENVIRONMENTS, Reward
from groupax.rewards.resolve import check_columns, resolve_rewards, resolve_weights
from groupax.rewards.runner import RewardRunner
from groupax.rollouts.collector import Collector
from groupax.rollouts.pipeline import Pipeline, Policy
from groupax.rollouts.schedule import UpdateSchedule, update_schedule
from groupax.rollouts.state import Cursor
from groupax.runs.build import (
    check_adapters,
    check_objective,
    check_processes,
    engine_for,
    learner_settings,
    lora_for,
    prompts_for,
    rules_for,
    sampler_for,
    tokenizer_for,
)
from groupax.runs.checkpoints.choose import Saved
from groupax.runs.checkpoints.fingerprint import Identity, identity_of
from groupax.runs.checkpoints.record import read_policies, read_rollout, with_scores
from groupax.runs.checkpoints.saver import remove_download
from groupax.runs.diagnostics import Diagnose, logp_limit, setup_diagnostics, step_diagnostics
from groupax.runs.header import data_name, memory_facts, run_facts, time_facts
from groupax.runs.log import RunLog
from groupax.runs.model_card import license_of, read_card, run_card
from groupax.runs.progress.display import Progress
from groupax.runs.report.card import run_sections
from groupax.runs.run import Run
from groupax.storage.buckets import is_remote
from groupax.types import Prompt, PromptImages


class RolloutRun(Run[GRPOConfig]):
    """The parts of a run with rollouts, as its settings ask for them.

    The arguments are those of `GRPOTrainer`, which adds the loop.
    """

    DIVERGED = "Lower learning_rate, set beta above 0, or look at the rewards of these batches"

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
        args = args or GRPOConfig()
        super().__init__(args, listeners, progress)
        self.progress.shows_samples = args.log_completions

        self.emit(PhaseStarted("loading the data"))
        check_processes(args)
        check_objective(args)
        lora = lora_for(args, peft_config)
        check_adapters(args, model, lora)
        train_examples, eval_examples = self._load_data(train_dataset, eval_dataset)
        own = environment_rewards(environments)
        is_one_process = not args.reward_workers and processes.num_processes() == 1  # environments stay in theirs
        more = (ENVIRONMENTS,) if environments is not None and is_one_process else ()
        own_sampling = as_rollout_function(rollout_func)
        more += () if own_sampling is None else tuple(own_sampling.columns)
        self._load_rewards(reward_funcs, reward_processing_classes, train_examples, eval_examples, own, more)
        self._shared_records = Path(args.output_dir).expanduser().absolute() / RECORDS
        self._open_folder(None if args.rollout_log_gb is None else int(args.rollout_log_gb * 1e9))
        self.emit(PhaseStarted("loading the model"))
        require_quantizer(args.decoding_weights)
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

        self.dataset_name = data_name(train_dataset, len(train_examples))
        self.public_prompt: Prompt | None = None  # for the model's card; prompts may be private
        self.estimates: dict[int, dict[str, Mapping[str, Estimate]]] = {}  # of evaluation sets, by the step before them

    # -- its parts -----------------------------------------------------------------------------------------------

    def make_schedule(self) -> UpdateSchedule:
        """Returns how rollouts become optimizer steps."""
        return update_schedule(self.args)

    def _load_data(self, train_dataset: Any, eval_dataset: Any) -> tuple[Examples, dict[str, Examples]]:
        if train_dataset is None:
            raise ValueError("train_dataset is missing; give a Dataset, a list of dicts, a file or a hub id")
        train_examples = load_examples(train_dataset, may_have_images=True)
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
        self._make_learner(learner_settings(args), longest)
        groups = (args.num_generations,) * self.schedule.prompts_per_rollout
        expected = Demand(groups, longest[0] - 1, longest[1])
        if self.rules.has_turns:  # later turns have prompts of their own, with the turns before them
            expected = Demand((1,) * sum(groups), sum(longest) - 1, longest[1])
        has_turns = self.rules.has_turns
        policy = self.learner.policy
        given = self._model, policy, self.eos_ids, self.tokenizer, expected, has_turns
        self.engine = engine_for(args, *given, self.rules.templates is not None, self.learner.features)
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
        return self.run_folder.records if processes.is_primary() else self._shared_records

    # -- its start and results -----------------------------------------------------------------------------------

    @contextmanager
    def _working(self, stop: PreemptionHandler) -> Iterator[None]:
        with self.reward_runner, self.pipeline or nullcontext():
            self.engine.before_chunk = stop.check_cancellable
            try:
                yield
            finally:
                self.engine.before_chunk = None

    def _policies(self, cursor: Cursor) -> Mapping[int, Policy]:
        return self.pipeline.policies(cursor) if self.pipeline else {}

    @property
    def _diagnose(self) -> Diagnose:
        limit = logp_limit(self.args, str(self.learner.dtype) == "float32")
        return partial(step_diagnostics, logp_limit=limit)

    def _describe(self) -> Identity:
        names = [reward.name for reward in self.rewards]
        images = () if self.prompts.images is None else self.prompts.images.digests
        given = self.args, self._model, self.tokenizer, self.prompts.token_ids, names, self.num_steps
        return identity_of(*given, images)

    def _restore(self, saved: Saved, log: RunLog) -> None:
        self.cursor, self.experience = Cursor(**saved.state["cursor"]), None
        state = saved.state["rollout"]
        if state is not None:
            first, end = state["first_prompt"], self.cursor.num_prompts
            order = self.collector.visited(first, end - first)

            def prompt_of(index: int) -> tuple[Any, PromptImages | None]:
                return self.prompts.examples[order[index]], self.prompts.images_of([order[index]])[0]

            experience, scores = read_rollout(saved.folder, state, prompt_of)
            minibatches = self.collector.cut(experience.groups[: self.schedule.prompts_per_rollout])
            self.experience = replace(experience, minibatches=with_scores(minibatches, scores))
        if self.pipeline is not None:
            self.pipeline.restore(read_policies(saved.folder, saved.state.get("policies", []), self.learner))
        experience = self.experience
        rollouts = [row for group in experience.groups for row in group] if experience else []
        log.resume(saved.state["log"], rollouts, experience.metrics if experience else {})
        remove_download(saved)

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
            is_conversational(self.prompts.examples[0]["prompt"]),
            license_of(read_card(self._model.source)),
            self.rules.names,
            of_run=run_sections(self.run_folder.path, self.estimates),
            recipe=(self.run_folder.command or {}).get("recipe"),
            prompt=self.public_prompt,
        )

    @property
    def _facts(self) -> dict[str, str]:
        data = self.dataset_name, self.prompts, self.eval_prompts, self.rewards
        chosen = self.learner.execution.checkpointing
        counts, names = (self.num_steps, self.schedule.rows_per_step), self.rules.names
        if self.args.adapters:
            names = {"adapters": ", ".join(self.args.adapters), **names}
        return run_facts(self.args, self._model, *data, *counts, chosen, names)

    @property
    def _plans(self) -> dict[str, str]:
        cache_bytes = 0 if self.args.rollout_servers else self.engine.planned_bytes()
        return memory_facts(self.learner, self.schedule.rows_per_step, cache_bytes)

    @property
    def _expectations(self) -> dict[str, str]:
        return time_facts(self.args, self.learner, self._model, self.prompts, self.schedule, self.rules.has_turns)

    def _report_setup(self, log: RunLog) -> None:
        sets = {"train_dataset": self.prompts} | {
            f"eval_dataset {name!r}": prompts for name, prompts in self.eval_prompts.items()
        }
        for name, prompts in sets.items():
            if prompts.num_dropped + prompts.num_truncated:
                did = f"{prompts.num_dropped} dropped, {prompts.num_truncated} truncated, {len(prompts)} left"
                self.emit(Message(f"{name} has prompts longer than {prompts.max_length} tokens: {did}", warning=True))
        log.diagnostics.report(self.cursor.step, setup_diagnostics(self.args, self.eos_ids, len(self.prompts)))


def _load_eval_sets(dataset: Any) -> dict[str, Examples]:
    sets = named_sets(dataset)
    return {
        name: load_examples(each, f"eval_dataset {name!r}", EVAL_SPLITS, may_have_images=True)
        for name, each in sets.items()
    }
