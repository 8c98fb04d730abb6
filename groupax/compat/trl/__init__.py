"""TRL's trainers, configs and arguments of scripts, implemented with groupax (interface of TRL 1.16)."""

from typing import TYPE_CHECKING, Any

from groupax.compat.trl.config import GRPOConfig as GRPOConfig
from groupax.compat.trl.config import RLOOConfig as RLOOConfig
from groupax.compat.trl.rollout_func import generate_rollout_completions as generate_rollout_completions
from groupax.compat.trl.scripts import DatasetMixtureConfig as DatasetMixtureConfig
from groupax.compat.trl.scripts import ModelConfig as ModelConfig
from groupax.compat.trl.scripts import RichProgressCallback as RichProgressCallback
from groupax.compat.trl.scripts import ScriptArguments as ScriptArguments
from groupax.compat.trl.scripts import apply_chat_template as apply_chat_template
from groupax.compat.trl.scripts import get_dataset as get_dataset
from groupax.compat.trl.scripts import get_kbit_device_map as get_kbit_device_map
from groupax.compat.trl.scripts import get_peft_config as get_peft_config
from groupax.compat.trl.scripts import get_quantization_config as get_quantization_config
from groupax.compat.trl.scripts import refusal
from groupax.compat.trl.sft import SFTConfig as SFTConfig
from groupax.compat.trl.sft import SFTTrainer as SFTTrainer
from groupax.compat.trl.trainer import GRPOTrainer as GRPOTrainer
from groupax.compat.trl.trainer import RLOOTrainer as RLOOTrainer

if TYPE_CHECKING:
    from groupax.compat.trl.parser import TrlParser as TrlParser


def __getattr__(name: str) -> Any:
    if name == "TrlParser":  # imports transformers
        from groupax.compat.trl.parser import TrlParser

        return TrlParser
    raise refusal(name)
