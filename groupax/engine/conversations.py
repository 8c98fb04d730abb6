"""Keys and values of finished sequences, which go from slots to where they are kept, and from there to prompts."""

from collections.abc import Sequence as Many
from functools import partial
from itertools import zip_longest

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from groupax.engine.cache import ROWS, Cache, pspec_of
from groupax.engine.core import EngineCore
from groupax.engine.images import lookup_tokens
from groupax.engine.prefix_cache import Place, Prefix, prefix_of
from groupax.engine.scheduler import Admission, Scheduler
from groupax.engine.sequence import Sequence
from groupax.models.attention import LayerCache
from groupax.parallel.collectives import to_device, to_host
from groupax.parallel.pytree import pytree


def store_finished(core: EngineCore, cache: Cache, scheduler: Scheduler) -> None:
    """Stores the keys and values of the sequences that have just finished, of turns in their conversations' places."""
    finished: list[list[int]] = [[] for _ in range(scheduler.num_shards)]
    for slot, sequence in enumerate(scheduler.slots):
        if sequence is not None and _is_to_be_stored(sequence, core.prefixes.generation):
            finished[slot // scheduler.slots_per_shard].append(slot)
    firsts = np.arange(scheduler.num_shards) * scheduler.slots_per_shard
    for slots in zip_longest(*finished):  # one of each shard at a time
        rows = np.array([0 if s is None else s - first for s, first in zip(slots, firsts, strict=True)], np.int32)
        indices = to_device((rows, rows // scheduler.share), NamedSharding(core.mesh, ROWS))
        read = to_host(read_slots(cache, *indices, mesh=core.mesh))
        for shard, slot in enumerate(slots):
            sequence = None if slot is None else scheduler.slots[slot]
            if sequence is not None:
                stored = [LayerCache(*(x[shard] for x in layer)) for layer in read]
                adapter = core.adapter_index(sequence.adapter)
                prefix = prefix_of(stored, lookup_tokens(sequence), sequence.tokens, adapter)
                if sequence.place is None:
                    core.prefixes.add(prefix)
                else:
                    sequence.place.put(prefix, sequence.generation)


def _is_to_be_stored(sequence: Sequence, generation: int) -> bool:
    has_room = (sequence.place is None or sequence.place.max_tokens > 0) and bool(sequence.tokens)
    # of another generation some was computed by other weights
    return has_room and sequence.finish_reason is not None and sequence.generation == generation


@partial(jax.jit, static_argnames="mesh")
def read_slots(cache: Cache, rows: Int[Array, "D"], prompt_slots: Int[Array, "D"], *, mesh: Mesh) -> list[LayerCache]:
    """Returns the keys and values of a slot of each shard, and of their prompts."""
    layers = [each for each in cache.layers if isinstance(each, LayerCache)]

    def local(layers: list[LayerCache], rows: Array, prompts: Array) -> list[LayerCache]:
        return [LayerCache(x.prompt_k[prompts], x.prompt_v[prompts], x.k[rows], x.v[rows]) for x in layers]

    specs = jax.tree.map(pspec_of, layers)
    program = jax.shard_map(local, mesh=mesh, in_specs=(specs, ROWS, ROWS), out_specs=specs, check_vma=False)
    return program(layers, rows, prompt_slots)


@pytree
class Known:
    """Stored keys and values of the beginnings of P prompts; arbitrary where they are not stored.

    Attributes:
        first_unknown: The first column that must be computed.
        layers: Keys and values of each layer.
    """

    first_unknown: Int[Array, "P"]
    layers: list[tuple[Float[Array, "P K H S"], Float[Array, "P K S H"]]]


def known_beginnings(
    core: EngineCore, admission: Admission, places: Many[Place | None], starts: np.ndarray, num_columns: int
) -> Known | None:
    """Returns what is stored of prompts, with `num_columns` columns; None if that is nothing.

    Args:
        places: Place of each row of prompts, in which alone it is looked up; None for no place.
        starts: First column of each prompt.
    """
    found: dict[int, tuple[int, Prefix]] = {}
    for row, first in admission.rows(len(places) // core.num_shards):
        place, tokens, adapter = places[row], lookup_tokens(first)[:-1], core.adapter_index(first.adapter)
        if place is None:
            length, prefix = core.prefixes.find(tokens, adapter)
        else:
            length, prefix = place.find(tokens, core.prefixes.generation, adapter)
        if prefix is not None:
            found[row] = length, prefix
    if not found:
        return None
    _, some = next(iter(found.values()))
    (K, H, _), P, first_unknown, dtype = some.k[0].shape, len(places), starts.copy(), some.k[0].dtype
    layers = [(np.zeros((P, K, H, num_columns), dtype), np.zeros((P, K, num_columns, H), dtype)) for _ in some.k]
    for row, (length, prefix) in found.items():
        columns = slice(starts[row], starts[row] + length)
        first_unknown[row] += length
        core.prefixes.num_reused_tokens += length
        for (k, v), keys, values in zip(layers, prefix.k, prefix.v, strict=True):
            k[row][..., columns] = keys[..., :length]
            v[row][:, columns] = values[:, :length]
    arrays = first_unknown, layers
    return Known(*to_device(arrays, jax.tree.map(lambda x: NamedSharding(core.mesh, pspec_of(x)), arrays)))
