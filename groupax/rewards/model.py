"""Reward models: sequence classifiers that score prompt and completion on the devices."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from groupax.core.types import Rollout
from groupax.data.chat import render
from groupax.data.tokenizer import encode_texts, is_conversational, load_tokenizer
from groupax.models.config import ModelConfig
from groupax.models.decoder import causal_hidden
from groupax.models.matmul import matmul_nt
from groupax.models.specs import Params
from groupax.models.weights.checkpoint import Model, load_model
from groupax.parallel.collectives import to_device, to_host
from groupax.parallel.mesh import DATA, num_data_shards

ROWS = PartitionSpec(DATA)
MICRO_BATCH_TOKENS = 8192
LENGTH_STEP = 64  # sequences are padded to a multiple of it, to compile few programs


class RewardModel:
    """A `*ForSequenceClassification` checkpoint whose first label is the reward.

    The scored text is the prompt followed by the completion: conversations in the reward model's chat template, strings
    as they are.

    Args:
        model: A folder, a hub id, or a loaded `Model` with a score head.
        tokenizer: Tokenizer of the reward model; by default the one in its folder.
        mesh: Mesh of the devices with the weights; by default all devices.
        name: Name in the metrics; by default that of the folder.

    Raises:
        ValueError: The checkpoint is not a sequence classifier, or there is no tokenizer. `scores` raises it for tokens
            that are not in the model's vocabulary.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Model,
        tokenizer: Any = None,
        mesh: Mesh | None = None,
        name: str | None = None,
    ) -> None:
        self.model = model if isinstance(model, Model) else load_model(model, mesh=mesh)
        if not self.model.config.num_labels:
            raise ValueError(
                f"{self.model.source or 'the model'} is not a reward model: its config.json names "
                f"{self.model.hf_config.get('architectures')}, not a *ForSequenceClassification"
            )
        if tokenizer is None and self.model.source is None:
            raise ValueError("a reward model that was created in memory has no tokenizer; pass one")
        self.tokenizer = tokenizer or load_tokenizer(str(self.model.source))
        self.name = name or (Path(model).name if isinstance(model, (str, os.PathLike)) else "reward_model")

    def rewards(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        """Returns the reward of each completion, [B]; NaN if its text exceeds the model's positions."""
        texts = [self._text(row) for row in rollouts]
        return self.scores(encode_texts(self.tokenizer, texts, [is_conversational(row.prompt) for row in rollouts]))

    def scores(self, token_ids: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the first label's logit for each sequence, [B] float64; NaN for a sequence that does not fit."""
        largest = max((int(ids.max()) for ids in token_ids if len(ids)), default=0)
        if largest >= self.model.config.vocab_size:
            raise ValueError(
                f"the reward model {self.name} has a vocabulary of {self.model.config.vocab_size} tokens, and its "
                f"tokenizer gives token {largest}; pass the tokenizer of this model"
            )
        values = np.full(len(token_ids), np.nan)
        num_shards = num_data_shards(self.model.mesh)
        limit = self.model.config.max_positions
        fitting = [index for index, ids in enumerate(token_ids) if 0 < len(ids) <= limit]
        ordered = sorted(fitting, key=lambda index: len(token_ids[index]))
        while ordered:
            length = min(-(-len(token_ids[ordered[-1]]) // LENGTH_STEP) * LENGTH_STEP, max(limit, LENGTH_STEP))
            num_rows = max(1, MICRO_BATCH_TOKENS // length)
            batch, ordered = ordered[-num_rows:], ordered[:-num_rows]
            num_rows = num_shards << ((-(-len(batch) // num_shards)) - 1).bit_length()
            padded = _left_padded([token_ids[index] for index in batch], num_rows, length)
            on_devices = to_device(padded, NamedSharding(self.model.mesh, ROWS))
            scored = sequence_scores(self.model.params, *on_devices, config=self.model.config, mesh=self.model.mesh)
            values[batch] = to_host(scored).astype(np.float64)[: len(batch)]
        return values

    def _text(self, row: Rollout) -> str:
        if isinstance(row.prompt, str):
            return row.prompt + row.text
        answer = [{"role": "assistant", "content": row.text}] if row.messages is None else row.messages
        conversation = [*row.prompt, *answer]
        return render(self.tokenizer, conversation, f"prompt {row.prompt_index}", add_generation_prompt=False)


def _left_padded(token_ids: Sequence[np.ndarray], num_rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns left-padded tokens, [num_rows, length] int32, and the start of each sequence, [num_rows] int32."""
    tokens = np.zeros((num_rows, length), np.int32)
    starts = np.full(num_rows, length, np.int32)
    for row, ids in enumerate(token_ids):
        starts[row] = length - len(ids)
        tokens[row, starts[row] :] = ids
    return tokens, starts


@partial(jax.jit, static_argnames=("config", "mesh"))
def sequence_scores(
    params: Params, tokens: Int[Array, "B T"], starts: Int[Array, "B"], *, config: ModelConfig, mesh: Mesh
) -> Float[Array, "B"]:
    """Computes the first label's logit at the last token of each left-padded sequence."""
    local = partial(_local_scores, config)
    return jax.shard_map(local, mesh=mesh, in_specs=(PartitionSpec(), ROWS, ROWS), out_specs=ROWS, check_vma=False)(
        params, tokens, starts
    )


def _local_scores(config: ModelConfig, params: Params, tokens: Array, starts: Array) -> Array:
    last = causal_hidden(config, params, tokens, starts)[:, -1]
    return matmul_nt(last, params["score"])[:, 0]
