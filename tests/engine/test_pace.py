"""The lengths of a server's chunks and admissions."""

import pytest

from groupax.engine.programs import ADMISSION_STEPS, HOST_FRAC, MIN_CHUNK_S, Pace
from groupax.engine.scheduler import CacheShape

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


def test_the_first_chunk_of_each_shape_has_one_step_and_one_without_tokens_changes_nothing():
    pace = Pace(32)
    assert lengths(pace, 1e-4, 0.0, 3) == [1, 32, 32]
    assert pace.num_steps(CacheShape(16, 1, 256, 128)) == 1
    pace.add_chunk(SHAPE, 0, 1.0)
    assert pace.num_steps(SHAPE) == 32


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


def test_one_slow_step_of_the_host_changes_little():
    pace = Pace(1000)
    lengths(pace, 0.002, 0.001)
    pace.add_host(60.0)
    assert pace.target_s < 0.3
