"""Which sequence sits in which slot: host logic alone."""

from dataclasses import replace

import numpy as np
import pytest

from groupax.engine.scheduler import CacheShape, Demand, Plan, Scheduler, bucket, halvings, piece_size, power_of_two
from groupax.engine.sequence import Sequence
from groupax.settings.sampling import SamplingParams


def sequences_of(*prompt_indices):
    counts = {}
    made = []
    for index in prompt_indices:
        sample = counts[index] = counts.get(index, -1) + 1
        made.append(Sequence(index, sample, np.array([index + 1]), SamplingParams(), (), np.zeros(2, np.uint32)))
    return made


def names(slots):
    return [sequence and (sequence.prompt_index, sequence.sample_index) for sequence in slots]


def finish(scheduler, *slots):
    for slot in slots:
        scheduler.slots[slot].finish_reason = "stop"
    freed = [slot for slot, sequence in enumerate(scheduler.slots) if sequence and sequence.finish_reason]
    for slot in freed:
        scheduler.slots[slot] = None
    return freed


def test_sequences_of_a_prompt_share_prompt_slots_and_shards():
    scheduler = Scheduler(num_shards=2, slots_per_shard=4, share=2)
    scheduler.submit(sequences_of(0, 1, 0, 1, 0, 0, 1, 1))
    admission = scheduler.admit(8)
    assert names(scheduler.slots) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert [[first.prompt.tolist() for first in firsts] for firsts in admission.firsts] == [[[1]], [[2]]]
    assert sorted(admission.prompt_slots) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert scheduler.admit(8) is None


def test_a_place_is_filled_again_when_its_last_sequence_ends():
    scheduler = Scheduler(num_shards=1, slots_per_shard=4, share=2)
    scheduler.submit(sequences_of(0, 0, 1, 1, 2, 2))
    scheduler.admit(8)
    assert finish(scheduler, 0) == [0]
    assert scheduler.admit(8) is None
    finish(scheduler, 1)
    scheduler.admit(8)
    assert names(scheduler.slots) == [(2, 0), (2, 1), (1, 0), (1, 1)]


def test_shrinking_keeps_every_running_sequence_on_its_shard():
    scheduler = Scheduler(num_shards=2, slots_per_shard=4, share=2)
    scheduler.submit(sequences_of(0, 0, 0, 0, 1, 1, 1, 1))
    scheduler.admit(8)
    finish(scheduler, 0, 1, 3, 5, 6)
    assert scheduler.num_slots_needed() == 2
    kept = scheduler.compact(2)
    assert kept.reshape(2, 2).tolist() == [[2, 0], [0, 3]]
    assert names(scheduler.slots) == [(0, 2), None, (1, 0), (1, 3)]
    assert (scheduler.slots_per_shard, scheduler.share) == (2, 1)


def test_cancelled_sequences_leave_the_queue():
    scheduler = Scheduler(num_shards=1, slots_per_shard=2, share=1)
    waiting = sequences_of(0, 1, 2, 3)
    scheduler.submit(waiting)
    scheduler.admit(8)
    waiting[2].cancel()
    assert scheduler.cancelled() == [waiting[2]]
    finish(scheduler, 0, 1)
    scheduler.admit(8)
    assert names(scheduler.slots) == [(3, 0), None]
    waiting[3].finish_reason = "stop"
    waiting[3].cancel()
    assert waiting[3].finish_reason == "stop"


def test_those_that_are_not_far_make_room_and_begin_again():
    scheduler = Scheduler(num_shards=2, slots_per_shard=4, share=2)
    scheduler.submit(sequences_of(0, 0, 1, 1, 2, 2, 3, 3, 4))
    scheduler.admit(8)
    slots = scheduler.slots
    for slot, length in enumerate((5, 1, 0, 2, 3, 3, 9, 0)):
        slots[slot].tokens += [7] * length
    prompt_slots, rows = scheduler.preempt(num_prompt_slots=1, share=2)
    assert prompt_slots.tolist() == [0, 1]
    assert rows.tolist() == [0, 1, 2, 3]
    assert [len(sequence.tokens) for sequence in scheduler.slots] == [5, 1, 9, 0]
    assert (scheduler.slots_per_shard, scheduler.share) == (2, 2)
    assert [[s.tokens for s in bundle] for bundle in scheduler.waiting] == [[[], []], [[], []], [[]]]
    prompt_slots, rows = scheduler.preempt(num_prompt_slots=1, share=1)
    assert (prompt_slots.tolist(), rows.tolist()) == ([0, 0], [0, 0])
    assert [len(sequence.tokens) for sequence in scheduler.slots] == [5, 9]
    assert [len(bundle) for bundle in scheduler.waiting] == [1] * 7
    scheduler.grow(2)
    assert [sequence and len(sequence.tokens) for sequence in scheduler.slots] == [5, None, 9, None]
    assert scheduler.num_blocked() == 5, "of seven that wait, two have a free slot"
    assert scheduler.num_blocked([*scheduler.queued, *sequences_of(9, 9, 9)]) == 15, "with others that join them"
    assert len(scheduler.admit(8).slots) == 2
    assert scheduler.num_blocked() == 5


def test_columns_for_another_chunk_are_bounded_by_the_longest_completion():
    scheduler = Scheduler(num_shards=1, slots_per_shard=2)
    sequences = sequences_of(0, 1, 2)
    for sequence, longest in zip(sequences, (40, 200, 50), strict=True):
        sequence.params = SamplingParams(max_tokens=longest)
    scheduler.submit(sequences)
    assert scheduler.num_columns(64) == 64
    scheduler.admit(8)
    sequences[1].tokens += [7] * 64
    assert scheduler.num_columns(64) == 128
    sequences[1].tokens += [7] * 128
    assert scheduler.num_columns(64) == 200


def test_a_shard_takes_no_more_prompts_than_are_computed_at_once():
    scheduler = Scheduler(num_shards=1, slots_per_shard=8, share=2)
    scheduler.submit(sequences_of(0, 0, 0, 0, 1, 1, 2, 2))
    assert [first.prompt.tolist() for first in scheduler.admit(2).firsts[0]] == [[1], [2]]
    assert [first.prompt.tolist() for first in scheduler.admit(2).firsts[0]] == [[3]]
    assert scheduler.admit(2) is None


# -- what the cache may take


def test_the_first_shape_is_as_large_as_the_work_and_the_memory():
    plan = Plan(max_tokens=10**9, num_layers=4, max_slots=64)
    assert plan.first_shape(Demand((8,) * 4, 100, 100), 2) == CacheShape(16, 8, 128, 128)
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


def test_columns_double_and_follow_what_runs_only_where_that_pays():
    plan, demand = Plan(max_tokens=10**9, num_layers=4, max_slots=64), Demand((8,), 100, 700)
    adapting = replace(plan, adapts=True)
    assert [plan.num_columns(needed, demand, 192) for needed in (32, 193, 700)] == [192, 384, 768]
    assert [adapting.num_columns(needed, demand, 768) for needed in (32, 193, 385)] == [192, 384, 768]
    assert [plan.num_columns(needed, demand, 768) for needed in (32, 193, 385)] == [768] * 3


def test_batches_of_a_run_have_the_shapes_of_its_largest():
    plan, expected = Plan(max_tokens=10**9, num_layers=4, max_slots=64), Demand((4,) * 8, 90, 300)
    batch = Demand((4, 4), 30, 200)
    assert plan.raised(batch, expected) == expected
    assert plan.raised(Demand((1, 1), 30, 200), expected) == Demand((1, 1), 90, 300), "groups of another size"
    assert plan.raised(Demand((4,) * 9, 100, 500), expected) == Demand((4,) * 9, 100, 500)
    assert replace(plan, adapts=True).raised(batch, expected) == Demand((4, 4), 48, 300), "half of 96 prompt columns"


def test_sizes_are_few():
    assert sorted({bucket(size, 64) for size in range(1, 1025)}) == [64, 96, 128, 192, 256, 384, 512, 768, 1024]
    assert [power_of_two(size) for size in (0, 1, 3, 4, 5)] == [1, 1, 4, 4, 8]
    assert power_of_two(9, parts=4) == 4
    assert halvings(384, 64) == [96, 192, 384]
    for num_prompts, num_columns, num_heads in ((2, 96, 4), (8, 768, 4), (64, 2048, 4), (2, 32768, 4), (2, 32768, 32)):
        for platform, most in (("cpu", 256), ("gpu", 1024)):
            prompts, piece = piece_size(num_prompts, num_columns, num_heads, platform)
            assert num_prompts % prompts == 0
            assert num_columns % piece == 0
            assert piece % 8 == 0
            assert piece <= 64 or prompts * piece <= most
            assert piece <= 64 or prompts * num_heads * piece * num_columns <= 2**28


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
