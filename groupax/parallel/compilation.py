"""How long this process spends compiling programs, by what jax reports of it."""

import functools
import threading
import time

from jax import monitoring

REQUESTED = "/jax/compilation_cache/compile_requests_use_cache"
COMPILED = "/jax/core/compile/backend_compile_duration"
TOLD_AFTER_S = 0.5  # a program that is read back from the cache takes less


class Compilation:
    """The programs that this process compiles, in whatever thread; those read back from the cache on disk count too.

    Attributes:
        seconds: spent so far on programs that are complete.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began_s: dict[int, float] = {}  # by thread
        monitoring.register_event_listener(self._requested)
        monitoring.register_event_duration_secs_listener(self._compiled)

    @property
    def is_under_way(self) -> bool:
        """Whether a program is being compiled, and not just read back from the cache."""
        now_s = time.monotonic()
        return any(now_s - began_s > TOLD_AFTER_S for began_s in self._began_s.copy().values())

    def _requested(self, event: str, **_: object) -> None:
        if event == REQUESTED:
            self._began_s[threading.get_ident()] = time.monotonic()

    def _compiled(self, event: str, duration_secs: float, **_: object) -> None:
        if event == COMPILED:
            self._began_s.pop(threading.get_ident(), None)
            self.seconds += duration_secs


@functools.cache
def compilation() -> Compilation:
    """Returns the one record of this process."""
    return Compilation()
