"""Environments: the contract of the classes that users write, and how they are called. Imports no jax.

An environment is an object for one episode. All of its methods may be coroutines, and all but the first are optional:

    reset(row, seed)       starts the episode; returns what the model is to see, as a text or messages, or None
    act(message)           answers a message without tool calls, as a text, messages or a `Step`; None ends the episode
    score(message)         returns a number, added to the rewards of the steps, when the episode has ended
    close()                frees what it holds
    any method with @tool  is a tool of the model

`row` is the dataset's row without its prompt, and `seed` a number that the episodes of a group share. `message` is an
optional argument of `score`: the last one of the model, or None if `act` has answered it.
"""

import inspect
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from groupax.core.terminal.printable import one_line, short_repr
from groupax.core.types import Prompt, Rollout
from groupax.parallel import processes
from groupax.rewards.contract import Reward
from groupax.tools.results import checked_step, cut_middle
from groupax.tools.runner import Outcome
from groupax.tools.tool import Tool, tools_of


@dataclass(frozen=True, eq=False)
class EnvironmentClass:
    """A class of environments, or another function that creates them.

    Attributes:
        name: Its name in the metrics, and in the dataset's column `environment` if there are several.
        create: Returns a new environment.
        tools: Its tools by name, whose functions take the environment first.
        methods: Its methods of the contract that exist.
        renamed: Names that such methods have in the class, where they differ.
        arguments: Returns the arguments of a method that starts an episode, from it, the dataset's row, and the seed.
        takes_place: Whether `create` takes `place`, the number of the episode among those of this class that are played
            at the same time. It does not depend on which of them starts first.
        reward_name: Name of its reward in the metrics; "" for `name`, None if it gives none.
        starts_alike: Whether the episodes of a group must start alike.
    """

    name: str
    create: Callable[..., Any]
    tools: Mapping[str, Tool]
    methods: frozenset[str]
    renamed: Mapping[str, str] = field(default_factory=dict)
    arguments: Callable[[Callable[..., Any], Mapping[str, Any], int], dict[str, Any]] = field(
        default_factory=lambda: reset_arguments
    )
    takes_place: bool = False
    reward_name: str | None = ""
    starts_alike: bool = True


class NotNewError(ValueError):
    """A function that creates environments did not create one."""


class OpenEnvironment:
    """The environment of one episode. Only the process that makes its calls has the user's object.

    Attributes:
        instance: The user's object; None in other processes, and while all of its answers are in the record.
        observation: What its `reset` has returned.
        failure: The error of one that could not start.
    """

    def __init__(
        self, cls: EnvironmentClass, in_use: "dict[int, OpenEnvironment]", failure: Outcome | None = None
    ) -> None:
        self.cls, self.instance, self._in_use = cls, None, in_use
        self.observation: Any = None
        self.failure = failure

    def keep(self, instance: Any) -> None:
        """Keeps a new object."""
        if instance is None or self._in_use.setdefault(id(instance), self) is not self:
            what = "None" if instance is None else "an environment that another episode uses"
            raise NotNewError(f"the function that creates environments returned {what}; let it return a new one")
        self.instance = instance

    def leave(self) -> bool:
        """Returns whether the object was in use, which it is no longer."""
        return self._in_use.pop(id(self.instance), None) is not None

    def method(self, name: str) -> Callable[..., Any]:
        """Returns a method of the contract."""
        return getattr(self.instance, self.cls.renamed.get(name, name))

    def close_method(self) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Returns the method that closes the environment, which is no longer in use then, with its arguments."""
        return self.method("close") if self.leave() else do_nothing, {}


def do_nothing() -> None:
    """Closes what was not opened."""


def environment_classes(given: Any) -> dict[str, EnvironmentClass]:
    """Returns the environments of a run by name, from a class or a function that creates one, or a dict of several.

    Instead of a class it may also be an `EnvironmentClass`, as `groupax.openenv` returns.

    Raises:
        ValueError: One cannot be called without arguments, or has no method `reset`.
    """
    if given is None:
        return {}
    if isinstance(given, EnvironmentClass):
        return {given.name: given}
    named = given if isinstance(given, Mapping) else {getattr(given, "__name__", type(given).__name__): given}
    return {name: _environment_class(name, create) for name, create in named.items()}


def _environment_class(name: str, create: Any) -> EnvironmentClass:
    if isinstance(create, EnvironmentClass):
        return replace(create, name=name)
    if not callable(create):
        raise ValueError(
            f"environment {name!r} is {create!r:.100}; give a class, or a function without arguments that returns an "
            "environment"
        )
    cls = create if isinstance(create, type) else type(create())
    found = {method for method in ("reset", "act", "score", "close") if callable(getattr(cls, method, None))}
    if "reset" not in found:
        raise ValueError(
            f"environment {name!r} has no method reset(row, seed); write one that starts an episode and returns what "
            "the model is to see, or None"
        )
    tools = tools_of(cls)
    if not tools and "act" not in found:
        raise ValueError(
            f"environment {name!r} has neither a tool nor a method act(message), so that the model could do nothing in "
            "it; mark its methods for the model with @groupax.tool, or write act"
        )
    return EnvironmentClass(name, create, tools, frozenset(found))


def reset_arguments(reset: Callable[..., Any], row: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Returns those of `row`, without its prompt, and `seed` that a method `reset` takes."""
    row = {name: value for name, value in row.items() if name != "prompt"}
    parameters = inspect.signature(reset).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {name: value for name, value in {"row": row, "seed": seed}.items() if takes_any or name in parameters}


def plain_observation(observation: Any) -> Any:
    """Returns a copy of what `reset` of an environment returned, which the environment cannot change any more."""
    if observation is None or isinstance(observation, str):
        return observation
    if isinstance(observation, list):
        return _copied(observation)
    raise ValueError(_not_shown(observation))


def as_messages(observation: Any) -> list[dict[str, Any]]:
    """Returns what an environment lets the model see as messages; a text is a message of the user."""
    if observation is None:
        return []
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if isinstance(observation, list) and all(isinstance(each, Mapping) and "role" in each for each in observation):
        return _copied([dict(each) for each in observation])
    raise ValueError(_not_shown(observation))


def with_observation(prompt: Prompt, observation: Any) -> Prompt:
    """Returns a prompt to which a new environment's observation was added: a text or parts to its end, or messages.

    Raises:
        ValueError: It is none of these, or no text for a prompt that is a text.
    """
    if observation is None:
        return prompt
    if isinstance(prompt, str):
        if not isinstance(observation, str):
            raise ValueError(
                f"the environment returned {short_repr(observation)} for a prompt that is a text; return a text, or "
                "make the prompt a list of messages"
            )
        return prompt + observation
    are_parts = (
        isinstance(observation, list)
        and observation
        and all(isinstance(each, Mapping) and "type" in each and "role" not in each for each in observation)
    )
    if not isinstance(observation, str) and not are_parts:
        return [*prompt, *as_messages(observation)]
    content: Any = prompt[-1].get("content") or ""
    if isinstance(observation, str) and isinstance(content, str):
        joined: Any = content + observation
    else:
        before = [{"type": "text", "text": content}] if isinstance(content, str) else content
        joined = [*before, *([{"type": "text", "text": observation}] if isinstance(observation, str) else observation)]
    return [*prompt[:-1], {**prompt[-1], "content": joined}]


def answer_of(returned: Any, max_bytes: int) -> tuple[list[dict[str, Any]], float | None, bool]:
    """Returns the messages, the reward and whether the episode ends, from what `act` of an environment returned."""
    step = checked_step(returned)
    messages = as_messages(step.observation)
    for message in messages:
        if message["role"] == "assistant":
            raise ValueError("act returned a message of the assistant, which only the model writes; use another role")
        if isinstance(message.get("content"), str):
            message["content"] = cut_middle(message["content"], max_bytes)
    return messages, step.reward, step.done or not messages


def _copied(messages: list[Any]) -> Any:
    try:
        return json.loads(json.dumps(messages))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the environment returned messages that cannot be written as JSON: {error}") from error


def _not_shown(observation: Any) -> str:
    return f"the environment returned {short_repr(observation)}; it must return a text, a list of messages, or None"


def warn_of_failure(warned: set[tuple[str, ...]], name: str, what: str, outcome: Outcome) -> None:
    """Warns of a failure, once of each kind; of several processes, one does."""
    kind = (name, what, outcome.kind)
    if kind in warned or not processes.is_primary():
        return
    warned.add(kind)
    why = one_line(f"{outcome.kind}: {outcome.message}", 500)
    warnings.warn(f"{name} {what}: {why}. Further failures of this kind are only counted", stacklevel=2)


def environment_rewards(environments: Any) -> list[Reward]:
    """Returns the rewards that environments give for turns, named after them; each applies to episodes of its own.

    Args:
        environments: Environments as `GRPOTrainer` takes them.
    """
    classes = environment_classes(environments)
    owners: dict[str, set[str]] = {}  # environments by the name of their reward
    for name, each in classes.items():
        if each.reward_name is not None:
            owners.setdefault(each.reward_name or name, set()).add(name)

    def reward(name: str, own: set[str] | None) -> Reward:
        def applies(rollout: Rollout) -> bool:
            is_own = own is None or rollout.example.get("environment") in own
            return is_own and rollout.environment_reward is not None

        def rewards(rollouts: Sequence[Rollout]) -> list[list[float] | None]:
            return [[turn.reward for turn in each.turns] if applies(each) else None for each in rollouts]

        return Reward(name, rewards, on_device=True)  # it has the rollouts themselves, in this process

    return [reward(name, None if len(classes) == 1 else own) for name, own in owners.items()]
