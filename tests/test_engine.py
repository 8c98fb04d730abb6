"""The engine: what it samples, where it stops, and that neither layout nor luck of placement shows in the result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from groupax import Engine, SamplingParams, load_model
from groupax.engine.sampling import SamplingSettings, kept_tokens, sample
from groupax.models.decoder import logits
from groupax.parallel.mesh import AXES

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(2, 96, length) for length in (1, 2, 5, 9, 17, 3, 8, 30)]
PARAMS = SamplingParams(n=3, max_tokens=24, seed=7)


def engine_for(model, num_devices=4, **settings):
    mesh = Mesh(np.array(jax.devices()[:num_devices]).reshape(num_devices, 1, 1, 1, 1), AXES)
    params = jax.device_put(model.params, jax.NamedSharding(mesh, jax.P()))
    return Engine(model.config, params, mesh, eos_ids=(1,), **{"chunk_steps": 8, **settings})


def tokens_of(groups):
    return [[sequence.tokens for sequence in group] for group in groups]


@pytest.fixture(scope="module")
def expected(tiny_model):
    return tokens_of(engine_for(tiny_model).generate(PROMPTS, PARAMS))


def test_real_model_greedy_story(stories):
    model = load_model(stories)
    reference = np.load(stories / "greedy_reference.npz")
    engine = Engine(model.config, model.params, model.mesh, eos_ids=(2,))
    [[story]] = engine.generate([reference["tokens"][:1]], SamplingParams(max_tokens=200, temperature=0.0))
    assert story.tokens == reference["tokens"][1:].tolist()
    assert story.finish_reason == "length"
    np.testing.assert_allclose(story.policy_logps, reference["target_logprobs"], atol=2e-5)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_number_of_devices_does_not_show(tiny_model, expected, num_devices):
    assert tokens_of(engine_for(tiny_model, num_devices).generate(PROMPTS, PARAMS)) == expected


@pytest.mark.parametrize("max_slots", [1, 5, 12])
def test_number_of_slots_and_refill_do_not_show(tiny_model, expected, max_slots):
    assert tokens_of(engine_for(tiny_model, max_slots=max_slots).generate(PROMPTS, PARAMS)) == expected


@pytest.mark.parametrize("chunk_steps", [16, 32])
def test_chunk_length_does_not_show(tiny_model, expected, chunk_steps):
    assert tokens_of(engine_for(tiny_model, chunk_steps=chunk_steps).generate(PROMPTS, PARAMS)) == expected


def test_row_order_does_not_show(tiny_model, expected):
    engine = engine_for(tiny_model, max_slots=8)
    sequences = engine.sequences(PROMPTS, PARAMS)
    shuffled = [sequences[index] for index in np.random.default_rng(3).permutation(len(sequences))]
    done = {(s.prompt_index, s.sample_index): s.tokens for s in engine.stream(shuffled)}
    assert [[done[p, s] for s in range(PARAMS.n)] for p in range(len(PROMPTS))] == expected


def test_batch_size_does_not_show(tiny_model, expected):
    # a prompt's place in the request is part of its randomness, so the first prompts keep theirs
    assert tokens_of(engine_for(tiny_model).generate(PROMPTS[:3], PARAMS)) == expected[:3]


def test_seed_and_step_do_show(tiny_model, expected):
    engine = engine_for(tiny_model)
    assert tokens_of(engine.generate(PROMPTS, SamplingParams(n=3, max_tokens=24, seed=8))) != expected
    assert tokens_of(engine.generate(PROMPTS, PARAMS, step=1)) != expected


def test_samples_of_a_prompt_differ(expected):
    assert len({tuple(tokens) for group in expected for tokens in group}) == len(PROMPTS) * PARAMS.n


def test_groups_come_as_they_finish(tiny_model):
    engine = engine_for(tiny_model, max_slots=4)
    order = [s.prompt_index for s in engine.stream(engine.sequences(PROMPTS, PARAMS))]
    assert order.index(7) > order.index(0)
    assert sorted(order) == sorted([p for p in range(len(PROMPTS)) for _ in range(PARAMS.n)])


def test_greedy_is_the_argmax_of_the_forward_pass(tiny_model):
    [[greedy]] = engine_for(tiny_model).generate([PROMPTS[3]], SamplingParams(max_tokens=20, temperature=0.0))
    tokens = np.concatenate([PROMPTS[3], greedy.tokens])
    out = np.asarray(logits(tiny_model.config, tiny_model.params, jnp.asarray(tokens, jnp.int32)[None]))[0]
    assert out.argmax(-1)[len(PROMPTS[3]) - 1 : -1].tolist() == greedy.tokens
    assert greedy.sampler_logps == [0.0] * len(greedy.tokens)


def test_stop_token_ends_a_completion_and_belongs_to_it(tiny_model, expected):
    stop = expected[0][0][4]
    params = SamplingParams(n=3, max_tokens=24, seed=7, stop_token_ids=(stop, 3))
    for group, unstopped in zip(engine_for(tiny_model).generate(PROMPTS, params), expected, strict=True):
        for sequence, tokens in zip(group, unstopped, strict=True):
            ends = [index for index, token in enumerate(tokens) if token in (stop, 3, 1)]
            assert sequence.tokens == (tokens[: ends[0] + 1] if ends else tokens)
            assert sequence.finish_reason == ("stop" if ends else "length")


@pytest.mark.parametrize("max_tokens", [1, 8, 9])
def test_token_limit(tiny_model, expected, max_tokens):
    groups = engine_for(tiny_model).generate(PROMPTS, SamplingParams(n=3, max_tokens=max_tokens, seed=7))
    assert tokens_of(groups) == [[tokens[:max_tokens] for tokens in group] for group in expected]


def test_prompt_up_to_the_models_positions(tiny_model):
    prompt = RNG.integers(2, 96, 250)
    [[sequence]] = engine_for(tiny_model).generate([prompt], SamplingParams(max_tokens=6))
    assert len(sequence.tokens) == 6
    with pytest.raises(ValueError, match=r"prompt 0 has 250 tokens, which with max_tokens 7 exceeds .* 256 positions"):
        engine_for(tiny_model).generate([prompt], SamplingParams(max_tokens=7))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [(np.zeros(0, np.int32), "prompt 0 has no tokens"), (np.array([3, 96]), "vocabulary has 96 tokens")],
)
def test_prompts_that_cannot_be_continued(tiny_model, prompt, message):
    with pytest.raises(ValueError, match=message):
        engine_for(tiny_model).generate([prompt], PARAMS)


@pytest.mark.parametrize(
    "bad", [{"n": 0}, {"max_tokens": 0}, {"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"min_p": 1.0}]
)
def test_bad_sampling_params(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
        SamplingParams(**bad)


def test_no_prompts_no_completions(tiny_model):
    assert engine_for(tiny_model).generate([], PARAMS) == []


# -- the sampler alone

V = 300
SETTINGS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 10},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
]


def truncated(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The sampler's distribution, by sorting."""
    probs = np.exp(logits / temperature - np.max(logits / temperature))
    probs /= probs.sum()
    order = np.argsort(-probs)
    if top_k:
        probs[order[top_k:]] = 0
    probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= top_p]] = 0
    probs[probs < min_p * probs.max()] = 0
    return probs / probs.sum()


def settings_array(B, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return SamplingSettings(
        jnp.full(B, temperature, jnp.float32),
        jnp.full(B, top_k, jnp.int32),
        jnp.full(B, top_p, jnp.float32),
        jnp.full(B, min_p, jnp.float32),
    )


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_draws_follow_the_truncated_distribution(settings):
    num_draws = 50_000
    row = np.random.default_rng(1).normal(scale=2.0, size=V)
    expected = truncated(row, **settings)
    keys = jnp.stack([jnp.zeros(num_draws, jnp.uint32), jnp.arange(num_draws, dtype=jnp.uint32)], axis=1)
    tiled = jnp.broadcast_to(jnp.asarray(row, jnp.float32), (num_draws, V))
    drawn = jax.jit(sample)(tiled, keys, jnp.zeros(num_draws, jnp.int32), settings_array(num_draws, **settings))
    counts = np.bincount(np.asarray(drawn.token), minlength=V)
    assert counts[expected == 0].sum() == 0
    seen = expected * num_draws >= 5
    chi2 = ((counts - expected * num_draws)[seen] ** 2 / (expected * num_draws)[seen]).sum()
    degrees = seen.sum() - 1
    assert abs(chi2 - degrees) < 4 * np.sqrt(2 * degrees)  # four standard deviations
    np.testing.assert_allclose(drawn.sampler_logp, np.log(expected[drawn.token]), atol=1e-5)
    untruncated = truncated(row, temperature=settings.get("temperature", 1.0))
    np.testing.assert_allclose(drawn.policy_logp, np.log(untruncated[drawn.token]), atol=1e-5)


def test_settings_are_per_row():
    rows = jnp.broadcast_to(jnp.asarray(np.random.default_rng(2).normal(size=V), jnp.float32), (3, V))
    settings = SamplingSettings(
        jnp.ones(3, jnp.float32),
        jnp.array([0, 5, 1]),
        jnp.array([1.0, 1.0, 0.5], jnp.float32),
        jnp.zeros(3, jnp.float32),
    )
    assert kept_tokens(rows - rows.max(), settings).sum(-1).tolist() == [V, 5, 1]


def test_tokens_of_weight_zero_are_never_drawn():
    weightless = jnp.where(jnp.arange(V) % 7 == 3, 0.0, -jnp.inf)
    rows = jnp.broadcast_to(weightless, (4096, V)).astype(jnp.float32)
    keys = jnp.stack([jnp.arange(4096, dtype=jnp.uint32)] * 2, axis=1)
    drawn = sample(rows, keys, jnp.zeros(4096, jnp.int32), settings_array(4096))
    assert (np.asarray(drawn.token) % 7 == 3).all()
