"""The contract of reward functions: their arguments and their return values. Imports no jax.

See docs/rewards.md for the contract with examples.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from groupax.terminal.printable import printable
from groupax.types import Rollout, TrainerState

BATCH_ARGS = ("prompts", "completions", "completion_ids", "completion_mask", "batch")
SINGLE_ARGS = ("prompt", "completion", "completion_ids", "completion_mask")
ENVIRONMENTS = "environments"  # of functions in this process, for completions that have environments
EXTRA_ARGS = ("trainer_state", "log_extra", "log_metric")


@runtime_checkable
class ModelReward(Protocol):
    """A reward that is computed on the devices, and is therefore called by the trainer itself, after the rollout."""

    name: str

    def rewards(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        """Returns the reward of each completion, [B]."""
        ...


@dataclass(frozen=True)
class Reward:
    """A reward function with its name in the metrics and the arguments that it takes.

    Attributes:
        name: A name that is unique in the run.
        function: The function; for a reward model its `rewards`.
        takes: Names of its keyword arguments; None if it takes any.
        per_completion: Whether it is called with one completion at a time and returns a number.
        is_async: Whether calling it returns a coroutine.
        on_device: Whether it is a `ModelReward`.
        columns: Dataset column by argument, where the names differ.
    """

    name: str
    function: Callable[..., Any]
    takes: frozenset[str] | None = None
    per_completion: bool = False
    is_async: bool = False
    on_device: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)

    @property
    def takes_environments(self) -> bool:
        """True if the function may use the environments of episodes."""
        return not self.on_device and (self.takes is None or ENVIRONMENTS in self.takes)


@dataclass(frozen=True)
class Scores:
    """The result of one call of a reward function.

    Attributes:
        values: Reward of each completion, [B] float64; NaN where the function does not apply or failed.
        num_failures: Number of completions without a reward because of a fault.
        error: Description of the first fault; empty if there is none.
        extra: Columns for the rollout log, with one value per completion (`log_extra`).
        metrics: Numbers for the metrics (`log_metric`).
    """

    values: np.ndarray
    num_failures: int = 0
    error: str = ""
    extra: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


def arguments_for(
    reward: Reward, rollouts: Sequence[Rollout], state: TrainerState, loggers: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the keyword arguments of a call for these completions. Lists have one entry per completion.

    A dataset column that has the name of another argument, such as `completions`, does not replace it.
    """
    columns = {name: [row.example[name] for row in rollouts] for name in rollouts[0].example if name != "prompt"}
    prompts, completions = [row.prompt for row in rollouts], [row.completion for row in rollouts]
    arguments: dict[str, Any] = dict(columns)
    arguments |= {name: columns[column] for name, column in reward.columns.items() if column in columns}
    if reward.per_completion:
        arguments |= {"prompt": prompts, "completion": completions}
    else:
        examples = {row.prompt_index: row.example for row in rollouts}.values()
        batch = {name: [example[name] for example in examples] for name in rollouts[0].example}
        arguments |= {"prompts": prompts, "completions": completions, "batch": batch}
    arguments |= {"completion_ids": [row.completion_ids.tolist() for row in rollouts]}
    arguments |= {"completion_mask": [row.mask.tolist() for row in rollouts]}
    arguments |= {"trainer_state": state, **loggers}
    if any(row.environment is not None for row in rollouts):
        arguments |= {ENVIRONMENTS: [row.environment for row in rollouts]}
    if reward.takes is None:
        return arguments
    return {name: value for name, value in arguments.items() if name in reward.takes}


def split_per_completion(arguments: Mapping[str, Any], num_completions: int) -> list[dict[str, Any]]:
    """Returns the arguments for each completion, for a function that takes one at a time."""
    return [
        {name: value if name in EXTRA_ARGS else value[index] for name, value in arguments.items()}
        for index in range(num_completions)
    ]


def checked_values(name: str, returned: Any, rollouts: Sequence[Rollout]) -> tuple[np.ndarray, list[str]]:
    """Returns a function's rewards, [B] float64 with NaN for None and for unusable values, and errors about the latter.

    Raises:
        ValueError: It returned something else than a list with one value per completion.
    """
    if isinstance(returned, (str, bytes, Mapping)) or not hasattr(returned, "__iter__"):
        raise ValueError(
            f"reward function {name!r} returned {_shown(returned)}; it must return a list with one number (or None) "
            f"for each of the {len(rollouts)} completions"
        )
    values = list(returned)
    if len(values) != len(rollouts):
        raise ValueError(
            f"reward function {name!r} returned {len(values)} values for {len(rollouts)} completions; it must return "
            "one per completion, in their order"
        )
    rewards = np.full(len(values), np.nan)
    faults = []
    for index, value in enumerate(values):
        if value is None:
            continue
        rewards[index] = _number(value)
        if np.isnan(rewards[index]):
            faults.append(
                f"reward function {name!r} returned {_shown(value)} for completion {index} "
                f"({rollouts[index].text[:80]!r}); return a finite number, or None where the function does not apply"
            )
    return rewards, faults


def _number(value: Any) -> float:
    """Returns a finite number as a float, and NaN for anything else."""
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):  # an integer with 400 digits, for one
        return math.nan
    return number if math.isfinite(number) else math.nan


def _shown(value: Any) -> str:
    try:
        return printable(f"{value!r:.200}")
    except Exception:  # noqa: BLE001 - raised by user code, or by Python itself for an integer with 5,000 digits
        return f"a value of type {type(value).__name__}"


def rewards_by_name(names: Sequence[str], rewards: np.ndarray) -> dict[str, float | None]:
    """Returns one completion's rewards, [K] with NaN where a function does not apply, by name with None instead."""
    return {name: None if np.isnan(value) else float(value) for name, value in zip(names, rewards, strict=True)}


def reward_matrix(names: Sequence[str], rollouts: Sequence[Rollout]) -> np.ndarray:
    """Returns the rewards of scored completions, [B, K] float64 with NaN where a function does not apply."""
    values = [[row.rewards[name] for name in names] for row in rollouts]
    return np.array([[math.nan if value is None else value for value in row] for row in values], np.float64)
