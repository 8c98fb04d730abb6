"""Packs rows into micro-batches on the host: which are computed together, in which shape, and as which arrays.

Each token is computed once. The inputs of a row start with the last token of its prompt, which predicts the first token
of the row; the tokens of the prompt end before that one. The engine splits sequences at the same position.

Every shape is a separate program. So a step is composed of micro-batches of a base size, its half, its quarter and its
eighth, and a shape that was used before is reused where it fits:

    rows ── group_rows ──► RowGroups ── _candidate_sizes ──► [4096, 4096, 1024], [4096, 2048, 2048], ...
                                                                  │ for each: _distribute, _choose_shapes
                                                                  ▼
                                                       the cheapest list of `MicroBatchPlan`s
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, UInt32

from groupax.core.settings.compute import SharePrefix
from groupax.core.types import Image, Row
from groupax.models.execution import FusedAttention
from groupax.models.kernels.fused_attention import MIN_QUERIES
from groupax.models.logprobs import RaggedBatch
from groupax.models.vision.config import VisionConfig
from groupax.objective.aggregation import Denominators
from groupax.objective.losses import LossInputs
from groupax.parallel.collectives import to_host
from groupax.parallel.pytree import pytree
from groupax.training.images import Features, with_images
from groupax.training.shapes import (
    PLAIN,
    AttentionCost,
    RowGroup,
    Shape,
    Size,
    cost_of,
    fits,
    load,
    make_bucket,
    tile_ranges,
)

# The fewest tokens of a micro-batch.
MIN_TOKENS = 32
# The overhead of a micro-batch, in tokens of each shard.
MICRO_BATCH_COST = 100
# A step is composed of sizes base / 2^k for these k.
HALVINGS = (0, 1, 2, 3)
# How often groups are split before a list of sizes is given up.
MAX_SPLITS = 24
# By how much known shapes that fit may cost more than a new one: a share of the step and a number of tokens, times the
# square of the number of shapes before it. Compiling takes seconds, and small steps take less.
COMPILE_FRAC, COMPILE_TOKENS = 0.02, 80


@dataclass(frozen=True, eq=False)
class MicroBatchPlan:
    """One micro-batch: the groups of each shard, and the shape that they are computed in."""

    shards: list[list[RowGroup]]
    shape: Shape


def plan_micro_batches(
    rows: Sequence[Row],
    num_shards: int,
    micro_batch_tokens: int,
    known: Sequence[Shape] = (),
    share_prefix: SharePrefix = "auto",
    longest: Size = (0, 0),
    attention_cost: AttentionCost = PLAIN,
) -> list[MicroBatchPlan]:
    """Divides rows into micro-batches of about at most `micro_batch_tokens` tokens per shard.

    Of a few ways to do this the cheapest is taken, where new shapes count extra.
    """
    best, least = [], math.inf
    for share in {"always": (True,), "never": (False,), "auto": (True, False)}[share_prefix]:
        groups = group_rows(rows, range(len(rows)), share)
        for sizes in _candidate_sizes(groups, num_shards, micro_batch_tokens, known):
            batches = _distribute(rows, groups, num_shards, sizes)
            if batches is None:
                continue
            plan = _choose_shapes(batches, sizes, known, longest, attention_cost)
            num_new = len({each.shape for each in plan} - set(known))
            cost = sum(cost_of(each.shape, attention_cost) + MICRO_BATCH_COST for each in plan)
            squares = sum(index**2 for index in range(len(known), len(known) + num_new))
            cost += squares * (COMPILE_FRAC * cost + COMPILE_TOKENS)
            if cost < least:
                best, least = plan, cost
    assert best or not rows, "the last sizes hold all rows"
    return best


def group_rows(rows: Sequence[Row], part: Sequence[int], share: bool) -> list[RowGroup]:
    """Groups some of the rows, by their indices, by their prompt, or puts each into its own group."""
    indices: dict[int, list[int]] = {}
    for index in part:
        indices.setdefault(rows[index].group if share else index, []).append(index)
    return [_row_group(rows, each) for each in indices.values()]


def _row_group(rows: Sequence[Row], indices: Sequence[int]) -> RowGroup:
    ordered = sorted(indices, key=lambda index: len(rows[index].completion))
    lengths = tuple(len(rows[index].completion) for index in ordered)
    prompt = len(rows[indices[0]].prompt) - 1
    return RowGroup(tuple(ordered), prompt, lengths, prompt + sum(lengths))


def _candidate_sizes(
    groups: Sequence[RowGroup], num_shards: int, budget: int, known: Sequence[Shape]
) -> Iterator[list[int]]:
    """Yields lists of micro-batch sizes that likely hold these groups, largest first.

    The last lists hold them in any case, each row in a separate micro-batch if necessary.
    """
    per_shard = max(1, -(-load(groups) // num_shards))
    known_sizes = {shape.tokens for shape in known}
    largest_row = round_up(max(group.prompt + group.lengths[-1] for group in groups), MIN_TOKENS)
    even = round_up(-(-per_shard // max(1, -(-per_shard // budget))), MIN_TOKENS)
    base = max(known_sizes, default=even)  # the largest known size, unless it is too small for a row or for the step
    if base < largest_row or per_shard > 4 * base:
        base = max(even, largest_row)
    seen = set()
    for halvings in HALVINGS:
        unit = max(MIN_TOKENS, base >> halvings)
        for spare in range(3):
            units_per_base = base // unit
            num_base, num_units = divmod(-(-per_shard // unit) + spare, units_per_base)
            sizes = [base] * num_base
            sizes += [unit << bit for bit in reversed(range(halvings)) if num_units >> bit & 1]
            # each unknown size as two known halves, or else as four known quarters, if there are any
            parts = [next((num for num in (1, 2, 4) if size / num in known_sizes), 1) for size in sizes]
            split = [size // num for size, num in zip(sizes, parts, strict=True) for _ in range(num)]
            for each in (sizes, split):
                if tuple(each) not in seen:
                    seen.add(tuple(each))
                    yield each
    separate = sum(group.prompt * len(group.rows) + sum(group.lengths) for group in groups)  # each row with its prompt
    for tokens in dict.fromkeys((per_shard, -(-separate // num_shards))):
        yield [base] * (-(-2 * tokens // base) + 1)


def round_up(size: int, smallest: int) -> int:
    """Rounds up to one of a few sizes, in steps of an eighth to a quarter of the size."""
    if size <= smallest:
        return smallest
    step = max(8, 1 << ((size - 1).bit_length() - 3))
    return -(-size // step) * step


def _distribute(
    rows: Sequence[Row], groups: Sequence[RowGroup], num_shards: int, sizes: Sequence[int]
) -> list[list[list[RowGroup]]] | None:
    """Distributes groups over the shards of micro-batches of these sizes, about equally full; None if they do not fit.

    The largest group of each shard that is too full is split, at the cost of computing its prompt twice.
    """
    capacities = [size for size in sizes for _ in range(num_shards)]
    largest = max(sizes)
    if any(group.num_tokens > largest for group in groups):
        groups = [piece for group in groups for piece in _split_to_fit(rows, group, largest)]
    for _ in range(MAX_SPLITS):
        bins = _balance(groups, capacities)
        overfull = [own for own, capacity in zip(bins, capacities, strict=True) if load(own) > capacity]
        if not overfull:
            micro_batches = [bins[first : first + num_shards] for first in range(0, len(bins), num_shards)]
            return [sorted(shards, key=lambda shard: -load(shard)) for shards in micro_batches]
        split = {max(own, key=lambda group: group.num_tokens * (len(group.rows) > 1)) for own in overfull}
        if any(len(group.rows) < 2 for group in split):
            return None
        groups = [piece for group in groups for piece in (_halves(rows, group) if group in split else [group])]
    return None


def _split_to_fit(rows: Sequence[Row], group: RowGroup, capacity: int) -> list[RowGroup]:
    """Splits a group into halves, quarters and so on, until each fits or is a single row."""
    if group.num_tokens <= capacity or len(group.rows) < 2:
        return [group]
    return [piece for half in _halves(rows, group) for piece in _split_to_fit(rows, half, capacity)]


def _halves(rows: Sequence[Row], group: RowGroup) -> list[RowGroup]:
    return [_row_group(rows, group.rows[0::2]), _row_group(rows, group.rows[1::2])]


def _balance(groups: Sequence[RowGroup], capacities: Sequence[int]) -> list[list[RowGroup]]:
    """Puts each group, largest first, into the bin that it leaves the emptiest in proportion to its capacity."""
    bins: list[list[RowGroup]] = [[] for _ in capacities]
    heaps: dict[int, list[tuple[int, int]]] = {}  # loads and indices of the bins with the same capacity
    for index, capacity in enumerate(capacities):
        heaps.setdefault(capacity, []).append((0, index))
    for group in sorted(groups, key=lambda group: (-group.num_tokens, group.rows)):
        size = group.num_tokens
        best = min(heaps, key=lambda capacity: ((heaps[capacity][0][0] + size) / capacity, heaps[capacity][0][1]))
        tokens, emptiest = heaps[best][0]
        bins[emptiest].append(group)
        heapq.heapreplace(heaps[best], (tokens + size, emptiest))
    return bins


def _choose_shapes(
    batches: list[list[list[RowGroup]]],
    sizes: Sequence[int],
    known: Sequence[Shape],
    longest: Size,
    attention_cost: AttentionCost,
) -> list[MicroBatchPlan]:
    """Gives each micro-batch the cheapest known shape of its size that fits, or else a new one."""
    planned, shapes = [], list(known)
    all_groups = [group for shards in batches for shard in shards for group in shard]
    for shards, size in zip(batches, sizes, strict=True):
        fitting = (shape for shape in shapes if shape.tokens == size and all(fits(shape, shard) for shard in shards))
        shape = min(fitting, key=lambda shape: cost_of(shape, attention_cost), default=None)
        if shape is None:
            shape = make_bucket(shards, size, all_groups, shapes, longest, attention_cost)
            shapes.append(shape)
        planned.append(MicroBatchPlan(shards, shape))
    return planned


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
    # features of the images of its prompts; None without images, and until they are known
    features: Features | None = None


@dataclass(frozen=True, eq=False)
class Packed:
    """A micro-batch with the positions of its rows."""

    batch: MicroBatch  # arrays on the host
    rows: Int[np.ndarray, "B"]  # index among the packed rows for each row of `batch.cells`, -1 for padding
    num_tokens: int  # number of tokens that the devices compute, padding included
    # different images of the prompts of each shard, in the order of their features; empty without images
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
) -> tuple[list[Packed], list[Shape]]:
    """Packs rows into micro-batches of about `micro_batch_tokens` tokens per shard.

    Returns:
        The micro-batches, and the known shapes with the new ones.
    """
    planned = plan_micro_batches(rows, num_shards, micro_batch_tokens, known, share_prefix, longest, attention_cost)
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


def denominators(rows: Sequence[Row], with_masked_rows: bool) -> Denominators:
    """Returns the number of rows and of loss tokens of a step; rows of failed environments are not counted.

    Args:
        rows: rows of the step.
        with_masked_rows: whether other rows without a loss token count too.
    """
    num_rows = sum(bool(row.mask.any()) or (with_masked_rows and not row.is_failure) for row in rows)
    num_tokens = sum(int(row.mask.sum()) for row in rows)
    return Denominators(jnp.float32(max(num_rows, 1)), jnp.float32(max(num_tokens, 1)))
