"""Sequences on the devices: they enter slots, are decoded a chunk at a time, and leave.

    submit ──► reshape ──► admit ──► decode ──► free_finished ──► compact ──► ...

The scheduler knows which sequence sits in which slot; the batch changes the arrays accordingly, and their shape as
`resizing` chooses it (reshape, compact).
"""

import time
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from groupax.core.settings.sampling import sampling_kind
from groupax.engine.cache import ROWS, Cache, cache_maker, fill, release, slot_table, to_slots
from groupax.engine.conversations import known_beginnings
from groupax.engine.core import EngineCore
from groupax.engine.decode import Chunk, DecodeSettings, decode_chunk
from groupax.engine.images import admitted_images
from groupax.engine.plan import Plan, admission_prompts
from groupax.engine.prefill import Admitted, admit
from groupax.engine.prefix_cache import Place
from groupax.engine.resizing import Resizing
from groupax.engine.rules import TokenMasks
from groupax.engine.scheduler import Admission
from groupax.engine.sequence import Sequence
from groupax.models.specs import Params
from groupax.parallel.collectives import to_device, to_host


class Batch:
    """Sequences that wait or run, and the slots and the cache of those that run.

    Args:
        core: The engine's model, devices and cache of prefixes.
        plan: Limits of the cache.
        sequences: Unstarted sequences.
        patience: Chunks to wait before the batch shrinks to fewer slots.
        serving: How a server chooses shapes, programs and the lengths of chunks (`programs.Serving`); None outside of
            servers, where whatever is needed is compiled while all wait.

    Attributes:
        resizing: Chooses and changes the shape of the arrays.
        scheduler: Assigns sequences to slots.
        cache, slots: The arrays on the devices.

    Raises:
        ValueError: The plan does not allow two of the longest sequences.
    """

    def __init__(
        self, core: EngineCore, plan: Plan, sequences: list[Sequence], patience: int, serving: Any = None
    ) -> None:
        self.core, self.plan, self.serving, self.mesh = core, plan, serving, core.mesh
        self.resizing = Resizing(core, plan, sequences, patience, serving)
        self.scheduler = self.resizing.scheduler
        self.cache: Cache = cache_maker(core.config, self.mesh, self.resizing.shape, core.kv_dtype)()
        self.rows = NamedSharding(self.mesh, ROWS)
        self.slots = to_slots(slot_table(len(self.scheduler.slots), bool(core.adapters)), self.on_rows)

    def submit(self, sequences: list[Sequence]) -> None:
        """Adds sequences at the end of the queue. Before they are admitted, `reshape` must reserve slots for them."""
        self.scheduler.submit(sequences)

    def reshape(self, reserves: bool) -> None:
        """Changes the shape to what another chunk needs and, if it `reserves`, what waiting sequences need."""
        if reserves:
            self.cache, self.slots = self.resizing.reserve(self.cache, self.slots)
        self.cache, self.slots = self.resizing.fit_columns(self.cache, self.slots)

    def admit(self, params: Params) -> None:
        """Lets waiting sequences enter free slots, as many prompts at a time as are computed at once.

        A server computes as many as its pace allows before the next chunk.
        """
        scheduler, pace, begun_s = self.scheduler, self.serving and self.serving.pace, time.perf_counter()
        if not scheduler.waiting:
            return
        num_prompts = admission_prompts(self.resizing.shape, bool(self.core.prefixes.max_bytes))
        most = num_prompts if pace is None else pace.num_prompts(self.resizing.shape, num_prompts)
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
            sampling, is_constrained = self.serving.kind(self.resizing.shape, self.resizing.demand, running)
            num_steps = np.array(self.serving.pace.num_steps(self.resizing.shape), np.int32)
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
                self.core.chunk_steps,
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
            self.serving.pace.add_chunk(self.resizing.shape, num_steps, time.perf_counter() - begun_s)
        return grown

    def free_finished(self) -> None:
        """Frees the slots of finished sequences."""
        slots = self.scheduler.slots
        released = np.array([each is not None and each.finish_reason is not None for each in slots])
        if released.any():
            self.scheduler.slots = [None if is_free else each for each, is_free in zip(slots, released, strict=True)]
            self.slots = release(self.slots, self.on_rows(released))

    def compact(self) -> None:
        """Leaves out idle slots where that pays; to be called after each chunk."""
        self.cache, self.slots = self.resizing.compact(self.cache, self.slots)

    def _admit(self, params: Params, admission: Admission, num_prompts: int) -> None:
        core, scheduler, row_of = self.core, self.scheduler, {}
        prompts, starts = admission.padded(num_prompts, self.resizing.shape.num_prompt_columns)
        source = np.full(self.cache.prompt_tokens.shape[0], -1, np.int32)
        admitted = slot_table(len(scheduler.slots), bool(core.adapters))
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
            sequence.generation = core.prefixes.generation
            fill(admitted[slot], sequence)
            if core.adapters:
                admitted[slot]["adapter"] = adapters[row] = core.adapter_index(sequence.adapter)
        vision, features, images, known = core.config.vision, core.features, None, None
        if vision is not None and features is not None:  # whose features are computed now
            shape = num_prompts, self.resizing.shape.num_prompt_columns
            images = admitted_images(vision, features, core.vision_params, admission, shape)
        if core.prefixes.max_bytes:
            known = known_beginnings(core, admission, places, starts, self.resizing.shape.num_prompt_columns)
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

    def on_rows(self, array: np.ndarray) -> jax.Array:
        """Puts an array with a row for each slot, or prompt, on the devices."""
        return to_device(np.ascontiguousarray(array), self.rows)


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
