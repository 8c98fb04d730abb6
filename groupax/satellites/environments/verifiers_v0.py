"""Environments of the library verifiers (https://github.com/PrimeIntellect-ai/verifiers). Imports no jax.

An environment of verifiers plays a rollout by itself and asks a client for the model's turns. An episode is such a
rollout, whose client passes the questions on to groupax: setup, tools, stop conditions and rewards are the
environment's own code.

environment.rollout ──get_response(messages)──► reset, or act, returns what is new in them
                    ◄──a response─────────────  act(message), or score(message) of the last one
"""

import asyncio
import contextlib
import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from groupax.core.errors import InfrastructureError, require
from groupax.core.terminal.printable import error_line, printable
from groupax.episodes.environment import EnvironmentClass
from groupax.satellites.environments.mcp_tools import remote_schema
from groupax.tools.tool import Step, Tool

MODEL = "policy"
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


class VerifiersSession:
    """An episode in an environment of verifiers."""

    def __init__(
        self, environment: Any, input_of: Callable[[Mapping[str, Any]], dict[str, Any]], tools: frozenset[str]
    ) -> None:
        self._environment, self._input_of, self._tools = environment, input_of, tools
        self._policy = _policy()
        self._rollout: asyncio.Task[Any] | None = None
        self._known: list[Any] = []  # messages that groupax has
        self._names: dict[str, str] = {}  # of the tools that were called, by the call's id

    async def reset(self, row: Mapping[str, Any]) -> Any:
        """Begins the rollout and returns messages that it adds to the row's prompt."""
        given = self._input_of(row)
        rollout = self._environment.rollout(given, self._policy, MODEL, {})
        self._rollout = asyncio.ensure_future(rollout)
        asked = await self._next()
        if asked is None:
            raise InfrastructureError(f"the rollout ended before the first turn: {self._reason_of_end()}")
        added: list[Any] = []
        if isinstance(given["prompt"], list):
            roles = [message["role"] for message in given["prompt"]]
            if [message.role for message in asked[: len(roles)]] != roles:
                raise ValueError("the environment changes the prompt of its dataset, which it can only add messages to")
            added = asked[len(roles) :]
        self._known = asked
        return [self._plain(message) for message in added] or None

    async def act(self, message: Mapping[str, Any]) -> Step:
        """Passes a turn on to the environment and returns its answer."""
        await self._policy.answers.put(self._response(message, is_truncated=False))
        asked = await self._next()
        if asked is None:
            if self._state().get("error") is not None:
                raise InfrastructureError(f"the rollout failed: {self._reason_of_end()}")
            return Step(None, done=True)
        num_known = len(self._known)
        if asked[:num_known] != self._known or len(asked) <= num_known or asked[num_known].role != "assistant":
            raise ValueError(
                "the environment changes earlier messages; an episode is a stream of tokens that is only appended to"
            )
        self._known = asked
        return Step([self._plain(each) for each in asked[num_known + 1 :]])

    async def score(self, message: Mapping[str, Any] | None) -> float:
        """Ends the rollout and returns its reward."""
        assert self._rollout is not None, "it has begun"
        environment = self._environment
        if not self._rollout.done():
            if message is not None:
                await self._policy.answers.put(self._response(message, is_truncated=True))
            self._policy.has_ended = True
            await self._policy.answers.put(None)
        state = await self._rollout
        if state.get("error") is not None:
            raise InfrastructureError(f"the rollout failed: {self._reason_of_end()}")
        score = (
            environment.rubric.score_rollout if environment.score_rollouts else environment.rubric.dummy_score_rollout
        )
        await score(state)
        await environment.rubric.cleanup(state)
        return state["reward"]

    async def close(self) -> None:
        """Ends a rollout that was not scored."""
        if self._rollout is not None and not self._rollout.done():
            self._rollout.cancel()
            await asyncio.gather(self._rollout, return_exceptions=True)

    async def _next(self) -> list[Any] | None:
        """Returns the messages after which the environment asks for a turn; None if the rollout has ended."""
        assert self._rollout is not None, "it has begun"
        asking = asyncio.ensure_future(self._policy.asked.get())
        try:
            await asyncio.wait({asking, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                self._state()
                return None
            messages, tools = asking.result()
        finally:
            asking.cancel()
        unknown = {tool.name for tool in tools} ^ self._tools
        if unknown:
            raise ValueError(
                f"the tools of the rollout are not those of the environment ({', '.join(sorted(unknown))}), which the "
                "prompts of all episodes describe"
            )
        return messages

    def _state(self) -> Any:
        """Returns the state of the rollout that has ended, or raises its error."""
        assert self._rollout is not None, "it has begun"
        return self._rollout.result()

    def _reason_of_end(self) -> str:
        state = self._state()
        return printable(repr(state.get("error") or state.get("stop_condition")))[:500]

    def _response(self, message: Mapping[str, Any], is_truncated: bool) -> Any:
        """Returns a message of groupax as a response of a model."""
        from verifiers.types import Response, ResponseMessage, ToolCall

        calls = []
        for call in message.get("tool_calls") or ():
            function = call["function"]
            self._names[call["id"]] = function["name"]
            arguments = json.dumps(function["arguments"])
            calls.append(ToolCall(id=call["id"], name=function["name"], arguments=arguments))
        finish_reason = "length" if is_truncated else "tool_calls" if calls else "stop"
        said = ResponseMessage(
            content=message["content"],
            reasoning_content=message.get("reasoning_content"),
            tool_calls=calls or None,
            finish_reason=finish_reason,
            is_truncated=is_truncated,
        )
        return Response(id="", created=0, model=MODEL, message=said)

    def _plain(self, message: Any) -> dict[str, Any]:
        """Returns a message of verifiers as one of groupax."""
        plain = {name: value for name, value in message.model_dump().items() if value is not None}
        if isinstance(plain.get("content"), list):
            plain["content"] = "".join(part.get("text", "") for part in plain["content"])
        if plain["role"] == "tool":
            plain["name"] = self._names.get(plain.get("tool_call_id", ""), "")
        return plain


def _policy() -> Any:
    """Returns the client of one rollout, whose answers are the turns of an episode."""
    from verifiers.clients.client import Client
    from verifiers.errors import OverlongPromptError

    class Policy(Client):
        def __init__(self) -> None:
            super().__init__(None)
            self.asked: asyncio.Queue[tuple[list[Any], list[Any]]] = asyncio.Queue()
            self.answers: asyncio.Queue[Any] = asyncio.Queue()
            self.has_ended = False

        async def get_response(self, prompt: Any, *_: Any, tools: Any = None, **__: Any) -> Any:
            if not self.has_ended:
                await self.asked.put((list(prompt), list(tools or ())))
            answer = None if self.has_ended else await self.answers.get()
            if answer is None:  # the environment then ends its rollout too
                raise OverlongPromptError("the episode has reached a limit of the run")
            return answer

        async def close(self) -> None:
            pass

        async def _nothing(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError("get_response does it")

        setup_client = _nothing  # pyright: ignore[reportAssignmentType]
        to_native_tool = to_native_prompt = get_native_response = _nothing
        raise_from_native_response = from_native_response = _nothing

    return Policy()
