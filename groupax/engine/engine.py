"""The rollout engine: continuous batching over slots, one chunk of decoding at a time."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import Mesh

from groupax.core.settings.sampling import BIASED_TOKENS, STOP_IDS, SamplingParams
from groupax.data.tokenizer import eos_token_ids, load_tokenizer, special_token_ids
from groupax.engine.core import EngineCore, load_sharded, with_adapters
from groupax.engine.images import encoded_prompts
from groupax.engine.sampling import row_keys
from groupax.engine.sequence import Sequence, check_request
from groupax.engine.session import Session
from groupax.models.vision.processing import prompt_encoder
from groupax.models.weights.checkpoint import Model, load_adapter


class Engine(EngineCore):
    """Generates completions with the weights it is given.

    The weights are read and, unless `weights` asks for fewer bits or the mesh shards them otherwise, never copied: set
    `params` to the trainer's newest before each rollout. Sharded weights are gathered once, when decoding starts.

    Args:
        config: Architecture of the model.
        params: Weights of the model, on `mesh`.
        mesh: Devices; rows are sharded over all of them.
        eos_ids: Tokens that end every completion.
        tokenizer: Tokenizer for prompts that are text or messages, for stop strings, and for the completions' text.
        features: Cache of the features of images, which others may share; None creates one if the model sees images.
        settings: Fields of `core.EngineSettings`, e.g. `max_slots`, `kv_bytes`, `weights` or `tp`.

    Raises:
        ValueError: The model classifies sequences, `chunk_steps` is below 1, or the weights cannot be sharded so.

    Attributes:
        prefixes: The cache of finished sequences.
        before_chunk: Called before each chunk of `updates`, which it can end by an exception; None for nothing.
        version: Version of the weights, incremented whenever others are set. Callers that count otherwise set it too,
            right after the weights.

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
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        **settings: Any,
    ) -> "Engine":
        """Returns an engine with the model and the tokenizer of a folder or a hub id.

        Args:
            name_or_path: Folder or hub id of a model or an adapter.
            dtype: Dtype of the weights in memory; None keeps their own.
            mesh: Devices for the weights; None for all devices.
            chat_template: Chat template for a tokenizer without one: a built-in name or a file.
            tp: Number of devices that share the weights; without a mesh no device ever has more than its shard.
            adapters: Folder or hub id of each adapter to decode together with the model, by its name.
            settings: Further arguments of `Engine`, e.g. `max_slots` or `weights`.

        Raises:
            ValueError: There is no such model, it has no tokenizer, or its weights cannot be sharded so.
        """
        model = load_sharded(name_or_path, dtype, mesh, tp)
        assert model.source is not None, "a loaded model has a folder"
        loaded = {name: load_adapter(model, folder) for name, folder in (adapters or {}).items()}
        return cls.of(model, load_tokenizer(model.source, chat_template), loaded, tp=tp, **settings)

    @classmethod
    def of(
        cls, model: Model, tokenizer: Any = None, adapters: Mapping[str, Model] | None = None, **settings: Any
    ) -> "Engine":
        """Returns an engine with a model in memory.

        Args:
            model: The model; its weights are not copied.
            tokenizer: None loads the tokenizer of the model's folder.
            adapters: Adapters of this model to decode together with it, by name: what `load_adapter` and `add_adapter`
                return.
            settings: Further arguments of `Engine`.

        Raises:
            ValueError: There is no tokenizer, the weights cannot be sharded so, or an adapter has another base or more
                than low-rank changes.
        """
        params, names = (with_adapters(model, adapters), tuple(adapters)) if adapters else (model.params, ())
        if tokenizer is None:
            if model.source is None:
                raise ValueError(
                    "a model that was created in memory has no tokenizer; give one, as Engine.of(model, tokenizer), or "
                    "for prompts of token ids create the engine as Engine(model.config, model.params, model.mesh, "
                    "eos_ids)"
                )
            tokenizer = load_tokenizer(model.source)
        eos_ids = eos_token_ids(tokenizer, model.generation_config, model.hf_config)
        engine = cls(model.config, params, model.mesh, eos_ids, tokenizer=tokenizer, adapters=names, **settings)
        engine.image_encoder = prompt_encoder(model.config.vision, model.source, tokenizer, 0)
        return engine

    def generate(
        self, prompts: Any, params: SamplingParams | None = None, step: int = 0, adapter: str | None = None
    ) -> list[list[Sequence]]:
        """Returns `params.n` completions of each prompt, in order.

        Args:
            prompts: One prompt or a list of them; a prompt is a text, a list of messages, which may have images if the
                model sees them, or token ids. The rows of an array [P, S] of token ids are prompts.
            params: Sampling parameters.
            step: Number that distinguishes calls with the same seed.
            adapter: Name of one of `adapters`; None for the base.

        Raises:
            ValueError: A prompt is empty, too long, no row of token ids, has tokens outside the vocabulary, or needs a
                tokenizer, or there is no such adapter.
        """
        ids, images = encoded_prompts(prompts, self.tokenizer, self.image_encoder)
        groups: list[list[Sequence]] = [[] for _ in ids]
        sequences = self.sequences(ids, params or SamplingParams(), step, adapter=adapter)
        for sequence in sequences:
            sequence.images = images[sequence.prompt_index]
        for sequence in self.stream(sequences):
            groups[sequence.prompt_index].append(sequence)
        return [sorted(group, key=lambda sequence: sequence.sample_index) for group in groups]

    def encode(self, prompts: Any) -> list[np.ndarray]:
        """Returns the token ids of one prompt or a list of them: texts, lists of messages, or token ids.

        Raises:
            ValueError: Prompts are of several kinds, need a tokenizer, or have images, which `generate` takes.
        """
        ids, images = encoded_prompts(prompts, self.tokenizer, self.image_encoder)
        if any(images):
            raise ValueError("a prompt has images, which its token ids alone do not show; give the prompt to generate")
        return ids

    def sequences(
        self,
        prompts: list[np.ndarray],
        params: SamplingParams,
        step: int = 0,
        first_prompt: int = 0,
        adapter: str | None = None,
    ) -> list[Sequence]:
        """Returns unstarted sequences for `stream`, checked against the model's limits.

        Args:
            prompts: Token ids of each prompt.
            params: Sampling parameters.
            step: Number that distinguishes calls with the same seed.
            first_prompt: The first prompt's `prompt_index`; the others follow.
            adapter: Name of one of `adapters`; None for the base.

        Raises:
            ValueError: A prompt or an option is not one that the model takes, or there are more stop tokens or biased
                tokens than a slot has room for.
        """
        if adapter is not None:
            self.adapter_index(adapter)
        check_request(prompts, params, self.config.max_positions, self.config.vocab_size, self.tokenizer is not None)
        if params.stop:
            assert not isinstance(params.stop_token_ids, int), "SamplingParams makes it a tuple"
            special = special_token_ids(self.tokenizer, params.stop)
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *special)) if special else params
        sequences = new_sequences(prompts, params, self.eos_ids, step, first_prompt)
        if any(len(each.stop_ids) > STOP_IDS for each in sequences) or len(params.logit_bias) > BIASED_TOKENS:
            raise ValueError(
                f"a completion may have {STOP_IDS} stop tokens, the model's own included, and logit_bias of "
                f"{BIASED_TOKENS} tokens; there are more"
            )
        for sequence in sequences:
            sequence.adapter = adapter
        if params.constraint is not None:
            for sequence in sequences:
                sequence.matcher = self.constraints.matcher(*params.constraint)
        return sequences

    def stream(self, sequences: Iterable[Sequence]) -> Iterator[Sequence]:
        """Runs sequences to their ends and yields each as soon as it is finished.

        Raises:
            ValueError: The memory does not hold two of the longest sequences, or a constraint became too complex.
        """
        for sequence, _ in self.updates(sequences):
            if sequence.fault:
                raise ValueError(sequence.fault)
            if sequence.finish_reason:
                yield sequence

    def updates(self, sequences: Iterable[Sequence]) -> Iterator[tuple[Sequence, int]]:
        """Runs sequences to their ends and yields each after every chunk, with its number of new tokens.

        Between two yields, sequences can be cancelled (`Sequence.cancel`). A preempted sequence grows again from its
        beginning.

        Raises:
            ValueError: The memory for keys and values does not hold two of the longest sequences.
        """
        session = self.session()
        session.submit(sequences)
        while session.busy:
            yield from session.step()

    def session(self) -> Session:
        """Returns a new session, in which further sequences can be submitted while others run."""
        return Session(self)


def new_sequences(
    prompts: list[np.ndarray], params: SamplingParams, eos_ids: tuple[int, ...], step: int = 0, first_prompt: int = 0
) -> list[Sequence]:
    """Returns unstarted sequences as `Engine.sequences` does, not checked against any model.

    `eos_ids` end every completion, unless `params.ignore_eos`.
    """
    added = params.stop_token_ids
    assert not isinstance(added, int), "SamplingParams makes it a tuple"
    stop_ids = tuple(dict.fromkeys((*(() if params.ignore_eos else eos_ids), *added)))
    rows = [(first_prompt + p, s) for p in range(len(prompts)) for s in range(params.n)]
    keys = row_keys(params.seed, step, *np.array(rows).T) if rows else []
    return [
        Sequence(p, s, np.asarray(prompts[p - first_prompt], np.int32), params, stop_ids, key)
        for (p, s), key in zip(rows, keys, strict=True)
    ]
