"""The record of a step: digests of what each of its stages computed.

data ──► rollout ──► reward ──► advantage ──► loss ──► update

Each stage depends on those before it, so the first one that differs between two computations of a step says where they
part. Data, rollouts, rewards and advantages have a digest for each group, the loss has one for each row of the update.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from groupax.core.types import Rollout, Row
from groupax.data.images import named
from groupax.rollouts.state import Cursor
from groupax.training.learner import Update

Stage = Literal["data", "rollout", "reward", "advantage", "loss", "update"]
STAGES: tuple[Stage, ...] = get_args(Stage)
NAME = "record.jsonl"
GROUP_BYTES, ROW_BYTES, STAGE_BYTES = 4, 3, 8


@dataclass(frozen=True)
class StepRecord:
    """A step as digests of what it was made of."""

    step: int  # number of the optimizer step
    num_rollouts: int  # so far
    num_prompts: int  # visited so far
    learning_rate: float
    loss_value: float | None  # of the update; None if it is not finite
    grad_norm: float | None  # likewise
    data: tuple[str, ...]  # digest of the dataset's row of each group
    rollout: tuple[str, ...]  # digest of the tokens and the sampler's log-probs of each group
    reward: tuple[str, ...]  # digest of the rewards of each group
    advantage: tuple[str, ...]  # digest of the advantages of each group
    loss: tuple[str, ...]  # digest of the inputs and log-probs of each row of the update
    update: str  # digest of the weights after the update


def step_record(
    cursor: Cursor, rollouts: Sequence[Rollout], rows: Sequence[Row], update: Update, weights: str
) -> StepRecord:
    """Returns the record of a step."""
    groups = itertools.groupby(rollouts, key=lambda rollout: rollout.prompt_index)
    digests = [_group_digests([*group]) for _, group in groups]
    loss, grad_norm = (float(update.metrics[name]) for name in ("loss", "grad_norm"))
    losses = []
    for row, *computed in zip(rows, update.logps, update.entropies, strict=True):
        given = (row.mask, row.advantages, row.old_logp, row.ref_logp, row.sampler_logp, row.policy_mask)
        losses.append(_digest([*("" if value is None else value for value in given), *computed], ROW_BYTES))
    return StepRecord(
        cursor.step,
        cursor.num_rollouts,
        cursor.num_prompts,
        update.metrics["learning_rate"],
        loss if math.isfinite(loss) else None,
        grad_norm if math.isfinite(grad_norm) else None,
        *(tuple(each[stage] for each in digests) for stage in range(4)),
        loss=tuple(losses),
        update=weights[: 2 * STAGE_BYTES],
    )


def parsed_records(text: bytes) -> dict[int, StepRecord]:
    """Returns the records of a file by step; lines that are damaged are left out."""
    records = {}
    for line in text.splitlines():
        try:
            content = json.loads(line)
            digests = {name: tuple(content[name]) for name in STAGES if name != "update"}
            records[content["step"]] = StepRecord(**{**content, **digests})
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
    return records


def row_digest(example: Mapping[str, Any]) -> str:
    """Returns the digest of a row of a dataset, as the records of its groups have it."""
    return _digest([json.dumps(named(dict(example)), sort_keys=True, default=repr)], GROUP_BYTES)


def _group_digests(group: Sequence[Rollout]) -> tuple[str, ...]:
    """Returns the digests of a group's data, rollout, rewards and advantages."""
    parts: list[Any] = []
    rewards: list[Any] = []
    advantages: list[Any] = []
    for rollout in group:
        for stream in (rollout, *rollout.branches):
            parts += [np.asarray(ids, np.int32) for ids in (stream.prompt_ids, stream.completion_ids)]
            parts += [np.asarray(logps, np.float32) for logps in (stream.policy_logps, stream.sampler_logps)]
            parts += [np.asarray(stream.mask, bool)]
        parts += [rollout.finish_reason, *([] if rollout.experts is None else [np.asarray(rollout.experts, np.int16)])]
        values = [np.nan if value is None else value for value in rollout.rewards.values()]
        rewards += [*rollout.rewards, np.asarray(values, np.float64)]
        rewards += [json.dumps([*turn.rewards.items()]) for turn in rollout.turns if turn.rewards]
        advantages.append(np.asarray([rollout.advantage], np.float32))
    return row_digest(group[0].example), *(_digest(each, GROUP_BYTES) for each in (parts, rewards, advantages))


def _digest(parts: Iterable[Any], num_bytes: int) -> str:
    digest = hashlib.blake2b(digest_size=num_bytes)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else np.ascontiguousarray(part).tobytes()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
