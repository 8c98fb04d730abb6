"""Settings of episodes: how long they may be, and what becomes of tools' faults. Imports no jax."""

from dataclasses import dataclass
from typing import Literal

from groupax.settings.fields import ranged


@dataclass(frozen=True, kw_only=True)
class EpisodeSettings:
    """Limits of episodes with tools or environments. All tokens after the prompt share `max_completion_length`."""

    max_turns: int = ranged(16, 10**5, low=1)
    """Most turns that the model samples in an episode. The calls of the last one are still run."""
    max_tool_calls: int | None = ranged(None, 10**6, low=1)
    """Most tool calls of an episode; a turn that exceeds them ends it, and its calls are not run. None for no limit."""
    max_tool_turns: int | None = ranged(None, 10**6)
    """Most turns of an episode whose calls are run; a further turn with calls ends it, and they are not run. None for
    no limit."""
    max_turn_tokens: int | None = ranged(None, 10**9, low=1)
    """Most tokens of a turn; one that is cut off ends the episode, and its calls are not run. None leaves a turn all
    that is left of max_completion_length."""
    malformed_calls: Literal["tell", "end"] = "tell"
    """Handling of a tool call that cannot be read: tell the model what is wrong with it, or end the episode."""
    overlong_results: Literal["error", "end"] = "error"
    """Handling of tools' results that do not fit into max_completion_length: give the model an error in their place, if
    that fits, or end the episode."""
    max_result_kb: float = ranged(64.0, 1e6, low=0.01)
    """Longest text of a tool's result in kilobytes; the middle of a longer one is left out."""
    tool_timeout_s: float = ranged(30.0, 1e6, low=1e-3, resume="free")
    """Timeout of a tool call, and of a call of an environment, in seconds."""
    tool_workers: int = ranged(64, 10**4, low=1, resume="free")
    """Tool calls that run at the same time."""
    environment_retries: int = ranged(2, 10**3, resume="free")
    """Number of times that an episode begins again, with a new environment, after its environment failed. Then it is
    left out of its group's comparison and of the loss."""
