"""What a reward is, what it is given, and what it may return. Imports no jax.

See docs/rewards.md for the contract with examples.
"""

import ast
import functools
import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from groupax.rewards.builtin import BUILTIN_REWARDS
from groupax.settings.fields import nearest
from groupax.terminal.printable import printable
from groupax.types import Rollout, TrainerState

GIVEN = ("prompts", "completions", "completion_ids", "batch")
GIVEN_SINGLY = ("prompt", "completion", "completion_ids")
BESIDE = ("trainer_state", "log_extra", "log_metric")


@dataclass(frozen=True)
class WithColumns:
    """A reward function some of whose arguments are dataset columns of other names (see `with_columns`)."""

    function: Callable[..., Any]
    columns: Mapping[str, str]


def with_columns(function: Callable[..., Any], **columns: str) -> WithColumns:
    """The reward function with arguments taken from columns of other names: `with_columns(f, answer="solution")`."""
    return WithColumns(function, columns)


@runtime_checkable
class ModelReward(Protocol):
    """A reward that computes on the devices, which the trainer therefore calls itself, after the rollout."""

    name: str

    def rewards(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        """The reward of each completion, [B]."""
        ...


@dataclass(frozen=True)
class Reward:
    """A reward function with the name that its metrics carry and what it takes.

    Attributes:
        name: unique in the run.
        function: what computes it; for a reward model its `rewards`.
        takes: the keyword arguments that it names; None if it takes any.
        per_completion: it is called with one completion at a time and returns its number.
        is_async: calling it gives a coroutine.
        on_device: it is a `ModelReward`.
        columns: dataset column by argument, where they differ.
    """

    name: str
    function: Callable[..., Any]
    takes: frozenset[str] | None = None
    per_completion: bool = False
    is_async: bool = False
    on_device: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Scores:
    """What one call of a reward came to.

    Attributes:
        values: of each completion, [B] float64; NaN where the function does not apply or failed.
        num_failures: completions without a reward because something went wrong.
        error: what went wrong; empty if nothing did.
        extra: columns for the rollout log, one value per completion (`log_extra`).
        metrics: numbers for the metrics (`log_metric`).
    """

    values: np.ndarray
    num_failures: int = 0
    error: str = ""
    extra: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


def resolve_rewards(functions: Any, columns: Sequence[str], processing_classes: Any = None) -> list[Reward]:
    """The rewards of a run from what the user gave: a function, a name, a reward model, or a list of them.

    Args:
        functions: callables; reward models as a folder, hub id, `Model` or `ModelReward`; "module:function" references;
            names of built-in rewards, which may have options and columns: "soft_overlong(max_length=512, buffer=64)",
            "math_accuracy(answer=solution)".
        columns: of the dataset beside the prompt; a function that requires any other argument is refused.
        processing_classes: tokenizers of the reward models, one per function, None where it is the model's own.

    Raises:
        ValueError: there is no function, one cannot be found, or one needs an argument that it cannot get.
    """
    given = list(functions) if isinstance(functions, (list, tuple)) else [functions]
    if not given:
        raise ValueError("reward_funcs is empty; give at least one function")
    tokenizers = processing_classes if isinstance(processing_classes, (list, tuple)) else [processing_classes]
    tokenizers = [None] * len(given) if processing_classes is None else list(tokenizers)
    if len(tokenizers) != len(given):
        raise ValueError(f"reward_processing_classes has {len(tokenizers)} entries for {len(given)} reward functions")
    rewards: list[Reward] = []
    for item, tokenizer in zip(given, tokenizers, strict=True):
        found: Any = _reward_model(item, tokenizer) if _is_model(item) else item
        found = find_reward(found) if isinstance(found, str) else found
        renamed: Mapping[str, str] = found.columns if isinstance(found, WithColumns) else {}
        function: Any = found.function if isinstance(found, WithColumns) else found
        on_device = isinstance(function, ModelReward) and not inspect.isfunction(function)
        if not callable(function) and not on_device:
            raise ValueError(f"a reward must be a function, a reward model or a name, got {function!r}")
        name = _unique(function.name if on_device else _name(function), [reward.name for reward in rewards])
        if on_device:
            rewards.append(Reward(name, function.rewards, on_device=True))
            continue
        per_completion = _is_per_completion(function)
        rewards.append(
            Reward(
                name,
                function,  # pyright: ignore[reportArgumentType]
                takes=_takes(name, function, columns, per_completion, renamed),
                per_completion=per_completion,
                is_async=_is_async(function),
                columns=dict(renamed),
            )
        )
    return rewards


def weights_of(given: Sequence[float] | None, rewards: Sequence[Reward]) -> np.ndarray:
    """The weight of each reward, [K]; 1 if none are given.

    Raises:
        ValueError: there are more or fewer weights than rewards.
    """
    weights = np.ones(len(rewards)) if given is None else np.asarray(given, float)
    if weights.shape != (len(rewards),):
        raise ValueError(f"reward_weights has {weights.size} entries for {len(rewards)} reward functions")
    return weights


def check_columns(rewards: Sequence[Reward], columns: Sequence[str], row: Mapping[str, Any], name: str) -> None:
    """Check that another dataset has the columns that the rewards take from the training prompts' one.

    Args:
        rewards: of the run.
        columns: of the training prompts.
        row: the first one of the other dataset.
        name: of that dataset.

    Raises:
        ValueError: one lacks.
    """
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
    """The reward that a name, with options if need be, or a "module:function" reference stands for.

    Raises:
        ValueError: there is none, or the options cannot be read.
    """
    name, options, columns = _parse_call(reference)
    if name in BUILTIN_REWARDS:
        function: Any = BUILTIN_REWARDS[name]
    else:
        module, colon, attribute = name.partition(":")
        if not colon:
            raise ValueError(
                f"there is no built-in reward {name!r}{nearest(name, BUILTIN_REWARDS)} (built in are "
                f"{', '.join(sorted(BUILTIN_REWARDS))}); one of your own is named as 'module:function'"
            )
        function = _imported(name, module, attribute)
    known = inspect.signature(function).parameters
    for option in options:
        if option not in known:
            raise ValueError(f"reward {name!r} has no option {option!r}{nearest(option, known)}")
    function = functools.partial(function, **options) if options else function
    return with_columns(function, **columns) if columns else function


def _imported(name: str, module: str, attribute: str) -> Any:
    """The function of a "module:function" reference.

    Raises:
        ValueError: there is no such module or function; says where modules are looked for, or what is alike.
    """
    if module.endswith(".py") or "/" in module:
        plain = module.removesuffix(".py").strip("./").replace("/", ".")
        raise ValueError(f"reward {name!r} names a file; name the module, without .py: '{plain}:{attribute}'")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):  # one that the module itself imports
            raise ValueError(f"reward {name!r} cannot be imported: {error}") from error
        beside = [path.stem for path in Path().glob("*.py")]
        raise ValueError(
            f"reward {name!r} cannot be imported: there is no module {error.name!r}; it is looked for in the current "
            f"folder ({Path.cwd()}), in PYTHONPATH and among what is installed{nearest(error.name, beside)}"
        ) from error
    except ImportError as error:
        raise ValueError(f"reward {name!r} cannot be imported: {error}") from error
    if not hasattr(found, attribute):
        functions = [each for each, value in vars(found).items() if callable(value) and not each.startswith("_")]
        have = f"; it has {', '.join(functions[:8])}" if functions else ""
        raise ValueError(
            f"reward {name!r}: module {module!r} has no {attribute!r}{have}{nearest(attribute, functions)}"
        )
    return getattr(found, attribute)


def arguments_for(
    reward: Reward, rollouts: Sequence[Rollout], state: TrainerState, beside: Mapping[str, Any]
) -> dict[str, Any]:
    """The keyword arguments of a call for these completions: lists with one entry for each, and what is beside them.

    A column of the dataset that is called like one of the others, say `completions`, does not take its place.
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
    arguments |= {"trainer_state": state, **beside}
    if reward.takes is None:
        return arguments
    return {name: value for name, value in arguments.items() if name in reward.takes}


def one_by_one(arguments: Mapping[str, Any], num_completions: int) -> list[dict[str, Any]]:
    """The arguments of a per-completion function, for each completion."""
    shared = set(BESIDE)
    return [
        {name: value if name in shared else value[index] for name, value in arguments.items()}
        for index in range(num_completions)
    ]


def checked_values(name: str, returned: Any, rollouts: Sequence[Rollout]) -> tuple[np.ndarray, list[str]]:
    """What a function returned as numbers, [B] float64 with NaN for None, and what is wrong with single ones.

    Raises:
        ValueError: it is no list with one value per completion.
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
        try:
            number = math.nan if isinstance(value, (str, bytes)) else float(value)
        except (TypeError, ValueError, OverflowError):  # e.g. of an integer with 400 digits
            number = math.nan
        if math.isfinite(number):
            rewards[index] = number
        else:
            faults.append(
                f"reward function {name!r} returned {_shown(value)} for completion {index} "
                f"({rollouts[index].text[:80]!r}); return a finite number, or None where the function does not apply"
            )
    return rewards, faults


def _shown(value: Any) -> str:
    try:
        return printable(f"{value!r:.200}")
    except Exception:  # noqa: BLE001 - of user code, or Python's own for an integer with 5,000 digits
        return f"a value of type {type(value).__name__}"


def rewards_by_name(names: Sequence[str], rewards: np.ndarray) -> dict[str, float | None]:
    """One completion's rewards, [K] with NaN for "does not apply", as a record keeps them."""
    return {name: None if np.isnan(value) else float(value) for name, value in zip(names, rewards, strict=True)}


def reward_matrix(names: Sequence[str], rollouts: Sequence[Rollout]) -> np.ndarray:
    """The rewards of scored completions, [B, K] float64, with NaN for "does not apply"."""
    values = [[row.rewards[name] for name in names] for row in rollouts]
    return np.array([[math.nan if value is None else value for value in row] for row in values], np.float64)


def _is_model(item: Any) -> bool:
    """Whether this is a reward model that has yet to be loaded or wrapped: a folder, a hub id or a `Model`."""
    if hasattr(item, "hf_config") or isinstance(item, Path):
        return True
    return isinstance(item, str) and "(" not in item and ":" not in item and ("/" in item or Path(item).is_dir())


def _reward_model(item: Any, tokenizer: Any) -> Any:
    from groupax.rewards.model import RewardModel

    return RewardModel(item, tokenizer)


def _parse_call(reference: str) -> tuple[str, dict[str, Any], dict[str, str]]:
    """The name, the options (literals) and the columns (bare words) of "name(option=1, argument=column)"."""
    name, bracket, rest = reference.partition("(")
    if not bracket:
        return reference, {}, {}
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("options are named")
        options, columns = {}, {}
        for keyword in call.keywords:
            if keyword.arg is None:
                raise ValueError("options are named")
            if isinstance(keyword.value, ast.Name):
                columns[keyword.arg] = keyword.value.id
            else:
                options[keyword.arg] = ast.literal_eval(keyword.value)
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"reward {reference!r} cannot be read ({error}); write it like name(option=1, argument=column)"
        ) from error
    return name.strip(), options, columns


def _name(function: Any) -> str:
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _unique(name: str, taken: Sequence[str]) -> str:
    candidates = [name, *(f"{name}_{number}" for number in range(2, len(taken) + 3))]
    return next(candidate for candidate in candidates if candidate not in taken)


def _bound(function: Any) -> set[str]:
    """Options that functools.partial has set, which no column of the same name is to replace."""
    names: set[str] = set()
    while isinstance(function, functools.partial):
        names |= set(function.keywords)
        function = function.func
    return names


def _is_async(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _is_per_completion(function: Any) -> bool:
    parameters = inspect.signature(function).parameters
    return "completion" in parameters and not {"prompts", "completions"} & set(parameters)


def _takes(
    name: str, function: Any, columns: Sequence[str], per_completion: bool, renamed: Mapping[str, str]
) -> frozenset[str] | None:
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    for argument, column in renamed.items():
        if column not in columns:
            raise ValueError(
                f"reward function {name!r} takes {argument!r} from the column {column!r}, which the dataset does not "
                f"have{nearest(column, columns)}; it has {', '.join(sorted(columns)) or 'none beside the prompt'}"
            )
    own = {*(GIVEN_SINGLY if per_completion else GIVEN), *BESIDE}
    if taken := sorted(own & set(renamed)):
        raise ValueError(
            f"reward function {name!r} cannot take {taken[0]!r} from the column {renamed[taken[0]]!r}: it is what the "
            "run itself gives; name the argument otherwise"
        )
    given = {*own, *columns, *renamed}
    for parameter in parameters.values():
        required = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if parameter.kind is parameter.POSITIONAL_ONLY or (required and parameter.name not in given):
            raise ValueError(
                f"reward function {name!r} needs an argument {parameter.name!r}{nearest(parameter.name, given)}; "
                f"it can have {', '.join(sorted(given))}, by keyword, or a column under another name with "
                f"with_columns(function, {parameter.name}='column')"
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None if not _bound(function) else frozenset(given - _bound(function))
    return frozenset(set(parameters) - _bound(function))
