"""TRL's `GRPOConfig` and `RLOOConfig`, as settings of groupax."""

import logging
from collections.abc import Sequence
from typing import Any

from groupax.compat.fields import EVAL_SAMPLING, arguments, parse_mapping, scale_rewards, warn
from groupax.compat.trl.arguments import TrainingArguments
from groupax.compat.trl.batches import trl_schedule
from groupax.core.schedule import UpdateSchedule
from groupax.core.settings.fields import check_known, shown

logger = logging.getLogger(__name__)

# TRL's settings behind native settings of another name, for error messages.
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
    "max_tool_turns": "max_tool_calling_iterations",
}
# Native settings for `generation_kwargs` under the names of transformers and vLLM.
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
# What TRL does without a setting: it ends an episode at a malformed call and at a result that does not fit, and has no
# other limits than tokens.
ALWAYS: dict[str, Any] = {
    "masked_rows_in_denominator": True,
    "metric_definitions": "trl",
    "reward_scope": "rollout",
    "drop_last": True,
    "malformed_calls": "end",
    "overlong_results": "end",
    "max_turns": 10**5,
    "tool_timeout_s": 600.0,
}
# Settings that count completions or micro-batches; checked before they are multiplied.
COUNTS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
    "num_generations",
    "num_generations_eval",
)
MAX_COUNT = 10**7
SUMMED_OVER_TOKENS = ("bnpo", "dr_grpo", "dapo", "cispo")

_INERT = {
    "groupax never runs code from a model's folder": "trust_remote_code=False",
    "tokens are packed without padding": "pad_to_multiple_of='auto'",
    "programs are compiled by XLA": "use_liger_loss=False",
    "images are logged wherever completions are, once each": "log_multimodal=True",
    "its display shows a sample group now and then, and all completions of logged steps are in "
    "output_dir/groupax/rollouts": "num_completions_to_print=None log_unique_prompts=False",
    "sampling is done by groupax's own engine or server": """
        ds3_gather_for_generation=True cache_implementation=None vllm_model_impl='vllm' vllm_enable_sleep_mode=False
        vllm_server_timeout=240.0 vllm_group_port=51216 vllm_gpu_memory_utilization=0.3 vllm_max_model_length=None
        vllm_device='auto' vllm_dtype='auto' vllm_max_model_len=None vllm_enable_prefix_caching=None
        use_transformers_continuous_batching=False transformers_continuous_batching_config=None
        use_transformers_paged=False""",
}


@arguments("TRL", inert=_INERT)
class OnlineConfig(TrainingArguments):
    """The fields that TRL's `GRPOConfig` and `RLOOConfig` share."""

    learning_rate: float = 1e-6
    model_init_kwargs: dict[str, Any] | str | None = None
    router_aux_loss_coef: float | None = None
    disable_dropout: bool = False
    num_generations: int = 8
    num_generations_eval: int | None = None
    max_completion_length: int | None = 512
    max_prompt_length: int | None = None  # of earlier versions of TRL
    shuffle_dataset: bool | None = True
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    generation_kwargs: dict[str, Any] | str | None = None
    chat_template_kwargs: dict[str, Any] | str | None = None
    repetition_penalty: float = 1.0
    use_vllm: bool = False
    vllm_mode: str = "colocate"
    vllm_structured_outputs_regex: str | None = None
    vllm_server_base_url: str | None = None
    vllm_server_host: str = "0.0.0.0"
    vllm_server_port: int = 8000
    vllm_tensor_parallel_size: int = 1
    beta: float = 0.0
    num_iterations: int = 1
    epsilon: float = 0.2
    epsilon_high: float | None = None
    reward_weights: list[float] | None = None
    mask_truncated_completions: bool = False
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    log_completions: bool = False

    def batches(self, num_devices: int = 1) -> tuple[int, int, int]:
        """Returns the completions of a micro-batch on all devices, and the micro-batches of a step and a generation."""
        for name in COUNTS:
            value = getattr(self, name)
            if value != self.FIELDS.defaults[name] and not (isinstance(value, int) and 1 <= value <= MAX_COUNT):
                raise ValueError(f"{name} must be a whole number between 1 and {MAX_COUNT:,}, got {shown(value)}")
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
                warn(
                    f"an optimizer step has {rows * accumulated} completions, which is not a multiple of "
                    f"num_generations {self.num_generations}: steps_per_generation is {generated}, so that "
                    f"{generated // accumulated} steps train on a generation"
                )
        if rows * generated % self.num_generations:
            raise ValueError(
                f"a generation has {rows * generated} completions ({rows} in each of {generated} micro-batches), which "
                f"is not a multiple of num_generations {self.num_generations}; per_device_train_batch_size counts "
                "completions"
            )
        if accumulated % generated == 0 and self.num_iterations == 1:  # the rollouts of a step have the same policy
            generated = accumulated
        if generated % accumulated:
            raise ValueError(
                f"steps_per_generation {generated} must be a multiple of gradient_accumulation_steps {accumulated}, or "
                "with num_iterations=1 a divisor of it, so that optimizer steps end where generations do"
            )
        return rows, accumulated, generated

    def schedule(self, num_devices: int = 1) -> UpdateSchedule:
        """Returns how rollouts become optimizer steps on this number of devices."""
        return trl_schedule(*self.batches(num_devices), self.num_generations, self.num_iterations)

    def to_native(self, num_devices: int = 1, num_prompts: int | None = None) -> Any:
        """Returns the native config.

        Args:
            num_devices: Number of devices that `per_device_train_batch_size` applies to.
            num_prompts: Number of prompts in the dataset; needed if evaluations or checkpoints happen every epoch.

        Raises:
            ValueError: A setting is not supported by groupax.
        """
        rows, accumulated, generated = self.batches(num_devices)
        schedule = trl_schedule(rows, accumulated, generated, self.num_generations, self.num_iterations)
        needed = schedule.prompts_per_rollout
        if num_prompts is not None and num_prompts < needed:
            raise ValueError(
                f"the dataset has {num_prompts} prompts and a generation takes {needed} (generation_batch_size / "
                "num_generations), so that an epoch has none; lower per_device_train_batch_size, "
                "gradient_accumulation_steps or steps_per_generation"
            )
        every = schedule.num_steps(num_prompts, 1, -1) if num_prompts else 1
        weights = self.reward_weights
        settings = {
            **ALWAYS,
            "prompts_per_step": max(1, round(rows * accumulated / self.num_generations)),  # see `schedule`
            "updates_per_rollout": generated // accumulated,
            "prompt_order": "shuffled_by_torch" if self.shuffle_dataset else "dataset",
            "chat_template_kwargs": parse_mapping(self.chat_template_kwargs, "chat_template_kwargs"),
            "prompt_overflow": "truncate_left" if self.max_prompt_length else "error",
            "top_k": self.top_k if self.top_k and self.top_k > 0 else 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "min_p": self.min_p or 0.0,
            "reward_weights": tuple(weights) if isinstance(weights, Sequence) else weights,
            # a call or its result that ends an episode counts as finished there
            "mask_truncated_completions": ("length",) if self.mask_truncated_completions else False,
            **self._objective_settings(),
            **self.compute_settings(),
            **self.reporting_settings(),
            **self.optimizer_settings(),
            **self._generation_settings(),
            **self._vllm_settings(),
            "eval_num_generations": self.num_generations_eval or self.num_generations,
            "eval_steps": self.evaluated_every(every),
            **self.saving_settings(every),
        }
        return self.as_native(settings, NAMES)

    def _objective_settings(self) -> dict[str, Any]:
        """Returns the native settings for what distinguishes the algorithm."""
        raise NotImplementedError

    def _generation_settings(self) -> dict[str, Any]:
        """Returns the native settings for `generation_kwargs`."""
        given = dict(parse_mapping(self.generation_kwargs, "generation_kwargs"))
        if given.pop("do_sample", True) is not True:
            raise ValueError(
                "generation_kwargs has do_sample=False: greedy completions of a prompt are all the same, so their "
                "rewards do not differ and nothing is learned; leave it out"
            )
        for name in given:
            check_known(name, (*GENERATION, "do_sample"), f"generation_kwargs has {name!r}")
        if "stop" in given and "stop_strings" in given:
            raise ValueError("generation_kwargs has stop and stop_strings, which mean the same; leave one of them out")
        return {GENERATION[name]: value for name, value in given.items()}

    def _server_url(self) -> str | None:
        """Returns the address of the server that samples; None for groupax's own engine."""
        host = self.vllm_server_host
        if self.vllm_mode not in ("colocate", "server"):
            raise ValueError(f"vllm_mode must be 'server' or 'colocate', got {self.vllm_mode!r}")
        has_server = self.vllm_mode == "server" or host != self.FIELDS.defaults["vllm_server_host"]
        if self.vllm_server_base_url is None and has_server and host:
            return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{self.vllm_server_port}"
        return self.vllm_server_base_url

    def _vllm_settings(self) -> dict[str, Any]:
        """Returns the native settings for `use_vllm` and the other vLLM settings."""
        tp, url, regex = self.vllm_tensor_parallel_size, self._server_url(), self.vllm_structured_outputs_regex
        if not self.use_vllm:  # without it vllm's settings have no effect, as in TRL
            return {}
        if url is None:
            warn(
                "use_vllm=True: groupax's own engine samples in the trainer's process, with the policy's own weights; "
                "vLLM is not needed, and there is no server to start and no weights to sync"
            )
            return {"decoding_tp": tp, "regex": regex}
        if tp != 1:
            warn(
                f"vllm_tensor_parallel_size={tp} changes nothing: the server decides how it shards (groupax serve --tp)"
            )
        warn(f"use_vllm=True: rollouts are sampled by the server at {url}; docs/serving.md says how to start one")
        return {"rollout_servers": (url,), "regex": regex}


@arguments(
    "TRL",
    inert={"logits and losses are float32": "cast_lm_head_to_fp32=False"},
    refused={
        "log_completions=True writes them to output_dir; upload that folder after the run": """
            log_completions_hub_repo=None"""
    },
)
class GRPOConfig(OnlineConfig):
    """TRL's config. A setting without effect in groupax is accepted with a warning that gives the reason.

    Raises:
        TypeError: A field is unknown.
        ValueError: A field cannot be honoured.
    """

    delta: float | None = None
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    importance_sampling_level: str = "token"
    multi_objective_aggregation: str = "sum_then_normalize"
    scale_rewards: str = "group"
    loss_type: str = "dapo"
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    entropy_coef_delta: float = 0.005
    entropy_target: float = 0.2
    max_tool_calling_iterations: int | None = None
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_cap: float | None = None  # its former name
    vllm_importance_sampling_clip_min: float | None = None
    off_policy_mask_threshold: float | None = None
    use_bias_correction_kl: bool = True

    def __post_init__(self) -> None:
        """Derives what TRL derives from other fields."""
        super().__post_init__()
        if self.vllm_importance_sampling_cap is not None:
            self.vllm_importance_sampling_clip_max = self.vllm_importance_sampling_cap
        self.scale_rewards = scale_rewards(self.scale_rewards)

    def _objective_settings(self) -> dict[str, Any]:
        """Returns the native settings for the loss, the rewards' scale, tools, and the correction of other samplers.

        vLLM's importance-sampling correction is on if a server samples, if completions match an expression, or if its
        mode or a bound is not the default.
        """
        if self.off_policy_mask_threshold == 0:
            raise ValueError(
                "off_policy_mask_threshold=0 would mask completions by the rounding between sampling and training; set "
                "it above that, e.g. to 0.01, or leave it out"
            )
        if self.importance_sampling_level == "sequence" and self.loss_type in SUMMED_OVER_TOKENS:
            logger.warning(
                "importance_sampling_level 'sequence' with loss_type %r sums over tokens, which weights each sequence "
                "by its completion length; for the objective of GSPO set loss_type='grpo'",
                self.loss_type,
            )
        settings: dict[str, Any] = {
            "scale_rewards": scale_rewards(self.scale_rewards),
            "max_tool_turns": self.max_tool_calling_iterations,
        }
        if self.loss_type == "cispo" and self.epsilon_high is None:
            settings["epsilon_high"] = self.epsilon
            warn(
                f"loss_type 'cispo' without epsilon_high caps ratios at epsilon = {self.epsilon}, as TRL does, which "
                "scales the loss of on-policy tokens by that; set epsilon_high, e.g. to 5.0"
            )
        correction = {
            "rollout_correction": "vllm_importance_sampling_mode",
            "rollout_correction_min": "vllm_importance_sampling_clip_min",
            "rollout_correction_max": "vllm_importance_sampling_clip_max",
        }
        is_other = self._server_url() is not None or self.vllm_structured_outputs_regex is not None
        is_other |= any(getattr(self, name) != self.FIELDS.defaults[name] for name in correction.values())
        if self.use_vllm and is_other and self.vllm_importance_sampling_correction:
            settings |= {own: getattr(self, name) for own, name in correction.items()}
        return settings


@arguments("TRL")
class RLOOConfig(OnlineConfig):
    """TRL's config of REINFORCE with a leave-one-out baseline.

    Raises:
        TypeError: A field is unknown.
        ValueError: A field cannot be honoured.
    """

    num_generations: int = 2
    beta: float = 0.05
    normalize_advantages: bool = False
    reward_clip_range: tuple[float, float] | None = None

    def _objective_settings(self) -> dict[str, Any]:
        """Returns the native settings for RLOO's advantages and loss."""
        bounds = self.reward_clip_range
        normalized = "groupax.objective.advantages:rloo(normalize=True)"
        return {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence_sum",
            "advantage_estimator": normalized if self.normalize_advantages else "rloo",
            "use_kl_in_reward": self.beta != 0,
            "reward_clip_range": tuple(bounds) if bounds else None,
        }
