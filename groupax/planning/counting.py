"""What a traced program does on each device: operations of products, the bytes they touch, and what devices exchange.

Counted in the program as it is written, where loops say how often they run; a compiled one counts a loop's body once.
Whatever is no product is left out: compilers join it to products, or it is small.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core


@dataclass(frozen=True)
class Counts:
    """Of one run of a program, on one device.

    Attributes:
        flops: of products.
        product_bytes: that they read and write.
        exchanged: bytes that a device sends to others, by kind of exchange.
    """

    flops: float = 0.0
    product_bytes: float = 0.0
    exchanged: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: "Counts") -> "Counts":
        kinds = {**self.exchanged, **other.exchanged}
        exchanged = {kind: self.exchanged.get(kind, 0.0) + other.exchanged.get(kind, 0.0) for kind in kinds}
        return Counts(self.flops + other.flops, self.product_bytes + other.product_bytes, exchanged)

    def times(self, number: int) -> "Counts":
        """Of so many runs."""
        exchanged = {kind: number * sent for kind, sent in self.exchanged.items()}
        return Counts(number * self.flops, number * self.product_bytes, exchanged)

    @property
    def exchanged_bytes(self) -> float:
        """That a device sends in all."""
        return sum(self.exchanged.values(), 0.0)


_EXCHANGES = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
}


def counts_of(program: Any, loop_steps: int = 1) -> Counts:
    """What a program does on a device.

    Args:
        program: a jaxpr; what lies within its `shard_map`s is a device's part.
        loop_steps: how often loops run whose ends depend on what they compute.

    Raises:
        NotImplementedError: devices exchange something in a way that is not counted here.
    """
    return _of_program(program, {}, loop_steps)


def _of_program(program: Any, sizes: Mapping[str, int], loop_steps: int) -> Counts:
    """The same, where the mesh's axes have these sizes."""
    jaxpr = program.jaxpr if isinstance(program, core.ClosedJaxpr) else program
    total = Counts()
    for equation in jaxpr.eqns:
        total += _of_equation(equation, sizes, loop_steps)
    return total


def _of_equation(equation: Any, sizes: Mapping[str, int], loop_steps: int) -> Counts:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _of_product(equation, _dot_flops(equation))
    if name in ("ragged_dot", "ragged_dot_general"):
        return _of_product(equation, _ragged_dot_flops(equation))
    if name == "pallas_call":
        return _of_kernel(equation)
    axes = params.get("axes", params.get("axis_name"))
    if name in _EXCHANGES:
        return _of_exchange(equation, _EXCHANGES[name], axes, sizes)
    if axes is not None and name != "axis_index" and any(axis in sizes for axis in _names(axes)):
        raise NotImplementedError(f"{name} over {axes}: what devices exchange in it is not counted")
    if name == "cond":
        branches = [_of_program(branch, sizes, loop_steps) for branch in params["branches"]]
        return max(branches, key=lambda counts: (counts.flops, counts.exchanged_bytes))
    if name == "while":
        turn = _of_program(params["cond_jaxpr"], sizes, loop_steps) + _of_program(
            params["body_jaxpr"], sizes, loop_steps
        )
        return turn.times(loop_steps)
    if name == "shard_map":
        sizes = dict(params["mesh"].shape)
    number = params["length"] if name == "scan" else 1
    inner = Counts()
    for value in params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(each, (core.Jaxpr, core.ClosedJaxpr)):
                inner += _of_program(each, sizes, loop_steps)
    return inner.times(number)


def _of_product(equation: Any, flops: float) -> Counts:
    touched = sum(_num_bytes(variable.aval) for variable in (*equation.invars, *equation.outvars))
    return Counts(flops=flops, product_bytes=touched)


def _dot_flops(equation: Any) -> float:
    ((contracted, _), _) = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)


def _ragged_dot_flops(equation: Any) -> float:
    """Of rows that are each multiplied with one of several matrices [O, I], or of the gradient of these."""
    left, right, out = (x.aval.shape for x in (*equation.invars[:2], *equation.outvars))
    if len(out) > 2:  # [groups, O, I] of rows [M, O] and [M, I]
        return 2.0 * math.prod(left) * right[-1]
    return 2.0 * math.prod(left) * out[-1]


def _of_kernel(equation: Any) -> Counts:
    """What a kernel multiplies in all blocks of its grid, and the blocks that it takes from memory and puts there.

    Whatever a mask lets it pass over is counted too. What it multiplies is on the chip.
    """
    mapping = equation.params["grid_mapping"]
    body = _of_program(equation.params["jaxpr"], {}, 1)
    moved = sum(_moved_bytes(block, mapping.grid) for block in mapping.block_mappings)
    return Counts(flops=math.prod(mapping.grid) * body.flops, product_bytes=moved)


def _moved_bytes(block: Any, grid: Sequence[int]) -> float:
    """A block stays on the chip while the indices that its place depends on stay; the last one turns fastest."""
    places = block.index_map_jaxpr.jaxpr
    needed = {id(variable) for variable in places.outvars}
    for equation in reversed(places.eqns):
        if any(id(variable) in needed for variable in equation.outvars):
            needed |= {id(variable) for variable in equation.invars}
    turning = [dim for dim, variable in enumerate(places.invars[: len(grid)]) if id(variable) in needed]
    return math.prod(grid[: max(turning, default=-1) + 1]) * _num_bytes(block.transformed_block_aval)


def _of_exchange(equation: Any, kind: str, axes: Any, sizes: Mapping[str, int]) -> Counts:
    """In rings: each device sends all parts of what is exchanged but one, and of a sum both its parts and the sum's."""
    number = math.prod(sizes[axis] for axis in _names(axes) if axis in sizes)
    if number == 1:
        return Counts()
    whole = sum(_num_bytes(variable.aval) for variable in equation.invars)
    whole *= {"all-gather": number, "all-reduce": 2}.get(kind, 1)
    sent = whole * (number - 1) / number
    return Counts(exchanged={kind: sent})


def _names(axes: Any) -> Sequence[Any]:
    return tuple(axes) if isinstance(axes, (tuple, list, frozenset)) else (axes,)


def _num_bytes(aval: Any) -> float:
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return 0.0  # keys of random numbers
    return float(math.prod(aval.shape) * np.dtype(aval.dtype).itemsize)
