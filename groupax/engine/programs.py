"""Programs that are compiled in threads of their own, while the engine decodes with those that it has.

    Programs.missing(needed) ──► request ──► compiling threads ──► on_compiled ──► missing(needed) is empty

A program is named by its record here and compiled for the arrays that the engine will call it with; the call then finds
it in the caches of jax.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from groupax.engine.batch import cache_maker
from groupax.engine.cache import ROWS, Cache, empty_cache, pspec_of
from groupax.engine.cache_ops import move, move_slots, read_slot, release, take
from groupax.engine.decode import Known, admit, decode_chunk
from groupax.engine.plan import CacheShape
from groupax.engine.slots import slot_table, to_slots
from groupax.parallel.mesh import num_data_shards
from groupax.settings.sampling import BIASED_TOKENS, STOP_IDS

if TYPE_CHECKING:
    from groupax.engine.engine import Engine

logger = logging.getLogger(__name__)

NUM_THREADS = 2


@dataclass(frozen=True)
class Begin:
    """An empty cache of this shape."""

    shape: CacheShape


@dataclass(frozen=True)
class Decode:
    """A chunk, and freeing the slots of sequences that have ended."""

    shape: CacheShape


@dataclass(frozen=True)
class Admit:
    """An admission of so many prompts, computed at so many columns, on each shard."""

    shape: CacheShape
    size: tuple[int, int]


@dataclass(frozen=True)
class Change:
    """A cache of one shape becomes one of another, or its contents move."""

    before: CacheShape
    after: CacheShape


Program = Begin | Decode | Admit | Change


class Programs:
    """The programs of an engine that are compiled, and threads that compile further ones.

    Args:
        engine: its weights say for which arrays programs are compiled; others of the same shapes and dtypes need none.
        on_compiled: called in a compiling thread whenever programs were compiled.

    Attributes:
        num_compiled: programs so far.
        seconds: that compiling them took, of all threads together.
    """

    def __init__(self, engine: "Engine", on_compiled: Callable[[], object]) -> None:
        self.engine, self.on_compiled = engine, on_compiled
        self.num_compiled, self.seconds = 0, 0.0
        self._changed = threading.Condition()
        self._weights: tuple[int, int] | None = None  # which the next two are for
        self._known: set[Program] = set()
        self._kinds: Any = None
        self._all_known: dict[Any, set[Program]] = {}  # by what the weights are like
        self._wanted: deque[Program] = deque()
        self._compiling: set[Program] = set()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._compile, name=f"compiler {n}", daemon=True) for n in range(NUM_THREADS)
        ]

    def missing(self, needed: Iterable[Program]) -> list[Program]:
        """Returns the programs that are not compiled, in their order. Called by the thread that decodes."""
        self._look_at_weights()
        return [program for program in dict.fromkeys(needed) if program not in self._known]

    def request(self, programs: Iterable[Program]) -> None:
        """Have programs compiled that `missing` has returned, those that were requested first before others."""
        with self._changed:
            if self._closed:
                return
            waiting = {*self._wanted, *self._compiling, *self._known}
            self._wanted.extend(program for program in dict.fromkeys(programs) if program not in waiting)
            if self._wanted:
                for thread in self._threads:
                    if thread.ident is None:
                        thread.start()
            self._changed.notify_all()

    def wait(self, programs: Iterable[Program]) -> None:
        """Wait until requested programs are compiled, or given up because the weights changed or all is closed."""
        programs = set(programs)
        with self._changed:
            self._changed.wait_for(lambda: not programs & {*self._wanted, *self._compiling})

    def admissions(self, shape: CacheShape) -> list[tuple[int, int]]:
        """Returns the sizes of admissions that are compiled for a shape."""
        with self._changed:
            return [each.size for each in self._known if isinstance(each, Admit) and each.shape == shape]

    def close(self) -> None:
        """End the threads, after the programs that they compile."""
        with self._changed:
            self._closed = True
            self._wanted.clear()
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _look_at_weights(self) -> None:
        """Forgets all programs if the weights have other shapes, dtypes or shardings than before."""
        params = self.engine.params
        weights = id(params), self.engine.version
        if weights == self._weights:
            return
        leaves, structure = jax.tree.flatten(params)
        kinds = tuple(
            (np.shape(leaf), np.dtype(getattr(leaf, "dtype", type(leaf))), getattr(leaf, "sharding", None))
            for leaf in leaves
        )
        with self._changed:
            self._weights, self._kinds = weights, jax.tree.map(_kind, params)
            known = self._all_known.setdefault((structure, kinds), set())
            if known is not self._known:
                self._known = known
                self._wanted.clear()

    def _compile(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._closed)
                if self._closed:
                    return
                program = self._wanted.popleft()
                self._compiling.add(program)
                known, params = self._known, self._kinds
            begun_s = time.monotonic()
            try:
                for lowered in lowered_programs(self.engine, params, program):
                    lowered.compile()
            except Exception:
                # taken for compiled: where it is called the error concerns the requests that need it
                logger.exception("a program could not be compiled: %s", program)
            with self._changed:
                known.add(program)
                self._compiling.discard(program)
                self.num_compiled += 1
                self.seconds += time.monotonic() - begun_s
                self._changed.notify_all()
            self.on_compiled()


def _kind(leaf: Any) -> Any:
    """An array's shape, dtype and place; a number as it is."""
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def lowered_programs(engine: "Engine", params: Any, program: Program) -> Iterator[jax.stages.Lowered]:
    """Yields what is compiled for a program, lowered for the arrays that a batch of the engine has.

    Args:
        engine: whose programs.
        params: the shapes, dtypes and places of its weights.
        program: which one.
    """
    config, mesh, static = engine.config, engine.mesh, {"config": engine.config, "mesh": engine.mesh}
    num_shards = num_data_shards(mesh)

    def on_rows(array: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, ROWS))

    def placed(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, pspec_of(x)))

    def numbers(*sizes: int) -> jax.ShapeDtypeStruct:
        return on_rows(np.zeros(sizes, np.int32))

    def sizes(shape: CacheShape) -> tuple[int, int, int, int]:
        places, slots = num_shards * shape.num_prompt_slots, num_shards * shape.num_slots
        return places, shape.num_prompt_columns, slots, shape.num_columns

    def cache_of(shape: CacheShape) -> Cache:
        return jax.tree.map(placed, jax.eval_shape(lambda: empty_cache(config, *sizes(shape), engine.kv_dtype)))

    def slots_for(shape: CacheShape) -> Any:
        table = slot_table(num_shards * shape.num_slots, STOP_IDS, BIASED_TOKENS)
        return jax.tree.map(on_rows, jax.eval_shape(lambda: to_slots(table, jnp.asarray)))

    match program:
        case Begin(shape):
            yield cache_maker(config, *sizes(shape), engine.kv_dtype, mesh).lower()
        case Decode(shape):
            cache, slots = cache_of(shape), slots_for(shape)
            column = np.int32(0)
            yield decode_chunk.lower(params, cache, slots, column, num_steps=engine.chunk_steps, **static)
            yield release.lower(slots, on_rows(np.zeros(num_shards * shape.num_slots, bool)))
            if engine.prefixes.max_bytes:
                yield read_slot.lower(cache, slots, 0, 0)
        case Admit(shape, (num_prompts, length)):
            cache, slots = cache_of(shape), slots_for(shape)
            num_prompts *= num_shards
            is_new = on_rows(np.zeros(num_shards * shape.num_slots, bool))
            prompts = numbers(num_prompts, length), numbers(num_prompts), numbers(num_shards * shape.num_prompt_slots)
            yield admit.lower(params, cache, slots, *prompts, is_new, slots, None, **static)
            if engine.prefixes.max_bytes:
                per_prompt = sizes(replace(shape, num_slots=num_prompts // num_shards, share=1, num_columns=length))

                def known_of(per_prompt: tuple[int, int, int, int] = per_prompt) -> Known:
                    rows = empty_cache(config, *per_prompt, engine.kv_dtype)
                    return Known(rows.prompt_starts, rows.k, rows.v)

                known = jax.tree.map(placed, jax.eval_shape(known_of))
                yield admit.lower(params, cache, slots, *prompts, is_new, slots, known, **static)
        case Change(before, after):
            cache, shift = cache_of(before), jnp.int32(0)
            has_rows = before.num_slots != after.num_slots
            added = after.num_prompt_columns != before.num_prompt_columns
            has_places = has_rows or added or before.share != after.share
            rows = numbers(num_shards * after.num_slots) if has_rows else None
            places = numbers(num_shards * after.num_prompt_slots) if has_places else None
            kinds = {(x.shape, x.dtype): (x, axis) for x, axis in ((cache.tokens, 1), (cache.k[0], 3), (cache.v[0], 2))}
            for x, axis in kinds.values():
                yield move.lower(x, rows, shift, axis=axis, num_columns=after.num_columns, mesh=mesh)
            for x, axis in ((cache.prompt_tokens, 1), (cache.prompt_k[0], 3), (cache.prompt_v[0], 2)):
                if added:
                    yield move.lower(x, places, shift, axis=axis, num_columns=after.num_prompt_columns, mesh=mesh)
                elif places is not None:
                    yield take.lower(x, places, mesh=mesh)
            if places is not None:
                yield take.lower(cache.prompt_starts, places, mesh=mesh)
            yield move_slots.lower(slots_for(before), rows, shift, mesh=mesh)
