"""Matrix products that accumulate in float32, whatever the dtype of their factors.

Factors in bfloat16 are multiplied as they are. So are the factors of their gradients: a cotangent is first rounded to
the factors' dtype. A CPU with matrix units for bfloat16 multiplies bfloat16 about four times as fast as float32. Other
CPUs would emulate it in software, so there the factors are cast to float32.
"""

import platform
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from groupax.parallel.runtime import traced_platform


@cache
def cpu_multiplies_bfloat16() -> bool:
    """Checks whether this CPU has matrix units for bfloat16 (Intel's AMX)."""
    flags = Path("/proc/cpuinfo")
    return platform.machine() == "x86_64" and flags.exists() and "amx_bf16" in flags.read_text()


def matmul(x: Float[Array, "*B M K"], y: Float[Array, "*B K N"]) -> Float[Array, "*B M N"]:
    """Returns x y in float32."""
    return _matmul(x, y, transpose_y=False)


def matmul_nt(x: Float[Array, "*B M K"], y: Float[Array, "*B N K"]) -> Float[Array, "*B M N"]:
    """Returns x yᵀ in float32."""
    return _matmul(x, y, transpose_y=True)


def dense_linear(x: Float[Array, "*M I"], weight: Float[Array, "O I"]) -> Float[Array, "*M O"]:
    """Applies a weight to x, in x's dtype."""
    if x.dtype == jnp.float32 or traced_platform() != "cpu":
        return jnp.einsum("...i,oi->...o", x, weight)
    y = matmul_nt(x.reshape(-1, x.shape[-1]), weight.astype(x.dtype)).astype(x.dtype)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _matmul(x: Array, y: Array, transpose_y: bool) -> Array:
    if x.dtype == jnp.float32 or y.dtype == jnp.float32:
        return _einsum(x.astype(jnp.float32), y.astype(jnp.float32), transpose_y)
    return _low_precision_matmul(x, y, transpose_y)


def _einsum(x: Array, y: Array, transpose_y: bool) -> Array:
    subscripts = "...mk,...nk->...mn" if transpose_y else "...mk,...kn->...mn"
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def _multiply(x: Array, y: Array, transpose_y: bool) -> Array:
    if traced_platform() != "cpu":
        return _einsum(x, y, transpose_y)
    if x.dtype == jnp.bfloat16 and cpu_multiplies_bfloat16():
        return _einsum(_row_major(x), _row_major(y), transpose_y)
    return _einsum(x.astype(jnp.float32), y.astype(jnp.float32), transpose_y)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _low_precision_matmul(x: Array, y: Array, transpose_y: bool) -> Array:
    return _multiply(x, y, transpose_y)


def _row_major(x: Array) -> Array:
    """Returns x in row-major layout, the only one in which XLA's CPU backend multiplies bfloat16 with matrix units."""
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def _matmul_backward(transpose_y: bool, factors: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, y = factors
    d_x = _multiply(cotangent.astype(x.dtype), y, not transpose_y)
    if transpose_y:
        d_y = _multiply(cotangent.astype(y.dtype).swapaxes(-1, -2), x, False)
    else:
        d_y = _multiply(x.swapaxes(-1, -2), cotangent.astype(y.dtype), False)
    return d_x.astype(x.dtype), d_y.astype(y.dtype)


_low_precision_matmul.defvjp(lambda x, y, transpose_y: (_multiply(x, y, transpose_y), (x, y)), _matmul_backward)
