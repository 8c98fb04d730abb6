"""TRL's `GRPOTrainer` and `RLOOTrainer`, wrappers around the native trainer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from groupax.compat import hf
from groupax.compat.trl.arguments import TrainingArguments
from groupax.compat.trl.base import BaseTrainer, num_accelerators
from groupax.compat.trl.batches import TRLBatchTrainer
from groupax.compat.trl.config import GRPOConfig, OnlineConfig, RLOOConfig
from groupax.compat.trl.environments import NO_REWARD, Agents
from groupax.compat.trl.policy import policy_of
from groupax.compat.trl.rollout_func import as_rollout_function, expected_columns
from groupax.core.settings.fields import nearest
from groupax.data.examples import load_examples
from groupax.evaluation.items import ONLY_SET


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
        args = self._check(model, args, optimizers)
        num_devices = num_accelerators()
        policy = policy_of(model, args, quantization_config, peft_config, args.beta)
        self._agents = agents = Agents(tools, environment_factory)
        rewards = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        rewards = [] if reward_funcs is None else rewards
        if not rewards and not agents.reward_names:
            raise ValueError(NO_REWARD)
        self.reward_processing_classes = _one_per_reward(reward_processing_classes, len(rewards))
        schedule = args.schedule(num_devices)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        train_dataset, has_prompts = agents.rows(train_dataset, args.max_steps, schedule.prompts_per_rollout)
        examples = load_examples(train_dataset, may_have_images=True)
        self.rollout_func, self.rollout_request = rollout_func, None
        settings = args.to_native(num_devices, len(examples))
        settings = self._prepare(replace(settings, base_weights=policy.weights), callbacks)
        if settings.reward_weights is not None:  # those of environments are 1
            weights = (*settings.reward_weights, *(1.0 for _ in agents.reward_names))
            settings = replace(settings, reward_weights=weights)
        self.native = TRLBatchTrainer(
            schedule,
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
            rollout_func=rollout_func
            and as_rollout_function(rollout_func, self, expected_columns(rewards, list(examples[0]))),
        )
        adapter = self.native.model.adapter
        if args.disable_dropout and adapter is not None and adapter.config.lora_dropout:
            raise ValueError("disable_dropout=True would disable the adapter's lora_dropout; set one of them to 0")
        self.reward_funcs = rewards
        self._finish(policy)
        if self.train_dataset is None:
            self.train_dataset = train_dataset

    def _pace(self) -> tuple[int, int]:
        """Returns the optimizer steps of an epoch, and the completions of a step."""
        schedule = self.native.schedule
        return schedule.num_steps(len(self.native.prompts), 1, -1), schedule.rows_per_step

    def _evaluations(self, dataset: Any, prefix: str) -> list[dict[str, float]]:
        """Returns the metrics of each set, whose prompts have `num_generations_eval` completions."""
        chosen = None if dataset is None else self._agents.eval_rows(dataset)
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

    reward_weights = property(lambda self: self.native.reward_weights)
    reward_func_names = property(lambda self: [reward.name for reward in self.native.rewards])
    entropy_coef = property(lambda self: self.native.learner.entropy.coef)  # for the next step
    aux_loss_enabled = property(lambda self: bool(self.native.learner.config.experts))


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
