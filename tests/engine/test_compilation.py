"""Seconds of tracing and compiling are counted once each, and only when something is compiled."""

import time

import jax
import jax.numpy as jnp

from groupax.parallel.runtime import COMPILED, REQUESTED, Compilation, compilation


def test_nested_functions_are_counted_once_and_compiled_ones_not_again():
    @jax.jit
    def inner(x):
        time.sleep(0.1)
        return jnp.sin(x)

    @jax.jit
    def outer(x):
        return inner(x) + inner(2 * x) + jax.jit(lambda y: inner(y))(x)

    record = compilation()
    before_s, began_s = record.seconds, time.monotonic()
    outer(jnp.float32(1)).block_until_ready()
    seconds, elapsed_s = record.seconds - before_s, time.monotonic() - began_s
    assert 0.1 <= seconds <= elapsed_s
    before_s = record.seconds
    num_programs = record.programs["outer"], record.num_programs
    assert num_programs[0] == 1
    outer(jnp.float32(2))
    assert record.seconds == before_s
    assert (record.programs["outer"], record.num_programs) == num_programs


def test_compiling_is_told_while_it_lasts_and_not_of_what_is_read_back(monkeypatch):
    record, now_s = Compilation(), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    assert not record.is_under_way
    record._on_event(REQUESTED)
    assert not record.is_under_way
    now_s += 1.0
    assert record.is_under_way
    record._on_duration(COMPILED, 1.0)
    assert not record.is_under_way
    assert record.seconds == 1.0
