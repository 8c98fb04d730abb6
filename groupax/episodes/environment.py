"""Environments: the contract of the classes that users write, and how they are called. Imports no jax.

An environment is an object for one episode. All of its methods may be coroutines, and all but the first are optional:

    reset(row, seed)       starts the episode; returns what the model is to see, as a text or messages, or None
    act(message)           answers a message without tool calls, as a text, messages or a `Step`; None ends the episode
    score()                returns a number, added to the rewards of the steps, when the episode has ended
    close()                frees what it holds
    any method with @tool  is a tool of the model

`row` is the dataset's row without its prompt, and `seed` a number that the episodes of a group share.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from groupax.parallel import processes
from groupax.terminal.printable import printable, short_repr
from groupax.tools.threads import Outcome
from groupax.tools.tool import Step, Tool, tools_of
from groupax.types import Prompt


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

    def method(self, instance: Any, name: str) -> Callable[..., Any]:
        """Returns a method of the contract, of an environment of this class."""
        return getattr(instance, self.renamed.get(name, name))


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


def checked_reward(reward: Any) -> float:
    """Returns a reward of an environment as a number.

    Raises:
        ValueError: It is no finite number.
    """
    try:
        number = math.nan if isinstance(reward, (str, bytes)) else float(reward)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"the reward is {short_repr(reward)}; an environment must give finite numbers")
    return number


def as_messages(observation: Any) -> list[dict[str, Any]]:
    """Returns what an environment lets the model see as messages; a text is a message of the user.

    Raises:
        ValueError: It is neither a text nor messages.
    """
    if observation is None:
        return []
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if isinstance(observation, list) and all(isinstance(each, Mapping) and "role" in each for each in observation):
        return [dict(each) for each in observation]
    raise ValueError(
        f"the environment returned {short_repr(observation)}; it must return a text, a list of messages, or None"
    )


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
    is_text = isinstance(observation, str)
    if not is_text and not _are_parts(observation):
        return [*prompt, *as_messages(observation)]
    content: Any = prompt[-1].get("content") or ""
    if is_text and isinstance(content, str):
        joined: Any = content + observation
    else:
        before = [{"type": "text", "text": content}] if isinstance(content, str) else content
        joined = [*before, *([{"type": "text", "text": observation}] if is_text else observation)]
    return [*prompt[:-1], {**prompt[-1], "content": joined}]


def _are_parts(observation: Any) -> bool:
    """Returns whether this is the content of a message as a list of parts."""
    is_list = isinstance(observation, list) and bool(observation)
    return is_list and all(isinstance(each, Mapping) and "type" in each and "role" not in each for each in observation)


def answer_of(returned: Any) -> tuple[list[dict[str, Any]], float | None, bool]:
    """Returns the messages, the reward and whether the episode ends, from what `act` of an environment returned.

    Raises:
        ValueError: It is neither a text, messages nor a `Step` of them, or the reward is no finite number.
    """
    step = returned if isinstance(returned, Step) else Step(returned)
    messages = as_messages(step.observation)
    reward = None if step.reward is None else checked_reward(step.reward)
    return messages, reward, bool(step.done) or not messages


def warn_of_failure(name: str, what: str, outcome: Outcome) -> None:
    """Warns of an environment's failure; of several processes, one does."""
    if not processes.is_primary():
        return
    warnings.warn(f"environment {name!r} {what}: {printable(f'{outcome.kind}: {outcome.message}')[:500]}", stacklevel=2)
