"""The web application: the APIs of OpenAI and Anthropic over an `EngineLoop`.

request ──► key, size, JSON, fields ──► token ids ──► loop ──► deltas ──► response, in full or streamed
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import isawaitable
from typing import Any, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from groupax.models.weights.checkpoint import Model
from groupax.serve.exchange import Delta, arriving_deltas, collect, streamed
from groupax.serve.loop import EngineLoop
from groupax.serve.metrics import CONTENT_TYPE, Metrics, RequestRecord
from groupax.serve.prompts import ServedModel, check_constraint, encoded_chat, prepare
from groupax.serve.protocols import PROTOCOLS, EventStream, Protocol, anthropic
from groupax.serve.requests import ChatRequest
from groupax.serve.web import (
    CLIENT_GONE,
    ApiError,
    CallerCheck,
    as_api_error,
    bad_request,
    check_key,
    json_body,
    timeout_error,
    unless_disconnected,
)
from groupax.serve.weights import Weights

LEAST_UPLOAD_BYTES_PER_S = 1 << 20  # of weights, besides receive_timeout_s
PREPARING_THREADS = 8
LARGE_BYTES = 64 << 10  # requests with more, or with images, share LARGE_THREADS, so that others go on meanwhile
LARGE_THREADS = 2
COMPILING_THREADS = 1  # of constraints, for which other requests do not wait
T = TypeVar("T")
Handler = Callable[[HttpRequest], Any]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a server.

    Attributes:
        api_keys: Keys, one of which every request but /health and /ready must have; none are needed if empty.
        max_body_bytes: Size of a request.
        max_completions: Prompts times `n` of one request.
        default_max_tokens: Longest completion of a chat that sets no limit.
        request_timeout_s: Time after which a request is cancelled.
        receive_timeout_s: Time in which the body of a request must arrive.
        host: Address that the server listens on; without keys it determines by which names requests may call it.
        allowed_hosts: Further such names.
    """

    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 4 << 20
    max_completions: int = 256
    default_max_tokens: int = 1024
    request_timeout_s: float = 600.0
    receive_timeout_s: float = 30.0
    host: str = "127.0.0.1"
    allowed_hosts: tuple[str, ...] = ()


def create_app(
    loop: EngineLoop,
    limits: Limits | None = None,
    model: Model | None = None,
    write_line: Callable[[str], object] = lambda _: None,
) -> Starlette:
    """Creates the application.

    Args:
        loop: A started loop whose engine has a tokenizer. Requests that name no model get the engine's own.
        limits: Limits of requests.
        model: The engine's model, if clients with a key may change its weights.
        write_line: Receives a line for each request that is not a GET; by default nothing is written.
    """
    server = Server(loop, limits or Limits(), Weights(loop, model), write_line)
    return Starlette(routes=server.routes(), exception_handlers={HTTPException: _http_error})


class Server:
    """The handlers of all routes (see `create_app`), which return responses, or the JSON of one."""

    def __init__(
        self,
        loop: EngineLoop,
        limits: Limits,
        weights: Weights,
        write_line: Callable[[str], object],
    ) -> None:
        self._write_line = write_line
        self.loop, self.limits, self.weights = loop, limits, weights
        self.metrics = Metrics(loop)
        self._threads = ThreadPoolExecutor(PREPARING_THREADS, "request")
        self._threads_of_large = ThreadPoolExecutor(LARGE_THREADS, "large request")
        self._threads_of_constraints = ThreadPoolExecutor(COMPILING_THREADS, "constraint")
        self._caller_check = CallerCheck(limits.host, limits.allowed_hosts)
        self.started = int(time.time())
        self.models = {name: ServedModel.of(name, loop.engine) for name in loop.names}
        self._threads_of_constraints.submit(loop.engine.constraints.load_tokens)  # requests report a failure

    def routes(self) -> list[Route]:
        """Returns all routes."""
        handlers: list[tuple[str, str, Handler]] = [
            ("GET", "/v1/models", lambda _: {"object": "list", "data": [*map(self._model_card, self.models)]}),
            (
                "GET",
                "/v1/models/{model:path}",
                lambda http: self._model_card(self._model(http.path_params["model"]).name),
            ),
            ("GET", "/metrics", lambda _: Response(self.metrics.text(), headers={"content-type": CONTENT_TYPE})),
            ("GET", "/groupax/v1/weights", lambda _: self.weights.describe()),
            ("PUT", "/groupax/v1/weights", self._put_weights),
        ]
        counting = self._endpoint(self._count_tokens, anthropic.error_body)
        return [
            *(
                Route(path, self._endpoint(partial(self._complete, protocol), protocol.error_body), methods=["POST"])
                for path, protocol in PROTOCOLS.items()
            ),
            Route("/v1/messages/count_tokens", counting, methods=["POST"]),
            *(Route(path, self._endpoint(handler), methods=[method]) for method, path, handler in handlers),
            Route("/health", self._health),
            Route("/ready", self._ready),
        ]

    def _endpoint(
        self, handler: Handler, error_body: Callable[[ApiError], Any] = lambda error: error.body
    ) -> Callable[[HttpRequest], Awaitable[Response]]:
        """Wraps a handler: checks the caller, converts errors to the protocol's format, and counts the request."""

        async def respond(request: HttpRequest) -> Response:
            record = RequestRecord(self.metrics, time.monotonic())
            request.state.record, message = record, ""
            try:
                if self.limits.api_keys:
                    check_key(request.headers, self.limits.api_keys)
                elif refusal := self._caller_check.refusal(request.headers):
                    raise ApiError(403, refusal, code="forbidden")
                found = handler(request)
                found = await found if isawaitable(found) else found
                response = found if isinstance(found, Response) else JSONResponse(found)
            except ClientDisconnect:
                response = Response(status_code=CLIENT_GONE)
            except Exception as error:  # noqa: BLE001 - sent, and logged
                fault = as_api_error(error, request.scope)
                message = fault.message
                response = JSONResponse(error_body(fault), fault.status, fault.headers)
            if isinstance(response, EventStream):
                response.on_end = lambda: self._count(request, response.status_code, record)
            else:
                self._count(request, response.status_code, record, message)
            return response

        return respond

    def _count(self, http: HttpRequest, status: int, record: RequestRecord, message: str = "") -> None:
        path = getattr(http.scope.get("route"), "path", http.url.path)
        self.metrics.requests.labels(path, status).inc()
        self.metrics.seconds.observe(time.monotonic() - record.started_s)
        record.end()
        if http.method != "GET":
            self._write_line(record.line(http.method, path, status, message))

    async def _complete(self, protocol: Protocol, http: HttpRequest) -> Response:
        """Handles requests for completions in any protocol."""
        record: RequestRecord = http.state.record
        deadline_s = self._deadline_s(http)
        body = await self._body(http)
        incoming = await self._in_time(partial(protocol.parse, body), deadline_s, self._threads_for(body))
        request = incoming.request
        model = self._model(request.model)
        name = model.name
        if request.weights_state not in (None, self.weights.state):
            message = f"{name} has other weights than {request.weights_state!r}"
            raise ApiError(409, message, param="weights_state", code="other_weights")
        work = partial(prepare, incoming, model, self.limits.max_completions, self.limits.default_max_tokens)
        prepared = await self._in_time(work, deadline_s, self._threads_for(body, request))
        if prepared.params.constraint is not None:
            work = partial(check_constraint, model, prepared.params)
            await self._in_time(work, deadline_s, self._threads_of_constraints)
        exchange = prepared.exchange
        record.begin(name, sum(map(len, exchange.prompts)))
        num = len(exchange.prompts) * request.n
        deltas: asyncio.Queue[Delta] = asyncio.Queue()
        call_here = asyncio.get_running_loop().call_soon_threadsafe

        def listener(delta: Delta) -> None:
            with suppress(RuntimeError):  # the server was stopped without waiting
                call_here(deltas.put_nowait, delta)

        submit = partial(self.loop.submit, name, prepared.prompts, prepared.params, listener)
        with bad_request():
            job = await run_in_threadpool(submit, prepared.row_keys, prepared.images)
        arriving, cancel = record.watch(arriving_deltas(deltas, num)), partial(self.loop.cancel, job)
        writer = protocol.writer(exchange)
        if request.stream:
            events = streamed(exchange, writer, num, arriving, model.tokenizer)
            return EventStream(events, protocol, cancel, deadline_s)
        try:
            completions = await unless_disconnected(collect(arriving, num), http.receive, deadline_s)
        finally:
            cancel()
        return await run_in_threadpool(lambda: JSONResponse(writer.full(completions)))

    async def _count_tokens(self, http: HttpRequest) -> Any:
        body, deadline_s = await self._body(http), self._deadline_s(http)
        parse = partial(anthropic.parse, body, counts_only=True)
        incoming = await self._in_time(parse, deadline_s, self._threads_for(body))
        request = incoming.request
        assert isinstance(request, ChatRequest), "messages are chats"

        def count() -> Any:
            [ids], _, _ = encoded_chat(request, self._model(request.model), incoming.hints)
            return {"input_tokens": len(ids)}

        return await self._in_time(count, deadline_s, self._threads_for(body, request))

    def _model_card(self, name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": self.started, "owned_by": "groupax"}
        max_len, version = self.models[name].max_positions, self.loop.engine.version
        return {**card, "max_model_len": max_len, "weights_version": version}

    async def _health(self, _: HttpRequest) -> Response:
        return self._state("ok")

    async def _ready(self, _: HttpRequest) -> Response:
        """Handles /ready: 200 when requests of usual sizes need no compilation."""
        return self._state("ready" if self.loop.is_ready else "compiling")

    def _state(self, state: str) -> Response:
        state = state if self.loop.is_alive else "the engine has stopped"
        return JSONResponse({"status": state}, 200 if state in ("ok", "ready") else 503)

    async def _put_weights(self, http: HttpRequest) -> Any:
        if not self.limits.api_keys:
            raise ApiError(403, "weights can be changed only on a server with keys; start it with --api_key")
        limit, size, at = self.weights.max_bytes(), int(http.headers.get("content-length", "0")), 0
        data = np.empty(min(size, limit), np.uint8)
        time_s = self.limits.receive_timeout_s + size / LEAST_UPLOAD_BYTES_PER_S
        try:
            async with asyncio.timeout(time_s):
                async for part in http.stream():
                    if at + len(part) <= len(data):
                        data[at : at + len(part)] = np.frombuffer(part, np.uint8)
                    at += len(part)
        except TimeoutError as error:
            message = f"the weights did not arrive within {time_s:g} s"
            raise ApiError(408, message, code="timeout", headers={"connection": "close"}) from error
        if at != len(data):
            message = f"the upload has {at} bytes; the model takes {limit}, and content-length must announce them"
            raise ApiError(413, message)
        upload = await run_in_threadpool(self.weights.read, data)
        held = await run_in_threadpool(self.weights.prepared, upload)
        return await asyncio.wrap_future(self.loop.between_chunks(lambda: self.weights.take_over(upload, held)))

    def _model(self, name: str | None) -> ServedModel:
        """Returns a model by its name; the first one for a request that names none."""
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            message = f"there is no model {name!r}; this server has {', '.join(self.models)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return self.models[name]

    async def _body(self, http: HttpRequest) -> bytes:
        return await json_body(http, self.limits.max_body_bytes, self.limits.receive_timeout_s)

    def _deadline_s(self, http: HttpRequest) -> float:
        return http.state.record.started_s + self.limits.request_timeout_s

    def _threads_for(self, body: bytes, request: object = None) -> ThreadPoolExecutor:
        has_images = isinstance(request, ChatRequest) and bool(request.image_urls)
        return self._threads_of_large if len(body) > LARGE_BYTES or has_images else self._threads

    async def _in_time(self, work: Callable[[], T], deadline_s: float, threads: ThreadPoolExecutor) -> T:
        """Returns the result of work in a thread, which nobody waits for after the deadline."""
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()):
                return await asyncio.get_running_loop().run_in_executor(threads, work)
        except TimeoutError as error:
            raise timeout_error() from error


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    """Handles unknown paths and methods."""
    assert isinstance(error, HTTPException), "registered for these"
    message = f"{http.method} {http.url.path}: {error.detail}"
    return JSONResponse(ApiError(error.status_code, message).body, error.status_code, error.headers)
