"""Thresholds of top-k and top-p and the likeliest tokens against a sort of the vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupax.engine import rules as truncation
from groupax.engine.rules import Truncation, block_width, largest, reduce_blocks, truncation_threshold
from tests.conftest import rest_heavy

WORDS = 12_000  # in 150 blocks, more than those of the candidates
RNG = np.random.default_rng(0)
ROWS = {
    "peaked": RNG.normal(scale=4.0, size=WORDS),
    "of one block": np.where(np.arange(WORDS) // block_width(WORDS) == 7, 5.0, 0.0) + RNG.normal(size=WORDS),
    "nearly flat": RNG.normal(scale=0.01, size=WORDS),
    "tied": np.round(RNG.normal(scale=2.0, size=WORDS)),
    "equal": np.zeros(WORDS),
    "mostly impossible": np.where(np.arange(WORDS) % 1000 == 3, RNG.normal(size=WORDS), -np.inf),
}


@pytest.fixture(params=["cpu", "gpu"])
def platform(request, monkeypatch):
    """Computes as on this platform: with other numbers of thresholds at a time, and without sorts."""
    monkeypatch.setattr(truncation, "traced_platform", lambda: request.param)
    jax.clear_caches()


def scaled_rows():
    rows = jnp.asarray(np.stack(list(ROWS.values())), jnp.float32)
    return rows - jnp.max(rows, axis=-1, keepdims=True)


def maxima_of(rows):
    return reduce_blocks(jnp.max, rows, -jnp.inf)


def kept_by_sorting(row, top_k, top_p):
    """The tokens that are kept, with those that tie with the last one."""
    order = np.argsort(-row, kind="stable")
    kept = row >= row[order[min(top_k, len(row)) - 1]] if top_k else np.ones(len(row), bool)
    mass = np.cumsum(np.where(kept, np.exp(row.astype(np.float64)), 0.0)[order])
    last = np.searchsorted(mass, top_p * mass[-1]) if top_p < 1 else len(row) - 1
    return kept & (row >= row[order[min(last, len(row) - 1)]])


def kept_by_threshold(rows, top_k, top_p):
    settings = jnp.full(len(rows), top_k, jnp.int32), jnp.full(len(rows), top_p, jnp.float32)
    threshold = jax.jit(truncation_threshold)(rows, maxima_of(rows), jnp.sum(jnp.exp(rows), axis=-1), *settings)
    return np.asarray(Truncation(threshold, jnp.zeros(len(rows))).weights(rows) > 0)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("top_k", rest_heavy([0, 65, 2 * WORDS, 1, 5, 64, 1000], quick=3))
@pytest.mark.usefixtures("platform")
def test_top_k_keeps_what_a_sort_keeps(top_k):
    rows = scaled_rows()
    kept = kept_by_threshold(rows, top_k, 1.0)
    for name, row, ours in zip(ROWS, np.asarray(rows), kept, strict=True):
        possible = np.exp(row) > 0
        np.testing.assert_array_equal(ours, kept_by_sorting(row, top_k, 1.0) & possible, err_msg=name)


TOP_P = [(0, 0.1), (50, 0.8), (0, 0.999), (0, 0.5), (0, 0.95), (3000, 0.9)]


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("top_k", "top_p"), rest_heavy(TOP_P, quick=3))
@pytest.mark.usefixtures("platform")
def test_top_p_keeps_the_mass_that_a_sort_keeps(top_k, top_p):
    rows = scaled_rows()
    kept = kept_by_threshold(rows, top_k, top_p)
    for name, row, ours in zip(ROWS, np.asarray(rows), kept, strict=True):
        expected = kept_by_sorting(row, top_k, top_p)
        weights = np.exp(row.astype(np.float64))
        kept_row = row[ours].min()
        assert (ours == (row >= kept_row)).all(), name  # a threshold cuts them
        # sums in float32 may end one token earlier or later
        assert abs(weights[ours].sum() - weights[expected].sum()) <= 1e-5 * weights.sum() + weights[ours].min(), name


def test_a_row_does_not_depend_on_those_beside_it():
    rows = scaled_rows()
    together = kept_by_threshold(rows, 0, 0.9)
    for index in range(len(rows)):
        np.testing.assert_array_equal(kept_by_threshold(rows[index : index + 1], 0, 0.9)[0], together[index])


@pytest.mark.parametrize("num", [1, 16, 20, 64])
@pytest.mark.usefixtures("platform")
def test_the_likeliest_tokens_are_those_of_a_sort(num):
    rows = scaled_rows()[:5]
    tokens, values = jax.jit(largest, static_argnums=2)(rows, maxima_of(rows), num)
    for row, ours, numbers in zip(np.asarray(rows), tokens, values, strict=True):
        expected = np.argsort(-row, kind="stable")[:num]
        np.testing.assert_array_equal(ours, expected)
        np.testing.assert_array_equal(numbers, row[expected])
