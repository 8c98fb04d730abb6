"""Sampling of tokens by inverse CDF, with settings per row and counter-based randomness.

The rules of the options in `SamplingParams` are `changed_logits` and `_truncation`; their keyword-only parameters are
the options that they read.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from groupax.core.settings.sampling import MAX_LOGPROBS, SAMPLER
from groupax.engine.truncation import Truncation, largest, members, reduce_blocks, truncation_threshold
from groupax.parallel.pytree import pytree
from groupax.parallel.runtime import traced_platform

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
    policy = _distribution(logits * inverse_temperature)
    if history is None:
        drawn = policy if allowed is None else _distribution(jnp.where(allowed, logits, -jnp.inf) * inverse_temperature)
        token, scaled = _draw(drawn, drawn.sums, jnp.exp, uniform, greedy)
        logp = scaled - drawn.log_sum
        policy_logp = logp if allowed is None else _logp_of(token, policy)
        return Sampled(token, policy_logp, jnp.where(greedy, 0.0, logp))
    # Branches return as few arrays as large as the logits as they can: these are copied.
    if allowed is None:
        changed = lax.cond(
            _are_changed(settings, history),
            lambda: _distribution(_by(changed_logits, settings, logits, history) * inverse_temperature),
            lambda: policy,
        )
    else:
        changed = _distribution(_constrained_logits(logits, settings, history, allowed) * inverse_temperature)
    truncation = _by(_truncation, settings, changed)
    sums = reduce_blocks(jnp.sum, truncation.weights(changed.scaled), 0.0)
    token, scaled = _draw(changed, sums, truncation.weights, uniform, greedy)
    sampler_logp = jnp.where(greedy, 0.0, scaled - jnp.log(jnp.sum(sums, axis=-1)))
    return Sampled(token, _logp_of(token, policy), sampler_logp, *_alternatives(policy, settings["logprobs"]))


@pytree
class TokenLogps:
    """Log-probs of given tokens, and what else is likely in their place."""

    logp: Float[Array, "..."]  # log-prob of each token
    rank: Int[Array, "..."]  # number of tokens that are likelier, plus one
    alternatives: Int[Array, "... A"]  # the likeliest tokens, `MAX_LOGPROBS` of them or the whole vocabulary
    alternative_logps: Float[Array, "... A"]  # their log-probs


def token_logps(logits: Float[Array, "M V"], tokens: Int[Array, "M"]) -> TokenLogps:
    """Returns the log-probs of tokens under softmax(logits)."""
    of = _distribution(logits)
    scaled = jnp.take_along_axis(of.scaled, tokens[:, None], axis=-1)
    rank = 1 + jnp.sum(of.scaled > scaled, axis=-1, dtype=jnp.int32)
    alternatives, values = largest(of.scaled, of.maxima, min(MAX_LOGPROBS, logits.shape[-1]))
    return TokenLogps(scaled[:, 0] - of.log_sum, rank, alternatives, values - of.log_sum[:, None])


@pytree
class _Distribution:
    """A softmax, by blocks of the vocabulary."""

    scaled: Float[Array, "B V"]  # logits over temperature, minus the row's largest
    maxima: Float[Array, "B J"]  # maximum of `scaled` of each block
    sums: Float[Array, "B J"]  # sum of exp(scaled) of each block

    @property
    def log_sum(self) -> Float[Array, "B"]:
        """Logarithm of the sum of exp(scaled)."""
        return jnp.log(jnp.sum(self.sums, axis=-1))


def _logp_of(token: Int[Array, "B"], of: _Distribution) -> Float[Array, "B"]:
    return jnp.take_along_axis(of.scaled, token[:, None], axis=-1)[:, 0] - of.log_sum


def _distribution(logits: Float[Array, "B V"]) -> _Distribution:
    maxima = _in_memory(reduce_blocks(jnp.max, logits, -jnp.inf))
    highest = jnp.max(maxima, axis=-1, keepdims=True)
    scaled = logits - highest
    sums = _in_memory(reduce_blocks(lambda blocks, axis: jnp.sum(jnp.exp(blocks), axis), scaled, -jnp.inf))
    return _Distribution(scaled, maxima - highest, sums)


def _in_memory(of_blocks: Float[Array, "B J"]) -> Float[Array, "B J"]:
    """Keeps XLA from reducing whole rows in passes of their own, except on CPU, where these are fast."""
    return of_blocks if traced_platform() == "cpu" else lax.optimization_barrier(of_blocks)


def _draw(
    of: _Distribution,
    sums: Float[Array, "B J"],
    weights: Callable[[Array], Array],
    uniform: Float[Array, "B 2"],
    greedy: Bool[Array, "B"],
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """Draws a token per row by its weight, first a block, then one of it; takes the likeliest one of greedy rows.

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


@functools.cache
def _read_by(rule: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of a rule's keyword-only parameters."""
    parameters = inspect.signature(rule).parameters.values()
    return tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)


def _by(rule: Callable[..., Any], settings: Options, *inputs: Any) -> Any:
    """Calls a rule with the options that it reads."""
    return rule(*inputs, **{name: settings[name] for name in _read_by(rule)})


def _truncation(
    of: _Distribution, *, top_k: Int[Array, "B"], top_p: Float[Array, "B"], min_p: Float[Array, "B"]
) -> Truncation:
    """Returns which tokens are kept; a rule that compares with the likeliest token is one more maximum of `floor`."""
    total = jnp.sum(of.sums, axis=-1)
    threshold = lax.cond(
        jnp.any((top_k > 0) | (top_p < 1)),
        lambda: truncation_threshold(of.scaled, of.maxima, total, top_k, top_p),
        lambda: jnp.zeros(len(top_k), jnp.uint32),
    )
    return Truncation(threshold, floor=min_p)


def _alternatives(policy: _Distribution, logprobs: Int[Array, "B"]) -> tuple[Int[Array, "B A"], Float[Array, "B A"]]:
    """Returns the likeliest tokens and their log-probs, or zeros if no row requests any."""
    B, V = policy.scaled.shape
    num = min(MAX_LOGPROBS, V)

    def search() -> tuple[Array, Array]:
        tokens, scaled = largest(policy.scaled, policy.maxima, num)
        return tokens, scaled - policy.log_sum[:, None]

    nothing = jnp.zeros((B, num), jnp.int32), jnp.zeros((B, num), jnp.float32)
    return lax.cond(jnp.any(logprobs > 0), search, lambda: nothing)


def changed_logits(
    logits: Float[Array, "B V"],
    history: History,
    *,
    logit_bias_tokens: Int[Array, "B A"],
    logit_bias: Float[Array, "B A"],
    min_tokens: Int[Array, "B"],
    repetition_penalty: Float[Array, "B"],
    presence_penalty: Float[Array, "B"],
    frequency_penalty: Float[Array, "B"],
) -> Float[Array, "B V"]:
    """Returns the logits with bias, without stop tokens where it is too early for them, and with the penalties.

    Steps in which all options have their defaults leave it out.
    """
    V = logits.shape[-1]
    rows = jnp.arange(logits.shape[0])[:, None]

    def at(x: Array, tokens: Array, where: Array) -> Any:
        return x.at[rows, jnp.where(where, tokens, V)]  # beyond the vocabulary: dropped

    logits = at(logits, logit_bias_tokens, logit_bias_tokens >= 0).add(logit_bias, mode="drop")
    early = (history.num_generated < min_tokens)[:, None] & (history.stop_ids >= 0)
    logits = at(logits, history.stop_ids, early).set(-jnp.inf, mode="drop")

    none = jnp.zeros(logits.shape, logits.dtype)
    seen = at(none, history.tokens, history.seen).set(1.0, mode="drop")
    share = logits.shape[0] // history.prompt_tokens.shape[0]
    of_prompt = (jnp.repeat(x, share, axis=0) for x in (history.prompt_tokens, history.prompt_seen))
    seen = at(seen, *of_prompt).set(1.0, mode="drop") > 0
    count = at(none, history.tokens, history.generated).add(1.0, mode="drop")
    penalty = repetition_penalty[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    logits = logits - presence_penalty[:, None] * (count > 0).astype(logits.dtype)
    return logits - frequency_penalty[:, None] * count


def check_rules(options: Iterable[str]) -> None:
    """Checks that each of the sampler's options is read.

    Raises:
        TypeError: An option is not.
    """
    read = {"temperature", "logprobs", *_read_by(changed_logits), *_read_by(_truncation)}
    if unread := [name for name in options if name not in read]:
        raise TypeError(
            f"no rule of the sampler reads {', '.join(unread)} of SamplingParams; make it a keyword-only parameter of "
            "changed_logits or _truncation in groupax/engine/sampling.py and apply it there, or name it in HOST of "
            "groupax/core/settings/sampling.py if the host reads it"
        )


check_rules(SAMPLER)


def _constrained_logits(
    logits: Float[Array, "B V"], settings: Options, history: History, allowed: Bool[Array, "B V"]
) -> Float[Array, "B V"]:
    """Returns the changed logits of allowed tokens; unchanged ones where no token that may follow is allowed."""
    changed = lax.cond(
        _are_changed(settings, history), lambda: _by(changed_logits, settings, logits, history), lambda: logits
    )
    # the end of a completion may be the only allowed token before `min_tokens`
    is_left = jnp.any(allowed & (changed > -jnp.inf), axis=-1, keepdims=True)
    return jnp.where(allowed, jnp.where(is_left, changed, logits), -jnp.inf)


def _are_changed(settings: Options, history: History) -> Bool[Array, ""]:
    """Returns whether an option of `changed_logits` is set in a row."""
    by_row = history.num_generated < settings["min_tokens"]
    for name in [each for each in _read_by(changed_logits) if each in SAMPLER and each != "min_tokens"]:
        is_set = settings[name] != (SAMPLER[name] or 0)
        by_row |= is_set if is_set.ndim == 1 else jnp.any(is_set, axis=-1)
    return jnp.any(by_row)


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
