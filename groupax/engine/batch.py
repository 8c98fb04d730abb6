"""Sequences on the devices: they enter slots, are decoded a chunk at a time, and leave.

    (submit ──► reserve) ──► fit_columns ──► admit ──► decode ──► store_prefixes ──► free_finished ──► compact ──► ...

The scheduler knows which sequence sits in which slot, the plan what memory allows; the batch changes the arrays
accordingly, and `resizing.Arrays` their shape (reserve, fit_columns, compact).
"""

import time
from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.sharding import NamedSharding

from groupax.core.settings.sampling import sampling_kind
from groupax.engine.cache import fill, pspec_of, read_slots, release, to_slots
from groupax.engine.core import EngineCore
from groupax.engine.decode import Chunk, DecodeSettings, TokenMasks, decode_chunk
from groupax.engine.images import admitted_images, lookup_tokens
from groupax.engine.plan import Plan, admission_prompts
from groupax.engine.prefill import Admitted, Known, admit
from groupax.engine.prefix_cache import Place, prefix_of
from groupax.engine.resizing import Arrays, move, move_slots, widen_slots
from groupax.engine.scheduler import Admission
from groupax.engine.sequence import Sequence
from groupax.models.specs import Params
from groupax.parallel.collectives import to_device, to_host

# All that is compiled for decoding.
PROGRAMS: tuple[Any, ...] = (admit, decode_chunk, move, move_slots, read_slots, release, widen_slots)


class Batch(Arrays):
    """Sequences that wait or run, and the slots and the cache of those that run.

    Args:
        core: The engine's model, devices and cache of prefixes.
        plan: Limits of the cache.
        sequences: Unstarted sequences.
        patience: Chunks to wait before the batch shrinks to fewer slots.
        serving: How a server chooses shapes, programs and the lengths of chunks (`programs.Serving`); None outside of
            servers, where whatever is needed is compiled while all wait.

    Attributes:
        scheduler: Assigns sequences to slots.
        shape: Shape of each shard's cache.
        cache, slots: The arrays on the devices.

    Raises:
        ValueError: The plan does not allow two of the longest sequences.
    """

    def __init__(
        self, core: EngineCore, plan: Plan, sequences: list[Sequence], patience: int, serving: Any = None
    ) -> None:
        super().__init__(core, plan, sequences, patience, serving)
        # the generation of the weights with which each sequence started
        self._generations: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()

    def submit(self, sequences: list[Sequence]) -> None:
        """Adds sequences at the end of the queue. Before they are admitted, `reserve` must be called."""
        self.scheduler.submit(sequences)

    def admit(self, params: Params) -> None:
        """Lets waiting sequences enter free slots, as many prompts at a time as are computed at once.

        A server computes as many as its pace allows before the next chunk.
        """
        scheduler, pace, begun_s = self.scheduler, self.serving and self.serving.pace, time.perf_counter()
        if not scheduler.waiting:
            return
        num_prompts = admission_prompts(self.shape, bool(self.core.prefixes.max_bytes))
        most = num_prompts if pace is None else pace.num_prompts(self.shape, num_prompts)
        while admission := scheduler.admit(most):
            self._admit(params, admission, num_prompts)
            if pace is not None:
                jax.block_until_ready(self.slots)
                pace.add_admission(max(map(len, admission.firsts)), time.perf_counter() - begun_s)
                break

    def decode(self, params: Params) -> list[tuple[Sequence, int]]:
        """Decodes another chunk and returns the running sequences with their numbers of tokens before."""
        running, limit, begun_s = self.scheduler.running, None, time.perf_counter()
        grown = [(sequence, len(sequence.tokens)) for sequence in running]
        is_constrained = any(each.matcher is not None for each in running)
        sampling = sampling_kind(each.params for each in running)
        if self.serving is not None:
            sampling, is_constrained = self.serving.kind(self.shape, self.demand, running)
            num_steps = np.array(self.serving.pace.num_steps(self.shape), np.int32)
            limit = to_device(num_steps, NamedSharding(self.mesh, jax.P()))
        masks = None
        if is_constrained:
            masks = TokenMasks(*map(self.on_rows, self.core.constraints.next_masks(self.scheduler.slots)))
        self.cache, self.slots, chunk = decode_chunk(
            params,
            self.cache,
            self.slots,
            masks,
            limit,
            settings=DecodeSettings(
                self.core.config,
                self.mesh,
                self.chunk_steps,
                sampling,
                by_block=self.plan.by_block,
                records_experts=self.core.records_experts,
            ),
        )
        if not any(sequence.params.logprobs for sequence in running):
            chunk = replace(chunk, alternatives=None, alternative_logps=None)
        append(to_host(chunk), self.scheduler.slots)
        for sequence, num_before in grown if is_constrained else ():
            if sequence.matcher is not None and sequence.finish_reason is None:
                sequence.matcher.consume_tokens(sequence.tokens[num_before:])
        if self.serving is not None:
            num_steps = max((len(sequence.tokens) - num_before for sequence, num_before in grown), default=0)
            self.serving.pace.add_chunk(self.shape, num_steps, time.perf_counter() - begun_s)
        return grown

    def store_prefixes(self) -> None:
        """Stores the keys and values of the sequences that have just finished."""
        scheduler, prefixes = self.scheduler, self.core.prefixes
        finished: list[list[int]] = [[] for _ in range(scheduler.num_shards)]
        for slot, sequence in enumerate(scheduler.slots):
            if sequence is not None and self._is_to_be_stored(sequence):
                finished[slot // scheduler.slots_per_shard].append(slot)
        firsts = np.arange(scheduler.num_shards) * scheduler.slots_per_shard
        for slots in zip_longest(*finished):  # one of each shard at a time
            rows = [0 if slot is None else slot - first for slot, first in zip(slots, firsts, strict=True)]
            in_rows, in_prompts = np.array(rows, np.int32), np.array(rows, np.int32) // scheduler.share
            read = to_host(read_slots(self.cache, self.on_rows(in_rows), self.on_rows(in_prompts), mesh=self.mesh))
            for shard, slot in enumerate(slots):
                sequence = None if slot is None else scheduler.slots[slot]
                if sequence is None:
                    continue
                stored = {name: [x[shard] for x in layers] for name, layers in read.items()}
                adapter = self.core.adapter_index(sequence.adapter)
                prefix = prefix_of(stored, lookup_tokens(sequence), sequence.tokens, adapter)
                if sequence.place is None:
                    prefixes.add(prefix)
                else:
                    sequence.place.put(prefix, self._generations[sequence])

    def _is_to_be_stored(self, sequence: Sequence) -> bool:
        if sequence.finish_reason is None or not sequence.tokens:
            return False
        # of another generation some was computed by other weights
        has_room = sequence.place is None or sequence.place.max_tokens > 0
        return has_room and self._generations[sequence] == self.core.prefixes.generation

    def free_finished(self) -> None:
        """Frees the slots of finished sequences."""
        slots = self.scheduler.slots
        released = np.array([each is not None and each.finish_reason is not None for each in slots])
        if released.any():
            self.scheduler.slots = [None if is_free else each for each, is_free in zip(slots, released, strict=True)]
            self.slots = release(self.slots, self.on_rows(released))

    def _admit(self, params: Params, admission: Admission, num_prompts: int) -> None:
        core, scheduler, row_of = self.core, self.scheduler, {}
        prompts, starts = admission.padded(num_prompts, self.shape.num_prompt_columns)
        source = np.full(self.cache.prompt_tokens.shape[0], -1, np.int32)
        admitted = self.idle_slots()
        is_new = np.zeros(len(admitted), bool)
        places: list[Place | None] = [None] * len(prompts)
        adapters = np.full(len(prompts), -1, np.int32)
        for prompt_slot, index in admission.prompt_slots:
            source[prompt_slot] = index
            # its row among those of all shards
            row_of[prompt_slot] = prompt_slot * scheduler.share // scheduler.slots_per_shard * num_prompts + index
        for slot, sequence in admission.slots:
            is_new[slot] = True
            row = row_of[slot // scheduler.share]
            places[row] = sequence.place
            sequence.admitted_s = time.monotonic()
            self._generations[sequence] = core.prefixes.generation
            fill(admitted[slot], sequence)
            if core.adapters:
                admitted[slot]["adapter"] = adapters[row] = core.adapter_index(sequence.adapter)
        vision, features, images, known = core.config.vision, core.features, None, None
        if vision is not None and features is not None:  # whose features are computed now
            shape = num_prompts, self.shape.num_prompt_columns
            images = admitted_images(vision, features, core.vision_params, admission, shape)
        if core.prefixes.max_bytes:
            known = self._known([*admission.rows(num_prompts)], starts, places, adapters.tolist())
        self.cache, self.slots = admit(
            params,
            self.cache,
            self.slots,
            Admitted(
                prompts=self.on_rows(prompts),
                starts=self.on_rows(starts),
                num_prompts=self.on_rows(np.array([*map(len, admission.firsts)], np.int32)),
                source=self.on_rows(source),
                is_new=self.on_rows(is_new),
                slots=to_slots(admitted, self.on_rows),
                known=known,
                adapters=self.on_rows(adapters) if core.adapters else None,
                images=None if images is None else to_device(images, self.rows),
            ),
            config=core.config,
            mesh=self.mesh,
            by_block=self.plan.by_block,
            short_pieces=self.serving is not None,
        )

    def _known(
        self,
        firsts: list[tuple[int, Sequence]],
        starts: np.ndarray,
        places: list[Place | None],
        adapters: list[int],
    ) -> Known | None:
        """Returns the stored keys and values of the left-padded prompts; None if there are none."""
        prompts = np.zeros((len(starts), self.shape.num_prompt_columns), np.int64)
        for row, first in firsts:
            prompts[row, starts[row] :] = lookup_tokens(first)[:-1]
        gathered = self.core.prefixes.gather(prompts, starts, places, adapters)
        if gathered is None:
            return None
        lengths, k, v = gathered
        arrays = (starts + lengths, k, v)
        return Known(*to_device(arrays, jax.tree.map(lambda x: NamedSharding(self.mesh, pspec_of(x)), arrays)))


def append(chunk: Chunk, slots: Many[Sequence | None]) -> None:
    """Appends a decoded chunk on the host to the sequences in slots, unless they were cancelled."""
    for slot, sequence in enumerate(slots):
        if sequence is None or sequence.finish_reason:
            continue
        num = int(chunk.count[slot])
        sequence.tokens += chunk.token[slot, :num].tolist()
        sequence.policy_logps += chunk.policy_logp[slot, :num].tolist()
        sequence.sampler_logps += chunk.sampler_logp[slot, :num].tolist()
        if chunk.experts is not None:
            sequence.experts += list(chunk.experts[slot, :num])
        if sequence.params.logprobs:
            assert chunk.alternatives is not None, "fetched when requested"
            assert chunk.alternative_logps is not None, "fetched when requested"
            requested = slice(0, sequence.params.logprobs)
            tokens = chunk.alternatives[slot, :num, requested].tolist()
            logps = chunk.alternative_logps[slot, :num, requested].tolist()
            sequence.alternatives += [list(zip(*pair, strict=True)) for pair in zip(tokens, logps, strict=True)]
        if chunk.stopped[slot]:
            sequence.finish_reason = "stop"
        elif len(sequence.tokens) >= sequence.params.max_tokens:
            sequence.finish_reason = "length"
