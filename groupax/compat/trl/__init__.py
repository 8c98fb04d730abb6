"""TRL's `GRPOConfig` and `GRPOTrainer`, implemented with groupax (interface and batches of TRL 1.16).

from groupax.compat.trl import GRPOConfig, GRPOTrainer, apply_chat_template, generate_rollout_completions
"""

from typing import Any

from groupax.compat.trl.absent import refusal
from groupax.compat.trl.config import GRPOConfig as GRPOConfig
from groupax.compat.trl.display import RichProgressCallback as RichProgressCallback
from groupax.compat.trl.rollout_func import generate_rollout_completions as generate_rollout_completions
from groupax.compat.trl.template import apply_chat_template as apply_chat_template
from groupax.compat.trl.trainer import GRPOTrainer as GRPOTrainer


def __getattr__(name: str) -> Any:
    raise refusal(name)
