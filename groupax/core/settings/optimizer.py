"""Settings of what is trained and how: learning rate, optimizer, LoRA adapters. Imports no jax."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from groupax.core.settings.fields import patterned, ranged, setting

OptimizerName = Literal["adamw", "adafactor", "lion", "muon", "sgd"]
LRScheduler = Literal["constant", "linear", "cosine"]
WeightDecayScope = Literal["matrices", "all"]


@dataclass(frozen=True, kw_only=True)
class LearningRateSettings:
    """Learning rate over a run."""

    learning_rate: float = ranged(1e-6, 1e3)
    """Peak learning rate. Small models trained from scratch need much higher ones, e.g. 2e-4."""
    learning_rate_end: float = ranged(0.0, 1e3)
    """Final learning rate of the schedules "linear" and "cosine"."""
    lr_scheduler_type: LRScheduler = "linear"
    """Learning rate schedule after warm-up."""
    warmup_steps: int = ranged(0, 10**9)
    """Steps of linear warm-up."""
    warmup_ratio: float = ranged(0.0, 1)
    """Warm-up as a fraction of the run, instead of warmup_steps."""

    def check(self) -> None:
        """Raises a ValueError if the warm-up is given twice."""
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) and warmup_ratio ({self.warmup_ratio}) are both set; "
                "leave one at 0"
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The optimizer, weight decay and gradient clipping."""

    optimizer: OptimizerName = setting("adamw", resume="fixed")
    """Optimizer of the trained weights, over float32 master weights."""
    adam_beta1: float = ranged(0.9, 1, is_open=True)
    """Decay rate of the first moment of adamw, lion and muon's adamw."""
    adam_beta2: float = ranged(0.999, 1, is_open=True)
    """Decay rate of the second moment of adamw, lion and muon's adamw."""
    adam_epsilon: float = ranged(1e-8, 1)
    """Constant added to adamw's denominator."""
    momentum: float = ranged(0.0, 1, resume="fixed")
    """Momentum of sgd."""
    weight_decay: float = ranged(0.0, 1e3)
    """Decoupled weight decay."""
    weight_decay_scope: WeightDecayScope = setting("matrices", resume="fixed")
    """Weights that decay: matrices only, or norms and biases too."""
    max_grad_norm: float = ranged(1.0, 1e9, resume="fixed_zero")
    """Global norm to which gradients are clipped; 0 does not clip."""


BaseWeights = Literal["same", "nf4"]
LoRABias = Literal["none", "all", "lora_only"]


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """A LoRA adapter and the weights of its base model."""

    lora_r: int = ranged(0, 2**16)
    """Rank of a LoRA adapter, the only thing that is trained then; 0 trains all weights. See docs/lora.md."""
    lora_alpha: float = ranged(32.0, 1e6, low=1e-6)
    """The output of an adapter is scaled by lora_alpha / lora_r."""
    lora_dropout: float = ranged(0.0, 1, is_open=True)
    """Dropout rate of the inputs of an adapter in training."""
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    """Modules to adapt, by the ends of their names, e.g. q_proj v_proj; "all-linear" is every matrix of the layers."""
    lora_bias: LoRABias = "none"
    """Biases that are trained too: none, all, or those of the adapted modules."""
    lora_modules_to_save: tuple[str, ...] = ()
    """Modules that are trained in full, e.g. lm_head."""
    use_rslora: bool = False
    """Scale the output of an adapter by lora_alpha / sqrt(lora_r)."""
    use_dora: bool = False
    """Train the norms of the adapted matrices' rows too (DoRA)."""
    lora_rank_pattern: Mapping[str, int] = patterned(2**16, low=1)
    """Other ranks of some modules, by the ends of their names, e.g. q_proj 4 down_proj 32."""
    lora_alpha_pattern: Mapping[str, float] = patterned(1e6, low=1e-6)
    """Other values of lora_alpha of some modules, by the ends of their names."""
    lora_layers_to_transform: tuple[int, ...] = ranged((), 2**31 - 1)
    """Indices of the layers to adapt, from 0; by default all."""
    lora_layers_pattern: tuple[str, ...] = ()
    """Names of the lists of layers that have these indices, e.g. layers; by default any."""
    init_lora_weights: str = "zero"
    """Initial weights of an adapter: changes of zero, or "pissa" or "pissa_niter_N" for those of PiSSA, with a base
    that lacks them."""
    base_weights: BaseWeights = "same"
    """Precision of the base model's weights: as stored, or quantized to 4 bits while loading ("nf4")."""

    def check(self) -> None:
        """Raises a ValueError for settings of an adapter without an adapter."""
        own = [each for each in fields(AdapterSettings) if each.name not in ("lora_r", "base_weights")]
        defaults = AdapterSettings()
        changed = [each.name for each in own if getattr(self, each.name) != getattr(defaults, each.name)]
        if not self.lora_r and changed:
            raise ValueError(f"{' and '.join(changed)} without an adapter: set lora_r, e.g. to 16")
