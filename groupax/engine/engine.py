"""The rollout engine: continuous batching over slots, one chunk of decoding at a time."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from groupax.data.tokenizer import encode_prompts, eos_token_ids, load_tokenizer, special_token_ids
from groupax.engine.batch import PROGRAMS
from groupax.engine.cache import cache_dtype, token_bytes
from groupax.engine.plan import FREE_FRAC, Plan
from groupax.engine.prefix_cache import PrefixCache
from groupax.engine.sampling import row_keys
from groupax.engine.sequence import Sequence
from groupax.engine.session import Session
from groupax.engine.tensor_parallel import load_sharded, validate_tp
from groupax.models.checkpoint import Model
from groupax.models.config import ModelConfig
from groupax.models.quantize import check_decoding_weights, decoding_params
from groupax.models.specs import Params
from groupax.models.split import shard_params
from groupax.parallel.mesh import decoding_mesh, splits_model
from groupax.parallel.peak import free_memory_bytes
from groupax.settings.sampling import SamplingParams


class Engine:
    """Generates completions with the weights it is given.

    The weights are read and, unless `weights` asks for fewer bits or the mesh splits them otherwise, never copied: set
    `params` to the trainer's newest before each rollout. Split ones are gathered once, when decoding begins, by `tp`
    devices together.

    Args:
        config: the model's architecture.
        params: its weights, on `mesh`.
        mesh: rows are spread over all of its devices.
        eos_ids: tokens that end every completion.
        max_slots: most completions decoded at once; the others wait for a free slot.
        chunk_steps: tokens decoded between two visits to the host.
        tokenizer: for prompts that are text or messages, stop texts, and the completions' text.
        kv_bytes: most memory for keys and values on a device, in bytes; None allows 80 % of what is free when
            sequences are started. What does not fit waits; if completions become longer than expected, the shortest
            make room and are sampled again later.
        kv_dtype: of the cache; None for that of the weights, on CPU float32.
        prefix_bytes: host memory for what was computed for finished sequences, so that prompts which begin with the
            same tokens, as the next turn of a conversation does, need only the rest computed; 0 for none.
        weights: to decode with: "same" as `params`, or a copy of them in "bfloat16", "int8" or "float8".
        tp: so many neighbouring devices share the weights, and decode the same rows: each has some of the heads with
            their keys and values, of the feed-forward's columns and of the vocabulary.

    Raises:
        ValueError: the model classifies sequences, `chunk_steps` is below 1, or devices cannot share the
            weights so.

    Attributes:
        prefixes: what is stored of finished sequences.
        before_chunk: is called before each chunk of `updates`, which it can end by an exception; None for nothing.
        version: of the weights; one more whenever others are set. Who counts otherwise sets it too, right after them.

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
        tp: int = 1,
        **settings: Any,
    ) -> "Engine":
        """An engine with the model and the tokenizer of a folder or a hub id.

        Args:
            name_or_path: a model's folder or hub id, or an adapter's.
            dtype: of the weights in memory; None keeps their own.
            mesh: where to put them; by default on all devices.
            chat_template: for a tokenizer without one: a built-in name or a file.
            tp: so many devices share the weights; without a mesh no device ever has more than its part.
            settings: further arguments of `Engine`, e.g. `max_slots` or `weights`.

        Raises:
            ValueError: there is no such model, it has no tokenizer, or devices cannot share its weights.
        """
        model = load_sharded(name_or_path, dtype, mesh, tp)
        assert model.source is not None, "a loaded model has a folder"
        return cls.of(model, load_tokenizer(model.source, chat_template), tp=tp, **settings)

    @classmethod
    def of(cls, model: Model, tokenizer: Any = None, **settings: Any) -> "Engine":
        """An engine with a model in memory.

        Args:
            model: its weights are not copied.
            tokenizer: None takes that of the model's folder.
            settings: further arguments of `Engine`.

        Raises:
            ValueError: there is no tokenizer, or devices cannot share the weights.
        """
        if tokenizer is None:
            if model.source is None:
                raise ValueError(
                    "a model that was made in memory has no tokenizer; give one, as Engine.of(model, tokenizer), or "
                    "for prompts of token ids make the engine as Engine(model.config, model.params, model.mesh, "
                    "eos_ids)"
                )
            tokenizer = load_tokenizer(model.source)
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
        tp: int = 1,
    ) -> None:
        if config.num_labels:
            raise ValueError(
                f"the model classifies sequences, with {config.num_labels} labels, and has no head to generate text "
                "with; give a causal model"
            )
        if chunk_steps < 1:
            raise ValueError(f"chunk_steps must be at least 1, got {chunk_steps}")
        self.config = config
        self.weights = weights
        self.mesh = decoding_mesh(mesh, tp)
        self._gathers = splits_model(mesh) or tp > 1
        if tp > 1:
            validate_tp(config, self.mesh, params, weights)
        self._given: Params = params
        self._params: Params | None = None
        self.version = 0
        self.eos_ids = eos_ids
        self.max_slots = max_slots
        self.chunk_steps = chunk_steps
        self.tokenizer = tokenizer
        self.kv_bytes = kv_bytes
        check_decoding_weights(params, weights)
        self.kv_dtype = cache_dtype(kv_dtype, weights, params["embed"].dtype, self.mesh.devices.flat[0].platform)
        self.prefixes = PrefixCache(prefix_bytes)
        self.before_chunk: Callable[[], object] | None = None

    @property
    def params(self) -> Params:
        """The weights it decodes with."""
        if self._params is None:
            given = self._given
            whole = jax.block_until_ready(shard_params(self.config, self.mesh, given)) if self._gathers else given
            self._params = decoding_params(self.config, whole, self.weights)
        return self._params

    @params.setter
    def params(self, params: Params) -> None:
        if params is not self._given:  # a copy is not made twice
            self._given, self._params = params, None
            self.version += 1
            self.prefixes.clear()

    def release(self) -> None:
        """Give back the memory of weights that were gathered or converted; what is decoded next makes them again."""
        if self._gathers or self.weights != "same":
            self._params = None

    def generate(self, prompts: Any, params: SamplingParams | None = None, step: int = 0) -> list[list[Sequence]]:
        """`params.n` completions of each prompt, in order.

        Args:
            prompts: one prompt or a list of them; a prompt is a text, a list of messages, or token ids. The rows of an
                array [P, S] of token ids are prompts.
            params: how to sample.
            step: distinguishes calls with the same seed.

        Raises:
            ValueError: a prompt is empty, too long, no row of token ids, has tokens that the model has not, or needs a
                tokenizer.
        """
        ids = self.encode(prompts)
        groups: list[list[Sequence]] = [[] for _ in ids]
        for sequence in self.stream(self.sequences(ids, params or SamplingParams(), step)):
            groups[sequence.prompt_index].append(sequence)
        return [sorted(group, key=lambda sequence: sequence.sample_index) for group in groups]

    def encode(self, prompts: Any) -> list[np.ndarray]:
        """Token ids of one prompt or a list of them: texts, lists of messages, or token ids as arrays or lists.

        Raises:
            ValueError: prompts are of several kinds, or need a tokenizer.
        """
        given = [prompts] if _is_one_prompt(prompts) else list(prompts)
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
        if params.stop:
            assert not isinstance(params.stop_token_ids, int), "made a tuple of one when it was set"
            special = special_token_ids(self.tokenizer, params.stop)
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *special)) if special else params
        return new_sequences(prompts, params, self.eos_ids, step, first_prompt)

    def stream(self, sequences: Iterable[Sequence]) -> Iterator[Sequence]:
        """Run sequences to their ends, each yielded as soon as it is finished."""
        for sequence, _ in self.updates(sequences):
            if sequence.finish_reason:
                yield sequence

    def updates(self, sequences: Iterable[Sequence]) -> Iterator[tuple[Sequence, int]]:
        """Run sequences to their ends; yields each after every chunk, with the number of its new tokens.

        Between two of these, sequences can be cancelled (`Sequence.cancel`). One that had to begin again is told again
        only when it is further than before; if it is cancelled by then, the number is negative.

        Raises:
            ValueError: the memory for keys and values does not hold two of the longest sequences.
        """
        session = Session(self)
        session.submit(sequences)
        while session.busy:
            if self.before_chunk is not None:
                self.before_chunk()
            yield from session.step()

    def plan(self) -> Plan:
        """How much of the cache fits into `kv_bytes`, or into a part of the memory that is free beside the weights."""
        allowed = self.kv_bytes
        if allowed is None:
            jax.block_until_ready(self.params)  # gathered and converted ones take theirs first
            allowed = int(FREE_FRAC * free_memory_bytes(self.mesh))
        return Plan(allowed // self.bytes_per_token, self.config.num_layers, self.max_slots)

    @property
    def bytes_per_token(self) -> int:
        """Of the keys and values of one token in all layers, on one of the devices that have them."""
        return token_bytes(self.config, self.kv_dtype, self.mesh.shape["tp"])

    def warmup(self, prompt_length: int, params: SamplingParams | None = None, num_prompts: int = 1) -> int:
        """Compile what a request of this shape needs, by running it on made-up prompts; returns `num_programs`."""
        prompts = [np.full(prompt_length, index % self.config.vocab_size, np.int32) for index in range(num_prompts)]
        self.generate(prompts, replace(params or SamplingParams(), ignore_eos=True, stop=(), stop_token_ids=()))
        return self.num_programs

    @property
    def num_programs(self) -> int:
        """Programs that engines of this process have compiled."""
        return sum(program._cache_size() for program in PROGRAMS)

    def _check(self, index: int, prompt: np.ndarray, params: SamplingParams) -> None:
        limit = self.config.max_positions
        if prompt.ndim != 1:
            raise ValueError(
                f"prompt {index} is an array of the shape {prompt.shape}; a prompt is one row of token ids, several "
                "are a list of such rows or an array of two dims"
            )
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


def _is_one_prompt(prompts: Any) -> bool:
    """Whether this is a prompt, and no list of them."""
    if isinstance(prompts, (np.ndarray, jax.Array)):
        return prompts.ndim < 2
    if isinstance(prompts, (list, tuple)):
        return bool(prompts) and isinstance(prompts[0], (dict, int, np.integer))
    return isinstance(prompts, str)


def new_sequences(
    prompts: list[np.ndarray], params: SamplingParams, eos_ids: tuple[int, ...], step: int = 0, first_prompt: int = 0
) -> list[Sequence]:
    """Unstarted sequences of prompts, as `Engine.sequences` gives them, not checked against any model.

    Args:
        prompts: token ids of each prompt.
        params: how to sample.
        eos_ids: tokens that end every completion, unless `params.ignore_eos`.
        step: distinguishes calls with the same seed.
        first_prompt: the first one's `prompt_index`.
    """
    further = params.stop_token_ids
    assert not isinstance(further, int), "made a tuple of one when it was set"
    stop_ids = tuple(dict.fromkeys((*(() if params.ignore_eos else eos_ids), *further)))
    rows = [(first_prompt + p, s) for p in range(len(prompts)) for s in range(params.n)]
    keys = row_keys(params.seed, step, *np.array(rows).T) if rows else []
    return [
        Sequence(p, s, np.asarray(prompts[p - first_prompt], np.int32), params, stop_ids, key)
        for (p, s), key in zip(rows, keys, strict=True)
    ]
