"""The work of a traced program on each device: operations and memory traffic of matmuls, and bytes of collectives.

The traced program is counted because its loops state how often they run; XLA's analysis of a compiled program counts a
loop's body once. Everything except matmuls is left out: compilers fuse it into them, or it is small.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import Mesh


@dataclass(frozen=True)
class Counts:
    """Counts of one run of a program on one device."""

    flops: float = 0.0  # operations of matmuls
    product_bytes: float = 0.0  # bytes that matmuls read and write
    exchanged: Mapping[str, float] = field(default_factory=dict)  # bytes that a device sends to others, by collective
    between_hosts: float = 0.0  # a device's share of the bytes that its host sends to other hosts

    def __add__(self, other: "Counts") -> "Counts":
        kinds = {**self.exchanged, **other.exchanged}
        exchanged = {kind: self.exchanged.get(kind, 0.0) + other.exchanged.get(kind, 0.0) for kind in kinds}
        return Counts(
            self.flops + other.flops,
            self.product_bytes + other.product_bytes,
            exchanged,
            self.between_hosts + other.between_hosts,
        )

    def times(self, number: float | int) -> "Counts":
        """Returns the counts of `number` runs."""
        exchanged = {kind: number * sent for kind, sent in self.exchanged.items()}
        return Counts(
            number * self.flops,
            number * self.product_bytes,
            exchanged,
            number * self.between_hosts,
        )

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends in total."""
        return sum(self.exchanged.values(), 0.0)


_COLLECTIVES = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
}


def count_program(program: Any, loop_steps: int = 1) -> Counts:
    """Counts the work of a program on a device.

    Args:
        program: A jaxpr; the bodies of its `shard_map`s are per device.
        loop_steps: Number of iterations of loops whose ends depend on what they compute.
    """
    return _count_jaxpr(program, None, loop_steps)


def _count_jaxpr(program: Any, mesh: Mesh | None, loop_steps: int) -> Counts:
    jaxpr = program.jaxpr if isinstance(program, core.ClosedJaxpr) else program
    total = Counts()
    for equation in jaxpr.eqns:
        total += _count_equation(equation, mesh, loop_steps)
    return total


def _count_equation(equation: Any, mesh: Mesh | None, loop_steps: int) -> Counts:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _count_matmul(equation, _dot_flops(equation))
    if name in ("ragged_dot", "ragged_dot_general"):
        return _count_matmul(equation, _ragged_dot_flops(equation))
    if name == "pallas_call":
        return _count_kernel(equation)
    axes = params.get("axes", params.get("axis_name"))
    if name in _COLLECTIVES:
        return _count_collective(equation, _COLLECTIVES[name], axes, mesh)
    if axes is not None and mesh and name != "axis_index" and any(axis in mesh.shape for axis in _names(axes)):
        raise NotImplementedError(f"{name} over {axes}: this collective is not counted")
    if name == "cond":
        branches = [_count_jaxpr(branch, mesh, loop_steps) for branch in params["branches"]]
        return max(branches, key=lambda counts: (counts.flops, counts.sent_bytes))
    if name == "while":
        iteration = _count_jaxpr(params["cond_jaxpr"], mesh, loop_steps) + _count_jaxpr(
            params["body_jaxpr"], mesh, loop_steps
        )
        return iteration.times(loop_steps)
    if name == "shard_map":
        mesh = params["mesh"]
    number = params["length"] if name == "scan" else 1
    inner = Counts()
    for value in params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(each, (core.Jaxpr, core.ClosedJaxpr)):
                inner += _count_jaxpr(each, mesh, loop_steps)
    return inner.times(number)


def _count_matmul(equation: Any, flops: float) -> Counts:
    touched = sum(_num_bytes(variable.aval) for variable in (*equation.invars, *equation.outvars))
    return Counts(flops=flops, product_bytes=touched)


def _dot_flops(equation: Any) -> float:
    ((contracted, _), _) = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)


def _ragged_dot_flops(equation: Any) -> float:
    """Returns the operations of rows that are each multiplied by one of several matrices, or of their gradient."""
    left, right, out = (x.aval.shape for x in (*equation.invars[:2], *equation.outvars))
    if len(out) > 2:  # [groups, O, I] of rows [M, O] and [M, I]
        return 2.0 * math.prod(left) * right[-1]
    return 2.0 * math.prod(left) * out[-1]


def _count_kernel(equation: Any) -> Counts:
    """Counts the matmuls of a kernel in all blocks of its grid, and the blocks that it reads from and writes to memory.

    Blocks that a mask lets it skip are counted too. Operands of its matmuls are on the chip. A kernel whose loops
    depend on its data states its work itself, as its `cost_estimate`.
    """
    stated = equation.params["cost_estimate"]
    if stated is not None:
        return Counts(flops=float(stated.flops), product_bytes=float(stated.bytes_accessed))
    mapping = equation.params["grid_mapping"]
    body = _count_jaxpr(equation.params["jaxpr"], None, 1)
    moved = sum(_moved_bytes(block, mapping.grid) for block in mapping.block_mappings)
    return Counts(flops=math.prod(mapping.grid) * body.flops, product_bytes=moved)


def _moved_bytes(block: Any, grid: Sequence[int]) -> float:
    """Returns a block's traffic: it is moved whenever an index that it depends on changes; the last is the fastest."""
    index_map = block.index_map_jaxpr.jaxpr
    needed = {id(variable) for variable in index_map.outvars}
    for equation in reversed(index_map.eqns):
        if any(id(variable) in needed for variable in equation.outvars):
            needed |= {id(variable) for variable in equation.invars}
    used = [dim for dim, variable in enumerate(index_map.invars[: len(grid)]) if id(variable) in needed]
    return math.prod(grid[: max(used, default=-1) + 1]) * _num_bytes(block.transformed_block_aval)


def _count_collective(equation: Any, kind: str, axes: Any, mesh: Mesh | None) -> Counts:
    """Counts a ring collective: each device sends all shards but one, and for an all-reduce sends them twice."""
    along = [axis for axis in _names(axes) if mesh and axis in mesh.shape]
    number = math.prod(mesh.shape[axis] for axis in along) if mesh else 1
    if mesh is None or number == 1:
        return Counts()
    num_bytes = sum(_num_bytes(variable.aval) for variable in equation.invars)
    num_bytes *= {"all-gather": number, "all-reduce": 2}.get(kind, 1)
    sent = num_bytes * (number - 1) / number
    group = mesh.devices[tuple(slice(None) if axis in along else 0 for axis in mesh.axis_names)]
    return Counts(exchanged={kind: sent}, between_hosts=bytes_between_hosts(sent, group.flat))


def bytes_between_hosts(sent: float, devices: Iterable[Any]) -> float:
    """Returns a device's share of what a ring of devices sends from host to host, where each device sends `sent` bytes.

    As many rings as a host has devices share the bytes, so that each enters and leaves the host once, through another
    port of its network.
    """
    hosts = Counter(device.process_index for device in devices)
    return sent / min(hosts.values()) if len(hosts) > 1 else 0.0


def _names(axes: Any) -> Sequence[Any]:
    return tuple(axes) if isinstance(axes, (tuple, list, frozenset)) else (axes,)


def _num_bytes(aval: Any) -> float:
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return 0.0  # PRNG keys
    return float(math.prod(aval.shape) * np.dtype(aval.dtype).itemsize)
