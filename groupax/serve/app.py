"""The web application: OpenAI's interface over an `EngineLoop`.

request ──► key, size, JSON, fields ──► token ids ──► loop ──► growths ──► answer, whole or in pieces
"""

import asyncio
import hmac
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from groupax.data.tokenizer import context_tokens, decode
from groupax.models.checkpoint import Model
from groupax.serve.answers import Answers, Completion, Vocabulary
from groupax.serve.callers import Callers
from groupax.serve.errors import ApiError
from groupax.serve.loop import ClosedError, EngineLoop, FullError, Growth, Job
from groupax.serve.metrics import CONTENT_TYPE, Metrics
from groupax.serve.notices import Notices
from groupax.serve.prompts import check_tokens, encoded
from groupax.serve.requests import DEFAULT_MAX_TOKENS, Request, parse, parse_json
from groupax.serve.stream import CLIENT_GONE, EventStream, fault_of, too_late, unless_gone
from groupax.serve.text import TextStream
from groupax.serve.weights import Weights
from groupax.settings.sampling import SamplingParams

DRAINED_BODIES = 16  # a body that is too large is read up to so many times the limit, so that its sender gets an answer
RETRY_S = 1
PREPARING_THREADS = 16
Handler = Callable[[HttpRequest], Awaitable[Response]]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a server allows.

    Attributes:
        api_keys: one of them has to come with each request, but for /health; none are needed if there are none.
        max_body_bytes: of a request.
        max_completions: most prompts times `n` of one request.
        default_max_tokens: of a chat that does not say.
        request_timeout_s: a request that takes longer is given up.
        send_timeout_s: a client that takes nothing of a streamed answer for as long is given up.
        host: where the server listens; without keys it says which names a request may call the server by.
        allowed_hosts: further such names.
    """

    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 4 << 20
    max_completions: int = 256
    default_max_tokens: int = 1024
    request_timeout_s: float = 600.0
    send_timeout_s: float = 60.0
    host: str = "127.0.0.1"
    allowed_hosts: tuple[str, ...] = ()


def create_app(
    loop: EngineLoop,
    limits: Limits | None = None,
    models: Mapping[str, Model] | None = None,
    notices: Notices | None = None,
) -> Starlette:
    """The application.

    Args:
        loop: started; all its engines have tokenizers. The first one's name is that of requests which name none.
        limits: what is allowed.
        models: those of the engines, by name, whose weights may be changed by who has a key.
        notices: where refusals are told; None for its own.
    """
    server = Server(loop, limits or Limits(), Weights(loop, models or {}), notices)
    weights, upload = "/groupax/v1/weights", "/groupax/v1/weights/{upload}"
    routes = [
        Route("/v1/completions", server.endpoint(partial(server.complete, is_chat=False)), methods=["POST"]),
        Route("/v1/chat/completions", server.endpoint(partial(server.complete, is_chat=True)), methods=["POST"]),
        Route("/v1/models", server.endpoint(server.models)),
        Route("/v1/models/{model:path}", server.endpoint(server.model)),
        Route("/metrics", server.endpoint(server.metrics_text)),
        Route("/health", server.health),
        Route("/ready", server.ready),
        Route(weights, server.endpoint(server.weights_states)),
        Route(weights, server.endpoint(server.begin_upload), methods=["POST"]),
        Route(upload, server.endpoint(server.abort_upload), methods=["DELETE"]),
        Route(upload + "/{piece:int}", server.endpoint(server.put_piece), methods=["PUT"]),
        Route(upload + "/commit", server.endpoint(server.commit_upload), methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})


class Server:
    """What the routes share.

    Args:
        loop: with the engines.
        limits: what is allowed.
        weights: those that may be changed.
        notices: where refusals are told; None for its own.
    """

    def __init__(self, loop: EngineLoop, limits: Limits, weights: Weights, notices: Notices | None = None) -> None:
        self.loop, self.limits, self.weights = loop, limits, weights
        self.metrics, self.notices = Metrics(), notices or Notices()
        self._preparing = CapacityLimiter(PREPARING_THREADS)
        self._callers = Callers(limits.host, limits.allowed_hosts)
        self.started = int(time.time())
        for name, engine in loop.engines.items():
            if engine.tokenizer is None:
                raise ValueError(f"the engine of {name} has no tokenizer; a server needs one for texts")
        self._vocabularies = {name: Vocabulary(engine.tokenizer) for name, engine in loop.engines.items()}

    def endpoint(self, handler: Handler) -> Handler:
        """The handler behind the check of the key; its errors are told in OpenAI's form, and all is counted."""

        async def answer(request: HttpRequest) -> Response:
            started_s = time.monotonic()
            try:
                self._check_caller(request)
                response = await handler(request)
            except ClientDisconnect:
                response = Response(status_code=CLIENT_GONE)
            except Exception as error:  # noqa: BLE001 - told, and in the log
                fault = fault_of(error, request.scope)
                response = JSONResponse(fault.body, fault.status, fault.headers)
            if isinstance(response, EventStream):
                response.ended = lambda: self._count(request, response.status_code, started_s)
            else:
                self._count(request, response.status_code, started_s)
            return response

        return answer

    async def complete(self, http: HttpRequest, is_chat: bool) -> Response:
        """/v1/completions and /v1/chat/completions."""
        started_s = time.monotonic()
        request = await run_in_threadpool(parse, await _body(http, self.limits.max_body_bytes), is_chat)
        name = self._model_name(request.model)
        if request.weights_state not in (None, self.weights.state(name)):
            message = f"{name} has other weights than {request.weights_state!r}"
            raise ApiError(409, message, param="weights_state", code="other_weights")
        growths: asyncio.Queue[Growth] = asyncio.Queue()
        to_here = asyncio.get_running_loop().call_soon_threadsafe

        def tell(growth: Growth) -> None:
            with suppress(RuntimeError):  # the server was stopped without waiting
                to_here(growths.put_nowait, growth)

        deadline_s = started_s + self.limits.request_timeout_s
        prepared = await self._in_time(partial(self._prepare, request, name), deadline_s)
        job = await run_in_threadpool(self._submit, prepared, name, tell)
        answers = prepared.answers
        arriving = self._arriving(job, growths, started_s)
        if request.stream:
            events = self._events(request, answers, job, arriving)
            cancel = partial(self.loop.cancel, job)
            return EventStream(events, cancel, deadline_s, self.limits.send_timeout_s)
        work = asyncio.ensure_future(_gathered(arriving, len(job.sequences)))
        try:
            completions = await unless_gone(work, http.receive, deadline_s)
        finally:
            work.cancel()
            self.loop.cancel(job)
        return JSONResponse(answers.whole(completions))

    async def models(self, _: HttpRequest) -> Response:
        """/v1/models."""
        return JSONResponse({"object": "list", "data": [self._model_card(name) for name in self.loop.engines]})

    async def model(self, http: HttpRequest) -> Response:
        """/v1/models/NAME."""
        return JSONResponse(self._model_card(self._model_name(http.path_params["model"])))

    async def metrics_text(self, _: HttpRequest) -> Response:
        """/metrics."""
        return PlainTextResponse(self.metrics.text(self.loop), headers={"content-type": CONTENT_TYPE})

    async def health(self, _: HttpRequest) -> Response:
        """/health: 200 while requests are worked on."""
        alive = self.loop.is_alive
        return JSONResponse({"status": "ok" if alive else "the engine has stopped"}, 200 if alive else 503)

    async def ready(self, _: HttpRequest) -> Response:
        """/ready: 200 when requests of usual sizes wait for no compilation."""
        if not self.loop.is_alive:
            return JSONResponse({"status": "the engine has stopped"}, 503)
        is_ready = self.loop.is_ready
        return JSONResponse({"status": "ready" if is_ready else "compiling"}, 200 if is_ready else 503)

    async def weights_states(self, _: HttpRequest) -> Response:
        """/groupax/v1/weights: what each model has."""
        return JSONResponse(self.weights.describe())

    async def begin_upload(self, http: HttpRequest) -> Response:
        """POST /groupax/v1/weights: other weights are announced."""
        self._check_may_change()
        return JSONResponse(self.weights.begin(parse_json(await _body(http, self.limits.max_body_bytes))))

    async def put_piece(self, http: HttpRequest) -> Response:
        """PUT /groupax/v1/weights/UPLOAD/PIECE."""
        self._check_may_change()
        where = http.path_params
        crc = http.headers.get("x-crc32")
        return JSONResponse(await self.weights.put(where["upload"], where["piece"], crc, http.stream()))

    async def abort_upload(self, http: HttpRequest) -> Response:
        """DELETE /groupax/v1/weights/UPLOAD."""
        self._check_may_change()
        return JSONResponse(self.weights.abort(http.path_params["upload"]))

    async def commit_upload(self, http: HttpRequest) -> Response:
        """POST /groupax/v1/weights/UPLOAD/commit: the engine goes on with the new weights, or with its own."""
        self._check_may_change()
        upload = self.weights.close(http.path_params["upload"])
        held = await run_in_threadpool(self.weights.prepared, upload)
        try:
            taken = self.loop.between_chunks(lambda: self.weights.take_over(upload, held))
            return JSONResponse(await asyncio.wrap_future(taken))
        except ClosedError as error:
            raise _stopping() from error

    def _check_may_change(self) -> None:
        if not self.limits.api_keys:
            raise ApiError(403, "weights can be changed only on a server with keys; start it with --api_key")

    async def _in_time(self, function: Callable[[], T], deadline_s: float) -> T:
        """Run something in a thread that changes nothing; when the time is over it is left to itself.

        Raises:
            ApiError: the time is over.
        """
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()):
                return await to_thread.run_sync(function, abandon_on_cancel=True, limiter=self._preparing)
        except TimeoutError as error:
            raise too_late() from error

    def _prepare(self, request: Request, name: str) -> "Prepared":
        """Check and encode a request, which takes a while with long prompts; may be run in any thread."""
        engine = self.loop.engines[name]
        num_prompts, n = len(request.prompts), request.settings.get("n", SamplingParams.n)
        if num_prompts * max(n, 1) > self.limits.max_completions:
            raise ApiError(
                400,
                f"the request has {num_prompts} prompts and n={n}; a request may have {self.limits.max_completions} "
                "completions",
                param="n",
            )
        check_tokens(request, engine.config.vocab_size)
        field = "messages" if request.is_chat else "prompt"
        prompts = encoded(request, engine.tokenizer, engine.config.max_positions)
        longest = max(len(prompt) for prompt in prompts)
        default = DEFAULT_MAX_TOKENS
        if request.is_chat:
            default = max(1, min(self.limits.default_max_tokens, engine.config.max_positions - longest))
        params = request.sampling_params(default)
        if longest + params.max_tokens > engine.config.max_positions:
            raise ApiError(
                400,
                f"a prompt of {'at least ' * (longest > engine.config.max_positions)}{longest} tokens with max_tokens "
                f"{params.max_tokens} exceeds the model's "
                f"{engine.config.max_positions} positions; shorten the prompt or lower max_tokens",
                param=field,
                code="context_length_exceeded",
            )
        if not all(map(len, prompts)):
            raise ApiError(400, "a prompt has no tokens; the model needs at least one to continue from", param=field)
        texts = []
        if request.echo:
            given = zip(request.prompts, prompts, strict=True)
            texts = [
                text if isinstance(text, str) else decode(engine.tokenizer, [ids.tolist()])[0] for text, ids in given
            ]
        kind = "chatcmpl" if request.is_chat else "cmpl"
        ids = [prompt.tolist() for prompt in prompts]
        vocabulary = self._vocabularies[name]
        answers = Answers(request, name, f"{kind}-{uuid.uuid4().hex}", ids, texts, params.n, vocabulary)
        return Prepared(prompts, params, request.row_keys, answers)

    def _submit(self, prepared: "Prepared", name: str, tell: Callable[[Growth], Any]) -> Job:
        """Hand a request to the engine."""
        try:
            return self.loop.submit(name, prepared.prompts, prepared.params, tell, prepared.row_keys)
        except ValueError as error:
            raise ApiError(400, str(error), param="row_keys" if "row_keys" in str(error) else None) from error
        except FullError as error:
            raise ApiError(
                429,
                f"{self.loop.max_sequences} completions wait or run; try again later",
                code="queue_full",
                headers={"retry-after": str(RETRY_S)},
            ) from error
        except ClosedError as error:
            raise _stopping() from error

    async def _arriving(self, job: Job, growths: "asyncio.Queue[Growth]", started_s: float) -> AsyncIterator[Growth]:
        """What the job's completions get, until all are finished.

        Raises:
            ApiError: the engine failed.
        """
        num_left, is_first = len(job.sequences), True
        while num_left:
            growth = await growths.get()
            if growth.finish_reason == "abort":
                raise ApiError(503, "the engine gave up this request; try again", code="aborted")
            if is_first:
                is_first = False
                self.metrics.first_token_seconds.add(time.monotonic() - started_s)
            num_left -= growth.finish_reason is not None
            yield growth

    async def _events(
        self, request: Request, answers: Answers, job: Job, arriving: AsyncIterator[Growth]
    ) -> AsyncIterator[dict[str, Any]]:
        """The pieces of a streamed answer."""
        tokenizer = self.loop.engines[job.model].tokenizer
        texts = [
            TextStream(
                lambda ids: decode(tokenizer, [ids])[0],
                each.params.stop,
                context_tokens(tokenizer, each.prompt),
                each.params.min_tokens,
            )
            for each in job.sequences
        ]
        completions = [Completion() for _ in job.sequences]
        for piece in answers.first_pieces():
            yield piece
        async for growth in arriving:
            completion = completions[growth.index]
            if growth.first < len(completion.tokens):
                raise ApiError(503, "the weights changed, and the completion had to begin again", code="aborted")
            text = texts[growth.index].add(growth.tokens)
            if growth.finish_reason:
                text += texts[growth.index].end(growth.text)
            yield answers.piece(growth, text, completion)
            completion.add(growth)
        if request.include_usage:
            yield answers.last_piece(completions)

    def _model_name(self, name: str | None) -> str:
        names = list(self.loop.engines)
        if name is None:
            return names[0]
        if name not in self.loop.engines:
            message = f"there is no model {name!r}; this server has {', '.join(names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name

    def _model_card(self, name: str) -> dict[str, Any]:
        engine = self.loop.engines[name]
        card = {"id": name, "object": "model", "created": self.started, "owned_by": "groupax"}
        return {**card, "max_model_len": engine.config.max_positions, "weights_version": engine.version}

    def _check_caller(self, http: HttpRequest) -> None:
        """Check the key; on a server without keys, that no web page of somebody else's asks."""
        if not self.limits.api_keys:
            refusal = self._callers.refusal_of(http.headers)
            if refusal:
                self.notices.add("requests refused: a server without keys answers no other sites", refusal)
                raise ApiError(403, refusal, code="forbidden")
            return
        scheme, _, key = http.headers.get("authorization", "").partition(" ")
        given = key.strip().encode()
        if scheme.lower() != "bearer" or not any(hmac.compare_digest(given, k.encode()) for k in self.limits.api_keys):
            message = "the API key is missing or wrong; send 'Authorization: Bearer KEY'"
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    def _count(self, http: HttpRequest, status: int, started_s: float) -> None:
        route = http.scope.get("route")
        self.metrics.requests[getattr(route, "path", http.url.path), status] += 1
        self.metrics.seconds.add(time.monotonic() - started_s)


async def _body(http: HttpRequest, limit: int) -> bytes:
    """Returns the body of a request in JSON.

    Raises:
        ApiError: it says that it is something else, or is larger than is allowed.
    """
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415,
            f"the content-type is {kind[:80]!a}; send 'content-type: application/json' (with curl: "
            "-H 'content-type: application/json')",
            code="unsupported_media_type",
        )
    length = http.headers.get("content-length", "")
    parts, size = [], 0
    if not length.isdecimal() or int(length) <= DRAINED_BODIES * limit:
        async for part in http.stream():
            size += len(part)
            if size <= limit:
                parts.append(part)
            elif size > DRAINED_BODIES * limit:
                break
    else:
        size = int(length)
    if size > limit:
        raise ApiError(413, f"the body has more than {limit} bytes, which is the most that this server takes")
    return b"".join(parts)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A request that can be handed to the engine.

    Attributes:
        prompts: token ids of each.
        params: how to sample.
        row_keys: see `Request`.
        answers: how it is answered.
    """

    prompts: list[np.ndarray]
    params: SamplingParams
    row_keys: np.ndarray | None
    answers: Answers


def _stopping() -> ApiError:
    return ApiError(503, "the server is stopping", code="stopping")


async def _gathered(arriving: AsyncIterator[Growth], num: int) -> list[Completion]:
    completions = [Completion() for _ in range(num)]
    async for growth in arriving:
        completions[growth.index].add(growth)
    return completions


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException), "registered for these"
    message = f"{http.method} {http.url.path}: {error.detail}"
    return JSONResponse(ApiError(error.status_code, message).body, error.status_code, error.headers)
