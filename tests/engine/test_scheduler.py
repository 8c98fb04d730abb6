"""Which sequence sits in which slot, and how long chunks are: host logic alone."""

from dataclasses import replace

import numpy as np
import pytest

from groupax.core.settings.sampling import SamplingParams
from groupax.engine.plan import CacheShape, Demand, Plan
from groupax.engine.programs import ADMISSION_STEPS, HOST_FRAC, MIN_CHUNK_S, Pace
from groupax.engine.resizing import grow, preempt
from groupax.engine.scheduler import Scheduler
from groupax.engine.sequence import Sequence


def sequences_of(*prompt_indices):
    counts = {}
    made = []
    for index in prompt_indices:
        sample = counts[index] = counts.get(index, -1) + 1
        made.append(Sequence(index, sample, np.array([index + 1]), SamplingParams(), (), np.zeros(2, np.uint32)))
    return made


def test_those_that_are_not_far_make_room_and_begin_again():
    scheduler = Scheduler(num_shards=2, slots_per_shard=4, share=2)
    scheduler.submit(sequences_of(0, 0, 1, 1, 2, 2, 3, 3, 4))
    scheduler.admit(8)
    slots = scheduler.slots
    for slot, length in enumerate((5, 1, 0, 2, 3, 3, 9, 0)):
        slots[slot].tokens += [7] * length
    rows, prompt_slots = preempt(scheduler, num_prompt_slots=1, share=2)
    assert prompt_slots.tolist() == [[0], [1]]
    assert rows.tolist() == [[0, 1], [2, 3]]
    assert [len(sequence.tokens) for sequence in scheduler.slots] == [5, 1, 9, 0]
    assert (scheduler.slots_per_shard, scheduler.share) == (2, 2)
    assert [[s.tokens for s in bundle] for bundle in scheduler.waiting] == [[[], []], [[], []], [[]]]
    rows, prompt_slots = preempt(scheduler, num_prompt_slots=1, share=1)
    assert (prompt_slots.tolist(), rows.tolist()) == ([[0], [0]], [[0], [0]])
    assert [len(sequence.tokens) for sequence in scheduler.slots] == [5, 9]
    assert [len(bundle) for bundle in scheduler.waiting] == [1] * 7
    grow(scheduler, 2)
    assert [sequence and len(sequence.tokens) for sequence in scheduler.slots] == [5, None, 9, None]
    assert scheduler.num_blocked() == 5, "of seven that wait, two have a free slot"
    assert scheduler.num_blocked([*scheduler.queued, *sequences_of(9, 9, 9)]) == 15, "with others that join them"
    assert len(scheduler.admit(8).slots) == 2
    assert scheduler.num_blocked() == 5


# -- what the cache may take


def test_the_first_shape_is_as_large_as_the_work_and_the_memory():
    plan = Plan(max_tokens=10**9, num_layers=4, max_slots=64)
    assert plan.first_shape(Demand((8,) * 4, 100, 100), 2) == CacheShape(16, 8, 128, 128)
    assert plan.first_shape(Demand((8,) * 4, 100, 48), 2) == CacheShape(16, 8, 128, 64)
    assert plan.first_shape(Demand((8,) * 40, 100, 100), 2) == CacheShape(32, 2, 128, 128), "others wait for slots"
    assert plan.first_shape(Demand((8,) * 4, 100, 900), 2) == CacheShape(16, 8, 128, 1024), "all columns at once"
    assert replace(plan, adapts=True).first_shape(Demand((8,) * 4, 100, 900), 2) == CacheShape(16, 8, 128, 128)
    little = Plan(max_tokens=4000, num_layers=4, max_slots=64)
    shape = little.first_shape(Demand((8,) * 4, 100, 900), 1)
    assert shape == CacheShape(4, 2, 128, 512), "half of 1024 columns are expected"
    assert little.planned_tokens(shape) == (2 * 128 + 4 * 512) * 5 // 4 + 2 * 128
    grown = CacheShape(4, 2, 128, 1024)
    assert not little.allows(grown)
    assert little.smaller(grown) == CacheShape(2, 2, 128, 1024)
    assert Plan(2000, 4, 64).smaller(CacheShape(8, 8, 128, 512)) == CacheShape(2, 2, 128, 512)
    with pytest.raises(ValueError, match="a completion of 900 tokens after a prompt of 101 tokens"):
        Plan(1500, 4, 64).first_shape(Demand((1,), 100, 900), 1)


def test_prompts_are_computed_once_per_shard_shortest_first():
    """On each of two shards 32 prompts of 200 tokens, 30 of 20 and two of 50."""
    scheduler = Scheduler(num_shards=2, slots_per_shard=64)
    lengths = [length for length, number in ((200, 64), (20, 60), (50, 4)) for _ in range(number)]
    sequences = sequences_of(*range(len(lengths)))
    for sequence, length in zip(sequences, lengths, strict=True):
        sequence.prompt = np.full(length, sequence.prompt_index)
    scheduler.submit(sequences)
    admission = scheduler.admit(64)
    assert [*map(len, admission.firsts)] == [64, 64]
    assert [[len(first.prompt) for first in own] for own in admission.firsts] == [[20] * 30 + [50] * 2 + [200] * 32] * 2
    for prompt_slot, index in admission.prompt_slots:
        assert (admission.firsts[prompt_slot // 64][index].prompt == scheduler.slots[prompt_slot].prompt).all()
    assert sorted(slot for slot, _ in admission.slots) == list(range(128))
    assert all(scheduler.slots[slot] is sequence for slot, sequence in admission.slots)
    prompts, starts = admission.padded(128, 256)
    assert prompts.shape == (256, 256)
    assert starts[[0, 31, 63, 64, 127, 128 + 63]].tolist() == [237, 207, 57, 256, 256, 57]


# -- the lengths of a server's chunks and admissions

SHAPE = CacheShape(8, 1, 256, 128)


def lengths(pace, step_s, host_s, number=30, admission_s=0.0):
    """The lengths of chunks of a machine whose steps, admissions and host between chunks take constant times."""
    chosen = []
    for _ in range(number):
        if admission_s:
            pace.add_admission(1, admission_s)
        chosen.append(pace.num_steps(SHAPE))
        pace.add_chunk(SHAPE, chosen[-1], chosen[-1] * step_s)
        pace.add_host(host_s)
    return chosen


@pytest.mark.parametrize(("step_s", "num_steps"), [(0.2, 1), (0.002, 12), (1e-5, 32)])
def test_a_chunk_takes_a_moment(step_s, num_steps):
    assert lengths(Pace(32), step_s, 0.0)[-1] == num_steps == max(1, min(32, int(MIN_CHUNK_S / step_s)))


def test_chunks_are_longer_where_the_host_needs_longer():
    pace = Pace(1000)
    num_steps = lengths(pace, 0.002, 0.02)[-1]
    assert 0.02 / (num_steps * 0.002) == pytest.approx(HOST_FRAC, rel=0.05)


def test_an_admission_and_its_chunk_take_a_moment_together():
    assert lengths(Pace(32), 0.002, 0.0, admission_s=0.015)[-1] == round((MIN_CHUNK_S - 0.015) / 0.002)
    pace = Pace(32)
    assert lengths(pace, 0.002, 0.0, admission_s=1.0)[-1] == 1
    assert pace.device_s == pytest.approx(1.002)
    assert pace.num_steps(SHAPE) == 12  # the next chunk has no admission


def test_an_admission_takes_no_longer_than_some_steps():
    pace = Pace(32)
    assert pace.num_prompts(SHAPE, 64) == 64  # nothing is measured yet
    pace.add_admission(10, 0.05)
    assert pace.num_prompts(SHAPE, 64) == MIN_CHUNK_S / 0.005
    pace.add_chunk(SHAPE, 1, 0.02)
    assert pace.num_prompts(SHAPE, 64) == ADMISSION_STEPS * 0.02 / 0.005
    assert pace.num_prompts(SHAPE, 2) == 2
    pace.add_admission(1, 5.0)
    assert pace.num_prompts(SHAPE, 64) == 1
