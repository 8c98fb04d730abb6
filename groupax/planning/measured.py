"""Measurements of compiled programs: device memory, and a lower bound of the time."""

import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from groupax.errors import is_out_of_memory
from groupax.parallel.accelerators import Chip
from groupax.planning.counting import Counts, count_program
from groupax.planning.programs import Program, device_bytes
from groupax.planning.run import Run

OTHER = "temporary"
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Measured:
    """A measured program of a run, on one device.

    Attributes:
        name: Name of the function.
        runs: Number of runs in a rollout and the updates on it.
        memory: Bytes in use while it runs, by kind, including arrays that it does not read.
        counts: Counts of one run.
        compile_s: Compilation time; the compiler gives up on programs that do not fit.
        transferred_bytes: Bytes to and from the host in one run.
    """

    name: str
    runs: int
    memory: Mapping[str, float]
    counts: Counts
    compile_s: float
    transferred_bytes: float = 0.0

    @property
    def total(self) -> float:
        """Bytes in use while it runs."""
        return sum(self.memory.values())

    @property
    def traffic_bytes(self) -> float:
        """Least memory traffic: that of matmuls; an update also reads and writes the state and reads the gradients."""
        if self.name != "apply_update":
            return self.counts.product_bytes
        masters, optimizer, gradients = (self.memory.get(kind, 0.0) for kind in ("masters", "optimizer", "gradients"))
        return self.counts.product_bytes + 2 * (masters + optimizer) + gradients

    def seconds(self, chip: Chip) -> dict[str, float]:
        """Returns lower bounds of one run's time: for arithmetic, memory, links between devices, and the host."""
        return {
            "arithmetic": self.counts.flops / chip.flops,
            "memory": self.traffic_bytes / chip.memory_bytes_per_s,
            "links": self.counts.sent_bytes / chip.link_bytes_per_s,
            "host": self.transferred_bytes / chip.host_bytes_per_s,
        }


@dataclass
class Compiler:
    """A compiler that compiles identical programs only once.

    Attributes:
        known: Memory of each program (only its temporary bytes if it does not fit), and seconds of compilation.
    """

    known: dict[str, tuple[Any, float]] = field(default_factory=dict)

    def measured(self, run: Run, program: Program) -> Measured:
        """Compiles a program of a run and measures it together with the run's resident arrays."""
        lowered = program.traced.lower()
        found, seconds = self._memory_of(lowered)
        counts = count_program(program.traced.jaxpr, program.loop_steps)
        trees = {**run.residents, **program.arguments}
        memory = {kind: device_bytes({kind: tree}) for kind, tree in trees.items()}
        if isinstance(found, float):  # arguments are counted here
            memory[OTHER] = found
        else:
            arguments, others = found
            memory[OTHER] = others + arguments - device_bytes(program.arguments)
        return Measured(program.name, program.runs, memory, counts, seconds, program.transferred_bytes)

    def _memory_of(self, lowered: Any) -> tuple[Any, float]:
        """Returns bytes of arguments and of all else (only the latter if the program does not fit), and seconds."""
        key = hashlib.sha256(lowered.as_text().encode()).hexdigest()
        if key not in self.known:
            started_s = time.perf_counter()
            try:
                stats: Any = lowered.compile().memory_analysis()
            except jax.errors.JaxRuntimeError as error:
                temporaries = _temporary_bytes(str(error)) if is_out_of_memory(error) else None
                if temporaries is None:
                    raise
                self.known[key] = temporaries, time.perf_counter() - started_s
            else:
                others = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
                found = float(stats.argument_size_in_bytes), float(others)
                self.known[key] = found, time.perf_counter() - started_s
        return self.known[key]


def _temporary_bytes(message: str) -> float | None:
    """Parses the temporary bytes of a program that does not fit from XLA's message."""
    match = re.search(r"temporaries \(([\d.]+)([KMG])\) exceeds available HBM", message)
    return float(match[1]) * _UNITS[match[2]] if match else None


def step_seconds(programs: Sequence[Measured], run: Run, chip: Chip) -> dict[str, float]:
    """Returns lower bounds of the time of a rollout, of scoring it, and of the updates on it."""
    phases = {
        "rollout": run.gathered_bytes / chip.link_bytes_per_s,
        "scoring": run.fetched_bytes / chip.host_bytes_per_s,
        "updates": 0.0,
    }
    for program in programs:
        phase = {"admit": "rollout", "decode_chunk": "rollout", "score": "scoring"}.get(program.name, "updates")
        phases[phase] += program.runs * max(program.seconds(chip).values())
    return phases
