"""The kernels of a program that XLA compiled for a GPU, read from the files that its compiler writes.

XLA's GPU compiler lowers a program to *thunks*: kernels, copies, library calls, loops and conditionals. Thunks in a
command buffer are launched together, as one CUDA graph. For a loop or conditional outside of one, the host waits for
its predicate, unless a loop's number of iterations is known.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from groupax.planning.buffers import Buffer, parse_temporaries
from groupax.planning.hlo import Computation, Instruction, Module, parse_hlo

_THUNK = re.compile(r"^( *)(\d+): (k\w+) +\[[^\]]*\] *(.*)$")
_SECTION = re.compile(r"^( *)(\w+): *$")
_METADATA = re.compile(r'thunk_info \{([^}]*)\}\s*thunk_kind: "(\w+)"')
# They launch nothing on the device by themselves.
_GROUPS = frozenset({"kCommandBuffer", "kSequential", "kDynamicSliceFusion", "kAsyncStart", "kWhile", "kConditional"})
_SILENT = frozenset({"kAsyncDone", "kWaitForStreams", "kPartitionId", "kReplicaId"})


@dataclass
class Thunk:
    """An entry of the sequence that the host executes: a launch, or a group of them.

    Attributes:
        kind: XLA's name of its kind, e.g. kCustomKernel or kWhile.
        instruction: Name of its instruction; empty if it has none.
        label: Its description, e.g. a kernel's name and grid.
        sections: The thunks of a group, by the group's part, e.g. body.
    """

    kind: str
    instruction: str
    label: str
    sections: dict[str, list["Thunk"]] = field(default_factory=dict)


@dataclass(frozen=True)
class Launch:
    """A kernel, a copy or a library call, as often as one run of a program launches it.

    Attributes:
        thunk: The thunk.
        runs: Number of launches in a run.
    """

    thunk: Thunk
    runs: int


@dataclass(frozen=True)
class Work:
    """The launches of a part of a program, and how the host is involved.

    Attributes:
        launches: The launches, in order.
        host_visits: Number of times that the host waits for a predicate.
        dispatches: Number of graphs, kernels and copies that the host launches.
    """

    launches: tuple[Launch, ...] = ()
    host_visits: int = 0
    dispatches: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.launches + other.launches, self.host_visits + other.host_visits, self.dispatches + other.dispatches
        )

    def times(self, runs: int) -> "Work":
        """Returns the work of `runs` runs."""
        launches = tuple(Launch(each.thunk, runs * each.runs) for each in self.launches)
        return Work(launches, runs * self.host_visits, runs * self.dispatches)

    @property
    def num_launches(self) -> int:
        """Number of kernels, copies and library calls."""
        return sum(each.runs for each in self.launches)


@dataclass(frozen=True)
class Counts:
    """The kernels that a part of a program launches, and their memory traffic.

    Attributes:
        kernels: Number of kernels, copies and library calls.
        copies: Number of copies among them.
        sorts: Number of sorts; one may take many kernels.
        calls: Number of custom calls by target: libraries, and kernels written in Triton.
        flops: Operations of XLA's matmuls; those of custom calls are not known.
        read_bytes: Bytes that are read from memory, see `Module.traffic`.
        written_bytes: Bytes that are written to memory.
    """

    kernels: int
    copies: int
    sorts: int
    calls: Mapping[str, int]
    flops: float
    read_bytes: float
    written_bytes: float


@dataclass(frozen=True)
class GpuProgram:
    """A program compiled for a GPU.

    Attributes:
        module: Its instructions.
        thunks: Its thunks.
        temporaries: The arrays in its temporary memory.
    """

    module: Module
    thunks: Sequence[Thunk]
    temporaries: Sequence[Buffer] = ()

    @cached_property
    def scopes(self) -> dict[str, Computation]:
        """The computation of each instruction, by the instruction's name."""
        return {name: scope for scope in self.module.computations.values() for name in scope}

    def instruction(self, thunk: Thunk) -> Instruction | None:
        """Returns a thunk's instruction, if it has one."""
        return self.scopes.get(thunk.instruction, {}).get(thunk.instruction)

    def work(self, loop_steps: int = 1) -> tuple[Work, Work]:
        """Returns the work of a step of the program's loop, and that outside of this loop, in one run.

        A program's loop is one that is not inside another and whose number of iterations is unknown, or is
        `loop_steps`. Other loops count as often as they run, and conditionals with the branch that launches least.
        Without such a loop the first is the work of the whole program.

        Args:
            loop_steps: Number of iterations of the program's loop.
        """
        loops, others = self._steps(self.thunks, loop_steps)
        if not loops:
            return others, Work()
        step = Work()
        for loop, in_graph in loops:
            step += self._iteration(loop, in_graph)
        return step, others

    def count(self, work: Work) -> Counts:
        """Counts the launches of a part of the program by kind, and their memory traffic."""
        copies, sorts, flops, calls, read, written = 0, 0, 0.0, Counter[str](), 0.0, 0.0
        last = ""
        for launch in work.launches:
            instruction = self.instruction(launch.thunk)
            copies += launch.runs if launch.thunk.kind == "kCopy" else 0
            if instruction is None or instruction.name == last:  # of a sort, whose first kernel stands for all
                continue
            last, scope = instruction.name, self.scopes[instruction.name]
            if instruction.opcode == "custom-call":
                calls[instruction.target] += launch.runs
            inner = self.module.computations.get(instruction.called, {}).values()
            sorts += launch.runs if any(each.opcode == "sort" for each in (instruction, *inner)) else 0
            flops += launch.runs * self.module.flops(instruction, scope)
            moved = self.module.traffic(instruction, scope)
            read, written = read + launch.runs * moved[0], written + launch.runs * moved[1]
        return Counts(work.num_launches, copies, sorts, dict(calls), flops, read, written)

    def describe(self, work: Work) -> Iterator[str]:
        """Yields a line for each launch: its number, megabytes read and written, operation, source and results."""
        for launch in work.launches:
            instruction = self.instruction(launch.thunk)
            if instruction is None:
                yield f"{launch.runs} x {launch.thunk.kind} {launch.thunk.label}"
                continue
            read, written = self.module.traffic(instruction, self.scopes[instruction.name])
            source = "/".join(self.module.lines.get(instruction.frame, "").split("/")[-2:])
            results = " ".join(map(str, instruction.arrays))
            what = instruction.target or instruction.op_name
            yield (
                f"{launch.runs:4} x {read / 1e6:9.3f} {written / 1e6:9.3f} MB  {instruction.name}  {what}  {source}  "
                f"{results}"
            )

    def _steps(self, thunks: Sequence[Thunk], loop_steps: int) -> tuple[list[tuple[Thunk, bool]], Work]:
        """Returns the program's loops, with whether each is in a graph, and the work outside of them."""
        loops, others = [], Work()
        for thunk in thunks:
            inner = [each for section in thunk.sections.values() for each in section]
            if thunk.kind == "kWhile" and self._trip_count(thunk) in (None, loop_steps):
                loops.append((thunk, False))
            elif thunk.kind == "kCommandBuffer" and any(each.kind == "kWhile" for each in inner):
                found, rest = self._steps(inner, loop_steps)
                loops += [(loop, True) for loop, _ in found]
                others += Work(rest.launches, 0, 1)
            else:
                others += self._run(thunk, in_graph=False)
        return loops, others

    def _run(self, thunk: Thunk, in_graph: bool) -> Work:
        if thunk.kind == "kWhile":
            return self._iteration(thunk, in_graph).times(self._trip_count(thunk) or 1)
        if thunk.kind == "kConditional":
            branches = [self._total(section, in_graph) for section in thunk.sections.values()]
            return min(branches, key=lambda work: work.num_launches) + Work((), 0 if in_graph else 1, 0)
        inner = [each for section in thunk.sections.values() for each in section]
        if thunk.kind == "kCommandBuffer":
            return Work(self._total(inner, True).launches, 0, 0 if in_graph else 1)
        if thunk.kind in _GROUPS:
            return self._total(inner, in_graph)
        if thunk.kind in _SILENT:
            return Work()
        return Work((Launch(thunk, 1),), 0, 0 if in_graph else 1)

    def _iteration(self, loop: Thunk, in_graph: bool) -> Work:
        inner = [each for section in loop.sections.values() for each in section]
        waits = not in_graph and self._trip_count(loop) is None
        return self._total(inner, in_graph) + Work((), int(waits), 0)

    def _total(self, thunks: Sequence[Thunk], in_graph: bool) -> Work:
        total = Work()
        for thunk in thunks:
            total += self._run(thunk, in_graph)
        return total

    def _trip_count(self, loop: Thunk) -> int | None:
        instruction = self.instruction(loop)
        return instruction.trip_count if instruction else None


def compile_for_gpu(lowered: Any) -> tuple[Any, GpuProgram]:
    """Compiles a lowered program for the GPU of its devices, which may be absent.

    Returns:
        The compiled program, and its kernels.
    """
    with TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        return compiled, read_gpu_program(Path(folder))


def read_gpu_program(folder: Path, name: str = "") -> GpuProgram:
    """Reads a program from the folder that XLA dumped it to, as text.

    Args:
        folder: The folder.
        name: Name of the jitted function, if the folder holds several.

    Raises:
        ValueError: The folder holds no such program for a GPU, or several.
    """
    found = sorted(folder.glob(f"*.jit_{name or '*'}.thunk_sequence.txt"))
    if len(found) != 1:
        raise ValueError(f"{folder} has {len(found)} programs jit_{name or '*'} for GPUs, and one is expected")
    stem = found[0].name.removesuffix(".thunk_sequence.txt")
    [module] = folder.glob(f"{stem}.sm_*gpu_after_optimizations.txt")
    sequence, metadata = folder / f"{stem}.thunk_sequence_after_thunk_passes.txt", folder / f"{stem}.thunk_metadata.txt"
    # a program that launches nothing has no sequence, and the dumps of some others lack the buffers
    thunks = parse_thunks(sequence.read_text(), metadata.read_text()) if sequence.is_file() else []
    buffers = "".join(path.read_text() for path in folder.glob(f"{stem}.sm_*-buffer-assignment.txt"))
    return GpuProgram(parse_hlo(module.read_text()), thunks, parse_temporaries(buffers))


def parse_thunks(sequence: str, metadata: str) -> list[Thunk]:
    """Parses XLA's dumps of the thunks of a program and of their instructions.

    Raises:
        ValueError: The thunks' nesting has an unknown form.
    """
    names = {}
    for info, kind in _METADATA.findall(metadata):
        number, name = (re.search(rf"{key}: \"?([^\"\s]+)", info) for key in ("thunk_id", "profile_annotation"))
        if number and name:
            names[int(number[1]), kind] = name[1]
    top: list[Thunk] = []
    groups: list[tuple[int, Thunk, str]] = []  # those that are open: their indentation, and the current section
    for line in sequence.splitlines():
        if match := _SECTION.match(line):
            _open_section(groups, len(match[1]), match[2])
        elif match := _THUNK.match(line):
            indentation, (number, kind, label) = len(match[1]), match.groups()[1:]
            while groups and groups[-1][0] >= indentation:
                groups.pop()
            thunk = Thunk(kind, names.get((int(number), kind), ""), label.strip())
            siblings = groups[-1][1].sections.setdefault(groups[-1][2], []) if groups else top
            siblings.append(thunk)
            groups.append((indentation, thunk, ""))
        elif line.strip():
            raise ValueError(f"unknown line in XLA's sequence of thunks: {line!r}")
    return top


def _open_section(groups: list[tuple[int, Thunk, str]], indentation: int, name: str) -> None:
    # XLA does not indent the heading of a loop's condition, which directly follows the loop
    while name != "condition" and groups and groups[-1][0] >= indentation:
        groups.pop()
    if not groups:
        raise ValueError(f"a section {name!r} that belongs to no thunk")
    groups[-1] = (*groups[-1][:2], name)
