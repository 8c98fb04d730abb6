"""Settings of LoRA adapters. Imports no jax."""

from dataclasses import dataclass, fields
from typing import Literal

from groupax.settings.fields import ranged

BaseWeights = Literal["same", "int8", "float8", "nf4"]
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
    base_weights: BaseWeights = "same"
    """Precision of the base model's weights: as stored, or quantized while loading ("nf4" takes 4 bits)."""

    def check(self) -> None:
        """Raises a ValueError for settings of an adapter without an adapter."""
        own = [each for each in fields(AdapterSettings) if each.name not in ("lora_r", "base_weights")]
        changed = [each.name for each in own if getattr(self, each.name) != each.default]
        if not self.lora_r and changed:
            raise ValueError(f"{' and '.join(changed)} without an adapter: set lora_r, e.g. to 16")
