"""Completions behind shared prompts, without padding: each prompt is computed once for all rows that continue it.

All tokens lie one behind another, and everything but attention works on them as they lie. Attention sees rectangles:
its queries, keys and values are taken there and its outputs are taken back.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from groupax.config import Checkpointing
from groupax.models.attention import attend, attend_with_prompt
from groupax.models.config import ModelConfig
from groupax.models.decoder import head_weights, routed_forward
from groupax.models.experts import Routing
from groupax.models.logprobs import token_logprobs
from groupax.models.specs import Params
from groupax.pytree import pytree


@pytree
class Rectangle:
    """Rows that attend together.

    Attributes:
        cells: where among the rows' tokens each cell's token is, -1 for none; a row begins at its first column.
        prompt_of: each row's prompt.
    """

    cells: Int[Any, "B T"]
    prompt_of: Int[Any, "B"]


@pytree
class Ragged:
    """Tokens of prompts and of the rows behind them, and where attention finds them.

    Attributes:
        prompts, prompt_positions: the prompts' tokens, each prompt without its last, and their positions.
        prompt_cells: the prompts as rectangle, each ending at the last column: where its tokens are, -1 for none.
        prompt_slots: the cell of each of the prompts' tokens, -1 for padding.
        inputs, positions, targets: the rows' tokens, their positions, and what each predicts.
        rectangles: of rows; each row is in one of them.
        slots: the cell of each of the rows' tokens, where the rectangles' cells count on from one to the next.
    """

    prompts: Int[Any, "Q"]
    prompt_positions: Int[Any, "Q"]
    prompt_cells: Int[Any, "P S"]
    prompt_slots: Int[Any, "Q"]
    inputs: Int[Any, "R"]
    positions: Int[Any, "R"]
    targets: Int[Any, "R"]
    rectangles: list[Rectangle]
    slots: Int[Any, "R"]


def grouped_logprobs(
    config: ModelConfig,
    params: Params,
    ragged: Ragged,
    temperature: float,
    checkpointing: Checkpointing = "none",
    entropy_gradient: bool = True,
) -> tuple[Float[Array, "R"], Float[Array, "R"], list[Routing]]:
    """Log-probability of each of the rows' targets and entropy of its distribution, in nats, float32.

    Also where the routers of a mixture of experts sent all tokens, the prompts' and behind them the rows'.

    Args:
        config, params: the model.
        ragged: the tokens.
        temperature: divides the logits.
        checkpointing: what the backward pass recomputes.
        entropy_gradient: whether the entropy will be differentiated.
    """
    num_prompt_tokens = ragged.prompts.shape[0]
    starts = jnp.sum(ragged.prompt_cells < 0, axis=1)
    all_cells = jnp.concatenate([rectangle.cells.reshape(-1) for rectangle in ragged.rectangles])

    slots_in, before = [], 0
    for rectangle in ragged.rectangles:
        own = ragged.slots - before
        slots_in.append(jnp.where((own >= 0) & (own < rectangle.cells.size), own, -1))
        before += rectangle.cells.size

    def attend_in_groups(layer: int, q: Array, k: Array, v: Array) -> Array:
        of_prompts = [taken(x[:num_prompt_tokens], ragged.prompt_cells, ragged.prompt_slots) for x in (q, k, v)]
        prompt_q, prompt_k, prompt_v = of_prompts
        how = config.attention(layer)
        prompt_out = attend(prompt_q, prompt_k, prompt_v, starts, how)
        outs = []
        for rectangle, slots in zip(ragged.rectangles, slots_in, strict=True):
            row_q, row_k, row_v = (taken(x[num_prompt_tokens:], rectangle.cells, slots) for x in (q, k, v))
            of = rectangle.prompt_of
            out = attend_with_prompt(row_q, row_k, row_v, prompt_k[of], prompt_v[of], starts[of], how)
            outs.append(out.reshape(-1, *q.shape[1:]))
        row_out = taken(jnp.concatenate(outs), ragged.slots, all_cells)
        prompt_out = taken(prompt_out.reshape(-1, *q.shape[1:]), ragged.prompt_slots, ragged.prompt_cells.reshape(-1))
        return jnp.concatenate([prompt_out, row_out])

    tokens = jnp.concatenate([ragged.prompts, ragged.inputs])
    positions = jnp.concatenate([ragged.prompt_positions, ragged.positions])
    hidden, routings = routed_forward(config, params, tokens, positions, attend_in_groups, checkpointing)
    hidden, head = hidden[num_prompt_tokens:], head_weights(params)
    logp, entropy = token_logprobs(hidden, head, ragged.targets, temperature, entropy_gradient, config.logit_softcap)
    return logp, entropy, routings


@jax.custom_vjp
def taken(x: Array, index: Array, inverse: Array) -> Array:
    """x[index], with zeros where the index is -1.

    Args:
        x: any number of items, the first dim.
        index: of an item for each place; no item is named twice.
        inverse: for each item its place among the places laid in a row, -1 for none; the backward pass takes by it,
            which is far cheaper than adding up.
    """
    del inverse
    return x.at[jnp.where(index < 0, x.shape[0], index)].get(mode="fill", fill_value=0)


def _taken_forward(x: Array, index: Array, inverse: Array) -> tuple[Array, tuple[Array, Array]]:
    return taken(x, index, inverse), (index, inverse)


def _taken_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, None, None]:
    index, inverse = saved
    flat = gradient.reshape(index.size, *gradient.shape[index.ndim :])
    return taken(flat, inverse, index.reshape(-1)), None, None


taken.defvjp(_taken_forward, _taken_backward)
