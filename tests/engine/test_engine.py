"""The engine: what it samples, where it stops, and that neither layout nor luck of placement shows in the result."""

import inspect
import weakref
from dataclasses import replace
from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from groupax import Engine, SamplingParams, init_model, load_model
from groupax.core.settings.sampling import SAMPLER, sampling_kind
from groupax.engine import plan, prefill
from groupax.engine.batch import Batch
from groupax.engine.prefix_cache import Place
from groupax.engine.rules import History, changed_logits
from groupax.engine.sampling import row_keys, sample, uniforms
from groupax.engine.sequence import find_stop, text_before_stop
from groupax.engine.session import Session
from groupax.episodes.play import Prompts
from groupax.models.decoder import logits
from groupax.parallel.mesh import AXES
from groupax.rollouts.collector import sample_groups
from tests.conftest import TINY, rest_heavy

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(2, 96, length) for length in (1, 2, 5, 9, 17, 3, 8, 30)]
PARAMS = SamplingParams(n=3, max_tokens=24, seed=7)


def engine_for(model, num_devices=4, **settings):
    num_devices = min(num_devices, jax.device_count())
    mesh = Mesh(np.array(jax.devices()[:num_devices]).reshape(num_devices, 1, 1, 1, 1), AXES)
    params = jax.device_put(model.params, jax.NamedSharding(mesh, jax.P()))
    return Engine(model.config, params, mesh, eos_ids=(1,), **{"chunk_steps": 8, **settings})


def tokens_of(groups):
    return [[sequence.tokens for sequence in group] for group in groups]


@pytest.fixture(scope="module")
def expected(tiny_model):
    return tokens_of(engine_for(tiny_model).generate(PROMPTS, PARAMS))


@pytest.mark.optimized
@pytest.mark.heavy
def test_real_model_greedy_story(stories):
    model = load_model(stories)
    reference = np.load(stories / "greedy_reference.npz")
    engine = Engine(model.config, model.params, model.mesh, eos_ids=(2,))
    [[story]] = engine.generate([reference["tokens"][:1]], SamplingParams(max_tokens=200, temperature=0.0))
    assert story.tokens == reference["tokens"][1:].tolist()
    assert story.finish_reason == "length"
    np.testing.assert_allclose(story.policy_logps, reference["target_logprobs"], atol=2e-5)


@pytest.mark.drawn(3)
@pytest.mark.heavy
@pytest.mark.optimized
@pytest.mark.parametrize(
    "settings",
    [
        {"num_devices": 1},
        {"num_devices": 2, "kv_tokens": 600},  # some wait
        {"max_slots": 1},
        {"max_slots": 5},
        {"max_slots": 12},
        {"chunk_steps": 16},
        {"chunk_steps": 32},
        {"num_devices": 1, "prefill_tokens": 64},  # in several admissions
    ],
    ids=str,
)
def test_neither_devices_nor_slots_chunks_memory_or_admissions_show(tiny_model, expected, settings, monkeypatch):
    kv_tokens, prefill_tokens = settings.get("kv_tokens"), settings.get("prefill_tokens", 16_384)
    monkeypatch.setattr(plan, "PREFILL_TOKENS", prefill_tokens)
    engine = engine_for(tiny_model, **{n: x for n, x in settings.items() if n not in ("kv_tokens", "prefill_tokens")})
    if kv_tokens:
        engine.kv_bytes = 1
        with pytest.raises(ValueError, match="there is room for those of 0; lower max_tokens"):
            engine.generate(PROMPTS, PARAMS)
        engine.kv_bytes = kv_tokens * engine.bytes_per_token
    assert tokens_of(engine.generate(PROMPTS, PARAMS)) == expected


def test_seed_step_and_sample_do_show_and_the_number_of_prompts_does_not(tiny_model, expected):
    engine = engine_for(tiny_model)
    assert tokens_of(engine.generate(PROMPTS, replace(PARAMS, seed=8))) != expected
    assert tokens_of(engine.generate(PROMPTS, PARAMS, step=1)) != expected
    assert len({tuple(tokens) for group in expected for tokens in group}) == len(PROMPTS) * PARAMS.n
    assert tokens_of(engine.generate(PROMPTS[:3], PARAMS)) == expected[:3]
    assert engine.generate([], PARAMS) == []


def test_every_bit_of_a_seed_counts_and_small_ones_are_those_of_jax():
    where = np.arange(2), np.zeros(2, int)
    seeds = [5, 5 + 2**32, 5 + 2**33, 2**32 - 1, -1, 2**63 - 1, -(2**63), 0]
    keys = [row_keys(seed, 3, *where) for seed in seeds]
    assert len({key.tobytes() for key in keys}) == len(seeds)
    for seed in (0, 5, 2**32 - 1):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 3), 1), 0)
        np.testing.assert_array_equal(keys[seeds.index(seed)][1], jax.random.key_data(key))


def test_stop_token_ends_a_completion_and_belongs_to_it(tiny_model, expected):
    stop = expected[0][0][4]
    params = SamplingParams(n=3, max_tokens=24, seed=7, stop_token_ids=(stop, 3))
    for group, unstopped in zip(engine_for(tiny_model).generate(PROMPTS, params), expected, strict=True):
        for sequence, tokens in zip(group, unstopped, strict=True):
            ends = [index for index, token in enumerate(tokens) if token in (stop, 3, 1)]
            assert sequence.tokens == (tokens[: ends[0] + 1] if ends else tokens)
            assert sequence.finish_reason == ("stop" if ends else "length")


@pytest.mark.parametrize("max_tokens", [1, 9])
def test_token_limit(tiny_model, expected, max_tokens):
    groups = engine_for(tiny_model).generate(PROMPTS, replace(PARAMS, max_tokens=max_tokens))
    assert tokens_of(groups) == [[tokens[:max_tokens] for tokens in group] for group in expected]


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        (np.zeros(0, np.int32), {}, "prompt 0 has no tokens"),
        (np.array([3, 96]), {}, "vocabulary has 96 tokens"),
        (np.array([[3, 4]]), {}, r"prompt 0 is an array of the shape \(1, 2\); a prompt is one row of token ids"),
        (np.full(250, 3), {}, r"prompt 0 has 250 tokens, which with max_tokens 24 exceeds .* 256 positions"),
        ([3], {"weights": "int3"}, "must be one of same, bfloat16, got 'int3'"),
        ([3], {"chunk_steps": 0}, "chunk_steps must be at least 1, got 0"),
        ([3], {"record_experts": True}, "has no experts to record"),
    ],
    ids=str,
)
def test_what_cannot_be_generated_is_refused(tiny_model, prompt, settings, message):
    with pytest.raises(ValueError, match=message):
        engine_for(tiny_model, 1, **settings).generate([prompt], PARAMS)


def test_models_that_cannot_generate(tiny_model):
    with pytest.raises(ValueError, match=r"the model classifies sequences, with 2 labels, .* give a causal model"):
        Engine(replace(tiny_model.config, num_labels=2), tiny_model.params, tiny_model.mesh, eos_ids=(1,))
    with pytest.raises(ValueError, match=r"no tokenizer; give one, as Engine.of\(model, tokenizer\)"):
        Engine.of(tiny_model)


@pytest.mark.parametrize(
    "bad",
    [
        {"n": 0},
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"temperature": 1e-36},
        {"seed": 2**63},
        {"top_k": -1},
        {"top_p": 0.0},
        {"min_p": 1.0},
        {"min_tokens": 300},
        {"repetition_penalty": 0.0},
        {"logprobs": 21},
        {"stop": ("",)},
        {"stop": ""},
    ],
)
def test_bad_sampling_params(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
        SamplingParams(**bad)


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


def settings_array(B, logit_bias=None, **settings):
    numbers = {name: settings.get(name, off) for name, off in SAMPLER.items() if name != "logit_bias"}
    columns = {name: jnp.full(B, x, jnp.asarray(SAMPLER[name]).dtype) for name, x in numbers.items()}
    bias = logit_bias or {-1: 0.0}
    tokens, values = jnp.asarray(list(bias), jnp.int32), jnp.asarray(list(bias.values()), jnp.float32)
    return {**columns, "logit_bias_tokens": jnp.tile(tokens, (B, 1)), "logit_bias": jnp.tile(values, (B, 1))}


def history_of(B, prompt=(), generated=(), stop_ids=(-1,)):
    prompt = prompt or (0,)
    tokens = [prompt[-1], *generated, 0]  # the last column is not theirs
    columns = np.arange(len(tokens))
    return History(
        prompt_tokens=jnp.asarray([[0, *prompt[:-1]]], jnp.int32),  # nor is the first
        prompt_seen=jnp.arange(len(prompt))[None] > 0,
        tokens=jnp.tile(jnp.asarray(tokens, jnp.int32), (B, 1)),
        seen=jnp.tile(jnp.asarray(columns < len(tokens) - 1), (B, 1)),
        generated=jnp.tile(jnp.asarray((columns >= 1) & (columns < len(tokens) - 1)), (B, 1)),
        num_generated=jnp.full(B, len(generated), jnp.int32),
        stop_ids=jnp.tile(jnp.asarray(stop_ids, jnp.int32), (B, 1)),
    )


def first_uniforms(keys):
    return uniforms(keys, jnp.zeros((len(keys), 1), jnp.int32))[:, 0]


# -- settings that change the logits


def changed_by_numpy(logits, prompt=(), generated=(), stop_ids=(), logit_bias=None, min_tokens=0, **penalties):
    """The settings' definitions, one token at a time."""
    out = np.array(logits, np.float64)
    for token, bias in (logit_bias or {}).items():
        out[token] += bias
    if len(generated) < min_tokens:
        out[list(stop_ids)] = -np.inf
    for token in {*prompt, *generated}:
        factor = penalties.get("repetition_penalty", 1.0)
        out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    for token in set(generated):
        out[token] -= penalties.get("presence_penalty", 0.0)
        out[token] -= penalties.get("frequency_penalty", 0.0) * list(generated).count(token)
    return out


CHANGES = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7},
    {"frequency_penalty": -0.4},
    {"logit_bias": {3: 2.5, 0: -100.0, 299: 1.0}},
    {"min_tokens": 5},
    {"min_tokens": 4},
    {
        "repetition_penalty": 0.8,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "logit_bias": {7: 1.0},
        "min_tokens": 9,
    },
]


@pytest.mark.drawn(4)
@pytest.mark.heavy
@pytest.mark.parametrize("settings", [*SETTINGS, *CHANGES, {**CHANGES[-1], **SETTINGS[-1]}], ids=str)
def test_draws_follow_the_definitions_and_the_policy_is_the_temperatures_alone(settings):
    num_draws = 50_000
    row = np.random.default_rng(6).normal(scale=2.0, size=V).astype(np.float32)
    seen = {"prompt": (7, 8, 8), "generated": (9, 7, 9, 20), "stop_ids": (20, 41)}
    cuts = {name: each for name, each in settings.items() if name in inspect.signature(truncated).parameters}
    changes = {name: each for name, each in settings.items() if name not in cuts}
    changed = changed_by_numpy(row, **seen, **changes)
    out = changed_logits(jnp.asarray(row)[None], settings_array(1, **settings), history_of(1, **seen))[0]
    np.testing.assert_allclose(out, changed, rtol=1e-6)

    expected = truncated(changed, **cuts)
    keys = jnp.stack([jnp.ones(num_draws, jnp.uint32), jnp.arange(num_draws, dtype=jnp.uint32)], axis=1)
    tiled, histories = jnp.broadcast_to(jnp.asarray(row), (num_draws, V)), history_of(num_draws, **seen)
    drawn = jax.jit(sample)(tiled, first_uniforms(keys), settings_array(num_draws, **settings), histories)
    counts = np.bincount(np.asarray(drawn.token), minlength=V)
    assert counts[expected == 0].sum() == 0
    likely = expected * num_draws >= 5
    chi2 = ((counts - expected * num_draws)[likely] ** 2 / (expected * num_draws)[likely]).sum()
    assert abs(chi2 - likely.sum() + 1) < 4 * np.sqrt(2 * likely.sum())  # four standard deviations
    np.testing.assert_allclose(drawn.sampler_logp, np.log(expected[drawn.token]), atol=1e-4)
    policy = truncated(row, temperature=settings.get("temperature", 1.0))
    np.testing.assert_allclose(drawn.policy_logp, np.log(policy[drawn.token]), atol=1e-4)


# -- in the engine


def greedy_by_numpy(model, prompt, num_tokens, **settings):
    """Greedy decoding by whole forward passes and the definitions."""
    tokens = []
    forward = jax.jit(lambda ids: logits(model.config, model.params, ids))
    for _ in range(num_tokens):
        ids = np.zeros((1, 48), np.int32)
        ids[0, : len(prompt) + len(tokens)] = [*prompt, *tokens]
        row = np.asarray(forward(ids))[0, len(prompt) + len(tokens) - 1]
        tokens.append(int(changed_by_numpy(row, prompt, tokens, (1,), **settings).argmax()))
        if tokens[-1] == 1:
            break
    return tokens


@pytest.mark.drawn(2)
@pytest.mark.heavy
@pytest.mark.parametrize(
    "settings",
    rest_heavy(
        [
            {"presence_penalty": 1.0, "frequency_penalty": 0.3},
            {"logit_bias": {1: 100.0}, "min_tokens": 6},
            {"logit_bias": {1: 0.05, 40: 0.02}},
            {"repetition_penalty": 1.5},
        ],
        quick=2,
    ),
    ids=str,
)
def test_penalties_and_biases_through_the_engine(tiny_model, settings):
    params = SamplingParams(max_tokens=12, temperature=0.0, **settings)
    groups = engine_for(tiny_model, max_slots=4).generate(PROMPTS, params)
    for prompt, [sequence] in zip(PROMPTS, groups, strict=True):
        assert sequence.tokens == greedy_by_numpy(tiny_model, prompt.tolist(), 12, **settings)


@pytest.mark.heavy
def test_settings_of_one_sequence_do_not_touch_another(tiny_model, expected):
    engine = engine_for(tiny_model)
    plain = engine.sequences(PROMPTS, PARAMS)
    others = engine.sequences(
        PROMPTS,
        SamplingParams(
            n=2, max_tokens=20, repetition_penalty=2.0, logit_bias={5: 3.0}, logprobs=3, top_k=4, min_tokens=9
        ),
        first_prompt=100,
    )
    mixed = [sequence for pair in zip(others, plain, strict=False) for sequence in pair] + plain[len(others) :]
    done = {(s.prompt_index, s.sample_index): s.tokens for s in engine.stream(mixed)}
    assert [[done[p, s] for s in range(PARAMS.n)] for p in range(len(PROMPTS))] == expected


@pytest.mark.heavy
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_plain_program_draws_what_the_general_one_draws(tiny_model, temperature):
    engine = engine_for(tiny_model)
    params = SamplingParams(n=2, max_tokens=20, temperature=temperature)
    general = replace(params, logit_bias={5: 0.0})
    assert (sampling_kind([params]), sampling_kind([params, general])) == ("plain", "general")
    for ours, theirs in zip(engine.generate(PROMPTS, params), engine.generate(PROMPTS, general), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.tokens == other.tokens
            np.testing.assert_allclose(one.policy_logps, other.policy_logps, rtol=0, atol=1e-6)
            np.testing.assert_allclose(one.sampler_logps, other.sampler_logps, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in SAMPLER if name != "temperature"])
def test_what_plain_sampling_is_not(name):
    value = {3: 1.0} if name == "logit_bias" else 0.5 if isinstance(SAMPLER[name], float) else 3
    assert not SamplingParams(**{name: value}).is_plain
    assert SamplingParams(temperature=0.3, n=4, max_tokens=7, stop="end", stop_token_ids=3, ignore_eos=True).is_plain


def test_end_of_sequence_as_the_first_token(tiny_model):
    params = SamplingParams(max_tokens=12, logit_bias={1: 1000.0})
    [[sequence]] = engine_for(tiny_model).generate([PROMPTS[0]], params)
    assert (sequence.tokens, sequence.finish_reason) == ([1], "stop")
    [[sequence]] = engine_for(tiny_model).generate([PROMPTS[0]], replace(params, ignore_eos=True))
    assert (sequence.tokens, sequence.finish_reason) == ([1] * 12, "length")


@pytest.mark.heavy
def test_alternatives_through_the_engine(tiny_model):
    engine = engine_for(tiny_model)
    params = SamplingParams(n=2, max_tokens=10, seed=3)
    plain, wanted = (engine.generate(PROMPTS, p) for p in (params, replace(params, logprobs=3)))
    assert tokens_of(plain) == tokens_of(wanted)
    for sequence in chain(*wanted):
        for token, logp, others in zip(sequence.tokens, sequence.policy_logps, sequence.alternatives, strict=True):
            assert len(others) == 3
            known = dict(others)
            assert logp <= min(known.values()) + 1e-5 or abs(known[token] - logp) < 1e-5
    assert plain[0][0].alternatives == []


def letters(tokens):
    """Two letters a token, so that texts straddle tokens."""
    return "".join(chr(97 + token % 26) + chr(97 + token // 26) for token in tokens)


class Letters:
    added_tokens_decoder = {}  # noqa: RUF012

    def batch_decode(self, rows, **_):
        return [letters(row) for row in rows]


@pytest.mark.heavy
def test_stop_texts_that_straddle_tokens(tiny_model, expected):
    text = letters(expected[3][1])
    stop = (text[9:12], "never said")  # the second letter of a token and the next token
    assert text.find(stop[0]) == 9
    for chunk_steps in (8, 16):
        engine = engine_for(tiny_model, chunk_steps=chunk_steps, tokenizer=Letters(), max_slots=8)
        groups = engine.generate(PROMPTS, replace(PARAMS, stop=stop))
        for group, unstopped in zip(groups, expected, strict=True):
            for sequence, tokens in zip(group, unstopped, strict=True):
                end = next((n for n in range(1, len(tokens) + 1) if stop[0] in letters(tokens[:n])), None)
                assert sequence.tokens == tokens[:end]
                assert len(sequence.policy_logps) == len(sequence.tokens)
                assert sequence.text == letters(tokens).partition(stop[0])[0]
                assert sequence.finish_reason == ("stop" if end or tokens[-1] == 1 else "length")
    asked = Prompts([{}] * len(PROMPTS), PROMPTS)
    sampled = sample_groups(engine, Letters(), asked, replace(PARAMS, stop=stop), step=0)
    texts = {row.prompt_index: [member.text for member in rows] for rows in sampled for row in rows}
    assert [texts[index] for index in range(len(PROMPTS))] == [[letters(s.tokens) for s in group] for group in groups]
    with pytest.raises(ValueError, match=r"stop strings \('a'\) need a tokenizer"):
        engine_for(tiny_model).generate(PROMPTS, SamplingParams(stop=("a",), max_tokens=8))


def test_a_stop_text_that_is_a_special_token_is_that_token(tmp_path):
    from tests.data.test_config_and_data import a_tokenizer

    tokenizer = a_tokenizer(eos_token="<eos>", additional_special_tokens=["<pad>"])
    model = init_model({**TINY, "vocab_size": 13})
    engine = Engine(model.config, model.params, model.mesh, (), chunk_steps=8, tokenizer=tokenizer)
    params = SamplingParams(max_tokens=16, temperature=0.0, min_tokens=3, logit_bias={2: 100.0, 5: 50.0})
    [[unstopped]] = engine.generate([[3, 4]], params)
    assert (unstopped.tokens, unstopped.finish_reason, unstopped.text) == ([2] * 16, "length", "")
    [[one], [other]] = engine.generate([[3, 4], [3]], replace(params, stop=("<pad>", "j")))
    for sequence in (one, other):
        assert (sequence.tokens, sequence.finish_reason, sequence.text) == ([5, 5, 5, 2], "stop", " c c c")


def test_looking_for_stop_texts_decodes_the_end_of_a_long_completion_only():
    decoded = []

    def decode(tokens):
        decoded.append(len(tokens))
        return letters(tokens)

    tokens = RNG.integers(2, 20, 4000).tolist()
    stop = ("zazaza",)
    for num_tokens in range(32, 4001, 32):
        assert find_stop(decode, tokens[:num_tokens], num_tokens - 32, stop, 0) is None
    assert sum(decoded) < 20 * 4000
    assert find_stop(decode, [*tokens, 25, 25, 25, 3], 4000, stop, 0) == 4003, "25 is za"


@pytest.mark.heavy
def test_a_stop_text_within_min_tokens_neither_ends_a_completion_nor_cuts_its_text(tiny_model):
    params = SamplingParams(max_tokens=24, seed=3, temperature=5.0)
    engine = engine_for(tiny_model, tokenizer=Letters(), max_slots=8)
    [[plain]] = engine.generate(PROMPTS[:1], params)
    stop = (letters(plain.tokens)[1:3],)  # ends with the second token
    for min_tokens in (2, 9):
        wanted = replace(params, stop=stop, min_tokens=min_tokens)
        [[sequence]] = engine.generate(PROMPTS[:1], wanted)
        exempt = len(letters(sequence.tokens[:min_tokens]))
        assert len(sequence.tokens) > min_tokens
        assert sequence.text == text_before_stop(letters(sequence.tokens), stop, exempt)
        assert len(sequence.text) >= exempt - len(stop[0])
        [[row]] = sample_groups(engine, Letters(), Prompts([{}], PROMPTS[:1]), wanted, step=0)
        assert row.text == letters(sequence.tokens), "training sees the stop text"
    assert text_before_stop("abcab", ["ab"], 2) == "abc"


def test_updates_and_cancelling(tiny_model, expected):
    engine = engine_for(tiny_model, max_slots=8)
    sequences = engine.sequences(PROMPTS, PARAMS)
    ended, counted = [], {}
    for sequence, num_new in engine.updates(sequences):
        counted[id(sequence)] = counted.get(id(sequence), 0) + num_new
        if sequence.prompt_index == 0 and sequence.tokens:
            sequence.cancel()
        if sequences[-1].finish_reason is None:
            sequences[-1].cancel()  # still waiting
        if sequence.finish_reason:
            ended.append(sequence)
    assert {id(sequence) for sequence in ended} == {id(sequence) for sequence in sequences}
    assert all(counted[id(sequence)] == len(sequence.tokens) for sequence in sequences)
    assert sequences[-1].finish_reason == "abort"
    assert sequences[-1].tokens == []
    for sequence in sequences[PARAMS.n : -1]:
        assert sequence.tokens == expected[sequence.prompt_index][sequence.sample_index]
    for sequence in sequences[: PARAMS.n]:
        whole = expected[0][sequence.sample_index]
        assert sequence.tokens == whole[: len(sequence.tokens)]
        assert sequence.finish_reason in ("abort", "stop", "length")


def test_prompts_of_every_kind(tmp_path):
    from groupax import save_model
    from tests.data.test_config_and_data import a_tokenizer

    tokenizer = a_tokenizer(eos_token="<eos>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    save_model(init_model({**TINY, "vocab_size": 13}), tmp_path / "model", tokenizer)
    engine = Engine.load(tmp_path / "model")
    params = SamplingParams(max_tokens=6, seed=1)
    [[one]] = engine.generate("abc", params)
    ids = engine.encode("abc")[0]
    said, whole = (tokenizer.decode(row, skip_special_tokens=True) for row in (ids, [*ids, *one.tokens]))
    assert said + one.text == whole
    for same in (
        ["abc"],
        ids,
        [ids],
        ids.tolist(),
        (*ids,),
        jnp.asarray(ids),
        ids[None],
        [{"role": "user", "content": "abc"}],
    ):
        assert engine.generate(same, params)[0][0].tokens == one.tokens, same
    both = engine.generate([[{"role": "user", "content": "abc"}], "abc"], params)
    assert both[0][0].tokens == one.tokens
    with pytest.raises(ValueError, match="all prompts as text or messages, or all as token ids"):
        engine.generate(["abc", ids])
    engine.tokenizer = None
    with pytest.raises(ValueError, match="needs a tokenizer; give the Engine one"):
        engine.generate("abc")
    with pytest.raises(ValueError, match=r"logit_bias names tokens \[13\]; the vocabulary has 13"):
        engine.generate(ids, SamplingParams(logit_bias={13: 1.0}, max_tokens=8))


# -- memory


@pytest.mark.optimized
@pytest.mark.heavy
@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.long)])
def test_sequences_that_make_room_begin_again_and_end_the_same(tiny_model, num_devices, monkeypatch):
    params = SamplingParams(n=4, max_tokens=230, seed=3, ignore_eos=True)
    prompts = PROMPTS[:6]
    plenty = tokens_of(engine_for(tiny_model, num_devices).generate(prompts, params))
    engine = engine_for(tiny_model, num_devices)
    engine.kv_bytes = 3000 // num_devices * engine.bytes_per_token
    shapes = []
    decode = Batch.decode

    def watched(batch, params):
        shapes.append((batch.scheduler.slots_per_shard, batch.cache.num_columns))
        return decode(batch, params)

    monkeypatch.setattr(Batch, "decode", watched)
    sequences = engine.sequences(prompts, params)
    for _ in engine.updates(sequences):
        pass
    assert [[s.tokens for s in sequences if s.prompt_index == index] for index in range(6)] == plenty
    plan = engine.plan()
    assert len({slots for slots, _ in shapes}) > 1, "slots were given up"
    assert max(slots * columns for slots, columns in shapes) <= plan.max_tokens


def test_long_prompts_are_computed_in_pieces(tiny_model, monkeypatch):
    prompts = [RNG.integers(2, 96, length) for length in (120, 61, 3)]
    params = SamplingParams(n=2, max_tokens=5, temperature=0.0)
    whole = engine_for(tiny_model, 1).generate(prompts, params)
    monkeypatch.setattr(plan, "CPU_PIECE_TOKENS", 16)
    monkeypatch.setattr(plan, "PIECE_COLUMNS", 16)
    assert plan.piece_size(4, 128, 4, "cpu") == (1, 16)
    prefill.admit.clear_cache()
    pieces = engine_for(tiny_model, 1).generate(prompts, params)
    prefill.admit.clear_cache()
    assert tokens_of(pieces) == tokens_of(whole)
    for a, b in zip(pieces, whole, strict=True):
        np.testing.assert_allclose(a[0].policy_logps, b[0].policy_logps, atol=1e-5)


# -- prompts that go on from what was said


def turn_of(engine, prompt, place, **settings):
    [sequence] = engine.sequences([np.asarray(prompt, np.int32)], SamplingParams(ignore_eos=True, **settings))
    sequence.place = place
    return sequence


@pytest.mark.heavy
def test_a_next_turn_reuses_what_was_computed(tiny_model):
    engine, plain = engine_for(tiny_model, 2, prefix_bytes=1 << 20), engine_for(tiny_model, 2)
    places, settings = [Place(100), Place(100)], {"max_tokens": 20, "seed": 5}
    first = list(engine.stream([turn_of(engine, PROMPTS[3], place, **settings) for place in places]))
    assert engine.prefixes.num_reused_tokens == 0
    prompts = [[*PROMPTS[3], *sequence.tokens, 7, 8, 9] for sequence in first]
    pairs = list(zip(prompts, [sequence.place for sequence in first], strict=True))
    again = [next(engine.stream([turn_of(engine, *pair, **settings)])) for pair in pairs]
    assert engine.prefixes.num_reused_tokens == 2 * (len(PROMPTS[3]) + 19)
    expected = [next(plain.stream([turn_of(plain, prompt, None, **settings)])) for prompt in prompts]
    assert [each.tokens for each in again] == [each.tokens for each in expected]
    # stored keys were added up in two parts, prompt and row, and a prompt's are in one: the last bit may differ
    np.testing.assert_allclose(again[1].policy_logps, expected[1].policy_logps, atol=2e-6, rtol=0)
    engine.params = jax.tree.map(lambda x: x * 1.5, engine.params)
    list(engine.stream([turn_of(engine, *pair, **settings) for pair in pairs]))
    assert engine.prefixes.num_reused_tokens == 2 * (len(PROMPTS[3]) + 19), "other weights, nothing known"


def test_what_two_sets_of_weights_have_computed_is_not_stored(tiny_model):
    engine, place = engine_for(tiny_model, 1, prefix_bytes=1 << 20), Place(100)
    updates, version = engine.updates([turn_of(engine, PROMPTS[3], place, max_tokens=12)]), engine.version
    _, num_new = next(updates)
    assert num_new == 8
    engine.params = jax.tree.map(lambda x: x * 1.5, engine.params)
    engine.version = version  # who counts otherwise may give both the same
    assert [num_new for _, num_new in updates] == [4]
    assert place.prefix is None
    list(engine.stream([turn_of(engine, PROMPTS[3], place, max_tokens=12)]))
    assert place.prefix is not None


@pytest.mark.heavy
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 0), ("bfloat16", 0.05), ("float8", 0.1)])
def test_the_cache_may_have_its_own_dtype(tiny_model, dtype, bound):
    params = SamplingParams(n=2, max_tokens=20, temperature=0.0, ignore_eos=True)
    engine = engine_for(tiny_model, 1, kv_dtype=dtype, prefix_bytes=1 << 20)
    groups, same = engine.generate(PROMPTS, params), engine_for(tiny_model, 1).generate(PROMPTS, params)
    pairs = zip(chain(*groups), chain(*same), strict=True)
    difference = max(abs(own.policy_logps[0] - other.policy_logps[0]) for own, other in pairs)
    assert (difference > 0) == (bound > 0)
    assert difference <= bound
    assert engine.bytes_per_token == 2 * 2 * 2 * 8 * {"float32": 4, "bfloat16": 2, "float8": 1}[dtype]
    place, settings = Place(100), {"max_tokens": 20, "temperature": 0.0}
    [first] = engine.stream([turn_of(engine, PROMPTS[3], place, **settings)])
    [again] = engine.stream([turn_of(engine, [*PROMPTS[3], *first.tokens], place, **settings)])
    assert engine.prefixes.num_reused_tokens > 0
    assert len(again.tokens) == 20


# -- weights in fewer bits, or gathered


@pytest.mark.drawn(2)
@pytest.mark.heavy
@pytest.mark.parametrize(
    "settings", [{"weights": "bfloat16"}, pytest.param({"tp": 2}, marks=pytest.mark.heavy)], ids=str
)
def test_weights_that_were_released_take_no_memory(tiny_model, settings):
    def copies():
        return [weakref.ref(weight) for weight in (engine.params["embed"], engine.params["layers"][0]["down"])]

    engine, place = engine_for(tiny_model, 2, prefix_bytes=1 << 20, **settings), Place(100)
    [first] = engine.stream([turn_of(engine, PROMPTS[3], place, max_tokens=8)])
    released = copies()
    assert all(copy() is not None for copy in released)
    engine.release()
    assert [copy() for copy in released] == [None, None]
    list(engine.stream([turn_of(engine, [*PROMPTS[3], *first.tokens, 7], place, max_tokens=8)]))
    assert engine.prefixes.num_reused_tokens == len(PROMPTS[3]) + 7, "made again they are the same"
    replaced = copies()
    engine.params = jax.tree.map(lambda x: x * 1.5, tiny_model.params)
    assert [copy() for copy in replaced] == [None, None]


# -- sessions: requests that join while others run

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
    assert (session.num_running, session.num_waiting) == (0, 0)
