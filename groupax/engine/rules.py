"""The rules of the sampler's options: changes of the logits, and the cut by top-k, top-p and min-p.

Nothing is sorted. The k likeliest tokens lie in the k blocks of the vocabulary with the largest maxima, and all tokens
likelier than the largest of the other blocks lie in them too. So a threshold is searched among the tokens of
`CANDIDATE_BLOCKS` blocks. Where it turns out to lie below them, as with a nearly flat distribution, the search is
repeated over the row.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from groupax.core.settings.sampling import MAX_LOGPROBS, SAMPLER
from groupax.parallel.pytree import pytree
from groupax.parallel.runtime import traced_platform

# Blocks in which thresholds are searched: enough for a top-k of this size, and for most distributions' top-p.
CANDIDATE_BLOCKS = 64

# The options that `changed_logits` reads, and those that `truncation` does.
CHANGES = {"logit_bias", "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty"}
CUTS = {"top_k", "top_p", "min_p"}
if without_rule := SAMPLER.keys() - CHANGES - CUTS - {"temperature", "logprobs"}:
    raise TypeError(
        f"no rule of the sampler reads {', '.join(without_rule)} of SamplingParams; apply it in changed_logits or "
        "truncation of groupax/engine/rules.py and name it in CHANGES or CUTS there, or name it in HOST of "
        "groupax/core/settings/sampling.py if the host reads it"
    )

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

    # a loop is not a part of a GPU's graph of kernels
    unroll = traced_platform() == "gpu"
    return lax.fori_loop(0, 32 // bits, refine, jnp.zeros(B, jnp.uint32), unroll=unroll)


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


# The options of each row by their names, [B]; of `logit_bias` the biases, [B, A], and their tokens as
# `logit_bias_tokens`, [B, A], padded with -1.
Options = dict[str, Array]


@pytree
class History:
    """The tokens that each row has fed, for the settings that depend on them."""

    # prompts, one token per column, without their last tokens; B / Q neighbouring rows share a prompt
    prompt_tokens: Int[Array, "Q S"]
    prompt_seen: Bool[Array, "Q S"]  # columns that belong to the prompt
    tokens: Int[Array, "B T"]  # tokens fed since then, one per column, the prompt's last token first
    seen: Bool[Array, "B T"]  # columns that belong to the row
    generated: Bool[Array, "B T"]  # columns of the row whose tokens were sampled
    num_generated: Int[Array, "B"]  # number of tokens sampled so far
    stop_ids: Int[Array, "B E"]  # tokens that end the row, padded with -1


@pytree
class Distribution:
    """A softmax, by blocks of the vocabulary."""

    scaled: Float[Array, "B V"]  # logits over temperature, minus the row's largest
    maxima: Float[Array, "B J"]  # maximum of `scaled` of each block
    sums: Float[Array, "B J"]  # sum of exp(scaled) of each block

    @property
    def log_sum(self) -> Float[Array, "B"]:
        """Logarithm of the sum of exp(scaled)."""
        return jnp.log(jnp.sum(self.sums, axis=-1))


def distribution(logits: Float[Array, "B V"]) -> Distribution:
    """Returns softmax(logits)."""
    maxima = _in_memory(reduce_blocks(jnp.max, logits, -jnp.inf))
    highest = jnp.max(maxima, axis=-1, keepdims=True)
    scaled = logits - highest
    sums = _in_memory(reduce_blocks(lambda blocks, axis: jnp.sum(jnp.exp(blocks), axis), scaled, -jnp.inf))
    return Distribution(scaled, maxima - highest, sums)


def _in_memory(of_blocks: Float[Array, "B J"]) -> Float[Array, "B J"]:
    """Keeps XLA from reducing whole rows in passes of their own, except on CPU, where these are fast."""
    return of_blocks if traced_platform() == "cpu" else lax.optimization_barrier(of_blocks)


def truncation(of: Distribution, settings: Options) -> Truncation:
    """Returns which tokens are kept; a rule that compares with the likeliest token is one more maximum of `floor`."""
    total, top_k, top_p = jnp.sum(of.sums, axis=-1), settings["top_k"], settings["top_p"]
    threshold = lax.cond(
        jnp.any((top_k > 0) | (top_p < 1)),
        lambda: truncation_threshold(of.scaled, of.maxima, total, top_k, top_p),
        lambda: jnp.zeros(len(top_k), jnp.uint32),
    )
    return Truncation(threshold, floor=settings["min_p"])


def alternatives_of(policy: Distribution, logprobs: Int[Array, "B"]) -> tuple[Int[Array, "B A"], Float[Array, "B A"]]:
    """Returns the likeliest tokens and their log-probs, or zeros if no row requests any."""
    B, V = policy.scaled.shape
    num = min(MAX_LOGPROBS, V)

    def search() -> tuple[Array, Array]:
        tokens, scaled = largest(policy.scaled, policy.maxima, num)
        return tokens, scaled - policy.log_sum[:, None]

    nothing = jnp.zeros((B, num), jnp.int32), jnp.zeros((B, num), jnp.float32)
    return lax.cond(jnp.any(logprobs > 0), search, lambda: nothing)


def changed_logits(logits: Float[Array, "B V"], settings: Options, history: History) -> Float[Array, "B V"]:
    """Returns the logits with bias, without stop tokens where it is too early for them, and with the penalties.

    Steps in which all options have their defaults leave it out.
    """
    V = logits.shape[-1]
    rows = jnp.arange(logits.shape[0])[:, None]

    def at(x: Array, tokens: Array, where: Array) -> Any:
        return x.at[rows, jnp.where(where, tokens, V)]  # beyond the vocabulary: dropped

    biased = settings["logit_bias_tokens"]
    logits = at(logits, biased, biased >= 0).add(settings["logit_bias"], mode="drop")
    early = (history.num_generated < settings["min_tokens"])[:, None] & (history.stop_ids >= 0)
    logits = at(logits, history.stop_ids, early).set(-jnp.inf, mode="drop")

    none = jnp.zeros(logits.shape, logits.dtype)
    seen = at(none, history.tokens, history.seen).set(1.0, mode="drop")
    share = logits.shape[0] // history.prompt_tokens.shape[0]
    of_prompt = (jnp.repeat(x, share, axis=0) for x in (history.prompt_tokens, history.prompt_seen))
    seen = at(seen, *of_prompt).set(1.0, mode="drop") > 0
    count = at(none, history.tokens, history.generated).add(1.0, mode="drop")
    penalty = settings["repetition_penalty"][:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    logits = logits - settings["presence_penalty"][:, None] * (count > 0).astype(logits.dtype)
    return logits - settings["frequency_penalty"][:, None] * count


def changed_distribution(
    policy: Distribution,
    logits: Float[Array, "B V"],
    inverse_temperature: Float[Array, "B 1"],
    settings: Options,
    history: History,
    allowed: Bool[Array, "B V"] | None,
) -> Distribution:
    """Returns the softmax of the changed logits, of allowed tokens only if there are constraints.

    Where no token that may follow is allowed, the logits are those that were not changed.
    """
    are_changed = _are_changed(settings, history)
    # Branches return as few arrays as large as the logits as they can: these are copied.
    if allowed is None:
        return lax.cond(
            are_changed,
            lambda: distribution(changed_logits(logits, settings, history) * inverse_temperature),
            lambda: policy,
        )
    changed = lax.cond(are_changed, lambda: changed_logits(logits, settings, history), lambda: logits)
    # the end of a completion may be the only allowed token before `min_tokens`
    is_left = jnp.any(allowed & (changed > -jnp.inf), axis=-1, keepdims=True)
    changed = jnp.where(allowed, jnp.where(is_left, changed, logits), -jnp.inf)
    return distribution(changed * inverse_temperature)


def _are_changed(settings: Options, history: History) -> Bool[Array, ""]:
    """Returns whether an option of `changed_logits` is set in a row."""
    by_row = history.num_generated < settings["min_tokens"]
    for name in sorted(CHANGES - {"min_tokens"}):
        is_set = settings[name] != (SAMPLER[name] or 0)
        by_row |= is_set if is_set.ndim == 1 else jnp.any(is_set, axis=-1)
    return jnp.any(by_row)
