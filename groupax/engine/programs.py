"""The engine's programs, and which of them a server compiles while it decodes with others.

A server's batches have few shapes: slots and columns in powers of two, prompt columns in powers of four. Those of usual
requests are compiled at the start. A request that none of the compiled programs can take waits until threads have
compiled one; the others go on meanwhile, and what completions need when they grow longer is compiled while they grow.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.stages import Traced

from groupax.core.settings.sampling import SamplingKind, sampling_kind
from groupax.engine.cache import (
    ROWS,
    Cache,
    Slots,
    abstract_cache,
    cache_maker,
    pspec_of,
    release,
    slot_table,
    to_slots,
)
from groupax.engine.conversations import Known, read_slots
from groupax.engine.core import EngineCore
from groupax.engine.decode import DecodeSettings, decode_chunk
from groupax.engine.plan import CACHE_COLUMNS, CacheShape, Demand, Plan, admission_prompts, in_steps, power_of_two
from groupax.engine.prefill import Admitted, admit
from groupax.engine.resizing import Resizing, move, move_slots, moves, what_moves
from groupax.engine.rules import TokenMasks
from groupax.engine.sequence import Sequence
from groupax.models.config import ModelConfig
from groupax.models.specs import Params
from groupax.parallel.mesh import num_data_shards

logger = logging.getLogger(__name__)

NUM_THREADS = 2

# The kind of sampling of a chunk, and whether it has constraints; each of a server's kinds includes those before it.
Kind = tuple[SamplingKind, bool]
KINDS: tuple[Kind, ...] = (("plain", False), ("general", False), ("general", True))


@dataclass(frozen=True)
class Admit:
    """An empty cache of a shape, and an admission into it."""

    shape: CacheShape


@dataclass(frozen=True)
class Decode:
    """A chunk, and freeing the slots of finished sequences."""

    shape: CacheShape
    kind: Kind


@dataclass(frozen=True)
class Change:
    """A cache of one shape becomes one of another, or its contents move."""

    before: CacheShape
    after: CacheShape


Program = Admit | Decode | Change


@dataclass(frozen=True, eq=False)
class Tracer:
    """Traces the programs that a batch calls, for arrays that need not exist."""

    config: ModelConfig  # architecture of the model
    mesh: Mesh  # real devices, or devices of a topology (`jax.experimental.topologies`)
    params: Params  # shapes, dtypes and shardings of the weights to decode with
    kv_dtype: Any  # dtype of keys and values
    chunk_steps: int  # number of tokens of a chunk
    has_prefixes: bool = False  # whether the keys and values of finished sequences are stored and reused
    # whether the programs are a server's: chunks have a limit of their steps at run time, and prompts are computed in
    # short pieces
    is_served: bool = False
    has_adapters: bool = False  # whether the weights have several adapters, from which each slot chooses one

    def traced(self, program: Program) -> Iterator[Traced]:
        """Yields the jitted functions behind a program, each traced for its arguments."""
        match program:
            case Admit(shape):
                yield cache_maker(self.config, self.mesh, shape, self.kv_dtype).trace()
                yield self.admit(shape)
                if self.has_prefixes:
                    yield self.admit(shape, has_known=True)
            case Decode(shape, (sampling, is_constrained)):
                yield self.decode_chunk(shape, sampling, is_constrained)
                yield release.trace(self._slots(shape), self._rows(shape.num_slots, dtype=bool))
                if self.has_prefixes:
                    yield read_slots.trace(self.cache(shape), self._rows(1), self._rows(1), mesh=self.mesh)
            case Change(before, after):
                yield from self._change(before, after)

    def cache(self, shape: CacheShape) -> Cache:
        """Returns the shapes of a cache."""
        return abstract_cache(self.config, self.mesh, shape, self.kv_dtype)

    def decode_chunk(self, shape: CacheShape, sampling: SamplingKind, is_constrained: bool = False) -> Traced:
        """Returns the traced `decode_chunk` for caches of a shape and a kind of sampling, with masks or without."""
        num_slots, masks = num_data_shards(self.mesh) * shape.num_slots, None
        if is_constrained:
            words = np.zeros((num_slots, -(-self.config.vocab_size // 32)), np.int32)
            masks = self._sharded(jax.eval_shape(lambda: TokenMasks(jnp.asarray(words), jnp.zeros(num_slots, bool))))
        limit = jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(self.mesh, jax.P()))
        settings = DecodeSettings(self.config, self.mesh, self.chunk_steps, sampling)
        cache, slots, limit = self.cache(shape), self._slots(shape), limit if self.is_served else None
        return decode_chunk.trace(self.params, cache, slots, masks, limit, settings=settings)

    def admit(self, shape: CacheShape, has_known: bool = False) -> Traced:
        """Returns the traced `admit` for caches of a shape, with or without prompts of known beginnings."""
        num_prompts, num_columns = admission_prompts(shape, self.has_prefixes), shape.num_prompt_columns
        known = None
        if has_known:
            cache = self.cache(CacheShape(num_prompts, 1, num_columns, 1))
            known = self._sharded(
                jax.eval_shape(lambda x: Known(x.prompt_starts, [each[:2] for each in x.layers]), cache)
            )
        admitted = Admitted(
            prompts=self._rows(num_prompts, num_columns),
            starts=self._rows(num_prompts),
            num_prompts=self._rows(1),
            source=self._rows(shape.num_prompt_slots),
            is_new=self._rows(shape.num_slots, dtype=bool),
            slots=self._slots(shape),
            known=known,
            adapters=self._rows(num_prompts) if self.has_adapters else None,
        )
        static = {"config": self.config, "mesh": self.mesh, "by_block": False}  # as calls give them: defaults differ
        cache, slots = self.cache(shape), self._slots(shape)
        return admit.trace(self.params, cache, slots, admitted, **static, short_pieces=self.is_served)

    def _change(self, before: CacheShape, after: CacheShape) -> Iterator[Traced]:
        moves_slots, moves_prompts = what_moves(before, after)
        rows = self._rows(after.num_slots) if moves_slots else None
        prompt_slots = self._rows(after.num_prompt_slots) if moves_prompts else None
        cache = self.cache(before)
        seen = set()  # layers share programs
        for call, x in zip(moves(cache, rows, prompt_slots, after, self.mesh), jax.tree.leaves(cache), strict=True):
            static = {} if call is None else {name: each for name, each in call.keywords.items() if name != "rows"}
            if call is not None and (key := (x.shape, x.dtype, *static.items())) not in seen:
                seen.add(key)
                yield move.trace(x, **call.keywords)  # as calls give them
        if moves_slots:
            yield move_slots.trace(self._slots(before), rows, mesh=self.mesh)

    def _slots(self, shape: CacheShape) -> Slots:
        num_slots = num_data_shards(self.mesh) * shape.num_slots
        table = slot_table(num_slots, self.has_adapters)
        return self._sharded(jax.eval_shape(lambda: to_slots(table, jnp.asarray)))

    def _sharded(self, shapes: Any) -> Any:
        return jax.tree.map(lambda x: x.update(sharding=NamedSharding(self.mesh, pspec_of(x))), shapes)

    def _rows(self, per_shard: int, *sizes: int, dtype: Any = np.int32) -> Any:
        shape = (num_data_shards(self.mesh) * per_shard, *sizes)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, ROWS))


class Programs:
    """The compiled programs of an engine, and threads that compile further ones.

    A program is compiled for the arrays that the engine will call it with; the call finds it in the caches of jax.

    Args:
        engine: The engine; programs are compiled for the shapes, dtypes and shardings of its weights.
        on_compiled: Called in a compiling thread whenever a program was compiled.

    Attributes:
        num_compiled: Number of compiled programs.
    """

    def __init__(self, engine: EngineCore, on_compiled: Callable[[], object]) -> None:
        self.engine, self.on_compiled, self.num_compiled = engine, on_compiled, 0
        self._threads = ThreadPoolExecutor(NUM_THREADS, "compiler")
        self._lock = threading.Lock()
        self._closed = False
        self._weights: tuple[int, int] | None = None  # which the next two are for
        self._tracer: Tracer | None = None
        self._of_weights: dict[Program, Future[None]] = {}
        self._abstract: Any = None  # shapes, dtypes and shardings of these weights

    def missing(self, needed: Iterable[Program]) -> list[Program]:
        """Returns the programs that are not compiled, in their order. Called by the thread that decodes."""
        self._look_at_weights()
        return [each for each in dict.fromkeys(needed) if each not in self._of_weights or not self._is_done(each)]

    def covering(self, shape: CacheShape, kind: Kind) -> Kind | None:
        """Returns the first compiled kind of chunk that includes this one; None if there is none."""
        others = KINDS[KINDS.index(kind) :]
        return next((each for each in others if not self.missing([Decode(shape, each)])), None)

    def can_run(self, needed: Iterable[Program]) -> bool:
        """Returns whether all of these programs are compiled, or others that include them."""
        return all(isinstance(each, Decode) and self.covering(each.shape, each.kind) for each in self.missing(needed))

    def request(self, programs: Iterable[Program]) -> None:
        """Has programs compiled that `missing` has returned, in the order of their requests."""
        for program in programs:
            with self._lock:
                if program in self._of_weights or self._closed:
                    continue
                assert self._tracer is not None, "set by `missing`"
                future = self._threads.submit(self._compile, program, self._tracer)
                self._of_weights[program] = future
            future.add_done_callback(self._compiled)

    def wait(self, programs: Iterable[Program]) -> None:
        """Waits until requested programs are compiled, or this is closed."""
        for future in [self._of_weights[each] for each in programs if each in self._of_weights]:
            with suppress(CancelledError):
                future.result()

    def is_compiling(self, program: Program) -> bool:
        """Returns whether a thread compiles a program now."""
        return program in self._of_weights and self._of_weights[program].running()

    def close(self) -> None:
        """Ends the threads, after the programs that they are compiling."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(cancel_futures=True)

    def _is_done(self, program: Program) -> bool:
        future = self._of_weights[program]
        return future.done() and not future.cancelled()

    def _look_at_weights(self) -> None:
        """Forgets all programs if the weights have other shapes, dtypes or shardings than before."""
        engine, params = self.engine, self.engine.params
        weights = id(params), engine.version
        if weights == self._weights:
            return
        abstract = jax.tree.map(_abstract, params)
        self._weights = weights
        self._tracer = Tracer(
            engine.config,
            engine.mesh,
            abstract,
            engine.kv_dtype,
            engine.chunk_steps,
            has_prefixes=bool(engine.prefixes.max_bytes),
            is_served=True,
            has_adapters=bool(engine.adapters),
        )
        with self._lock:
            if abstract != self._abstract:
                for future in self._of_weights.values():
                    future.cancel()
                self._abstract, self._of_weights = abstract, {}

    def _compile(self, program: Program, tracer: Tracer) -> None:
        if not threading.main_thread().is_alive():  # the interpreter waits for this thread before it ends
            return
        try:
            for traced in tracer.traced(program):
                traced.lower().compile()
        except Exception:
            # counts as compiled: where it is called, the error concerns the requests that need it
            logger.exception("a program could not be compiled: %s", program)

    def _compiled(self, future: Future[None]) -> None:
        if not future.cancelled():
            with self._lock:
                self.num_compiled += 1
            self.on_compiled()


def _abstract(leaf: Any) -> Any:
    """Returns an array's shape, dtype and sharding; a number as it is."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) if isinstance(leaf, jax.Array) else leaf


PROMPT_COLUMNS, PROMPT_STEP, COLUMNS_STEP = 256, 4, 2
NEAR_SHAPES = 2  # numbers of columns for which programs must be compiled before a sequence starts
MIN_CHUNK_S = 0.025
HOST_FRAC = 0.1
MAX_HOST_S = 0.1  # longer times are those of something else, for example of new arrays
SMOOTHING = 0.25  # weight of the newest time of the host
ADMISSION_STEPS = 4


class Pace:
    """Chooses the lengths of a server's chunks and admissions by the times of those before.

    Short chunks return tokens sooner and let requests join sooner; each costs time of the host. An admission and the
    chunk after it therefore take about `MIN_CHUNK_S` together, or longer where the host needs more than `HOST_FRAC` of
    its time. Prompts that wait for the next admission leave the device to those that are decoded, which get at least
    one token for about every `ADMISSION_STEPS` steps' time of admissions.

    Attributes:
        host_s: Mean time of the host between two chunks.
        device_s: Time of the last chunk and of the admission before it.
    """

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps
        self.host_s = self.device_s = 0.0
        self._step_s: dict[CacheShape, float] = {}
        self._prompt_s = self._admission_s = 0.0

    def num_steps(self, shape: CacheShape) -> int:
        """Returns the number of steps of the next chunk: one for a shape that has had none."""
        if shape not in self._step_s:
            return 1
        return _times_in(self.target_s - self._admission_s, self._step_s[shape], self.max_steps)

    def num_prompts(self, shape: CacheShape, most: int) -> int:
        """Returns the maximum number of prompts of the next admission."""
        return _times_in(max(self.target_s, ADMISSION_STEPS * self._step_s.get(shape, 0.0)), self._prompt_s, most)

    def add_admission(self, num_prompts: int, seconds: float) -> None:
        """Adds the time of the admission before the next chunk."""
        self._prompt_s, self._admission_s = seconds / num_prompts, seconds

    def add_chunk(self, shape: CacheShape, num_steps: int, seconds: float) -> None:
        """Adds the time of a chunk that took this many steps."""
        self.device_s, self._admission_s = self._admission_s + seconds, 0.0
        if num_steps:
            self._step_s[shape] = seconds / num_steps

    def add_host(self, seconds: float) -> None:
        """Adds the time of the host between two chunks."""
        self.host_s += SMOOTHING * (min(seconds, MAX_HOST_S) - self.host_s)

    @property
    def target_s(self) -> float:
        """Time that an admission and a chunk may take together."""
        return max(MIN_CHUNK_S, self.host_s / HOST_FRAC)


def _times_in(seconds: float, each_s: float, most: int) -> int:
    return max(1, min(most, round(seconds / max(each_s, 1e-9))))


@dataclass(eq=False)
class Serving:
    """The choice of shapes of a server's batches, by which few programs are compiled and nobody waits for others'."""

    programs: Programs  # programs that are compiled while the engine decodes
    plan: Plan  # limits of the cache
    pace: Any = None  # chooses the length of chunks; None for one of its own

    def __post_init__(self) -> None:
        self.pace = self.pace or Pace(self.programs.engine.chunk_steps)
        self._held: set[tuple[Any, ...]] = set()  # kinds of requests that wait for programs, until one is compiled
        self._num_programs = 0

    @property
    def has_new(self) -> bool:
        """True if programs were compiled since the last `look`."""
        return self.programs.num_compiled != self._num_programs

    def look(self) -> bool:
        """Returns whether programs were compiled since the last time; requests that wait may start by them."""
        if has_new := self.has_new:
            self._num_programs = self.programs.num_compiled
            self._held.clear()
        return has_new

    def holds(self, sequences: list[Sequence], now: CacheShape | None) -> bool:
        """Returns whether a request waits for programs, to join a batch of this shape or, if None, a new one."""
        return self._kind(sequences, now) in self._held

    def can_start(self, sequences: list[Sequence], joined: Resizing | None) -> bool:
        """Returns whether a request can start with compiled programs; if not, has them compiled.

        Args:
            sequences: The request.
            joined: Shape of the batch that it would join; None for a new one.
        """
        now = None if joined is None else joined.shape
        if self.holds(sequences, now):
            return False
        if joined is None:
            engine = self.programs.engine
            shape = self.nearest(self.plan.first_shape(self.demand(sequences), engine.num_shards), sequences)
        else:
            shape = joined.shape_with(sequences)
        if shape is None:
            self._held.add(self._kind(sequences, now))
        return shape is not None

    def _kind(self, sequences: list[Sequence], now: CacheShape | None) -> tuple[Any, ...]:
        """Returns a key that requests share which need the same programs, if they join now."""
        return self.demand(sequences), kind_of(sequences), now

    def demand(self, sequences: Iterable[Sequence]) -> Demand:
        """Returns the demand of sequences in large steps where memory allows, with a prompt slot for each of them."""
        demand = self.plan.demand(sequences, self.programs.engine.expected)
        prompt_columns = in_steps(demand.prompt_columns, PROMPT_COLUMNS, PROMPT_STEP)
        rounded = Demand(
            (1,) * sum(demand.group_sizes), prompt_columns, in_steps(demand.columns, CACHE_COLUMNS, COLUMNS_STEP)
        )
        fits = self.plan.allows(self.plan.smallest_shape(rounded))
        return rounded if fits else replace(demand, group_sizes=rounded.group_sizes)

    def nearest(
        self, shape: CacheShape, sequences: list[Sequence], before: CacheShape | None = None
    ) -> CacheShape | None:
        """Returns a shape in which these sequences can run now; None, and has this one compiled, if there is none.

        It is this one, or one with more slots, or one with fewer, in which some wait for a slot.

        Args:
            before: Shape of the batch that would change; None for a new batch.
        """
        least = 1 if before is None else before.num_slots
        shapes = [shape]
        while self.plan.allows(larger := replace(shapes[-1], num_slots=2 * shapes[-1].num_slots)):
            if larger.num_slots > power_of_two(self.plan.max_slots, self.programs.engine.num_shards):
                break
            shapes.append(larger)
        num_larger = len(shapes)
        shapes += [replace(shape, num_slots=shape.num_slots >> n) for n in range(1, shape.num_slots.bit_length())]
        for index, each in enumerate(shapes):
            if each.num_slots >= least and self.programs.can_run(self._needed(each, sequences, before)):
                if index >= num_larger:
                    self._request(shape, sequences, before)
                return each
        self._request(shape, sequences, before)
        return None

    def is_prepared(self, shape: CacheShape, sequences: list[Sequence], before: CacheShape) -> bool:
        """Returns whether a batch can change to a shape at once; if not, has it compiled."""
        if self.programs.can_run(self._needed(shape, sequences, before)):
            return True
        self._request(shape, sequences, before)
        return False

    def join(self, shape: CacheShape, sequences: list[Sequence], before: CacheShape) -> None:
        """Waits for those programs of a shape that threads compile now; calls compile the others."""
        needed = [Change(before, shape), Decode(shape, kind_of(sequences)), Admit(shape)]
        lacking = [program for program in needed if not self.programs.can_run([program])]
        self.programs.wait(filter(self.programs.is_compiling, lacking))

    def kind(self, shape: CacheShape, demand: Demand, sequences: list[Sequence]) -> Kind:
        """Returns the kind of chunk that decodes these now, and has all compiled that they come to need."""
        kind = kind_of(sequences)
        self.programs.request(self.programs.missing(self._growing(shape, demand, kind)))
        return self.programs.covering(shape, kind) or kind

    def usual(self, clients: Iterable[int], num_tokens: int) -> list[Program]:
        """Returns the programs of batches of usual sizes that are not compiled.

        With most clients they include one that can take any request.
        """
        columns = (in_steps(num_tokens, PROMPT_COLUMNS, PROMPT_STEP), in_steps(num_tokens, CACHE_COLUMNS, COLUMNS_STEP))
        demands = [Demand((1,) * number, *columns) for number in sorted(set(clients))]
        demands = [demand for demand in demands if self.plan.allows(self.plan.smallest_shape(demand))]
        num_shards = self.programs.engine.num_shards
        firsts = {self.plan.first_shape(demand, num_shards): demand for demand in demands}
        needed = [each for shape, demand in firsts.items() for each in self._growing(shape, demand, KINDS[0])]
        needed += [each for shape in list(firsts)[-1:] for each in self._growing(shape, firsts[shape], KINDS[-1])]
        sizes = dict.fromkeys(each.shape.num_columns for each in needed if isinstance(each, Decode))
        needed += [
            Change(replace(one, num_columns=number), replace(other, num_columns=number))
            for one, other in permutations(firsts, 2)
            for number in sizes
        ]
        return self.programs.missing(needed)

    def _request(self, shape: CacheShape, sequences: list[Sequence], before: CacheShape | None) -> None:
        self.programs.request(self.programs.missing(self._needed(shape, sequences, before)))

    def _needed(self, shape: CacheShape, sequences: list[Sequence], before: CacheShape | None) -> Iterator[Program]:
        if before is not None and shape != before:
            yield Change(before, shape)
        yield from self._growing(shape, self.demand(sequences), kind_of(sequences), NEAR_SHAPES)

    def _growing(self, shape: CacheShape, demand: Demand, kind: Kind, num_shapes: int = 64) -> Iterator[Program]:
        """Yields the programs that a batch calls while its completions grow, through this many numbers of columns."""
        for _ in range(num_shapes):
            yield Decode(shape, kind)
            yield Admit(shape)
            before = shape
            shape = replace(shape, num_columns=self.plan.num_columns(shape.num_columns + 1, demand, shape.num_columns))
            if shape == before or not self.plan.allows(shape):
                break
            yield Change(before, shape)


def kind_of(sequences: Iterable[Sequence]) -> Kind:
    """Returns the kind of chunk that a server needs for these sequences: with constraints always the general one."""
    sequences = list(sequences)
    if any(each.matcher is not None for each in sequences):
        return "general", True
    return sampling_kind(each.params for each in sequences), False
