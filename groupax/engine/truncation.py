"""Rows of numbers by blocks of the vocabulary: their largest ones, and the cut by top-k, top-p and min-p.

Nothing is sorted. The k likeliest tokens lie in the k blocks of the vocabulary with the largest maxima, and all tokens
likelier than the largest of the other blocks lie in them too. So a threshold is searched among the tokens of
`CANDIDATE_BLOCKS` blocks. Where it turns out to lie below them, as with a nearly flat distribution, the search is
repeated over the row.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from groupax.parallel.runtime import traced_platform

# Blocks in which thresholds are searched: enough for a top-k of this size, and for most distributions' top-p.
CANDIDATE_BLOCKS = 64


# XLA has a kernel for GPUs that finds this many of the largest numbers; for more of them it sorts.
MOST_WITHOUT_SORT = 16


def block_width(V: int) -> int:
    """Returns a divisor of V near its root, so that nothing must be padded, or else about the root."""
    root = V**0.5
    near = [width for width in range(math.ceil(root / 4), int(root * 4) + 1) if V % width == 0]
    return min(near, key=lambda width: width + V // width, default=max(1, round(root)))


def reduce_blocks(reduce: Callable[..., Array], x: Float[Array, "B V"], padding: float) -> Float[Array, "B J"]:
    """Reduces each of a row's J blocks of `block_width` to a number; the last one may be padded.

    Args:
        x: The rows. XLA fuses this function with what they are computed from.
        padding: Number beyond the rows' ends.
    """
    B, V = x.shape
    width = block_width(V)
    num_blocks = -(-V // width)
    # a TPU keeps 8 rows of 128 numbers together; in these dims a reshape leaves them there
    rows = (B // 8, 8) if traced_platform() == "tpu" and B % 8 == 0 else (B,)
    blocks = jnp.pad(x, ((0, 0), (0, num_blocks * width - V)), constant_values=padding)
    return reduce(blocks.reshape(*rows, num_blocks, width), axis=-1).reshape(B, num_blocks)


def members(x: Float[Array, "B V"], blocks: Int[Array, "B N"]) -> tuple[Int[Array, "B M"], Float[Array, "B M"]]:
    """Returns the tokens of some blocks of each row, and their numbers; beyond the vocabulary these are -inf."""
    V = x.shape[-1]
    width = block_width(V)
    tokens = (blocks[:, :, None] * width + jnp.arange(width)[None, None, :]).reshape(len(x), -1)
    rows = jnp.arange(len(x))[:, None]
    mode = "fill" if V % width else "promise_in_bounds"  # without a kernel that checks the bounds
    return tokens, x.at[rows, tokens].get(mode=mode, fill_value=-jnp.inf)


@dataclass(frozen=True, eq=False)
class Candidates:
    """The tokens of the blocks with the largest maxima, in the order of the vocabulary."""

    tokens: Int[Array, "B M"]  # the tokens
    values: Float[Array, "B M"]  # their numbers; -inf for those beyond the vocabulary
    bound: Float[Array, "B"]  # the largest number of all other tokens; -inf if there are none


def candidates(x: Float[Array, "B V"], maxima: Float[Array, "B J"], num_blocks: int) -> Candidates:
    """Returns the tokens of the `num_blocks` blocks with the largest maxima."""
    B, J = maxima.shape
    if num_blocks >= J:
        return Candidates(jnp.broadcast_to(jnp.arange(x.shape[-1])[None, :], x.shape), x, jnp.full(B, -jnp.inf))
    highest, blocks = _top_k(maxima, num_blocks + 1)
    # of equal maxima the first blocks come first, so that in the vocabulary's order the first of equal tokens does too
    return Candidates(*members(x, lax.sort(blocks[:, :-1])), highest[:, -1])


def largest(
    x: Float[Array, "B V"], maxima: Float[Array, "B J"], num: int
) -> tuple[Int[Array, "B A"], Float[Array, "B A"]]:
    """Returns the tokens with the largest numbers, in descending order, and the numbers."""
    among = candidates(x, maxima, num)
    values, indices = _top_k(among.values, num)
    return jnp.take_along_axis(among.tokens, indices, axis=-1).astype(jnp.int32), values


def _top_k(values: Float[Array, "B M"], num: int) -> tuple[Float[Array, "B A"], Int[Array, "B A"]]:
    """Computes `lax.top_k`, on GPUs in rounds that need no sort."""
    if traced_platform() != "gpu" or num <= MOST_WITHOUT_SORT:
        numbers, indices = lax.top_k(values, num)
        return numbers, indices
    left = jnp.maximum(values, jnp.finfo(values.dtype).min)  # -inf marks those that were found
    rounds = []
    for first in range(0, num, MOST_WITHOUT_SORT):
        numbers, indices = lax.top_k(left, min(num - first, MOST_WITHOUT_SORT))
        left = left.at[jnp.arange(len(left))[:, None], indices].set(-jnp.inf)
        rounds.append((numbers, indices))
    numbers, indices = (jnp.concatenate(each, axis=-1) for each in zip(*rounds, strict=True))
    return numbers, indices


@dataclass(frozen=True, eq=False)
class Truncation:
    """The cut of each row by top-k, top-p and min-p."""

    threshold: UInt32[Array, "B"]  # smallest number that top-k and top-p keep, as `_ordered_bits`
    floor: Float[Array, "B"]  # smallest fraction of the likeliest token's probability that is kept

    def weights(self, scaled: Float[Array, "B M"]) -> Float[Array, "B M"]:
        """Returns exp(scaled) of the tokens that are kept, 0 of the others; the likeliest token has scaled = 0."""
        weights = jnp.exp(scaled)
        kept = (_ordered_bits(scaled) >= self.threshold[:, None]) & (weights >= self.floor[:, None])
        return jnp.where(kept, weights, 0.0)


def truncation_threshold(
    scaled: Float[Array, "B V"],
    maxima: Float[Array, "B J"],
    total: Float[Array, "B"],
    top_k: Int[Array, "B"],
    top_p: Float[Array, "B"],
) -> UInt32[Array, "B"]:
    """Returns the threshold of top-k, then of top-p over the remaining mass, as `_ordered_bits`; 0 keeps all.

    Args:
        maxima: Maximum of each block of `scaled`.
        total: Sum of exp(scaled).
    """
    settings = total, top_k, top_p
    # comparing with several thresholds at a time takes fewer kernels
    few, many = (1, 1) if traced_platform() == "cpu" else (4, 2)
    if maxima.shape[-1] <= CANDIDATE_BLOCKS:
        return _thresholds(scaled, *settings, few)[1]
    among = candidates(scaled, maxima, CANDIDATE_BLOCKS)
    by_top_k, threshold = _thresholds(among.values, *settings, few)
    # a threshold that is no more than the other tokens' largest was found without some of the tokens above it
    bound = _ordered_bits(among.bound)
    is_found = ((top_k == 0) | (by_top_k > bound)) & ((top_p >= 1) | (threshold > bound))

    def search_all() -> Array:
        return jnp.where(is_found, threshold, _thresholds(scaled, *settings, many)[1])

    return lax.cond(jnp.all(is_found), lambda: threshold, search_all)


def _thresholds(
    scaled: Float[Array, "B M"], total: Array, top_k: Int[Array, "B"], top_p: Float[Array, "B"], bits: int
) -> tuple[UInt32[Array, "B"], UInt32[Array, "B"]]:
    """Returns the threshold of top-k, and that of top-k and top-p together."""
    order = _ordered_bits(scaled)

    def at_least(thresholds: Array) -> Array:  # [B, C] -> [B, C, M]
        return order[:, None, :] >= thresholds[:, :, None]

    def search(is_asked: Array, holds: Callable[[Array], Array]) -> Array:
        nothing = jnp.zeros(len(top_k), jnp.uint32)
        found = lax.cond(jnp.any(is_asked), lambda: _largest_threshold(holds, len(top_k), bits), lambda: nothing)
        return jnp.where(is_asked, found, 0)

    is_cut = top_k > 0
    by_top_k = search(is_cut, lambda t: jnp.sum(at_least(t), axis=-1) >= top_k[:, None])
    weights = jnp.where(order >= by_top_k[:, None], jnp.exp(scaled), 0.0)
    mass = top_p * jnp.where(is_cut, jnp.sum(weights, axis=-1), total)

    def holds_enough(thresholds: Array) -> Array:
        return jnp.sum(jnp.where(at_least(thresholds), weights[:, None, :], 0.0), axis=-1) >= mass[:, None]

    return by_top_k, jnp.maximum(by_top_k, search(top_p < 1, holds_enough))


def _ordered_bits(x: Float[Array, "*M"]) -> UInt32[Array, "*M"]:
    """Returns integers in the order of the float32 numbers, so that a threshold can be found by its bits."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _largest_threshold(holds: Callable[[Array], Array], B: int, bits: int) -> UInt32[Array, "B"]:
    """Returns the largest threshold per row for which `holds`, true at 0 and monotone, is still true.

    It takes 32 / bits passes over the row, each for 2^bits - 1 thresholds, and is exact for any setting.
    """
    steps = jnp.arange(1, 1 << bits, dtype=jnp.uint32)[None, :]

    def refine(index: Array, threshold: Array) -> Array:
        unit = jnp.uint32(1) << (32 - bits * (index + 1)).astype(jnp.uint32)
        held = jnp.sum(holds(threshold[:, None] + steps * unit), axis=-1, dtype=jnp.uint32)
        return threshold + held * unit

    # a loop is no part of a GPU's graph of kernels
    unroll = traced_platform() == "gpu"
    return lax.fori_loop(0, 32 // bits, refine, jnp.zeros(B, jnp.uint32), unroll=unroll)
