"""How long this process spends compiling programs, by what jax reports of it."""

import functools
import threading
import time
from collections import deque

from jax import monitoring

REQUESTED = "/jax/compilation_cache/compile_requests_use_cache"
COMPILED = "/jax/core/compile/backend_compile_duration"
PARTS = {COMPILED, "/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/jaxpr_to_mlir_module_duration"}
TOLD_AFTER_S = 0.5  # a program that is read back from the cache takes less
MOST_PARTS = 1000  # that a traced function may have within it


class Compilation:
    """The programs that this process traces and compiles, in whatever thread, or reads back from the cache on disk.

    Attributes:
        seconds: spent so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._requested_s: dict[int, float] = {}  # by thread
        self._parts: dict[int, deque[tuple[float, float]]] = {}  # by thread: beginning and seconds, none within another
        monitoring.register_event_listener(self._event)
        monitoring.register_event_duration_secs_listener(self._duration)

    @property
    def is_under_way(self) -> bool:
        """Whether a program is being compiled, and not just read back from the cache."""
        now_s = time.monotonic()
        return any(now_s - requested_s > TOLD_AFTER_S for requested_s in self._requested_s.copy().values())

    def _event(self, event: str, **_: object) -> None:
        if event == REQUESTED:
            self._requested_s[threading.get_ident()] = time.monotonic()

    def _duration(self, event: str, duration_secs: float, **_: object) -> None:
        thread = threading.get_ident()
        if event == COMPILED:
            self._requested_s.pop(thread, None)
        if event in PARTS:
            began_s = time.monotonic() - duration_secs
            parts = self._parts.setdefault(thread, deque(maxlen=MOST_PARTS))
            while parts and parts[-1][0] >= began_s:  # a function that was traced within another one
                self.seconds -= parts.pop()[1]
            parts.append((began_s, duration_secs))
            self.seconds += duration_secs


@functools.cache
def compilation() -> Compilation:
    """Returns the one record of this process."""
    return Compilation()
