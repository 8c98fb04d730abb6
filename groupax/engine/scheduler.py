"""Which sequence sits in which slot: host logic, without jax.

Slots are numbered through over all shards (devices of the data axes); shard d owns the slots d*B to (d+1)*B - 1.
A group's rows are kept on as few shards as possible, because each shard computes the prompts of its own slots.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from groupax.engine.params import SamplingParams

if TYPE_CHECKING:
    from groupax.engine.decode import Chunk

FinishReason = Literal["stop", "length", "abort"]


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
        tokens: sampled so far, an ending stop token included.
        policy_logps, sampler_logps: natural log-probs of each of them (see `sampling.Sampled`).
        alternatives: for each token the likeliest ones and their log-probs, as many as `params.logprobs`.
        finish_reason: a stop token or text, the limit of tokens, or `cancel`; None while it runs.
        text: of the tokens, without special ones and without the stop text; empty until it is finished, and if the
            engine has no tokenizer.
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
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    text: str = ""

    def cancel(self) -> None:
        """End it: it is finished, with what it has, after the next chunk."""
        self.finish_reason = self.finish_reason or "abort"

    def cut(self, num_tokens: int) -> None:
        """Keep the first tokens only."""
        for values in (self.tokens, self.policy_logps, self.sampler_logps, self.alternatives):
            del values[num_tokens:]

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
    def running(self) -> list[Sequence]:
        """The sequences in slots."""
        return [sequence for sequence in self.slots if sequence]

    @property
    def num_fed(self) -> int:
        """The largest number of cached tokens among the running sequences."""
        return max((sequence.num_fed for sequence in self.slots if sequence), default=0)

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Put sequences at the end of the queue."""
        self.waiting.extend(sequences)

    def cancelled(self) -> list[Sequence]:
        """Waiting sequences that were cancelled, taken off the queue."""
        gone = [sequence for sequence in self.waiting if sequence.finish_reason]
        self.waiting = deque(sequence for sequence in self.waiting if not sequence.finish_reason)
        return gone

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

    def append(self, chunk: "Chunk") -> list[Sequence]:
        """Append a decoded chunk on the host to the running sequences; returns them, the cancelled ones too."""
        grown = []
        for slot, sequence in enumerate(self.slots):
            if sequence is None:
                continue
            grown.append(sequence)
            if sequence.finish_reason:
                continue
            num = int(chunk.count[slot])
            sequence.tokens += chunk.token[slot, :num].tolist()
            sequence.policy_logps += chunk.policy_logp[slot, :num].tolist()
            sequence.sampler_logps += chunk.sampler_logp[slot, :num].tolist()
            if sequence.params.logprobs:
                assert chunk.alternatives is not None, "fetched when wanted"
                assert chunk.alternative_logps is not None, "fetched when wanted"
                wanted = slice(0, sequence.params.logprobs)
                tokens = chunk.alternatives[slot, :num, wanted].tolist()
                logps = chunk.alternative_logps[slot, :num, wanted].tolist()
                sequence.alternatives += [list(zip(*pair, strict=True)) for pair in zip(tokens, logps, strict=True)]
            if chunk.stopped[slot]:
                sequence.finish_reason = "stop"
            elif len(sequence.tokens) >= sequence.params.max_tokens:
                sequence.finish_reason = "length"
        return grown

    def num_slots_needed(self) -> int:
        """Slots per shard that the running sequences take up."""
        shards = np.array([sequence is not None for sequence in self.slots]).reshape(-1, self.slots_per_shard)
        return int(shards.sum(axis=1).max())

    def shrink(self, slots_per_shard: int) -> np.ndarray:
        """Give each shard fewer slots, enough for its running sequences.

        Returns:
            For each new slot the index within its shard of the old slot that moves there.
        """
        kept = []
        for first in range(0, len(self.slots), self.slots_per_shard):
            own = range(self.slots_per_shard)
            kept += sorted(own, key=lambda slot: self.slots[first + slot] is None)[:slots_per_shard]
        num_shards = len(self.slots) // self.slots_per_shard
        shard_of = np.repeat(np.arange(num_shards), slots_per_shard)
        self.slots = [
            self.slots[shard * self.slots_per_shard + slot] for shard, slot in zip(shard_of, kept, strict=True)
        ]
        self.slots_per_shard = slots_per_shard
        return np.array(kept, np.int32)

    def retire(self) -> list[int]:
        """Free the slots of finished sequences; returns them."""
        freed = [slot for slot, sequence in enumerate(self.slots) if sequence and sequence.finish_reason]
        for slot in freed:
            self.slots[slot] = None
        return freed
