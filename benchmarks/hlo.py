"""A reader of XLA's textual HLO: the instructions of a compiled program, and the bytes that each reads and writes."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_BITS = {"pred": 8, "token": 0, "opaque": 0}
# They rename or index what is there already.
_ALIASES = frozenset({"bitcast", "get-tuple-element", "parameter", "constant", "tuple", "after-all"})
# An element of their result needs more than one of an operand's.
_WHOLE = frozenset(
    {"reduce", "reduce-window", "dot", "convolution", "sort", "fusion", "custom-call", "copy", "all-reduce"}
)
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # the operand that holds the new elements


@dataclass(frozen=True)
class Array:
    """The type of an array."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> float:
        """Bytes in memory, without padding."""
        bits = _BITS.get(self.dtype)
        if bits is None:
            bits = int((re.search(r"\d+", self.dtype) or ["0"])[0])
        return math.prod(self.shape) * bits / 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Instruction:
    """An instruction of a computation.

    Attributes:
        name: Its name, unique within the module.
        opcode: What it does, e.g. fusion.
        arrays: Types of the results; a tuple's are flattened.
        operands: Names of the operands.
        attributes: The text that follows the operands.
        is_root: Whether it is the result of its computation.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool = False

    @property
    def num_bytes(self) -> float:
        """Bytes of the results."""
        return sum(array.num_bytes for array in self.arrays)

    @property
    def num_elements(self) -> int:
        """Number of elements of the results."""
        return sum(math.prod(array.shape) for array in self.arrays)

    @property
    def op_name(self) -> str:
        """The operation of the traced function, e.g. jit(decode_chunk)/while/body/dot_general."""
        return self._attribute(r'op_name="([^"]*)"')

    @property
    def target(self) -> str:
        """Target of a custom call."""
        return self._attribute(r'custom_call_target="([^"]*)"')

    @property
    def called(self) -> str:
        """Name of a fusion's computation."""
        return self._attribute(r"calls=%?([\w.\-]+)")

    @property
    def frame(self) -> int:
        """Number of the frame of the Python call that it comes from; 0 if that is unknown."""
        return int(self._attribute(r"stack_frame_id=(\d+)") or 0)

    def _attribute(self, pattern: str) -> str:
        match = re.search(pattern, self.attributes)
        return match[1] if match else ""


Computation = Mapping[str, Instruction]


@dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
        computations: The instructions of each computation, by name and in order.
        lines: Source file and line of each stack frame.
    """

    computations: Mapping[str, Computation]
    lines: Mapping[int, str]

    def instructions(self) -> dict[str, Instruction]:
        """Returns all instructions by name."""
        return {name: each for computation in self.computations.values() for name, each in computation.items()}

    def scope(self, instruction: Instruction) -> Computation:
        """Returns the computation that an instruction belongs to."""
        return next(each for each in self.computations.values() if instruction.name in each)

    def traffic(self, instruction: Instruction, scope: Computation) -> tuple[float, float]:
        """Returns the bytes that an instruction reads from memory, and those that it writes to it.

        Only the elements count that its result needs, e.g. the slices of an operand that is sliced, and none of an
        operand that is updated in place. Caches are ignored. The kernel of a custom call is assumed to read its
        operands whole, and to write nothing of note to those that it updates in place.

        Args:
            instruction: The instruction.
            scope: The computation that it belongs to.
        """
        if instruction.opcode in _ALIASES:
            return 0.0, 0.0
        fused = self.computations.get(instruction.called) if instruction.opcode == "fusion" else None
        inner, root = (fused, _root(fused)) if fused else (_alone(instruction, scope), instruction)
        needed, read = _needed(inner, root), 0.0
        for operand in inner.values():
            if operand.opcode != "parameter" if fused else operand is instruction:
                continue
            frac = min(needed.get(operand.name, 0.0) / max(operand.num_elements, 1), 1.0)
            read += frac * operand.num_bytes
        return read, _written(root, inner)

    def flops(self, instruction: Instruction, scope: Computation) -> float:
        """Returns the operations of an instruction's matmuls, those within a fusion included; custom calls have none.

        Args:
            instruction: The instruction.
            scope: The computation that it belongs to.
        """
        if instruction.opcode == "dot":
            contracted = _numbers(instruction.attributes, "lhs_contracting_dims")
            shape = scope[instruction.operands[0]].arrays[0].shape
            return 2.0 * instruction.num_elements * math.prod(shape[dim] for dim in contracted)
        inner = self.computations.get(instruction.called, {})
        return sum((self.flops(each, inner) for each in inner.values()), 0.0)


def parse_hlo(text: str) -> Module:
    """Parses the text of a module, as XLA dumps it or `jax.stages.Compiled.as_text` returns it.

    Raises:
        ValueError: The text contains no computation.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] | None = None
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            current = computations.setdefault(match[2], {})
        elif line.startswith("}"):
            current = None
        elif current is not None and (instruction := _parse_instruction(line)):
            current[instruction.name] = instruction
    if not computations:
        raise ValueError(f"this is not the text of an HLO module: {text[:80]!r}")
    return Module(computations, _source_lines(text))


def _parse_instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    is_root, name, rest = match.groups()
    rest = re.sub(r"/\*.*?\*/", "", rest)
    split = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    kind, call = rest[:split], rest[split:].lstrip()
    opcode, _, call = call.partition("(")
    end = _closing("(" + call) - 1
    operands = tuple(each.split()[-1].lstrip("%") for each in _split(call[:end]))
    arrays = tuple(
        Array(dtype, tuple(int(each) for each in dims.split(",") if each)) for dtype, dims in _ARRAY.findall(kind)
    )
    return Instruction(name, opcode, arrays, operands, call[end + 1 :], is_root is not None)


def _closing(text: str) -> int:
    """Returns the index of the parenthesis that closes the one with which the text begins."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"unbalanced parentheses: {text[:80]!r}")


def _split(operands: str) -> Iterator[str]:
    """Yields the operands; the commas in braces, brackets and parentheses do not separate them."""
    depth, start = 0, 0
    for index, char in enumerate(operands):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            yield operands[start:index]
            start = index + 1
    if operands[start:].strip():
        yield operands[start:]


def _alone(instruction: Instruction, scope: Computation) -> Computation:
    """Returns a computation of nothing but an instruction and its operands."""
    operands = {name: scope[name] for name in instruction.operands if name in scope}
    return {**operands, instruction.name: instruction}


def _root(computation: Computation) -> Instruction:
    return next(each for each in computation.values() if each.is_root)


def _needed(computation: Computation, root: Instruction) -> dict[str, float]:
    """Returns the number of elements of each array of a computation that its result needs."""
    needed = {root.name: float(root.num_elements)}
    for instruction in reversed(list(computation.values())):
        number = needed.get(instruction.name, 0.0)
        if not number or instruction.opcode == "parameter":
            continue
        for index, name in enumerate(instruction.operands):
            if name in computation:
                of_operand = _of_operand(instruction, index, number, computation)
                needed[name] = needed.get(name, 0.0) + of_operand
    return needed


def _of_operand(instruction: Instruction, index: int, number: float, computation: Computation) -> float:
    """Returns the elements of an operand that this number of elements of an instruction's result needs."""
    operand = computation[instruction.operands[index]]
    size = float(operand.num_elements)
    if instruction.opcode in _UPDATES:
        return number if index == 0 and not _is_argument(operand, computation) else 0.0 if index == 0 else size
    if instruction.opcode in _WHOLE:
        return size * number / max(instruction.num_elements, 1)
    return min(size, number)


def _is_argument(instruction: Instruction, computation: Computation) -> bool:
    """Returns whether an array is in memory before the computation, under this or another name."""
    while instruction.opcode == "bitcast" and instruction.operands[0] in computation:
        instruction = computation[instruction.operands[0]]
    return instruction.opcode in ("parameter", "get-tuple-element", "bitcast", "fusion", "custom-call", "copy")


def _written(root: Instruction, computation: Computation) -> float:
    if root.opcode == "tuple":
        return sum(_written(computation[name], computation) for name in root.operands)
    if root.opcode == "bitcast" and root.operands[0] in computation:
        return _written(computation[root.operands[0]], computation)
    if root.opcode == "custom-call":  # what it updates in place is not known
        in_place = {int(index) for index in re.findall(r"\{(\d*)\}: \(\d+", _aliasing(root.attributes)) if index}
        in_place |= {0} if "{}: (" in _aliasing(root.attributes) else set()
        return sum(array.num_bytes for index, array in enumerate(root.arrays) if index not in in_place)
    if root.opcode in _UPDATES:
        new = computation.get(root.operands[_UPDATES[root.opcode]])
        return root.num_bytes if new is None else new.num_bytes
    return root.num_bytes


def _aliasing(attributes: str) -> str:
    match = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", attributes)
    return match[1] if match else ""


def _numbers(attributes: str, name: str) -> list[int]:
    match = re.search(rf"\b{name}=\{{([\d,]*)\}}", attributes)
    return [int(number) for number in match[1].split(",") if number] if match else []


def _source_lines(text: str) -> dict[int, str]:
    """Returns the file and line of each stack frame, from the tables at the head of a module."""
    tables: dict[str, dict[int, str]] = {}
    table: dict[int, str] = {}
    for line in text.splitlines():
        if re.fullmatch(r"[A-Z]\w+", line):
            table = tables.setdefault(line, {})
        elif match := re.match(r"(\d+) (.*)", line):
            table[int(match[1])] = match[2]
        elif line.startswith(("%", "ENTRY")):
            break
    files, places = tables.get("FileNames", {}), tables.get("FileLocations", {})
    lines = {}
    for frame, entry in tables.get("StackFrames", {}).items():
        place = places.get(_number("file_location_id", entry), "")
        file = files.get(_number("file_name_id", place), "").strip('"')
        lines[frame] = f"{file}:{_number('line', place)}"
    return lines


def _number(key: str, text: str) -> int:
    match = re.search(rf"\b{key}=(\d+)", text)
    return int(match[1]) if match else 0
