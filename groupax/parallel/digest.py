"""Digests of weights on the devices that do not depend on how these are sharded."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from groupax.parallel.transfer import to_host

SUB_BYTE = ("bool", "int2", "uint2", "int4", "uint4")


def weights_digest(params: Any) -> str:
    """Returns a digest of all weights and their names, independent of their sharding. All processes must call this."""
    named = jax.tree_util.tree_leaves_with_path(params)
    words = to_host([_words(_once(jnp.asarray(leaf))) for _, leaf in named])
    digest = hashlib.sha256()
    for (path, leaf), pair in zip(named, words, strict=True):
        line = f"{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)} {[int(word) for word in pair]}".encode()
        digest.update(len(line).to_bytes(8, "little") + line)
    return digest.hexdigest()


def _once(x: jax.Array) -> jax.Array:
    """Returns an array on one device if every device has all of it, so that one alone reads it."""
    return x.addressable_data(0) if x.is_fully_replicated else x


@jax.jit
def _words(x: jax.Array) -> jax.Array:
    """Returns two sums modulo 2^32 of a weight's bits, the second mixed with positions; exact in any order."""
    if x.dtype.name in SUB_BYTE:
        x = x.astype(jnp.int32)
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, width).astype(jnp.uint32)
    position = jnp.zeros(x.shape, jnp.uint32)
    for axis in range(x.ndim):
        position = position * jnp.uint32(x.shape[axis]) + lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    mixed = (bits ^ (position * jnp.uint32(2654435761))) * jnp.uint32(2246822519)
    mixed = mixed ^ (mixed >> jnp.uint32(15))
    return jnp.stack([jnp.sum(bits, dtype=jnp.uint32), jnp.sum(mixed, dtype=jnp.uint32)])
