"""TRL's `GRPOTrainer` and `RLOOTrainer`, wrappers around the native trainer."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from groupax.compat import hf
from groupax.compat.fields import warn
from groupax.compat.trl.arguments import TrainingArguments
from groupax.compat.trl.base import BaseTrainer, num_accelerators
from groupax.compat.trl.batches import TRLBatchTrainer
from groupax.compat.trl.config import GRPOConfig, OnlineConfig, RLOOConfig
from groupax.compat.trl.environments import NO_REWARD, Agents, owned_reward
from groupax.compat.trl.policy import check_dropout, check_generate, policy_of
from groupax.compat.trl.rollout_func import as_rollout_function, expected_columns
from groupax.compat.trl.streams import check_streams, evaluation_rows, is_stream, training_rows
from groupax.core.settings.fields import nearest
from groupax.core.storage.folders import resolve_folder
from groupax.data.chat import unknown_template_kwargs
from groupax.data.examples import load_examples
from groupax.data.tokenizer import load_tokenizer
from groupax.evaluation.items import ONLY_SET
from groupax.events import Event, RolloutScored
from groupax.models.lora import as_lora_config
from groupax.training.step import router_loss_coef

logger = logging.getLogger(__name__)


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


class GRPOTrainer(BaseTrainer):
    """TRL's trainer, implemented with the native trainer in its attribute `native`.

    The arguments are those of TRL's class; `optimizers` must be (None, None). A model object, of PyTorch or of
    `compat.hf`, is trained in place.

    Attributes:
        reward_processing_classes: Tokenizers of the reward models, one per reward function; None for the model's own.
        rollout_request: What `rollout_func` is to sample, while it runs; else None.

    Raises:
        ValueError: An argument or a setting is not supported by groupax.
    """

    CONFIG: ClassVar[type[OnlineConfig]] = GRPOConfig
    WATCHES = (warn_about_rewards,)

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
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        args = self._check(GRPOTrainer, model, args, optimizers)
        if args.disable_dropout and peft_config is not None:
            check_dropout(as_lora_config(peft_config))
        num_devices = num_accelerators()
        policy = policy_of(model, args, quantization_config, peft_config, args.beta)
        self._agents = agents = Agents(tools, environment_factory)
        rewards = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        rewards = [] if reward_funcs is None else rewards
        if not rewards and not agents.reward_classes:
            raise ValueError(NO_REWARD)
        self.reward_processing_classes = _one_per_reward(reward_processing_classes, len(rewards))
        schedule = args.schedule(num_devices)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        check_streams(args, train_dataset, eval_dataset)
        own: dict[str, Any] = {"base_weights": policy.weights}
        if is_stream(train_dataset):
            train_dataset = training_rows(train_dataset, args, schedule)
            own["prompt_order"] = "dataset"
        train_dataset, has_prompts = agents.rows(train_dataset, args.max_steps, schedule.prompts_per_rollout)
        examples = load_examples(train_dataset, may_have_images=True)
        self.rollout_func, self.rollout_request = rollout_func, None
        settings = args.to_native(num_devices, len(examples))
        settings = self._prepare(replace(settings, **own), callbacks)
        arguments = _template_kwargs(settings.chat_template_kwargs, processing_class, policy.model)
        settings = replace(settings, chat_template_kwargs=arguments)
        if settings.reward_weights is not None:  # those of environments are 1
            weights = (*settings.reward_weights, *(1.0 for _ in agents.reward_classes))
            settings = replace(settings, reward_weights=weights)
        self.native = TRLBatchTrainer(
            schedule,
            policy.model,
            [_reward(reward) for reward in rewards] or None,
            settings,
            examples,
            agents.eval_rows(evaluation_rows(eval_dataset)),
            processing_class,
            self.reward_processing_classes,
            policy.peft_config,
            self._listeners,
            tools=agents.tools,
            environments=agents.environments(has_prompts),
            rollout_func=rollout_func
            and as_rollout_function(rollout_func, self, expected_columns(rewards, list(examples[0]))),
            revise_line=None if type(self).log is GRPOTrainer.log else self._revise,
        )
        if args.disable_dropout and self.native.model.adapter is not None:
            check_dropout(self.native.model.adapter.config)
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
        trainer = self.native
        num_prompts = trainer.schedule.prompts_per_rollout
        first = trainer.cursor.num_prompts - num_prompts
        if first < 0:
            return None
        rows = [trainer.prompts.examples[index] for index in trainer.collector.visited(first, num_prompts)]
        return self._agents.environments_of(rows, trainer.args.num_generations)

    def _check_sampler(self) -> None:
        """Checks that the model has no method `generate` of its own, with which TRL would sample."""
        if not self.args.use_vllm and self.rollout_func is None:
            check_generate(self.model)

    def _pace(self) -> tuple[int, int]:
        """Returns the optimizer steps of an epoch, and the completions of a step."""
        schedule = self.native.schedule
        return schedule.num_steps(len(self.native.prompts), 1, -1), schedule.rows_per_step

    def _evaluations(self, dataset: Any, prefix: str) -> list[dict[str, float]]:
        """Returns the metrics of each set, whose prompts have `num_generations_eval` completions."""
        chosen = None if dataset is None else self._agents.eval_rows(evaluation_rows(dataset))
        return [
            {f"{prefix if name == ONLY_SET else f'{prefix}_{name}'}_{metric}": x for metric, x in each.metrics.items()}
            for name, each in self.native.evaluate(eval_dataset=chosen).sets.items()
        ]

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


class RLOOTrainer(GRPOTrainer):
    """TRL's trainer of REINFORCE with a leave-one-out baseline, with the arguments of `GRPOTrainer`."""

    CONFIG = RLOOConfig


def _one_per_reward(tokenizers: Any, num_rewards: int) -> list[Any]:
    """Returns the tokenizers of reward models as a list, None for those that are not given."""
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
