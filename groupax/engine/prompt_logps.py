"""Log-probs of the tokens of prompts, computed apart from decoding, a few columns at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from groupax.core.settings.sampling import MAX_LOGPROBS
from groupax.engine.cache import ROWS, layer_caches, num_cached_heads, num_recurrent, pspec_of
from groupax.engine.core import EngineCore
from groupax.engine.prefill import Piece
from groupax.engine.sampling import TokenLogps, token_logps
from groupax.models.adapted import select_adapters
from groupax.models.config import ModelConfig
from groupax.models.decoder import PassOptions, forward, head_weights
from groupax.models.layers import vocabulary_logits
from groupax.models.params import gather_weight, layout_of, partition_specs
from groupax.models.recurrent import empty_state
from groupax.models.specs import Params
from groupax.parallel.collectives import all_gather
from groupax.parallel.mesh import num_data_shards

PIECE = 128  # columns that are computed at a time


@dataclass(frozen=True)
class PromptLogps:
    """Log-probs of a prompt's tokens after the first one, under softmax(logits / temperature)."""

    logps: list[float]  # of each token
    ranks: list[int]  # rank of each token among all of the vocabulary, from 1
    alternatives: list[list[tuple[int, float]]]  # the likeliest tokens in place of each, with their log-probs


def num_columns(length: int) -> int:
    """Returns the number of columns of the program for a prompt of a length: there are few programs."""
    return max(PIECE, 1 << (length - 1).bit_length())


def compile_for(engine: EngineCore, length: int) -> None:
    """Compiles the programs for prompts of up to a length; a `Scoring` finds them. Safe in any thread."""
    S, mesh = num_columns(length), engine.mesh
    rows, replicated = NamedSharding(mesh, ROWS), NamedSharding(mesh, PartitionSpec())
    make = _maker(engine.config, mesh, S, jnp.dtype(engine.kv_dtype))
    make.trace().lower().compile()
    found = jax.tree.map(lambda x: x.update(sharding=NamedSharding(mesh, pspec_of(x))), jax.eval_shape(make))
    tokens = jax.ShapeDtypeStruct((num_data_shards(mesh), S), jnp.int32, sharding=rows)
    temperature = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated)
    number = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    adapter = number if engine.adapters else None
    static = {"config": engine.config, "mesh": mesh}
    _advance.trace(engine.params, found, tokens, temperature, adapter, (number, number), **static).lower().compile()


class Scoring:
    """The log-probs of prompts, one on each device, while they are computed.

    Args:
        engine: Has the weights, of which those that it has now are used to the end.
        prompts: Token ids of prompts, at most one for each shard of the data axes.
        temperature: Divisor of the logits; 0 counts as 1.
        adapter: Name of the engine's adapter; None for the base.
    """

    def __init__(
        self, engine: EngineCore, prompts: list[np.ndarray], temperature: float, adapter: str | None = None
    ) -> None:
        self._static, self._params = {"config": engine.config, "mesh": engine.mesh}, engine.params
        self._lengths = [len(prompt) for prompt in prompts]
        S = num_columns(max(self._lengths))
        tokens = np.zeros((num_data_shards(engine.mesh), S), np.int32)
        for row, prompt in zip(tokens, prompts, strict=False):
            row[: len(prompt)] = prompt
        replicated = self._replicated = NamedSharding(engine.mesh, PartitionSpec())
        self._tokens = jax.device_put(tokens, NamedSharding(engine.mesh, ROWS))
        self._temperature = jax.device_put(np.float32(temperature or 1.0), replicated)
        index = np.int32(engine.adapter_index(adapter)) if engine.adapters else None
        self._adapter = None if index is None else jax.device_put(index, replicated)
        self._found = _maker(engine.config, engine.mesh, S, jnp.dtype(engine.kv_dtype))()
        self._next, self._end = 0, -(-max(self._lengths) // PIECE)

    @property
    def is_done(self) -> bool:
        """True when all columns are computed."""
        return self._next == self._end

    def advance(self, num_pieces: int) -> None:
        """Computes the next pieces of columns. No other program of the engine may run meanwhile."""
        end = min(self._next + num_pieces, self._end)
        pieces = jax.device_put((np.int32(self._next), np.int32(end)), self._replicated)
        found = _advance(
            self._params, self._found, self._tokens, self._temperature, self._adapter, pieces, **self._static
        )
        self._found = jax.block_until_ready(found)
        self._next = end

    def results(self, num_alternatives: int) -> list[PromptLogps]:
        """Returns the log-probs of each prompt, with at most `MAX_LOGPROBS` alternatives for each token."""
        found = jax.device_get(self._found[1])
        results = []
        for row, length in enumerate(self._lengths):
            logps, ranks = found.logp[row, : length - 1].tolist(), found.rank[row, : length - 1].tolist()
            tokens = found.alternatives[row, : length - 1, :num_alternatives].tolist()
            values = found.alternative_logps[row, : length - 1, :num_alternatives].tolist()
            pairs = [list(zip(*both, strict=True)) for both in zip(tokens, values, strict=True)]
            results.append(PromptLogps(logps, ranks, pairs))
        return results


@lru_cache(maxsize=64)
def _maker(config: ModelConfig, mesh: Mesh, S: int, kv_dtype: Any) -> Callable[[], tuple[list[Any], TokenLogps]]:
    """Returns a jitted function that creates empty caches and log-probs of one row per device."""
    K, H, A = num_cached_heads(config, mesh.shape["tp"]), config.head_dim, min(MAX_LOGPROBS, config.vocab_size)
    P = num_data_shards(mesh)

    def make() -> tuple[list[Any], TokenLogps]:
        kept = [(jnp.zeros((P, K, H, S), kv_dtype), jnp.zeros((P, K, S, H), kv_dtype)) for _ in config.attention_layers]
        caches = layer_caches(config, kept, [empty_state(config, P) for _ in range(num_recurrent(config))])
        alternatives = jnp.zeros((P, S, A), jnp.int32), jnp.zeros((P, S, A), jnp.float32)
        return caches, TokenLogps(jnp.zeros((P, S)), jnp.zeros((P, S), jnp.int32), *alternatives)

    shardings = jax.tree.map(lambda x: NamedSharding(mesh, pspec_of(x)), jax.eval_shape(make))
    return jax.jit(make, out_shardings=shardings)


@partial(jax.jit, static_argnames=("config", "mesh"), donate_argnums=1)
def _advance(
    params: Params,
    found: tuple[list[Any], TokenLogps],
    tokens: Int[Array, "P S"],
    temperature: Float[Array, ""],
    adapter: Int[Array, ""] | None,
    pieces: tuple[Int[Array, ""], Int[Array, ""]],
    *,
    config: ModelConfig,
    mesh: Mesh,
) -> tuple[list[Any], TokenLogps]:
    """Computes the log-probs of right-padded prompts, one on each device, in pieces from one up to another."""
    layout = layout_of(config, mesh)

    def local(
        params: Params, found: Any, tokens: Array, temperature: Array, adapter: Any, pieces: tuple[Array, Array]
    ) -> Any:
        params = select_adapters(params, None if adapter is None else jnp.full(PIECE, adapter))
        head = gather_weight(layout, ("vocab", "embed"), head_weights(params))
        [row] = tokens
        columns, targets = jnp.arange(len(row))[None, :], jnp.concatenate([row[1:], jnp.zeros(1, row.dtype)])

        def compute(index: Array, found: Any) -> Any:
            caches, logps = found
            begin = index * PIECE
            own = begin + jnp.arange(PIECE)
            distance = (own[:, None] - columns)[None]
            attend = Piece(
                jnp.int32(0), begin, jnp.zeros(1, jnp.int32), distance >= 0, distance, own[None, :, None], None, False
            )
            piece = lax.dynamic_slice_in_dim(row, begin, PIECE)
            hidden, caches, _ = forward(
                config, params, piece, own, attend, caches, PassOptions(layout=layout, recur=attend.recur)
            )
            logits = all_gather(vocabulary_logits(hidden, head, config.logit_softcap), layout.axis("vocab"), 1)
            new = token_logps(logits / temperature, lax.dynamic_slice_in_dim(targets, begin, PIECE))
            return caches, jax.tree.map(
                lambda x, y: lax.dynamic_update_slice_in_dim(x, y[None], begin, axis=1), logps, new
            )

        return lax.fori_loop(*pieces, compute, found)

    one = PartitionSpec()
    of_found = jax.tree.map(pspec_of, found)
    in_specs = (partition_specs(config, mesh, params), of_found, ROWS, one, None if adapter is None else one, one)
    program = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=of_found, check_vma=False)
    return program(params, found, tokens, temperature, adapter, pieces)
