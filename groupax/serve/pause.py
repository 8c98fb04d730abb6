"""Pauses of an `EngineLoop`, as of vLLM: requests are kept, finished or aborted while weights change."""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Literal, get_args

from groupax.serve.errors import ApiError

PauseMode = Literal["keep", "wait", "abort"]
# Fields of vLLM's pauses that are refused, with the reason.
REFUSED = {
    "clear_cache": "clear_cache is not supported: a kept request continues with the keys and values that it has, and "
    "the prefix cache is cleared when the weights change; leave it out",
    "wait_for_inflight_requests": "wait_for_inflight_requests is not supported; set mode=wait",
}


class Pause:
    """The state of a loop that can be paused. Its methods belong to the loop's thread.

    Attributes:
        mode: None while engines run.
        is_paused: Whether no chunk is decoded; with "wait" only after the last running request has finished.
    """

    def __init__(self) -> None:
        self.mode: PauseMode | None = None
        self.is_paused = False
        self._waiting: list[Future[None]] = []

    def begin(self, mode: PauseMode, future: Future[None], is_busy: bool) -> None:
        """Begins a pause, or changes its mode; the future ends when it is reached."""
        self.mode, self.is_paused = mode, False
        self._waiting.append(future)
        self.update(is_busy)

    def update(self, is_busy: bool) -> None:
        """Looks at whether running requests have finished; to be called after each chunk."""
        if self.mode is not None and not (self.mode == "wait" and is_busy):
            self.is_paused = True
            self._release()

    def end(self) -> None:
        """Ends the pause."""
        self.mode, self.is_paused = None, False
        self._release()

    def _release(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            future.set_result(None)


def pause_mode(query: Mapping[str, str], headers: Mapping[str, str]) -> PauseMode:
    """Returns the mode in the query of a request to pause; "abort" by default, as in vLLM.

    Raises:
        ApiError: there is no such mode, the query has other fields, or the request has a body, in which a mode would
            have no effect.
    """
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise ApiError(400, "a pause has no body; its mode is in the query, as in /pause?mode=keep", param="mode")
    unknown = sorted(query.keys() - {"mode"})
    if unknown:
        message = f"unknown query field {unknown[0][:80]!a}; a pause has only mode"
        raise ApiError(400, REFUSED.get(unknown[0], message), param=unknown[0] if unknown[0] in REFUSED else "mode")
    for mode in get_args(PauseMode):
        if query.get("mode", "abort") == mode:
            return mode
    message = f"mode must be one of {', '.join(get_args(PauseMode))}, got {query['mode'][:80]!a}"
    raise ApiError(400, message, param="mode")
