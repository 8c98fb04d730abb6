"""Programs that threads compile while the engine decodes with those that it has.

    Programs.missing(needed) ──► request ──► compiling threads ──► on_compiled ──► missing(needed) is empty

A program is named by a record of `ahead_of_time` and compiled for the arrays that the engine will call it with; the
call then finds it in the caches of jax.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from groupax.engine.ahead_of_time import Program, Tracer
from groupax.engine.core import EngineCore

logger = logging.getLogger(__name__)

NUM_THREADS = 2


class Programs:
    """The compiled programs of an engine, and threads that compile further ones.

    Args:
        engine: The engine; programs are compiled for the shapes, dtypes and shardings of its weights.
        on_compiled: Called in a compiling thread whenever a program was compiled.

    Attributes:
        num_compiled: Number of compiled programs.
        seconds: Seconds that compiling took, of all threads together.
    """

    def __init__(self, engine: EngineCore, on_compiled: Callable[[], object]) -> None:
        self.engine, self.on_compiled = engine, on_compiled
        self.num_compiled, self.seconds = 0, 0.0
        self._changed = threading.Condition()
        self._weights: tuple[int, int] | None = None  # which the next two are for
        self._compiled: set[Program] = set()
        self._tracer: Tracer | None = None
        self._all_compiled: dict[Any, set[Program]] = {}  # by the shapes, dtypes and shardings of the weights
        self._requested: deque[Program] = deque()
        self._compiling: set[Program] = set()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._compile, name=f"compiler {n}", daemon=True) for n in range(NUM_THREADS)
        ]

    def missing(self, needed: Iterable[Program]) -> list[Program]:
        """Returns the programs that are not compiled, in their order. Called by the thread that decodes."""
        self._look_at_weights()
        return [program for program in dict.fromkeys(needed) if program not in self._compiled]

    def request(self, programs: Iterable[Program], first: bool = False) -> None:
        """Has programs compiled that `missing` has returned, in the order of their requests.

        Args:
            programs: The programs.
            first: Whether they are compiled before all that have been requested.
        """
        with self._changed:
            if self._closed:
                return
            done = {*self._compiling, *self._compiled}
            added, before = [each for each in programs if each not in done], list(self._requested)
            self._requested = deque(dict.fromkeys([*added, *before] if first else [*before, *added]))
            if self._requested:
                for thread in self._threads:
                    if thread.ident is None:
                        thread.start()
            self._changed.notify_all()

    def wait(self, programs: Iterable[Program]) -> None:
        """Waits until requested programs are compiled, or dropped because the weights changed or this was closed."""
        programs = set(programs)
        with self._changed:
            self._changed.wait_for(lambda: not programs & {*self._requested, *self._compiling})

    def close(self) -> None:
        """Ends the threads, after the programs that they are compiling."""
        with self._changed:
            self._closed = True
            self._requested.clear()
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _look_at_weights(self) -> None:
        """Forgets all programs if the weights have other shapes, dtypes or shardings than before."""
        engine, params = self.engine, self.engine.params
        weights = id(params), engine.version
        if weights == self._weights:
            return
        leaves, structure = jax.tree.flatten(params)
        kinds = tuple(
            (np.shape(leaf), np.dtype(getattr(leaf, "dtype", type(leaf))), getattr(leaf, "sharding", None))
            for leaf in leaves
        )
        with self._changed:
            self._weights = weights
            self._tracer = Tracer(
                engine.config,
                engine.mesh,
                jax.tree.map(_abstract, params),
                engine.kv_dtype,
                engine.chunk_steps,
                has_prefixes=bool(engine.prefixes.max_bytes),
                is_served=True,
                has_adapters=bool(engine.adapters),
                records_experts=engine.records_experts,
            )
            compiled = self._all_compiled.setdefault((structure, kinds), set())
            if compiled is not self._compiled:
                self._compiled = compiled
                self._requested.clear()

    def _compile(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._requested or self._closed)
                if self._closed:
                    return
                program = self._requested.popleft()
                self._compiling.add(program)
                compiled, tracer = self._compiled, self._tracer
            assert tracer is not None, "programs are requested after `missing` has looked at the weights"
            started_s = time.monotonic()
            try:
                for traced in tracer.traced(program):
                    traced.lower().compile()
            except Exception:
                # counts as compiled: where it is called, the error concerns the requests that need it
                logger.exception("a program could not be compiled: %s", program)
            with self._changed:
                compiled.add(program)
                self._compiling.discard(program)
                self.num_compiled += 1
                self.seconds += time.monotonic() - started_s
                self._changed.notify_all()
            self.on_compiled()


def _abstract(leaf: Any) -> Any:
    """Returns an array's shape, dtype and sharding; a number as it is."""
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
