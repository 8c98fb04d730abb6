"""Episodes in environments of verifiers: rollouts whose client asks groupax for the turns. Imports verifiers.

environment.rollout ──get_response(messages)──► reset, or act, returns what is new in them
                    ◄──a response─────────────  act(message), or score(message) of the last one
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from verifiers.clients.client import Client
from verifiers.errors import OverlongPromptError
from verifiers.types import Response, ResponseMessage, ToolCall

from groupax.errors import InfrastructureError
from groupax.terminal.printable import printable
from groupax.tools.tool import Step

MODEL = "policy"


class Policy(Client):
    """The client of one rollout, whose answers are the turns of an episode."""

    def __init__(self) -> None:
        super().__init__(None)
        self.asked: asyncio.Queue[tuple[list[Any], list[Any]]] = asyncio.Queue()
        self.answers: asyncio.Queue[Response | None] = asyncio.Queue()
        self.has_ended = False

    async def get_response(self, prompt: Any, *_: Any, tools: Any = None, **__: Any) -> Response:
        """Asks for a turn after these messages.

        Raises:
            OverlongPromptError: The episode has ended before; the environment then ends its rollout too.
        """
        if not self.has_ended:
            await self.asked.put((list(prompt), list(tools or ())))
        answer = None if self.has_ended else await self.answers.get()
        if answer is None:
            raise OverlongPromptError("the episode has reached a limit of the run")
        return answer

    async def close(self) -> None:
        """Does nothing."""

    async def _nothing(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("get_response does it")

    setup_client = _nothing  # pyright: ignore[reportAssignmentType]
    to_native_tool = to_native_prompt = get_native_response = _nothing
    raise_from_native_response = from_native_response = _nothing


class VerifiersSession:
    """An episode in an environment of verifiers.

    Args:
        environment: The environment, which all episodes share.
        input_of: Returns the input of a rollout for a row of the dataset.
        tools: Names of the tools that the model knows.
    """

    def __init__(
        self, environment: Any, input_of: Callable[[Mapping[str, Any]], dict[str, Any]], tools: frozenset[str]
    ) -> None:
        self._environment, self._input_of, self._tools = environment, input_of, tools
        self._policy = Policy()
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
        prompt = asked if isinstance(given["prompt"], list) else []
        added = prompt[len(given["prompt"]) :] if prompt else []
        if isinstance(given["prompt"], list):
            changed = [message.role for message in prompt[: len(given["prompt"])]] != _roles(given["prompt"])
            if changed or len(prompt) < len(given["prompt"]):
                raise ValueError("the environment changes the prompt of its dataset, which it can only add messages to")
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
        """Ends the rollout and returns its reward.

        Args:
            message: The last message of the model if the environment has not seen it, since the turn reached a limit.
        """
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

    def _response(self, message: Mapping[str, Any], is_truncated: bool) -> Response:
        """Returns a message of groupax as a response of a model."""
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


def _roles(messages: Any) -> list[str]:
    return [message["role"] for message in messages]
