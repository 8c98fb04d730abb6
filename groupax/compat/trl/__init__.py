"""TRL's trainers and configs, implemented with groupax (interface of TRL 1.16).

The other names that scripts import of TRL, such as `ModelConfig`, `TrlParser` and `get_dataset`, are those of the
installed TRL itself.
"""

import importlib.util
from types import ModuleType
from typing import Any

from groupax.compat.trl.config import GRPOConfig as GRPOConfig
from groupax.compat.trl.config import RLOOConfig as RLOOConfig
from groupax.compat.trl.rollout_func import generate_rollout_completions as generate_rollout_completions
from groupax.compat.trl.sft import SFTConfig as SFTConfig
from groupax.compat.trl.sft import SFTTrainer as SFTTrainer
from groupax.compat.trl.trainer import GRPOTrainer as GRPOTrainer
from groupax.compat.trl.trainer import RLOOTrainer as RLOOTrainer

OF_TRL = ("ModelConfig", "DatasetMixtureConfig")  # configs that belong to no trainer


def __getattr__(name: str) -> Any:
    """Returns a module of this package, or what the installed TRL has under a name.

    Raises:
        ImportError: It is a trainer of TRL or belongs to one, or TRL is not installed.
        AttributeError: TRL does not have it.
    """
    if name.startswith("_"):
        raise AttributeError(f"groupax.compat.trl has no {name}")
    if importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    if name.endswith(("Trainer", "Callback", "Config")) and name not in OF_TRL:
        raise ImportError(
            f"groupax.compat.trl has no {name}, but GRPOTrainer, RLOOTrainer and SFTTrainer with their configs; leave "
            "it out, or train with trl itself and continue here with the model that it saves"
        )
    try:
        trl = importlib.import_module("trl")
    except ImportError as error:
        raise ImportError(f"{name} is TRL's own, and groupax.compat.trl passes it on: pip install trl") from error
    value = getattr(trl, name)
    if isinstance(value, ModuleType):
        raise AttributeError(f"groupax.compat.trl has no module {name}")
    return value
