"""Rotary position embeddings (arXiv:2104.09864) and their scalings for long contexts."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from groupax.models.config import DynamicRope, LinearRope, Llama3Rope, LongRope, QueryGrowth, Rope, YarnRope
from groupax.models.matmul import matmul
from groupax.parallel.runtime import traced_platform

Tables = tuple[Array, Array]


def frequencies(rope: Rope, max_positions: int) -> Float[np.ndarray, "R"]:
    """Returns the radians per position of each of the R = `dims` / 2 pairs, float32.

    Args:
        max_positions: Length of the longest sequence, on which some scalings depend. It is used for all sequences, so
            that a token's keys do not depend on how long its sequence becomes.
    """
    plain = rope.theta ** -(np.arange(0, rope.dims, 2) / rope.dims)
    match rope.scaling:
        case None:
            scaled = plain
        case LinearRope(factor):
            scaled = plain / factor
        case DynamicRope():
            scaled = _dynamic(rope, rope.scaling, max_positions)
        case Llama3Rope():
            scaled = _llama3(plain, rope.scaling)
        case YarnRope():
            scaled = _yarn(rope, plain, rope.scaling)
        case LongRope(short_factors, long_factors, original):
            scaled = plain / np.asarray(long_factors if max_positions > original else short_factors)
    return scaled.astype(np.float32)


def rope_tables(rope: Rope, max_positions: int, positions: Int[Array, "... M"], dtype: jnp.dtype) -> Tables:
    """Computes cosine and sine of each position's angles for the first 2 R dims, [M, 1, 2 R]: in float32, then cast.

    Positions in images have three coordinates (see `Rope.sections`).
    """
    by_pair = positions[None] if positions.ndim == 1 else positions[_coordinates(rope)]
    angles = by_pair.T.astype(jnp.float32) * frequencies(rope, max_positions)[None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if rope.scale != 1.0:
        cos, sin = cos * np.float32(rope.scale), sin * np.float32(rope.scale)
    # A matmul copies each angle to both dims of its pair: XLA would recompute other kinds of copies at every use.
    pair_of = np.repeat(np.eye(rope.dims // 2), 2, axis=1) if rope.interleaved else np.tile(np.eye(rope.dims // 2), 2)
    cos, sin = (
        jnp.einsum("mr,rd->md", x, pair_of.astype(np.float32), precision=lax.Precision.HIGHEST) for x in (cos, sin)
    )
    return cos[:, None].astype(dtype), sin[:, None].astype(dtype)


def _coordinates(rope: Rope) -> Int[np.ndarray, "R"]:
    """Returns the coordinate with which each pair turns."""
    assert rope.sections is not None, "the model has positions in images"
    if not rope.mixed_sections:
        return np.repeat(np.arange(3), rope.sections)
    pairs = np.arange(rope.dims // 2)
    coordinates = np.zeros(len(pairs), np.int32)
    for coordinate in (1, 2):
        coordinates[(pairs % 3 == coordinate) & (pairs < 3 * rope.sections[coordinate])] = coordinate
    return coordinates


def query_factors(growth: QueryGrowth, positions: Int[Array, "M"]) -> Float[Array, "M"]:
    """Computes 1 + slope ln(1 + floor((p + offset) / period)) for each position p, in float32."""
    periods = ((positions + growth.offset) // growth.period).astype(jnp.float32)
    return 1.0 + np.float32(growth.slope) * jnp.log(1.0 + periods)


def apply_rope(x: Float[Array, "M N H"], tables: Tables, interleaved: bool = False) -> Float[Array, "M N H"]:
    """Rotates the pairs of the first 2 R dims, paired as in Hugging Face checkpoints; other dims are unchanged."""
    cos, sin = tables
    dims = cos.shape[-1]
    rotated, rest = x[..., :dims], x[..., dims:]
    rotated = rotated * cos + _rotate_half(rotated, interleaved) * sin
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated


def _rotate_half(x: Float[Array, "M N D"], interleaved: bool) -> Float[Array, "M N D"]:
    """Maps each pair (a, b) to (-b, a)."""
    if x.dtype != jnp.float32 and traced_platform() == "cpu":
        # XLA's CPU backend converts shuffled bfloat16 numbers to float32 and back one at a time; a matmul is faster
        unit = np.eye(x.shape[-1], dtype=np.float32)
        rotated = matmul(x.reshape(-1, x.shape[-1]), jnp.asarray(_permute_pairs(unit, interleaved, np), x.dtype))
        return rotated.astype(x.dtype).reshape(x.shape)
    return _permute_pairs(x, interleaved, jnp)


def _permute_pairs(x: Any, interleaved: bool, module: Any) -> Any:
    if interleaved:
        return module.stack([-x[..., 1::2], x[..., 0::2]], axis=-1).reshape(x.shape)
    first, second = module.split(x, 2, axis=-1)
    return module.concatenate([-second, first], axis=-1)


def _dynamic(rope: Rope, scaling: DynamicRope, max_positions: int) -> np.ndarray:
    """Uses theta (factor n / original - factor + 1)^(dims / (dims - 2)) as the base, for sequences of n positions."""
    longest, factor = max(max_positions, scaling.original_max_positions), scaling.factor
    growth = factor * longest / scaling.original_max_positions - (factor - 1)
    theta = rope.theta * growth ** (rope.dims / (rope.dims - 2))
    return theta ** -(np.arange(0, rope.dims, 2) / rope.dims)


def _llama3(plain: np.ndarray, scaling: Llama3Rope) -> np.ndarray:
    """Divides the frequencies of pairs with less than `low_freq_factor` turns in the original context by `factor`.

    Pairs with more than `high_freq_factor` turns keep theirs; between them the blend is linear in the number of turns
    (Llama 3.1's released model code; arXiv:2407.21783, section 3.4.2).
    """
    turns = scaling.original_max_positions * plain / (2 * np.pi)
    between = scaling.high_freq_factor - scaling.low_freq_factor
    kept = (
        np.clip((turns - scaling.low_freq_factor) / between, 0.0, 1.0) if between else turns > scaling.low_freq_factor
    )
    return plain * (kept + (1.0 - kept) / scaling.factor)


def _yarn(rope: Rope, plain: np.ndarray, scaling: YarnRope) -> np.ndarray:
    """Keeps pairs with more than `beta_fast` turns in the original context and slows those with less than `beta_slow`.

    Between them the blend is linear in the pair's index (arXiv:2309.00071, section 3.2).
    """

    def pair_that_turns(times: float) -> float:
        return rope.dims * np.log(scaling.original_max_positions / (times * 2 * np.pi)) / (2 * np.log(rope.theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    slowed = np.clip((np.arange(rope.dims // 2) - low) / (high - low or 0.001), 0.0, 1.0)
    return plain * (1.0 - slowed) + plain / scaling.factor * slowed
