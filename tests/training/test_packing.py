"""From rollouts to micro-batches: every token once, little padding, few shapes."""

import numpy as np
import pytest

from groupax.training.batch import pack
from groupax.training.packing import plan_micro_batches
from groupax.types import Row

RNG = np.random.default_rng(0)


def rows_of(num_groups, group_size, longest=60, rng=RNG):
    rows = []
    for group in range(num_groups):
        prompt = rng.integers(0, 9, rng.integers(1, 30))
        for length in rng.integers(1, longest, group_size):
            tokens, ones = rng.integers(0, 9, length), np.ones(length)
            rows.append(Row(group, prompt, tokens, np.ones(length, bool), ones, rng.random(length)))
    return rows


def test_a_prompt_is_computed_once_for_its_group_unless_that_is_switched_off():
    rows = rows_of(4, 8)
    distinct = sum(len(rows[8 * group].prompt) - 1 for group in range(4))
    for share, copies in (("always", 1), ("never", 8), ("auto", 1)):
        [each] = plan_micro_batches(rows, 1, 10**6, share_prefix=share)
        assert sum(part.prompt for part in each.shards[0]) == copies * distinct


@pytest.mark.long
@pytest.mark.parametrize("mean", [20, pytest.param(96, marks=pytest.mark.long)])
@pytest.mark.parametrize("seed", [2, pytest.param(5, marks=pytest.mark.long)])
def test_over_many_steps_padding_is_little_and_shapes_are_few(mean, seed):
    rng = np.random.default_rng(seed)
    shapes, padding, counts = [], [], []
    for _ in range(50):
        rows, real = [], 0
        for group in range(16):
            prompt = np.zeros(int(np.clip(rng.gamma(4, 30), 20, 400)), np.int64)
            real += len(prompt) - 1
            for length in np.clip(rng.geometric(1 / mean, 8), 1, 512):
                mask, zeros = np.ones(length, bool), np.zeros(length)
                rows.append(Row(group, prompt, np.zeros(length, int), mask, zeros, zeros))
                real += length
        packed, shapes = pack(rows, 2, 4096, shapes, longest=(400, 512))
        padding.append(1 - real / sum(part.num_tokens for part in packed))
        counts.append(len(shapes))
    assert np.mean(padding) < 0.15
    assert counts[-1] <= 6, counts
    assert counts[-1] - counts[10] <= 2, counts


def of_one_prompt(columns, lengths):
    prompt = np.zeros(columns + 1, int)
    return [Row(0, prompt, np.zeros(n, int), np.ones(n, bool), np.ones(n), np.zeros(n)) for n in lengths]


def test_empty_completions_have_a_row():
    [part], _ = pack(of_one_prompt(3, [0] * 7 + [1]), 1, 1000)
    assert sorted(part.rows[part.rows >= 0]) == list(range(8))
