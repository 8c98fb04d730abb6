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

from groupax.data.chat import render
from groupax.data.tokenizer import encode_texts, is_conversational, load_tokenizer
from groupax.models.checkpoint import Model, load_model
from groupax.models.config import ModelConfig
from groupax.models.decoder import causal_hidden
from groupax.models.matmul import matmul_nt
from groupax.models.specs import Params
from groupax.parallel.mesh import DATA, num_data_shards
from groupax.parallel.transfer import to_device, to_host
from groupax.types import Rollout

ROWS = PartitionSpec(DATA)
MICRO_BATCH_TOKENS = 8192
LENGTH_STEP = 64  # sequences are padded to multiples of it, so that programs are few


class RewardModel:
    """A `*ForSequenceClassification` checkpoint whose first label is the reward.

    The text is the prompt with the completion behind it: conversations through the reward model's chat template,
    strings as they are.

    Args:
        model: a folder, a hub id, or a loaded `Model` with a score head.
        tokenizer: the reward model's own; by default the one in its folder.
        mesh: where to put the weights; by default on all devices.
        name: of its metrics; by default the folder's.

    Raises:
        ValueError: the checkpoint is no sequence classifier, or there is no tokenizer. `scores` raises it for tokens
            that the model does not have.
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
                f"{self.model.source or 'the model'} is no reward model: its config.json names "
                f"{self.model.hf_config.get('architectures')}, not a *ForSequenceClassification"
            )
        if tokenizer is None and self.model.source is None:
            raise ValueError("a reward model that was made in memory has no tokenizer; give one")
        self.tokenizer = tokenizer or load_tokenizer(str(self.model.source))
        self.name = name or (Path(model).name if isinstance(model, (str, os.PathLike)) else "reward_model")

    def rewards(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        """The reward of each completion, [B]; NaN for one whose text exceeds the model's positions."""
        texts = [self._text(row) for row in rollouts]
        return self.scores(encode_texts(self.tokenizer, texts, [is_conversational(row.prompt) for row in rollouts]))

    def scores(self, token_ids: Sequence[np.ndarray]) -> np.ndarray:
        """The first label's logit of each sequence, [B] float64, in micro-batches of similar length."""
        largest = max((int(ids.max()) for ids in token_ids if len(ids)), default=0)
        if largest >= self.model.config.vocab_size:
            raise ValueError(
                f"the reward model {self.name} has a vocabulary of {self.model.config.vocab_size} tokens, and its "
                f"tokenizer gives token {largest}; give the tokenizer of this model"
            )
        values = np.full(len(token_ids), np.nan)
        num_shards = num_data_shards(self.model.mesh)
        limit = self.model.config.max_positions
        fitting = [index for index, ids in enumerate(token_ids) if 0 < len(ids) <= limit]
        ordered = sorted(fitting, key=lambda index: len(token_ids[index]))
        while ordered:
            length = min(-(-len(token_ids[ordered[-1]]) // LENGTH_STEP) * LENGTH_STEP, max(limit, LENGTH_STEP))
            num_rows = max(1, MICRO_BATCH_TOKENS // length)
            part, ordered = ordered[-num_rows:], ordered[:-num_rows]
            rows = num_shards << ((-(-len(part) // num_shards)) - 1).bit_length()
            tokens = np.zeros((rows, length), np.int32)
            starts = np.full(len(tokens), length, np.int32)
            for position, index in enumerate(part):
                starts[position] = length - len(token_ids[index])
                tokens[position, starts[position] :] = token_ids[index]
            on_rows = to_device((tokens, starts), NamedSharding(self.model.mesh, ROWS))
            scored = sequence_scores(self.model.params, *on_rows, config=self.model.config, mesh=self.model.mesh)
            values[part] = to_host(scored).astype(np.float64)[: len(part)]
        return values

    def _text(self, row: Rollout) -> str:
        if isinstance(row.prompt, str):
            return row.prompt + row.text
        conversation = [*row.prompt, {"role": "assistant", "content": row.text}]
        return render(self.tokenizer, conversation, f"prompt {row.prompt_index}", add_generation_prompt=False)


@partial(jax.jit, static_argnames=("config", "mesh"))
def sequence_scores(
    params: Params, tokens: Int[Array, "B T"], starts: Int[Array, "B"], *, config: ModelConfig, mesh: Mesh
) -> Float[Array, "B"]:
    """The first label's logit at the last token of each left-padded sequence.

    Args:
        params: of a model with a score head.
        tokens: left-padded, split over the mesh's data axes.
        starts: where each sequence begins.
        config, mesh: static.
    """
    local = partial(_local_scores, config)
    return jax.shard_map(local, mesh=mesh, in_specs=(PartitionSpec(), ROWS, ROWS), out_specs=ROWS, check_vma=False)(
        params, tokens, starts
    )


def _local_scores(config: ModelConfig, params: Params, tokens: Array, starts: Array) -> Array:
    last = causal_hidden(config, params, tokens, starts)[:, -1]
    return matmul_nt(last, params["score"])[:, 0]
