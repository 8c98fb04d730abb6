"""Which sequence sits in which slot: host logic, without jax.

Slots are numbered through over all shards (devices of the data axes); shard d owns the slots d*B to (d+1)*B - 1.
A group's rows are kept on as few shards as possible, because each shard computes the prompts of its own slots.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from groupax.engine.params import SamplingParams

FinishReason = Literal["stop", "length"]


@dataclass(eq=False)
class Sequence:
    """A prompt and the completion that grows behind it.

    Attributes:
        prompt_index: position of the prompt in the request; sequences of one prompt share its computation.
        sample_index: which of the prompt's completions.
        prompt: token ids, at least one.
        params: how to sample.
        stop_ids: tokens that end it.
        key: [2] uint32, the source of its randomness.
    """

    prompt_index: int
    sample_index: int
    prompt: np.ndarray
    params: SamplingParams
    stop_ids: tuple[int, ...]
    key: np.ndarray
    tokens: list[int] = field(default_factory=list)
    policy_logps: list[float] = field(default_factory=list)
    sampler_logps: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def num_fed(self) -> int:
        """Tokens whose keys and values the cache holds: all but the last one."""
        return len(self.prompt) + len(self.tokens) - 1


@dataclass(frozen=True)
class Admission:
    """Sequences that enter slots together.

    Attributes:
        prompts: per shard, the distinct prompts to compute.
        placed: (slot, index into its shard's prompts, sequence).
    """

    prompts: list[list[np.ndarray]]
    placed: list[tuple[int, int, Sequence]]


class Scheduler:
    """Waiting sequences, and the slots with the running ones."""

    def __init__(self, num_shards: int, slots_per_shard: int) -> None:
        self.slots_per_shard = slots_per_shard
        self.slots: list[Sequence | None] = [None] * (num_shards * slots_per_shard)
        self.waiting: deque[Sequence] = deque()

    @property
    def busy(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self.waiting) or any(sequence is not None for sequence in self.slots)

    @property
    def num_fed(self) -> int:
        """The largest number of cached tokens among the running sequences."""
        return max((sequence.num_fed for sequence in self.slots if sequence), default=0)

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Put sequences at the end of the queue."""
        self.waiting.extend(sequences)

    def admit(self) -> Admission | None:
        """Move waiting sequences into free slots, in their order; None if there is none of either."""
        num_shards = len(self.slots) // self.slots_per_shard
        free = [[] for _ in range(num_shards)]
        for slot in range(len(self.slots) - 1, -1, -1):
            if self.slots[slot] is None:
                free[slot // self.slots_per_shard].append(slot)
        if not self.waiting or not any(free):
            return None
        prompts: list[list[np.ndarray]] = [[] for _ in range(num_shards)]
        known: list[dict[int, int]] = [{} for _ in range(num_shards)]
        placed = []
        shard = 0
        while self.waiting and any(free):
            sequence = self.waiting.popleft()
            index = sequence.prompt_index
            if not free[shard] or index not in known[shard]:
                shard = max(range(num_shards), key=lambda d: len(free[d]))
            slot = free[shard].pop()
            if index not in known[shard]:
                known[shard][index] = len(prompts[shard])
                prompts[shard].append(sequence.prompt)
            self.slots[slot] = sequence
            placed.append((slot, known[shard][index], sequence))
        return Admission(prompts, placed)

    def collect(
        self,
        token: np.ndarray,
        policy_logp: np.ndarray,
        sampler_logp: np.ndarray,
        count: np.ndarray,
        stopped: np.ndarray,
    ) -> list[Sequence]:
        """Append a decoded chunk ([B, C] and [B] arrays) to the running sequences; returns and frees the finished."""
        finished = []
        for slot, sequence in enumerate(self.slots):
            if sequence is None:
                continue
            num = int(count[slot])
            sequence.tokens += token[slot, :num].tolist()
            sequence.policy_logps += policy_logp[slot, :num].tolist()
            sequence.sampler_logps += sampler_logp[slot, :num].tolist()
            if stopped[slot]:
                sequence.finish_reason = "stop"
            elif len(sequence.tokens) >= sequence.params.max_tokens:
                sequence.finish_reason = "length"
            if sequence.finish_reason:
                finished.append(sequence)
                self.slots[slot] = None
        return finished
