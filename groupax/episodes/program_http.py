"""The web application that programs ask for turns, in the protocols of `groupax serve`. Needs its packages.

The settings of sampling are those of the run, whatever a request says: the policy is trained as it samples there. Of a
request count its messages and tools, the number of turns, and what ends them.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from groupax.data.tokenizer import context_tokens, decode_after
from groupax.engine.sequence import text_before_stop
from groupax.episodes.asked import Asked
from groupax.episodes.program import BASE, MODEL, Answer, Session
from groupax.episodes.transcript import Templates
from groupax.serve.api_key import check_key
from groupax.serve.body import json_body
from groupax.serve.chat_prompt import template_kwargs
from groupax.serve.errors import ApiError
from groupax.serve.exchange import Completion, Exchange, PieceStream, Writer
from groupax.serve.protocols.incoming import Incoming
from groupax.serve.protocols.table import PROTOCOLS, Protocol
from groupax.serve.requests import ChatRequest, CompletionRequest, Request
from groupax.serve.stream import CLIENT_GONE, EventStream, as_api_error, unless_disconnected

MAX_BODY_BYTES = 64 << 20
MAX_TURNS = 64  # of one request
RETRY_HEADER = "x-stainless-retry-count"  # of the clients of OpenAI and Anthropic


@dataclass(frozen=True)
class WholeTurn:
    """A turn that arrives at once (see `serve.exchange.NewTokens`)."""

    index: int
    tokens: list[int]
    policy_logps: list[float]
    sampler_logps: list[float]
    finish_reason: str
    text: str
    start: int = 0
    versions: list[int] = field(default_factory=list)

    @property
    def alternatives(self) -> list[list[tuple[int, float]]]:
        """No alternatives for each token."""
        return [[] for _ in self.tokens]


@dataclass(frozen=True)
class OpenSession:
    """A session that can be reached.

    Attributes:
        session: The session.
        templates: Templates of its run.
        key: Key that requests must have; None if any is accepted.
    """

    session: Session
    templates: Templates
    key: str | None = None


def application(sessions: Mapping[str, OpenSession]) -> Starlette:
    """Returns the application.

    Args:
        sessions: Sessions by the first part of their paths; may change.
    """
    handlers = _Handlers(sessions)
    routes = [Route("/{session}/v1/models", handlers.models)]
    for path, protocol in PROTOCOLS.items():
        routes.append(Route(f"/{{session}}{path}", partial(handlers.respond, protocol), methods=["POST"]))
    return Starlette(routes=routes)


class _Handlers:
    """The handlers of all routes."""

    def __init__(self, sessions: Mapping[str, OpenSession]) -> None:
        self._sessions = sessions

    async def models(self, http: HttpRequest) -> Response:
        """Handles /v1/models."""
        try:
            adapters = self._reached(http).templates.adapters
        except ApiError as fault:
            return JSONResponse(fault.body, fault.status, fault.headers)
        names = (*adapters, BASE) if adapters else (MODEL,)
        cards = [{"id": name, "object": "model", "created": 0, "owned_by": "groupax"} for name in names]
        return JSONResponse({"object": "list", "data": cards})

    async def respond(self, protocol: Protocol, http: HttpRequest) -> Response:
        """Handles a request for turns."""
        try:
            reached = self._reached(http)
        except ApiError as fault:
            return JSONResponse(protocol.error_body(fault), fault.status, fault.headers)
        session, templates = reached.session, reached.templates
        try:
            incoming = await run_in_threadpool(protocol.parse, await json_body(http, MAX_BODY_BYTES))
            request = incoming.request
            asked = await run_in_threadpool(_asked, incoming, templates)
            reader = await run_in_threadpool(templates.reader, asked) if asked.is_chat else None
            is_retry = http.headers.get(RETRY_HEADER, "0") not in ("", "0")
            answer = await self._answer(session, asked, is_retry, http)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:  # noqa: BLE001 - sent, and logged
            refused = isinstance(error, ValueError)
            fault = ApiError(400, str(error)) if refused else as_api_error(error, http.scope)
            session.refusal = fault.message  # with which an episode without turns is explained
            return JSONResponse(protocol.error_body(fault), fault.status, fault.headers)
        prompt = answer.prompt_ids.tolist()
        name = request.model or next(iter(templates.adapters), MODEL)
        exchange = Exchange(request, incoming.wire, name, [prompt], [], templates.token_texts, reader)
        turns = await run_in_threadpool(_turns, templates.tokenizer, request, answer)
        writer = protocol.writer(exchange)
        if request.stream:
            events = _events(templates.tokenizer, exchange, writer, turns)
            return EventStream(events, protocol, _nothing, math.inf)
        return JSONResponse(await run_in_threadpool(writer.full, [_completed(turn) for turn in turns]))

    def _reached(self, http: HttpRequest) -> OpenSession:
        """Returns the session of a request.

        Raises:
            ApiError: It has ended, or the request has not its key.
        """
        reached = self._sessions.get(http.path_params["session"])
        if reached is None:
            raise ApiError(410, "this session has ended", code="ended", headers={"x-should-retry": "false"})
        if reached.key is not None:
            check_key(http.headers, [reached.key])
        return reached

    async def _answer(self, session: Session, asked: Asked, is_retry: bool, http: HttpRequest) -> Answer:
        """Returns the answer to a request.

        Raises:
            ApiError: It is refused.
            ClientDisconnect: The client goes first.
        """
        number, future = session.ask(asked, is_retry)
        try:
            waiting = asyncio.shield(asyncio.wrap_future(future))
            answer: Answer = await unless_disconnected(waiting, http.receive, math.inf)
        except ClientDisconnect:
            session.leave(number)
            raise
        if answer.refusal is not None:
            status, code, message = answer.refusal
            raise ApiError(status, message, "messages", code, {"x-should-retry": "false"})
        return answer


def _turns(tokenizer: Any, request: Request, answer: Answer) -> list[WholeTurn]:
    context = context_tokens(tokenizer, answer.prompt_ids)
    turns = zip(answer.tokens, answer.policy_logps, answer.sampler_logps, answer.ended, strict=True)
    return [
        WholeTurn(
            index,
            tokens,
            policy_logps,
            sampler_logps,
            "stop" if has_ended else "length",
            text_before_stop(decode_after(tokenizer, context, tokens), tuple(request.stop), 0),
        )
        for index, (tokens, policy_logps, sampler_logps, has_ended) in enumerate(turns)
    ]


async def _events(
    tokenizer: Any, exchange: Exchange, writer: Writer, turns: list[WholeTurn]
) -> AsyncIterator[dict[str, Any]]:
    """Yields the events of a streamed response."""
    completions = [Completion() for _ in turns]
    for event in writer.first_events():
        yield event
    for turn, completion in zip(turns, completions, strict=True):
        stream = PieceStream(exchange, turn.index, tokenizer)
        for event in writer.events(turn, stream.add(turn), completion):
            yield event
        completion.add(turn)
    for event in writer.last_events(completions):
        yield event


def _nothing() -> None:
    """Does nothing at the end of a stream, whose turns were complete before."""


def _completed(turn: WholeTurn) -> Completion:
    completion = Completion()
    completion.add(turn)
    return completion


def _adapter_of(model: str | None, adapters: Sequence[str]) -> str | None:
    """Returns the adapter that a request's model names; None for the base, and in a run that trains one policy.

    Raises:
        ApiError: It names none of several.
    """
    if not adapters or model == BASE:
        return None
    if model is None:
        return adapters[0]
    if model not in adapters:
        message = f"there is no model {model!r}; this run has {', '.join(adapters)} and {BASE}"
        raise ApiError(404, message, "model", "model_not_found")
    return model


def _asked(incoming: Incoming, templates: Templates) -> Asked:
    """Returns what a request asks.

    Raises:
        ApiError: It asks what a session does not answer.
    """
    request = incoming.request
    if not 1 <= request.n <= MAX_TURNS:
        raise ApiError(400, f"n must be between 1 and {MAX_TURNS}, got {request.n}", "n")
    if request.max_tokens is not None and request.max_tokens < 1:
        raise ApiError(400, f"a turn has at least one token, got max_tokens {request.max_tokens}", "max_tokens")
    given: dict[str, Any] = {"n": request.n, "max_tokens": request.max_tokens, "stop": request.stop}
    given |= {"regex": request.regex, "json_schema": request.json_schema}
    given |= {"adapter": _adapter_of(request.model, templates.adapters)}
    if isinstance(request, ChatRequest):
        if request.continue_final_message or not request.add_generation_prompt:
            raise ApiError(400, "a session answers with whole messages only", "continue_final_message")
        given |= {
            "tools": request.callable_tools,
            "template_kwargs": template_kwargs(request, templates.tokenizer, incoming.hints),
        }
        given |= {"tool_choice": request.tool_choice if request.callable_tools else "auto"}
        given |= {"parallel": request.parallel_tool_calls}
    elif isinstance(request, CompletionRequest) and (len(request.prompts) > 1 or request.echo):
        raise ApiError(400, "a session answers one prompt a request, without echo", "prompt")
    return Asked(request.prompts[0], **given)
