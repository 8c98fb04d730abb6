"""The contract of reward functions: their arguments, and their return values as scores. Imports no jax.

See docs/rewards.md for the contract with examples.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice, pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np

from groupax.core.terminal.printable import printable
from groupax.core.types import Rollout, TrainerState

# Arguments of a function that the run supplies, in addition to the columns of the dataset.
ARGUMENTS = ("prompts", "completions", "completion_ids", "completion_mask", "turns", "batch")
ARGUMENTS += ("trainer_state", "log_extra", "log_metric")
ENVIRONMENTS = "environments"  # of functions in this process, for completions that have environments
MAX_REWARD = 1e15  # beyond it, float64 does not tell rewards apart that differ by 0.1, and squares overflow float32


@runtime_checkable
class ModelReward(Protocol):
    """A reward that is computed on the devices, and is therefore called by the trainer itself, after the rollout."""

    name: str

    def rewards(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        """Returns the reward of each completion, [B]."""
        ...


@dataclass(frozen=True)
class Reward:
    """A reward function with its name in the metrics and the arguments that it takes."""

    name: str  # a name that is unique in the run
    function: Callable[..., Any]  # the function; for a reward model its `rewards`
    takes: frozenset[str] | None = None  # names of its keyword arguments; None if it takes any
    is_async: bool = False  # whether calling it returns a coroutine
    on_device: bool = False  # whether it is a `ModelReward`
    columns: Mapping[str, str] = field(default_factory=dict)  # dataset column by argument, where the names differ

    @property
    def takes_environments(self) -> bool:
        """True if the function may use the environments of episodes."""
        return not self.on_device and (self.takes is None or ENVIRONMENTS in self.takes)


@dataclass(frozen=True)
class Scores:
    """The result of one call of a reward function."""

    values: np.ndarray  # reward of each completion, [B] float64; NaN where the function does not apply or failed
    # rewards of each completion's turns, whose sum is its reward; None where there is one for the whole
    by_turn: Sequence[tuple[float, ...] | None]
    num_failures: int = 0  # number of completions without a reward because of a fault
    error: str = ""  # description of the first fault; empty if there is none
    # columns for the rollout log, with one value per completion (`log_extra`)
    extra: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)  # numbers for the metrics (`log_metric`)


def arguments_for(
    reward: Reward, rollouts: Sequence[Rollout], state: TrainerState, loggers: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the keyword arguments of a call for these completions. Lists have one entry per completion.

    A dataset column that has the name of another argument, such as `completions`, does not replace it.
    """
    columns = {name: [row.example[name] for row in rollouts] for name in rollouts[0].example if name != "prompt"}
    examples = {row.prompt_index: row.example for row in rollouts}.values()
    arguments: dict[str, Any] = dict(columns)
    arguments |= {name: columns[column] for name, column in reward.columns.items() if column in columns}
    arguments |= {
        "prompts": [row.prompt for row in rollouts],
        "completions": [row.completion for row in rollouts],
        "batch": {name: [example[name] for example in examples] for name in rollouts[0].example},
        "completion_ids": [row.completion_ids.tolist() for row in rollouts],
        "completion_mask": [row.mask.tolist() for row in rollouts],
        "turns": [row.turns for row in rollouts],
        "trainer_state": state,
        **loggers,
    }
    if any(row.environment is not None for row in rollouts):
        arguments[ENVIRONMENTS] = [row.environment for row in rollouts]
    return {name: value for name, value in arguments.items() if reward.takes is None or name in reward.takes}


def no_scores(rollouts: Sequence[Rollout], error: str) -> Scores:
    """Returns the scores of a call that failed."""
    return Scores(np.full(len(rollouts), np.nan), [None] * len(rollouts), len(rollouts), error)


def checked_scores(name: str, returned: Any, rollouts: Sequence[Rollout]) -> Scores:
    """Returns the rewards that a function returned, one number per completion, or a list of one per turn.

    None, and unusable values, which are counted as failures, become NaN.

    Raises:
        ValueError: It returned something else than a list with one value per completion.
    """
    if isinstance(returned, (str, bytes, Mapping)) or not hasattr(returned, "__iter__"):
        raise ValueError(
            f"reward function {name!r} returned {_shown(returned)}; it must return a list with one number (or None) "
            f"for each completion, here {len(rollouts)}"
        )
    values = list(islice(returned, len(rollouts) + 1))
    if len(values) != len(rollouts):
        num = len(returned) if hasattr(returned, "__len__") else len(values)
        raise ValueError(
            f"reward function {name!r} returned {_counted(num, 'value')} for {_counted(len(rollouts), 'completion')}; "
            "it must return one per completion, in their order"
        )
    rewards = np.full(len(values), np.nan)
    by_turn: list[tuple[float, ...] | None] = [None] * len(values)
    faults = []
    for index, (value, rollout) in enumerate(zip(values, rollouts, strict=True)):
        if value is None:
            continue
        numbers, num_turns = tuple(map(_number, value)) if _is_list(value) else (_number(value),), len(rollout.turns)
        where = f"completion {index} ({rollout.text[:80]!r})"
        if _is_list(value) and len(numbers) != num_turns:
            faults.append(
                f"reward function {name!r} returned a list of {len(numbers)} for {where}, which has "
                f"{_counted(num_turns, 'turn')}; return one number for each turn, or one number for the whole"
            )
        elif not abs(sum(numbers)) <= MAX_REWARD:
            faults.append(
                f"reward function {name!r} returned {_shown(value)} for {where}; return a finite number of at most "
                f"{MAX_REWARD:g}, or None where the function does not apply"
            )
        else:
            rewards[index], by_turn[index] = sum(numbers), numbers if _is_list(value) else None
    return Scores(rewards, by_turn, len(faults), "\n".join(faults[:1]))


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) == 1


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


def split_scores(scores: Scores, groups: Sequence[Sequence[Rollout]]) -> list[Scores]:
    """Splits the scores of all completions by group; failures and metrics stay with the first one."""
    edges = accumulate((len(group) for group in groups), initial=0)
    return [
        replace(
            scores,
            values=scores.values[start:end],
            by_turn=scores.by_turn[start:end],
            num_failures=scores.num_failures if start == 0 else 0,
            error=scores.error if start == 0 else "",
            extra={name: values[start:end] for name, values in scores.extra.items()},
            metrics=scores.metrics if start == 0 else {},
        )
        for start, end in pairwise(edges)
    ]


def with_scores(group: Sequence[Rollout], scores: Mapping[str, Scores]) -> list[Rollout]:
    """Returns the completions of a group with the scores of each reward by its name."""
    extra = {column: values for score in scores.values() for column, values in score.extra.items()}
    rows = []
    for index, row in enumerate(group):
        # an episode whose environment failed is not compared with the others
        values = {name: np.nan if row.is_failure else score.values[index] for name, score in scores.items()}
        by_turn = {name: score.by_turn[index] for name, score in scores.items()}
        by_turn = {} if row.is_failure else {name: each for name, each in by_turn.items() if each is not None}
        rows.append(
            replace(
                row,
                rewards={name: None if np.isnan(value) else float(value) for name, value in values.items()},
                turns=tuple(
                    replace(turn, rewards={name: each[number] for name, each in by_turn.items()}) if by_turn else turn
                    for number, turn in enumerate(row.turns)
                ),
                advantage=0.0,
                environment=None,
                extra={column: each[index] for column, each in extra.items() if index < len(each)},
            )
        )
    return rows


def reward_matrix(names: Sequence[str], rollouts: Sequence[Rollout]) -> np.ndarray:
    """Returns the rewards of scored completions, [B, K] float64 with NaN where a function does not apply."""
    values = [[row.rewards[name] for name in names] for row in rollouts]
    found = np.array([[math.nan if value is None else value for value in row] for row in values], np.float64)
    return found.reshape(len(rollouts), len(names))  # also if there are none
