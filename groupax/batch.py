"""From ragged rollouts on the host to a few rectangles on the devices.

A `MicroBatch` holds each prompt once and, apart from it, the rows that continue it. A row's inputs start with its
prompt's last token, which predicts the row's first token; the prompt's own rectangle ends before that token.
The engine splits a sequence at the same place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from groupax.objective.objective import Evidence
from groupax.pytree import pytree

# With fewer, XLA's CPU kernels multiply the rows of a group and a single row differently.
FEWEST_PROMPT_COLUMNS = 24


@dataclass(frozen=True, eq=False)
class Row:
    """One completion, ready to be trained on.

    Attributes:
        group: rows of one prompt share it.
        prompt: token ids of the prompt.
        completion: token ids of the completion, its stop token included.
        mask: which completion tokens count in the loss.
        advantage: of the completion.
        rollout_logp: the engine's log-probability of each completion token under the policy.
        old_logp, ref_logp, sampler_logp, policy_mask: of each completion token, as in `objective.Evidence`; None where
            there is none, in all rows of a step alike.
    """

    group: int
    prompt: Int[np.ndarray, "S"]
    completion: Int[np.ndarray, "T"]
    mask: Bool[np.ndarray, "T"]
    advantage: float
    rollout_logp: Float[np.ndarray, "T"]
    old_logp: Float[np.ndarray, "T"] | None = None
    ref_logp: Float[np.ndarray, "T"] | None = None
    sampler_logp: Float[np.ndarray, "T"] | None = None
    policy_mask: Bool[np.ndarray, "T"] | None = None


@pytree
class MicroBatch:
    """A rectangle of prompts and one of rows, split over the data shards (P and B are over all shards).

    The arrays are numpy's as they are packed, and jax's once they are on the devices.

    Attributes:
        prompts: tokens without each prompt's last one, left-padded.
        prompt_starts: where each one's tokens begin.
        prompt_of: for each row, its prompt's index within the row's shard.
        inputs: the prompt's last token, then the completion without its last.
        targets: the completion.
        evidence: of each row; rows that only pad have no token that counts.
    """

    prompts: Int[Any, "P S"]
    prompt_starts: Int[Any, "P"]
    prompt_of: Int[Any, "B"]
    inputs: Int[Any, "B T"]
    targets: Int[Any, "B T"]
    evidence: Evidence


@dataclass(frozen=True, eq=False)
class Packed:
    """A micro-batch and which row lies where in it.

    Attributes:
        batch: the rectangles, on the host.
        rows: for each rectangle row, the index into the rows that were packed, -1 for padding.
        num_tokens: real tokens in the rectangles.
    """

    batch: MicroBatch
    rows: Int[np.ndarray, "B"]
    num_tokens: int

    @property
    def num_cells(self) -> int:
        """Tokens that the devices compute, padding included."""
        return self.batch.prompts.size + self.batch.inputs.size


def pack(rows: Sequence[Row], num_shards: int, micro_batch_tokens: int) -> list[Packed]:
    """Cut rows into micro-batches of about `micro_batch_tokens` tokens per shard.

    Groups stay together, so that a prompt is computed once; groups of similar length share a micro-batch, so that
    little of it is padding. A group that is more than a shard's budget or fair share is cut between its rows.

    Args:
        rows: in any order.
        num_shards: devices over which each micro-batch is split.
        micro_batch_tokens: tokens of a micro-batch on one shard, prompts and padding included.
    """
    groups: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.group, []).append(index)
    fair_share = -(-len(rows) // num_shards)
    by_length = sorted(groups.values(), key=lambda group: max(len(rows[index].completion) for index in group))

    packed: list[Packed] = []
    shards: list[list[int]] | None = None
    for group in by_length:
        for part in _parts(rows, group, micro_batch_tokens, fair_share):
            candidate = _add(shards, part, num_shards)
            if shards is not None and _shard_tokens(rows, candidate) > micro_batch_tokens:
                packed.append(_rectangles(rows, shards))
                candidate = _add(None, part, num_shards)
            shards = candidate
    if shards is not None:
        packed.append(_rectangles(rows, shards))
    return packed


def round_up(size: int) -> int:
    """The next length of a rectangle: steps of an eighth to a quarter of the size, so that shapes are few.

    Like the counts, lengths start where XLA's CPU kernels for tiny products, which round differently, end.
    """
    if size <= 16:
        return 16
    step = max(8, 1 << ((size - 1).bit_length() - 3))
    return -(-size // step) * step


def _parts(rows: Sequence[Row], group: list[int], budget: int, fair_share: int) -> list[list[int]]:
    """The group's rows by length, cut so that each part fits the budget and the share of one shard."""
    ordered = sorted(group, key=lambda index: len(rows[index].completion))
    parts: list[list[int]] = [[]]
    for index in ordered:
        full = len(parts[-1]) == fair_share or _shard_tokens(rows, [[*parts[-1], index]]) > budget
        if parts[-1] and full:
            parts.append([])
        parts[-1].append(index)
    return parts


def _add(shards: list[list[int]] | None, part: list[int], num_shards: int) -> list[list[int]]:
    """The shards with the part added to the one that has the fewest rows."""
    new = [list(shard) for shard in shards] if shards else [[] for _ in range(num_shards)]
    min(new, key=len).extend(part)
    return new


def _sides(rows: Sequence[Row], shards: list[list[int]]) -> tuple[int, int, int, int]:
    """P, S, B, T of one shard's rectangles."""
    indices = [index for shard in shards for index in shard]
    num_prompts = max(len({rows[index].group for index in shard}) for shard in shards)
    num_rows = max(len(shard) for shard in shards)
    prompt_length = max(len(rows[index].prompt) for index in indices) - 1
    completion_length = max(len(rows[index].completion) for index in indices)
    return (
        _round_count(num_prompts),
        round_up(max(prompt_length, FEWEST_PROMPT_COLUMNS)),
        _round_count(num_rows),
        round_up(completion_length),
    )


def _shard_tokens(rows: Sequence[Row], shards: list[list[int]]) -> int:
    P, S, B, T = _sides(rows, shards)
    return P * S + B * T


def _round_count(count: int) -> int:
    """The next of 2, 3, 4, 6, 8, 12, 16, ..."""
    count = max(count, 2)
    power = 1 << (count - 1).bit_length()
    return power // 4 * 3 if power >= 4 and count <= power // 4 * 3 else power


# What a row may have, and its dtype on the devices.
_OPTIONAL = {"old_logp": np.float32, "ref_logp": np.float32, "sampler_logp": np.float32, "policy_mask": bool}


def _rectangles(rows: Sequence[Row], shards: list[list[int]]) -> Packed:
    P, S, B, T = _sides(rows, shards)
    D = len(shards)
    known_fields = [name for name in _OPTIONAL if getattr(rows[0], name) is not None]
    prompts = np.zeros((D, P, S), np.int32)
    prompt_starts = np.full((D, P), S, np.int32)
    prompt_of = np.zeros((D, B), np.int32)
    inputs, targets = np.zeros((2, D, B, T), np.int32)
    mask = np.zeros((D, B, T), bool)
    advantages = np.zeros((D, B), np.float32)
    rollout_logp = np.zeros((D, B, T), np.float32)
    optional = {name: np.zeros((D, B, T), _OPTIONAL[name]) for name in known_fields}
    where = np.full((D, B), -1)
    for d, shard in enumerate(shards):
        known: dict[int, int] = {}
        for b, index in enumerate(shard):
            row = rows[index]
            if row.group not in known:
                p = known[row.group] = len(known)
                prompt_starts[d, p] = start = S - (len(row.prompt) - 1)
                prompts[d, p, start:] = row.prompt[:-1]
            length = len(row.completion)
            where[d, b] = index
            prompt_of[d, b] = known[row.group]
            inputs[d, b, 0] = row.prompt[-1]
            inputs[d, b, 1:length] = row.completion[:-1]
            targets[d, b, :length] = row.completion
            mask[d, b, :length] = row.mask
            advantages[d, b] = row.advantage
            rollout_logp[d, b, :length] = row.rollout_logp
            for name, values in optional.items():
                values[d, b, :length] = getattr(row, name)

    def flat(x: np.ndarray) -> np.ndarray:
        return x.reshape(-1, *x.shape[2:])

    batch = MicroBatch(
        prompts=flat(prompts),
        prompt_starts=flat(prompt_starts),
        prompt_of=flat(prompt_of),
        inputs=flat(inputs),
        targets=flat(targets),
        evidence=Evidence(
            advantages=flat(advantages),
            mask=flat(mask),
            rollout_logp=flat(rollout_logp),
            **{name: flat(values) for name, values in optional.items()},
        ),
    )
    used = where[where >= 0]
    num_tokens = int((S - prompt_starts).sum()) + sum(len(rows[index].completion) for index in used)
    return Packed(batch, where.reshape(-1), num_tokens)
