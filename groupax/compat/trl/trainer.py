"""TRL's `GRPOTrainer`, a wrapper around the native trainer."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from groupax.compat import hf
from groupax.compat.callbacks import CallbackListener, State
from groupax.compat.fields import warn
from groupax.compat.trl.advice import warn_about_losses, warn_about_rewards
from groupax.compat.trl.attributes import Attributes, LastRollout
from groupax.compat.trl.batches import TRLBatchTrainer
from groupax.compat.trl.config import GRPOConfig
from groupax.compat.trl.environments import NO_REWARD, Agents, owned_reward
from groupax.compat.trl.hooks import Overridable, hooks_of
from groupax.compat.trl.layout import (
    TRAINER_STATE,
    check_output_dir,
    checkpoint_to_resume,
    flow_of,
    run_folder,
)
from groupax.compat.trl.optimizer import torch_optimizer_settings
from groupax.compat.trl.overrides import check_overrides
from groupax.compat.trl.own_generate import own_generate
from groupax.compat.trl.policy import TrainedModel, adapter_settings, policy_of
from groupax.compat.trl.rollout_func import as_rollout_function, expected_columns
from groupax.compat.trl.streams import Streams, evaluation_rows
from groupax.data.chat import unknown_template_kwargs
from groupax.data.examples import load_examples
from groupax.data.tokenizer import load_tokenizer
from groupax.evaluation.sets import ONLY_SET
from groupax.models.saving import source_folders
from groupax.parallel.runtime import configure_jax
from groupax.settings.fields import nearest
from groupax.storage.buckets import is_remote
from groupax.storage.folders import resolve_folder
from groupax.storage.hub import push_folder
from groupax.storage.replacing import check_disjoint


class TrainOutput(NamedTuple):
    """The result of `train`, like transformers' class."""

    global_step: int
    training_loss: float
    metrics: Mapping[str, float]


class GRPOTrainer(Overridable, Attributes):
    """TRL's trainer, implemented with the native trainer in its attribute `native`.

    Args:
        model: Folder, hub id, or a model object: one of PyTorch or of `compat.hf` is trained in place.
        reward_funcs: One or several reward functions or reward models.
        args: Settings.
        train_dataset: Prompts to train on.
        eval_dataset: Prompts to evaluate on.
        processing_class: Tokenizer; by default the model's.
        reward_processing_classes: Tokenizers of the reward models.
        callbacks: Callbacks of transformers.
        optimizers: PyTorch optimizer, whose kind and hyperparameters are used, and None.
        quantization_config: Quantization of a model that is not loaded yet.
        peft_config: Settings of a LoRA adapter.
        tools: Functions that the model may call.
        environment_factory: Function that creates an environment, or several by the name in the column `environment`.
        rollout_func: Function that samples a whole batch, from the prompt of each completion and this trainer.

    Attributes:
        rollout_request: What `rollout_func` is to sample, while it runs; else None.

    Raises:
        ValueError: An argument or a setting is not supported by groupax.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Any] | None = None,
        environment_factory: Any = None,
        rollout_func: Any = None,
    ) -> None:
        self.args = args = args or GRPOConfig(f"{Path(str(getattr(model, 'name', model))).name}-GRPO")
        check_overrides(self, GRPOTrainer)
        warn_about_losses(args)
        check_output_dir(args.output_dir)
        policy = policy_of(model, args, quantization_config, peft_config)
        num_devices = num_accelerators()
        self._agents = agents = Agents(tools, environment_factory)
        rewards = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        rewards = [] if reward_funcs is None else rewards
        if not rewards and not agents.reward_classes:
            raise ValueError(NO_REWARD)
        self.reward_processing_classes = _one_per_reward(reward_processing_classes, len(rewards))
        num_prompts = args.schedule(num_devices).prompts_per_rollout
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        streams = Streams(args, num_devices)
        train_dataset, eval_dataset = streams.training_rows(train_dataset), streams.evaluation_rows(eval_dataset)
        train_dataset, has_prompts = agents.rows(train_dataset, args.max_steps, num_prompts)
        examples = load_examples(train_dataset)
        self.rollout_func, self.rollout_request = rollout_func, None
        self._unknown_environments = agents.unknown(examples)
        if self._unknown_environments:
            warn(f"{self._unknown_environment()}; `train` will refuse to run")
            examples = agents.routed_to_first(examples)
        settings = args.to_native(num_devices, len(examples))
        settings = replace(settings, **streams.settings, **torch_optimizer_settings(optimizers))
        self._output_dir = settings.output_dir
        self.state = State(num_train_epochs=math.ceil(args.num_train_epochs), logging_steps=settings.logging_steps)
        flow = flow_of(args, self._output_dir, self.state)
        if flow is not None:
            more = {"save_total_limit": None, "metric_for_best_model": None}  # see `Flow`
            settings = replace(settings, output_dir=run_folder(self._output_dir), **more)
        if policy.weights != "same":
            settings = replace(settings, base_weights=policy.weights, **adapter_settings(policy.peft_config))
            policy = replace(policy, peft_config=None)
        arguments = _template_kwargs(settings.chat_template_kwargs, processing_class, policy.model)
        settings = replace(settings, chat_template_kwargs=arguments)
        if settings.reward_weights is not None:  # those of environments are 1
            weights = (*settings.reward_weights, *(1.0 for _ in agents.reward_classes))
            settings = replace(settings, reward_weights=weights)
        self.callbacks = list(callbacks or [])
        self._listeners: list[Any] = []
        self._listener: CallbackListener | None = None
        self._last_rollout = LastRollout()
        self.native = TRLBatchTrainer(
            args.schedule(num_devices),
            policy.model,
            [_reward(reward) for reward in rewards] or None,
            settings,
            examples,
            agents.eval_rows(eval_dataset),
            processing_class,
            self.reward_processing_classes,
            policy.peft_config,
            self._listeners,
            tools=agents.tools,
            environments=agents.environments(has_prompts),
            rollout_func=self._rollout_function(rewards, examples),
            hooks=hooks_of(self, GRPOTrainer),
        )
        self.reward_funcs = [*rewards, *map(owned_reward, agents.reward_classes)]
        check_disjoint(Path(self._output_dir), () if flow is None else source_folders(self.native.model))
        self.native.flow = flow
        self._trained = TrainedModel(policy.owner, self.native)
        args.warn_about_mesh(self.native.model)
        self.state.max_steps = self.native.num_steps
        if self.train_dataset is None:
            self.train_dataset = train_dataset

    @property
    def tools(self) -> list[Any]:
        """The functions that the model may call; methods are those of the environments that were created first."""
        return self._agents.functions

    @property
    def environments(self) -> list[Any] | None:
        """The environments of the last rollout's completions; None without any, and before the first rollout."""
        trainer, pool = self.native, self._agents.pool
        num_prompts = trainer.schedule.prompts_per_rollout
        first = trainer.cursor.num_prompts - num_prompts
        if pool is None or first < 0:
            return None
        visited = trainer.collector.visited(first, num_prompts)
        names = [self._agents.name_of(trainer.prompts.examples[index]) for index in visited]
        return pool.of(names, trainer.args.num_generations)

    @property
    def model(self) -> Any:
        """The policy: the given model object, which is trained in place, or a `compat.hf` model of a given name."""
        return self._trained.model

    def add_callback(self, callback: Any) -> None:
        """Adds a callback."""
        self.callbacks.append(callback)
        self._listener = None

    def remove_callback(self, callback: Any) -> None:
        """Removes a callback, or all callbacks of a class."""
        self.callbacks = [own for own in self.callbacks if own is not callback and type(own) is not callback]
        self._listener = None

    def pop_callback(self, callback: Any) -> Any:
        """Removes a callback, or the first one of a class, and returns it; None if there is none."""
        found = next((own for own in self.callbacks if own is callback or type(own) is callback), None)
        if found is not None:
            self.callbacks = [own for own in self.callbacks if own is not found]
            self._listener = None
        return found

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Trains the policy and saves it in the run's `model/`.

        Args:
            resume_from_checkpoint: True to resume from the newest checkpoint in `output_dir`, or a checkpoint's path.

        Raises:
            ValueError: A row of the dataset has an environment that the trainer does not have.
        """
        if self._unknown_environments:
            raise ValueError(self._unknown_environment())
        trainer, args = self.native, self.args
        resume = resume_from_checkpoint or args.resume_from_checkpoint
        resume = checkpoint_to_resume(resume, self._output_dir) if resume else "never"
        trainer.args = replace(trainer.args, resume=resume)
        if (state := Path(resume) / TRAINER_STATE).is_file():
            self.state.load_json(state)
        listener = self._callback_listener()
        self._listeners[:] = [self._trained, self._last_rollout, warn_about_rewards, listener]
        self._choose_sampler()
        if args.eval_on_start and resume == "never":
            self.evaluate()
        result = trainer.train()
        self._trained.report_cost(result.train_seconds)
        if args.push_to_hub:
            self.push_to_hub()
        return TrainOutput(result.num_steps, listener.summary["train_loss"], {**result.metrics, **listener.summary})

    def _choose_sampler(self) -> None:
        """Has the model sample itself, as in TRL, if the script has given it a method `generate` of its own."""
        self.native.sample_with(None if self.args.use_vllm else own_generate(self.model))

    def _callback_listener(self) -> CallbackListener:
        """Returns the listener that calls the callbacks and keeps the state."""
        if self._listener is None:
            trainer = self.native
            more = {"model": self.model, "processing_class": trainer.tokenizer, "train_dataloader": None}
            steps = trainer.schedule.num_steps(len(trainer.prompts), 1, -1)
            inputs = self.callbacks, self.args, steps, self.state, more, trainer.schedule.rows_per_step
            self._listener = CallbackListener(*inputs, log=self._write_line)
            if trainer.flow is not None:
                trainer.flow.control = self._listener.control
        return self._listener

    def _rollout_function(self, rewards: Sequence[Any], examples: Any) -> Any:
        if self.rollout_func is None:
            return None
        return as_rollout_function(self.rollout_func, self, expected_columns(rewards, list(examples[0])))

    def _unknown_environment(self) -> str:
        name, known = self._unknown_environments[0], self._agents.names
        return (
            f"the dataset's column environment has {name!r:.80}, which is not among the environments of "
            f"environment_factory{nearest(name, known)}; it has {', '.join(known)}"
        )

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluates the current policy, with `num_generations_eval` completions per prompt.

        Args:
            eval_dataset: Prompts, or several sets by name, or the name of one of the trainer's sets; by default those
                that the trainer was given.
            ignore_keys: Not used: there are no outputs of a model to gather.
            metric_key_prefix: Beginning of the metrics' names, before the name of a set.
        """
        del ignore_keys
        self._choose_sampler()
        if isinstance(eval_dataset, str):
            eval_dataset = self._eval_set(eval_dataset)
        chosen = None if eval_dataset is None else self._agents.eval_rows(evaluation_rows(eval_dataset))
        evaluation, metrics = self.native.evaluate(eval_dataset=chosen), {}
        for name, each in evaluation.sets.items():
            prefix = metric_key_prefix if name == ONLY_SET else f"{metric_key_prefix}_{name}"
            own = {f"{prefix}_{metric}": value for metric, value in each.metrics.items()}
            self._callback_listener().evaluated(self.native.cursor.step, own)
            metrics |= own
        return {**metrics, "epoch": self.state.epoch}

    def _eval_set(self, name: str) -> Any:
        if not isinstance(self.eval_dataset, Mapping) or name not in self.eval_dataset:
            known = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else ()
            raise ValueError(f"there is no evaluation set {name!r}{nearest(name, known)}; give a dataset, or its name")
        return self.eval_dataset[name]

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Writes the current policy, or its adapter, and the tokenizer; other files in the folder are kept.

        Args:
            output_dir: Folder to write to; by default that of the settings.
        """
        if output_dir is None and is_remote(self._output_dir):
            self.native.save_model()
        else:
            hf.save_policy(self.native, output_dir or self._output_dir)

    def push_to_hub(self, **inert: Any) -> str:
        """Uploads the current policy as `hub_model_id`, by default the name of `output_dir`."""
        hf.warn_inert(inert, {"commit_message", "blocking", "token", "revision", "dataset_name", "tags"}, "push_to_hub")
        repo_id = self.args.hub_model_id or Path(self._output_dir).name
        return push_folder(self.native.save_model(), repo_id, private=bool(self.args.hub_private_repo))


def num_accelerators() -> int:
    """Returns the device count that `per_device_train_batch_size` refers to; a process on CPU counts as one device."""
    configure_jax()
    return jax.process_count() if jax.default_backend() == "cpu" else jax.device_count()


def _one_per_reward(tokenizers: Any, num_rewards: int) -> list[Any]:
    """Returns the tokenizers of reward models as a list, None for those that are not given.

    Raises:
        ValueError: There are more or fewer of them than reward functions.
    """
    if tokenizers is None:
        return [None] * num_rewards
    each = list(tokenizers) if isinstance(tokenizers, (list, tuple)) else [tokenizers]
    if len(each) != num_rewards:
        raise ValueError(
            f"reward_processing_classes must match reward_funcs: it has {len(each)} entries for {num_rewards} reward "
            "functions; give None for those that need no tokenizer"
        )
    return each


def _reward(reward: Any) -> Any:
    """Returns a reward function unchanged, and a PyTorch or `compat.hf` model as the native trainer accepts it."""
    return hf.as_model(reward) if hasattr(reward, "state_dict") or isinstance(reward, hf.CausalLM) else reward


def _template_kwargs(given: Mapping[str, Any], tokenizer: Any, model: Any) -> dict[str, Any]:
    """Returns the arguments that the chat template reads; warns about the others."""
    if not given:
        return {}
    if tokenizer is None:
        tokenizer = load_tokenizer(model.source if hasattr(model, "source") else resolve_folder(model))
    unknown = unknown_template_kwargs(tokenizer, given)
    for name, fault in unknown.items():
        warn(f"chat_template_kwargs {name}={given[name]!r} changes nothing: {fault}")
    return {name: value for name, value in given.items() if name not in unknown}
