"""The length of a server's chunks."""

import pytest

from groupax.engine.pace import HOST_FRAC, MIN_CHUNK_S, Pace


def lengths(pace, step_s, host_s, number=30):
    """The lengths of chunks of a machine whose steps, and whose host between chunks, take constant times."""
    chosen = []
    for _ in range(number):
        chosen.append(pace.num_steps)
        pace.add_chunk(pace.num_steps, pace.num_steps * step_s, 0.0)
        pace.add_host(host_s)
    return chosen


def test_the_first_chunks_are_short():
    assert lengths(Pace(32), 1e-4, 0.0, 7) == [1, 2, 4, 8, 16, 32, 32]


@pytest.mark.parametrize(("step_s", "num_steps"), [(0.2, 1), (0.002, 12), (1e-5, 32)])
def test_a_chunk_takes_a_moment(step_s, num_steps):
    assert lengths(Pace(32), step_s, 0.0)[-1] == num_steps == max(1, min(32, int(MIN_CHUNK_S / step_s)))


def test_chunks_are_longer_where_the_host_needs_longer():
    pace = Pace(1000)
    num_steps = lengths(pace, 0.002, 0.02)[-1]
    assert 0.02 / (num_steps * 0.002) == pytest.approx(HOST_FRAC, rel=0.05)


def test_one_slow_step_of_the_host_changes_little():
    pace = Pace(1000)
    lengths(pace, 0.002, 0.001)
    pace.add_host(60.0)
    assert pace.target_s < 0.3


def test_a_chunk_without_tokens_changes_nothing():
    pace = Pace(32)
    lengths(pace, 0.002, 0.0)
    pace.add_chunk(0, 1.0, 0.0)
    assert pace.num_steps == 12
