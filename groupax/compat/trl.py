"""TRL's `GRPOConfig` and `GRPOTrainer` over groupax (names and batches of TRL 1.16).

from groupax.compat.trl import GRPOConfig, GRPOTrainer, apply_chat_template
"""

import functools
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax

import groupax.trainer as native
from groupax.collector import sampling_params
from groupax.compat import hf
from groupax.compat.callbacks import CallbackListener, State
from groupax.compat.fields import Fields, ForeignConfig, as_native, steps_of, tell
from groupax.compat.trl_fields import DEFAULTS, FORMER, INERT
from groupax.config import TRACKERS, nearest
from groupax.data import load_examples
from groupax.hub import push_folder
from groupax.models.lora import lora_config
from groupax.rewards.contract import TrainerState
from groupax.slices import slices_of
from groupax.tokenizer import load_tokenizer
from groupax.trackers.tracker import PACKAGES, is_installed

# Settings that groupax has under the same name with the same meaning.
SAME = (
    "seed",
    "num_train_epochs",
    "max_steps",
    "num_generations",
    "num_iterations",
    "temperature",
    "top_p",
    "repetition_penalty",
    "loss_type",
    "beta",
    "epsilon",
    "epsilon_high",
    "delta",
    "importance_sampling_level",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
    "use_bias_correction_kl",
    "sync_ref_model",
    "ref_model_mixup_alpha",
    "ref_model_sync_steps",
    "multi_objective_aggregation",
    "mask_truncated_completions",
    "top_entropy_quantile",
    "off_policy_mask_threshold",
    "entropy_coef",
    "use_adaptive_entropy",
    "entropy_coef_min",
    "entropy_coef_max",
    "entropy_coef_delta",
    "entropy_target",
    "router_aux_loss_coef",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "log_completions",
    "metric_for_best_model",
    "save_total_limit",
    "max_prompt_length",
)
OPTIMIZERS = {"adamw": "adamw", "paged_adamw": "adamw", "adafactor": "adafactor", "lion": "lion", "sgd": "sgd"}
SCHEDULERS = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
# `generation_kwargs` by the names of transformers and vLLM, and ours.
GENERATION = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
}


class Batches(NamedTuple):
    """TRL's four numbers, resolved.

    Attributes:
        rows: completions of a micro-batch on all devices.
        accumulated: micro-batches of an optimizer step.
        generated: micro-batches that one generation is cut into.
    """

    rows: int
    accumulated: int
    generated: int


class GRPOConfig(ForeignConfig):
    """TRL's settings. What groupax does not have is taken with a warning that says why; unknown names fail.

    Args:
        output_dir: the run's folder.
        settings: by TRL's names.

    Raises:
        TypeError: a name is unknown.
    """

    FIELDS: ClassVar[Fields] = Fields("TRL", DEFAULTS, INERT, FORMER)

    def __init__(self, output_dir: str | None = None, **settings: Any) -> None:
        super().__init__(**({} if output_dir is None else {"output_dir": output_dir}), **settings)

    def batches(self, num_devices: int = 1) -> Batches:
        """The batch arithmetic on so many devices.

        Raises:
            ValueError: the numbers do not fit together.
        """
        rows = self.per_device_train_batch_size * num_devices
        accumulated, generated = self.gradient_accumulation_steps, self.steps_per_generation
        if self.generation_batch_size is not None:
            if generated is not None:
                raise ValueError("generation_batch_size and steps_per_generation are both set; leave one of them out")
            if self.generation_batch_size % rows:
                raise ValueError(
                    f"generation_batch_size {self.generation_batch_size} must be a multiple of the completions of a "
                    f"micro-batch, {rows} (per_device_train_batch_size {self.per_device_train_batch_size} on "
                    f"{num_devices} devices)"
                )
            generated = self.generation_batch_size // rows
        if generated is None:
            generated = accumulated
            while rows * generated % self.num_generations:
                generated += accumulated
            if generated > accumulated:
                tell(
                    f"an optimizer step has {rows * accumulated} completions, which are no whole groups of "
                    f"num_generations {self.num_generations}: steps_per_generation is {generated}, so that "
                    f"{generated // accumulated} steps train on a generation"
                )
        if rows * generated % self.num_generations:
            raise ValueError(
                f"a generation has {rows * generated} completions ({rows} in each of {generated} micro-batches), which "
                f"are no whole groups of num_generations {self.num_generations}; per_device_train_batch_size counts "
                "completions"
            )
        return Batches(rows, accumulated, generated)

    def to_native(self, num_devices: int = 1, num_prompts: int | None = None) -> Any:
        """The native config.

        Args:
            num_devices: that `per_device_train_batch_size` is for.
            num_prompts: in the dataset; needed where something happens every epoch.

        Raises:
            ValueError: something is asked for that groupax does not do.
        """
        rows, accumulated, generated = self.batches(num_devices)
        settings = {name: getattr(self, name) for name in SAME}
        settings |= {
            "output_dir": self.output_dir or "trainer_output",
            "prompts_per_step": _whole(rows * accumulated / self.num_generations),
            "updates_per_rollout": _whole(generated / accumulated),
            "prompt_order": "shuffled_by_torch" if self.shuffle_dataset else "dataset",
            "whole_epochs": True,
            "max_completion_length": self.max_completion_length or 512,
            "prompt_overflow": "truncate_left" if self.max_prompt_length else "error",
            "top_k": self.top_k if self.top_k and self.top_k > 0 else 0,
            "min_p": self.min_p or 0.0,
            "scale_rewards": {True: "group", False: "none"}.get(self.scale_rewards, self.scale_rewards),
            "reward_weights": None if self.reward_weights is None else tuple(self.reward_weights),
            "greater_is_better": self.greater_is_better is not False,
            "logging_steps": self._logging_steps(),
            "eval_temperature": self.temperature,
            "resume": "never",
            "gradient_checkpointing": "full" if self.given.get("gradient_checkpointing") else "none",
            "dtype": self._dtype(),
            "progress_bar": "none" if self.disable_tqdm else "rich",
            "report_to": self._trackers(),
            "run_name": self.run_name,
            "project": self.project,
            **self._optimizer(),
            **self._generation(),
            **self._correction(),
        }
        every = slices_of(as_native(settings)).num_steps(num_prompts, 1, -1) if num_prompts else 1
        settings["eval_steps"] = steps_of(
            self.eval_strategy, self.eval_steps or self._logging_steps(), every, "eval_strategy"
        )
        settings |= self._saving(every)
        return as_native(settings)

    def tell_mesh(self, num_devices: int) -> None:
        """Say how settings of DeepSpeed, FSDP and parallelism are carried out."""
        asked = {name: getattr(self, name) for name in ("deepspeed", "fsdp", "fsdp_config", "parallelism_config")}
        asked = {name: value for name, value in asked.items() if value}
        if asked:
            tell(
                f"{' and '.join(f'{name}={_mesh_words(value)}' for name, value in asked.items())}: groupax needs no "
                f"launcher and no such file. Rows are spread over {num_devices} devices, mesh (dp, fsdp, ep, tp, sp) = "
                f"({num_devices}, 1, 1, 1, 1), and every device holds all weights and the whole optimizer state: they "
                "are not split, so the model has to fit on one device"
            )

    def _logging_steps(self) -> int:
        strategy = getattr(self.logging_strategy, "value", self.logging_strategy)
        if strategy != "steps":
            tell(f"logging_strategy {strategy!r}: metrics.jsonl gets a line every logging_steps all the same")
        if self.logging_steps < 1:
            raise ValueError(f"logging_steps must be a number of steps, got {self.logging_steps}")
        return int(self.logging_steps)

    def _trackers(self) -> tuple[str, ...]:
        """Those of `report_to` that groupax has too; "all" is those that are installed."""
        asked = [self.report_to] if isinstance(self.report_to, str) else list(self.report_to or [])
        if asked == ["all"]:
            return tuple(name for name in TRACKERS if name in PACKAGES and is_installed(name))
        known = [name for name in asked if name in TRACKERS]
        if unknown := [name for name in asked if name not in TRACKERS and name != "none"]:
            tell(f"report_to {', '.join(unknown)}: groupax reports to {', '.join(TRACKERS)}")
        return tuple(dict.fromkeys(known))

    def _dtype(self) -> str:
        if self.fp16:
            tell("fp16=True: groupax computes in bfloat16 or float32; it takes what is native to the devices")
            return "auto"
        return {None: "auto", True: "bfloat16", False: "float32"}[self.bf16]

    def _optimizer(self) -> dict[str, Any]:
        name = str(getattr(self.optim, "value", self.optim))
        known = [own for own in OPTIMIZERS if name == own or name.startswith(f"{own}_")]
        if not known:
            raise ValueError(
                f"optim {name!r} is not supported{nearest(name, OPTIMIZERS)}; there are {', '.join(OPTIMIZERS)}"
            )
        if "8bit" in name or "4bit" in name or "paged" in name:
            tell(f"optim {name!r}: the optimizer's state is float32 on the devices")
        scheduler = str(getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type))
        if scheduler not in SCHEDULERS:
            raise ValueError(
                f"lr_scheduler_type {scheduler!r} is not supported{nearest(scheduler, SCHEDULERS)}; there are "
                f"{', '.join(SCHEDULERS)}"
            )
        more = dict(self.lr_scheduler_kwargs or {})
        end = more.pop("min_lr", None)
        end = self.learning_rate * more.pop("min_lr_rate") if end is None and "min_lr_rate" in more else end
        if more:
            raise ValueError(f"lr_scheduler_kwargs {more} are not supported; there are min_lr and min_lr_rate")
        warmup: dict[str, Any] = {"warmup_steps": int(self.warmup_steps)}
        if 0 < self.warmup_steps < 1:
            warmup = {"warmup_ratio": float(self.warmup_steps)}
        elif not self.warmup_steps and self.warmup_ratio:
            warmup = {"warmup_ratio": float(self.warmup_ratio)}
        constant = {"learning_rate_end": end or 0.0, "lr_scheduler_type": SCHEDULERS[scheduler]}
        return {"optimizer": OPTIMIZERS[known[-1]], **constant, **warmup}

    def _generation(self) -> dict[str, Any]:
        given = _mapping(self.generation_kwargs, "generation_kwargs")
        unknown = [name for name in given if name not in GENERATION]
        if unknown:
            raise ValueError(
                f"generation_kwargs has {unknown[0]!r}{nearest(unknown[0], GENERATION)}; there are "
                f"{', '.join(GENERATION)}"
            )
        return {GENERATION[name]: value for name, value in given.items()}

    def _correction(self) -> dict[str, Any]:
        """vLLM's importance-sampling correction if it was asked for, which our engine does not need."""
        if self.use_vllm:
            asks_server = self.vllm_mode == "server" or "vllm_server_host" in self.given
            server = f", and no server is asked at {self.vllm_server_base_url or self.vllm_server_host!r}"
            tell(
                "use_vllm=True: groupax's own engine samples in the trainer's process, on the policy's own weights; no "
                f"vLLM is needed{server if asks_server else ''}. There is nothing to start and nothing to sync"
            )
        asked = self.given.get("vllm_importance_sampling_mode")
        if not self.use_vllm or asked is None or not self.vllm_importance_sampling_correction:
            return {}
        top = self.vllm_importance_sampling_clip_max
        bounds = {"rollout_correction_min": self.vllm_importance_sampling_clip_min, "rollout_correction_max": top}
        return {"rollout_correction": asked, **bounds}

    def _saving(self, steps_per_epoch: int) -> dict[str, Any]:
        strategy = getattr(self.save_strategy, "value", self.save_strategy)
        if strategy == "best":
            strategy, steps = "steps", self.eval_steps or self._logging_steps()
        else:
            steps = self.save_steps
        every = steps_of(strategy, steps, steps_per_epoch, "save_strategy")
        return {
            "save_steps": every,
            "save_interval_minutes": 0.0,
            "do_last_save": every > 0,
            "save_optimizer_state": not self.save_only_model,
        }


class TrainOutput(NamedTuple):
    """What `train` returns, as transformers has it."""

    global_step: int
    training_loss: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class _Policy:
    """What the trainer's `model` is before it is trained."""

    model: Any
    peft_config: Any
    weights: Any


class GRPOTrainer:
    """TRL's trainer over `groupax.GRPOTrainer`, which is its `native`.

    Args:
        model: a folder, a hub id, a model of groupax or of `compat.hf`, or one of PyTorch.
        reward_funcs: one or several reward functions or reward models.
        args: settings.
        train_dataset: prompts.
        eval_dataset: likewise.
        processing_class: the tokenizer; by default the model's.
        reward_processing_classes: tokenizers of the reward models.
        callbacks: transformers' callbacks.
        optimizers: an optimizer of PyTorch, of which kind and numbers are taken, and None.
        quantization_config: of a model that is loaded here.
        peft_config: a LoRA adapter's.
        tools, rollout_func, environment_factory: not supported.

    Raises:
        ValueError: something is asked for that groupax does not do.
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
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        for name, value in {
            "tools": tools,
            "rollout_func": rollout_func,
            "environment_factory": environment_factory,
        }.items():
            if value is not None:
                raise ValueError(
                    f"{name} is not supported by groupax: completions are one turn of the policy's own tokens"
                )
        self.args = args = args or GRPOConfig(f"{Path(str(getattr(model, 'name', model))).name}-GRPO")
        policy = _policy(model, args, quantization_config, peft_config)
        num_devices = num_accelerators()
        examples = load_examples(train_dataset) if train_dataset is not None else None
        settings = replace(
            args.to_native(num_devices, len(examples) if examples is not None else None), **_optimizer(optimizers)
        )
        args.tell_mesh(num_devices)
        if policy.weights != "same":
            settings = replace(settings, base_weights=policy.weights, **_adapter(policy.peft_config))
            policy = replace(policy, peft_config=None)
        rewards = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        self.state = State(num_train_epochs=math.ceil(args.num_train_epochs), logging_steps=settings.logging_steps)
        self.callbacks = list(callbacks or [])
        self._listeners: list[Any] = []
        self.native = native.GRPOTrainer(
            policy.model,
            [_with_state(reward) for reward in rewards],
            settings,
            examples,
            eval_dataset,
            _tokenizer(processing_class, policy.model, _mapping(args.chat_template_kwargs, "chat_template_kwargs")),
            reward_processing_classes,
            policy.peft_config,
            self._listeners,
        )
        self.state.max_steps = self.native.num_steps
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset

    @property
    def processing_class(self) -> Any:
        """The tokenizer."""
        return self.native.tokenizer

    @property
    def model(self) -> hf.CausalLM:
        """The policy as it is now."""
        learner, own = self.native.learner, self.native.model
        adapter = own.adapter and replace(own.adapter, trained=learner.state.params)
        return hf.CausalLM(replace(own, params=learner.policy, adapter=adapter))

    def add_callback(self, callback: Any) -> None:
        """Have one more callback called."""
        self.callbacks.append(callback)

    def remove_callback(self, callback: Any) -> None:
        """Have a callback, or those of a class, not called any more."""
        self.callbacks = [own for own in self.callbacks if own is not callback and type(own) is not callback]

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train, and save the model in the run's `model/`.

        Args:
            resume_from_checkpoint: True goes on from the newest checkpoint in `output_dir`, a path from that one.
        """
        trainer, args = self.native, self.args
        resume = resume_from_checkpoint or args.resume_from_checkpoint
        trainer.args = replace(trainer.args, resume="auto" if resume is True else str(resume) if resume else "never")
        more = {"model": None, "processing_class": trainer.tokenizer, "train_dataloader": None}
        steps = trainer.slices.num_steps(len(trainer.prompts), 1, -1)
        self._listeners[:] = [CallbackListener(self.callbacks, args, steps, self.state, more)]
        result = trainer.train()
        losses = [line["loss"] for line in self.state.log_history if "loss" in line]
        if args.push_to_hub:
            self.push_to_hub()
        metrics = {"train_runtime": result.train_seconds, **result.metrics}
        return TrainOutput(result.num_steps, sum(losses) / max(len(losses), 1), metrics)

    def evaluate(self) -> dict[str, float]:
        """Score the current policy on `eval_dataset`, with `num_generations_eval` completions of each prompt."""
        trainer = self.native
        params = replace(sampling_params(trainer.args), n=self.args.num_generations_eval or self.args.num_generations)
        metrics = {f"eval_{name}": value for name, value in trainer.evaluate(params).metrics.items()}
        self.state.log_history.append({"step": trainer.cursor.step, **metrics})
        return metrics

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the current policy, or its adapter, with the tokenizer; files beside them stay.

        Args:
            output_dir: by default `model/` in the run's folder, which itself has the run's own config.json.
        """
        own = Path(self.native.args.output_dir)
        if output_dir is None or Path(output_dir).resolve() == own.resolve():
            if output_dir is not None:
                tell(
                    f"{output_dir} is the run's folder, with a config.json of its own; the model is in {own / 'model'}"
                )
            self.native.save_model()
            return
        hf.beside_what_is_there(self.native.save_model, output_dir)

    def push_to_hub(self, **inert: Any) -> str:
        """Upload the current policy as `hub_model_id`, by default the name of `output_dir`."""
        hf.tell_inert(inert, {"commit_message", "blocking", "token", "revision", "dataset_name", "tags"}, "push_to_hub")
        repo_id = self.args.hub_model_id or Path(self.native.args.output_dir).name
        return push_folder(self.native.save_model(), repo_id, private=bool(self.args.hub_private_repo))


def apply_chat_template(
    example: Mapping[str, Any], processing_class: Any, tools: Any = None, **template_kwargs: Any
) -> dict[str, str]:
    """The conversations of an example as the chat template writes them, under the same names.

    Args:
        example: with `prompt`, and `completion` if there is one, or with `messages`.
        processing_class: a tokenizer with a chat template.
        tools: that the template lists.
        template_kwargs: for the template.

    Raises:
        KeyError: the example has neither `prompt` nor `messages`.
        ValueError: a prompt ends with a message that nothing can follow.
    """
    render = functools.partial(
        processing_class.apply_chat_template,
        tools=tools or None,
        tokenize=False,
        **example.get("chat_template_kwargs", {}),
        **template_kwargs,
    )
    if "messages" in example:
        return {"messages": render(example["messages"])}
    if "prompt" not in example:
        raise KeyError(f"the example has neither prompt nor messages, but {', '.join(example)}")
    role = example["prompt"][-1]["role"]
    if role not in ("user", "tool", "assistant"):
        raise ValueError(f"the prompt's last message is of role {role!r}; an answer follows on user or tool")
    asks = role != "assistant"
    prompt = render(example["prompt"], add_generation_prompt=asks, continue_final_message=not asks)
    if "completion" not in example:
        return {"prompt": prompt}
    whole = render([*example["prompt"], *example["completion"]])
    if not whole.startswith(prompt):
        raise ValueError("the chat template writes the prompt otherwise when a completion follows")
    return {"prompt": prompt, "completion": whole[len(prompt) :]}


def num_accelerators() -> int:
    """Devices in the sense of `per_device_train_batch_size`; the virtual devices of a CPU are one."""
    return 1 if jax.default_backend() == "cpu" else jax.device_count()


def _policy(model: Any, args: GRPOConfig, quantization_config: Any, peft_config: Any) -> _Policy:
    more = dict(_mapping(args.model_init_kwargs, "model_init_kwargs"))
    if quantization_config is not None and "quantization_config" in more:
        raise ValueError("quantization_config is given twice: to the trainer and in model_init_kwargs")
    quantization_config = quantization_config or more.pop("quantization_config", None)
    for name, value in more.items():
        if name not in (*hf.INERT, "dtype", "torch_dtype"):
            raise ValueError(f"model_init_kwargs has {name!r}{nearest(name, [*hf.INERT, 'dtype'])}")
        why = hf.INERT.get(name, "masters are float32, and bf16 says what is computed in")
        tell(f"model_init_kwargs {name}={value!r} changes nothing in groupax: {why}")
    weights = hf.base_weights(quantization_config)
    given = hf.as_model(model)
    adapter = getattr(given, "adapter", None)
    if adapter is not None and peft_config is not None:
        if lora_config(peft_config) != adapter.config:
            raise ValueError("the model has an adapter already, and peft_config asks for another one; give one of them")
        tell("peft_config describes the adapter that the model has already, which is trained; leave it out")
        peft_config = None
    if weights != "same" and not isinstance(given, (str, Path)):
        tell("quantization_config changes nothing: the model is loaded already")
        weights = "same"
    return _Policy(given, peft_config, weights)


def _adapter(peft_config: Any) -> dict[str, Any]:
    """An adapter as native settings: a base that is quantized while it is loaded gets it there."""
    if peft_config is None:
        return {}
    lora = lora_config(peft_config)
    names = lora.target_modules
    if isinstance(names, str) and names != "all-linear":
        raise ValueError("target_modules as a regular expression needs a loaded model; name the modules")
    return {
        "lora_r": lora.r,
        "lora_alpha": float(lora.lora_alpha),
        "lora_dropout": float(lora.lora_dropout),
        "lora_target_modules": (names,) if isinstance(names, str) else tuple(names),
        "lora_bias": lora.bias,
        "use_rslora": lora.use_rslora,
        "lora_modules_to_save": tuple(lora.modules_to_save),
    }


def _optimizer(optimizers: tuple[Any, Any]) -> dict[str, Any]:
    """Settings from an optimizer of PyTorch: its kind, and the numbers that it was made with."""
    optimizer, scheduler = optimizers
    if scheduler is not None:
        raise ValueError(
            "a scheduler object cannot be carried over; set lr_scheduler_type, warmup_steps and learning_rate"
        )
    if optimizer is None:
        return {}
    kind, numbers = type(optimizer).__name__.lower(), getattr(optimizer, "defaults", None)
    kinds = {"adamw": "adamw", "sgd": "sgd", "adafactor": "adafactor", "lion": "lion"}
    if kind not in kinds or numbers is None:
        raise ValueError(
            f"the optimizer {type(optimizer).__name__} cannot be carried over (only {', '.join(kinds)}); set optim"
        )
    names = {"lr": "learning_rate", "weight_decay": "weight_decay", "momentum": "momentum", "eps": "adam_epsilon"}
    settings = {names[name]: float(numbers[name]) for name in names if isinstance(numbers.get(name), (int, float))}
    if "betas" in numbers:
        settings |= {"adam_beta1": float(numbers["betas"][0]), "adam_beta2": float(numbers["betas"][1])}
    tell(f"of the optimizer {type(optimizer).__name__} groupax takes its kind and {', '.join(settings)}")
    return {"optimizer": kinds[kind], **settings}


def _with_state(reward: Any) -> Any:
    """A reward function that gets the run's state under transformers' names."""
    if not callable(reward) or isinstance(reward, type) or not inspect.isroutine(reward):
        return hf.as_model(reward) if hasattr(reward, "state_dict") or isinstance(reward, hf.CausalLM) else reward
    parameters = inspect.signature(reward).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if "trainer_state" not in parameters and not takes_any:
        return reward

    def translated(arguments: dict[str, Any]) -> dict[str, Any]:
        state = arguments.get("trainer_state")
        if isinstance(state, TrainerState):
            named = State(global_step=state.step, max_steps=state.num_steps, epoch=state.epoch)
            arguments["trainer_state"] = named
        return arguments

    if inspect.iscoroutinefunction(reward):

        @functools.wraps(reward)
        async def call_async(**arguments: Any) -> Any:
            return await reward(**translated(arguments))

        return call_async

    @functools.wraps(reward)
    def call(**arguments: Any) -> Any:
        return reward(**translated(arguments))

    return call


def _tokenizer(tokenizer: Any, model: Any, template_kwargs: Mapping[str, Any]) -> Any:
    """The tokenizer, with arguments for its chat template if there are any; None leaves it to the native trainer."""
    if not template_kwargs:
        return tokenizer
    if tokenizer is None:
        from groupax.models.checkpoint import resolve_folder

        tokenizer = load_tokenizer(model.source if hasattr(model, "source") else resolve_folder(model))
    apply: Callable[..., Any] = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = functools.partial(apply, **template_kwargs)
    return tokenizer


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dict, got {value!r}")
    return value


def _mesh_words(value: Any) -> str:
    """A setting of DeepSpeed or FSDP in short: the stage of ZeRO if it says one."""
    if isinstance(value, (str, Path)) and Path(value).is_file():
        value = json.loads(Path(value).read_text(encoding="utf-8"))
    if isinstance(value, Mapping) and "zero_optimization" in value:
        return f"ZeRO stage {value['zero_optimization'].get('stage', '?')}"
    return repr(value)


def _whole(number: float) -> int | float:
    return int(number) if number == int(number) else number
