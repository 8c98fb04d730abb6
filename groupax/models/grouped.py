"""Completions behind shared prompts, without padding: each prompt is computed once for all rows that continue it.

All tokens lie one behind another, and everything but attention works on them as they lie. Attention sees rectangles, of
prompts and of tiles of rows (`groupax.training.buckets`): its queries, keys and values are taken there, its outputs
taken back.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from groupax.models.config import AttentionConfig, ModelConfig
from groupax.models.decoder import forward, head_weights, local_kv_heads
from groupax.models.execution import DIRECT, Execution
from groupax.models.experts import Routing
from groupax.models.fused_attention import attend, attend_with_prompt
from groupax.models.logprobs import token_logprobs
from groupax.models.lookup import lookup
from groupax.models.specs import Params
from groupax.models.split import gather_weight
from groupax.parallel.collectives import Axis, all_gather, all_gather_invariant, all_to_all, axis_size, local_slice
from groupax.parallel.mesh import REPLICATED, Layout
from groupax.parallel.pytree import pytree


@pytree
class RaggedBatch:
    """Tokens of prompts and of the rows behind them, and where attention finds them.

    Attributes:
        tokens, positions: the prompts' from the left, each without its last, and the rows' up to the right end;
            padding lies between.
        targets: what each of the last R tokens predicts; there is room for R of rows.
        prompts: the prompts as rectangle, each ending at the last column: where its tokens are, -1 for none.
        tiles: for one range of columns after another where the tokens of the rows are that reach into it, -1 for none;
            the longest row comes first.
        prompt_of: the prompt of each row of the first tile.
        slots: where in the prompts' and then the tiles' cells, laid in a row, each token is; -1 for padding.
    """

    tokens: Int[Any, "M"]
    positions: Int[Any, "M"]
    targets: Int[Any, "R"]
    prompts: Int[Any, "P S"]
    tiles: list[Int[Any, "_ _"]]
    prompt_of: Int[Any, "B"]
    slots: Int[Any, "M"]


def grouped_logprobs(
    config: ModelConfig,
    params: Params,
    ragged: RaggedBatch,
    temperature: float,
    execution: Execution = DIRECT,
    entropy_gradient: bool = True,
    layout: Layout = REPLICATED,
) -> tuple[Float[Array, "R"], Float[Array, "R"], list[Routing]]:
    """Log-probability of each of the rows' targets and entropy of its distribution, in nats, float32.

    Also where the routers of a mixture of experts sent all tokens, the prompts' and behind them the rows'; of devices
    that share the tokens (`local_tokens`), each has its own ones' routings.

    Args:
        config, params: the model.
        ragged: the tokens.
        temperature: divides the logits.
        execution: how it is computed.
        entropy_gradient: whether the entropy will be differentiated.
        layout: how the model is split, inside a shard_map. Over "tokens" devices share the tokens in all but attention,
            and the heads in attention (arXiv:2309.14509).
    """
    shared = layout.axis("tokens")
    starts = jnp.sum(ragged.prompts < 0, axis=1)
    sides = [ragged.prompts, *ragged.tiles]
    cells = jnp.concatenate([side.reshape(-1) for side in sides])
    ends = np.cumsum([side.size for side in sides])

    def attend_in_groups(attn: AttentionConfig, cache: None, q: Array, k: Array, v: Array) -> tuple[Array, None]:
        if shared is None:
            return attend_to_all(attn, q, k, v), cache
        q, k, v = _all_tokens(q, k, v, shared)
        M = ragged.tokens.shape[0]
        out = jnp.pad(attend_to_all(attn, q[:M], k[:M], v[:M]), ((0, q.shape[0] - M), (0, 0), (0, 0)))
        return all_to_all(out, shared, 0, 1), cache

    def attend_to_all(attn: AttentionConfig, q: Array, k: Array, v: Array) -> Array:
        def in_rectangles(x: Array) -> list[Array]:
            parts = jnp.split(gather_with_inverse(x, cells, ragged.slots), ends[:-1])
            return [part.reshape(*side.shape, *x.shape[1:]) for part, side in zip(parts, sides, strict=True)]

        (prompt_q, *row_q), (prompt_k, *row_k), (prompt_v, *row_v) = map(in_rectangles, (q, k, v))
        fused = execution.attention
        outs = [attend(prompt_q, prompt_k, prompt_v, starts, attn, fused)]
        for last, own_q in enumerate(row_q):
            B = own_q.shape[0]
            of = ragged.prompt_of[:B]
            own_k, own_v = (
                jnp.concatenate([x[:B] for x in of_tiles[: last + 1]], axis=1) for of_tiles in (row_k, row_v)
            )
            behind = lookup(prompt_k, of), lookup(prompt_v, of), starts[of]
            outs.append(attend_with_prompt(own_q, own_k, own_v, *behind, attn, fused))
        return gather_with_inverse(
            jnp.concatenate([out.reshape(-1, *q.shape[1:]) for out in outs]), ragged.slots, cells
        )

    tokens, positions = (local_tokens(x, layout) for x in (ragged.tokens, ragged.positions))
    hidden, _, routings = forward(
        config, params, tokens, positions, attend_in_groups, execution=execution, layout=layout
    )
    M, R = ragged.tokens.shape[0], ragged.targets.shape[0]
    of_rows = local_tokens(all_gather(hidden, shared, 0)[M - R : M], layout)
    head = gather_weight(layout, ("vocab", "embed"), head_weights(params))
    targets, vocabulary = local_tokens(ragged.targets, layout), layout.axis("vocab")
    logp, entropy = token_logprobs(
        of_rows,
        head,
        targets,
        temperature,
        entropy_gradient,
        config.logit_softcap,
        vocabulary,
        execution.chunk_logits,
    )
    return all_gather_invariant(logp, shared, 0)[:R], all_gather_invariant(entropy, shared, 0)[:R], routings


def local_tokens(x: Shaped[Array, "M ..."], layout: Layout) -> Shaped[Array, "m ..."]:
    """Of something that all devices have for each token, a device's part, filled up to parts of one size."""
    axis = layout.axis("tokens")
    if axis is None:
        return x
    unused = -x.shape[0] % axis_size(axis)
    return local_slice(jnp.pad(x, ((0, unused), *((0, 0),) * (x.ndim - 1))), axis, 0)


def _all_tokens(
    q: Float[Array, "m N H"], k: Float[Array, "m K H"], v: Float[Array, "m K H"], axis: Axis
) -> tuple[Float[Array, "M n H"], Float[Array, "M k H"], Float[Array, "M k H"]]:
    """All tokens' queries of a device's heads, and the keys and values that these use."""
    q = all_to_all(q, axis, 1, 0)
    if k.shape[1] % axis_size(axis) == 0:
        return q, all_to_all(k, axis, 1, 0), all_to_all(v, axis, 1, 0)
    k, v = (local_kv_heads(all_gather(x, axis, 0), q.shape[1], axis) for x in (k, v))
    return q, k, v


@jax.custom_vjp
def gather_with_inverse(x: Array, index: Array, inverse: Array) -> Array:
    """x[index], with zeros where the index is -1.

    Args:
        x: any number of items, the first dim.
        index: of an item for each place; no item is named twice.
        inverse: for each item its place among the places laid in a row, -1 for none; the backward pass takes by it,
            which is far cheaper than adding up.
    """
    del inverse
    return x.at[jnp.where(index < 0, x.shape[0], index)].get(mode="fill", fill_value=0)


def _gather_forward(x: Array, index: Array, inverse: Array) -> tuple[Array, tuple[Array, Array]]:
    return gather_with_inverse(x, index, inverse), (index, inverse)


def _gather_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, None, None]:
    index, inverse = saved
    # a sum of several tiles' gradients would be made anew for each item that is taken of it
    flat = jax.lax.optimization_barrier(gradient.reshape(index.size, *gradient.shape[index.ndim :]))
    return gather_with_inverse(flat, inverse, index.reshape(-1)), None, None


gather_with_inverse.defvjp(_gather_forward, _gather_backward)
