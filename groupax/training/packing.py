"""Packs rows into the arrays of micro-batches, on the host.

Each token is computed once. The inputs of a row start with the last token of its prompt, which predicts the first token
of the row; the tokens of the prompt end before that one. The engine splits sequences at the same position.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, UInt32

from groupax.core.settings.compute import SharePrefix
from groupax.core.types import Image, Row
from groupax.models.execution import FusedAttention
from groupax.models.kernels.fused_attention import MIN_QUERIES
from groupax.models.logprobs import RaggedBatch
from groupax.models.vision.config import VisionConfig
from groupax.objective.losses import LossInputs
from groupax.parallel.collectives import to_host
from groupax.parallel.pytree import pytree
from groupax.training.images import Features, with_images
from groupax.training.shapes import (
    PLAIN,
    AttentionCost,
    MicroBatchPlan,
    RowGroup,
    Shape,
    plan_micro_batches,
    tile_ranges,
)


@pytree
class MicroBatch:
    """The tokens of a micro-batch, concatenated, and the loss inputs of its rows, sharded over the data axes.

    The arrays are numpy arrays as packed, and jax arrays on the devices.
    """

    ragged: RaggedBatch  # prompts and rows; indices count within a shard
    cells: Int[Any, "B T"]  # index among the targets of each row's tokens, -1 for none
    slots: Int[Any, "R"]  # index in `cells`, flattened, of each target, -1 for padding
    loss_inputs: LossInputs  # inputs of the loss for each row; padding rows have no token that counts
    # a number per token that does not depend on the packing, from which its dropout is drawn
    dropout_ids: UInt32[Any, "M"]
    # features of the images of its rows; None without images, and until they are known
    features: Features | None = None


@dataclass(frozen=True, eq=False)
class Packed:
    """A micro-batch with the positions of its rows."""

    batch: MicroBatch  # arrays on the host
    rows: Int[np.ndarray, "B"]  # index among the packed rows for each row of `batch.cells`, -1 for padding
    num_tokens: int  # number of tokens that the devices compute, padding included
    # different images of the rows of each shard, in the order of their features; empty without images
    images: Sequence[Sequence[Image]] = ()


def pack(
    rows: Sequence[Row],
    num_shards: int,
    micro_batch_tokens: int,
    known: Sequence[Shape] = (),
    share_prefix: SharePrefix = "auto",
    longest: tuple[int, int] = (0, 0),
    attention_cost: AttentionCost = PLAIN,
    vision: VisionConfig | None = None,
    served: int = 0,
) -> tuple[list[Packed], list[Shape]]:
    """Packs rows into micro-batches of about `micro_batch_tokens` tokens per shard (see `plan_micro_batches`).

    Returns:
        The micro-batches, and the known shapes with the new ones.
    """
    limits = micro_batch_tokens, known, share_prefix, longest, attention_cost, served
    planned = plan_micro_batches(rows, num_shards, *limits)
    new = dict.fromkeys(each.shape for each in planned if each.shape not in known)
    present = [name for name in _OPTIONAL if any(getattr(row, name) is not None for row in rows)]
    return [_pack_shards(rows, present, each, vision) for each in planned], [*known, *new]


@lru_cache(maxsize=16)
def attention_cost_with(fused: FusedAttention | None) -> AttentionCost:
    """Returns the cost of attention by a kernel, or by plain attention."""
    if fused is None:
        return PLAIN
    return AttentionCost(MIN_QUERIES, "seen" if fused.kernel == "splash" else "from_first")


# Optional fields of rows, with their dtypes on the devices.
_OPTIONAL = {"old_logp": np.float32, "ref_logp": np.float32, "sampler_logp": np.float32, "policy_mask": bool}


def _pack_shards(
    rows: Sequence[Row], present: Sequence[str], planned: MicroBatchPlan, vision: VisionConfig | None
) -> Packed:
    """Packs the rows of a micro-batch; `present` are the optional fields that some row has."""
    has_images = any(rows[index].images for groups in planned.shards for group in groups for index in group.rows)
    assert vision is not None or not has_images, "the model sees images"
    own_vision = vision if has_images else None
    shards = [_pack_shard(rows, present, groups, planned.shape, own_vision) for groups in planned.shards]
    batch = jax.tree.map(lambda *leaves: np.concatenate(leaves), *(batch for batch, _, _ in shards))
    index = np.concatenate([index for _, index, _ in shards])
    images = [own for _, _, own in shards] if has_images else []
    return Packed(batch, index, len(shards) * planned.shape.tokens, images)


def _pack_shard(
    rows: Sequence[Row],
    present: Sequence[str],
    groups: Sequence[RowGroup],
    shape: Shape,
    vision: VisionConfig | None,
) -> tuple[MicroBatch, np.ndarray, Sequence[Image]]:
    indices = [index for group in groups for index in group.rows]
    lengths = [length for group in groups for length in group.lengths]
    starts = (shape.tokens - sum(lengths) + np.cumsum([0, *lengths]))[:-1].tolist()  # rows are at the end
    first_targets = [start - (shape.tokens - shape.row_tokens) for start in starts]
    (B, T), row_index = shape.rows, np.full(shape.rows[0], -1)
    slots, cells = np.full(shape.row_tokens, -1, np.int32), np.full((B, T), -1, np.int32)
    for b, (index, length, first) in enumerate(zip(indices, lengths, first_targets, strict=True)):
        row_index[b] = index
        cells[b, :length] = np.arange(first, first + length)
        slots[first : first + length] = b * T + np.arange(length)
    ragged = _ragged(rows, groups, lengths, starts, shape)
    if any(row.experts is not None for row in rows):
        ragged = replace(ragged, experts=_experts(rows, groups, starts, shape))
    images: Sequence[Image] = ()
    if vision is not None:
        ragged, images = with_images(vision, ragged, rows, groups, starts)
    mask, (advantages, rollout_logp) = np.zeros((B, T), bool), np.zeros((2, B, T), np.float32)
    optional = {name: np.zeros((B, T), _OPTIONAL[name]) for name in present}
    for b, (index, length) in enumerate(zip(indices, lengths, strict=True)):
        row = rows[index]
        mask[b, :length], advantages[b, :length], rollout_logp[b, :length] = row.mask, row.advantages, row.rollout_logp
        for name, values in optional.items():
            values[b, :length] = np.nan if (known := getattr(row, name)) is None else known
    loss_inputs = LossInputs(advantages=advantages, mask=mask, rollout_logp=rollout_logp, **optional)
    # (group or row, position) spread over 32 bits by two large odd factors
    dropout_ids, owners, end = np.zeros(shape.tokens, np.uint32), [], 0
    for group in groups:
        owners.append((end, -1 - rows[group.rows[0]].group, group.prompt))
        end += group.prompt
    for start, owner, size in [*owners, *zip(starts, indices, lengths, strict=True)]:
        spread = np.arange(size, dtype=np.int64) * 0x85EBCA77 + owner * 0x9E3779B1
        dropout_ids[start : start + size] = (spread & 0xFFFFFFFF).astype(np.uint32)
    return MicroBatch(ragged, cells, slots, loss_inputs, dropout_ids), row_index, images


def _ragged(
    rows: Sequence[Row], groups: Sequence[RowGroup], lengths: Sequence[int], starts: Sequence[int], shape: Shape
) -> RaggedBatch:
    """Returns the tokens of one shard: prompts from the left, rows up to the right end."""
    (P, S), M, R = shape.prompts, shape.tokens, shape.row_tokens
    tokens, positions = np.zeros((2, M), np.int32)
    targets, prompts, slots = np.zeros(R, np.int32), np.full((P, S), -1, np.int32), np.full(M, -1, np.int32)
    prompt_of, end, next_start = [], 0, iter(starts)
    for p, group in enumerate(groups):
        prompt, size = rows[group.rows[0]].prompt, group.prompt
        own = slice(end, end + size)
        tokens[own], positions[own] = prompt[:-1], np.arange(size)
        prompts[p, S - size :] = np.arange(end, end + size)
        slots[own] = p * S + np.arange(S - size, S)
        end += size
        for index in group.rows:
            completion, start = rows[index].completion, next(next_start)
            own = slice(start, start + len(completion))
            tokens[own] = np.concatenate([prompt[-1:], completion[:-1]])
            positions[own] = size + np.arange(len(completion))
            targets[start - (M - R) : start - (M - R) + len(completion)] = completion
            prompt_of.append(p)
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    prompts_of_rows = np.zeros(shape.rows[0], np.int32)
    prompts_of_rows[: len(lengths)] = [prompt_of[row] for row in longest_first]
    by_length = [(starts[row], lengths[row]) for row in longest_first]
    tiles = _tiles(by_length, shape, slots)
    return RaggedBatch(tokens, positions, targets, prompts, tiles, prompts_of_rows, slots)


def _experts(rows: Sequence[Row], groups: Sequence[RowGroup], starts: Sequence[int], shape: Shape) -> np.ndarray:
    """Returns the recorded experts of each token of a shard; those of prompts are not recorded."""
    width = next(row.experts.shape[1] for row in rows if row.experts is not None)
    experts = np.full((shape.tokens, width), -1, np.int16)
    for index, start in zip((index for group in groups for index in group.rows), starts, strict=True):
        if (own := rows[index].experts) is not None:
            experts[start : start + len(own)] = own
    return experts


def _tiles(rows: Sequence[tuple[int, int]], shape: Shape, slots: np.ndarray) -> list[np.ndarray]:
    """Returns the token indices of each query tile, and enters the tokens' indices in the tiles into `slots`.

    Args:
        rows: first token and length of each row, longest first.
        shape: shape of the shard.
        slots: as in `RaggedBatch`, with the tokens of prompts only.
    """
    tiles, before = [], math.prod(shape.prompts)
    for num_rows, first, end in tile_ranges(shape.tiles):
        columns = end - first
        cells = np.full((num_rows, columns), -1, np.int32)
        for b, (start, length) in enumerate(rows):
            size = min(length - first, columns)
            if size <= 0:
                break
            cells[b, :size] = np.arange(start + first, start + first + size)
            slots[start + first : start + first + size] = before + b * columns + np.arange(size)
        tiles.append(cells)
        before += cells.size
    return tiles


def unpack(packed: Sequence[Packed], values: Sequence[Any], rows: Sequence[Row]) -> list[np.ndarray]:
    """Returns the values of each row's tokens from arrays of the micro-batches, [B, T] each."""
    result: list[np.ndarray] = [np.zeros(0)] * len(rows)
    for part, array in zip(packed, values, strict=True):
        for index, value in zip(part.rows, to_host(array), strict=True):
            if index >= 0:
                result[index] = value[: len(rows[index].completion)]
    return result
