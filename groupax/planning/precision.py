"""Matmuls of a lowered program that widen their operands."""

from collections.abc import Iterator
from typing import Any

# They return elements of their first operand.
_SAME_ELEMENTS = frozenset(
    f"stablehlo.{name}"
    for name in ("convert", "transpose", "reshape", "broadcast_in_dim", "slice", "dynamic_slice", "gather")
)
_NARROW = frozenset({"bf16", "f16"})


def count_widened_products(lowered: Any) -> int:
    """Counts the matmuls in float32 of which an operand was converted from bfloat16 or float16.

    A matmul of the narrow operands that is accumulated in float32 returns the same, and takes a fraction of the time.

    Args:
        lowered: A lowered program, see `jax.stages.Lowered`.
    """
    operations = list(_walk(lowered.compiler_ir("stablehlo").operation))
    callers: dict[str, list[Any]] = {}
    for operation in operations:
        if operation.name == "func.call":
            callers.setdefault(operation.attributes["callee"].value, []).append(operation)
    products = [each for each in operations if each.name in ("stablehlo.dot_general", "stablehlo.convolution")]
    return sum(
        any(_dtype(operand) == "f32" and _is_widened(operand, callers) for operand in each.operands)
        for each in products
    )


def _walk(operation: Any) -> Iterator[Any]:
    yield operation
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _walk(inner.operation)


def _is_widened(value: Any, callers: dict[str, list[Any]]) -> bool:
    """Returns whether an array is one of narrow floats, or one of float32 that was converted from such."""
    dtype = _dtype(value)
    return dtype in _NARROW or (
        dtype == "f32" and any(_is_widened(source, callers) for source in _sources(value, callers))
    )


def _dtype(value: Any) -> str:
    return str(value.type.element_type)


def _sources(value: Any, callers: dict[str, list[Any]]) -> Iterator[Any]:
    """Yields the arrays that a value's elements are taken from: operands, or arguments of the calls of its function."""
    owner = value.owner
    if not hasattr(owner, "arguments"):  # an operation, not a block
        if owner.name in _SAME_ELEMENTS:
            yield owner.operands[0]
        return
    index, parent = value.arg_number, owner.owner.operation
    if parent.name == "func.func":
        for call in callers.get(parent.attributes["sym_name"].value, ()):
            yield call.operands[index]
    elif parent.name == "stablehlo.while":
        yield parent.operands[index]
