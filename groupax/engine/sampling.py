"""Sampling of tokens by inverse CDF, with settings per row and counter-based randomness.

Plain sampling needs the temperature alone; the rules of the other options are in `rules`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from groupax.engine.rules import (
    Distribution,
    History,
    Options,
    alternatives_of,
    changed_distribution,
    distribution,
    members,
    reduce_blocks,
    truncation,
)
from groupax.parallel.pytree import pytree


@pytree
class Sampled:
    """One token per row, with its natural log-prob under the policy and under the sampler.

    The policy is softmax(logits / temperature); the sampler is the softmax of the changed logits, cut by top-k, top-p
    and min-p and renormalized.

    Attributes:
        alternatives: The policy's likeliest tokens, `MAX_LOGPROBS` of them or the whole vocabulary; zeros if no row
            requests any, and None of plain sampling.
        alternative_logps: Their log-probs under the policy.
    """

    token: Int[Array, "B"]
    policy_logp: Float[Array, "B"]
    sampler_logp: Float[Array, "B"]
    alternatives: Int[Array, "B A"] | None = None
    alternative_logps: Float[Array, "B A"] | None = None


def sample(
    logits: Float[Array, "B V"],
    uniform: Float[Array, "B 2"],
    settings: Options,
    history: History | None,
    allowed: Bool[Array, "B V"] | None = None,
) -> Sampled:
    """Draws one token per row, which depends on the row's logits, history, settings and numbers in [0, 1) only.

    Args:
        history: Tokens before; None for plain sampling, which ignores all settings but the temperature. It reads the
            logits twice: for the maximum of each block of tokens, and for each block's sum of exponentials.
        allowed: Tokens that a constraint allows, at least one per row; None without constraints. The policy's log-probs
            are those without it.
    """
    greedy = settings["temperature"] == 0
    inverse_temperature = (1.0 / jnp.where(greedy, 1.0, settings["temperature"]))[:, None]
    policy = distribution(logits * inverse_temperature)
    if history is None:
        drawn = policy if allowed is None else distribution(jnp.where(allowed, logits, -jnp.inf) * inverse_temperature)
        token, scaled = _draw(drawn, drawn.sums, jnp.exp, uniform, greedy)
        logp = scaled - drawn.log_sum
        policy_logp = logp if allowed is None else _logp_of(token, policy)
        return Sampled(token, policy_logp, jnp.where(greedy, 0.0, logp))
    changed = changed_distribution(policy, logits, inverse_temperature, settings, history, allowed)
    kept = truncation(changed, settings)
    sums = reduce_blocks(jnp.sum, kept.weights(changed.scaled), 0.0)
    token, scaled = _draw(changed, sums, kept.weights, uniform, greedy)
    sampler_logp = jnp.where(greedy, 0.0, scaled - jnp.log(jnp.sum(sums, axis=-1)))
    return Sampled(token, _logp_of(token, policy), sampler_logp, *alternatives_of(policy, settings["logprobs"]))


def _logp_of(token: Int[Array, "B"], of: Distribution) -> Float[Array, "B"]:
    return jnp.take_along_axis(of.scaled, token[:, None], axis=-1)[:, 0] - of.log_sum


def _draw(
    of: Distribution,
    sums: Float[Array, "B J"],
    weights: Callable[[Array], Array],
    uniform: Float[Array, "B 2"],
    greedy: Bool[Array, "B"],
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """Samples a token per row hierarchically: a block, then a token in it. Greedy rows take the likeliest token.

    Args:
        sums: Sum of the weights of each block.
        weights: Maps `of.scaled` to weights.

    Returns:
        The tokens, and `of.scaled` of them.
    """
    block = jnp.where(greedy, jnp.argmax(of.maxima, axis=-1), _first_beyond(sums, uniform[:, 0]))
    tokens, scaled = members(of.scaled, block[:, None])
    index = jnp.where(greedy, jnp.argmax(scaled, axis=-1), _first_beyond(weights(scaled), uniform[:, 1]))
    token, scaled = (jnp.take_along_axis(each, index[:, None], axis=-1)[:, 0] for each in (tokens, scaled))
    return token.astype(jnp.int32), scaled


def uniforms(key: UInt32[Array, "B 2"], positions: Int[Array, "B C"]) -> Float[Array, "B C 2"]:
    """Returns two numbers in [0, 1) for each token, from the row's key and the position of the token that it feeds."""

    def draw(key: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), position), (2,))

    return jax.vmap(jax.vmap(draw, (None, 0)))(key, positions)


def row_keys(seed: int, step: int, prompts: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Returns the PRNG keys of rows, [B, 2] uint32, which do not depend on where the rows are computed."""
    # like jax.random.key where JAX has integers of 64 bits; elsewhere it drops the upper half
    words = np.array([int(seed) >> 32 & 0xFFFFFFFF, int(seed) & 0xFFFFFFFF], np.uint32)
    key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(words)), step)
    return np.asarray(_fold_in_all(key, jnp.asarray(prompts, jnp.int32), jnp.asarray(samples, jnp.int32)))


@jax.jit
def _fold_in_all(key: Array, prompts: Array, samples: Array) -> Array:
    def fold(prompt: Array, sample: Array) -> Array:
        return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, prompt), sample))

    return jax.vmap(fold)(prompts, samples)


def _first_beyond(weights: Float[Array, "B J"], uniform: Float[Array, "B"]) -> Int[Array, "B"]:
    """Returns the first index whose cumulative weight exceeds uniform * total; never one of weight 0."""
    cumulative = jnp.cumsum(weights, axis=-1)
    total = cumulative[:, -1]
    # uniform * total may round up to total, which no cumulative weight exceeds
    target = jnp.minimum(uniform * total, jnp.nextafter(total, jnp.zeros_like(total)))
    return jnp.argmax(cumulative > target[:, None], axis=-1)
