"""Batches that change only to shapes whose programs are compiled, and the programs that requests need.

A request that needs another shape waits until all programs are compiled that it and the running sequences may need;
these continue meanwhile. Therefore shapes are few here, in larger steps than elsewhere.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import permutations
from typing import Any, get_args

import numpy as np

from groupax.engine.ahead_of_time import Admit, Change, Create, Decode, Program
from groupax.engine.batch import Batch
from groupax.engine.core import EngineCore
from groupax.engine.plan import CACHE_COLUMNS, CacheShape, Plan, max_prompts, power_of_two
from groupax.engine.programs import Programs
from groupax.engine.scheduler import Scheduler
from groupax.engine.sequence import Sequence, required_columns
from groupax.parallel.mesh import num_data_shards
from groupax.settings.sampling import SamplingKind

PROMPT_COLUMNS, PROMPT_STEP = 128, 4
COLUMNS_STEP = 2
SMALLEST_ADMISSION = 2  # prompts; larger numbers are admitted in several where no larger size is compiled


class PreparedBatch(Batch):
    """A batch whose shapes are limited to those that are compiled.

    Args:
        programs: The compiled programs.
        core, plan, sequences, patience: Arguments of `Batch`.

    Attributes:
        declined: The last shape that was not compiled when the batch would have changed to it; None for none.
    """

    def __init__(
        self, programs: Programs, core: EngineCore, plan: Plan, sequences: list[Sequence], patience: int
    ) -> None:
        self.programs = programs
        self.declined: CacheShape | None = None
        super().__init__(core, plan, sequences, patience)

    def missing_programs(self) -> list[Program]:
        """Returns the programs that the last declined shape lacks, and forgets the shape."""
        declined, self.declined = self.declined, None
        return [] if declined is None else self.programs.missing(self._programs_of(declined))

    def _programs_of(self, shape: CacheShape) -> Iterator[Program]:
        """Yields the programs that change to a shape and continue in it."""
        if shape != self.shape:
            yield Change(self.shape, shape)
        yield from self._future_programs(shape)

    def _future_programs(self, shape: CacheShape) -> Iterator[Program]:
        sequences = [*self.scheduler.running, *self.scheduler.queued]
        return future_programs(shape, super()._sampling(sequences), self._last_columns(), self.plan.allows)

    def _last_columns(self) -> int:
        """Returns the number of columns that the longest completion will need."""
        return self._columns(required_columns([*self.scheduler.running, *self.scheduler.queued], self.chunk_steps)[1])

    def _first_shape(self, sequences: list[Sequence]) -> CacheShape:
        shape = super()._first_shape(sequences)
        wider = replace(shape, num_prompt_columns=self._prompt_columns(shape.num_prompt_columns))
        return wider if self.plan.allows(wider) else shape

    def _columns(self, num_tokens: int) -> int:
        return in_steps(num_tokens, CACHE_COLUMNS, COLUMNS_STEP)

    def _prompt_columns(self, num_tokens: int) -> int:
        return in_steps(num_tokens, PROMPT_COLUMNS, PROMPT_STEP)

    def _fitting_share(self) -> int:
        """Returns the present number of slots per prompt slot, or 1: programs are compiled for both."""
        return self.scheduler.share if super()._fitting_share() == self.scheduler.share else 1

    def _max_prompts(self) -> int:
        columns = self.shape.num_prompt_columns
        full = [num for num, length in self.programs.admissions(self.shape) if length == columns]
        return min(max_prompts(columns), max(full, default=SMALLEST_ADMISSION))

    def _admission_size(self, size: tuple[int, int]) -> tuple[int, int]:
        compiled = [each for each in self.programs.admissions(self.shape) if each[0] >= size[0] and each[1] >= size[1]]
        return min(compiled, key=lambda each: each[0] * each[1], default=size)

    def _sampling(self, sequences: Iterable[Sequence]) -> SamplingKind:
        """Returns the kind that the sequences need, or "general" where only that is compiled."""
        sampling = super()._sampling(sequences)
        return "general" if self.programs.missing([Decode(self.shape, sampling)]) else sampling

    def _is_prepared(self, shape: CacheShape) -> bool:
        if not self.programs.missing(self._programs_of(shape)):
            return True
        self.declined = shape
        return False


class Rehearsal(PreparedBatch):
    """A batch without arrays, which finds the programs that another one would call if further sequences joined it.

    Args:
        batch: The batch to rehearse, which is not changed.

    Attributes:
        needed: The programs that it would call.
    """

    def __init__(self, batch: PreparedBatch) -> None:
        self.__dict__.update(vars(batch))
        self._now = batch.shape
        self.needed: list[Program] = []
        self.scheduler = _copied_scheduler(batch.scheduler)

    @classmethod
    def of_first(cls, programs: Programs, core: EngineCore, plan: Plan, sequences: list[Sequence]) -> "Rehearsal":
        """Returns the rehearsal of a new batch.

        Args:
            programs: The compiled programs.
            core, plan: Arguments of `Batch`.
            sequences: Copies of the sequences.
        """
        self = cls.__new__(cls)
        self.programs, self.declined, self.needed, self.column = programs, None, [], 0
        self.core, self.plan, self.mesh, self.chunk_steps = core, plan, core.mesh, core.chunk_steps
        shape = self._first_shape(sequences)
        self._now = replace(shape, num_columns=self._columns(self.chunk_steps))
        self.scheduler = Scheduler(num_data_shards(self.mesh), shape.num_slots, shape.share)
        self.scheduler.submit(sequences)
        self.needed.append(Create(self._now))
        return self

    @property
    def shape(self) -> CacheShape:
        """Shape of each shard's cache."""
        return self._now

    def run(self) -> list[Program]:
        """Returns all programs that are needed until the last of the sequences has finished."""
        self.reserve()
        self.rebalance()
        self.grow_cache()
        self.needed += self._future_programs(self.shape)
        return self.needed

    def _rearrange(
        self,
        rows: np.ndarray | None,  # noqa: ARG002
        prompt_slots: np.ndarray | None,  # noqa: ARG002
        column: int,
        shape: CacheShape,
    ) -> None:
        self.needed.append(Change(self._now, shape))
        self._now = shape
        self.column = column

    def _widen_slots(self, sequences: list[Sequence]) -> None:
        """Does nothing: servers refuse requests that need wider slots."""


def future_programs(
    shape: CacheShape, sampling: SamplingKind, last_columns: int, allows: Callable[[CacheShape], bool]
) -> Iterator[Program]:
    """Yields the programs that a batch calls while its completions grow to `last_columns` and others join it.

    Args:
        shape: Shape of the batch now.
        sampling: Kind of sampling of its sequences.
        last_columns: Number of columns of its longest completion.
        allows: Whether there is memory for a shape; beyond, sequences are preempted.
    """
    for share in dict.fromkeys((shape.share, 1)):
        before = None
        columns = shape.num_columns
        while True:
            now = replace(shape, share=share, num_columns=columns)
            if before is not None and not allows(now):
                break
            yield Decode(now, sampling)
            yield Admit(now, (SMALLEST_ADMISSION, now.num_prompt_columns))
            yield Change(now, now)
            if before is not None:
                yield Change(before, now)
            if share != shape.share:
                yield Change(replace(now, share=shape.share), now)
            if columns >= last_columns:
                break
            before, columns = now, columns * COLUMNS_STEP


def usual_programs(
    clients: Iterable[int], num_tokens: int, chunk_steps: int, num_shards: int, allows: Callable[[CacheShape], bool]
) -> list[Program]:
    """Returns the programs that batches of some usual sizes call, from their start to their end.

    Args:
        clients: Numbers of simultaneous requests.
        num_tokens: Maximum number of tokens of their prompts, and of their completions.
        chunk_steps: Number of tokens of a chunk.
        num_shards: Number of shards of the engine's mesh.
        allows: Whether there is memory for a shape.
    """
    prompt_columns = in_steps(num_tokens, PROMPT_COLUMNS, PROMPT_STEP)
    first, last = (in_steps(size, CACHE_COLUMNS, COLUMNS_STEP) for size in (chunk_steps, num_tokens + chunk_steps))
    sizes = sorted({power_of_two(number, num_shards) for number in clients})
    shapes = [CacheShape(size, 1, prompt_columns, first) for size in sizes]
    needed: list[Program] = []
    for shape in filter(allows, shapes):
        needed.append(Create(shape))
        for sampling in get_args(SamplingKind):
            needed += future_programs(shape, sampling, last, allows)
    columns = dict.fromkeys(each.shape.num_columns for each in needed if isinstance(each, Decode))
    needed += [
        Change(replace(one, num_columns=number), replace(other, num_columns=number))
        for one, other in permutations(shapes, 2)
        for number in columns
    ]
    return needed


def in_steps(size: int, smallest: int, step: int) -> int:
    """Returns the smallest of 1, step, step^2, ... times `smallest` that is at least `size`."""
    columns = smallest
    while columns < size:
        columns *= step
    return columns


def copied(sequences: Iterable[Sequence]) -> list[Sequence]:
    """Returns copies of the sequences without their log-probs, which can be cut without changing the originals."""
    nothing: dict[str, Any] = {"policy_logps": [], "sampler_logps": [], "alternatives": [], "versions": []}
    return [replace(sequence, tokens=list(sequence.tokens), **nothing) for sequence in sequences]


def _copied_scheduler(scheduler: Scheduler) -> Scheduler:
    result = copy.copy(scheduler)
    result.slots = [None if sequence is None else copied([sequence])[0] for sequence in scheduler.slots]
    result.waiting = deque(copied(bundle) for bundle in scheduler.waiting)
    return result
