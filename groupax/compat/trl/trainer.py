"""TRL's `GRPOTrainer` and `RLOOTrainer`, wrappers around the native trainer."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from groupax.compat import hf
from groupax.compat.callbacks import CallbackListener
from groupax.compat.fields import warn
from groupax.compat.trl.arguments import TrainingArguments, torch_optimizer_settings
from groupax.compat.trl.base import BaseTrainer, TrainOutput, num_accelerators
from groupax.compat.trl.batches import TRLBatchTrainer
from groupax.compat.trl.config import GRPOConfig, RLOOConfig
from groupax.compat.trl.environments import NO_REWARD, Agents, owned_reward
from groupax.compat.trl.layout import check_output_dir
from groupax.compat.trl.overridden import Overridable, check_overrides
from groupax.compat.trl.policy import check_dropout, own_generate, policy_of
from groupax.compat.trl.rollout_func import as_rollout_function, expected_columns
from groupax.compat.trl.streams import Streams, evaluation_rows
from groupax.data.chat import unknown_template_kwargs
from groupax.data.examples import load_examples
from groupax.data.tokenizer import load_tokenizer
from groupax.evaluation.items import ONLY_SET
from groupax.events import Event, RolloutScored
from groupax.objective.entropy import top_entropy_threshold
from groupax.objective.losses import on_policy_tokens
from groupax.settings.fields import nearest
from groupax.storage.folders import resolve_folder
from groupax.training.step import router_loss_coef
from groupax.types import Rollout

logger = logging.getLogger(__name__)


class GRPOTrainer(Overridable, BaseTrainer):
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
        reward_processing_classes: Tokenizers of the reward models, one per reward function; None for the model's own.
        rollout_request: What `rollout_func` is to sample, while it runs; else None.

    Raises:
        ValueError: An argument or a setting is not supported by groupax.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
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
        check_output_dir(args.output_dir)
        if args.disable_dropout:
            check_dropout(peft_config)
        policy = policy_of(model, args, quantization_config, peft_config, args.beta)
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
        examples = load_examples(train_dataset, may_have_images=True)
        self.rollout_func, self.rollout_request = rollout_func, None
        self._unknown_environments = agents.unknown(examples)
        if self._unknown_environments:
            warn(f"{self._unknown_environment()}; `train` will refuse to run")
            examples = agents.routed_to_first(examples)
        settings = args.to_native(num_devices, len(examples))
        settings = replace(settings, **streams.settings, **torch_optimizer_settings(optimizers))
        settings, policy = self._prepare(args, settings, policy, callbacks)
        arguments = _template_kwargs(settings.chat_template_kwargs, processing_class, policy.model)
        settings = replace(settings, chat_template_kwargs=arguments)
        if settings.reward_weights is not None:  # those of environments are 1
            weights = (*settings.reward_weights, *(1.0 for _ in agents.reward_classes))
            settings = replace(settings, reward_weights=weights)
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
            **self._changes(GRPOTrainer),
        )
        self.native.eval_batch_size = args.per_device_eval_batch_size * num_devices
        self.reward_funcs = [*rewards, *map(owned_reward, agents.reward_classes)]
        self._finish(policy, has_eval_sets=bool(self.native.eval_prompts))
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

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Trains the policy and saves it in the run's `model/`.

        Args:
            resume_from_checkpoint: True to resume from the newest checkpoint in `output_dir`, or a checkpoint's path.

        Raises:
            ValueError: A row of the dataset has an environment that the trainer does not have.
        """
        if self._unknown_environments:
            raise ValueError(self._unknown_environment())
        is_resumed = self._resume(resume_from_checkpoint)
        listener = self._callback_listener()
        self._listeners[:] = [self._trained, self._last_rollout, warn_about_rewards, listener]
        self._choose_sampler()
        if self.args.eval_on_start and not is_resumed:
            self.evaluate()
        return self._output(self.native.train(), listener)

    def _choose_sampler(self) -> None:
        """Has the model sample itself, as in TRL, if the script has given it a method `generate` of its own."""
        self.native.sample_with(None if self.args.use_vllm else own_generate(self.model))

    def _callback_listener(self) -> CallbackListener:
        """Returns the listener that calls the callbacks and keeps the state."""
        if self._listener is None:
            schedule = self.native.schedule
            steps = schedule.num_steps(len(self.native.prompts), 1, -1)
            self._listener = self._new_listener(steps, schedule.rows_per_step, self._write_line)
        return self._listener

    def _rollout_function(self, rewards: Sequence[Any], examples: Any) -> Any:
        if self.rollout_func is None:
            return None
        return as_rollout_function(self.rollout_func, self, expected_columns(rewards, list(examples[0])))

    def _unknown_environment(self) -> str:
        name, known = self._unknown_environments[0], self._agents.names
        return (
            f"the dataset's column environment has {name!r:.80}, which is not among the environments of "
            f"environment_factory; it has {', '.join(known)}{nearest(name, known)}"
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

    # -- what functions, callbacks and subclasses of scripts read

    def __getattr__(self, name: str) -> Any:
        """Returns a setting, as TRL's trainer has many of them as attributes too."""
        fields = GRPOConfig.FIELDS.defaults.keys() - TrainingArguments.FIELDS.defaults.keys()
        if name not in fields:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{nearest(name, fields)}")
        return getattr(self.args, name)

    epsilon_low = property(lambda self: self.args.epsilon)
    epsilon_high = property(
        lambda self: self.args.epsilon if self.args.epsilon_high is None else self.args.epsilon_high
    )
    num_generations_eval = property(lambda self: self.native.args.eval_num_generations)
    reward_weights = property(lambda self: self.native.reward_weights)
    reward_func_names = property(lambda self: [reward.name for reward in self.native.rewards])
    entropy_coef = property(lambda self: self.native.learner.entropy.coef)  # for the next step
    _logs = property(lambda self: self._last_rollout.as_columns())

    @property
    def ref_model(self) -> hf.CausalLM | None:
        """The reference as it is now; None without `beta`, and for an adapter, whose reference is its base."""
        learner = self.native.learner
        if learner.reference is None or learner.is_adapter:
            return None
        return hf.CausalLM(replace(self.native.model, params=learner.reference))

    @property
    def aux_loss_enabled(self) -> bool:
        """True if the load-balancing loss of a mixture of experts is part of the loss."""
        learner = self.native.learner
        return bool(learner.config.experts) and router_loss_coef(learner.config, learner.settings.objective) != 0

    def get_high_entropy_mask(self, entropies: Any, mask: Any, threshold: float) -> Any:
        """Returns which tokens have an entropy of at least a quantile of all of them, as PyTorch's booleans.

        Args:
            entropies: [B, T] entropies.
            mask: [B, T] tokens that count.
            threshold: The quantile.
        """
        counted = mask.bool()
        padding = np.float32(-1e9)  # an entropy that no token has
        padded = self.accelerator.pad_across_processes(entropies[counted].float(), dim=0, pad_index=-1e9)
        everything = self.accelerator.gather(padded).detach().cpu().numpy()
        bound = top_entropy_threshold([everything[everything != padding]], 1.0 - threshold)
        return (entropies >= entropies.new_tensor(bound)) & counted

    @staticmethod
    def get_off_policy_mask(
        advantages: Any, per_token_logps: Any, sampling_per_token_logps: Any, mask: Any, off_policy_threshold: float
    ) -> Any:
        """Returns 1 for the rows that `off_policy_mask_threshold` keeps and 0 for the others, [B, 1].

        Args:
            advantages: [B, 1] advantages.
            per_token_logps: [B, T] log-probs under the policy.
            sampling_per_token_logps: [B, T] log-probs under the policy that sampled; NaN, where they are unknown, is no
                drift.
            mask: [B, T] tokens that count.
            off_policy_threshold: Largest mean drift of rows with a negative advantage.
        """
        given = advantages, per_token_logps, sampling_per_token_logps, mask
        advantage, policy, sampled, counted = (jnp.asarray(each.detach().cpu().numpy()) for each in given)
        sampled = jnp.where(jnp.isnan(sampled), policy, sampled)
        advantage = jnp.broadcast_to(advantage, policy.shape)
        kept = on_policy_tokens(policy, sampled, advantage, counted != 0, off_policy_threshold)
        return mask.new_tensor(np.asarray(kept[:, :1]), dtype=mask.dtype)


class RLOOTrainer(GRPOTrainer):
    """TRL's trainer of REINFORCE with a leave-one-out baseline.

    The arguments are those of `GRPOTrainer`, without tools, environments and `rollout_func`.

    Raises:
        ValueError: An argument or a setting is not supported by groupax.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        args: RLOOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        super().__init__(
            model,
            reward_funcs,
            args or RLOOConfig(f"{Path(str(getattr(model, 'name', model))).name}-RLOO"),
            train_dataset,
            eval_dataset,
            processing_class,
            reward_processing_classes,
            callbacks,
            optimizers,
            quantization_config,
            peft_config,
        )


class LastRollout:
    """A listener that remembers the completions of the last rollout."""

    def __init__(self) -> None:
        self.rollouts: Sequence[Rollout] = ()

    def __call__(self, event: Event) -> None:
        """Remembers the completions of a rollout."""
        if isinstance(event, RolloutScored):
            self.rollouts = [rollout for group in event.groups for rollout in group]

    def as_columns(self) -> dict[str, Any]:
        """Returns the completions in the form of TRL's log of completions."""
        extra: dict[str, list[Any]] = {}
        rewards: dict[str, list[float]] = {}
        for rollout in self.rollouts:
            for name, value in rollout.extra.items():
                extra.setdefault(name, []).append(value)
            for name, reward in rollout.rewards.items():
                rewards.setdefault(name, []).append(float("nan") if reward is None else float(reward))
        return {
            "images": [],
            "prompt": [rollout.prompt for rollout in self.rollouts],
            "completion": [rollout.completion for rollout in self.rollouts],
            "rewards": rewards,
            "advantages": [rollout.advantage for rollout in self.rollouts],
            "extra": extra,
        }


def warn_about_rewards(event: Event) -> None:
    """Logs the first completion of a rollout for which every reward function returned None."""
    if not isinstance(event, RolloutScored):
        return
    for group in event.groups:
        for rollout in group:
            if rollout.rewards and all(value is None for value in rollout.rewards.values()) and not rollout.is_failure:
                logger.warning(
                    "All reward functions returned None for the following kwargs:\n%s\nAt least one should return a "
                    "number; this completion has an advantage of 0",
                    {**rollout.example, "completion": rollout.completion},
                )
                return


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
