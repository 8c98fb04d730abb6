"""Sequences on the devices: they enter slots, are decoded a chunk at a time, and leave.

    (submit ──► reserve) ──► fit_columns ──► admit ──► decode ──► free_finished ──► compact ──► ...

The scheduler knows which sequence sits in which slot, the plan what memory allows; the batch changes the arrays
accordingly, and their shape (reserve, fit_columns, compact).
"""

import time
from collections.abc import Iterable
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
from groupax.engine.plan import CacheShape, Demand, Plan, admission_prompts, power_of_two
from groupax.engine.prefill import Admitted, admit
from groupax.engine.prefix_cache import Place
from groupax.engine.resizing import move_slots, resize
from groupax.engine.rules import TokenMasks
from groupax.engine.scheduler import Admission, Scheduler
from groupax.engine.sequence import Sequence
from groupax.models.specs import Params
from groupax.parallel.collectives import to_device, to_host

# With at most this many chunks left, the number of slots no longer changes.
LAST_CHUNKS = 3


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
        scheduler: Assigns sequences to slots.
        shape: Shape of each shard's cache.
        cache, slots: The arrays on the devices.

    Raises:
        ValueError: The plan does not allow two of the longest sequences.
    """

    def __init__(
        self, core: EngineCore, plan: Plan, sequences: list[Sequence], patience: int, serving: Any = None
    ) -> None:
        self.core, self.plan, self.patience, self.serving = core, plan, patience, serving
        self.mesh, self.chunk_steps = core.mesh, core.chunk_steps
        self._num_idle = 0  # chunks in a row after which half of the slots were enough
        self._num_needed = 0  # slots per shard, the most of these chunks
        self.demand = self.demand_of(sequences)
        shape = plan.first_shape(self.demand, core.num_shards)
        if serving is not None:
            shape = serving.nearest(shape, sequences) or shape
        self.scheduler = Scheduler(core.num_shards, shape.num_slots, shape.share)
        self.scheduler.submit(sequences)
        self.cache: Cache = cache_maker(core.config, self.mesh, shape, core.kv_dtype)()
        self.shape, self.rows = shape, NamedSharding(self.mesh, ROWS)
        self.slots = to_slots(self.idle_slots(), self.on_rows)

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
            sequence.generation = core.prefixes.generation
            fill(admitted[slot], sequence)
            if core.adapters:
                admitted[slot]["adapter"] = adapters[row] = core.adapter_index(sequence.adapter)
        vision, features, images, known = core.config.vision, core.features, None, None
        if vision is not None and features is not None:  # whose features are computed now
            shape = num_prompts, self.shape.num_prompt_columns
            images = admitted_images(vision, features, core.vision_params, admission, shape)
        if core.prefixes.max_bytes and any(places):
            known = known_beginnings(core, admission, places, starts, self.shape.num_prompt_columns)
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

    def demand_of(self, sequences: Iterable[Sequence]) -> Demand:
        """Returns the demand to choose shapes by, for these sequences."""
        return self.serving.demand(sequences) if self.serving else self.plan.demand(sequences, self.core.expected)

    def shape_with(self, sequences: Iterable[Sequence] = ()) -> CacheShape | None:
        """Returns the shape to change to if these sequences join those that wait and run, if memory allows it.

        It has enough prompt columns. If there is no room for them, it has fewer slots, otherwise as many as memory
        allows for those that wait. A server returns None until the programs of such a shape are compiled.
        """
        scheduler, now, sequences = self.scheduler, self.shape, list(sequences)
        together = [*scheduler.running, *scheduler.queued, *sequences]
        longest = self.plan.smallest_shape(self.demand_of(together))
        shape = replace(now, num_prompt_columns=max(now.num_prompt_columns, longest.num_prompt_columns))
        if not self.plan.allows(shape):
            shape = self.plan.smaller(shape)
            return shape if self.serving is None or self.serving.is_prepared(shape, together, now) else None
        num_blocked, expected = scheduler.num_blocked(sequences), max(now.num_columns, longest.num_columns // 2)
        most = power_of_two(self.plan.max_slots, scheduler.num_shards)
        while num_blocked > scheduler.num_shards * (shape.num_slots - now.num_slots):
            larger = replace(shape, num_slots=2 * shape.num_slots)
            if larger.num_slots > most or not self.plan.allows(replace(larger, num_columns=expected)):
                break
            shape = larger
        return shape if self.serving is None else self.serving.nearest(shape, together, now)

    def allows(self, sequences: Iterable[Sequence]) -> bool:
        """Returns whether a sequence as long as the longest of these and of the batch's own would fit."""
        demand = self.demand_of([*self.scheduler.running, *self.scheduler.queued, *sequences])
        return self.plan.allows(self.plan.smallest_shape(demand))

    def reserve(self) -> None:
        """Provides what the waiting sequences need (see `shape_with`); preempts running ones if there is no room."""
        if self.scheduler.waiting:
            sequences = [*self.scheduler.running, *self.scheduler.queued]
            self.demand = self.demand_of(sequences)
            self._change_to(self.shape_with() or self.shape)

    def fit_columns(self) -> None:
        """Provides columns for another chunk; preempts the shortest sequences if there is no room for that."""
        now, needed = self.shape, self.scheduler.num_columns(self.chunk_steps)
        shape = replace(now, num_columns=self.plan.num_columns(needed, self.demand, now.num_columns))
        if shape.num_columns > now.num_columns or (shape != now and self._is_prepared(shape)):
            shape = self.plan.smaller(shape)
            if self.serving is not None:
                self.serving.join(shape, [*self.scheduler.running, *self.scheduler.queued], now)
            self._change_to(shape)

    def compact(self) -> None:
        """Halves the number of slots, or more, once they are idle; to be called after each chunk.

        Each number of slots needs its own programs, which do not pay off for the last few chunks.
        """
        scheduler = self.scheduler
        if not self.plan.adapts or self.plan.conversations is not None:
            return
        per_shard = np.array([each is not None for each in scheduler.slots]).reshape(scheduler.num_shards, -1)
        needed = max(self._num_needed, power_of_two(int(per_shard.sum(axis=1).max())))
        self._num_idle, self._num_needed = self._num_idle + 1, needed
        left = max((each.params.max_tokens - len(each.tokens) for each in scheduler.running), default=0)
        is_idle = not scheduler.waiting and needed <= scheduler.slots_per_shard // 2
        is_idle = is_idle and left > LAST_CHUNKS * self.chunk_steps
        if is_idle and self._num_idle <= self.patience:
            return
        self._num_idle = self._num_needed = 0
        # a prompt slot for each slot may take more memory than fewer slots save
        shape = replace(self.shape, num_slots=needed, share=1)
        if not is_idle or not self.plan.allows(shape) or not self._is_prepared(shape):
            return
        share = scheduler.share
        kept = scheduler.compact(needed)
        self._resize(kept, kept // share, shape)

    def _is_prepared(self, shape: CacheShape) -> bool:
        """Returns whether to change to this shape now, where the change may wait."""
        sequences = [*self.scheduler.running, *self.scheduler.queued]
        return self.serving is None or self.serving.is_prepared(shape, sequences, self.shape)

    def _change_to(self, shape: CacheShape) -> None:
        """Changes to another shape; if it has fewer slots, the longest sequences stay in them."""
        now, scheduler = self.shape, self.scheduler
        if shape == now:
            return
        rows = prompt_slots = None
        if shape.num_slots < now.num_slots:
            prompt_slots, rows = scheduler.preempt(shape.num_prompt_slots, shape.share)
        else:
            if (shape.num_slots, shape.num_columns) != (now.num_slots, now.num_columns):
                rows = self._indices(shape.num_slots, now.num_slots)
            if (shape.num_slots, shape.num_prompt_columns) != (now.num_slots, now.num_prompt_columns):
                prompt_slots = self._indices(shape.num_prompt_slots, now.num_prompt_slots)
            scheduler.grow(shape.num_slots)
        self._resize(rows, prompt_slots, shape)

    def _indices(self, number: int, number_before: int) -> np.ndarray:
        """Returns for each new slot of each shard the old slot that it is, -1 for an added one."""
        own = np.arange(number)
        return np.tile(np.where(own < number_before, own, -1), self.scheduler.num_shards).astype(np.int32)

    def _resize(self, rows: np.ndarray | None, prompt_slots: np.ndarray | None, shape: CacheShape) -> None:
        """Moves these slots and prompt slots into arrays of a shape; None keeps all, with their columns."""
        self.shape = shape
        rows_on_devices = None if rows is None else self.on_rows(rows)
        self.cache = resize(
            self.cache,
            rows_on_devices,
            None if prompt_slots is None else self.on_rows(prompt_slots),
            num_columns=shape.num_columns,
            num_prompt_columns=shape.num_prompt_columns,
            mesh=self.mesh,
        )
        if rows_on_devices is not None:
            self.slots = move_slots(self.slots, rows_on_devices, mesh=self.mesh)

    def idle_slots(self) -> np.ndarray:
        """Returns as many idle slots as there are, on the host."""
        return slot_table(len(self.scheduler.slots), bool(self.core.adapters))

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
