"""Settings of calls of reward functions. Imports no jax."""

from dataclasses import dataclass
from typing import Literal

from groupax.settings.fields import ranged, setting


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """Scope, concurrency, timeouts and retries of reward calls."""

    reward_scope: Literal["group", "rollout"] = setting("group", resume="free")
    """Completions of one call of a reward function: a group, while other groups are decoded, or the whole rollout."""
    reward_concurrency: int = ranged(1, 10**4, low=1, resume="free")
    """Concurrent calls of one synchronous reward function; above 1 the function must be thread-safe."""
    reward_workers: int = ranged(0, 10**4, resume="free")
    """Worker processes for synchronous reward functions; 0 runs them in threads."""
    reward_workers_on: Literal["processes", "ray"] = setting("processes", resume="free")
    """Kind of reward workers: processes of this machine, or tasks of a Ray cluster, the running one or a new local
    one."""
    reward_timeout_s: float | None = ranged(300.0, 1e6, low=1e-3, resume="free")
    """Timeout of a reward call in seconds; None for none."""
    reward_retries: int = ranged(0, 10**3, resume="free")
    """Retries of a reward call that raised or timed out."""
    reward_errors: Literal["none", "raise"] = setting("none", resume="free")
    """On a failed reward call, give its completions no reward and count them, or stop the run."""

    def check(self) -> None:
        """Raises a ValueError for a Ray cluster without workers."""
        if self.reward_workers_on == "ray" and not self.reward_workers:
            raise ValueError(
                "reward_workers_on is 'ray', but reward_workers is 0, which calls reward functions in threads of this "
                "process; set the number of workers, e.g. reward_workers=16"
            )
