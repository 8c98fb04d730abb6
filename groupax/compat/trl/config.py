"""TRL's `GRPOConfig`, converted to native settings."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from groupax.compat.fields import (
    EVAL_SAMPLING,
    Fields,
    ForeignConfig,
    as_native,
    attention_setting,
    sampled_alike,
    steps_of,
    tell,
)
from groupax.compat.meshes import mesh_of, offloaded, tell_whole, zero_stage
from groupax.compat.trl.batches import TRLSchedule, trl_schedule
from groupax.compat.trl.fields import DEFAULTS, FORMER, INERT
from groupax.models.checkpoint import Model
from groupax.parallel.mesh import RULES, format_mesh, splits_model
from groupax.runs.trackers.tracker import PACKAGES, is_installed
from groupax.settings.fields import nearest, shown
from groupax.settings.reporting import TRACKERS

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
    "log_completions",
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
    "stop": "stop",
    "stop_strings": "stop",
}


# Where native settings of other names come from.
NAMES = {
    "prompts_per_step": "per_device_train_batch_size * gradient_accumulation_steps / num_generations",
    "updates_per_rollout": "steps_per_generation / gradient_accumulation_steps",
    "eval_num_generations": "num_generations_eval",
    **{f"eval_{name}": name for name in EVAL_SAMPLING},
    "learning_rate_end": "lr_scheduler_kwargs",
    "warmup_ratio": "warmup_steps below 1, or warmup_ratio",
    "rollout_correction_min": "vllm_importance_sampling_clip_min",
    "rollout_correction_max": "vllm_importance_sampling_clip_max",
    "decoding_tp": "vllm_tensor_parallel_size",
}
# Settings that count completions or micro-batches, which are multiplied before anything else is done with them.
COUNTS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
    "num_generations",
    "num_generations_eval",
)
MOST_COUNTED = 10**7


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
    """TRL's settings. Fields without a meaning in groupax are accepted with a warning; unknown names fail.

    Args:
        output_dir: Run folder.
        settings: Settings by TRL's names.

    Raises:
        TypeError: A name is unknown.
    """

    FIELDS: ClassVar[Fields] = Fields("TRL", DEFAULTS, INERT, FORMER)

    def __init__(self, output_dir: str | None = None, **settings: Any) -> None:
        super().__init__(**({} if output_dir is None else {"output_dir": output_dir}), **settings)

    @property
    def greater_is_better(self) -> bool | None:
        """The given value, or whether the name of the metric for the best model does not end in "loss"."""
        given, metric = self.given.get("greater_is_better"), self.metric_for_best_model
        return given if given is not None or metric is None else not metric.endswith("loss")

    def batches(self, num_devices: int = 1) -> Batches:
        """Returns the batch arithmetic on this many devices.

        Raises:
            ValueError: the numbers do not fit together.
        """
        for name in COUNTS:
            value = getattr(self, name)
            if value != DEFAULTS[name] and not (isinstance(value, int) and 1 <= value <= MOST_COUNTED):
                raise ValueError(f"{name} must be a whole number between 1 and {MOST_COUNTED:,}, got {shown(value)}")
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

    def schedule(self, num_devices: int = 1) -> TRLSchedule:
        """Returns how rollouts become optimizer steps on this number of devices."""
        return trl_schedule(*self.batches(num_devices), self.num_generations, self.num_iterations)

    def to_native(self, num_devices: int = 1, num_prompts: int | None = None) -> Any:
        """Returns the native config.

        Args:
            num_devices: that `per_device_train_batch_size` is for.
            num_prompts: in the dataset; needed where something happens every epoch.

        Raises:
            ValueError: something is asked for that groupax does not do.
        """
        rows, accumulated, generated = self.batches(num_devices)
        metric = self.metric_for_best_model
        of_model = as_mapping(self.model_init_kwargs, "model_init_kwargs")
        settings = {name: getattr(self, name) for name in SAME}
        settings |= {
            "masked_rows_in_denominator": True,
            "metric_definitions": "trl",
            "output_dir": self.output_dir or "trainer_output",
            "prompts_per_step": max(1, round(rows * accumulated / self.num_generations)),  # see `schedule`
            "updates_per_rollout": max(1, round(generated / accumulated)),
            "prompt_order": "shuffled_by_torch" if self.shuffle_dataset else "dataset",
            "drop_last": True,
            "max_completion_length": self.max_completion_length or 512,
            "chat_template_kwargs": as_mapping(self.chat_template_kwargs, "chat_template_kwargs"),
            "prompt_overflow": "truncate_left" if self.max_prompt_length else "error",
            "top_k": self.top_k if self.top_k and self.top_k > 0 else 0,
            "min_p": self.min_p or 0.0,
            "scale_rewards": {True: "group", False: "none"}.get(self.scale_rewards, self.scale_rewards),
            "reward_weights": tuple(self.reward_weights)
            if isinstance(self.reward_weights, Sequence)
            else self.reward_weights,
            "max_grad_norm": self.max_grad_norm or 0.0,
            "metric_for_best_model": metric and f"eval_{metric.removeprefix('eval_')}",
            "greater_is_better": self.greater_is_better is not False,
            "logging_steps": self._logging_steps(),
            "resume": "never",
            "attn_implementation": attention_setting(of_model.get("attn_implementation")),
            "gradient_checkpointing": "full" if self.given.get("gradient_checkpointing") else "none",
            "dtype": self._dtype(),
            "progress_bar": "none" if self.disable_tqdm else "rich",
            "report_to": self._trackers(),
            "run_name": self.run_name,
            "project": self.project,
            **self._optimizer(),
            **self._generation(),
            **self._sampling(),
        }
        settings |= sampled_alike(settings, self.num_generations_eval or self.num_generations)
        if (self.entropy_coef or self.use_adaptive_entropy) and self.top_entropy_quantile < 1:
            tell(
                f"top_entropy_quantile={self.top_entropy_quantile} masks the policy loss; the entropy bonus is a mean "
                "over all loss tokens, where TRL takes it over the kept ones"
            )
        if mesh := mesh_of(self.deepspeed, self.fsdp, self.parallelism_config):
            settings |= {"mesh": mesh, "mesh_replicate": tuple(RULES)}
        settings["offload_optimizer"], weights = offloaded(self.deepspeed, self.fsdp)
        if weights:
            tell("offload_param: weights that are trained stay on the devices; groupax offloads the optimizer's state")
        every = self.schedule(num_devices).num_steps(num_prompts, 1, -1) if num_prompts else 1
        settings["eval_steps"] = steps_of(
            self.eval_strategy, self.eval_steps or self._logging_steps(), every, "eval_strategy"
        )
        settings |= self._saving(every)
        return as_native(settings, NAMES)

    def tell_mesh(self, model: Model) -> None:
        """Reports how settings of DeepSpeed, FSDP and parallelism are carried out.

        Args:
            model: The model on its mesh.
        """
        asked = {name: getattr(self, name) for name in ("deepspeed", "fsdp", "fsdp_config", "parallelism_config")}
        asked = {name: value for name, value in asked.items() if value}
        if not asked:
            return
        stage = zero_stage(self.deepspeed) if self.deepspeed else None
        words = {name: repr(value) for name, value in asked.items()}
        words |= {"deepspeed": f"ZeRO stage {stage}"} if stage is not None else {}
        how = "weights, gradients and the optimizer's state are split over them; weights are gathered for decoding"
        if not splits_model(model.mesh):
            how = "every device holds all weights and the whole optimizer state, so the model has to fit on one"
        tell(
            f"{' and '.join(f'{name}={value}' for name, value in words.items())}: groupax needs no launcher. Mesh (dp, "
            f"fsdp, ep, tp, sp) = ({format_mesh(model.mesh)}) over the {model.mesh.devices.size} devices: {how}"
        )
        tell_whole(model, " and ".join(asked))

    def _logging_steps(self) -> int:
        strategy = getattr(self.logging_strategy, "value", self.logging_strategy)
        if strategy != "steps":
            tell(f"logging_strategy {strategy!r}: metrics.jsonl gets a line every logging_steps all the same")
        if self.logging_steps < 1:
            raise ValueError(f"logging_steps must be a number of steps, got {self.logging_steps}")
        return int(self.logging_steps)

    def _trackers(self) -> tuple[str, ...]:
        """Returns the trackers of `report_to` that groupax has too; "all" stands for the installed ones."""
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
        more = dict(as_mapping(self.lr_scheduler_kwargs, "lr_scheduler_kwargs"))
        end = more.pop("min_lr", None)
        end = self.learning_rate * more.pop("min_lr_rate") if end is None and "min_lr_rate" in more else end
        if more:
            raise ValueError(f"lr_scheduler_kwargs {more} are not supported; there are min_lr and min_lr_rate")
        warmup: dict[str, Any] = {"warmup_steps": int(self.warmup_steps or 0)}
        if 0 < (self.warmup_steps or 0) < 1:
            warmup = {"warmup_ratio": float(self.warmup_steps)}
        elif not self.warmup_steps and self.warmup_ratio:
            warmup = {"warmup_ratio": float(self.warmup_ratio)}
        if scheduler == "constant" and any(warmup.values()):
            tell("lr_scheduler_type 'constant' has no warm-up; 'constant_with_warmup' has one")
            warmup = {}
        constant = {"learning_rate_end": end or 0.0, "lr_scheduler_type": SCHEDULERS[scheduler]}
        return {"optimizer": OPTIMIZERS[known[-1]], **constant, **warmup}

    def _generation(self) -> dict[str, Any]:
        given = dict(as_mapping(self.generation_kwargs, "generation_kwargs"))
        if given.pop("do_sample", True) is not True:
            raise ValueError(
                "generation_kwargs has do_sample=False: greedy completions of one prompt are all the same, which "
                "leaves nothing to compare; leave it out"
            )
        unknown = [name for name in given if name not in GENERATION]
        if unknown:
            raise ValueError(
                f"generation_kwargs has {unknown[0]!r}{nearest(unknown[0], GENERATION)}; there are "
                f"{', '.join(GENERATION)} and do_sample"
            )
        if "stop" in given and "stop_strings" in given:
            raise ValueError("generation_kwargs has stop and stop_strings, which mean the same; leave one of them out")
        return {GENERATION[name]: value for name, value in given.items()}

    def _sampling(self) -> dict[str, Any]:
        """Returns the sampler, and vLLM's importance correction if it is set, or by default with a server."""
        shared_by = self.vllm_tensor_parallel_size
        if not self.use_vllm:
            _tell_not_shared(shared_by, "it is of use_vllm=True, which is not set")
            return {}
        host, asks_server = self.vllm_server_host, self.vllm_mode == "server" or "vllm_server_host" in self.given
        url = self.vllm_server_base_url
        if url is None and asks_server and host:
            url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{self.vllm_server_port}"
        if url is None:
            tell(
                "use_vllm=True: groupax's own engine samples in the trainer's process, on the policy's own weights; no "
                "vLLM is needed. There is nothing to start and nothing to sync"
            )
        else:
            _tell_not_shared(shared_by, "who starts the server says how it shares weights (groupax serve --tp)")
            tell(f"use_vllm=True: rollouts are sampled by the server at {url}; docs/serving.md says how to start one")
        settings: dict[str, Any] = {"decoding_tp": shared_by} if url is None else {"rollout_servers": (url,)}
        asked = url is not None or "vllm_importance_sampling_mode" in self.given
        if asked and self.vllm_importance_sampling_correction:
            settings["rollout_correction"] = self.vllm_importance_sampling_mode
            settings["rollout_correction_min"] = self.vllm_importance_sampling_clip_min
            settings["rollout_correction_max"] = self.vllm_importance_sampling_clip_max
        return settings

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


def as_mapping(value: Any, name: str) -> Mapping[str, Any]:
    """Returns a dict, which may be given as JSON; an empty one for None.

    Raises:
        ValueError: it is neither.
    """
    if value is None:
        return {}
    value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dict, got {value!r}")
    return value


def _tell_not_shared(shared_by: int, why: str) -> None:
    if shared_by != 1:
        tell(f"vllm_tensor_parallel_size={shared_by} changes nothing in groupax: {why}")
