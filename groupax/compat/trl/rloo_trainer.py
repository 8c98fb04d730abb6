"""TRL's `RLOOTrainer`: GRPO's with another baseline, ratios of whole completions, and the KL in the reward."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from groupax.compat.trl.config import RLOOConfig
from groupax.compat.trl.trainer import GRPOTrainer


class RLOOTrainer(GRPOTrainer):
    """TRL's trainer of REINFORCE with a leave-one-out baseline.

    The arguments are those of `GRPOTrainer`, without tools, environments and `rollout_func`.

    Raises:
        ValueError: An argument or a setting is not supported by groupax.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        args: RLOOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        super().__init__(
            model,
            reward_funcs,
            args or RLOOConfig(f"{Path(str(getattr(model, 'name', model))).name}-RLOO"),
            train_dataset,
            eval_dataset,
            processing_class,
            reward_processing_classes,
            callbacks,
            optimizers,
            quantization_config,
            peft_config,
        )
