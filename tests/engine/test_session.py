"""Sessions: requests that join while others run come out as if they had run alone."""

import numpy as np
import pytest

from groupax import SamplingParams
from groupax.engine.session import Session

from .test_engine import PROMPTS, RNG, engine_for, tokens_of

REQUESTS = [
    ([PROMPTS[0]], SamplingParams(n=4, max_tokens=60, seed=1)),
    (PROMPTS[1:4], SamplingParams(n=1, max_tokens=9, seed=2)),
    ([RNG.integers(2, 96, 70)], SamplingParams(n=3, max_tokens=20, seed=3, logprobs=2)),
    (PROMPTS[4:6], SamplingParams(n=2, max_tokens=40, seed=1, logit_bias=dict.fromkeys(range(2, 14), 1.0))),
    ([PROMPTS[0]], SamplingParams(n=2, max_tokens=12, seed=1, stop_token_ids=tuple(range(60, 72)))),
    ([PROMPTS[7]], SamplingParams(n=6, max_tokens=33, temperature=0.0)),
]


def run_together(engine, requests, every=2):
    """All requests in one session, another one joining after every few steps."""
    session, groups, arrived = Session(engine), [], 0
    while arrived < len(requests) or session.busy:
        for _ in range(every if arrived else 1):
            for _ in session.step():
                pass
        if arrived < len(requests):
            prompts, params = requests[arrived]
            groups.append(engine.sequences(prompts, params))
            session.submit(groups[-1])
            arrived += 1
    return groups, session


def as_groups(sequences, prompts, params):
    return [[sequences[p * params.n + s] for s in range(params.n)] for p in range(len(prompts))]


@pytest.fixture(scope="module")
def alone(tiny_model):
    engine = engine_for(tiny_model, 2)
    return [engine.generate(prompts, params) for prompts, params in REQUESTS]


def as_tokens(alternatives):
    """The tokens of each place's alternatives; their log-probs depend on what they were computed with by rounding."""
    return [{token for token, _ in place} for place in alternatives or []]


@pytest.mark.optimized
@pytest.mark.heavy
@pytest.mark.parametrize("kv_tokens", [None, pytest.param(900, marks=pytest.mark.long)])
def test_requests_that_join_come_out_as_if_alone(tiny_model, alone, kv_tokens):
    engine = engine_for(tiny_model, 2)
    if kv_tokens is not None:
        engine.kv_bytes = kv_tokens * engine.bytes_per_token
    together, session = run_together(engine, REQUESTS)
    for (prompts, params), sequences, expected in zip(REQUESTS, together, alone, strict=True):
        groups = as_groups(sequences, prompts, params)
        assert tokens_of(groups) == tokens_of(expected)
        for one, other in zip(sequences, [each for group in expected for each in group], strict=True):
            np.testing.assert_allclose(one.policy_logps, other.policy_logps, atol=1e-5, rtol=0)
            np.testing.assert_allclose(one.sampler_logps, other.sampler_logps, atol=1e-5, rtol=0)
            assert as_tokens(one.alternatives) == as_tokens(other.alternatives)
            assert one.finish_reason == other.finish_reason
            assert one.versions == [0] * len(one.tokens)
    assert (session.num_running, session.num_waiting, session._reported, session._finished) == (0, 0, {}, set())


@pytest.mark.heavy
def test_slots_are_kept_that_were_needed_while_others_had_nothing_to_do(tiny_model):
    engine = engine_for(tiny_model, 1)

    def run(patience):
        session, num_slots = Session(engine, patience), []
        requests = [(8, 8), (6, 32), (2, 160)]  # numbers of completions, and of their tokens
        params = [SamplingParams(n=n, max_tokens=length, seed=length, ignore_eos=True) for n, length in requests]
        sequences = [sequence for each in params for sequence in engine.sequences([PROMPTS[0]], each)]
        session.submit(sequences)
        while session.busy:
            list(session.step())
            num_slots += [session._batch.shape.num_slots] if session._batch else []
        return num_slots, [sequence.tokens for sequence in sequences]

    (at_once, expected), (later, found) = run(0), run(3)
    print(at_once, later)
    assert at_once == [8] * 3 + [2] * 16
    assert later == [16] * 3 + [8] * 4 + [2] * 12
    assert found == expected
