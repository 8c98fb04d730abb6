"""Completions behind shared prompts: each prompt is computed once for all rows that continue it."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from groupax.models.attention import attend, attend_with_prompt, causal_from
from groupax.models.config import ModelConfig
from groupax.models.decoder import Checkpointing, forward, head_weights
from groupax.models.logprobs import token_logprobs
from groupax.models.specs import Params


def grouped_logprobs(
    config: ModelConfig,
    params: Params,
    prompts: Int[Array, "P S"],
    prompt_starts: Int[Array, "P"],
    prompt_of: Int[Array, "B"],
    inputs: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    temperature: float,
    checkpointing: Checkpointing = "none",
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-probability of each target and entropy of its distribution, in nats, float32.

    Args:
        config, params: the model.
        prompts: left-padded; S is a multiple of 8.
        prompt_starts: where each prompt's tokens begin; S for a prompt without tokens.
        prompt_of: each row's prompt.
        inputs: each row's tokens behind the prompt.
        targets: what each input predicts.
        temperature: divides the logits.
        checkpointing: what the backward pass recomputes.
    """
    P, S = prompts.shape
    B, T = inputs.shape
    starts = prompt_starts[prompt_of]
    prompt_positions = jnp.maximum(jnp.arange(S)[None, :] - prompt_starts[:, None], 0)
    row_positions = (S - starts)[:, None] + jnp.arange(T)[None, :]
    prompt_visible = causal_from(prompt_starts, S)

    def attend_in_groups(_: int, q: Array, k: Array, v: Array) -> Array:
        (prompt_q, row_q), (prompt_k, row_k), (prompt_v, row_v) = (_split(x, (P, S), (B, T)) for x in (q, k, v))
        prompt_out = attend(prompt_q, prompt_k, prompt_v, prompt_visible)
        row_out = attend_with_prompt(row_q, row_k, row_v, prompt_k[prompt_of], prompt_v[prompt_of], starts)
        return jnp.concatenate([prompt_out.reshape(P * S, *q.shape[1:]), row_out.reshape(B * T, *q.shape[1:])])

    tokens = jnp.concatenate([prompts.reshape(-1), inputs.reshape(-1)])
    positions = jnp.concatenate([prompt_positions.reshape(-1), row_positions.reshape(-1)])
    hidden = forward(config, params, tokens, positions, attend_in_groups, checkpointing)[P * S :]
    logp, entropy = token_logprobs(hidden, head_weights(params), targets.reshape(-1), temperature)
    return logp.reshape(B, T), entropy.reshape(B, T)


def _split(x: Array, first: tuple[int, int], second: tuple[int, int]) -> tuple[Array, Array]:
    size = first[0] * first[1]
    return x[:size].reshape(*first, *x.shape[1:]), x[size:].reshape(*second, *x.shape[1:])
