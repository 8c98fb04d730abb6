"""What a reward function is, and how it is called. Imports no jax.

A reward function takes keyword arguments, each a list with one entry per completion: `prompts`, `completions`
(strings, or lists of messages where the prompts are), `completion_ids`, and every further column of the dataset.
It receives those that its signature names, or all if it takes `**kwargs`, and returns one number per completion,
None where it does not apply.
"""

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from groupax.config import nearest
from groupax.rewards.builtin import BUILTIN_REWARDS
from groupax.rollout import Rollout


@dataclass(frozen=True)
class Reward:
    """A reward function with the name that its metrics carry and the arguments that it takes.

    Attributes:
        name: unique in the run.
        function: what computes it.
        takes: the keyword arguments that it names; None if it takes any.
    """

    name: str
    function: Callable[..., Any]
    takes: frozenset[str] | None


def resolve_rewards(functions: Any, columns: Sequence[str]) -> list[Reward]:
    """The rewards of a run from what the user gave: a function, a name, or a list of them.

    Args:
        functions: callables, names of built-in rewards, or "module:function" references.
        columns: of the dataset beside the prompt; a function that requires any other argument is refused.

    Raises:
        ValueError: there is no function, one cannot be found, or one needs an argument that it cannot get.
    """
    given = list(functions) if isinstance(functions, (list, tuple)) else [functions]
    if not given:
        raise ValueError("reward_funcs is empty; give at least one function")
    rewards: list[Reward] = []
    for item in given:
        function: Any = _find(item) if isinstance(item, str) else item
        if not callable(function):
            raise ValueError(f"a reward must be a function or a name, got {function!r}")
        name = _unique(_name(function), [reward.name for reward in rewards])
        rewards.append(Reward(name, function, _takes(name, function, columns)))
    return rewards


def score(reward: Reward, rollouts: Sequence[Rollout]) -> np.ndarray:
    """The reward of each completion, [B] float64; NaN where the function returned None.

    Raises:
        ValueError: the function returned something else than one finite number or None per completion.
        Exception: whatever the function raises, with a note that names it.
    """
    arguments = {
        "prompts": [row.prompt for row in rollouts],
        "completions": [row.completion for row in rollouts],
        "completion_ids": [row.completion_ids.tolist() for row in rollouts],
    }
    arguments |= {name: [row.example[name] for row in rollouts] for name in rollouts[0].example if name != "prompt"}
    if reward.takes is not None:
        arguments = {name: values for name, values in arguments.items() if name in reward.takes}
    try:
        returned = reward.function(**arguments)
    except Exception as error:
        error.add_note(f"raised by the reward function {reward.name!r} on {len(rollouts)} completions")
        raise
    return _checked(reward.name, returned, rollouts)


def rewards_by_name(names: Sequence[str], rewards: np.ndarray) -> dict[str, float | None]:
    """One completion's rewards, [K] with NaN for "does not apply", as a record keeps them."""
    return {name: None if np.isnan(value) else float(value) for name, value in zip(names, rewards, strict=True)}


def reward_matrix(names: Sequence[str], rollouts: Sequence[Rollout]) -> np.ndarray:
    """The rewards of scored completions, [B, K] float64, with NaN for "does not apply"."""
    values = [[row.rewards[name] for name in names] for row in rollouts]
    return np.array([[math.nan if value is None else value for value in row] for row in values], np.float64)


def _checked(name: str, returned: Any, rollouts: Sequence[Rollout]) -> np.ndarray:
    try:
        values = list(returned)
    except TypeError:
        raise ValueError(
            f"reward function {name!r} returned {returned!r}; it must return a list with one number (or None) for each "
            f"of the {len(rollouts)} completions"
        ) from None
    if len(values) != len(rollouts):
        raise ValueError(
            f"reward function {name!r} returned {len(values)} values for {len(rollouts)} completions; it must return "
            "one per completion, in their order"
        )
    rewards = np.full(len(values), np.nan)
    for index, value in enumerate(values):
        if value is None:
            continue
        try:
            number = math.nan if isinstance(value, (str, bytes)) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(
                f"reward function {name!r} returned {value!r} for completion {index} "
                f"({rollouts[index].text[:80]!r}); return a finite number, or None where the function does not apply"
            )
        rewards[index] = number
    return rewards


def _find(reference: str) -> Callable[..., Any]:
    if reference in BUILTIN_REWARDS:
        return BUILTIN_REWARDS[reference]
    module, colon, attribute = reference.partition(":")
    if not colon:
        raise ValueError(
            f"there is no built-in reward {reference!r}{nearest(reference, BUILTIN_REWARDS)} (built in are "
            f"{', '.join(sorted(BUILTIN_REWARDS))}); one of your own is named as 'module:function'"
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"reward {reference!r} cannot be imported: {error}") from error


def _name(function: Any) -> str:
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _unique(name: str, taken: Sequence[str]) -> str:
    candidates = [name, *(f"{name}_{number}" for number in range(2, len(taken) + 3))]
    return next(candidate for candidate in candidates if candidate not in taken)


def _takes(name: str, function: Callable[..., Any], columns: Sequence[str]) -> frozenset[str] | None:
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    given = {"prompts", "completions", "completion_ids", *columns}
    for parameter in parameters.values():
        required = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if parameter.kind is parameter.POSITIONAL_ONLY or (required and parameter.name not in given):
            raise ValueError(
                f"reward function {name!r} needs an argument {parameter.name!r}{nearest(parameter.name, given)}; "
                f"it can have {', '.join(sorted(given))}, by keyword"
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return frozenset(parameters)
