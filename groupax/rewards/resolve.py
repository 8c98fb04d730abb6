"""Resolves `reward_funcs`, as the user wrote it, into the reward functions of a run; the built-in ones by name.

Imports no jax.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from groupax.core.errors import require
from groupax.core.settings.fields import nearest
from groupax.core.settings.references import import_attribute, parse_call
from groupax.rewards import BUILTIN_REWARDS
from groupax.rewards.code import code_tests
from groupax.rewards.contract import ARGUMENTS, ModelReward, Reward
from groupax.rewards.sandbox import check_sandbox


@dataclass(frozen=True)
class WithColumns:
    """A reward function with arguments that are dataset columns of other names (see `with_columns`)."""

    function: Callable[..., Any]
    columns: Mapping[str, str]


def with_columns(function: Callable[..., Any], **columns: str) -> WithColumns:
    """Has a reward function take arguments from columns of other names: `with_columns(f, answer="solution")`."""
    return WithColumns(function, columns)


def resolve_rewards(functions: Any, columns: Sequence[str], processing_classes: Any = None) -> list[Reward]:
    """Returns the rewards of a run from a function, a name, a reward model, or a list of these.

    Args:
        functions: Callables; reward models as a folder, hub id, `Model` or `ModelReward`; "module:function" references;
            or names of built-in rewards, with options and columns if need be: "soft_overlong(max_length=512,
            buffer=64)", "math_accuracy(answer=solution)".
        columns: Columns of the dataset in addition to the prompt. A function that requires another argument is refused.
        processing_classes: Tokenizers of the reward models, one per function; None for the model's own.

    Raises:
        ValueError: There is no function, one cannot be found, or one needs an argument that it cannot receive.
    """
    items = list(functions) if isinstance(functions, (list, tuple)) else [functions]
    if not items:
        raise ValueError("reward_funcs is empty; give at least one function")
    tokenizers = processing_classes if isinstance(processing_classes, (list, tuple)) else [processing_classes]
    tokenizers = [None] * len(items) if processing_classes is None else list(tokenizers)
    if len(tokenizers) != len(items):
        raise ValueError(f"reward_processing_classes has {len(tokenizers)} entries for {len(items)} reward functions")
    rewards: list[Reward] = []
    for item, tokenizer in zip(items, tokenizers, strict=True):
        rewards.append(_resolve(item, tokenizer, columns, [reward.name for reward in rewards]))
    return rewards


def resolve_weights(weights: Sequence[float] | None, rewards: Sequence[Reward]) -> np.ndarray:
    """Returns the weight of each reward, [K]; 1 if `weights` is None."""
    values = np.ones(len(rewards)) if weights is None else np.asarray(weights, float)
    if values.shape != (len(rewards),):
        raise ValueError(f"reward_weights has {values.size} entries for {len(rewards)} reward functions")
    return values


def check_columns(rewards: Sequence[Reward], columns: Sequence[str], row: Mapping[str, Any], name: str) -> None:
    """Checks that another dataset has the columns that the rewards take from the training dataset."""
    for reward in rewards:
        if reward.on_device or reward.takes is None:
            continue
        parameters = inspect.signature(reward.function).parameters
        for argument in reward.takes:
            column = reward.columns.get(argument, argument)
            required = argument in parameters and parameters[argument].default is inspect.Parameter.empty
            if required and column in columns and column not in row:
                raise ValueError(
                    f"{name} has no column {column!r}, which the reward function {reward.name!r} takes; it has "
                    f"{', '.join(row)}"
                )


def find_reward(reference: str) -> Any:
    """Returns the reward for a name, which may have options and columns, or for a "module:function" reference.

    Raises:
        ValueError: There is no such reward, or the options cannot be parsed.
    """
    name, options, columns = parse_call("reward", reference)
    if name in BUILTIN_REWARDS:
        if name == "math_accuracy":
            require("math", "the reward math_accuracy", is_imported=False)
        function: Any = import_attribute("reward", f"{BUILTIN_REWARDS[name]}:{name}")
    else:
        if ":" not in name:
            raise ValueError(
                f"there is no built-in reward {name!r}{nearest(name, BUILTIN_REWARDS)} (the built-in rewards are "
                f"{', '.join(sorted(BUILTIN_REWARDS))}); refer to your own function as 'module:function'"
            )
        function = import_attribute("reward", name)
    known = inspect.signature(function).parameters
    for option in options:
        if option not in known:
            raise ValueError(f"reward {name!r} has no option {option!r}{nearest(option, known)}")
    function = functools.partial(function, **options) if options else function
    return with_columns(function, **columns) if columns else function


def _resolve(item: Any, tokenizer: Any, columns: Sequence[str], taken_names: Sequence[str]) -> Reward:
    is_name = isinstance(item, str) and not {"(", ":"} & set(item) and ("/" in item or Path(item).is_dir())
    if is_name or isinstance(item, Path) or hasattr(item, "hf_config"):  # a reward model that is not loaded or wrapped
        from groupax.rewards.model import RewardModel

        item = RewardModel(item, tokenizer)
    found: Any = find_reward(item) if isinstance(item, str) else item
    renamed: Mapping[str, str] = found.columns if isinstance(found, WithColumns) else {}
    function: Any = found.function if isinstance(found, WithColumns) else found
    model = function if isinstance(function, ModelReward) and not inspect.isfunction(function) else None
    if model is None and not callable(function):
        raise ValueError(f"a reward must be a function, a reward model or a name, got {function!r}")
    core, options = _unwrapped(function)
    own = getattr(core, "__name__", type(core).__name__) if model is None else model.name
    candidates = [own, *(f"{own}_{number}" for number in range(2, len(taken_names) + 3))]
    name = next(candidate for candidate in candidates if candidate not in taken_names)
    if model is not None:
        return Reward(name, model.rewards, on_device=True)
    return Reward(
        name,
        cast(Callable[..., Any], function),
        takes=_checked_arguments(name, function, columns, renamed, set(options)),
        is_async=inspect.iscoroutinefunction(core) or inspect.iscoroutinefunction(type(core).__call__),
        columns=dict(renamed),
    )


def check_setup(function: Callable[..., Any]) -> None:
    """Checks that the programs which a built-in reward needs are installed on this machine.

    Raises:
        RunError: They are not.
    """
    core, options = _unwrapped(function)
    if core is code_tests:
        check_sandbox(options.get("sandbox", "bwrap"))


def _unwrapped(function: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the function within `functools.partial`, and the options that are bound."""
    options: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        function, options = function.func, {**function.keywords, **options}
    return function, options


def _checked_arguments(
    name: str, function: Any, columns: Sequence[str], renamed: Mapping[str, str], bound: set[str]
) -> frozenset[str] | None:
    """Returns the names of the arguments that a function takes, None for any, if each of them can be supplied.

    A column does not replace an option of the same name that is bound by `functools.partial`.
    """
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    for argument, column in renamed.items():
        if column not in columns:
            raise ValueError(
                f"reward function {name!r} takes {argument!r} from the column {column!r}, which the dataset does not "
                f"have; it has {', '.join(sorted(columns)) or 'no column but the prompt'}{nearest(column, columns)}"
            )
    if taken := sorted(set(ARGUMENTS) & set(renamed)):
        raise ValueError(
            f"reward function {name!r} cannot take {taken[0]!r} from the column {renamed[taken[0]]!r}: the run itself "
            "supplies this argument; rename it"
        )
    supplied = {*ARGUMENTS, *columns, *renamed}
    for parameter in parameters.values():
        required = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if parameter.kind is parameter.POSITIONAL_ONLY or (required and parameter.name not in supplied):
            raise ValueError(
                f"reward function {name!r} needs an argument {parameter.name!r}; it can receive "
                f"{', '.join(sorted(supplied))} by keyword, or a column under another name with "
                f"with_columns(function, {parameter.name}='column'){nearest(parameter.name, supplied)}"
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return frozenset(supplied - bound) if bound else None
    return frozenset(set(parameters) - bound)
