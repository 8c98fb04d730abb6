"""`GRPOConfig`: every setting of a run, validated when it is made. Imports no jax."""

import difflib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar

from groupax.objective.settings import ImportanceSamplingLevel, KLEstimator, LossType

T = TypeVar("T")


def nearest(name: str, known: Iterable[str]) -> str:
    """The text "; did you mean ...?" for the known names nearest to an unknown one, or nothing."""
    matches = difflib.get_close_matches(name, list(known), n=2)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


def _refusing_unknown_fields(cls: type[T]) -> type[T]:
    init = cls.__init__
    known = [field.name for field in fields(cls)]  # pyright: ignore[reportArgumentType]

    @functools.wraps(init)
    def checked_init(self: T, **settings: Any) -> None:
        for name in settings:
            if name not in known:
                raise TypeError(f"{cls.__name__} has no field {name!r}{nearest(name, known)}")
        init(self, **settings)

    cls.__init__ = checked_init
    return cls


@_refusing_unknown_fields
@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """Settings of a GRPO run. Names are TRL's where the concept is the same.

    One optimizer step trains on `prompts_per_step` prompts with `num_generations` completions each.
    """

    output_dir: str = "runs/grpo"
    """The run's folder: config.json, metrics.jsonl, rollouts/ and the trained model/. An earlier run is moved aside."""
    seed: int = 0
    """Of data order and sampling. The same seed gives the same run on the same machine."""

    # How long
    num_train_epochs: float = 3.0
    """Passes over the dataset; ignored if max_steps is set."""
    max_steps: int = -1
    """Optimizer steps; -1 follows num_train_epochs."""

    # The batch
    prompts_per_step: int = 8
    """Prompts per optimizer step."""
    num_generations: int = 8
    """Completions per prompt: the group whose rewards are compared."""
    updates_per_rollout: int = 1
    """Optimizer steps per rollout; a rollout then samples prompts_per_step times as many prompts."""
    num_iterations: int = 1
    """Passes over each rollout; more than 1 trains off policy, within the clip range."""
    micro_batch_tokens: int | None = None
    """Tokens per device that go through the model at once in training; None chooses for the device."""

    # Prompts and completions
    max_prompt_length: int | None = None
    """Longest prompt in tokens; None leaves what the model's context has beside max_completion_length."""
    prompt_overflow: Literal["error", "drop", "truncate_left"] = "error"
    """What happens to a longer prompt: stop, leave it out, or keep its end."""
    max_completion_length: int = 256
    """Longest completion in tokens."""
    chat_template: str | None = None
    """A chat template for a tokenizer without one: a built-in name (chatml, plain) or a file."""

    # Sampling
    temperature: float = 1.0
    """Divides the logits, in sampling and in training alike."""
    top_k: int = 0
    """Sample from the k likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Sample from the fewest tokens that hold this mass; 1 is off."""
    min_p: float = 0.0
    """Sample from tokens at least this fraction as likely as the likeliest; 0 is off."""

    # Objective
    loss_type: LossType = "dapo"
    """How token losses are aggregated; see docs/algorithm.md."""
    beta: float = 0.0
    """Weight of the KL to the starting model; 0 loads no reference."""
    epsilon: float = 0.2
    """The ratio is clipped to at least 1 - epsilon."""
    epsilon_high: float | None = None
    """The ratio is clipped to at most 1 + epsilon_high; None takes epsilon."""
    delta: float | None = None
    """Upper bound of the ratio for negative advantages too (two-sided clipping); None for none."""
    importance_sampling_level: ImportanceSamplingLevel = "token"
    """One ratio per token, or one per completion (GSPO)."""
    kl_estimator: KLEstimator = "k3"
    """How the KL is estimated."""
    use_bias_correction_kl: bool = True
    """Multiply the KL estimate by the ratio, which makes k3's gradient exact."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the rewards' standard deviation in the group, in the batch, or not."""
    reward_weights: tuple[float, ...] | None = None
    """One weight per reward function; None weighs all 1."""
    mask_truncated_completions: bool = False
    """Leave completions that hit max_completion_length out of the loss."""

    # Optimizer
    learning_rate: float = 1e-6
    """Peak learning rate. Small models trained from scratch need far more, e.g. 2e-4."""
    learning_rate_end: float = 0.0
    """Where "linear" and "cosine" end."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"
    """The schedule after warm-up."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    adam_beta1: float = 0.9
    """AdamW's first-moment decay."""
    adam_beta2: float = 0.999
    """AdamW's second-moment decay."""
    adam_epsilon: float = 1e-8
    """AdamW's denominator floor."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this global norm; 0 does not clip."""

    # Compute
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the forward pass; "auto" is float32 on CPU and bfloat16 elsewhere. Master weights are float32 always."""
    gradient_checkpointing: Literal["none", "full"] = "none"
    """Recompute each layer in the backward pass to save memory."""
    max_concurrent_rows: int = 256
    """Most completions decoded at once."""

    # Evaluation
    eval_steps: int = 0
    """Evaluate on eval_dataset every so many steps; 0 never does."""
    eval_temperature: float = 0.0
    """Sampling temperature in evaluation; 0 is greedy."""

    # Reporting
    logging_steps: int = 1
    """Write metrics (means over these steps) and rollouts every so many steps."""
    progress_bar: Literal["rich", "tqdm", "json", "none"] = "rich"
    """What is shown while training."""
    log_completions: bool = True
    """Show a sample group now and then, and keep logged steps' rollouts in the run folder."""

    def __post_init__(self) -> None:
        at_least = {
            "prompts_per_step": 1,
            "updates_per_rollout": 1,
            "num_iterations": 1,
            "max_completion_length": 1,
            "logging_steps": 1,
            "max_concurrent_rows": 1,
            "epsilon": 0,
            "beta": 0,
            "learning_rate": 0,
            "learning_rate_end": 0,
            "max_grad_norm": 0,
            "warmup_steps": 0,
            "weight_decay": 0,
            "eval_steps": 0,
            "eval_temperature": 0,
            "top_k": 0,
        }
        for name, limit in at_least.items():
            if not getattr(self, name) >= limit:
                raise ValueError(f"{name} must be at least {limit}, got {getattr(self, name)}")
        for field in fields(self):
            _check_choice(field.name, getattr(self, field.name), field.type)
        if self.num_generations < 2:
            raise ValueError(
                f"num_generations is {self.num_generations}; a group needs at least 2 completions to compare"
            )
        if self.temperature <= 0:
            raise ValueError(
                f"temperature must be above 0 in training, got {self.temperature}: greedy completions of one prompt "
                "are all the same, which leaves nothing to compare"
            )
        if self.max_steps == 0 or self.max_steps < -1:
            raise ValueError(f"max_steps must be -1 (follow num_train_epochs) or at least 1, got {self.max_steps}")
        if self.max_steps == -1 and not self.num_train_epochs > 0:
            raise ValueError(f"num_train_epochs must be above 0, got {self.num_train_epochs}")
        if not 0 < self.top_p <= 1 or not 0 <= self.min_p < 1:
            raise ValueError(f"top_p must be in (0, 1] and min_p in [0, 1), got {self.top_p} and {self.min_p}")
        for name in ("max_prompt_length", "micro_batch_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 or None, got {value}")

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> "GRPOConfig":
        """A config from parsed YAML or JSON; lists become tuples.

        Raises:
            TypeError: a key is not a field; names the nearest one.
        """
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()
        }
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain data."""
        return asdict(self)


def _check_choice(name: str, value: Any, annotation: Any) -> None:
    choices = getattr(annotation, "__args__", ())
    if getattr(annotation, "__origin__", None) is Literal and value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
