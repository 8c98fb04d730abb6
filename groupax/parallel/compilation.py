"""The time that this process spends compiling programs, as jax reports it."""

import ctypes
import functools
import sys
import threading
import time
from collections import Counter, deque

from jax import monitoring

REQUESTED = "/jax/compilation_cache/compile_requests_use_cache"
COMPILED = "/jax/core/compile/backend_compile_duration"
STAGES = {COMPILED, "/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/jaxpr_to_mlir_module_duration"}
# The functions that run all layers of a model or update all weights, whose compilation takes seconds.
LARGE_PROGRAMS = ("admit", "decode_chunk", "micro_step", "score", "apply_update")
CACHE_READ_S = 0.5  # reading a program back from the cache takes less
MAX_NESTED_STAGES = 1000  # traced functions within one function


class Compilation:
    """The programs that this process traces and compiles, in any thread, or reads back from the cache on disk.

    Attributes:
        seconds: Time spent so far.
        programs: Number of programs so far, by the name of the function.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.programs: Counter[str] = Counter()
        self._requested_s: dict[int, float] = {}  # by thread
        self._stages: dict[int, deque[tuple[float, float]]] = {}  # by thread: start and seconds, without nested ones
        monitoring.register_event_listener(self._on_event)
        monitoring.register_event_duration_secs_listener(self._on_duration)

    @property
    def is_under_way(self) -> bool:
        """True while a program is being compiled, and not just read back from the cache."""
        now_s = time.monotonic()
        return any(now_s - requested_s > CACHE_READ_S for requested_s in self._requested_s.copy().values())

    def _on_event(self, event: str, **_: object) -> None:
        if event == REQUESTED:
            self._requested_s[threading.get_ident()] = time.monotonic()

    @property
    def num_programs(self) -> int:
        """Number of programs so far."""
        return self.programs.total()

    @property
    def num_large_programs(self) -> int:
        """Number of programs so far that run the model's layers or update its weights."""
        return sum(self.programs[name] for name in LARGE_PROGRAMS)

    def _on_duration(self, event: str, duration_secs: float, **kwargs: object) -> None:
        thread = threading.get_ident()
        if event == COMPILED:
            self._requested_s.pop(thread, None)
            name = str(kwargs.get("fun_name")).removeprefix("jit(").removesuffix(")")
            self.programs[name] += 1
            if name in LARGE_PROGRAMS:
                return_freed_memory()
        if event in STAGES:
            start_s = time.monotonic() - duration_secs
            stages = self._stages.setdefault(thread, deque(maxlen=MAX_NESTED_STAGES))
            while stages and stages[-1][0] >= start_s:  # a function that was traced within this one
                self.seconds -= stages.pop()[1]
            stages.append((start_s, duration_secs))
            self.seconds += duration_secs


def return_freed_memory() -> None:
    """Gives the system back what malloc keeps of freed memory; a compiler leaves hundreds of megabytes of it."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)


@functools.cache
def compilation() -> Compilation:
    """Returns the one record of this process."""
    return Compilation()
