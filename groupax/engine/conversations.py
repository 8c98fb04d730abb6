"""Keys and values of finished turns, which go from slots to the places of their conversations, and back to prompts."""

from collections.abc import Sequence as Many
from functools import partial
from itertools import zip_longest
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int

from groupax.engine.cache import ROWS, Cache, pspec_of
from groupax.engine.core import EngineCore
from groupax.engine.images import lookup_tokens
from groupax.engine.prefill import Known
from groupax.engine.prefix_cache import Place, Prefix, prefix_of
from groupax.engine.scheduler import Admission, Scheduler
from groupax.engine.sequence import Sequence
from groupax.parallel.collectives import to_device, to_host


def store_turns(core: EngineCore, cache: Cache, scheduler: Scheduler) -> None:
    """Stores the keys and values of the turns that have just finished in the places of their conversations."""
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
            if sequence is not None and sequence.place is not None:
                stored = {name: [x[shard] for x in layers] for name, layers in read.items()}
                adapter = core.adapter_index(sequence.adapter)
                prefix = prefix_of(stored, lookup_tokens(sequence), sequence.tokens, adapter)
                sequence.place.put(prefix, sequence.generation)


def _is_to_be_stored(sequence: Sequence, generation: int) -> bool:
    has_room = sequence.place is not None and sequence.place.max_tokens > 0 and bool(sequence.tokens)
    # of another generation some was computed by other weights
    return has_room and sequence.finish_reason is not None and sequence.generation == generation


@partial(jax.jit, static_argnames="mesh")
def read_slots(cache: Cache, rows: Int[Array, "D"], prompt_slots: Int[Array, "D"], *, mesh: Mesh) -> dict[str, Any]:
    """Returns the keys and values of a slot of each shard, and of their prompts, per layer."""
    given = {"k": (cache.k, rows), "v": (cache.v, rows)}
    given |= {"prompt_k": (cache.prompt_k, prompt_slots), "prompt_v": (cache.prompt_v, prompt_slots)}

    def local(given: dict[str, tuple[list[Array], Array]]) -> dict[str, list[Array]]:
        return {name: [x[rows] for x in layers] for name, (layers, rows) in given.items()}

    in_specs = jax.tree.map(pspec_of, given)
    out_specs = {name: [pspec_of(x) for x in layers] for name, (layers, _) in given.items()}
    return jax.shard_map(local, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs, check_vma=False)(given)


def known_beginnings(
    core: EngineCore, admission: Admission, places: Many[Place | None], starts: np.ndarray, num_columns: int
) -> Known | None:
    """Returns what the places of prompts have of them, with `num_columns` columns; None if that is nothing.

    Args:
        places: Place of each row of prompts.
        starts: First column of each prompt.
    """
    found: dict[int, tuple[int, Prefix]] = {}
    for row, first in admission.rows(len(places) // core.num_shards):
        place = places[row]
        if place is not None:
            tokens, adapter = lookup_tokens(first)[:-1], core.adapter_index(first.adapter)
            length, prefix = place.find(tokens, core.prefixes.generation, adapter)
            if prefix is not None:
                found[row] = length, prefix
    if not found:
        return None
    _, some = next(iter(found.values()))
    (K, H, _), P, first_unknown = some.k[0].shape, len(places), starts.copy()
    k = [np.zeros((P, K, H, num_columns), some.k[0].dtype) for _ in some.k]
    v = [np.zeros((P, K, num_columns, H), some.k[0].dtype) for _ in some.v]
    for row, (length, prefix) in found.items():
        columns = slice(starts[row], starts[row] + length)
        first_unknown[row] += length
        core.prefixes.num_reused_tokens += length
        for layer, (keys, values) in enumerate(zip(prefix.k, prefix.v, strict=True)):
            k[layer][row][..., columns] = keys[..., :length]
            v[layer][row][:, columns] = values[:, :length]
    arrays = first_unknown, k, v
    return Known(*to_device(arrays, jax.tree.map(lambda x: NamedSharding(core.mesh, pspec_of(x)), arrays)))
