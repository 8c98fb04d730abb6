"""From rollouts to micro-batches: every token once, little padding, few shapes."""

from itertools import pairwise

import numpy as np
import pytest

from groupax.training.batch import pack
from groupax.training.packing import PLAIN, AttentionCost, Shape, plan_micro_batches, round_up, tile_ranges
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


@pytest.mark.parametrize(("shards", "budget"), [(1, 500), (2, 500), (4, 100), (2, 10_000)])
@pytest.mark.parametrize("share_prefix", ["auto", "always", "never"])
def test_every_row_lies_in_one_place_with_its_prompt(shards, budget, share_prefix):
    rows = rows_of(9, 5)
    packed, _ = pack(rows, shards, budget, share_prefix=share_prefix)
    assert sorted(int(index) for part in packed for index in part.rows if index >= 0) == list(range(len(rows)))
    for part in packed:
        ragged, evidence = part.batch.ragged, part.batch.loss_inputs
        M, R, (P, S) = len(ragged.tokens) // shards, len(ragged.targets) // shards, ragged.prompts.shape
        for position, index in enumerate(part.rows):
            cells = part.batch.cells[position]
            if index < 0:
                assert not evidence.mask[position].any()
                assert (cells < 0).all()
                continue
            row, shard = rows[index], position // (len(part.rows) // shards)
            length = len(row.completion)
            assert (cells[length:] < 0).all()
            assert ragged.targets[shard * R + cells[:length]].tolist() == row.completion.tolist()
            own = shard * M + (M - R) + cells[:length]
            assert ragged.tokens[own].tolist() == [row.prompt[-1], *row.completion[:-1]]
            assert ragged.positions[own].tolist() == list(range(len(row.prompt) - 1, len(row.prompt) - 1 + length))
            assert evidence.rollout_logp[position, :length].tolist() == np.float32(row.rollout_logp).tolist()
            of_shard = [np.split(tile, shards)[shard] for tile in ragged.tiles]
            [b] = np.flatnonzero(of_shard[0][:, 0] == M - R + cells[0])
            of_row = np.concatenate([tile[b] for tile in of_shard if b < len(tile)])
            assert (of_row[:length] == M - R + cells[:length]).all()
            assert (of_row[length:] < 0).all()
            prompt_cells = ragged.prompts[shard * (P // shards) + np.split(ragged.prompt_of, shards)[shard][b]]
            prompt = shard * M + prompt_cells[prompt_cells >= 0]
            assert ragged.tokens[prompt].tolist() == row.prompt[:-1].tolist()
            assert ragged.positions[prompt].tolist() == list(range(len(row.prompt) - 1))
            assert (prompt_cells[S - len(prompt) :] >= 0).all()


@pytest.mark.heavy
def test_a_large_step_on_many_devices_is_planned():
    rng = np.random.default_rng(1)
    rows = [row for row in rows_of(128, 16, longest=4096, rng=rng) if len(row.completion) > 1]
    micro_batches = plan_micro_batches(rows, 8, 8192)
    found = sorted(index for each in micro_batches for shard in each.shards for part in shard for index in part.rows)
    assert found == list(range(len(rows)))
    tokens = sum(len(row.completion) for row in rows)
    assert tokens > 0.7 * sum(8 * each.shape.tokens for each in micro_batches)


def test_known_sizes_stand_for_one_that_is_not():
    def shape(tokens):
        return Shape(tokens, tokens, (24, 32), ((24, 32),))

    rows = [
        Row(g, np.zeros(2, int), np.zeros(20, int), np.ones(20, bool), np.ones(20), np.zeros(20)) for g in range(18)
    ]
    known = [shape(256), shape(64)]
    assert [each.shape.tokens for each in plan_micro_batches(rows, 1, 256, known)] == [256, 64, 64]


def test_slots_and_cells_are_inverse():
    [part], _ = pack(rows_of(3, 4), 1, 10_000)
    batch, ragged = part.batch, part.batch.ragged
    sides = [ragged.prompts, *ragged.tiles]
    all_cells = np.concatenate([side.reshape(-1) for side in sides])
    for cells, slots in ((batch.cells.reshape(-1), batch.slots), (all_cells, ragged.slots)):
        used = np.flatnonzero(slots >= 0)
        assert cells[slots[used]].tolist() == used.tolist()
        assert (cells >= 0).sum() == len(used)


def test_a_prompt_is_computed_once_for_its_group_unless_that_is_switched_off():
    rows = rows_of(4, 8)
    distinct = sum(len(rows[8 * group].prompt) - 1 for group in range(4))
    for share, copies in (("always", 1), ("never", 8), ("auto", 1)):
        [each] = plan_micro_batches(rows, 1, 10**6, share_prefix=share)
        assert sum(part.prompt for part in each.shards[0]) == copies * distinct


def test_groups_are_cut_where_shards_would_be_unequal():
    prompt = np.arange(10)
    rows = [Row(0, prompt, prompt, np.ones(10, bool), np.ones(10), np.zeros(10)) for _ in range(8)]
    [each] = plan_micro_batches(rows, 4, 10_000)
    assert [sum(len(part.rows) for part in parts) for parts in each.shards] == [2, 2, 2, 2]


def test_fewer_rows_than_shards():
    rows = rows_of(1, 2)
    [each] = plan_micro_batches(rows, 4, 10_000)
    assert sum(len(part.rows) for parts in each.shards for part in parts) == 2


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


def test_sizes_come_in_steps():
    assert [round_up(size, 32) for size in (1, 33, 100, 1000)] == [32, 40, 112, 1024]


def of_one_prompt(columns, lengths):
    prompt = np.zeros(columns + 1, int)
    return [Row(0, prompt, np.zeros(n, int), np.ones(n, bool), np.ones(n), np.zeros(n)) for n in lengths]


def tiles_of(lengths, attention_cost=PLAIN):
    [each] = plan_micro_batches(
        of_one_prompt(64, lengths), 1, 10**6, share_prefix="always", attention_cost=attention_cost
    )
    return each.shape.tiles


def test_few_rows_reach_into_the_last_tiles():
    tiles = tiles_of([10] * 8 + [30] * 8 + [120] * 2 + [500])
    assert tiles[0][0] >= 19
    assert tiles[-1] == (2, 512)
    assert len(tiles) <= 5
    assert all(rows >= later and end < last for (rows, end), (later, last) in pairwise(tiles))
    num_scores = PLAIN.num_scores(tiles, 64)
    needed = sum(n * (64 + n) for n in [10] * 8 + [30] * 8 + [120] * 2 + [500])
    assert num_scores < 2 * needed
    assert num_scores < 0.2 * PLAIN.num_scores(((24, 512),), 64)


def test_rows_of_one_length_save_what_is_hidden():
    assert tiles_of([16] * 8) == ((8, 16),)
    assert tiles_of([512] * 8) == ((8, 256), (8, 512))
    assert tiles_of([512] * 8, AttentionCost(128, "from_first")) == ((8, 512),)


@pytest.mark.parametrize("narrowest", [16, 128])
@pytest.mark.parametrize("longest", [40, 300, 512])
def test_no_tile_is_too_narrow(narrowest, longest):
    for num_long in (1, 4, 8):
        tiles = tiles_of([20] * 8 + [40] * 4 + [longest - 1] * num_long, AttentionCost(narrowest))
        assert tiles[-1][1] >= longest - 1
        if len(tiles) > 1:
            assert all(end - first >= narrowest for _, first, end in tile_ranges(tiles))
    assert len(tiles) > 1 or longest < 2 * narrowest


def test_kernels_need_fewer_tiles_for_the_scores_they_skip():
    def num_tiles(length, computed):
        return len(tiles_of([length] * 8, AttentionCost(128, computed)))

    assert num_tiles(2048, "all") > num_tiles(2048, "seen") == num_tiles(2048, "from_first") == 1
    mixed = [40] * 12 + [1000] * 2
    assert len(tiles_of(mixed, AttentionCost(128, "seen"))) > 1 < len(tiles_of(mixed, AttentionCost(128, "from_first")))


@pytest.mark.parametrize(("prompt", "length", "size", "budget"), [(900, 60, 16, 3840), (225, 20, 8, 980)])
def test_groups_that_must_share_their_prompt_are_cut_as_often_as_it_takes(prompt, length, size, budget):
    rows = of_one_prompt(prompt, [length] * size)
    planned = plan_micro_batches(rows, 2, budget, share_prefix="always")
    assert sum(len(part.rows) for each in planned for shard in each.shards for part in shard) == size


def test_empty_completions_have_a_row():
    [part], _ = pack(of_one_prompt(3, [0] * 7 + [1]), 1, 1000)
    assert sorted(part.rows[part.rows >= 0]) == list(range(8))


def test_a_known_shape_is_used_where_its_tiles_have_room():
    shape = Shape(640, 640, (2, 64), ((8, 64), (2, 128)))
    for lengths, fits in (
        ([64] * 8, True),
        ([48] * 6 + [128] * 2, True),
        ([10] * 5 + [128] * 3, False),
        ([129], False),
    ):
        planned = plan_micro_batches(of_one_prompt(64, lengths), 1, 640, [shape], "always")
        assert (planned[0].shape == shape) == fits, lengths
