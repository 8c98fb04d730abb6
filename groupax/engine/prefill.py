"""The program that admits prompts into slots.

It runs on each device of the data axes separately, without communication. A slot's last prompt token is not prefilled;
it is the first token that decoding feeds, so that the first sampled token takes the same path as all others.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from groupax.engine.cache import ROWS, Cache, Slots, empty_columns, pspec_of
from groupax.engine.conversations import Known
from groupax.engine.images import AdmittedImages
from groupax.engine.plan import PIECE_COLUMNS, piece_size
from groupax.models.adapted import select_adapters
from groupax.models.attention import COLUMN_BLOCK, LayerCache, attend_masked, to_cache, within_window
from groupax.models.config import AttentionConfig, ModelConfig
from groupax.models.decoder import PassOptions, forward
from groupax.models.params import layout_of, partition_specs
from groupax.models.recurrent import Recurrence, State, empty_state
from groupax.models.specs import Params
from groupax.parallel.mesh import DATA, Layout
from groupax.parallel.pytree import pytree
from groupax.parallel.runtime import traced_platform


@pytree
class Admitted:
    """The arrays of an admission to B slots with Q prompt slots: P prompts, sharded over the data axes like B."""

    prompts: Int[Any, "P S"]  # prompts without their last tokens, left-padded
    starts: Int[Any, "P"]  # column at which each prompt's tokens begin
    # number of prompts of each shard, from its first row on; the other rows are not computed
    num_prompts: Int[Any, "D"]
    source: Int[Any, "Q"]  # index on its device of the prompt that each prompt slot receives, -1 for none
    is_new: Bool[Any, "B"]  # slots that are admitted
    slots: Slots  # their new contents
    known: Known | None = None  # keys and values that need not be computed
    # index of each prompt's adapter, -1 for the base; None without several adapters
    adapters: Int[Any, "P"] | None = None
    # images of the prompts; None if all are text. If the model sees whole images, prompts are then computed one by one,
    # with all columns at once
    images: AdmittedImages | None = None


@partial(jax.jit, static_argnames=("config", "mesh", "by_block", "short_pieces"), donate_argnames=("cache", "slots"))
def admit(
    params: Params,
    cache: Cache,
    slots: Slots,
    admitted: Admitted,
    *,
    config: ModelConfig,
    mesh: Mesh,
    by_block: bool = False,
    short_pieces: bool = False,
) -> tuple[Cache, Slots]:
    """Computes each prompt once and stores it where the slots that continue it read it.

    Args:
        cache, slots: Donated; prompt slots and slots that are not admitted keep their contents.
        by_block: Static: whether prompts are computed one by one, by blocks of columns (see `Plan.by_block`).
        short_pieces: Static: whether CPUs compute prompts one by one, in pieces of few columns, which pays where most
            prompts are much shorter than there are columns.
    """
    layout = layout_of(config, mesh)

    def local(params: Any, cache: Cache, slots: Slots, admitted: Admitted) -> tuple[Cache, Slots]:
        like = next(each for each in cache.layers if isinstance(each, LayerCache)).prompt_k
        size = _piece_size(config, admitted.prompts.shape, like.shape[1], by_block, short_pieces)
        if admitted.images is not None and admitted.images.blocks is not None:  # of an image, which no piece may cut
            size = 1, admitted.prompts.shape[1]
        kept = _prefill(config, params, admitted, like, layout, size, by_block)
        source, is_new = admitted.source, admitted.is_new
        columns = {i: each[:2] for i, each in enumerate(cache.layers) if isinstance(each, LayerCache)}
        states = {i: each for i, each in enumerate(cache.layers) if isinstance(each, State)}
        stored = cache.prompt_tokens, cache.prompt_starts, columns
        new = admitted.prompts, admitted.starts, {i: kept[i] for i in columns}
        tokens, starts, placed = _placed(stored, new, source, source >= 0)
        if states:
            of_prompts = jnp.repeat(source, len(is_new) // len(source))
            states = _placed(states, {i: kept[i] for i in states}, of_prompts, is_new)
        layers = [
            each._replace(prompt_k=placed[i][0], prompt_v=placed[i][1]) if isinstance(each, LayerCache) else states[i]
            for i, each in enumerate(cache.layers)
        ]
        cache = replace(cache, prompt_tokens=tokens, prompt_starts=starts, layers=layers)
        return cache, jax.tree.map(lambda new, old: jnp.where(_like(is_new, new), new, old), admitted.slots, slots)

    of_cache, of_admitted = jax.tree.map(pspec_of, (cache, admitted))
    in_specs = (partition_specs(config, mesh, params), of_cache, ROWS, of_admitted)
    program = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=(of_cache, ROWS), check_vma=False)
    return program(params, cache, slots, admitted)


def _placed(old: Any, new: Any, source: Int[Array, "N"], receives: Bool[Array, "N"]) -> Any:
    """Returns old arrays, of which the rows that receive one are rows of new arrays; the others are not even read.

    Args:
        source: Row of the new arrays for each row of the old ones.
        receives: Rows that are replaced.
    """
    receiving = jnp.argsort(~receives)  # those that receive a row come first

    def place(index: Array, stored: Any) -> Any:
        slot = receiving[index]

        def put(old: Array, given: Array) -> Array:
            row = lax.dynamic_slice_in_dim(given, source[slot], 1)
            return lax.dynamic_update_slice_in_dim(old, row, slot, axis=0)

        return jax.tree.map(put, stored, new)

    return lax.fori_loop(0, jnp.sum(receives), place, old)


def _piece_size(
    config: ModelConfig, shape: tuple[int, ...], num_kv_heads: int, by_block: bool, short_pieces: bool
) -> tuple[int, int]:
    """Returns the numbers of prompts and of their columns that are computed at once, of prompts [P, S]."""
    (num_prompts, num_columns), platform = shape, traced_platform()
    if by_block:
        return 1, min(num_columns, COLUMN_BLOCK)
    if short_pieces and platform == "cpu":
        return 1, math.gcd(num_columns, PIECE_COLUMNS)
    num_heads = config.num_heads // config.num_kv_heads * num_kv_heads
    return piece_size(num_prompts, num_columns, num_heads, platform)


def _prefill(
    config: ModelConfig,
    params: Params,
    admitted: Admitted,
    like: Float[Array, "Q K H S"],
    layout: Layout,
    size: tuple[int, int],
    by_block: bool,
) -> list[tuple[Array, Array] | State]:
    """Computes what each layer keeps of prompts: keys and values of the device's heads, as in `like`, or states.

    They are computed in pieces of `size`: some prompts, some columns from the first unknown one on.
    """
    starts, known, images = admitted.starts, admitted.known, admitted.images
    (P, S), (_, K, H, _), (num, M) = admitted.prompts.shape, like.shape, size

    def empty(layer: int) -> tuple[Array, Array] | State:
        return empty_state(config, P) if config.is_recurrent(layer) else empty_columns(P, K, H, S, like.dtype)

    first_unknown = starts if known is None else known.first_unknown
    kept = [empty(layer) for layer in range(config.num_layers)] if known is None else known.layers
    last_piece, columns = S // M - 1, jnp.arange(S)[None, :]
    first_pieces = jnp.minimum(jnp.min(first_unknown.reshape(-1, num), axis=1) // M, last_piece)
    num_turns = (admitted.num_prompts[0] + num - 1) // num
    if layout.axes:
        first_pieces, num_turns = lax.pmin(first_pieces, DATA), lax.pmax(num_turns, DATA)

    def compute(carry: tuple[Array, Array, Any]) -> tuple[Array, Array, Any]:
        turn, piece, kept = carry
        row, first = turn * num, piece * M
        begin, unknown = (lax.dynamic_slice_in_dim(x, row, num) for x in (starts, first_unknown))
        own = first + jnp.arange(M)
        earlier = (columns <= own[:, None])[None]
        if images is not None and images.blocks is not None:
            earlier = earlier | images.in_same_image(row, first, size)
        attend = Piece(
            row=row,
            first=first,
            starts=begin,
            visible=(columns >= begin[:, None])[:, None, :] & earlier,
            distance=(own[:, None] - columns)[None],
            position=(own[None, :] - begin[:, None])[:, :, None],
            is_unknown=None if known is None else own[None, :] >= unknown[:, None],
            by_block=by_block,
        )
        tokens = lax.dynamic_slice(admitted.prompts, (row, first), (num, M))
        positions = jnp.maximum(own[None, :] - begin[:, None], 0).reshape(-1)
        inputs = None
        if images is not None:
            inputs, positions = images.inputs(row, first, size, positions)
        adapted = params
        if admitted.adapters is not None:
            own_adapters = lax.dynamic_slice_in_dim(admitted.adapters, row, num)
            adapted = select_adapters(params, jnp.repeat(own_adapters, M))
        options = PassOptions(layout=layout, images=inputs, recur=attend.recur)
        kept = forward(config, adapted, tokens.reshape(-1), positions, attend, kept, options).caches
        is_last = piece == last_piece
        following = jnp.minimum(turn + 1, len(first_pieces) - 1)
        turn, piece = turn + is_last.astype(jnp.int32), jnp.where(is_last, first_pieces[following], piece + 1)
        return turn, piece, kept

    start = jnp.int32(0), first_pieces[0], kept
    return lax.while_loop(lambda carry: carry[0] < num_turns, compute, start)[2]


@dataclass(frozen=True, eq=False)
class Piece:
    """M columns of some prompts: attention to the columns up to them, which writes keys and values, and recurrences."""

    row: Array  # the first of the prompts
    first: Array  # the first of the columns
    starts: Array  # [R] columns at which the prompts begin
    visible: Array  # [R, M, S] columns that each column attends to, without a window
    distance: Array  # [1, M, S] how far before it these are
    position: Array  # [R, M, 1] position of each column in its prompt
    is_unknown: Array | None  # [R, M] columns that are computed; None computes all
    by_block: bool  # whether attention is computed by blocks of columns

    def __call__(
        self,
        attn: AttentionConfig,
        stored: tuple[Array, Array],
        q: Array,
        k: Array,
        v: Array,
        sinks: Array | None = None,
    ) -> tuple[Array, tuple[Array, Array]]:
        """Returns the outputs of attention, and the stored keys and values with the new ones."""
        (R, M, _), zero = self.visible.shape, jnp.int32(0)
        at_keys, at_values = (self.row, zero, zero, self.first), (self.row, zero, self.first, zero)
        keys, values = stored
        q, k, v = (x.reshape(R, M, *x.shape[1:]) for x in (q, k, v))
        k, v = to_cache(k.transpose(0, 2, 3, 1), keys.dtype), to_cache(v.transpose(0, 2, 1, 3), values.dtype)
        if self.is_unknown is not None:
            k = jnp.where(self.is_unknown[:, None, None], k, lax.dynamic_slice(keys, at_keys, k.shape))
            v = jnp.where(self.is_unknown[:, None, :, None], v, lax.dynamic_slice(values, at_values, v.shape))
        keys = lax.dynamic_update_slice(keys, k, at_keys)
        values = lax.dynamic_update_slice(values, v, at_values)
        own_keys, own_values = (lax.dynamic_slice_in_dim(x, self.row, R) for x in (keys, values))
        seen = self.visible & within_window(self.distance, self.position, attn.window)
        out = attend_masked(q, own_keys, own_values, seen, attn, self.by_block, sinks)
        return out.reshape(R * M, *q.shape[2:]), (keys, values)

    def recur(self, recurrence: Recurrence, stored: State, inputs: Any) -> tuple[Array, State]:
        """Returns the outputs of a recurrence, and the stored states with the new ones."""
        R, M, _ = self.visible.shape
        inputs = jax.tree.map(lambda x: x.reshape(R, M, *x.shape[1:]), inputs)
        before = State(*(lax.dynamic_slice_in_dim(x, self.row, R) for x in stored))
        is_token = (self.first + jnp.arange(M))[None, :] >= self.starts[:, None]
        out, after = recurrence.scan(before, inputs, is_token)
        put = (lax.dynamic_update_slice_in_dim(x, new, self.row, 0) for x, new in zip(stored, after, strict=True))
        return out.reshape(R * M, *out.shape[2:]), State(*put)


def _like(mask: Bool[Array, "B"], x: Array) -> Array:
    return jnp.expand_dims(mask, tuple(range(1, x.ndim)))
