"""The rollout engine: continuous batching over slots, one chunk of decoding at a time."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from groupax.engine.cache import Cache, bucket, empty_cache
from groupax.engine.decode import ROWS, Slots, admit, decode_chunk, move_columns
from groupax.engine.params import SamplingParams
from groupax.engine.sampling import SamplingSettings, row_keys
from groupax.engine.scheduler import Admission, Scheduler, Sequence
from groupax.models.config import ModelConfig
from groupax.models.specs import Params
from groupax.parallel.mesh import num_data_shards

# The smallest sizes of the cache and of a prefill, in columns; larger ones are buckets above them. A shard has at
# least two slots and computes at least two prompts: for a single row, XLA's CPU kernels round differently.
CACHE_COLUMNS = 64
PREFILL_COLUMNS = 16
SETTINGS = ("temperature", "top_k", "top_p", "min_p")


class Engine:
    """Generates completions with the weights it is given.

    The weights are read, never copied: set `params` to the trainer's newest before each rollout.

    Args:
        config: the model's architecture.
        params: its weights, on `mesh`.
        mesh: rows are spread over its data axes.
        eos_ids: tokens that end every completion.
        max_slots: most completions decoded at once; the others wait for a free slot.
        chunk_steps: tokens decoded between two visits to the host; a multiple of 8.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        mesh: Mesh,
        eos_ids: tuple[int, ...],
        max_slots: int = 256,
        chunk_steps: int = 32,
    ) -> None:
        self.config = config
        self.params = params
        self.mesh = mesh
        self.eos_ids = eos_ids
        self.max_slots = max_slots
        self.chunk_steps = chunk_steps

    def generate(self, prompts: list[np.ndarray], params: SamplingParams, step: int = 0) -> list[list[Sequence]]:
        """`params.n` completions of each prompt, in order.

        Args:
            prompts: token ids of each prompt.
            params: how to sample.
            step: distinguishes calls with the same seed.
        """
        groups: list[list[Sequence]] = [[] for _ in prompts]
        for sequence in self.stream(self.sequences(prompts, params, step)):
            groups[sequence.prompt_index].append(sequence)
        return [sorted(group, key=lambda sequence: sequence.sample_index) for group in groups]

    def sequences(
        self, prompts: list[np.ndarray], params: SamplingParams, step: int = 0, first_prompt: int = 0
    ) -> list[Sequence]:
        """Unstarted sequences for `stream`, checked against what the model can take.

        Args:
            prompts: token ids of each prompt.
            params: how to sample.
            step: distinguishes calls with the same seed.
            first_prompt: the first one's `prompt_index`; further prompts of one step get further indices.
        """
        for index, prompt in enumerate(prompts):
            self._check(index, np.asarray(prompt), params)
        stop_ids = tuple(dict.fromkeys((*self.eos_ids, *params.stop_token_ids)))
        rows = [(first_prompt + p, s) for p in range(len(prompts)) for s in range(params.n)]
        keys = row_keys(params.seed, step, *np.array(rows).T) if rows else []
        return [
            Sequence(p, s, np.asarray(prompts[p - first_prompt], np.int32), params, stop_ids, key)
            for (p, s), key in zip(rows, keys, strict=True)
        ]

    def stream(self, sequences: Iterable[Sequence]) -> Iterator[Sequence]:
        """Run sequences to their ends, each yielded as soon as it is finished."""
        sequences = list(sequences)
        num_shards = num_data_shards(self.mesh)
        slots_per_shard = max(2, _power_of_two(min(len(sequences), self.max_slots), num_shards))
        scheduler = Scheduler(num_shards, slots_per_shard)
        scheduler.submit(sequences)
        batch: _Batch | None = None
        while scheduler.busy:
            admission = scheduler.admit()
            batch = self._with_room(batch, scheduler, admission)
            if admission:
                batch = self._admit(batch, admission, slots_per_shard)
            cache, slots, chunk = decode_chunk(
                self.params,
                batch.cache,
                batch.slots,
                batch.column,
                config=self.config,
                mesh=self.mesh,
                num_steps=self.chunk_steps,
            )
            batch = _Batch(cache, slots, batch.column + self.chunk_steps)
            chunk = jax.device_get(chunk)
            yield from scheduler.collect(chunk.token, chunk.policy_logp, chunk.sampler_logp, chunk.count, chunk.stopped)

    def _check(self, index: int, prompt: np.ndarray, params: SamplingParams) -> None:
        limit = self.config.max_positions
        if prompt.size == 0:
            raise ValueError(f"prompt {index} has no tokens; the model needs at least one to continue from")
        if prompt.size + params.max_tokens > limit:
            raise ValueError(
                f"prompt {index} has {prompt.size} tokens, which with max_tokens {params.max_tokens} exceeds the "
                f"model's {limit} positions; shorten the prompt or lower max_tokens"
            )
        if prompt.min() < 0 or prompt.max() >= self.config.vocab_size:
            raise ValueError(
                f"prompt {index} has token ids from {prompt.min()} to {prompt.max()}; the model's vocabulary has "
                f"{self.config.vocab_size} tokens: is this its tokenizer?"
            )

    def _with_room(self, batch: "_Batch | None", scheduler: Scheduler, admission: Admission | None) -> "_Batch":
        """The batch with room for what is admitted and for another chunk, moved or grown if need be."""
        # Sequences end at a multiple of 8 columns, as in training (see `models.attention`).
        target = -(-scheduler.num_fed // 8) * 8
        if admission:
            target = max(target, _prefix_columns(admission))
        if batch is None:
            num_columns = bucket(target + self.chunk_steps, CACHE_COLUMNS)
            num_slots = len(scheduler.slots)
            num_stop_ids = _power_of_two(max(len(sequence.stop_ids) for sequence in scheduler.slots if sequence))
            make = partial(empty_cache, self.config, num_slots, num_columns, self.params["embed"].dtype)
            cache = jax.jit(make, out_shardings=NamedSharding(self.mesh, ROWS))()
            return _Batch(cache, self._slots(_slot_table(num_slots, num_stop_ids)), np.int32(target))
        column = int(batch.column)
        if target <= column <= batch.cache.num_columns - self.chunk_steps:
            return batch
        num_columns = max(batch.cache.num_columns, bucket(target + self.chunk_steps, CACHE_COLUMNS))
        shift = np.int32(target - column)
        cache, slots = move_columns(batch.cache, batch.slots, shift, num_columns=num_columns)
        return _Batch(cache, slots, np.int32(target))

    def _admit(self, batch: "_Batch", admission: Admission, slots_per_shard: int) -> "_Batch":
        num_slots, num_stop_ids = batch.slots.stop_ids.shape
        num_prompts = max(2, _power_of_two(max(len(prompts) for prompts in admission.prompts)))
        length = _prefix_columns(admission)
        prompts = np.zeros((num_slots // slots_per_shard, num_prompts, length), np.int32)
        starts = np.full(prompts.shape[:2], length, np.int32)
        for shard, shard_prompts in enumerate(admission.prompts):
            for index, prompt in enumerate(shard_prompts):
                starts[shard, index] = length - (len(prompt) - 1)
                prompts[shard, index, starts[shard, index] :] = prompt[:-1]
        source = np.full(num_slots, -1, np.int32)
        admitted = _slot_table(num_slots, num_stop_ids)
        for slot, index, sequence in admission.placed:
            source[slot] = index
            _fill(admitted[slot], sequence, int(batch.column))
        cache, slots = admit(
            self.params,
            batch.cache,
            batch.slots,
            self._on_rows(prompts.reshape(-1, length)),
            self._on_rows(starts.reshape(-1)),
            self._on_rows(source),
            self._slots(admitted),
            batch.column,
            config=self.config,
            mesh=self.mesh,
        )
        return _Batch(cache, slots, batch.column)

    def _on_rows(self, array: np.ndarray) -> jax.Array:
        return jax.device_put(np.ascontiguousarray(array), NamedSharding(self.mesh, ROWS))

    def _slots(self, table: np.ndarray) -> Slots:
        on_rows = {name: self._on_rows(table[name]) for name in table.dtype.names or ()}
        settings = SamplingSettings(**{name: on_rows.pop(name) for name in SETTINGS})
        return Slots(**on_rows, settings=settings)


@dataclass(frozen=True, eq=False)
class _Batch:
    """What is on the devices: the cache, the slots, and the next column that all slots write."""

    cache: Cache
    slots: Slots
    column: np.int32


def _prefix_columns(admission: Admission) -> int:
    """The columns that the admitted prompts are padded to, each without its last token."""
    return bucket(max(len(prompt) for prompts in admission.prompts for prompt in prompts) - 1, PREFILL_COLUMNS)


def _slot_table(num_slots: int, num_stop_ids: int) -> np.ndarray:
    """Idle slots on the host, a structured array with a field per field of `Slots` and `SamplingSettings`."""
    fields = [
        ("token", "i4"),
        ("position", "i4"),
        ("start", "i4"),
        ("key", "u4", 2),
        ("remaining", "i4"),
        ("stop_ids", "i4", num_stop_ids),
    ]
    settings = [("temperature", "f4"), ("top_k", "i4"), ("top_p", "f4"), ("min_p", "f4")]
    table = np.zeros(num_slots, fields + settings)
    table["stop_ids"] = -1
    return table


def _fill(row: np.void, sequence: Sequence, column: int) -> None:
    row["token"] = sequence.prompt[-1]
    row["position"] = len(sequence.prompt) - 1
    row["start"] = column - (len(sequence.prompt) - 1)
    row["key"] = sequence.key
    row["remaining"] = sequence.params.max_tokens
    row["stop_ids"][: len(sequence.stop_ids)] = sequence.stop_ids
    for name in SETTINGS:
        row[name] = getattr(sequence.params, name)


def _power_of_two(size: int, parts: int = 1) -> int:
    """The smallest power of two that times `parts` is at least `size`."""
    per_part = max(1, -(-size // parts))
    return 1 << (per_part - 1).bit_length()
