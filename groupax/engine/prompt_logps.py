"""Log-probs of the tokens of prompts, computed apart from decoding."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from groupax.engine.cache import ROWS, layer_caches, num_cached_heads, num_recurrent
from groupax.engine.core import EngineCore
from groupax.engine.prefill import Piece
from groupax.engine.sampling import TokenLogps, token_logps
from groupax.models.adapted import select_adapters
from groupax.models.config import ModelConfig
from groupax.models.decoder import forward, head_weights
from groupax.models.layers import vocabulary_logits
from groupax.models.params import gather_weight, layout_of, partition_specs
from groupax.models.recurrent import empty_state
from groupax.models.specs import Params
from groupax.parallel.collectives import all_gather
from groupax.parallel.mesh import DATA, Layout, num_data_shards
from groupax.settings.sampling import MAX_LOGPROBS

PIECE = 128  # columns that are computed at a time
BATCH_TOKENS = 4096  # of a call on each device, between two of which decoding continues


@dataclass(frozen=True)
class PromptLogps:
    """Log-probs of a prompt's tokens after the first one, under softmax(logits / temperature).

    Attributes:
        logps: Of each token.
        ranks: Rank of each token among all of the vocabulary, from 1.
        alternatives: The likeliest tokens in place of each, with their log-probs.
    """

    logps: list[float]
    ranks: list[int]
    alternatives: list[list[tuple[int, float]]]


def num_columns(length: int) -> int:
    """Returns the number of columns of the program for a prompt of a length: there are few programs."""
    return max(PIECE, 1 << (length - 1).bit_length())


def prompts_per_call(engine: EngineCore, columns: int) -> int:
    """Returns the number of prompts that a program computes."""
    return max(1, BATCH_TOKENS // columns) * num_data_shards(engine.mesh)


def compile_for(engine: EngineCore, length: int) -> None:
    """Compiles the program for prompts of up to a length; a call of `score` finds it. Safe in any thread."""
    S = num_columns(length)
    of_rows = NamedSharding(engine.mesh, ROWS)
    P = prompts_per_call(engine, S)
    tokens = jax.ShapeDtypeStruct((P, S), jnp.int32, sharding=of_rows)
    lengths = jax.ShapeDtypeStruct((P,), jnp.int32, sharding=of_rows)
    replicated = NamedSharding(engine.mesh, PartitionSpec())
    temperature = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated)
    adapter = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated) if engine.adapters else None
    _score.trace(engine.params, tokens, lengths, temperature, adapter, **_static(engine)).lower().compile()


def score(
    engine: EngineCore,
    prompts: list[np.ndarray],
    temperature: float,
    num_alternatives: int,
    adapter: str | None = None,
) -> list[PromptLogps]:
    """Returns the log-probs of prompts. No other program of the engine may run meanwhile.

    Args:
        engine: Has the weights.
        prompts: Token ids of prompts, at most `prompts_per_call` of them.
        temperature: Divisor of the logits; 0 counts as 1.
        num_alternatives: Number of alternatives to return, at most `MAX_LOGPROBS`.
        adapter: Name of the engine's adapter; None for the base.
    """
    S = num_columns(max(map(len, prompts)))
    tokens = np.zeros((prompts_per_call(engine, S), S), np.int32)
    lengths = np.zeros(len(tokens), np.int32)
    for index, prompt in enumerate(prompts):
        tokens[index, : len(prompt)], lengths[index] = prompt, len(prompt)
    of_rows, replicated = NamedSharding(engine.mesh, ROWS), NamedSharding(engine.mesh, PartitionSpec())
    given = jax.device_put((tokens, lengths), of_rows)
    divisor = jax.device_put(np.float32(temperature or 1.0), replicated)
    index = jax.device_put(np.int32(engine.adapter_index(adapter)), replicated) if engine.adapters else None
    found = jax.device_get(_score(engine.params, *given, divisor, index, **_static(engine)))
    return [_on_host(found, index, len(prompt) - 1, num_alternatives) for index, prompt in enumerate(prompts)]


def _static(engine: EngineCore) -> dict[str, Any]:
    return {"config": engine.config, "mesh": engine.mesh, "kv_dtype": jnp.dtype(engine.kv_dtype)}


def _on_host(found: TokenLogps, row: int, num: int, num_alternatives: int) -> PromptLogps:
    tokens, logps = (x[row, :num, :num_alternatives].tolist() for x in (found.alternatives, found.alternative_logps))
    pairs = [list(zip(*both, strict=True)) for both in zip(tokens, logps, strict=True)]
    return PromptLogps(found.logp[row, :num].tolist(), found.rank[row, :num].tolist(), pairs)


@partial(jax.jit, static_argnames=("config", "mesh", "kv_dtype"))
def _score(
    params: Params,
    tokens: Int[Array, "P S"],
    lengths: Int[Array, "P"],
    temperature: Float[Array, ""],
    adapter: Int[Array, ""] | None = None,
    *,
    config: ModelConfig,
    mesh: Mesh,
    kv_dtype: Any,
) -> TokenLogps:
    """Computes the log-probs of right-padded prompts, each by itself, in pieces of columns."""
    layout = layout_of(config, mesh)

    def local(params: Params, tokens: Array, lengths: Array, temperature: Array, adapter: Array | None) -> TokenLogps:
        params = select_adapters(params, None if adapter is None else jnp.full(PIECE, adapter))
        return lax.map(
            lambda row: _score_row(config, params, row[0], row[1], temperature, kv_dtype, mesh.shape["tp"], layout),
            (tokens, lengths),
        )

    of_adapter = None if adapter is None else PartitionSpec()
    in_specs = (partition_specs(config, mesh, params), ROWS, ROWS, PartitionSpec(), of_adapter)
    program = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=ROWS, check_vma=False)
    return program(params, tokens, lengths, temperature, adapter)


def _score_row(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "S"],
    length: Int[Array, ""],
    temperature: Float[Array, ""],
    kv_dtype: Any,
    num_shards: int,
    layout: Layout,
) -> TokenLogps:
    S, K, A = len(tokens), num_cached_heads(config, num_shards) // num_shards, min(MAX_LOGPROBS, config.vocab_size)
    H = config.head_dim
    head = gather_weight(layout, ("vocab", "embed"), head_weights(params))
    columns, targets = jnp.arange(S)[None, :], jnp.concatenate([tokens[1:], jnp.zeros(1, tokens.dtype)])
    kept = [(jnp.zeros((1, K, H, S), kv_dtype), jnp.zeros((1, K, S, H), kv_dtype)) for _ in config.attention_layers]
    caches = layer_caches(config, kept, [empty_state(config, 1) for _ in range(num_recurrent(config))])
    empty = TokenLogps(
        jnp.zeros(S), jnp.zeros(S, jnp.int32), jnp.zeros((S, A), jnp.int32), jnp.zeros((S, A), jnp.float32)
    )
    num_pieces = (length + PIECE - 1) // PIECE
    if layout.axes:
        num_pieces = lax.pmax(num_pieces, DATA)

    def compute(index: Array, carry: tuple[Any, TokenLogps]) -> tuple[Any, TokenLogps]:
        caches, found = carry
        first = index * PIECE
        own = first + jnp.arange(PIECE)
        distance = (own[:, None] - columns)[None]
        begin = jnp.zeros(1, jnp.int32)
        attend = Piece(jnp.int32(0), first, begin, distance >= 0, distance, own[None, :, None], None, False)
        piece = lax.dynamic_slice_in_dim(tokens, first, PIECE)
        hidden, caches, _ = forward(config, params, piece, own, attend, caches, layout=layout, recur=attend.recur)
        logits = all_gather(vocabulary_logits(hidden, head, config.logit_softcap), layout.axis("vocab"), 1)
        target = lax.dynamic_slice_in_dim(targets, first, PIECE)
        new = token_logps(logits / temperature, target)
        return caches, jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, first, axis=0), found, new)

    return lax.fori_loop(0, num_pieces, compute, (caches, empty))[1]
