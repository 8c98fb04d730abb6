"""The endpoints with which trainers upload weights (see `serve.weights`)."""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from groupax.serve.body import json_body
from groupax.serve.errors import ApiError, stopping
from groupax.serve.loop import ClosedError, EngineLoop
from groupax.serve.requests import parse_json
from groupax.serve.weights import Weights

Handler = Callable[[HttpRequest], Awaitable[Response]]


class WeightUploads:
    """The handlers of /groupax/v1/weights.

    Args:
        loop: The engines.
        weights: Their weights.
        keys: Keys of the server; without any, weights cannot be changed.
        max_body_bytes: Size of a request.
    """

    def __init__(self, loop: EngineLoop, weights: Weights, keys: tuple[str, ...], max_body_bytes: int) -> None:
        self._loop, self._weights, self._keys, self._max_body_bytes = loop, weights, keys, max_body_bytes

    def routes(self, endpoint: Callable[[Handler], Handler]) -> list[Route]:
        """Returns the routes.

        Args:
            endpoint: Wraps a handler (see `app.Server.endpoint`).
        """
        weights, upload = "/groupax/v1/weights", "/groupax/v1/weights/{upload}"
        return [
            Route(weights, endpoint(self.list_weights)),
            Route(weights, endpoint(self.begin_upload), methods=["POST"]),
            Route(upload, endpoint(self.abort_upload), methods=["DELETE"]),
            Route(upload + "/{piece:int}", endpoint(self.put_piece), methods=["PUT"]),
            Route(upload + "/commit", endpoint(self.commit_upload), methods=["POST"]),
        ]

    async def list_weights(self, _: HttpRequest) -> Response:
        """Handles GET /groupax/v1/weights: version and state of each model's weights."""
        return JSONResponse(self._weights.describe())

    async def begin_upload(self, http: HttpRequest) -> Response:
        """Handles POST /groupax/v1/weights: announces an upload."""
        self._check_may_change()
        body = await json_body(http, self._max_body_bytes)
        return JSONResponse(self._weights.begin(await run_in_threadpool(parse_json, body)))

    async def put_piece(self, http: HttpRequest) -> Response:
        """Handles PUT /groupax/v1/weights/UPLOAD/PIECE."""
        self._check_may_change()
        upload, piece = http.path_params["upload"], http.path_params["piece"]
        return JSONResponse(await self._weights.put(upload, piece, http.headers.get("x-crc32"), http.stream()))

    async def abort_upload(self, http: HttpRequest) -> Response:
        """Handles DELETE /groupax/v1/weights/UPLOAD."""
        self._check_may_change()
        return JSONResponse(self._weights.abort(http.path_params["upload"]))

    async def commit_upload(self, http: HttpRequest) -> Response:
        """Handles POST /groupax/v1/weights/UPLOAD/commit: the engine takes over all new weights or none."""
        self._check_may_change()
        upload = self._weights.close(http.path_params["upload"])
        held = await run_in_threadpool(self._weights.prepared, upload)
        try:
            taken = self._loop.between_chunks(lambda: self._weights.take_over(upload, held))
            return JSONResponse(await asyncio.wrap_future(taken))
        except ClosedError as error:
            raise stopping() from error

    def _check_may_change(self) -> None:
        if not self._keys:
            raise ApiError(403, "weights can be changed only on a server with keys; start it with --api_key")
