"""The web application: the APIs of OpenAI and Anthropic over an `EngineLoop`.

request ──► key, size, JSON, fields ──► token ids ──► loop ──► deltas ──► response, in full or streamed
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from groupax.models.weights.checkpoint import Model
from groupax.serve.api_key import check_key
from groupax.serve.body import json_body
from groupax.serve.cross_origin import CallerCheck
from groupax.serve.deltas import arriving_deltas, collect, no_tokens, to_queue
from groupax.serve.errors import ApiError, stopping
from groupax.serve.exchange import Completion, Exchange, PieceStream, TokenTexts, Writer
from groupax.serve.jobs import ClosedError, Delta, Job, QueueFullError
from groupax.serve.loop import EngineLoop, adapter_of
from groupax.serve.metrics import CONTENT_TYPE, Metrics
from groupax.serve.pause import pause_mode
from groupax.serve.prepare import Prepared, ServedModel, check_constraint, encoded_chat, prepare
from groupax.serve.prompt_scoring import PromptScorer
from groupax.serve.protocols import anthropic_messages
from groupax.serve.protocols.table import PROTOCOLS, Protocol
from groupax.serve.request_record import RequestRecord
from groupax.serve.requests import ChatRequest, Request
from groupax.serve.stream import CLIENT_GONE, EventStream, as_api_error, timeout_error, unless_disconnected
from groupax.serve.tokenizing import detokenize, tokenize, tokenizer_info
from groupax.serve.tokenizing import parse as parse_tokenizing
from groupax.serve.turn_format import TurnFormats
from groupax.serve.weight_uploads import Handler, WeightUploads
from groupax.serve.weights import Weights

RETRY_S = 1
PREPARING_THREADS = 8
LARGE_BYTES = 64 << 10  # requests with more, or with images, share LARGE_THREADS, so that others go on meanwhile
LARGE_THREADS = 2
COMPILING_THREADS = 1  # of constraints, for which other requests do not wait
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a server.

    Attributes:
        api_keys: Keys, one of which every request but /health and /ready must have; none are needed if empty.
        max_body_bytes: Size of a request.
        max_completions: Prompts times `n` of one request.
        default_max_tokens: Longest completion of a chat that sets no limit.
        request_timeout_s: Time after which a request is cancelled.
        host: Address that the server listens on; without keys it determines by which names requests may call it.
        allowed_hosts: Further such names.
    """

    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 4 << 20
    max_completions: int = 256
    default_max_tokens: int = 1024
    request_timeout_s: float = 600.0
    host: str = "127.0.0.1"
    allowed_hosts: tuple[str, ...] = ()


def create_app(
    loop: EngineLoop,
    limits: Limits | None = None,
    models: Mapping[str, Model] | None = None,
    write_line: Callable[[str], object] = lambda _: None,
) -> Starlette:
    """Creates the application.

    Args:
        loop: A started loop whose engines all have tokenizers. Requests that name no model get the first one.
        limits: Limits of requests.
        models: Models of the engines, by name, whose weights clients with a key may change.
        write_line: Receives a line for each request that is not a GET; by default nothing is written.
    """
    server = Server(loop, limits or Limits(), Weights(loop, models or {}), write_line)
    routes = [
        *[
            Route(path, server.endpoint(partial(server.complete, protocol), protocol.error_body), methods=["POST"])
            for path, protocol in PROTOCOLS.items()
        ],
        Route(
            "/v1/messages/count_tokens",
            server.endpoint(server.count_tokens, anthropic_messages.error_body),
            methods=["POST"],
        ),
        Route("/tokenize", server.endpoint(partial(server.tokenizing, tokenize)), methods=["POST"]),
        Route("/detokenize", server.endpoint(partial(server.tokenizing, detokenize)), methods=["POST"]),
        Route("/tokenizer_info", server.endpoint(server.get_tokenizer_info)),
        Route("/version", server.endpoint(server.get_version)),
        Route("/v1/models", server.endpoint(server.list_models)),
        Route("/v1/models/{model:path}", server.endpoint(server.get_model)),
        Route("/metrics", server.endpoint(server.get_metrics)),
        Route("/health", server.health),
        Route("/ready", server.ready),
        Route("/pause", server.endpoint(server.pause), methods=["POST"]),
        Route("/resume", server.endpoint(server.resume), methods=["POST"]),
        Route("/is_paused", server.endpoint(server.is_paused)),
        *WeightUploads(loop, server.weights, server.limits.api_keys, server.limits.max_body_bytes).routes(
            server.endpoint
        ),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})


class Server:
    """The handlers of all routes.

    Args:
        loop: The engines.
        limits: Limits of requests.
        weights: Weights that clients may change.
        write_line: Receives a line for each request that is not a GET.
    """

    def __init__(
        self,
        loop: EngineLoop,
        limits: Limits,
        weights: Weights,
        write_line: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._write_line = write_line
        self.loop, self.limits, self.weights = loop, limits, weights
        self.metrics, self._scorer = Metrics(loop), PromptScorer(loop)
        self._threads = ThreadPoolExecutor(PREPARING_THREADS, "request")
        self._threads_of_large = ThreadPoolExecutor(LARGE_THREADS, "large request")
        self._threads_of_constraints = ThreadPoolExecutor(COMPILING_THREADS, "constraint")
        self._caller_check = CallerCheck(limits.host, limits.allowed_hosts)
        self.started = int(time.time())
        self.models = {name: _served_model(name, loop) for name in loop.engines}
        for model in self.models.values():  # requests that need one that fails report it
            self._threads_of_constraints.submit(model.constraints.load_tokens)

    def endpoint(self, handler: Handler, error_body: Callable[[ApiError], Any] = lambda error: error.body) -> Handler:
        """Wraps a handler: checks the caller, converts errors to the protocol's format, and counts the request."""

        async def respond(request: HttpRequest) -> Response:
            record = RequestRecord(self.metrics, time.monotonic())
            request.state.record, message = record, ""
            try:
                self._check_caller(request)
                response = await handler(request)
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

    async def complete(self, protocol: Protocol, http: HttpRequest) -> Response:
        """Handles requests for completions in any protocol."""
        record: RequestRecord = http.state.record
        deadline_s = record.started_s + self.limits.request_timeout_s
        body = await json_body(http, self.limits.max_body_bytes)
        incoming = await self._in_time(partial(protocol.parse, body), deadline_s, self._threads_for(body))
        request = incoming.request
        name = self._model_name(request.model)
        if request.weights_state not in (None, self.weights.state(name)):
            message = f"{name} has other weights than {request.weights_state!r}"
            raise ApiError(409, message, param="weights_state", code="other_weights")
        work = partial(
            prepare, incoming, self.models[name], self.limits.max_completions, self.limits.default_max_tokens
        )
        prepared = await self._in_time(work, deadline_s, self._threads_for(body, request))
        if prepared.params.constraint is not None:
            work = partial(check_constraint, self.models[name], prepared.params)
            await self._in_time(work, deadline_s, self._threads_of_constraints)
        exchange = await self._with_prompt_logps(prepared, http, deadline_s)
        record.begin(name, sum(map(len, exchange.prompts)))
        num = len(exchange.prompts) * request.n
        if request.max_tokens == 0:
            arriving, cancel = no_tokens(num), lambda: None
        else:
            deltas: asyncio.Queue[Delta] = asyncio.Queue()
            job = await run_in_threadpool(self._submit, prepared, name, to_queue(deltas))
            record.job = job
            arriving, cancel = record.watch(arriving_deltas(deltas, num)), partial(self.loop.cancel, job)
        writer = protocol.writer(exchange)
        if request.stream:
            events = self._events(exchange, writer, num, arriving)
            return EventStream(events, protocol, cancel, deadline_s)
        work = asyncio.ensure_future(collect(arriving, num))
        try:
            completions = await unless_disconnected(work, http.receive, deadline_s)
        finally:
            work.cancel()
            cancel()
        return await run_in_threadpool(lambda: JSONResponse(writer.full(completions)))

    async def count_tokens(self, http: HttpRequest) -> Response:
        """Handles /v1/messages/count_tokens."""
        deadline_s = http.state.record.started_s + self.limits.request_timeout_s
        body = await json_body(http, self.limits.max_body_bytes)
        parse = partial(anthropic_messages.parse, body, counts_only=True)
        incoming = await self._in_time(parse, deadline_s, self._threads_for(body))
        model = self.models[self._model_name(incoming.request.model)]
        assert isinstance(incoming.request, ChatRequest), "messages are chats"
        work = partial(encoded_chat, incoming.request, model, incoming.hints)
        [ids], _, _ = await self._in_time(work, deadline_s, self._threads_for(body, incoming.request))
        return JSONResponse({"input_tokens": len(ids)})

    async def tokenizing(self, work: Callable[[dict[str, Any], ServedModel], Any], http: HttpRequest) -> Response:
        """Handles /tokenize and /detokenize."""
        deadline_s = http.state.record.started_s + self.limits.request_timeout_s
        body = await json_body(http, self.limits.max_body_bytes)
        name, given = await self._in_time(partial(parse_tokenizing, body), deadline_s, self._threads_for(body))
        model = self.models[self._model_name(name)]
        return await self._in_time(lambda: JSONResponse(work(given, model)), deadline_s, self._threads_for(body))

    async def get_tokenizer_info(self, _: HttpRequest) -> Response:
        """Handles /tokenizer_info, for the first model."""
        return JSONResponse(tokenizer_info(next(iter(self.models.values()))))

    async def get_version(self, _: HttpRequest) -> Response:
        """Handles /version."""
        return JSONResponse({"version": version("groupax")})

    async def list_models(self, _: HttpRequest) -> Response:
        """Handles /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model_card(name) for name in self.models]})

    async def get_model(self, http: HttpRequest) -> Response:
        """Handles /v1/models/NAME."""
        return JSONResponse(self._model_card(self._model_name(http.path_params["model"])))

    async def get_metrics(self, _: HttpRequest) -> Response:
        """Handles /metrics."""
        return Response(self.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def pause(self, http: HttpRequest) -> Response:
        """Handles POST /pause?mode=keep|wait|abort: returns when the engines have stopped."""
        self._check_may_pause()
        try:
            await asyncio.wrap_future(self.loop.pause(pause_mode(http.query_params, http.headers)))
        except ClosedError as error:
            raise stopping() from error
        return JSONResponse({"status": "paused"})

    async def resume(self, _: HttpRequest) -> Response:
        """Handles POST /resume."""
        self._check_may_pause()
        try:
            await asyncio.wrap_future(self.loop.resume())
        except ClosedError as error:
            raise stopping() from error
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, _: HttpRequest) -> Response:
        """Handles /is_paused."""
        return JSONResponse({"is_paused": self.loop.pause_state.is_paused})

    def _check_may_pause(self) -> None:
        if not self.limits.api_keys:
            raise ApiError(403, "a server can be paused only with one of its keys; start it with --api_key")

    async def health(self, _: HttpRequest) -> Response:
        """Handles /health: 200 while the engine runs."""
        alive = self.loop.is_alive
        return JSONResponse({"status": "ok" if alive else "the engine has stopped"}, 200 if alive else 503)

    async def ready(self, _: HttpRequest) -> Response:
        """Handles /ready: 200 when requests of usual sizes need no compilation."""
        if not self.loop.is_alive:
            return JSONResponse({"status": "the engine has stopped"}, 503)
        is_ready = self.loop.is_ready
        return JSONResponse({"status": "ready" if is_ready else "compiling"}, 200 if is_ready else 503)

    async def _with_prompt_logps(self, prepared: Prepared, http: HttpRequest, deadline_s: float) -> Exchange:
        """Returns the exchange with the log-probs of its prompts, if the request wants them."""
        exchange, num = prepared.exchange, prepared.exchange.request.num_prompt_logprobs
        if num is None:
            return exchange
        scores = self._scorer.score(exchange.model, prepared.prompts, prepared.params.temperature, num)
        work = asyncio.ensure_future(scores)
        try:
            found = await unless_disconnected(work, http.receive, deadline_s)
        except ClosedError as error:
            raise stopping() from error
        finally:
            work.cancel()
        return replace(exchange, prompt_logps=found)

    def _threads_for(self, body: bytes, request: Request | None = None) -> ThreadPoolExecutor:
        has_images = isinstance(request, ChatRequest) and bool(request.image_urls)
        return self._threads_of_large if len(body) > LARGE_BYTES or has_images else self._threads

    async def _in_time(self, work: Callable[[], T], deadline_s: float, threads: ThreadPoolExecutor) -> T:
        """Returns the result of work in a thread, which nobody waits for after the deadline."""
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()):
                return await asyncio.get_running_loop().run_in_executor(threads, work)
        except TimeoutError as error:
            raise timeout_error() from error

    def _submit(self, prepared: Prepared, name: str, listener: Callable[[Delta], None]) -> Job:
        try:
            given = name, prepared.prompts, prepared.params, listener, prepared.row_keys
            return self.loop.submit(*given, images=prepared.images)
        except ValueError as error:
            raise ApiError(400, str(error), param="row_keys" if "row_keys" in str(error) else None) from error
        except QueueFullError as error:
            message = f"{self.loop.max_sequences} completions wait or run; try again later"
            raise ApiError(429, message, code="queue_full", headers={"retry-after": str(RETRY_S)}) from error
        except ClosedError as error:
            raise stopping() from error

    async def _events(
        self, exchange: Exchange, writer: Writer, num: int, arriving: AsyncIterator[Delta]
    ) -> AsyncIterator[dict[str, Any]]:
        tokenizer = self.models[exchange.model].tokenizer
        streams = [PieceStream(exchange, index, tokenizer) for index in range(num)]
        completions = [Completion() for _ in streams]
        for event in writer.first_events():
            yield event
        async for delta in arriving:
            completion = completions[delta.index]
            if delta.start < len(completion.tokens):
                raise ApiError(503, "the weights changed, and the completion had to be restarted", code="aborted")
            for event in writer.events(delta, streams[delta.index].add(delta), completion):
                yield event
            completion.add(delta)
        for event in writer.last_events(completions):
            yield event

    def _model_name(self, name: str | None) -> str:
        if name is None:
            return next(iter(self.models))
        if name not in self.models:
            message = f"there is no model {name!r}; this server has {', '.join(self.models)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name

    def _model_card(self, name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": self.started, "owned_by": "groupax"}
        engine = self.loop.engines[name]
        version = engine.version_of(adapter_of(engine, name))
        return {**card, "max_model_len": self.models[name].max_positions, "weights_version": version}

    def _check_caller(self, http: HttpRequest) -> None:
        """Checks the key; on a server without keys, that the request is not another site's."""
        if len(hosts := http.headers.getlist("host")) > 1:
            raise ApiError(400, f"the request has {len(hosts)} Host headers; HTTP allows one")
        if not self.limits.api_keys:
            refusal = self._caller_check.refusal(http.headers)
            if refusal:
                raise ApiError(403, refusal, code="forbidden")
            return
        check_key(http.headers, self.limits.api_keys)

    def _count(self, http: HttpRequest, status: int, record: RequestRecord, message: str = "") -> None:
        path = getattr(http.scope.get("route"), "path", http.url.path)
        self.metrics.requests.labels(path, status).inc()
        self.metrics.seconds.observe(time.monotonic() - record.started_s)
        record.end()
        if http.method != "GET":
            self._write_line(record.line(http.method, path, status, message))


def _served_model(name: str, loop: EngineLoop) -> ServedModel:
    engine = loop.engines[name]
    if engine.tokenizer is None:
        raise ValueError(f"the engine of {name} has no tokenizer; a server needs one for texts")
    config = engine.config
    tokenizer, texts = engine.tokenizer, TokenTexts(engine.tokenizer)
    limits = config.vocab_size, config.max_positions
    return ServedModel(
        name, tokenizer, TurnFormats(tokenizer), texts, engine.constraints, *limits, engine.image_encoder
    )


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    """Handles unknown paths and methods."""
    assert isinstance(error, HTTPException), "registered for these"
    message = f"{http.method} {http.url.path}: {error.detail}"
    return JSONResponse(ApiError(error.status_code, message).body, error.status_code, error.headers)
