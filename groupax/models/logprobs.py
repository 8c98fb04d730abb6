"""Log-probs of given tokens, and those of completions packed after shared prompts, each computed once for all its rows.

`token_logprobs` never has a [tokens, vocabulary] array, forward or backward. The forward pass takes the tokens in
chunks, each against the full vocabulary. The backward pass takes the vocabulary in blocks, each for all tokens, so that
the head's gradient is written once; it recomputes a block's logits from the hidden states, and their softmax from the
saved log-sum-exp of each token.

`grouped_logprobs` concatenates all tokens without padding, and everything except attention works on that flat list.
Attention needs rectangles: those of the prompts and the query tiles of the rows (`training.packing`). Queries, keys and
values are gathered into them, and the outputs are gathered back.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from groupax.models.attention import Prompts, attend_by_heads, local_tokens
from groupax.models.config import AttentionConfig, ModelConfig
from groupax.models.decoder import ImageInputs, PassOptions, forward, head_weights
from groupax.models.execution import CPU_LOGITS, DIRECT, Execution
from groupax.models.experts import Routing
from groupax.models.kernels.fused_attention import attend, attend_with_prompt
from groupax.models.layers import gather_with_inverse, lookup, softcapped
from groupax.models.matmul import matmul, matmul_nt
from groupax.models.params import gather_weight
from groupax.models.recurrent import Recurrence, State, empty_state
from groupax.models.specs import Params
from groupax.parallel.collectives import Axis, all_gather, all_gather_invariant, axis_index, psum_grad
from groupax.parallel.mesh import REPLICATED, Layout
from groupax.parallel.pytree import pytree

# Fewest tokens of a chunk and fewest words of a block: smaller matmuls are slow for their size.
MIN_CHUNK_TOKENS = 64
MIN_BLOCK_WORDS = 512
# The number of words of a block is a multiple of this.
BLOCK_MULTIPLE = 64


def token_logprobs(
    hidden: Float[Array, "M D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "M"],
    temperature: float,
    entropy_gradient: bool = True,
    softcap: float | None = None,
    axis: Axis = None,
    chunk_logits: int = CPU_LOGITS,
) -> tuple[Float[Array, "M"], Float[Array, "M"]]:
    """Computes log softmax(logits / temperature)[target] and the entropy of that distribution, in nats, float32.

    Args:
        hidden: Hidden states after the final norm.
        temperature: Divisor of the logits.
        entropy_gradient: Whether the entropy will be differentiated; if not, its gradient is taken to be zero.
        softcap: Logits are softcap tanh(hidden headᵀ / softcap); None leaves them at hidden headᵀ.
        axis: Mesh axis, inside a shard_map, over which the vocabulary is sharded.
        chunk_logits: Number of logits that are computed at a time.
    """
    if axis is not None:
        hidden, targets = psum_grad(hidden, axis), targets - axis_index(axis) * head.shape[0]
    return _token_logprobs(hidden, head, targets, _Logits(temperature, softcap, axis, chunk_logits), entropy_gradient)


@dataclass(frozen=True)
class _Logits:
    """The map from products to logits, softcap tanh(product / softcap) / temperature, of each device's words."""

    temperature: float
    softcap: float | None
    axis: Axis
    chunk_logits: int

    def compute(self, hidden: Array, head: Array) -> Array:
        return softcapped(matmul_nt(hidden, head), self.softcap) * self.inverse_temperature

    def slope(self, logits: Array) -> Array | np.float32:
        """Returns d logits / d product."""
        if self.softcap is None:
            return self.inverse_temperature
        tanh = logits * np.float32(self.temperature / self.softcap)
        return (1.0 - jnp.square(tanh)) * self.inverse_temperature

    @property
    def inverse_temperature(self) -> np.float32:
        return np.float32(1.0) / np.float32(self.temperature)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _token_logprobs(hidden: Array, head: Array, targets: Array, kind: _Logits, _: bool) -> tuple[Array, Array]:
    logp, entropy, _log_sum = _forward(hidden, head, targets, kind)
    return logp, entropy


def _forward(hidden: Array, head: Array, targets: Array, kind: _Logits) -> tuple[Array, Array, Array]:
    """Returns log-probs, entropies, and each token's log-sum-exp of the logits."""
    M, V = hidden.shape[0], head.shape[0]
    num_chunks = max(1, -(-M // max(MIN_CHUNK_TOKENS, kind.chunk_logits // V)))
    chunk = -(-M // num_chunks)
    pad = num_chunks * chunk - M

    def chunk_logprobs(xs: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        hidden, targets = xs
        logits = kind.compute(hidden, head)
        highest = jnp.max(logits, axis=-1, keepdims=True)
        highest = highest if kind.axis is None else lax.pmax(highest, kind.axis)
        logits = logits - highest
        exps = jnp.exp(logits)
        total, weighted = jnp.sum(exps, axis=-1), jnp.sum(exps * logits, axis=-1)
        target_logits = _target_logits(logits, targets, V, kind.axis)
        if kind.axis is not None:
            total, weighted, target_logits = lax.psum((total, weighted, target_logits), kind.axis)
        log_total = jnp.log(total)
        entropy = log_total - weighted / total
        return target_logits - log_total, entropy, log_total + highest[:, 0]

    if num_chunks == 1:
        return chunk_logprobs((hidden, targets))
    hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(num_chunks, chunk, -1)
    targets = jnp.pad(targets, (0, pad)).reshape(num_chunks, chunk)
    logp, entropy, log_sum = lax.map(chunk_logprobs, (hidden, targets))
    return logp.reshape(-1)[:M], entropy.reshape(-1)[:M], log_sum.reshape(-1)[:M]


def _target_logits(logits: Array, targets: Array, V: int, axis: Axis) -> Array:
    """Returns each token's logit of its target; 0 for targets that are other devices' words."""
    if axis is None:
        return jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    is_own = (targets >= 0) & (targets < V)
    found = jnp.take_along_axis(logits, jnp.where(is_own, targets, 0)[:, None], axis=-1)[:, 0]
    return jnp.where(is_own, found, 0.0)


def _forward_with_residuals(
    hidden: Array, head: Array, targets: Array, kind: _Logits, _: bool
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    logp, entropy, log_sum = _forward(hidden, head, targets, kind)
    return (logp, entropy), (hidden, head, targets, entropy, log_sum)


def _backward(
    kind: _Logits, entropy_gradient: bool, saved: tuple[Array, ...], cotangents: tuple[Array, Array]
) -> tuple[Array, Array, None]:
    """Computes the gradients of hidden states and head, block by block of the vocabulary.

    With p a token's distribution and H its entropy, d logp / d logit = [target] - p and
    d H / d logit = -p (log p + H).
    """
    hidden, head, targets, entropy, log_sum = saved
    d_logp, d_entropy = (x[:, None] for x in cotangents)
    M, V = hidden.shape[0], head.shape[0]
    num_blocks = -(-V // max(MIN_BLOCK_WORDS, kind.chunk_logits // M))
    block = min(V, -(-V // num_blocks // BLOCK_MULTIPLE) * BLOCK_MULTIPLE)

    def add_block(index: Array, grads: tuple[Array, Array]) -> tuple[Array, Array]:
        d_hidden, d_head = grads
        first = jnp.minimum(index * block, V - block)  # the last block starts earlier and only its new words count
        words = first + jnp.arange(block)
        block_head = lax.dynamic_slice_in_dim(head, first, block)
        logits = kind.compute(hidden, block_head)
        logp = logits - log_sum[:, None]
        p = jnp.exp(logp)
        gradient = jnp.where(targets[:, None] == words[None, :], d_logp, 0.0) - d_logp * p
        if entropy_gradient:
            gradient = gradient - d_entropy * p * (logp + entropy[:, None])
        gradient = jnp.where(words[None, :] >= index * block, gradient * kind.slope(logits), 0.0).astype(hidden.dtype)
        d_hidden = d_hidden + matmul(gradient, block_head)
        d_block = matmul(gradient.T, hidden) + lax.dynamic_slice_in_dim(d_head, first, block)
        return d_hidden, lax.dynamic_update_slice_in_dim(d_head, d_block, first, 0)

    start = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(head.shape, jnp.float32)
    d_hidden, d_head = lax.fori_loop(0, -(-V // block), add_block, start)
    return d_hidden.astype(hidden.dtype), d_head.astype(head.dtype), None


_token_logprobs.defvjp(_forward_with_residuals, _backward)


@pytree
class RaggedImages:
    """The tokens of a `RaggedBatch` that stand for features of images.

    Attributes:
        feature_index: Index of each token's feature; -1 for text.
        blocks: Image of each token, of a model that sees whole images (`vision.placement.image_blocks`); None for
            others.
    """

    feature_index: Int[Any, "M"]
    blocks: Int[Any, "M"] | None = None


@pytree
class RaggedBatch:
    """The packed tokens of prompts and rows, and where attention finds them.

    Attributes:
        tokens: The prompts' tokens from the left, each prompt without its last token, and the rows' up to the right
            end; padding is in between.
        positions: Position of each token in its sequence, or three coordinates of it.
        targets: Next token of each of the last R tokens, which is the capacity for row tokens.
        prompts: Index of each token in a rectangle of prompts that end at the last column; -1 where there is none.
        tiles: Indices of the rows' tokens, one rectangle per query tile, longest row first; -1 where there is none.
        prompt_of: Prompt of each row of the first tile.
        slots: Index of each token in the concatenated cells of the prompts and tiles; -1 for padding.
        images: Tokens that stand for features of images; None if all tokens are text.
        experts: Experts that were recorded for each token (see `decoder.forward`); None if none were.
    """

    tokens: Int[Any, "M"]
    positions: Int[Any, "M"] | Int[Any, "M 3"]
    targets: Int[Any, "R"]
    prompts: Int[Any, "P S"]
    tiles: list[Int[Any, "_ _"]]
    prompt_of: Int[Any, "B"]
    slots: Int[Any, "M"]
    images: RaggedImages | None = None
    experts: Int[Any, "M LA"] | None = None


def grouped_logprobs(
    config: ModelConfig,
    params: Params,
    ragged: RaggedBatch,
    temperature: float,
    execution: Execution = DIRECT,
    entropy_gradient: bool = True,
    layout: Layout = REPLICATED,
    features: Float[Array, "levels F D"] | None = None,
) -> tuple[Float[Array, "R"], Float[Array, "R"], list[Routing]]:
    """Computes the log-prob of each row target and the entropy of its distribution, in nats, float32.

    Also returns the routings of each layer with experts, of the prompts' tokens and then the rows'. If devices share
    the tokens (`local_tokens`), each returns those of its own tokens.

    Args:
        temperature: Divisor of the logits.
        execution: Execution settings.
        entropy_gradient: Whether the entropy will be differentiated.
        layout: Sharding of the model, inside a shard_map. Along "tokens", devices share the tokens everywhere except
            in attention, where they share the heads (arXiv:2309.14509).
        features: Features of images that the packed tokens stand for; None if all tokens are text.
    """
    shared = layout.axis("tokens")
    tokens, positions = (local_tokens(x, layout) for x in (ragged.tokens, ragged.positions))
    rectangles = _Rectangles.of(config, ragged, execution, layout)
    images = None
    if ragged.images is not None:
        assert features is not None, "some tokens stand for features"
        images = ImageInputs(features, local_tokens(ragged.images.feature_index, layout))
    recorded = None if ragged.experts is None else local_tokens(ragged.experts, layout)
    positions = positions if positions.ndim == 1 else positions.T
    options = PassOptions(execution, layout, images, recorded, rectangles.recur)
    hidden, _, routings = forward(config, params, tokens, positions, rectangles.attend, options=options)
    M, R = ragged.tokens.shape[0], ragged.targets.shape[0]
    logp, entropy = token_logprobs(
        local_tokens(all_gather(hidden, shared, 0)[M - R : M], layout),
        gather_weight(layout, ("vocab", "embed"), head_weights(params), execution.reduce_dtype),
        local_tokens(ragged.targets, layout),
        temperature,
        entropy_gradient,
        config.logit_softcap,
        layout.axis("vocab"),
        execution.chunk_logits,
    )
    return all_gather_invariant(logp, shared, 0)[:R], all_gather_invariant(entropy, shared, 0)[:R], routings


class _Rectangles(NamedTuple):
    """The rectangles that attention works on, first the prompts' and then those of the query tiles.

    Attributes:
        cells: Index of the token in each cell of all rectangles; -1 where there is none.
        shapes: Rows and columns of each rectangle.
        starts: First column of each prompt.
    """

    config: ModelConfig
    ragged: RaggedBatch
    execution: Execution
    layout: Layout
    cells: Int[Array, "C"]
    shapes: list[tuple[int, ...]]
    starts: Int[Array, "P"]

    @classmethod
    def of(cls, config: ModelConfig, ragged: RaggedBatch, execution: Execution, layout: Layout) -> "_Rectangles":
        indices = [ragged.prompts, *ragged.tiles]
        cells, shapes = jnp.concatenate([each.reshape(-1) for each in indices]), [each.shape for each in indices]
        return cls(config, ragged, execution, layout, cells, shapes, jnp.sum(ragged.prompts < 0, axis=1))

    def split(self, x: Array) -> list[Array]:
        """Gathers a value of each token into the rectangles."""
        ends = np.cumsum([rows * columns for rows, columns in self.shapes])
        flat = jnp.split(gather_with_inverse(x, self.cells, self.ragged.slots), ends[:-1])
        return [cells.reshape(*shape, *x.shape[1:]) for cells, shape in zip(flat, self.shapes, strict=True)]

    def join(self, outs: list[Array], rank: int) -> Array:
        """Gathers what the rectangles have, in arrays of `rank` further dims, into one value of each token."""
        flat = jnp.concatenate([out.reshape(-1, *out.shape[out.ndim - rank :]) for out in outs])
        return gather_with_inverse(flat, self.ragged.slots, self.cells)

    def attend(
        self,
        attn: AttentionConfig,
        cache: None,
        q: Float[Array, "m N H"],
        k: Float[Array, "m K H"],
        v: Float[Array, "m K H"],
        sinks: Float[Array, "N"] | None = None,
    ) -> tuple[Float[Array, "m N H"], None]:
        """Computes a layer's attention; if devices share the tokens, each computes some heads."""
        num_tokens = self.ragged.tokens.shape[0]
        return attend_by_heads(partial(self._attend, attn), num_tokens, self.layout, q, k, v, sinks), cache

    def _attend(self, attn: AttentionConfig, q: Array, k: Array, v: Array, sinks: Array | None) -> Array:
        (prompt_q, *tile_q), (prompt_k, *tile_k), (prompt_v, *tile_v) = (self.split(x) for x in (q, k, v))
        fused, images, blocks = self.execution.attention, self.ragged.images, None
        if images is not None and images.blocks is not None:
            blocks = jnp.where(self.ragged.prompts < 0, -1, jnp.asarray(images.blocks)[self.ragged.prompts])
        outs = [attend(prompt_q, prompt_k, prompt_v, self.starts, attn, fused, blocks, sinks)]
        for last, own_q in enumerate(tile_q):
            B = own_q.shape[0]
            prompt_of = self.ragged.prompt_of[:B]
            # a tile's queries see the columns of their rows in this tile and in those before it
            own_k, own_v = (jnp.concatenate([x[:B] for x in tiles[: last + 1]], axis=1) for tiles in (tile_k, tile_v))
            prompts = Prompts(lookup(prompt_k, prompt_of), lookup(prompt_v, prompt_of), self.starts[prompt_of])
            outs.append(attend_with_prompt(own_q, own_k, own_v, prompts, attn, fused, sinks))
        return self.join(outs, 2)

    def recur(self, recurrence: Recurrence, cache: None, inputs: Any) -> tuple[Float[Array, "m ..."], None]:
        """Takes a layer's recurrence through the prompts, and from their ends through the rows (see `decoder.Recur`).

        If devices share the tokens, each goes through all of them.
        """
        ragged, M = self.ragged, self.ragged.tokens.shape[0]
        leaves, structure = jax.tree.flatten(inputs)
        split = [self.split(all_gather(x, self.layout.axis("tokens"), 0)[:M]) for x in leaves]
        prompts, *tiles = (jax.tree.unflatten(structure, each) for each in zip(*split, strict=True))
        out, state = recurrence.scan(empty_state(self.config, len(ragged.prompts)), prompts, ragged.prompts >= 0)
        outs = [out]
        state = State(*(lookup(x, ragged.prompt_of) for x in state))
        for cells, own in zip(ragged.tiles, tiles, strict=True):
            out, state = recurrence.scan(State(*(x[: len(cells)] for x in state)), own, cells >= 0)
            outs.append(out)
        return local_tokens(self.join(outs, out.ndim - 2), self.layout), cache
