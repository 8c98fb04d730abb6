"""The servers that programs ask for turns: the protocols of `groupax serve`, each address a session.

http://HOST:PORT/SESSION/v1/chat/completions ──► the session's `ask` ──► its answer, in the client's protocol

The settings of sampling are those of the run, whatever a request says: the policy is trained as it samples there. Of a
request count its messages and tools, the number of turns, and what ends them.
"""

import asyncio
import math
import secrets
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from groupax.core.errors import RunError
from groupax.data.tokenizer import context_tokens, decode_after
from groupax.engine.sequence import text_before_stop
from groupax.episodes.program import MODEL, Answer, Endpoint, Listening, Session, TurnRequest
from groupax.episodes.transcript import Templates
from groupax.parallel import processes
from groupax.parallel.processes import listen
from groupax.serve.exchange import Delta, Exchange, collect, streamed
from groupax.serve.prompts import template_kwargs
from groupax.serve.protocols import PROTOCOLS, EventStream, Protocol
from groupax.serve.requests import ChatRequest, Incoming
from groupax.serve.web import CLIENT_GONE, ApiError, as_api_error, check_key, json_body, unless_disconnected

START_S = 30.0
MAX_BODY_BYTES = 64 << 20
MAX_TURNS = 64  # of one request

_servers: dict[Listening, "ProgramServer"] = {}
_lock = threading.Lock()


class ProgramServer:
    """A server for the sessions of programs.

    Attributes:
        listening: Where it listens.

    Raises:
        RunError: It cannot listen there, or does not start.
    """

    def __init__(self, listening: Listening) -> None:
        self.listening = listening
        self._sessions: dict[str, _OpenSession] = {}
        port = listening.port and listening.port + processes.process_index()
        try:
            self._socket = listen(listening.host, port)
        except ValueError as error:
            raise RunError(f"the sessions of programs need an address of this machine: {error}") from error
        self._url = listening.url(self._socket.getsockname()[1])
        routes = [Route("/{session}/v1/models", self._models)]
        for path, protocol in PROTOCOLS.items():
            routes.append(Route(f"/{{session}}{path}", partial(self._respond, protocol), methods=["POST"]))
        config = uvicorn.Config(
            Starlette(routes=routes),
            http="h11",  # limits headers
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=75,
        )
        server = uvicorn.Server(config)
        serve = lambda: asyncio.run(server.serve([self._socket]))  # noqa: E731
        thread = threading.Thread(target=serve, name="program server", daemon=True)
        thread.start()
        deadline_s = time.monotonic() + START_S
        while not server.started:
            if time.monotonic() > deadline_s or not thread.is_alive():
                raise RunError("the server that programs ask for turns did not start")
            time.sleep(0.005)

    def add(self, session: Session, templates: Templates) -> Endpoint:
        """Returns the endpoint of a new session."""
        name, key = secrets.token_urlsafe(24), secrets.token_urlsafe(24) if self.listening.is_open else None
        self._sessions[name] = _OpenSession(session, templates, key)
        return Endpoint(f"{self._url}/{name}", key or "groupax", is_over=lambda: session.has_ended)

    def remove(self, session: Session) -> None:
        """Forgets a session, whose address is not found any more."""
        for name in [name for name, each in self._sessions.items() if each.session is session]:
            del self._sessions[name]

    def _reached(self, http: HttpRequest) -> "_OpenSession":
        """Returns the session of a request."""
        reached = self._sessions.get(http.path_params["session"])
        if reached is None:
            raise ApiError(410, "this session has ended", code="ended", headers={"x-should-retry": "false"})
        if reached.key is not None:
            check_key(http.headers, [reached.key])
        return reached

    async def _models(self, http: HttpRequest) -> Response:
        """Handles /v1/models."""
        try:
            self._reached(http)
        except ApiError as fault:
            return JSONResponse(fault.body, fault.status, fault.headers)
        card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "groupax"}
        return JSONResponse({"object": "list", "data": [card]})

    async def _respond(self, protocol: Protocol, http: HttpRequest) -> Response:
        """Handles a request for turns."""
        try:
            reached = self._reached(http)
        except ApiError as fault:
            return JSONResponse(protocol.error_body(fault), fault.status, fault.headers)
        session, templates = reached.session, reached.templates
        try:
            incoming = await run_in_threadpool(protocol.parse, await json_body(http, MAX_BODY_BYTES))
            request = await run_in_threadpool(_turn_request, incoming, templates)
            reader = await run_in_threadpool(templates.reader, request)
            answer = await _answer(session, request, http)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:  # noqa: BLE001 - sent, and logged
            refused = isinstance(error, ValueError)
            fault = ApiError(400, str(error)) if refused else as_api_error(error, http.scope)
            session.refusal = fault.message  # with which an episode without turns is explained
            return JSONResponse(protocol.error_body(fault), fault.status, fault.headers)
        tokenizer, name = templates.tokenizer, incoming.request.model or MODEL
        prompt, asked = answer.turns[0].prompt.tolist(), incoming.request
        exchange = Exchange(asked, incoming.wire, name, [prompt], templates.token_texts, reader)
        turns = await run_in_threadpool(_turns, tokenizer, tuple(asked.stop), answer)
        writer, num = protocol.writer(exchange), len(turns)

        async def arriving() -> AsyncIterator[Delta]:
            for turn in turns:
                yield turn

        if asked.stream:
            events = streamed(exchange, writer, num, arriving(), tokenizer)
            return EventStream(events, protocol, lambda: None, math.inf)
        return JSONResponse(await run_in_threadpool(writer.full, await collect(arriving(), num)))


@dataclass(frozen=True)
class _OpenSession:
    """A session that can be reached, with the key that requests must have; None if any is accepted."""

    session: Session
    templates: Templates
    key: str | None = None


async def _answer(session: Session, request: TurnRequest, http: HttpRequest) -> Answer:
    """Returns the answer to a request."""
    number, future = session.ask(request)
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


def _turns(tokenizer: Any, stop: Sequence[str], answer: Answer) -> list[Delta]:
    context = context_tokens(tokenizer, answer.turns[0].prompt)
    return [
        Delta(
            index=index,
            start=0,
            tokens=turn.tokens,
            policy_logps=turn.policy_logps,
            sampler_logps=turn.sampler_logps,
            alternatives=[[] for _ in turn.tokens],
            versions=[],
            finish_reason="stop" if turn.finish_reason == "stop" else "length",
            text=text_before_stop(decode_after(tokenizer, context, turn.tokens), stop, 0),
        )
        for index, turn in enumerate(answer.turns)
    ]


def _turn_request(incoming: Incoming, templates: Templates) -> TurnRequest:
    """Returns what a request asks for."""
    asked = incoming.request
    if not isinstance(asked, ChatRequest):
        raise ApiError(400, "a session answers chats; ask /v1/chat/completions, /v1/responses or /v1/messages")
    if not 1 <= asked.n <= MAX_TURNS:
        raise ApiError(400, f"n must be between 1 and {MAX_TURNS}, got {asked.n}", "n")
    if asked.max_tokens is not None and asked.max_tokens < 1:
        raise ApiError(400, f"a turn has at least one token, got max_tokens {asked.max_tokens}", "max_tokens")
    if asked.continue_final_message or not asked.add_generation_prompt:
        raise ApiError(400, "a session answers with whole messages only", "continue_final_message")
    prompts: list[Any] = asked.prompts
    return TurnRequest(
        prompts[0],
        tools=asked.callable_tools,
        template_kwargs=template_kwargs(asked, templates.tokenizer, incoming.hints),
        n=asked.n,
        max_tokens=asked.max_tokens,
        stop=asked.stop,
        tool_choice=asked.tool_choice if asked.callable_tools else "auto",
        parallel=asked.parallel_tool_calls,
        regex=asked.regex,
        json_schema=asked.json_schema,
    )


def server_at(listening: Listening) -> ProgramServer:
    """Returns the server that listens there, which is started if need be, and serves until the process ends."""
    with _lock:
        if listening not in _servers:
            _servers[listening] = ProgramServer(listening)
        return _servers[listening]
