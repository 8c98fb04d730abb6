"""groupax: GRPO post-training in JAX.

The public names. Each is loaded when it is first used, so that `import groupax` is quick and pulls no jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupax.core.config import GRPOConfig as GRPOConfig
    from groupax.core.config import SFTConfig as SFTConfig
    from groupax.core.errors import InfrastructureError as InfrastructureError
    from groupax.core.settings.sampling import SamplingParams as SamplingParams
    from groupax.engine.engine import Engine as Engine
    from groupax.episodes.custom import RolloutFunction as RolloutFunction
    from groupax.episodes.custom import RolloutRequest as RolloutRequest
    from groupax.episodes.custom import Trajectory as Trajectory
    from groupax.episodes.traces import TraceFile as TraceFile
    from groupax.episodes.traces import read_traces as read_traces
    from groupax.episodes.traces import recorded_rollouts as recorded_rollouts
    from groupax.episodes.traces import trace_reward as trace_reward
    from groupax.models.lora import LoRAConfig as LoRAConfig
    from groupax.models.weights.checkpoint import Model as Model
    from groupax.models.weights.checkpoint import add_adapter as add_adapter
    from groupax.models.weights.checkpoint import init_model as init_model
    from groupax.models.weights.checkpoint import load_model as load_model
    from groupax.models.weights.saving import save_adapter as save_adapter
    from groupax.models.weights.saving import save_model as save_model
    from groupax.runs.trainer import TrainResult as TrainResult
    from groupax.satellites.environments.mcp_tools import mcp as mcp
    from groupax.satellites.environments.openenv import openenv as openenv
    from groupax.satellites.environments.program import program as program
    from groupax.satellites.environments.python_tool import python_tool as python_tool
    from groupax.satellites.replay.bisect import bisect_run as bisect_run
    from groupax.satellites.replay.session import replay_step as replay_step
    from groupax.sft import SFTResult as SFTResult
    from groupax.sft import SFTTrainer as SFTTrainer
    from groupax.tools.tool import Step as Step
    from groupax.tools.tool import tool as tool
    from groupax.trainer import GRPOTrainer as GRPOTrainer

__version__ = "0.1.0"

_HOME = {
    "Engine": "groupax.engine.engine",
    "GRPOConfig": "groupax.core.config",
    "GRPOTrainer": "groupax.trainer",
    "InfrastructureError": "groupax.core.errors",
    "LoRAConfig": "groupax.models.lora",
    "Model": "groupax.models.weights.checkpoint",
    "RolloutFunction": "groupax.episodes.custom",
    "RolloutRequest": "groupax.episodes.custom",
    "SFTConfig": "groupax.core.config",
    "SFTResult": "groupax.sft",
    "SFTTrainer": "groupax.sft",
    "SamplingParams": "groupax.core.settings.sampling",
    "Step": "groupax.tools.tool",
    "Trajectory": "groupax.episodes.custom",
    "TraceFile": "groupax.episodes.traces",
    "TrainResult": "groupax.runs.trainer",
    "add_adapter": "groupax.models.weights.checkpoint",
    "bisect_run": "groupax.satellites.replay.bisect",
    "init_model": "groupax.models.weights.checkpoint",
    "load_model": "groupax.models.weights.checkpoint",
    "mcp": "groupax.satellites.environments.mcp_tools",
    "openenv": "groupax.satellites.environments.openenv",
    "program": "groupax.satellites.environments.program",
    "python_tool": "groupax.satellites.environments.python_tool",
    "read_traces": "groupax.episodes.traces",
    "recorded_rollouts": "groupax.episodes.traces",
    "replay_step": "groupax.satellites.replay.session",
    "save_adapter": "groupax.models.weights.saving",
    "save_model": "groupax.models.weights.saving",
    "tool": "groupax.tools.tool",
    "trace_reward": "groupax.episodes.traces",
}

__all__ = [*_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'groupax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__"])
