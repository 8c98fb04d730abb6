"""The engine's programs, traced for arrays that need not exist, to be compiled ahead of time or to be counted."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.stages import Traced

from groupax.engine.cache import ROWS, Cache, abstract_cache, cache_maker, pspec_of
from groupax.engine.cache_ops import (
    move,
    move_slots,
    move_starts,
    move_state,
    moves,
    read_slots,
    release,
    widen,
    widen_slots,
)
from groupax.engine.constraint import TokenMasks
from groupax.engine.decode import decode_chunk
from groupax.engine.plan import CacheShape, admission_prompts
from groupax.engine.prefill import Known, admit
from groupax.engine.slots import Slots, slot_table, to_slots
from groupax.models.config import ModelConfig
from groupax.models.specs import Params
from groupax.parallel.mesh import num_data_shards
from groupax.settings.sampling import BIASED_TOKENS, STOP_IDS, SamplingKind

# All that is compiled for decoding.
PROGRAMS: tuple[Any, ...] = (
    admit,
    decode_chunk,
    move,
    move_slots,
    move_starts,
    move_state,
    read_slots,
    release,
    widen,
    widen_slots,
)


@dataclass(frozen=True)
class Create:
    """An empty cache of this shape."""

    shape: CacheShape


@dataclass(frozen=True)
class Decode:
    """A chunk with this kind of sampling, with or without constraints, and freeing the slots of finished sequences."""

    shape: CacheShape
    sampling: SamplingKind
    is_constrained: bool = False


@dataclass(frozen=True)
class Admit:
    """An admission."""

    shape: CacheShape


@dataclass(frozen=True)
class Change:
    """A cache of one shape becomes one of another, or its contents move."""

    before: CacheShape
    after: CacheShape


Program = Create | Decode | Admit | Change


@dataclass(frozen=True, eq=False)
class Tracer:
    """Traces the programs that a batch calls.

    Attributes:
        config: Architecture of the model.
        mesh: Real devices, or devices of a topology (`jax.experimental.topologies`).
        params: Shapes, dtypes and shardings of the weights to decode with.
        kv_dtype: Dtype of keys and values.
        chunk_steps: Number of tokens of a chunk.
        has_prefixes: Whether the keys and values of finished sequences are stored and reused.
        is_served: Whether the programs are a server's: chunks have a limit of their steps at run time, and prompts are
            computed in short pieces.
        has_adapters: Whether the weights have several adapters, of which each slot chooses one.
    """

    config: ModelConfig
    mesh: Mesh
    params: Params
    kv_dtype: Any
    chunk_steps: int
    has_prefixes: bool = False
    is_served: bool = False
    has_adapters: bool = False
    records_experts: bool = False

    @cached_property
    def _static(self) -> dict[str, Any]:
        return {"config": self.config, "mesh": self.mesh, "by_block": False}  # as calls give them: defaults differ

    def traced(self, program: Program) -> Iterator[Traced]:
        """Yields the jitted functions behind a program, each traced for its arguments."""
        match program:
            case Create(shape):
                yield cache_maker(self.config, self.mesh, shape, self.kv_dtype).trace()
            case Decode(shape, sampling, is_constrained):
                cache, slots = self.cache(shape), self._slots(shape)
                yield self.decode_chunk(shape, sampling, is_constrained)
                yield release.trace(slots, self._rows(shape.num_slots, dtype=bool))
                if self.has_prefixes:
                    yield read_slots.trace(cache, self._rows(1), self._rows(1), mesh=self.mesh)
            case Admit(shape):
                yield self.admit(shape)
                if self.has_prefixes:
                    yield self.admit(shape, has_known=True)
            case Change(before, after):
                yield from self._change(before, after)

    def cache(self, shape: CacheShape) -> Cache:
        """Returns the shapes of a cache."""
        return abstract_cache(self.config, self.mesh, shape, self.kv_dtype)

    def decode_chunk(self, shape: CacheShape, sampling: SamplingKind, is_constrained: bool = False) -> Traced:
        """Returns the traced `decode_chunk` for caches of a shape and a kind of sampling, with masks or without."""
        cache, slots = self.cache(shape), self._slots(shape)
        masks = self._masks(shape) if is_constrained else None
        static = {**self._static, "num_steps": self.chunk_steps, "sampling": sampling}
        static["records_experts"] = self.records_experts
        limit = jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(self.mesh, jax.P()))
        return decode_chunk.trace(self.params, cache, slots, masks, limit if self.is_served else None, **static)

    def admit(self, shape: CacheShape, has_known: bool = False) -> Traced:
        """Returns the traced `admit` for caches of a shape, with or without prompts of known beginnings."""
        slots, num_prompts = self._slots(shape), admission_prompts(shape, self.has_prefixes)
        prompts, starts = self._rows(num_prompts, shape.num_prompt_columns), self._rows(num_prompts)
        source, is_new = self._rows(shape.num_prompt_slots), self._rows(shape.num_slots, dtype=bool)
        given = prompts, starts, self._rows(1), source, is_new, slots
        known = self._known(num_prompts, shape.num_prompt_columns) if has_known else None
        static = {**self._static, "short_pieces": self.is_served}
        adapters = self._rows(num_prompts) if self.has_adapters else None
        return admit.trace(self.params, self.cache(shape), slots, *given, known, adapters, None, **static)

    def _change(self, before: CacheShape, after: CacheShape) -> Iterator[Traced]:
        changes_slots = before.num_slots != after.num_slots or before.share != after.share
        has_rows = changes_slots or before.num_columns != after.num_columns
        has_prompts = changes_slots or before.num_prompt_columns != after.num_prompt_columns
        rows = self._rows(after.num_slots) if has_rows else None
        prompt_slots = self._rows(after.num_prompt_slots) if has_prompts else None
        columns = {"num_columns": after.num_columns, "num_prompt_columns": after.num_prompt_columns}
        cache = self.cache(before)
        calls = moves(cache, rows, prompt_slots, **columns, mesh=self.mesh)
        pairs = zip(calls, jax.tree.leaves(cache), strict=True)
        for call, x in {(call, x.shape): (call, x) for call, x in pairs}.values():  # once for all layers
            if call is not None:
                program: Any = call.func
                yield program.trace(x, *call.args, **call.keywords)
        if has_rows:
            yield move_slots.trace(self._slots(before), rows, mesh=self.mesh)

    def _slots(self, shape: CacheShape) -> Slots:
        num_slots = num_data_shards(self.mesh) * shape.num_slots
        table = slot_table(num_slots, STOP_IDS, BIASED_TOKENS, self.has_adapters)
        return self._sharded(jax.eval_shape(lambda: to_slots(table, jnp.asarray)))

    def _masks(self, shape: CacheShape) -> TokenMasks:
        num_slots = num_data_shards(self.mesh) * shape.num_slots
        words, constrained = (
            np.zeros((num_slots, -(-self.config.vocab_size // 32)), np.int32),
            np.zeros(num_slots, bool),
        )
        return self._sharded(jax.eval_shape(lambda: TokenMasks(jnp.asarray(words), jnp.asarray(constrained))))

    def _sharded(self, shapes: Any) -> Any:
        return jax.tree.map(lambda x: x.update(sharding=NamedSharding(self.mesh, pspec_of(x))), shapes)

    def _rows(self, per_shard: int, *sizes: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
        shape = (num_data_shards(self.mesh) * per_shard, *sizes)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, ROWS))

    def _known(self, num_prompts: int, num_columns: int) -> Known:
        """Returns the shapes of the keys and values of an admission's prompts."""
        cache = self.cache(CacheShape(num_prompts, 1, num_columns, 1))
        shapes = jax.eval_shape(lambda cache: Known(cache.prompt_starts, cache.prompt_k, cache.prompt_v), cache)
        return self._sharded(shapes)
