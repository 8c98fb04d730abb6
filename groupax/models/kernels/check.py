"""Checks of the kernels on this machine's device: against the plain form on small ragged inputs, and by their time.

    python -m groupax.models.kernels.check FILE CHECKS [KERNEL ...]

appends a line of JSON to FILE before each case and another one after it (see `Finding`), so that whoever started this
process (`parallel.kernels`) knows which case it died or hung in. CHECKS names a list of `Check`s, as module:name.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from groupax.models import attention
from groupax.models.attention import LayerCache, Past
from groupax.models.config import AttentionConfig
from groupax.models.kernels.fused_attention import cudnn_attend
from groupax.parallel.runtime import cuda_capability

# Relative error of a kernel beyond twice that of the plain form in the same dtype: a result that is wrong by 1 % is
# found in bfloat16 too, whose own rounding is about 0.3 %.
BOUNDS = {"float32": 1e-4, "bfloat16": 2e-3}
MAX_SLOWDOWN = 1.2  # times the plain form's time
NUM_TIMED = 5


@dataclass(frozen=True)
class Case:
    """A computation by a kernel and in the plain form, both of which take the same arrays.

    Attributes:
        name: Name of the case.
        kernel, plain: The two forms, which return an array or a tuple of arrays.
        arrays: Inputs, float32; they are cast to the dtype.
        dtype: Dtype of the inputs.
        has_gradient: Whether the gradients of the inputs are compared too.
        is_timed: Whether the sizes are such that times tell something.
    """

    name: str
    kernel: Callable[..., Any]
    plain: Callable[..., Any]
    arrays: Sequence[Array]
    dtype: str
    has_gradient: bool = True
    is_timed: bool = False


@dataclass(frozen=True)
class Check:
    """The cases of a kernel.

    Attributes:
        kernel: Name of the kernel.
        is_for: Returns whether a device has it.
        cases: Yields the cases; the argument is whether the kernel is emulated.
        is_emulated: Whether it is emulated, on any device.
    """

    kernel: str
    is_for: Callable[[Any], bool]
    cases: Callable[[bool], Iterator[Case]]
    is_emulated: bool = False


@dataclass(frozen=True)
class Finding:
    """The result of a case; errors are relative, times are of the fastest of a few calls.

    Attributes:
        kernel, case: Names.
        fault: The reason to leave the kernel out; empty without one.
        error, plain_error: Difference from the plain form in float32 on the CPU, of the kernel and of the plain form.
        ms, plain_ms: Milliseconds of a call; 0 if the case is not timed.
    """

    kernel: str
    case: str
    fault: str = ""
    error: float = 0.0
    plain_error: float = 0.0
    ms: float = 0.0
    plain_ms: float = 0.0


def examined(kernel: str, case: Case, is_emulated: bool) -> Finding:
    """Runs a case. The time of an emulated kernel is no reason to leave it out."""
    arrays = [jnp.asarray(x, case.dtype) for x in case.arrays]
    expected = _expected(case, arrays)
    error, plain_error = (_error(_results(form, case, arrays), expected) for form in (case.kernel, case.plain))
    found = Finding(kernel, case.name, error=error, plain_error=plain_error)
    if not np.isfinite(error):
        return replace(found, fault="it gives numbers that are not finite")
    if error > 2 * plain_error + BOUNDS[case.dtype]:
        return replace(found, fault=f"it is wrong by {error:.2%}, and the plain form by {plain_error:.2%}")
    if not case.is_timed:
        return found
    found = replace(found, ms=_milliseconds(case.kernel, arrays), plain_ms=_milliseconds(case.plain, arrays))
    if found.ms > MAX_SLOWDOWN * found.plain_ms and not is_emulated:
        return replace(found, fault=f"it takes {found.ms:.3g} ms, and the plain form {found.plain_ms:.3g} ms")
    return found


def _expected(case: Case, arrays: Sequence[Array]) -> list[np.ndarray]:
    """Returns the results of the plain form in float32, on the CPU."""
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu), jax.default_matmul_precision("highest"):
        return _results(case.plain, case, [jax.device_put(x.astype(jnp.float32), cpu) for x in arrays])


def _results(form: Callable[..., Any], case: Case, arrays: Sequence[Array]) -> list[np.ndarray]:
    """Returns what a form computes, and the gradients of a sum of it with fixed weights."""

    def weighted(*arrays: Array) -> tuple[Array, Any]:
        out = form(*arrays)
        first = jax.tree.leaves(out)[0].astype(jnp.float32)
        return jnp.sum(first * jnp.cos(jnp.arange(first.size, dtype=jnp.float32)).reshape(first.shape)), out

    if case.has_gradient:
        program = jax.jit(jax.value_and_grad(weighted, argnums=tuple(range(len(arrays))), has_aux=True))
        (_, out), gradients = program(*arrays)
    else:
        out, gradients = jax.jit(form)(*arrays), ()
    return [np.asarray(x, np.float64) for x in jax.tree.leaves((out, gradients))]


def _error(results: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    pairs = zip(results, expected, strict=True)
    return float(max(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30) for a, b in pairs))


def _milliseconds(form: Callable[..., Any], arrays: Sequence[Array]) -> float:
    program, seconds = jax.jit(form), float("inf")
    jax.block_until_ready(program(*arrays))
    for _ in range(NUM_TIMED):
        started_s = time.perf_counter()
        jax.block_until_ready(program(*arrays))
        seconds = min(seconds, time.perf_counter() - started_s)
    return 1e3 * seconds


def _draw(*shapes: tuple[int, ...]) -> list[Array]:
    return [jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate(shapes)]


def _update_cases(
    attend: Callable[..., Array], dtypes: Sequence[str], *, has_sinks: bool, is_emulated: bool
) -> Iterator[Case]:
    """Yields cases of attention in updates: left-padded rows, shared key heads, windows, sinks."""

    def case(
        name: str, dtype: str, tokens: int, window: int | None, *, sinks: bool = False, timed: bool = False
    ) -> Case:
        starts = jnp.array([0, tokens // 3], jnp.int32)
        attn = AttentionConfig(0.125, window=window)
        is_real = (jnp.arange(tokens)[None, :] >= starts[:, None])[:, :, None, None]

        def of(form: Callable[..., Array]) -> Callable[..., Array]:
            def masked(q: Array, k: Array, v: Array, *sinks: Array) -> Array:
                return jnp.where(is_real, form(q, k, v, starts, attn, *((None, *sinks) if form is plain else sinks)), 0)

            return masked

        plain = attention.attend
        shapes = [(2, tokens, 4, 64), (2, tokens, 2, 64), (2, tokens, 2, 64), *([(4,)] if sinks else [])]
        return Case(f"{name}, {dtype}", of(attend), of(plain), _draw(*shapes), dtype, is_timed=timed)

    yield case("ragged rows", dtypes[0], 150, None)
    yield case("a window", dtypes[-1], 150, 70)
    if has_sinks:
        yield case("sinks", dtypes[0], 150, None, sinks=True)
    if not is_emulated:
        yield case("2 x 1,024 tokens", dtypes[0], 1024, None, timed=True)


def _cudnn_cases(is_emulated: bool) -> Iterator[Case]:
    def attend(*arguments: Any) -> Array:
        return cudnn_attend(*arguments, implementation="xla" if is_emulated else "cudnn")

    return _update_cases(attend, ["bfloat16"], has_sinks=False, is_emulated=is_emulated)


def _splash_cases(is_emulated: bool) -> Iterator[Case]:
    from groupax.models.kernels import splash

    def attend(q: Array, k: Array, v: Array, starts: Array, attn: AttentionConfig, sinks: Array | None = None) -> Array:
        return splash.attend(q, k, v, starts, attn, sinks, interpret=is_emulated)

    return _update_cases(attend, ["bfloat16", "float32"], has_sinks=True, is_emulated=is_emulated)


def _decoding_cases(is_emulated: bool) -> Iterator[Case]:
    """Yields cases of attention in decoding: rows of several lengths behind shared prompts, one of them idle."""
    from groupax.models.kernels import triton_attention

    def case(name: str, dtype: str, rows: int, columns: int, attn: AttentionConfig, *, timed: bool = False) -> Case:
        prompts, heads, keys, dims = 2, 4, 2, 64
        lengths = (jnp.arange(rows, dtype=jnp.int32) * 37) % columns
        past = Past(jnp.array([0, columns // 3], jnp.int32), lengths)
        is_busy = (lengths > 0)[:, None, None]

        def of(form: Callable[..., Any]) -> Callable[..., Any]:
            def attend(q: Array, k: Array, v: Array, *cache: Array) -> Any:
                out, written = form(attn, past, LayerCache(*cache), q, k, v)
                return jnp.where(is_busy, out, 0), written.k, written.v

            return attend

        shapes = [(rows, heads, dims), (rows, keys, dims), (rows, keys, dims)]
        shapes += [(count, keys, *last) for count in (prompts, rows) for last in ((dims, columns), (columns, dims))]
        kernel = partial(triton_attention.attend_past, interpret=is_emulated)
        plain, arrays = of(attention.attend_past), _draw(*shapes)
        return Case(f"{name}, {dtype}", of(kernel), plain, arrays, dtype, has_gradient=False, is_timed=timed)

    yield case("ragged rows", "bfloat16", 6, 96, AttentionConfig(0.125))
    yield case("a window", "float32", 6, 96, AttentionConfig(0.125, window=40))
    yield case("softcap", "bfloat16", 6, 96, AttentionConfig(0.125, softcap=5.0))
    if not is_emulated:
        yield case("64 rows of 1,024 columns", "bfloat16", 64, 1024, AttentionConfig(0.125), timed=True)


def _grouped_cases(is_emulated: bool) -> Iterator[Case]:
    """Yields cases of products of the rows of groups, some of which are empty."""
    from groupax.models.kernels.triton_matmul import grouped_matmul

    def case(name: str, dtype: str, sizes: Sequence[int], inputs: int, outputs: int, *, timed: bool = False) -> Case:
        numbers = jnp.array(sizes, jnp.int32)
        groups = np.repeat(np.arange(len(sizes)), sizes)

        def plain(rows: Array, weights: Array) -> Array:
            one_hot = jax.nn.one_hot(groups, len(sizes), dtype=rows.dtype)
            return jnp.einsum("re,ri,eoi->ro", one_hot, rows, weights)

        def kernel(rows: Array, weights: Array) -> Array:
            return grouped_matmul(rows, weights, numbers, is_emulated)

        arrays = _draw((sum(sizes), inputs), (len(sizes), outputs, inputs))
        return Case(f"{name}, {dtype}", kernel, plain, arrays, dtype, is_timed=timed)

    for dtype in ("bfloat16", "float32"):
        yield case("ragged groups", dtype, [40, 0, 3, 90], 72, 136)
    if not is_emulated:
        yield case("8 groups of 512 rows", "bfloat16", [512] * 8, 512, 1024, timed=True)


def _is_nvidia(device: Any) -> bool:
    return (cuda_capability(device) or (0, 0)) >= (8, 0)


CHECKS = (
    Check("cudnn", _is_nvidia, _cudnn_cases),
    Check("splash", lambda device: device.platform == "tpu", _splash_cases),
    Check("decode_attention", _is_nvidia, _decoding_cases),
    Check("grouped_matmul", _is_nvidia, _grouped_cases),
)
EMULATED = tuple(replace(check, is_emulated=True) for check in CHECKS)


def findings(checks: Sequence[Check], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the kernels, and then the name of each case and its finding, as plain data.

    Without `names` it checks all kernels of the device.
    """
    device = jax.devices()[0]
    chosen = [check for check in checks if check.is_emulated or check.is_for(device)]
    chosen = [check for check in chosen if not names or check.kernel in names]
    yield {"device": device.device_kind, "kernels": [check.kernel for check in chosen]}
    if device.platform in ("gpu", "cuda") and not names:
        old = [check for check in checks if check.is_for is _is_nvidia and not check.is_for(device)]
        yield from (
            asdict(Finding(check.kernel, "", "it needs an NVIDIA GPU of compute capability 8.0")) for check in old
        )
    for check in chosen:
        for case in check.cases(check.is_emulated):
            yield {"kernel": check.kernel, "case": case.name}
            yield asdict(examined(check.kernel, case, check.is_emulated))


def main(out: str, checks: str, names: Sequence[str]) -> None:
    """Writes the findings of the checks that a reference names."""
    module, _, attribute = checks.partition(":")
    with Path(out).open("a", encoding="utf-8") as file:
        for each in findings(getattr(importlib.import_module(module), attribute), names):
            file.write(json.dumps(each) + "\n")
            file.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
