"""The kernels of a program that XLA compiled for a GPU, from the files that XLA writes.

XLA's GPU compiler lowers a program to *thunks*: kernels, copies, library calls, loops and conditionals. Thunks in a
command buffer are launched together, as one CUDA graph. For a loop or conditional outside of one, the host waits for
its predicate, unless a loop's number of iterations is known.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_LOOP = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .* while\(.*"known_trip_count":\{"n":"(\d+)"', re.MULTILINE)
_THUNK = re.compile(r"^( *)(\d+): (k\w+) +\[[^\]]*\] *(.*)$")
_SECTION = re.compile(r"^( *)(\w+): *$")
_METADATA = re.compile(r'thunk_info \{([^}]*)\}\s*thunk_kind: "(\w+)"')
# They launch nothing on the device by themselves.
_GROUPS = frozenset({"kCommandBuffer", "kSequential", "kDynamicSliceFusion", "kAsyncStart", "kWhile", "kConditional"})
_SILENT = frozenset({"kAsyncDone", "kWaitForStreams", "kPartitionId", "kReplicaId"})


@dataclass
class Thunk:
    """An entry of the sequence that the host executes: a launch, or a group of them."""

    kind: str  # XLA's name of its kind, e.g. kCustomKernel or kWhile
    instruction: str  # name of its instruction; empty if it has none
    label: str  # its description, e.g. a kernel's name and grid
    # the thunks of a group, by the group's part, e.g. body
    sections: dict[str, list["Thunk"]] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """The launches of a part of a program, and how the host is involved."""

    # kernels, copies and library calls, in order, each with the number of times that it is launched
    launches: tuple[tuple[Thunk, int], ...] = ()
    host_visits: int = 0  # number of times that the host waits for a predicate
    dispatches: int = 0  # number of graphs, kernels and copies that the host launches

    def __add__(self, other: "Work") -> "Work":
        visits, dispatches = self.host_visits + other.host_visits, self.dispatches + other.dispatches
        return Work(self.launches + other.launches, visits, dispatches)

    def times(self, runs: int) -> "Work":
        """Returns the work of `runs` runs."""
        launches = tuple((thunk, runs * number) for thunk, number in self.launches)
        return Work(launches, runs * self.host_visits, runs * self.dispatches)

    @property
    def num_launches(self) -> int:
        """Number of kernels, copies and library calls."""
        return sum(number for _, number in self.launches)


@dataclass(frozen=True)
class GpuProgram:
    """A program compiled for a GPU."""

    hlo: str  # its instructions as text
    thunks: Sequence[Thunk]  # its thunks

    @cached_property
    def trip_counts(self) -> Mapping[str, int]:
        """Number of iterations of each loop that has a known one, by the loop's instruction."""
        return {name: int(number) for name, number in _LOOP.findall(self.hlo)}

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

    def _steps(self, thunks: Sequence[Thunk], loop_steps: int) -> tuple[list[tuple[Thunk, bool]], Work]:
        """Returns the program's loops, with whether each is in a graph, and the work outside of them."""
        loops, others = [], Work()
        for thunk in thunks:
            inner = [each for section in thunk.sections.values() for each in section]
            if thunk.kind == "kWhile" and self.trip_counts.get(thunk.instruction) in (None, loop_steps):
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
            return self._iteration(thunk, in_graph).times(self.trip_counts.get(thunk.instruction) or 1)
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
        return Work(((thunk, 1),), 0, 0 if in_graph else 1)

    def _iteration(self, loop: Thunk, in_graph: bool) -> Work:
        inner = [each for section in loop.sections.values() for each in section]
        waits = not in_graph and self.trip_counts.get(loop.instruction) is None
        return self._total(inner, in_graph) + Work((), int(waits), 0)

    def _total(self, thunks: Sequence[Thunk], in_graph: bool) -> Work:
        total = Work()
        for thunk in thunks:
            total += self._run(thunk, in_graph)
        return total


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
    """
    found = sorted(folder.glob(f"*.jit_{name or '*'}.thunk_sequence.txt"))
    if len(found) != 1:
        raise ValueError(f"{folder} has {len(found)} programs jit_{name or '*'} for GPUs, and one is expected")
    stem = found[0].name.removesuffix(".thunk_sequence.txt")
    [module] = folder.glob(f"{stem}.sm_*gpu_after_optimizations.txt")
    sequence, metadata = folder / f"{stem}.thunk_sequence_after_thunk_passes.txt", folder / f"{stem}.thunk_metadata.txt"
    # a program that launches nothing has no sequence
    thunks = parse_thunks(sequence.read_text(), metadata.read_text()) if sequence.is_file() else []
    return GpuProgram(module.read_text(), thunks)


def parse_thunks(sequence: str, metadata: str) -> list[Thunk]:
    """Parses XLA's dumps of the thunks of a program and of their instructions."""
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
