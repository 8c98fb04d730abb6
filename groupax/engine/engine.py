"""The rollout engine: continuous batching over slots, one chunk of decoding at a time."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from groupax.engine.cache import Cache, empty_cache
from groupax.engine.decode import (
    ROWS,
    Chunk,
    Known,
    Slots,
    admit,
    decode_chunk,
    move,
    move_slots,
    rearrange,
    release,
    stored_of,
    take,
)
from groupax.engine.params import SamplingParams
from groupax.engine.plan import (
    CACHE_COLUMNS,
    MIN_SLOTS,
    PREFILL_COLUMNS,
    CacheShape,
    Plan,
    bucket,
    max_prompts,
    power_of_two,
)
from groupax.engine.prefixes import Prefix, PrefixStore
from groupax.engine.sampling import row_keys
from groupax.engine.scheduler import Admission, Scheduler, Sequence
from groupax.engine.slots import BIASED_TOKENS, STOP_IDS, fill, slot_table, slots_of
from groupax.engine.stops import find_stop, text_before_stop
from groupax.models.checkpoint import load_model
from groupax.models.config import ModelConfig
from groupax.models.quantize import decoding_params
from groupax.models.specs import Params
from groupax.parallel.mesh import num_data_shards
from groupax.parallel.peak import free_memory_bytes
from groupax.tokenizer import decode, encode_prompts, eos_token_ids, load_tokenizer

# The part of the free memory that keys and values may take unless `kv_bytes` says otherwise.
FREE_PART = 0.8


class Engine:
    """Generates completions with the weights it is given.

    The weights are read and, unless `weights` asks for fewer bits, never copied: set `params` to the trainer's newest
    before each rollout.

    Args:
        config: the model's architecture.
        params: its weights, on `mesh`.
        mesh: rows are spread over its data axes.
        eos_ids: tokens that end every completion.
        max_slots: most completions decoded at once; the others wait for a free slot.
        chunk_steps: tokens decoded between two visits to the host; a multiple of 8.
        tokenizer: for prompts that are text or messages, stop texts, and the completions' text.
        kv_bytes: most memory for keys and values on a device, in bytes; None allows 80 % of what is free when
            sequences are started. What does not fit waits; if completions become longer than expected, the shortest
            make room and are sampled again later.
        kv_dtype: of the cache; None for that of the weights.
        prefix_bytes: host memory for what was computed for finished sequences, so that prompts which begin with the
            same tokens, as the next turn of a conversation does, need only the rest computed; 0 for none.
        weights: to decode with: "same" as `params`, or a copy of them in "bfloat16", "int8" or "float8".

    Attributes:
        num_reused_tokens: prompt tokens that were not computed because of that.

    Example:
        >>> engine = Engine.load("Qwen/Qwen3-0.6B")  # doctest: +SKIP
        >>> [[story]] = engine.generate("Once upon a time", SamplingParams(max_tokens=64))  # doctest: +SKIP
        >>> story.text  # doctest: +SKIP
    """

    @classmethod
    def load(
        cls,
        name_or_path: str | os.PathLike[str],
        dtype: Any = None,
        mesh: Mesh | None = None,
        chat_template: str | None = None,
        **settings: Any,
    ) -> "Engine":
        """An engine with the model and the tokenizer of a folder or a hub id.

        Args:
            name_or_path: a model's folder or hub id.
            dtype: of the weights in memory; None keeps their own.
            mesh: where to put them; by default on all devices.
            chat_template: for a tokenizer without one: a built-in name or a file.
            settings: further arguments of `Engine`, e.g. `max_slots` or `weights`.

        Raises:
            ValueError: there is no such model, or it has no tokenizer.
        """
        model = load_model(name_or_path, dtype, mesh)
        assert model.source is not None, "a loaded model has a folder"
        tokenizer = load_tokenizer(model.source, chat_template)
        eos_ids = eos_token_ids(tokenizer, model.generation_config, model.hf_config)
        return cls(model.config, model.params, model.mesh, eos_ids, tokenizer=tokenizer, **settings)

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        mesh: Mesh,
        eos_ids: tuple[int, ...],
        max_slots: int = 256,
        chunk_steps: int = 32,
        tokenizer: Any = None,
        kv_bytes: int | None = None,
        kv_dtype: Any = None,
        prefix_bytes: int = 0,
        weights: str = "same",
    ) -> None:
        self.config = config
        self.weights = weights
        self.params = params
        self.mesh = mesh
        self.eos_ids = eos_ids
        self.max_slots = max_slots
        self.chunk_steps = chunk_steps
        self.tokenizer = tokenizer
        self.kv_bytes = kv_bytes
        self.kv_dtype = jnp.dtype(kv_dtype or self.params["embed"].dtype)
        self.prefixes = PrefixStore(prefix_bytes)
        self.num_reused_tokens = 0

    @property
    def params(self) -> Params:
        """The weights that it decodes with."""
        return self._params

    @params.setter
    def params(self, params: Params) -> None:
        self._params = decoding_params(self.config, params, self.weights)

    def generate(self, prompts: Any, params: SamplingParams | None = None, step: int = 0) -> list[list[Sequence]]:
        """`params.n` completions of each prompt, in order.

        Args:
            prompts: one prompt or a list of them; a prompt is a text, a list of messages, or an array of token ids.
            params: how to sample.
            step: distinguishes calls with the same seed.

        Raises:
            ValueError: a prompt is empty, too long, has tokens that the model has not, or needs a tokenizer.
        """
        ids = self.encode(prompts)
        groups: list[list[Sequence]] = [[] for _ in ids]
        for sequence in self.stream(self.sequences(ids, params or SamplingParams(), step)):
            groups[sequence.prompt_index].append(sequence)
        return [sorted(group, key=lambda sequence: sequence.sample_index) for group in groups]

    def encode(self, prompts: Any) -> list[np.ndarray]:
        """Token ids of one prompt or a list of them: texts, lists of messages, or arrays of token ids."""
        single = isinstance(prompts, (str, np.ndarray)) or (
            isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], (dict, int, np.integer))
        )
        given = [prompts] if single else list(prompts)
        texts = [p for p in given if isinstance(p, str) or (isinstance(p, list) and p and isinstance(p[0], dict))]
        if not texts:
            return [np.asarray(prompt, np.int32) for prompt in given]
        if self.tokenizer is None:
            raise ValueError("a prompt that is a text or a list of messages needs a tokenizer; give the Engine one")
        if len(texts) < len(given):
            raise ValueError("give all prompts as text or messages, or all as token ids")
        return encode_prompts(self.tokenizer, given)

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
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop texts ({', '.join(map(repr, params.stop))}) need a tokenizer; give the Engine one")
        outside = [token for token in params.logit_bias if not 0 <= token < self.config.vocab_size]
        if outside:
            raise ValueError(f"logit_bias names tokens {outside}; the vocabulary has {self.config.vocab_size}")
        stop_ids = tuple(dict.fromkeys((*(() if params.ignore_eos else self.eos_ids), *params.stop_token_ids)))
        rows = [(first_prompt + p, s) for p in range(len(prompts)) for s in range(params.n)]
        keys = row_keys(params.seed, step, *np.array(rows).T) if rows else []
        return [
            Sequence(p, s, np.asarray(prompts[p - first_prompt], np.int32), params, stop_ids, key)
            for (p, s), key in zip(rows, keys, strict=True)
        ]

    def stream(self, sequences: Iterable[Sequence]) -> Iterator[Sequence]:
        """Run sequences to their ends, each yielded as soon as it is finished."""
        for sequence, _ in self.updates(sequences):
            if sequence.finish_reason:
                yield sequence

    def updates(self, sequences: Iterable[Sequence]) -> Iterator[tuple[Sequence, int]]:
        """Run sequences to their ends; yields each after every chunk, with the number of its new tokens.

        Between two of these, sequences can be cancelled (`Sequence.cancel`).

        Raises:
            ValueError: the memory for keys and values does not hold two of the longest sequences.
        """
        sequences = list(sequences)
        if not sequences:
            return
        plan = self.plan()
        scheduler, batch = self._begin(sequences, plan)
        told: dict[int, int] = {}  # by sequence; one that had to start again has been told more than it has
        ended: set[int] = set()
        while scheduler.busy:
            cancelled = scheduler.cancelled()
            for sequence in cancelled:
                self._finish(sequence, len(sequence.tokens))
            batch = self._retired(batch, scheduler, plan)
            for sequence in cancelled:
                if id(sequence) not in ended:
                    yield sequence, 0
            batch = self._with_room(batch, scheduler, plan)
            while admission := scheduler.admit(max_prompts(batch.cache.num_prompt_columns)):
                batch = self._admit(batch, admission, scheduler.slots_per_shard)
            if not scheduler.running:
                break
            batch, grown = self._decode_chunk(batch, scheduler)
            self._keep_prefixes(batch, scheduler)
            batch = self._retired(batch, scheduler, plan)
            for sequence in grown:
                num_new = len(sequence.tokens) - told.get(id(sequence), 0)
                told[id(sequence)] = max(told.get(id(sequence), 0), len(sequence.tokens))
                if sequence.finish_reason:
                    ended.add(id(sequence))
                if num_new > 0 or sequence.finish_reason:
                    yield sequence, num_new

    def plan(self) -> Plan:
        """How much of the cache fits into `kv_bytes`, or into a part of the memory that is free now."""
        allowed = self.kv_bytes or int(FREE_PART * free_memory_bytes(self.mesh))
        return Plan(allowed // self.bytes_per_token, self.config.num_layers, self.max_slots)

    @property
    def bytes_per_token(self) -> int:
        """Of the keys and values of one token in all layers."""
        return 2 * self.config.num_layers * self.config.num_kv_heads * self.config.head_dim * self.kv_dtype.itemsize

    def warmup(self, prompt_length: int, params: SamplingParams | None = None, num_prompts: int = 1) -> int:
        """Compile what a request of this shape needs, by running it on made-up prompts; returns `num_programs`."""
        prompts = [np.full(prompt_length, index % self.config.vocab_size, np.int32) for index in range(num_prompts)]
        self.generate(prompts, replace(params or SamplingParams(), ignore_eos=True, stop=(), stop_token_ids=()))
        return self.num_programs

    @property
    def num_programs(self) -> int:
        """Programs that engines of this process have compiled."""
        programs: Any = (admit, decode_chunk, move, move_slots, release, stored_of, take)
        return sum(program._cache_size() for program in programs)

    def _fetch(self, chunk: Chunk, running: Iterable[Sequence]) -> Chunk:
        """The chunk on the host, its alternatives only if a sequence wants them."""
        if not any(sequence.params.logprobs for sequence in running):
            chunk = replace(chunk, alternatives=None, alternative_logps=None)
        return jax.device_get(chunk)

    def _finish(self, sequence: Sequence, num_before: int) -> None:
        """Look for stop texts in what is new, and set the text of a sequence that has ended."""
        stop = sequence.params.stop
        if stop and sequence.finish_reason != "abort":
            kept = find_stop(self._decode, sequence.tokens, num_before, stop, sequence.params.min_tokens)
            if kept is not None:
                sequence.cut(kept)
                sequence.finish_reason = "stop"
        if sequence.finish_reason and self.tokenizer is not None:
            sequence.text = text_before_stop(self._decode(sequence.tokens), stop)

    def _decode(self, tokens: Iterable[int]) -> str:
        return decode(self.tokenizer, [list(tokens)])[0]

    def _begin(self, sequences: list[Sequence], plan: Plan) -> tuple[Scheduler, "_Batch"]:
        """A scheduler with the sequences waiting, and idle slots for them."""
        num_shards = num_data_shards(self.mesh)
        counts: dict[int, int] = {}
        stop_ids, biased, prompt, completion = STOP_IDS, BIASED_TOKENS, 0, 0
        for sequence in sequences:
            counts[sequence.prompt_index] = counts.get(sequence.prompt_index, 0) + 1
            stop_ids = max(stop_ids, power_of_two(len(sequence.stop_ids)))
            biased = max(biased, power_of_two(len(sequence.params.logit_bias)))
            prompt = max(prompt, len(sequence.prompt) - 1)
            completion = max(completion, sequence.params.max_tokens)
        longest = (prompt, _multiple_of_8(completion) + self.chunk_steps)
        shape = plan.first_shape(counts.values(), num_shards, longest)
        scheduler = Scheduler(num_shards, shape.num_slots, shape.share)
        scheduler.submit(sequences)
        num_columns = bucket(self.chunk_steps, CACHE_COLUMNS)
        sizes = (num_shards * shape.num_places, shape.num_prompt_columns, num_shards * shape.num_slots, num_columns)
        cache = _cache_maker(self.config, *sizes, self.kv_dtype, self.mesh)()
        slots = slots_of(slot_table(num_shards * shape.num_slots, stop_ids, biased), self._on_rows)
        return scheduler, _Batch(cache, slots, np.int32(0))

    def _decode_chunk(self, batch: "_Batch", scheduler: Scheduler) -> tuple["_Batch", list[Sequence]]:
        """Another chunk for all running sequences, which are returned."""
        cache, slots, chunk = decode_chunk(
            self.params,
            batch.cache,
            batch.slots,
            batch.column,
            config=self.config,
            mesh=self.mesh,
            num_steps=self.chunk_steps,
        )
        lengths = {id(sequence): len(sequence.tokens) for sequence in scheduler.running}
        grown = scheduler.append(self._fetch(chunk, scheduler.running))
        for sequence in grown:
            self._finish(sequence, lengths[id(sequence)])
        return _Batch(cache, slots, np.int32(batch.column + self.chunk_steps)), grown

    def _keep_prefixes(self, batch: "_Batch", scheduler: Scheduler) -> None:
        """Store what was computed for the sequences that have just ended, if that is wanted."""
        if not self.prefixes.max_bytes:
            return
        for slot, sequence in enumerate(scheduler.slots):
            if sequence is None or sequence.finish_reason is None or not sequence.tokens:
                continue
            stored = jax.device_get(stored_of(batch.cache, batch.slots, slot, slot // scheduler.share))
            of_prompt = slice(batch.cache.num_prompt_columns - (len(sequence.prompt) - 1), None)
            of_row = slice(int(stored["start"]), int(stored["start"]) + len(sequence.tokens))
            pairs = zip(stored["prompt_k"], stored["k"], strict=True)
            k = [np.concatenate([prompt[..., of_prompt], row[..., of_row]], axis=2) for prompt, row in pairs]
            pairs = zip(stored["prompt_v"], stored["v"], strict=True)
            v = [np.concatenate([prompt[:, of_prompt], row[:, of_row]], axis=1) for prompt, row in pairs]
            fed = np.array([*sequence.prompt, *sequence.tokens[:-1]], np.int32)
            self.prefixes.add(Prefix(fed, k, v))

    def _known(self, prompts: np.ndarray, starts: np.ndarray) -> Known | None:
        """What the store has of these left-padded prompts, [P, S]; None if nothing."""
        self.prefixes.belong_to(self.params)
        found = [self.prefixes.find(row[start:]) for row, start in zip(prompts, starts, strict=True)]
        if not any(length for length, _ in found):
            return None
        (P, S), K, H = prompts.shape, self.config.num_kv_heads, self.config.head_dim
        layers = range(self.config.num_layers)
        k = [np.zeros((P, K, H, S), self.kv_dtype) for _ in layers]
        v = [np.zeros((P, K, S, H), self.kv_dtype) for _ in layers]
        for index, (length, prefix) in enumerate(found):
            if prefix is not None:
                columns = slice(starts[index], starts[index] + length)
                for layer in layers:
                    k[layer][index][..., columns] = prefix.k[layer][..., :length]
                    v[layer][index][:, columns] = prefix.v[layer][:, :length]
        lengths = np.array([length for length, _ in found], np.int32)
        self.num_reused_tokens += int(lengths.sum())
        return Known(
            self._on_rows(starts + lengths), [self._on_rows(each) for each in k], [self._on_rows(each) for each in v]
        )

    def _retired(self, batch: "_Batch", scheduler: Scheduler, plan: Plan) -> "_Batch":
        """The batch without the sequences that have ended, in fewer slots if that pays."""
        freed = scheduler.retire()
        if not freed:
            return batch
        released = np.zeros(len(scheduler.slots), bool)
        released[freed] = True
        return self._shrunk(replace(batch, slots=release(batch.slots, self._on_rows(released))), scheduler, plan)

    def _shrunk(self, batch: "_Batch", scheduler: Scheduler, plan: Plan) -> "_Batch":
        """The batch with half as many slots or fewer, once so many have nothing to do any more."""
        needed = max(MIN_SLOTS, power_of_two(scheduler.num_slots_needed()))
        if scheduler.waiting or not scheduler.running or needed > scheduler.slots_per_shard // 2:
            return batch
        if not plan.allows(replace(_shape(batch, scheduler), num_slots=needed, share=1)):
            return batch  # a prompt for each slot would take more room than fewer slots save
        share = scheduler.share
        kept = scheduler.shrink(needed)
        return self._rearranged(batch, kept, kept // share, int(batch.column), batch.cache.num_columns)

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

    def _with_room(self, batch: "_Batch", scheduler: Scheduler, plan: Plan) -> "_Batch":
        """The batch with columns for another chunk: moved, grown, made smaller, or with fewer slots if need be."""
        column, shape = int(batch.column), _shape(batch, scheduler)
        # a slot's columns begin at a multiple of 8, as a row's do in training (see `models.attention`)
        target = _multiple_of_8(scheduler.num_fed)
        needed = bucket(target + self.chunk_steps, CACHE_COLUMNS)
        is_wide = needed <= shape.num_columns // 2
        if column <= shape.num_columns - self.chunk_steps and not is_wide:
            return batch
        shape = replace(shape, num_columns=needed if is_wide else max(needed, shape.num_columns))
        rows = places = None
        if not plan.allows(shape):
            shape = plan.smaller(shape)
            places, rows = scheduler.evict(shape.num_places, shape.share)
        elif scheduler.waiting and plan.allows(replace(shape, num_slots=2 * shape.num_slots)):
            rows, places = self._doubled(scheduler, plan)
        return self._rearranged(batch, rows, places, target, shape.num_columns)

    def _doubled(self, scheduler: Scheduler, plan: Plan) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Twice as many slots for the sequences that wait, unless there are as many as allowed."""
        num_slots, num_shards = scheduler.slots_per_shard, scheduler.num_shards
        if 2 * num_slots > power_of_two(plan.max_slots, num_shards):
            return None, None
        old = np.arange(num_slots), np.arange(num_slots // scheduler.share)
        scheduler.grow(2 * num_slots)
        rows, places = (np.tile(np.concatenate([x, np.full_like(x, -1)]), num_shards) for x in old)
        return rows.astype(np.int32), places.astype(np.int32)

    def _rearranged(
        self, batch: "_Batch", rows: np.ndarray | None, places: np.ndarray | None, column: int, num_columns: int
    ) -> "_Batch":
        """The batch with these slots and places, its next column at `column`."""
        cache, slots = rearrange(
            batch.cache,
            batch.slots,
            None if rows is None else self._on_rows(rows),
            None if places is None else self._on_rows(places),
            column - int(batch.column),
            num_columns=num_columns,
            mesh=self.mesh,
        )
        return _Batch(cache, slots, np.int32(column))

    def _admit(self, batch: "_Batch", admission: Admission, slots_per_shard: int) -> "_Batch":
        num_slots, num_stop_ids = batch.slots.stop_ids.shape
        num_biased = batch.slots.settings.bias.shape[1]
        num_prompts = max(2, power_of_two(max(len(prompts) for prompts in admission.prompts)))
        length = _prompt_columns(admission)
        prompts = np.zeros((num_slots // slots_per_shard, num_prompts, length), np.int32)
        starts = np.full(prompts.shape[:2], length, np.int32)
        for shard, shard_prompts in enumerate(admission.prompts):
            for index, prompt in enumerate(shard_prompts):
                starts[shard, index] = length - (len(prompt) - 1)
                prompts[shard, index, starts[shard, index] :] = prompt[:-1]
        source = np.full(batch.cache.prompt_tokens.shape[0], -1, np.int32)
        for place, index in admission.places:
            source[place] = index
        admitted = slot_table(num_slots, num_stop_ids, num_biased)
        is_new = np.zeros(num_slots, bool)
        for slot, sequence in admission.placed:
            is_new[slot] = True
            fill(admitted[slot], sequence, int(batch.column))
        prompts, starts = prompts.reshape(-1, length), starts.reshape(-1)
        cache, slots = admit(
            self.params,
            batch.cache,
            batch.slots,
            self._on_rows(prompts),
            self._on_rows(starts),
            self._on_rows(source),
            self._on_rows(is_new),
            slots_of(admitted, self._on_rows),
            self._known(prompts, starts) if self.prefixes.max_bytes else None,
            config=self.config,
            mesh=self.mesh,
        )
        return _Batch(cache, slots, batch.column)

    def _on_rows(self, array: np.ndarray) -> jax.Array:
        return jax.device_put(np.ascontiguousarray(array), NamedSharding(self.mesh, ROWS))


@dataclass(frozen=True, eq=False)
class _Batch:
    """What is on the devices: the cache, the slots, and the next column that all slots write."""

    cache: Cache
    slots: Slots
    column: np.int32


def _shape(batch: _Batch, scheduler: Scheduler) -> CacheShape:
    cache = batch.cache
    return CacheShape(scheduler.slots_per_shard, scheduler.share, cache.num_prompt_columns, cache.num_columns)


def _multiple_of_8(size: int) -> int:
    return -(-size // 8) * 8


@lru_cache(maxsize=64)
def _cache_maker(config: ModelConfig, *sizes_dtype_mesh: Any) -> Callable[[], Cache]:
    """A program that makes an empty cache of these sizes on the devices."""
    *sizes, dtype, mesh = sizes_dtype_mesh
    return jax.jit(partial(empty_cache, config, *sizes, dtype), out_shardings=NamedSharding(mesh, ROWS))


def _prompt_columns(admission: Admission) -> int:
    """The columns that the admitted prompts are padded to, each without its last token."""
    return bucket(max(len(prompt) for prompts in admission.prompts for prompt in prompts) - 1, PREFILL_COLUMNS)
