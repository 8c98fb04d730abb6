"""Constrained decoding: the tokens that each slot may sample next, from the host's matchers to the devices."""

from collections.abc import Sequence as Row
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from groupax.constraints import ConstraintCompiler, fault_of
from groupax.engine.sequence import Sequence
from groupax.parallel.pytree import pytree


@pytree
class TokenMasks:
    """The tokens that slots may sample. A constrained slot samples one token of a chunk, after which its mask changes.

    Attributes:
        words: A bit for each token, 1 where it may follow, in words of 32; slots without a constraint have all of them.
        constrained: Slots with a constraint.
    """

    words: Int[Array, "B W"]
    constrained: Bool[Array, "B"]

    def allowed(self, vocab_size: int) -> Bool[Array, "B V"]:
        """Returns the tokens that each slot may sample."""
        bits = (self.words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None, :]) & 1
        return bits.reshape(len(bits), -1)[:, :vocab_size].astype(bool)


def next_masks(compiler: ConstraintCompiler, slots: Row[Sequence | None]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the fields of `TokenMasks` for the sequences in all slots; aborts those whose constraint cannot go on."""
    constrained = np.array([each is not None and each.matcher is not None for each in slots])
    matchers: list[tuple[Any, int]] = []
    for row, each in enumerate(slots):
        if each is not None and each.matcher is not None and each.finish_reason is None:
            matchers.append((each.matcher, row))
    words = compiler.masks(matchers, len(slots))
    for matcher, row in matchers:
        if fault := fault_of(matcher):
            sequence = slots[row]
            assert sequence is not None, "it has a matcher"
            sequence.finish_reason, sequence.fault = "abort", f"the constraint cannot be kept any longer: {fault}"
    return words, constrained


def consume(sequences: Row[tuple[Sequence, int]]) -> None:
    """Tells the matchers of running sequences their new tokens.

    Args:
        sequences: Sequences with their numbers of tokens before.
    """
    for sequence, num_before in sequences:
        if sequence.matcher is not None and sequence.finish_reason is None:
            sequence.matcher.consume_tokens(sequence.tokens[num_before:])
