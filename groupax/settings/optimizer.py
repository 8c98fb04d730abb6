"""Settings of the optimizer and of the learning rate. Imports no jax."""

from dataclasses import dataclass
from typing import Literal

from groupax.settings.fields import ranged, setting

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
