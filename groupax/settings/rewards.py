"""Settings of how reward functions are called. Imports no jax."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """How reward functions are called. The fields are those of `GRPOConfig` with the same names.

    Attributes:
        reward_batch: "group" makes one call per group, during decoding; "rollout" one call for all completions of a
            rollout, after decoding.
        reward_concurrency: Number of concurrent calls of one sync function.
        reward_workers: Number of processes for sync functions; 0 calls them in threads.
        reward_workers_on: "processes" of this machine, or "ray" for tasks on a cluster.
        reward_timeout_s: Longest call; None for no limit.
        reward_retries: Number of retries of a call that raised or timed out.
        reward_errors: "none" gives the completions of a failed call no reward, "raise" stops the run.
    """

    reward_batch: str = "group"
    reward_concurrency: int = 1
    reward_workers: int = 0
    reward_workers_on: str = "processes"
    reward_timeout_s: float | None = 300.0
    reward_retries: int = 0
    reward_errors: str = "none"
