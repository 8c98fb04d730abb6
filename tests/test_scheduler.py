"""Which sequence sits in which slot: host logic alone."""

import numpy as np

from groupax.engine.params import SamplingParams
from groupax.engine.scheduler import Scheduler, Sequence


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
    return scheduler.retire()


def test_sequences_of_a_prompt_share_places_and_shards():
    scheduler = Scheduler(num_shards=2, slots_per_shard=4, share=2)
    scheduler.submit(sequences_of(0, 1, 0, 1, 0, 0, 1, 1))
    admission = scheduler.admit()
    assert names(scheduler.slots) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert [[prompt.tolist() for prompt in prompts] for prompts in admission.prompts] == [[[1]], [[2]]]
    assert sorted(admission.places) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert scheduler.admit() is None


def test_a_place_is_filled_again_when_its_last_sequence_ends():
    scheduler = Scheduler(num_shards=1, slots_per_shard=4, share=2)
    scheduler.submit(sequences_of(0, 0, 1, 1, 2, 2))
    scheduler.admit()
    assert finish(scheduler, 0) == [0]
    assert scheduler.admit() is None
    finish(scheduler, 1)
    scheduler.admit()
    assert names(scheduler.slots) == [(2, 0), (2, 1), (1, 0), (1, 1)]


def test_a_group_that_does_not_divide_leaves_a_slot_empty():
    scheduler = Scheduler(num_shards=1, slots_per_shard=4, share=2)
    scheduler.submit(sequences_of(0, 0, 0))
    scheduler.admit()
    assert names(scheduler.slots) == [(0, 0), (0, 1), (0, 2), None]


def test_shrinking_keeps_every_running_sequence_on_its_shard():
    scheduler = Scheduler(num_shards=2, slots_per_shard=4, share=2)
    scheduler.submit(sequences_of(0, 0, 0, 0, 1, 1, 1, 1))
    scheduler.admit()
    finish(scheduler, 0, 1, 3, 5, 6)
    assert scheduler.num_slots_needed() == 2
    kept = scheduler.shrink(2)
    assert kept.reshape(2, 2).tolist() == [[2, 0], [0, 3]]
    assert names(scheduler.slots) == [(0, 2), None, (1, 0), (1, 3)]
    assert (scheduler.slots_per_shard, scheduler.share) == (2, 1)


def test_cancelled_sequences_leave_the_queue():
    scheduler = Scheduler(num_shards=1, slots_per_shard=2, share=1)
    waiting = sequences_of(0, 1, 2, 3)
    scheduler.submit(waiting)
    scheduler.admit()
    waiting[2].cancel()
    assert scheduler.cancelled() == [waiting[2]]
    finish(scheduler, 0, 1)
    scheduler.admit()
    assert names(scheduler.slots) == [(3, 0), None]
    waiting[3].finish_reason = "stop"
    waiting[3].cancel()
    assert waiting[3].finish_reason == "stop"
