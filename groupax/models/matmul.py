"""Matrix products that add up in float32, whatever their factors' dtype is.

Factors of fewer bits are multiplied as they are, and so are their gradients' factors: a cotangent is rounded to the
factors' dtype first. A CPU with matrix units for bfloat16 multiplies them about four times as fast as float32;
another one would do so in software, and gets float32.
"""

import platform
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from groupax.parallel.platform import traced_platform


@cache
def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has matrix units for bfloat16 (Intel's AMX)."""
    flags = Path("/proc/cpuinfo")
    return platform.machine() == "x86_64" and flags.exists() and "amx_bf16" in flags.read_text()


def matmul(x: Float[Array, "*B M K"], y: Float[Array, "*B K N"]) -> Float[Array, "*B M N"]:
    """x y, float32."""
    return _product(x, y, transposed=False)


def matmul_nt(x: Float[Array, "*B M K"], y: Float[Array, "*B N K"]) -> Float[Array, "*B M N"]:
    """x y', float32."""
    return _product(x, y, transposed=True)


def dense_linear(x: Float[Array, "*M I"], weight: Float[Array, "O I"]) -> Float[Array, "*M O"]:
    """weight x, in x's dtype."""
    if x.dtype == jnp.float32 or traced_platform() != "cpu":
        return jnp.einsum("...i,oi->...o", x, weight)
    y = matmul_nt(x.reshape(-1, x.shape[-1]), weight.astype(x.dtype)).astype(x.dtype)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _product(x: Array, y: Array, transposed: bool) -> Array:
    if x.dtype == jnp.float32 or y.dtype == jnp.float32:
        return _plain(x.astype(jnp.float32), y.astype(jnp.float32), transposed)
    return _narrow(x, y) if not transposed else _narrow_transposed(x, y)


def _plain(x: Array, y: Array, transposed: bool) -> Array:
    subscripts = "...mk,...nk->...mn" if transposed else "...mk,...kn->...mn"
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def _multiplied(x: Array, y: Array, transposed: bool) -> Array:
    """The product of factors of fewer bits."""
    if traced_platform() != "cpu":
        return _plain(x, y, transposed)
    if x.dtype == jnp.bfloat16 and cpu_multiplies_bfloat16():
        return _plain(_row_major(x), _row_major(y), transposed)
    return _plain(x.astype(jnp.float32), y.astype(jnp.float32), transposed)


def _row_major(x: Array) -> Array:
    """Returns x in row-major layout, the only one in which XLA's CPU backend multiplies bfloat16 with matrix units."""
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


@jax.custom_vjp
def _narrow(x: Array, y: Array) -> Array:
    return _multiplied(x, y, transposed=False)


def _narrow_backward(factors: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, y = factors
    of_x = _multiplied(cotangent.astype(x.dtype), y, transposed=True)
    of_y = _multiplied(x.swapaxes(-1, -2), cotangent.astype(y.dtype), transposed=False)
    return of_x.astype(x.dtype), of_y.astype(y.dtype)


_narrow.defvjp(lambda x, y: (_narrow(x, y), (x, y)), _narrow_backward)


@jax.custom_vjp
def _narrow_transposed(x: Array, y: Array) -> Array:
    return _multiplied(x, y, transposed=True)


def _narrow_transposed_backward(factors: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, y = factors
    of_x = _multiplied(cotangent.astype(x.dtype), y, transposed=False)
    of_y = _multiplied(cotangent.astype(y.dtype).swapaxes(-1, -2), x, transposed=False)
    return of_x.astype(x.dtype), of_y.astype(y.dtype)


_narrow_transposed.defvjp(lambda x, y: (_narrow_transposed(x, y), (x, y)), _narrow_transposed_backward)
