"""From rollouts on the host to arrays on the devices, every token once.

A row's inputs start with its prompt's last token, which predicts the row's first token; the prompt's own tokens end
before that one. The engine splits a sequence at the same place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, UInt32

from groupax.models.execution import FusedAttention
from groupax.models.fused_attention import FEWEST_QUERIES
from groupax.models.grouped import Ragged
from groupax.objective.objective import LossInputs
from groupax.parallel.pytree import pytree
from groupax.parallel.transfer import to_host
from groupax.settings.compute import SharePrefix
from groupax.training.packing import PLAIN, AttentionCost, MicroBatchPlan, Part, Shape, plan, ranges
from groupax.types import Row


@pytree
class MicroBatch:
    """Tokens one behind another, and what is known of the rows, as rectangles; split over the data shards.

    The arrays are numpy's as they are packed, and jax's once they are on the devices.

    Attributes:
        ragged: prompts and rows; indices count within a shard.
        cells: where among the targets each token of each row is, -1 for none.
        slots: where in `cells` each of the targets is, -1 for padding.
        inputs: data of the loss for each row; padding rows have no token that counts.
        numbers: of the tokens, the same wherever a token is computed; what is drawn for a token depends on it.
    """

    ragged: Ragged
    cells: Int[Any, "B T"]
    slots: Int[Any, "R"]
    inputs: LossInputs
    numbers: UInt32[Any, "M"]


@dataclass(frozen=True, eq=False)
class Packed:
    """A micro-batch and which row lies where in it.

    Attributes:
        batch: the arrays, on the host.
        rows: for each row of `batch.cells`, the index into the rows that were packed, -1 for padding.
        num_cells: tokens that the devices compute, padding included.
    """

    batch: MicroBatch
    rows: Int[np.ndarray, "B"]
    num_cells: int


def pack(
    rows: Sequence[Row],
    num_shards: int,
    micro_batch_tokens: int,
    known: Sequence[Shape] = (),
    share_prefix: SharePrefix = "auto",
    longest: tuple[int, int] = (0, 0),
    attention_cost: AttentionCost = PLAIN,
) -> tuple[list[Packed], list[Shape]]:
    """Cut rows into micro-batches of about `micro_batch_tokens` tokens per shard.

    Args:
        rows: in any order.
        num_shards: devices over which each micro-batch is split.
        micro_batch_tokens: tokens of a micro-batch on one shard, prompts included.
        known: shapes that there are programs for already.
        share_prefix: whether to compute a prompt once for the rows of its group that lie on one shard; "auto" does
            what takes less.
        longest: tokens of the longest prompt and completion that may come, for which shapes are made where that costs
            little.
        attention_cost: how rows attend.

    Returns:
        The micro-batches, and the shapes that are known from now on.
    """
    planned = plan(rows, num_shards, micro_batch_tokens, known, share_prefix, longest, attention_cost)
    new = dict.fromkeys(each.shape for each in planned if each.shape not in known)
    present = [name for name in _OPTIONAL if any(getattr(row, name) is not None for row in rows)]
    return [_packed(rows, present, each) for each in planned], [*known, *new]


def attention_cost_with(fused: FusedAttention | None) -> AttentionCost:
    """What kernels, or plain attention, want of tiles."""
    if fused is None:
        return PLAIN
    return AttentionCost(FEWEST_QUERIES, "seen" if fused.kernel == "splash" else "from_first")


# What a row may have, and its dtype on the devices.
_OPTIONAL = {"old_logp": np.float32, "ref_logp": np.float32, "sampler_logp": np.float32, "policy_mask": bool}


def _packed(rows: Sequence[Row], present: Sequence[str], planned: MicroBatchPlan) -> Packed:
    parts = [_shard(rows, present, shard, planned.shape) for shard in planned.shards]
    batch = jax.tree.map(lambda *leaves: np.concatenate(leaves), *(batch for batch, _ in parts))
    return Packed(batch, np.concatenate([where for _, where in parts]), len(planned.shards) * planned.shape.tokens)


def _shard(
    rows: Sequence[Row], present: Sequence[str], parts: Sequence[Part], shape: Shape
) -> tuple[MicroBatch, np.ndarray]:
    """One shard's arrays, and which row lies where in them; `present` are the optional fields that some row has."""
    ragged, begins = _ragged(rows, parts, shape)
    indices = [index for part in parts for index in part.rows]
    size, (B, T) = shape.row_tokens, shape.rows
    where, slots, cells = np.full(B, -1), np.full(size, -1, np.int32), np.full((B, T), -1, np.int32)
    mask, advantages, rollout_logp = np.zeros((B, T), bool), np.zeros(B, np.float32), np.zeros((B, T), np.float32)
    optional = {name: np.zeros((B, T), _OPTIONAL[name]) for name in present}
    for b, (index, begin) in enumerate(zip(indices, begins, strict=True)):
        row = rows[index]
        length = len(row.completion)
        where[b] = index
        cells[b, :length] = np.arange(begin, begin + length)
        slots[begin : begin + length] = b * T + np.arange(length)
        mask[b, :length], advantages[b], rollout_logp[b, :length] = row.mask, row.advantage, row.rollout_logp
        for name, values in optional.items():
            values[b, :length] = np.nan if (known := getattr(row, name)) is None else known
    inputs = LossInputs(advantages=advantages, mask=mask, rollout_logp=rollout_logp, **optional)
    return MicroBatch(ragged, cells, slots, inputs, _numbers(rows, parts, begins, shape)), where


def _numbers(rows: Sequence[Row], parts: Sequence[Part], begins: Sequence[int], shape: Shape) -> np.ndarray:
    """Two large odd numbers spread (group or row, position) over 32 bits."""
    numbers, first_target = np.zeros(shape.tokens, np.uint32), shape.tokens - shape.row_tokens

    def write(begin: int, owner: int, size: int) -> None:
        spread = np.arange(size, dtype=np.int64) * 0x85EBCA77 + owner * 0x9E3779B1
        numbers[begin : begin + size] = (spread & 0xFFFFFFFF).astype(np.uint32)

    end = 0
    for part in parts:
        write(end, -1 - rows[part.rows[0]].group, part.prompt)
        end += part.prompt
    for index, begin in zip((index for part in parts for index in part.rows), begins, strict=True):
        write(first_target + begin, index, len(rows[index].completion))
    return numbers


def _ragged(rows: Sequence[Row], parts: Sequence[Part], shape: Shape) -> tuple[Ragged, list[int]]:
    """The tokens of one shard, and where among the targets each row's begin."""
    (P, S), M, R = shape.prompts, shape.tokens, shape.row_tokens
    tokens, positions = np.zeros((2, M), np.int32)
    targets, prompts, slots = np.zeros(R, np.int32), np.full((P, S), -1, np.int32), np.full(M, -1, np.int32)
    lengths = [length for part in parts for length in part.lengths]
    begins = (M - sum(lengths) + np.cumsum([0, *lengths])).tolist()
    prompt_of, prompt_end, row = [], 0, 0
    for p, part in enumerate(parts):
        prompt, size = rows[part.rows[0]].prompt, part.prompt
        own = slice(prompt_end, prompt_end + size)
        tokens[own], positions[own] = prompt[:-1], np.arange(size)
        prompts[p, S - size :] = np.arange(prompt_end, prompt_end + size)
        slots[own] = p * S + np.arange(S - size, S)
        prompt_end += size
        for index in part.rows:
            completion, begin = rows[index].completion, begins[row]
            own = slice(begin, begin + len(completion))
            tokens[own] = np.concatenate([prompt[-1:], completion[:-1]])
            positions[own] = size + np.arange(len(completion))
            targets[begin - (M - R) : begin - (M - R) + len(completion)] = completion
            prompt_of.append(p)
            row += 1
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    of_rows = np.zeros(shape.rows[0], np.int32)
    of_rows[: len(lengths)] = [prompt_of[row] for row in longest_first]
    tiles, before = [], P * S
    for num_rows, first, end in ranges(shape.tiles):
        columns = end - first
        cells = np.full((num_rows, columns), -1, np.int32)
        for b, row in enumerate(longest_first):
            begin, size = begins[row] + first, min(lengths[row] - first, columns)
            if size <= 0:
                break
            cells[b, :size] = np.arange(begin, begin + size)
            slots[begin : begin + size] = before + b * columns + np.arange(size)
        tiles.append(cells)
        before += cells.size
    ragged = Ragged(tokens, positions, targets, prompts, tiles, of_rows, slots)
    return ragged, [begin - (M - R) for begin in begins[:-1]]


def unpack(packed: Sequence[Packed], values: Sequence[Any], rows: Sequence[Row]) -> list[np.ndarray]:
    """Returns the values of each row's tokens from arrays of the micro-batches, [B, T] each."""
    result: list[np.ndarray] = [np.zeros(0)] * len(rows)
    for part, array in zip(packed, values, strict=True):
        for index, value in zip(part.rows, to_host(array), strict=True):
            if index >= 0:
                result[index] = value[: len(rows[index].completion)]
    return result
