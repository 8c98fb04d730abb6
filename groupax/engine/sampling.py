"""Sampling of tokens: truncation by runtime settings, inverse-CDF sampling, counter-based randomness."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from groupax.parallel.pytree import pytree
from groupax.settings.sampling import MAX_LOGPROBS


@pytree
class SamplingArrays:
    """The numbers of each row's `SamplingParams`, by the same names, and its `logit_bias`: tokens, padded with -1, and
    their biases."""

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]
    min_tokens: Int[Array, "B"]
    repetition_penalty: Float[Array, "B"]
    presence_penalty: Float[Array, "B"]
    frequency_penalty: Float[Array, "B"]
    bias_tokens: Int[Array, "B A"]
    bias: Float[Array, "B A"]
    logprobs: Int[Array, "B"]


@pytree
class History:
    """The tokens that each row has fed, for the settings that depend on them.

    Attributes:
        prompt_tokens: Prompts, one token per column, without their last tokens; B / Q neighbouring rows share a prompt.
        prompt_seen: Columns that belong to the prompt.
        tokens: Tokens fed since then, one per column, the prompt's last token first.
        seen: Columns that belong to the row.
        generated: Columns of the row whose tokens were sampled.
        num_generated: Number of tokens sampled so far.
        stop_ids: Tokens that end the row, padded with -1.
    """

    prompt_tokens: Int[Array, "Q S"]
    prompt_seen: Bool[Array, "Q S"]
    tokens: Int[Array, "B T"]
    seen: Bool[Array, "B T"]
    generated: Bool[Array, "B T"]
    num_generated: Int[Array, "B"]
    stop_ids: Int[Array, "B E"]


@pytree
class Sampled:
    """One token per row, with its natural log-prob under the policy and under the sampler.

    The policy is softmax(logits / temperature); the sampler is the softmax of the changed logits, cut by top-k, top-p
    and min-p and renormalized.
    """

    token: Int[Array, "B"]
    policy_logp: Float[Array, "B"]
    sampler_logp: Float[Array, "B"]


def sample(
    logits: Float[Array, "B V"],
    uniform: Float[Array, "B 2"],
    settings: SamplingArrays,
    history: History,
) -> Sampled:
    """Draws one token per row, which depends on the row's logits, history, settings and numbers in [0, 1) only."""
    greedy = settings.temperature == 0
    inverse_temperature = (1.0 / jnp.where(greedy, 1.0, settings.temperature))[:, None]

    def below_max(logits: Array) -> Array:
        scaled = logits * inverse_temperature
        return scaled - jnp.max(scaled, axis=-1, keepdims=True)

    def log_sum(weights: Array) -> Array:
        return jnp.log(jnp.sum(weights, axis=-1))

    def logp(scaled: Array, log_sum: Array, token: Array) -> Array:
        return jnp.take_along_axis(scaled, token[:, None], axis=-1)[:, 0] - log_sum

    policy = below_max(logits)
    weights = jnp.exp(policy)
    policy_log_sum = log_sum(weights)

    # Branches return only numbers per row: arrays as large as the logits would be copied.
    def from_policy() -> tuple[Array, Array]:
        token = _inverse_cdf(weights, uniform)
        return token, logp(policy, policy_log_sum, token)

    def from_changed() -> tuple[Array, Array]:
        scaled = lax.cond(
            _are_changed(settings, history),
            lambda: below_max(changed_logits(logits, settings, history)),
            lambda: policy,
        )
        kept_weights = jnp.where(kept_tokens(scaled, settings), jnp.exp(scaled), 0.0)
        drawn = _inverse_cdf(kept_weights, uniform)
        token = jnp.where(greedy, jnp.argmax(scaled, axis=-1).astype(jnp.int32), drawn)
        return token, jnp.where(greedy, 0.0, logp(scaled, log_sum(kept_weights), token))

    is_other = jnp.any(greedy) | _are_changed(settings, history) | _are_truncated(settings)
    token, sampler_logp = lax.cond(is_other, from_changed, from_policy)
    return Sampled(token, logp(policy, policy_log_sum, token), sampler_logp)


def changed_logits(logits: Float[Array, "B V"], settings: SamplingArrays, history: History) -> Float[Array, "B V"]:
    """Returns the logits with bias, without stop tokens where it is too early for them, and with the penalties."""
    V = logits.shape[-1]
    rows = jnp.arange(logits.shape[0])[:, None]

    def at(x: Array, tokens: Array, where: Array) -> Any:
        return x.at[rows, jnp.where(where, tokens, V)]  # beyond the vocabulary: dropped

    biased = settings.bias_tokens >= 0
    logits = at(logits, settings.bias_tokens, biased).add(settings.bias, mode="drop")
    early = (history.num_generated < settings.min_tokens)[:, None] & (history.stop_ids >= 0)
    logits = at(logits, history.stop_ids, early).set(-jnp.inf, mode="drop")

    none = jnp.zeros(logits.shape, logits.dtype)
    seen = at(none, history.tokens, history.seen).set(1.0, mode="drop")
    share = logits.shape[0] // history.prompt_tokens.shape[0]
    of_prompt = (jnp.repeat(x, share, axis=0) for x in (history.prompt_tokens, history.prompt_seen))
    seen = at(seen, *of_prompt).set(1.0, mode="drop") > 0
    count = at(none, history.tokens, history.generated).add(1.0, mode="drop")
    penalty = settings.repetition_penalty[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    logits = logits - settings.presence_penalty[:, None] * (count > 0).astype(logits.dtype)
    return logits - settings.frequency_penalty[:, None] * count


def alternatives(
    logits: Float[Array, "B V"], settings: SamplingArrays
) -> tuple[Int[Array, "B A"], Float[Array, "B A"]]:
    """Returns the policy's likeliest tokens and their log-probs, `MAX_LOGPROBS` of them or the whole vocabulary.

    They are zeros if no row requests any: the search costs more than the rest of sampling together.
    """
    num = min(MAX_LOGPROBS, logits.shape[-1])

    def search() -> tuple[Array, Array]:
        greedy = settings.temperature == 0
        scaled = logits * (1.0 / jnp.where(greedy, 1.0, settings.temperature))[:, None]
        logps, tokens = lax.top_k(jax.nn.log_softmax(scaled, axis=-1), num)
        return tokens.astype(jnp.int32), logps

    shape = (logits.shape[0], num)
    nothing = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    return lax.cond(jnp.any(settings.logprobs > 0), search, lambda: nothing)


def _are_truncated(settings: SamplingArrays) -> Bool[Array, ""]:
    return jnp.any((settings.top_k > 0) | (settings.top_p < 1) | (settings.min_p > 0))


def _are_changed(settings: SamplingArrays, history: History) -> Bool[Array, ""]:
    by_row = (
        (settings.repetition_penalty != 1)
        | (settings.presence_penalty != 0)
        | (settings.frequency_penalty != 0)
        | (history.num_generated < settings.min_tokens)
        | jnp.any(settings.bias_tokens >= 0, axis=-1)
    )
    return jnp.any(by_row)


def uniforms(key: UInt32[Array, "B 2"], positions: Int[Array, "B C"]) -> Float[Array, "B C 2"]:
    """Returns two numbers in [0, 1) for each token, from the row's key and the position of the token that it feeds."""

    def draw(key: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), position), (2,))

    return jax.vmap(jax.vmap(draw, (None, 0)))(key, positions)


def row_keys(seed: int, step: int, prompts: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Returns the PRNG keys of rows, [B, 2] uint32, which do not depend on where the rows are computed.

    Args:
        seed: Seed of the run; all of its 64 bits count.
        step: Index of the rollout within the run.
        prompts: [B] index of the prompt within the step.
        samples: [B] index of the completion among those of its prompt.
    """
    # like jax.random.key where JAX has integers of 64 bits; elsewhere it drops the upper half
    words = np.array([int(seed) >> 32 & 0xFFFFFFFF, int(seed) & 0xFFFFFFFF], np.uint32)
    key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(words)), step)
    return np.asarray(_fold_in_all(key, jnp.asarray(prompts, jnp.int32), jnp.asarray(samples, jnp.int32)))


@jax.jit
def _fold_in_all(key: Array, prompts: Array, samples: Array) -> Array:
    def fold(prompt: Array, sample: Array) -> Array:
        return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, prompt), sample))

    return jax.vmap(fold)(prompts, samples)


def kept_tokens(scaled: Float[Array, "B V"], settings: SamplingArrays) -> Bool[Array, "B V"]:
    """Returns a mask of the tokens at or above the thresholds of top-k, top-p and min-p.

    Args:
        scaled: Logits over temperature, minus the row's largest.
        settings: Sampling parameters; top-k is applied first, then top-p to the remaining mass, then min-p.
    """
    V = scaled.shape[-1]
    order = _ordered_bits(scaled)

    def top_k_threshold() -> Array:
        count = jnp.where(settings.top_k > 0, jnp.minimum(settings.top_k, V), V)
        return _largest_threshold(lambda candidate: jnp.sum(order >= candidate[:, None], axis=-1) >= count)

    threshold = lax.cond(jnp.any(settings.top_k > 0), top_k_threshold, lambda: jnp.zeros(order.shape[0], jnp.uint32))

    def top_p_threshold() -> Array:
        weights = jnp.where(order >= threshold[:, None], jnp.exp(scaled), 0.0)
        mass = settings.top_p * jnp.sum(weights, axis=-1)

        def holds_enough(candidate: Array) -> Array:
            return jnp.sum(weights, axis=-1, where=order >= candidate[:, None]) >= mass

        return jnp.where(settings.top_p < 1, jnp.maximum(threshold, _largest_threshold(holds_enough)), threshold)

    threshold = lax.cond(jnp.any(settings.top_p < 1), top_p_threshold, lambda: threshold)
    # exp(scaled) >= min_p; the likeliest token has scaled = 0
    return (order >= threshold[:, None]) & (jnp.exp(scaled) >= settings.min_p[:, None])


def _ordered_bits(x: Float[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Returns integers in the order of the float32 numbers, so that a threshold can be found bit by bit."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _largest_threshold(holds: Callable[[Array], Array]) -> UInt32[Array, "B"]:
    """Returns the largest threshold per row for which `holds`, true at 0 and monotone, is still true.

    It takes 32 passes over the row and is exact for any setting; sorting the vocabulary costs several times more.
    """
    rows = jax.eval_shape(holds, jax.ShapeDtypeStruct((1,), jnp.uint32)).shape

    def try_bit(index: Array, threshold: Array) -> Array:
        candidate = threshold | (jnp.uint32(1) << (31 - index).astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, threshold)

    return lax.fori_loop(0, 32, try_bit, jnp.zeros(rows, jnp.uint32))


def _inverse_cdf(weights: Float[Array, "B V"], uniform: Float[Array, "B 2"]) -> Int[Array, "B"]:
    """Draws a token per row, each with a probability proportional to its weight: first a block, then one within it."""
    B, V = weights.shape
    width = block_width(V)
    num_blocks = -(-V // width)
    blocks = jnp.pad(weights, ((0, 0), (0, num_blocks * width - V))).reshape(B, num_blocks, width)
    block = _first_beyond(jnp.sum(blocks, axis=-1), uniform[:, 0])
    within = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return (block * width + _first_beyond(within, uniform[:, 1])).astype(jnp.int32)


def block_width(V: int) -> int:
    """Returns a divisor of V near its root, so that nothing must be padded, or else about the root."""
    root = V**0.5
    near = [width for width in range(math.ceil(root / 4), int(root * 4) + 1) if V % width == 0]
    return min(near, key=lambda width: width + V // width, default=max(1, round(root)))


def _first_beyond(weights: Float[Array, "B J"], uniform: Float[Array, "B"]) -> Int[Array, "B"]:
    """Returns the first index whose cumulative weight exceeds uniform * total; never one of weight 0."""
    cumulative = jnp.cumsum(weights, axis=-1)
    total = cumulative[:, -1]
    # uniform * total may round up to total, which no cumulative weight exceeds
    target = jnp.minimum(uniform * total, jnp.nextafter(total, jnp.zeros_like(total)))
    return jnp.argmax(cumulative > target[:, None], axis=-1)
