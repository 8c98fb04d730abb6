"""TRL's `GRPOTrainer`, a wrapper around the native trainer."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from groupax.compat import hf
from groupax.compat.callbacks import CallbackListener, State
from groupax.compat.fields import warn
from groupax.compat.trl.batches import TRLBatchTrainer
from groupax.compat.trl.config import GRPOConfig
from groupax.compat.trl.environments import NO_REWARD, Agents, owned_reward
from groupax.compat.trl.optimizer import torch_optimizer_settings
from groupax.compat.trl.policy import TrainedModel, adapter_settings, policy_of
from groupax.compat.trl.rollout_func import as_rollout_function, expected_columns
from groupax.data.chat import unknown_template_kwargs
from groupax.data.examples import load_examples
from groupax.data.tokenizer import load_tokenizer
from groupax.parallel.runtime import configure_jax
from groupax.settings.fields import nearest
from groupax.storage.folders import resolve_folder
from groupax.storage.hub import push_folder

# Settings that TRL's trainer also has as attributes, which functions that sample themselves read.
FROM_ARGS = (
    "num_generations",
    "max_completion_length",
    "max_tool_calling_iterations",
    "chat_template_kwargs",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "use_vllm",
    "vllm_mode",
)


class TrainOutput(NamedTuple):
    """The result of `train`, like transformers' class."""

    global_step: int
    training_loss: float
    metrics: Mapping[str, float]


class GRPOTrainer:
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
        policy = policy_of(model, args, quantization_config, peft_config)
        num_devices = num_accelerators()
        self._agents = agents = Agents(tools, environment_factory)
        rewards = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        rewards = [] if reward_funcs is None else rewards
        if not rewards and not agents.reward_classes:
            raise ValueError(NO_REWARD)
        num_prompts = args.schedule(num_devices).prompts_per_rollout
        train_dataset, has_prompts = agents.rows(train_dataset, args.max_steps, num_prompts)
        examples = load_examples(train_dataset)
        self.rollout_func, self.rollout_request = rollout_func, None
        self._unknown_environments = agents.unknown(examples)
        if self._unknown_environments:
            warn(f"{self._unknown_environment()}; `train` will refuse to run")
            examples = agents.routed_to_first(examples)
        settings = args.to_native(num_devices, len(examples))
        settings = replace(settings, **torch_optimizer_settings(optimizers))
        if policy.weights != "same":
            settings = replace(settings, base_weights=policy.weights, **adapter_settings(policy.peft_config))
            policy = replace(policy, peft_config=None)
        arguments = _template_kwargs(settings.chat_template_kwargs, processing_class, policy.model)
        settings = replace(settings, chat_template_kwargs=arguments)
        if settings.reward_weights is not None:  # those of environments are 1
            weights = (*settings.reward_weights, *(1.0 for _ in agents.reward_classes))
            settings = replace(settings, reward_weights=weights)
        self.state = State(num_train_epochs=math.ceil(args.num_train_epochs), logging_steps=settings.logging_steps)
        self.callbacks = list(callbacks or [])
        self._listeners: list[Any] = []
        self.native = TRLBatchTrainer(
            args.schedule(num_devices),
            policy.model,
            [_reward(reward) for reward in rewards] or None,
            settings,
            examples,
            agents.eval_rows(eval_dataset),
            processing_class,
            reward_processing_classes,
            policy.peft_config,
            self._listeners,
            tools=agents.tools,
            environments=agents.environments(has_prompts),
            rollout_func=self._rollout_function(rewards, examples),
        )
        self.reward_funcs = [*rewards, *map(owned_reward, agents.reward_classes)]
        self._trained = TrainedModel(policy.owner, self.native)
        args.warn_about_mesh(self.native.model)
        self.state.max_steps = self.native.num_steps
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset

    def __getattr__(self, name: str) -> Any:
        if name not in FROM_ARGS:
            raise AttributeError(f"GRPOTrainer has no attribute {name!r}{nearest(name, FROM_ARGS)}")
        return getattr(self.args, name)

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
    def reward_func_names(self) -> list[str]:
        """The names of the rewards, those of environments last."""
        return [reward.name for reward in self.native.rewards]

    @property
    def reward_weights(self) -> np.ndarray:
        """The weights of the rewards."""
        return self.native.reward_weights

    @property
    def processing_class(self) -> Any:
        """The tokenizer of the policy."""
        return self.native.tokenizer

    @property
    def model(self) -> Any:
        """The policy: the given model object, which is trained in place, or a `compat.hf` model of a given name."""
        return self._trained.model

    def add_callback(self, callback: Any) -> None:
        """Adds a callback."""
        self.callbacks.append(callback)

    def remove_callback(self, callback: Any) -> None:
        """Removes a callback, or all callbacks of a class."""
        self.callbacks = [own for own in self.callbacks if own is not callback and type(own) is not callback]

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
        trainer.args = replace(trainer.args, resume="auto" if resume is True else str(resume) if resume else "never")
        more = {"model": self.model, "processing_class": trainer.tokenizer, "train_dataloader": None}
        steps = trainer.schedule.num_steps(len(trainer.prompts), 1, -1)
        self._listeners[:] = [self._trained, CallbackListener(self.callbacks, args, steps, self.state, more)]
        result = trainer.train()
        self._trained.report_cost(result.train_seconds)
        losses = [line["loss"] for line in self.state.log_history if "loss" in line]
        if args.push_to_hub:
            self.push_to_hub()
        metrics = {"train_runtime": result.train_seconds, **result.metrics}
        return TrainOutput(result.num_steps, sum(losses) / max(len(losses), 1), metrics)

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

    def evaluate(self) -> dict[str, float]:
        """Evaluates the current policy on `eval_dataset`, with `num_generations_eval` completions per prompt."""
        trainer = self.native
        metrics = {f"eval_{name}": value for name, value in trainer.evaluate().metrics.items()}
        self.state.log_history.append({"step": trainer.cursor.step, **metrics})
        return metrics

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Writes the current policy, or its adapter, and the tokenizer; other files in the folder are kept.

        Args:
            output_dir: Folder to write to; by default `model/` in the run's folder.
        """
        if output_dir is None:
            self.native.save_model()
        else:
            hf.save_policy(self.native, output_dir)

    def push_to_hub(self, **inert: Any) -> str:
        """Uploads the current policy as `hub_model_id`, by default the name of `output_dir`."""
        hf.warn_inert(inert, {"commit_message", "blocking", "token", "revision", "dataset_name", "tags"}, "push_to_hub")
        repo_id = self.args.hub_model_id or Path(self.native.args.output_dir).name
        return push_folder(self.native.save_model(), repo_id, private=bool(self.args.hub_private_repo))


def num_accelerators() -> int:
    """Returns the device count that `per_device_train_batch_size` refers to; a process on CPU counts as one device."""
    configure_jax()
    return jax.process_count() if jax.default_backend() == "cpu" else jax.device_count()


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
