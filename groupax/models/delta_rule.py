"""The gated delta rule (arXiv:2412.06464), over chunks of tokens and for one token, in float32.

A head's memory S maps keys to values. A token with key k, value v, decay exp(g) and step size b changes it and reads it
with its query q:

    S <- exp(g) S,    S <- S + k (b (v - kᵀ S)),    output = qᵀ S

In chunks of C tokens the changes follow from a triangular system of C equations (arXiv:2406.06484, section 3.2). Its
inverse is computed by products of blocks: LAPACK's solver, which XLA calls on CPUs, can wait forever where several
devices of one process call it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from groupax.models.matmul import matmul, matmul_nt

CHUNK = 64
LEAF = 16  # columns of matrices that are inverted whole


def delta_rule_step(
    memory: Float[Array, "B N K V"],
    q: Float[Array, "B N K"],
    k: Float[Array, "B N K"],
    v: Float[Array, "B N V"],
    g: Float[Array, "B N"],
    b: Float[Array, "B N"],
) -> tuple[Float[Array, "B N V"], Float[Array, "B N K V"]]:
    """Returns the outputs of one token of each head, and the memories after it.

    Products are sums of elements: they do not depend on the number of sequences.
    """
    memory = memory * jnp.exp(g)[..., None, None]
    known = jnp.sum(memory * k[..., None], axis=-2)
    memory = memory + k[..., None] * ((v - known) * b[..., None])[..., None, :]
    return jnp.sum(memory * q[..., None], axis=-2), memory


def delta_rule(
    memory: Float[Array, "B N K V"],
    q: Float[Array, "B T N K"],
    k: Float[Array, "B T N K"],
    v: Float[Array, "B T N V"],
    g: Float[Array, "B T N"],
    b: Float[Array, "B T N"],
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N K V"]]:
    """Returns the outputs of T tokens, and the memories after them. A token with g and b of 0 changes nothing.

    The last chunk ends with the last column, so that further chunks without tokens in front change no bit.
    """
    # TPUs and GPUs would otherwise round the factors of products to fewer bits
    with jax.default_matmul_precision("highest"):
        return _by_chunk(memory, q, k, v, g, b)


def _by_chunk(
    memory: Array, q: Array, k: Array, v: Array, g: Array, b: Array
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N K V"]]:
    B, T, N, V = v.shape
    C = min(CHUNK, 1 << max(0, T - 1).bit_length())
    num = -(-T // C)

    def chunked(x: Array) -> Array:  # [B, T, N, ...] -> [num, B, N, C, ...]
        padded = jnp.pad(x, ((0, 0), (num * C - T, 0), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(B, num, C, *x.shape[2:]), (1, 3), (0, 2))

    q, k, v, g, b = (chunked(x) for x in (q, k, v, g, b))
    decay = jnp.cumsum(g, axis=-1)  # logarithm of the decay from the chunk's beginning until each token
    is_causal = jnp.tril(jnp.ones((C, C), bool))
    between = jnp.exp(jnp.where(is_causal, decay[..., :, None] - decay[..., None, :], -jnp.inf))
    k_steps = k * b[..., None]
    # what a token adds depends on the chunk's tokens before it: (I + system) added = v b - (k b decay) memory
    system = jnp.tril(matmul_nt(k_steps, k) * between, -1)
    sides = jnp.concatenate([v * b[..., None], k_steps * jnp.exp(decay)[..., None]], axis=-1)
    solved = matmul(unit_triangular_inverse(system), sides)
    added, read = solved[..., :V], solved[..., V:]
    scores = matmul_nt(q, k) * between
    q_decayed = q * jnp.exp(decay)[..., None]
    k_remaining = (k * jnp.exp(decay[..., -1:] - decay)[..., None]).swapaxes(-1, -2)
    whole = jnp.exp(decay[..., -1])[..., None, None]

    def chunk(memory: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
        added, read, scores, q_decayed, k_remaining, whole = xs
        added = added - matmul(read, memory)
        out = matmul(q_decayed, memory) + matmul(scores, added)
        return memory * whole + matmul(k_remaining, added), out

    memory, out = lax.scan(chunk, memory, (added, read, scores, q_decayed, k_remaining, whole))
    out = jnp.moveaxis(out, (0, 2), (1, 3)).reshape(B, num * C, N, V)
    return out[:, num * C - T :], memory


def unit_vectors(x: Float[Array, "*M K"]) -> Float[Array, "*M K"]:
    """Returns x divided by its length, whose square is raised by 1e-6."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def unit_triangular_inverse(lower: Float[Array, "*M C C"]) -> Float[Array, "*M C C"]:
    """Returns the inverse of I + lower, for a strictly lower triangular matrix of a power of two of columns.

    The inverse of a matrix of blocks [A, 0; L, B] is [A', 0; -B' L A', B'], with the inverses A' and B' of A and B.
    """
    C = lower.shape[-1]
    if C > LEAF:
        half = C // 2
        blocks = jnp.stack([lower[..., :half, :half], lower[..., half:, half:]])
        first, second = unit_triangular_inverse(blocks)
        below = -matmul(matmul(second, lower[..., half:, :half]), first)
        above = jnp.concatenate([first, jnp.zeros_like(below)], axis=-1)
        return jnp.concatenate([above, jnp.concatenate([below, second], axis=-1)], axis=-2)
    row, column = np.indices((C, C))
    inverse, size = jnp.broadcast_to(jnp.eye(C, dtype=lower.dtype), lower.shape), 1
    while size < C:  # all blocks of a size at once
        is_below = (row // (2 * size) == column // (2 * size)) & (row // size > column // size)
        between = jnp.where(is_below, lower, 0)
        change = between if size == 1 else matmul(matmul(inverse, between), inverse)
        inverse, size = inverse - change, 2 * size
    return inverse
