"""Requests in an `EngineLoop`, what it reports about them, and its load. Imports no jax."""

from collections.abc import Callable
from dataclasses import dataclass, field

from groupax.engine.sequence import Sequence
from groupax.types import FinishReason


class QueueFullError(Exception):
    """The loop has as many sequences as it takes."""


class ClosedError(Exception):
    """The loop takes no more requests."""


@dataclass(frozen=True, eq=False)
class Delta:
    """New tokens of a completion since the previous call of its listener.

    Attributes:
        index: Index of the completion in its request; completions of one prompt are adjacent.
        start: Position of the first new token; 0 if the completion was restarted and new weights changed it.
        tokens, policy_logps, sampler_logps, alternatives, versions: The new ones (see `scheduler.Sequence`).
        finish_reason: None while it runs; "abort" if the engine failed, or gave up the completion.
        text: The whole text of a finished completion; of one that was given up, the reason.
    """

    index: int
    start: int
    tokens: list[int]
    policy_logps: list[float]
    sampler_logps: list[float]
    alternatives: list[list[tuple[int, float]]]
    versions: list[int]
    finish_reason: FinishReason | None
    text: str


Listener = Callable[[Delta], None]


@dataclass(eq=False)
class Job:
    """A request in the loop.

    Attributes:
        model: Name of its engine.
        sequences: Its sequences, which belong to the loop's thread.
        listener: Called with every delta, in that thread; it must be quick and must not raise.
        reported: Tokens of each sequence that the listener has received.
    """

    model: str
    sequences: list[Sequence]
    listener: Listener
    reported: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class LoopCounts:
    """The current load of the loop, and totals since its start."""

    num_running: int = 0
    num_waiting: int = 0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_finished: int = 0
    num_cancelled: int = 0
    num_chunks: int = 0


@dataclass(frozen=True)
class EngineLoad:
    """The current load of an engine.

    Attributes:
        num_running: Sequences in slots.
        num_waiting: Sequences without a slot.
        kv_frac: Fraction of the KV cache that they use.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_frac: float = 0.0
