"""Batches that change their shape only to one whose programs are compiled, and what has to be compiled for requests.

A request that needs another shape waits until all is compiled that it and its company may come to: whoever runs goes on
meanwhile. So shapes are few here, in larger steps than elsewhere.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np

from groupax.engine.batch import Batch, longest
from groupax.engine.plan import CACHE_COLUMNS, CacheShape, max_prompts, power_of_two
from groupax.engine.programs import Admit, Begin, Change, Decode, Program, Programs
from groupax.engine.scheduler import Scheduler
from groupax.engine.sequence import Sequence
from groupax.parallel.mesh import num_data_shards

PROMPT_COLUMNS, PROMPT_STEP = 128, 4
COLUMNS_STEP = 2
SMALLEST_ADMISSION = 2  # prompts; more are admitted one such part after another where no larger one is compiled


class PreparedBatch(Batch):
    """A batch whose shapes are those that `programs` has.

    Args:
        programs: what is compiled.
        arguments: those of `Batch`.

    Attributes:
        wished: the last shape that it would have changed to, had it been compiled; None for none.
    """

    def __init__(self, programs: Programs, *arguments: Any) -> None:
        self.programs = programs
        self.wished: CacheShape | None = None
        super().__init__(*arguments)

    def wishes(self) -> list[Program]:
        """Returns what is not compiled of what it would need for the last shape that it wished for, and forgets it."""
        wished, self.wished = self.wished, None
        return [] if wished is None else self.programs.missing(self._programs_of(wished))

    def _programs_of(self, shape: CacheShape) -> Iterator[Program]:
        """Yields what is needed to change to a shape, and to go on in it."""
        if shape != self.shape:
            yield Change(self.shape, shape)
        yield from future(shape, self._last_columns(), self.plan.allows)

    def _last_columns(self) -> int:
        """Returns the columns that the longest completion comes to."""
        return self._columns(longest([*self.scheduler.running, *self.scheduler.queued], self.chunk_steps)[1])

    def _first_shape(self, sequences: list[Sequence]) -> CacheShape:
        shape = super()._first_shape(sequences)
        wider = replace(shape, num_prompt_columns=self._prompt_columns(shape.num_prompt_columns))
        return wider if self.plan.allows(wider) else shape

    def _columns(self, size: int) -> int:
        return in_steps(size, CACHE_COLUMNS, COLUMNS_STEP)

    def _prompt_columns(self, size: int) -> int:
        return in_steps(size, PROMPT_COLUMNS, PROMPT_STEP)

    def _fitting_share(self) -> int:
        """Returns as many slots for a place as now, or one, for which programs are compiled beside each shape."""
        return self.scheduler.share if super()._fitting_share() == self.scheduler.share else 1

    def _max_prompts(self) -> int:
        columns = self.shape.num_prompt_columns
        whole = [num for num, length in self.programs.admissions(self.shape) if length == columns]
        return min(max_prompts(columns), max(whole, default=SMALLEST_ADMISSION))

    def _admission_size(self, size: tuple[int, int]) -> tuple[int, int]:
        compiled = [each for each in self.programs.admissions(self.shape) if each[0] >= size[0] and each[1] >= size[1]]
        return min(compiled, key=lambda each: each[0] * each[1], default=size)

    def _is_prepared(self, shape: CacheShape) -> bool:
        if not self.programs.missing(self._programs_of(shape)):
            return True
        self.wished = shape
        return False


class Rehearsal(PreparedBatch):
    """A batch without arrays, which finds out what another one would do if further sequences joined it now.

    Args:
        batch: which goes on as it is.

    Attributes:
        needed: the programs that it would call.
    """

    def __init__(self, batch: PreparedBatch) -> None:
        self.__dict__.update(vars(batch))
        self._now = batch.shape
        self.needed: list[Program] = []
        self.scheduler = _copied_scheduler(batch.scheduler)

    @classmethod
    def of_first(cls, programs: Programs, *arguments: Any) -> "Rehearsal":
        """Returns the rehearsal of a new batch.

        Args:
            programs: what is compiled.
            arguments: those of `Batch`, with copies of the sequences.
        """
        self = cls.__new__(cls)
        self.programs, self.wished, self.needed, self.column = programs, None, [], 0
        self.config, self.mesh, self.plan, sequences, self.chunk_steps, *_ = arguments
        shape = self._first_shape(sequences)
        self._now = replace(shape, num_columns=self._columns(self.chunk_steps))
        self.scheduler = Scheduler(num_data_shards(self.mesh), shape.num_slots, shape.share)
        self.scheduler.submit(sequences)
        self.needed.append(Begin(self._now))
        return self

    @property
    def shape(self) -> CacheShape:
        """Returns the shape of each shard's cache."""
        return self._now

    def run(self) -> list[Program]:
        """Returns all programs that are needed until the last of the sequences has ended."""
        self.reserve()
        self.rebalance()
        self.grow_cache()
        self.needed += future(self.shape, self._last_columns(), self.plan.allows)
        return self.needed

    def _rearrange(
        self,
        rows: np.ndarray | None,  # noqa: ARG002
        places: np.ndarray | None,  # noqa: ARG002
        column: int,
        num_columns: int,
        num_prompt_columns: int | None = None,
    ) -> None:
        before, scheduler = self._now, self.scheduler
        prompt_columns = num_prompt_columns or before.num_prompt_columns
        self._now = CacheShape(scheduler.slots_per_shard, scheduler.share, prompt_columns, num_columns)
        self.needed.append(Change(before, self._now))
        self.column = column

    def _widen_slots(self, sequences: list[Sequence]) -> None:
        """Servers refuse what needs that."""


def future(shape: CacheShape, last_columns: int, allows: Callable[[CacheShape], bool]) -> Iterator[Program]:
    """Yields what a batch of this shape calls until its completions have so many columns, and others have joined it.

    Args:
        shape: with which it goes on.
        last_columns: of its longest completion.
        allows: whether there is memory for a shape; beyond, sequences make room for others.
    """
    for share in dict.fromkeys((shape.share, 1)):
        before = None
        columns = shape.num_columns
        while True:
            now = replace(shape, share=share, num_columns=columns)
            if before is not None and not allows(now):
                break
            yield Decode(now)
            yield Admit(now, (SMALLEST_ADMISSION, now.num_prompt_columns))
            yield Change(now, now)
            if before is not None:
                yield Change(before, now)
            if share != shape.share:
                yield Change(replace(now, share=shape.share), now)
            if columns >= last_columns:
                break
            before, columns = now, columns * COLUMNS_STEP


def usual(
    clients: Iterable[int], num_tokens: int, chunk_steps: int, num_shards: int, allows: Callable[[CacheShape], bool]
) -> list[Program]:
    """Returns what batches of some usual sizes call, from their beginning to their end.

    Args:
        clients: numbers of requests at once.
        num_tokens: of their prompts and of their completions, at most.
        chunk_steps: of the engine.
        num_shards: of its mesh.
        allows: whether there is memory for a shape.
    """
    prompt_columns = in_steps(num_tokens, PROMPT_COLUMNS, PROMPT_STEP)
    first, last = (in_steps(size, CACHE_COLUMNS, COLUMNS_STEP) for size in (chunk_steps, num_tokens + chunk_steps))
    sizes = sorted({power_of_two(number, num_shards) for number in clients})
    shapes = [CacheShape(size, 1, prompt_columns, first) for size in sizes]
    needed: list[Program] = []
    for shape in filter(allows, shapes):
        needed += [Begin(shape), *future(shape, last, allows)]
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
    """Returns sequences of the same lengths, which can be cut without changing the others."""
    nothing: dict[str, Any] = {"policy_logps": [], "sampler_logps": [], "alternatives": [], "versions": []}
    return [replace(sequence, tokens=list(sequence.tokens), **nothing) for sequence in sequences]


def _copied_scheduler(scheduler: Scheduler) -> Scheduler:
    """Returns a scheduler with copies of the sequences."""
    result = copy.copy(scheduler)
    result.slots = [None if sequence is None else copied([sequence])[0] for sequence in scheduler.slots]
    result.waiting = deque(copied(bundle) for bundle in scheduler.waiting)
    return result
