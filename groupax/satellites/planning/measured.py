"""Measurements of a run's programs: device memory, and a lower bound of the time."""

import hashlib
import re
import threading
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax

from groupax.core.errors import is_out_of_memory
from groupax.models.config import ModelConfig
from groupax.models.lora import LoRAConfig, adapter_specs
from groupax.models.specs import model_specs
from groupax.parallel.accelerators import Chip
from groupax.satellites.planning.abstract import Program, device_bytes
from groupax.satellites.planning.counting import Counts, count_program
from groupax.satellites.planning.run import Run

OTHER = "temporary"
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# Layers of each kind in the smallest of the models, whose first and last layers are compiled with what precedes and
# follows them, and how many more of one kind the others have, which are compiled as all others are.
_SMALLEST, _MORE = 2, 2


@dataclass(frozen=True)
class FewLayers:
    """A model with a few of the layers of another."""

    config: ModelConfig
    weight: float  # its share: what the other costs is the sum of what these models cost, times their weights


def few_layers(config: ModelConfig, lora: LoRAConfig | None = None) -> list[FewLayers]:
    """Returns models with a few layers that together tell what a model costs; the model itself if that is not larger.

    The first has two layers of each kind (all of a kind with up to three), and each of the others two more of one kind.

    Args:
        config: Config of the model.
        lora: Config of the adapter to train; layers that it treats differently are of different kinds.
    """
    whole, kinds = [FewLayers(config, 1.0)], _kinds(config, lora)
    numbers = Counter(kinds)
    smallest = {kind: _SMALLEST if number >= _SMALLEST + _MORE else number for kind, number in numbers.items()}
    weights = {kind: (number - _SMALLEST) / _MORE for kind, number in numbers.items() if number > smallest[kind]}
    if sum(smallest.values()) + _MORE >= config.num_layers:
        return whole
    models = [FewLayers(_of_kinds(config, kinds, smallest), 1 - sum(weights.values()))]
    for kind, weight in weights.items():
        models.append(FewLayers(_of_kinds(config, kinds, {**smallest, kind: _SMALLEST + _MORE}), weight))
    try:
        found = set().union(*(_kinds(model.config, lora) for model in models))
    except ValueError:  # the adapter names a layer that only the whole model has
        return whole
    return models if found == set(numbers) else whole


def extrapolated(models: Sequence[FewLayers], values: Sequence[float]) -> float:
    """Returns a quantity of the whole model, given that of each of the models; it is not negative."""
    return max(0.0, sum(model.weight * value for model, value in zip(models, values, strict=True)))


def _of_kinds(config: ModelConfig, kinds: Sequence[Hashable], numbers: Counter[Any] | dict[Any, int]) -> ModelConfig:
    """Returns a model with these numbers of layers of each kind, the first ones."""
    left, layers = dict(numbers), []
    for layer, kind in enumerate(kinds):
        if left[kind]:
            left[kind] -= 1
            layers.append(layer)
    experts, recurrent = (
        part and replace(part, layers=tuple(new for new, layer in enumerate(layers) if layer in part.layers))
        for part in (config.experts, config.recurrent)
    )
    return replace(
        config,
        num_layers=len(layers),
        ropes=tuple(config.ropes[layer] for layer in layers),
        windows=tuple(config.windows[layer] for layer in layers),
        experts=experts,
        recurrent=recurrent,
    )


def _kinds(config: ModelConfig, lora: LoRAConfig | None) -> list[Hashable]:
    """Returns what distinguishes each layer: positions, window, and the shapes of its weights and of its adapter's."""
    tables = [model_specs(config), *([adapter_specs(config, lora)] if lora else [])]
    leaves = jax.tree_util.tree_leaves_with_path
    weights = [
        tuple(
            (jax.tree_util.keystr(path), spec.shape)
            for table in tables
            for path, spec in leaves(table["layers"][layer])
        )
        for layer in range(config.num_layers)
    ]
    return list(zip(config.ropes, config.windows, weights, strict=True))


@dataclass(frozen=True)
class Compiled:
    """The needs of a compiled program."""

    temporary_bytes: float  # memory of a device for everything except the program's listed arguments
    seconds: float  # time that the compilation took


@dataclass(frozen=True)
class Measured:
    """A program of a run, measured on one device."""

    name: str
    runs: int  # number of runs in a rollout and the updates on it
    memory: Mapping[str, float]  # bytes in use while it runs, by kind, including arrays that it does not read
    counts: Counts  # counts of one run
    compile_s: float | None = None  # compilation time; None if it is not compiled, and its temporary memory an estimate
    transferred_bytes: float = 0.0  # bytes to and from the host in one run
    num_layers: tuple[int, ...] = ()  # numbers of layers of the models whose programs were compiled for it

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
        """Returns lower bounds of one run's time, by what limits it."""
        counts = self.counts
        return {
            "arithmetic": counts.flops / chip.flops,
            "memory": self.traffic_bytes / chip.memory_bytes_per_s,
            "links": counts.sent_bytes / chip.link_bytes_per_s,
            "network": counts.between_hosts / chip.network_bytes_per_s if chip.network_bytes_per_s else 0.0,
            "host": self.transferred_bytes / chip.host_bytes_per_s,
        }


@dataclass(frozen=True, eq=False)
class Extrapolation:
    """A program of a run, and the same program for models with a few of its layers, which tell what it needs."""

    program: Program  # the program for all layers
    models: Sequence[FewLayers]  # the models with a few layers
    programs: Sequence[Program]  # their programs

    @property
    def pairs(self) -> list[tuple[FewLayers, Program]]:
        """The models with a few layers, with their programs."""
        return list(zip(self.models, self.programs, strict=True))

    @cached_property
    def counts(self) -> Counts:
        """The counts of one run of the program."""
        total = Counts()
        for model, program in self.pairs:
            total += count_program(program.traced.jaxpr, program.loop_steps).times(model.weight)
        return total

    def estimated(self, run: Run, temporaries: Mapping[str, float]) -> Measured:
        """Returns the program's measurements before it is compiled, given estimates of its temporary memory by kind."""
        memory = {**_argument_bytes(run, self.program), **temporaries}
        program = self.program
        return Measured(program.name, program.runs, memory, self.counts, transferred_bytes=program.transferred_bytes)

    def measured(self, run: Run, compiled: Sequence[Compiled]) -> Measured:
        """Returns the program's measurements, given those of the programs for a few layers."""
        program, temporary = self.program, extrapolated(self.models, [each.temporary_bytes for each in compiled])
        return Measured(
            program.name,
            program.runs,
            {**_argument_bytes(run, program), OTHER: temporary},
            self.counts,
            sum(each.seconds for each in compiled),
            program.transferred_bytes,
            tuple(model.config.num_layers for model in self.models),
        )


def whole_program(config: ModelConfig, program: Program) -> Extrapolation:
    """Returns a program that is compiled with all layers of its model."""
    return Extrapolation(program, [FewLayers(config, 1.0)], [program])


def _argument_bytes(run: Run, program: Program) -> dict[str, float]:
    """Returns bytes of the run's resident arrays and of the program's own, by kind."""
    trees = {**run.residents, **program.arguments}
    return {kind: device_bytes({kind: tree}) for kind, tree in trees.items()}


@dataclass
class Compiler:
    """A compiler that compiles identical programs only once. It may be called in several threads."""

    all_layers: bool = False  # whether to compile programs with all layers of a model rather than with a few
    known: dict[str, Compiled] = field(default_factory=dict)  # the compiled programs
    _locks: dict[str, threading.Lock] = field(default_factory=dict)

    def compiled(self, program: Program) -> Compiled:
        """Compiles a program, which may turn out not to fit."""
        lowered = program.traced.lower()
        text = f"{device_bytes(program.arguments)} {lowered.as_text()}"
        key = hashlib.sha256(text.encode()).hexdigest()
        with self._locks.setdefault(key, threading.Lock()):
            if key not in self.known:
                self.known[key] = _compiled(lowered, program)
            return self.known[key]


def _compiled(lowered: Any, program: Program) -> Compiled:
    started_s = time.perf_counter()
    try:
        stats = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        found = re.search(r"temporaries \(([\d.]+)([KMG])\) exceeds available HBM", str(error))
        if found is None or not is_out_of_memory(error):
            raise
        temporaries = float(found[1]) * _UNITS[found[2]]
    else:
        others_bytes = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
        temporaries = float(others_bytes + stats.argument_size_in_bytes - device_bytes(program.arguments))
    return Compiled(temporaries, time.perf_counter() - started_s)


def step_seconds(programs: Sequence[Measured], run: Run, chip: Chip) -> dict[str, float]:
    """Returns lower bounds of the time of a rollout, of scoring it, and of the updates on it."""
    gathered_s = run.gathered_bytes / chip.link_bytes_per_s
    if chip.network_bytes_per_s:
        gathered_s = max(gathered_s, run.gathered_between_hosts / chip.network_bytes_per_s)
    phases = {"rollout": gathered_s, "scoring": run.fetched_bytes / chip.host_bytes_per_s, "updates": 0.0}
    for program in programs:
        phase = {"admit": "rollout", "decode_chunk": "rollout", "score": "scoring"}.get(program.name, "updates")
        phases[phase] += program.runs * max(program.seconds(chip).values())
    return phases
