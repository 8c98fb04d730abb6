"""`GRPOConfig` and `SFTConfig`: every setting of a run, validated when it is created. Imports no jax."""

import copy
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Self, TypeVar

from groupax.core.settings.compute import DecodingSettings, MeshSettings, UpdateSettings, VisionSettings
from groupax.core.settings.fields import as_given, as_read, check_range, check_text, check_type, like, nearest
from groupax.core.settings.objective import (
    AdvantageSettings,
    EntropySettings,
    LossSettings,
    MaskSettings,
    ReferenceSettings,
)
from groupax.core.settings.optimizer import AdapterSettings, LearningRateSettings, OptimizerSettings
from groupax.core.settings.references import reference_to
from groupax.core.settings.rollouts import EpisodeSettings, PromptSettings, RewardSettings, RolloutSettings
from groupax.core.settings.run import (
    CheckpointSettings,
    EvaluationSchedule,
    EvaluationSettings,
    PromptOrderSettings,
    ReportingSettings,
    RolloutLogSettings,
    RunSettings,
)
from groupax.core.settings.sampling import RolloutSamplingSettings
from groupax.core.settings.sft import SFTSettings

# What TRL and transformers call a setting, and what to set here.
NAMES_ELSEWHERE = {
    "per_device_train_batch_size": "prompts_per_step, which counts the prompts of an optimizer step on all devices",
    "gradient_accumulation_steps": "prompts_per_step; micro-batches are chosen automatically (micro_batch_tokens)",
    "generation_batch_size": "prompts_per_step and updates_per_rollout",
    "steps_per_generation": "updates_per_rollout",
    "per_device_eval_batch_size": "max_concurrent_rows",
    "num_generations_eval": "eval_num_generations",
    "max_new_tokens": "max_completion_length",
    "optim": "optimizer",
    "bf16": "dtype='bfloat16'",
    "fp16": "dtype='bfloat16'",
    "torch_dtype": "dtype",
    "eval_strategy": "eval_steps",
    "evaluation_strategy": "eval_steps",
    "save_strategy": "save_steps or save_interval_minutes",
    "logging_strategy": "logging_steps",
    "shuffle_dataset": "prompt_order",
    "use_vllm": "rollout_servers, for a server; otherwise groupax samples with its own engine",
    "vllm_importance_sampling_correction": "rollout_correction",
    "lr_scheduler_kwargs": "learning_rate_end",
    "resume_from_checkpoint": "resume",
    "overwrite_output_dir": "resume='never'",
    "disable_tqdm": "progress_bar='none'",
    "hub_model_id": "groupax push, or GRPOTrainer.push_to_hub",
    "push_to_hub": "groupax push, or GRPOTrainer.push_to_hub",
    "kl_coef": "beta",
    "cliprange": "epsilon",
}

# The same where supervised fine-tuning differs.
NAMES_ELSEWHERE_OF_SFT = {
    "per_device_train_batch_size": "batch_size, which counts the examples of an optimizer step on all devices",
    "gradient_accumulation_steps": "batch_size; micro-batches are chosen automatically (micro_batch_tokens)",
    "per_device_eval_batch_size": "batch_size",
    "shuffle_dataset": "example_order",
    "max_seq_length": "max_length",
    "hub_model_id": "groupax push, or SFTTrainer.push_to_hub",
    "push_to_hub": "groupax push, or SFTTrainer.push_to_hub",
}

T = TypeVar("T")


def hint_for(name: str, known: Iterable[str], config: type | None = None) -> str:
    """Returns a hint for a setting that does not exist: what another library's name is here, or the nearest name."""
    names = NAMES_ELSEWHERE
    if config is not None and config.__name__ == "SFTConfig":
        own = {field.name for field in _fields(config)}
        names = {name: here for name, here in names.items() if own & set(re.findall(r"\w+", here))}
        names |= NAMES_ELSEWHERE_OF_SFT
    if name in names:
        here = names[name]
        return f"; that is TRL's or transformers' name: here it is {here} (groupax.compat.trl takes TRL's)"
    return nearest(name, known)


def _refusing_unknown_fields(cls: type[T]) -> type[T]:
    init = cls.__init__
    known = {field.name: field.type for field in fields(cls)}  # pyright: ignore[reportArgumentType]

    @functools.wraps(init)
    def checked_init(self: T, **settings: Any) -> None:
        for name in settings:
            if name not in known:
                raise TypeError(f"{cls.__name__} has no field {name!r}{hint_for(name, known, cls)}")
        init(self, **{name: as_given(value, known[name]) for name, value in settings.items()})

    cls.__init__ = checked_init
    return cls


class _Settings:
    """The conversions and checks of a config, whose settings are those of the records that it inherits."""

    def __post_init__(self) -> None:
        for field in _fields(self):
            check_type(field.name, getattr(self, field.name), field.type)
            check_range(field, getattr(self, field.name))
            check_text(field.name, getattr(self, field.name))
        for record in type(self).__mro__:
            if "check" in vars(record):
                vars(record)["check"](self)
        self._check_combinations()

    def _check_combinations(self) -> None:
        """Raises a ValueError for settings of several records that cannot be combined."""

    def part(self, record: type[T], **more: Any) -> T:
        """Returns a record of that class with the settings of the same names, and `more`."""
        assert is_dataclass(record), f"{record} is not a dataclass"
        own = {field.name for field in _fields(self)}
        return record(**{field.name: getattr(self, field.name) for field in fields(record) if field.name in own} | more)

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> Self:
        """Creates a config from parsed YAML or JSON.

        Raises a TypeError that names the nearest field for a key that is none, and a ValueError for other types.
        """
        kinds = {field.name: field.type for field in _fields(cls)}
        read = {name: as_read(value, kinds[name]) for name, value in settings.items() if name in kinds}
        return cls(**{**settings, **read})

    def __repr__(self) -> str:
        """Returns an expression that creates the config, with the settings that differ from their defaults."""
        settings, defaults = self.to_dict(), type(self)().to_dict()
        changed = (f"{name}={value!r}" for name, value in settings.items() if value != defaults[name])
        return f"{type(self).__name__}({', '.join(changed)})"

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings as plain data, functions as "module:function" references."""
        settings = {field.name: getattr(self, field.name) for field in _fields(self)}
        return {name: reference_to(x) if callable(x) else copy.deepcopy(x) for name, x in settings.items()}


@_refusing_unknown_fields
@dataclass(frozen=True, kw_only=True, repr=False)
class GRPOConfig(
    # The fields of the last one come first.
    _Settings,
    RolloutLogSettings,
    ReportingSettings,
    CheckpointSettings,
    EvaluationSettings,
    DecodingSettings,
    UpdateSettings,
    MeshSettings,
    OptimizerSettings,
    LearningRateSettings,
    AdapterSettings,
    VisionSettings,
    RewardSettings,
    ReferenceSettings,
    EntropySettings,
    MaskSettings,
    AdvantageSettings,
    LossSettings,
    RolloutSamplingSettings,
    PromptSettings,
    EpisodeSettings,
    RolloutSettings,
    PromptOrderSettings,
    RunSettings,
):
    """Settings of a GRPO run, inherited from the records of its parts. Names are TRL's where the concept is the same.

    One optimizer step trains on `prompts_per_step` prompts with `num_generations` completions each.
    """

    def _check_combinations(self) -> None:
        if self.drop_last and self.filter_zero_variance:
            raise ValueError("drop_last and filter_zero_variance cannot be combined: rollouts would vary in size")
        for name in ("sync_ref_model", "offload_reference", "use_kl_in_reward"):
            if getattr(self, name) and self.beta == 0:
                raise ValueError(f"{name} needs a reference, and beta is 0; set beta above 0")
        if self.use_kl_in_reward and self.multi_objective_aggregation == "normalize_then_sum":
            raise ValueError(
                "use_kl_in_reward subtracts the KL from the sum of a completion's rewards, which "
                "multi_objective_aggregation 'normalize_then_sum' does not use; leave one of them out"
            )
        if self.decoding_tp > 1 and self.base_weights == "nf4":
            raise ValueError(
                f"base_weights 'nf4' are replicated on every device, and decoding_tp {self.decoding_tp} would shard "
                "them; set decoding_tp to 1, or base_weights to 'same'"
            )
        if self.max_staleness and self.rollout_correction == "none":
            raise ValueError(
                f"max_staleness {self.max_staleness} trains on completions of an earlier policy, and nothing corrects "
                "for it; set rollout_correction, e.g. to 'token_truncate'"
            )
        constraint = next((name for name in ("regex", "json_schema") if getattr(self, name) is not None), None)
        if constraint and self.rollout_correction == "none":
            raise ValueError(
                f"with {constraint} completions are sampled from another distribution than the policy, and nothing "
                "corrects for it; set rollout_correction, e.g. to 'token_truncate'"
            )
        if self.routing_replay and self.rollout_servers:
            raise ValueError(
                "routing_replay records what this process samples, and rollout_servers send no experts; set "
                "routing_replay to false, or sample here"
            )
        if self.max_staleness and self.decoding_tp > 1:
            raise ValueError(
                f"decoding_tp {self.decoding_tp} and max_staleness {self.max_staleness} cannot be combined: the "
                "collectives of decoding and of updates would wait for each other; set decoding_tp to 1"
            )


@_refusing_unknown_fields
@dataclass(frozen=True, kw_only=True, repr=False)
class SFTConfig(
    _Settings,
    ReportingSettings,
    CheckpointSettings,
    EvaluationSchedule,
    UpdateSettings,
    VisionSettings,
    MeshSettings,
    OptimizerSettings,
    LearningRateSettings,
    AdapterSettings,
    SFTSettings,
    RunSettings,
):
    """Settings of supervised fine-tuning. Names are TRL's where the concept is the same.

    One optimizer step trains on `batch_size` examples.
    """

    output_dir: str = like(RunSettings, "output_dir", default="runs/sft")
    """Run folder, local or in a bucket (s3://, gs://): config.json, metrics.jsonl, checkpoints/ and the trained model/.
    An earlier run in it is continued if it is the same run (see resume), and otherwise moved aside."""
    learning_rate: float = like(LearningRateSettings, "learning_rate", default=2e-5)
    """Peak learning rate. Adapters and small models need higher ones, e.g. 2e-4."""


RunConfig = GRPOConfig | SFTConfig


def config_class(settings: Mapping[str, Any]) -> type[GRPOConfig] | type[SFTConfig]:
    """Returns the class of the config whose settings these are, e.g. those of a run folder."""
    return SFTConfig if "assistant_only_loss" in settings else GRPOConfig


def _fields(config: Any) -> tuple[Any, ...]:
    return fields(config)
