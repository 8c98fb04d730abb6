"""Reward functions: their contract, their execution, and the built-in ones. See docs/rewards.md. Imports no jax."""

import importlib
from typing import Any

# The built-in rewards, which YAML files and the command line know by these names: their modules.
BUILTIN_REWARDS = {
    "code_tests": "groupax.rewards.code",
    "gsm8k_accuracy": "groupax.rewards.maths",
    "integer_answer": "groupax.rewards.formats",
    "math_accuracy": "groupax.rewards.maths",
    "repetition_penalty": "groupax.rewards.lengths",
    "soft_overlong": "groupax.rewards.lengths",
    "think_answer_correct": "groupax.rewards.formats",
    "think_answer_format": "groupax.rewards.formats",
    "think_format": "groupax.rewards.formats",
    "xml_count": "groupax.rewards.formats",
    "xml_format": "groupax.rewards.formats",
}
_PUBLIC = {
    "RewardError": "groupax.core.errors",
    "RewardModel": "groupax.rewards.model",
    "TrainerState": "groupax.core.types",
    "with_columns": "groupax.rewards.resolve",
    **BUILTIN_REWARDS,
}

__all__ = sorted({*_PUBLIC, "BUILTIN_REWARDS"})  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'groupax.rewards' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
