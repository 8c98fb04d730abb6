"""Batches that change only to shapes whose programs are compiled, and the programs that requests need.

A request that needs another shape waits until the programs are compiled that it and the running sequences soon need;
these continue meanwhile. What they need only when completions have become longer is compiled while they grow. Shapes
are few here, in larger steps than elsewhere.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count, permutations
from typing import get_args

import jax
import numpy as np
from jax.sharding import NamedSharding

from groupax.engine.ahead_of_time import Admit, Change, Create, Decode, Program
from groupax.engine.batch import Batch
from groupax.engine.core import EngineCore
from groupax.engine.pace import Pace
from groupax.engine.plan import CACHE_COLUMNS, CacheShape, Demand, Plan, in_steps, power_of_two
from groupax.engine.programs import Programs
from groupax.engine.sequence import Sequence
from groupax.models.specs import Params
from groupax.parallel.mesh import num_data_shards
from groupax.parallel.transfer import to_device
from groupax.settings.sampling import SamplingKind, sampling_kind

PROMPT_COLUMNS, PROMPT_STEP = 256, 4
COLUMNS_STEP = 2
NEAR_SHAPES = 2  # numbers of columns for which programs must be compiled before a sequence starts


class PreparedBatch(Batch):
    """A batch whose shapes are limited to those that are compiled.

    Args:
        programs: The compiled programs.
        pace: The length of its chunks.
        core, plan, sequences, patience: Arguments of `Batch`.

    Attributes:
        declined: The last shape that was not compiled when the batch would have changed to it; None for none.
    """

    short_pieces = True

    def __init__(
        self,
        programs: Programs,
        pace: Pace,
        core: EngineCore,
        plan: Plan,
        sequences: list[Sequence],
        patience: int,
    ) -> None:
        self.programs, self.pace = programs, pace
        self.declined: CacheShape | None = None
        self._seen: tuple[CacheShape, Demand] | None = None  # for which missing programs were last looked for
        super().__init__(core, plan, sequences, patience)

    def demand_of(self, sequences: Iterable[Sequence]) -> Demand:
        """Returns the demand to choose shapes by, for these sequences."""
        return server_demand(self.core, self.plan, sequences)

    def admit(self, params: Params) -> None:
        """Lets waiting sequences enter free slots, as many prompts as the pace allows before the next chunk."""
        begun_s = time.perf_counter()
        if admission := self.scheduler.admit(self.pace.num_prompts(self.shape, self._max_prompts())):
            self._admit(params, admission)
            jax.block_until_ready(self.slots)
            self.pace.add_admission(int(admission.num_prompts.max()), time.perf_counter() - begun_s)

    def decode(self, params: Params) -> list[tuple[Sequence, int]]:
        """Decodes another chunk, whose length the pace chooses (see `Batch.decode`)."""
        begun_s = time.perf_counter()
        grown = super().decode(params)
        num_steps = max((len(sequence.tokens) - num_before for sequence, num_before in grown), default=0)
        self.pace.add_chunk(self.shape, num_steps, time.perf_counter() - begun_s)
        return grown

    def programs_with(self, sequences: Iterable[Sequence]) -> list[Program]:
        """Returns the programs that are soon needed if these join."""
        sequences = list(sequences)
        return list(self._programs_of(self.shape_with(sequences), sequences))

    def missing_programs(self) -> list[Program]:
        """Returns what the last declined shape lacks, and once for each shape what is needed for longer completions.

        The declined shape is forgotten.
        """
        declined, self.declined = self.declined, None
        missing = [] if declined is None else self.programs.missing(self._programs_of(declined))
        if self._seen != (self.shape, self.demand):
            self._seen = self.shape, self.demand
            missing += self.programs.missing(self._programs_of(self.shape, num_shapes=None))
        return missing

    def _programs_of(
        self, shape: CacheShape, others: Iterable[Sequence] = (), num_shapes: int | None = NEAR_SHAPES
    ) -> Iterator[Program]:
        """Yields the programs that change to a shape and continue in it, together with other sequences."""
        sequences = [*self.scheduler.running, *self.scheduler.queued, *others]
        if shape != self.shape:
            yield Change(self.shape, shape)
        sampling, is_constrained = super()._decoding(sequences)
        yield from future_programs(shape, self.demand_of(sequences), sampling, self.plan, is_constrained, num_shapes)

    def _change_to(self, shape: CacheShape) -> None:
        """Changes to another shape, once its programs are compiled."""
        missing = self.programs.missing(self._programs_of(shape, num_shapes=1))
        if missing:
            self.programs.request(missing, first=True)
            self.programs.wait(missing)
        super()._change_to(shape)

    def _decoding(self, sequences: list[Sequence]) -> tuple[SamplingKind, bool]:
        """Returns what the sequences need, or what includes it where only that is compiled."""
        sampling, is_constrained = super()._decoding(sequences)
        if self.programs.missing([Decode(self.shape, sampling, is_constrained)]) and not self.programs.missing(
            [Decode(self.shape, "general", is_constrained)]
        ):
            return "general", is_constrained
        return sampling, is_constrained

    def _limit(self) -> jax.Array:
        """Returns the number of steps of the next chunk."""
        return to_device(np.array(self.pace.num_steps(self.shape), np.int32), NamedSharding(self.mesh, jax.P()))

    def _first_shape(self, sequences: list[Sequence]) -> CacheShape:
        return first_shape(self.core, self.plan, self.programs, sequences)

    def _instead_of(self, shape: CacheShape) -> CacheShape | None:
        for larger in larger_shapes(self.plan, shape, num_data_shards(self.mesh)):
            if not self.programs.missing(self._programs_of(larger)):
                return larger
        return None

    def _is_prepared(self, shape: CacheShape) -> bool:
        if not self.programs.missing(self._programs_of(shape)):
            return True
        self.declined = shape
        return False


def server_demand(core: EngineCore, plan: Plan, sequences: Iterable[Sequence]) -> Demand:
    """Returns the demand of sequences in large steps where memory allows, with a prompt slot for each of them."""
    demand = core.demand(plan, sequences)
    prompt_columns = in_steps(demand.prompt_columns, PROMPT_COLUMNS, PROMPT_STEP)
    columns = in_steps(demand.columns, CACHE_COLUMNS, COLUMNS_STEP)
    rounded = Demand((1,) * demand.num_rows, prompt_columns, columns)
    return rounded if plan.allows(plan.smallest_shape(rounded)) else replace(demand, group_sizes=rounded.group_sizes)


def first_shape(core: EngineCore, plan: Plan, programs: Programs, sequences: Iterable[Sequence]) -> CacheShape:
    """Returns the shape in which a new batch of these sequences starts.

    It has a slot for each sequence. If that is not compiled, but another number of slots is, the batch starts with that
    one, preferably with more.
    """
    sequences, num_shards = list(sequences), num_data_shards(core.mesh)
    first = plan.first_shape(server_demand(core, plan, sequences), num_shards)
    fewer = (replace(first, num_slots=first.num_slots >> halved) for halved in range(1, first.num_slots.bit_length()))
    for shape in (first, *larger_shapes(plan, first, num_shards), *fewer):
        if not programs.missing(first_programs(core, plan, shape, sequences)):
            return shape
    return first


def larger_shapes(plan: Plan, shape: CacheShape, num_shards: int) -> Iterator[CacheShape]:
    """Yields the allowed shapes with twice as many slots, four times as many and so on."""
    most = power_of_two(plan.max_slots, num_shards)
    while 2 * shape.num_slots <= most and plan.allows(shape := replace(shape, num_slots=2 * shape.num_slots)):
        yield shape


def first_programs(core: EngineCore, plan: Plan, shape: CacheShape, sequences: Iterable[Sequence]) -> list[Program]:
    """Returns the programs that a new batch of these sequences soon needs, which starts in a shape."""
    sequences = list(sequences)
    demand, sampling = server_demand(core, plan, sequences), sampling_kind(each.params for each in sequences)
    is_constrained = any(each.matcher is not None for each in sequences)
    return [Create(shape), *future_programs(shape, demand, sampling, plan, is_constrained, NEAR_SHAPES)]


def future_programs(
    shape: CacheShape,
    demand: Demand,
    sampling: SamplingKind,
    plan: Plan,
    is_constrained: bool = False,
    num_shapes: int | None = None,
) -> Iterator[Program]:
    """Yields the programs that a batch calls while its completions grow and others join it.

    Args:
        shape: Shape of the batch now.
        demand: Demand of its sequences.
        sampling: Kind of sampling of its sequences.
        plan: Limits of the cache; beyond, sequences are preempted.
        is_constrained: Whether any of them has a constraint.
        num_shapes: Number of shapes, this one included, until whose end programs are yielded; None for all.
    """
    before = None
    for _ in count() if num_shapes is None else range(num_shapes):
        if before is not None and not plan.allows(shape):
            break
        if before is not None:
            yield Change(before, shape)
        yield Decode(shape, sampling, is_constrained)
        yield Admit(shape)
        before = shape
        shape = replace(shape, num_columns=plan.num_columns(shape.num_columns + 1, demand, shape.num_columns))
        if shape == before:
            break


def usual_programs(core: EngineCore, plan: Plan, clients: Iterable[int], num_tokens: int) -> list[Program]:
    """Returns the programs that batches of some usual sizes call, from their start to their end.

    Args:
        core: The engine.
        plan: Limits of the cache.
        clients: Numbers of simultaneous requests.
        num_tokens: Maximum number of tokens of their prompts, and of their completions.
    """
    prompt_columns = in_steps(num_tokens, PROMPT_COLUMNS, PROMPT_STEP)
    columns = in_steps(num_tokens, CACHE_COLUMNS, COLUMNS_STEP)
    demands = [Demand((1,) * number, prompt_columns, columns) for number in sorted(set(clients))]
    demands = [demand for demand in demands if plan.allows(plan.smallest_shape(demand))]
    firsts = {plan.first_shape(demand, num_data_shards(core.mesh)): demand for demand in demands}
    needed: list[Program] = []
    for shape, demand in firsts.items():
        needed.append(Create(shape))
        for sampling in get_args(SamplingKind):
            needed += future_programs(shape, demand, sampling, plan)
    columns = dict.fromkeys(each.shape.num_columns for each in needed if isinstance(each, Decode))
    needed += [
        Change(replace(one, num_columns=number), replace(other, num_columns=number))
        for one, other in permutations(firsts, 2)
        for number in columns
    ]
    return needed
