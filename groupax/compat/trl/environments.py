"""TRL's tools and environments, as groupax's own. Imports no jax.

An environment of TRL has `reset(**columns)`, whose text is added to the prompt, public methods, which are tools of the
model, and perhaps `get_reward()`. Its instances are created once and reset for every episode.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from groupax.data.chat import join_text_parts
from groupax.episodes.environment import EnvironmentClass
from groupax.tools.tool import Step, Tool, tools_from, tools_of

RESERVED = ("reset", "get_reward")  # methods that are not tools
PLACEHOLDER = [{"role": "user", "content": ""}]  # prompt of an environment that brings its own
NO_REWARD = (
    "No reward source provided: give reward_funcs, or an environment_factory whose environments have a method "
    "get_reward()"
)


class Pool:
    """Environments that are created once and used again, by name and by the place of their episode.

    Args:
        factories: Functions that create environments, by name.
    """

    def __init__(self, factories: Mapping[str, Callable[[], Any]]) -> None:
        self._factories = factories
        self._lock = threading.Lock()
        self._instances: dict[str, dict[int, Any]] = {name: {0: create()} for name, create in factories.items()}
        for name in factories:
            if not callable(getattr(self.first(name), "reset", None)):
                raise ValueError(f"environment {type(self.first(name)).__name__!r} has no method reset; write one")

    def first(self, name: str) -> Any:
        """Returns the environment that was created first."""
        return self._instances[name][0]

    def take(self, name: str, place: int) -> Any:
        """Returns the environment of a place, which is created if it is new."""
        with self._lock:
            known = self._instances[name].get(place)
        if known is None:
            known = self._factories[name]()  # outside of the lock, since it may take long
            with self._lock:
                self._instances[name][place] = known
        return known


class Agents:
    """The tools and environments that a trainer of TRL is given.

    Args:
        tools: Functions that every episode may call.
        environment_factory: Function that creates an environment, or several by the name in the column `environment`.

    Attributes:
        is_routed: Whether the column `environment` chooses the environment.
        names: Names of the environments.
        pool: The environments.
    """

    def __init__(self, tools: Sequence[Callable[..., Any]] | None, environment_factory: Any) -> None:
        self.is_routed = isinstance(environment_factory, Mapping)
        if not self.is_routed:
            only = getattr(environment_factory, "__name__", type(environment_factory).__name__)
            environment_factory = {} if environment_factory is None else {only: environment_factory}
        self.pool, self.names = Pool(dict(environment_factory)), list(environment_factory)
        self.tools = [
            replace(
                tool, function=_returning_text(tool.function, tool.is_async), parallel=tool.parallel or tool.is_async
            )
            for tool in tools_from(tools or ()).values()
        ]

    @property
    def reward_names(self) -> list[str]:
        """The names of the rewards that environments give, those of their classes."""
        classes = dict.fromkeys(type(self.pool.first(name)) for name in self.names)
        return [each.__name__ for each in classes if _gives_reward(each)]

    def environments(self, has_prompts: bool) -> Any:
        """Returns the environments as groupax takes them, which see a column `prompt` if there is one; or None."""
        if not self.names:
            return None
        dropped = {*(() if has_prompts else ("prompt",)), *(("environment",) if self.is_routed else ())}
        classes = {name: _as_class(name, self.pool, dropped) for name in self.names}
        return classes if self.is_routed else classes[self.names[0]]

    def rows(self, dataset: Any, max_steps: int, num_prompts: int) -> tuple[Any, bool]:
        """Returns the dataset with a column `prompt`, and whether it had one.

        Args:
            dataset: The training dataset; None if the environment brings the prompts.
            max_steps: Number of optimizer steps, if it is set.
            num_prompts: Number of prompts of a rollout.
        """
        if dataset is not None:
            return with_prompts(dataset) if self.names else (dataset, True)
        if not self.names:
            raise ValueError("`train_dataset` is required unless an `environment_factory` is given")
        if self.is_routed:
            raise ValueError(
                "a dict of environments requires a `train_dataset` with a column `environment`, which names the "
                "environment of each row; give one, or a single environment_factory"
            )
        if max_steps <= 0:
            raise ValueError("without a `train_dataset` nothing but `max_steps` says how long to train; set it")
        return [{"prompt": PLACEHOLDER}] * num_prompts, False

    def eval_rows(self, dataset: Any) -> Any:
        """Returns evaluation sets, one or several by name, with a column `prompt`."""
        if not self.names or dataset is None:
            return dataset
        if isinstance(dataset, Mapping):
            return {name: self.eval_rows(each) for name, each in dataset.items()}
        return with_prompts(dataset)[0]


def with_prompts(dataset: Any) -> tuple[Any, bool]:
    """Returns rows with the column `prompt`, which is empty if they have none, and whether they had one."""
    columns = getattr(dataset, "column_names", None)
    if columns is not None and "prompt" not in columns:
        return dataset.add_column("prompt", [PLACEHOLDER] * len(dataset)), False
    if columns is None and isinstance(dataset, list) and dataset and "prompt" not in dataset[0]:
        return [{"prompt": PLACEHOLDER, **row} for row in dataset], False
    return dataset, True


def _tools_of(environment_class: type) -> dict[str, Tool]:
    """Returns the public methods of a class as tools, sorted by name as in TRL, whose results are texts."""
    tools = tools_of(environment_class, public=True, reserved=RESERVED)

    def as_text(name: str) -> Tool:
        method = _returning_text(
            lambda owner, **arguments: getattr(owner, name)(**arguments), is_async=tools[name].is_async
        )
        return replace(tools[name], function=method, takes_owner=True)

    return {name: as_text(name) for name in sorted(tools) if inspect.isfunction(getattr(environment_class, name))}


def _gives_reward(environment_class: type) -> bool:
    return callable(getattr(environment_class, "get_reward", None))


def _as_class(name: str, pool: Pool, dropped: set[str]) -> EnvironmentClass:
    """Returns an environment of TRL as one of groupax, whose `reset` does not receive dropped columns."""
    cls = type(pool.first(name))
    gives_reward = _gives_reward(cls)

    def arguments(reset: Callable[..., Any], row: Mapping[str, Any], seed: int) -> dict[str, Any]:
        del seed
        columns = {column: value for column, value in row.items() if column not in dropped}
        parameters = inspect.signature(reset).parameters.values()
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            return columns
        return {each.name: columns[each.name] for each in parameters if each.name in columns}

    return EnvironmentClass(
        name,
        functools.partial(pool.take, name),
        _tools_of(cls),
        frozenset(("reset", "score") if gives_reward else ("reset",)),
        renamed={"score": "get_reward"},
        arguments=arguments,
        takes_place=True,
        reward_name=cls.__name__ if gives_reward else None,
        starts_alike=False,
    )


def _returning_text(function: Callable[..., Any], is_async: bool) -> Callable[..., Any]:
    """Returns a function whose results are texts as TRL writes them."""

    async def call_async(*owner: Any, **arguments: Any) -> Any:
        return _text_of(await function(*owner, **arguments))

    def call(*owner: Any, **arguments: Any) -> Any:
        return _text_of(function(*owner, **arguments))

    return call_async if is_async else call


def _text_of(result: Any) -> Any:
    """Returns the text of a tool's result; a `Step` remains one."""
    if isinstance(result, Step):
        return result
    is_content = isinstance(result, list) and bool(result)
    if is_content and all(isinstance(part, Mapping) and "type" in part for part in result):
        return join_text_parts(result, "the result")
    return str(result)
