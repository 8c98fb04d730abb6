"""Environments of the library verifiers (https://github.com/PrimeIntellect-ai/verifiers). Imports no jax.

An environment of verifiers plays a rollout by itself and asks a client for the model's turns. An episode is such a
rollout, whose client passes the questions on to groupax (see `verifiers_v0_session`): setup, tools, stop conditions
and rewards are the environment's own code.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from groupax.environments.remote_tools import remote_schema
from groupax.episodes.environment import EnvironmentClass
from groupax.errors import require
from groupax.terminal.printable import error_line
from groupax.tools.tool import Tool

ROW = "verifiers_row"  # the dataset's column that names the input of a rollout
SPLITS = ("train", "eval")


class NotCalledError(RuntimeError):
    """A tool was not called; its message is for the model."""


@dataclass(frozen=True, eq=False)
class VerifiersEnvironment(EnvironmentClass):
    """An environment of verifiers, for `GRPOTrainer(environments=...)`.

    Attributes:
        dataset: Its rows for training, as `train_dataset` of `GRPOTrainer` takes them.
        eval_dataset: Its rows for evaluation; None if it has none.
    """

    dataset: Sequence[Mapping[str, Any]] = ()
    eval_dataset: Sequence[Mapping[str, Any]] | None = None


def verifiers(environment: Any, *, name: str = "verifiers", **arguments: Any) -> VerifiersEnvironment:
    """Returns an environment of verifiers with its dataset.

    Args:
        environment: Id of an installed environment, whose `load_environment` is called, or what that has returned.
        name: Name of the environment in metrics.
        arguments: Arguments of `load_environment`.

    Raises:
        ImportError: verifiers is not installed, or without the environments of its version 0.
        ValueError: The environment cannot be loaded, or its rewards compare the rollouts of a group.
    """
    loaded = _loaded(environment, arguments)
    from groupax.environments.verifiers_v0_session import VerifiersSession

    if loaded.requires_group_rollouts:
        raise ValueError(
            f"the environment {environment!r:.100} of verifiers has rewards that compare the rollouts of a group; "
            "groupax scores each episode by itself, so write them as a reward function of GRPOTrainer"
        )
    tools = _tools(loaded)
    inputs = {split: rows for split in SPLITS if (rows := _inputs(loaded, split)) is not None}
    rows = {split: _rows(given, split) for split, given in inputs.items()}
    return VerifiersEnvironment(
        name=name,
        create=partial(VerifiersSession, loaded, partial(_input_of, inputs), frozenset(tools)),
        tools=tools,
        methods=frozenset({"reset", "act", "score", "close"}),
        answers_calls=True,
        dataset=rows.get("train") or rows["eval"],
        eval_dataset=rows.get("eval"),
    )


def _loaded(environment: Any, arguments: Mapping[str, Any]) -> Any:
    require("verifiers", "verifiers(...)", is_imported=False)
    try:
        from verifiers import load_environment
        from verifiers.envs.environment import Environment
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"verifiers(...) needs the library verifiers with the environments of its version 0, which 0.4 no longer "
            f"has: pip install 'groupax[verifiers]' ({error_line(error)})"
        ) from error
    if isinstance(environment, Environment):
        if arguments:
            raise ValueError(f"arguments are for an environment's id, got {', '.join(arguments)} with an environment")
        return environment
    if not isinstance(environment, str):
        raise ValueError(f"verifiers takes the id of an environment, or an Environment, got {environment!r:.100}")
    try:
        with _signal_handlers_kept():
            return load_environment(environment, **arguments)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"verifiers cannot load the environment {environment!r}: {error_line(error)}") from error


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restores the handlers of SIGINT and SIGTERM, which an environment of verifiers replaces by its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _tools(loaded: Any) -> dict[str, Tool]:
    schemas = [
        remote_schema(f"the environment {loaded.env_id!r}", each.name, each.description, dict(each.parameters))
        for each in loaded.tool_defs or ()
    ]
    return {
        schema["function"]["name"]: Tool(schema["function"]["name"], _not_called, schema, takes_owner=True)
        for schema in sorted(schemas, key=lambda schema: schema["function"]["name"])
    }


def _not_called(_session: Any, /, **_: Any) -> None:
    """Refuses a call of a turn with a faulty one, since the environment answers turns as a whole."""
    raise NotCalledError("not called, since another call of the turn is faulty")


def _inputs(loaded: Any, split: str) -> Any:
    """Returns the inputs of the rollouts of a split; None if the environment has none."""
    source = loaded.dataset_source if split == "train" else loaded.eval_dataset_source
    if source is None:
        return None
    return loaded.get_dataset() if split == "train" else loaded.get_eval_dataset()


def _input_of(inputs: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the input of a rollout for a row of `dataset` or `eval_dataset`."""
    if ROW not in row:
        raise ValueError(f"the dataset has no column {ROW}; give .dataset of the environment as train_dataset")
    split, _, index = str(row[ROW]).partition("/")
    return dict(inputs[split][int(index)])


def _rows(inputs: Any, split: str) -> list[dict[str, Any]]:
    answers = inputs["answer"] if "answer" in inputs.column_names else [""] * len(inputs)
    return [
        {"prompt": _plain_messages(prompt), "answer": answer, ROW: f"{split}/{index}"}
        for index, (prompt, answer) in enumerate(zip(inputs["prompt"], answers, strict=True))
    ]


def _plain_messages(prompt: Any) -> Any:
    """Returns a prompt without the fields that are None only because other rows of the dataset have them."""
    if isinstance(prompt, str):
        return prompt
    return [{name: value for name, value in message.items() if value is not None} for message in prompt]
