"""Completions that match an expression or a schema: their tokens, log-probs, distribution and limits."""

import json
import re
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2_contingency, chisquare
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from groupax import Engine, GRPOConfig, GRPOTrainer, SamplingParams
from groupax.engine.sampling import sample
from groupax.models.decoder import logits

from .test_engine import engine_for as engine_of
from .test_engine import history_of, settings_array

PROMPTS = [np.array(ids) for ids in ([3, 4, 5], [9], [7, 8])]
PARAMS = SamplingParams(n=4, max_tokens=20, seed=3)


@cache
def letters():
    """A tokenizer for the small model, whose tokens from 2 on are the characters from the space on; 1 ends."""
    written = ["<unk>", "</s>", "\u0120", *map(chr, range(33, 126))]  # the space as byte-level tokenizers write it
    model = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(written)}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", eos_token="</s>")


def engine_for(model, *args, **settings):
    return engine_of(model, *args, tokenizer=letters(), **settings)


def constrained(engine, regex, params=PARAMS, prompts=PROMPTS, first_prompt=0):
    return engine.sequences(prompts, replace(params, regex=regex), first_prompt=first_prompt)


def text_of(sequence):
    return letters().decode(sequence.tokens, skip_special_tokens=True)


def played(engine, sequences):
    return {(each.prompt_index, each.sample_index): each.tokens for each in engine.stream(sequences)}


@pytest.mark.heavy
def test_constrained_and_free_completions_are_decoded_together(tiny_model):
    engine = engine_for(tiny_model)
    free = engine.sequences(PROMPTS, PARAMS)
    alone = played(engine, engine.sequences(PROMPTS, PARAMS))
    short, long = constrained(engine, "[ab]{2,5}c", first_prompt=3), constrained(engine, "x(yz)*", first_prompt=6)
    together = played(engine, [*free, *short, *long])
    assert {key: together[key] for key in alone} == alone
    for regex, sequences in (("[ab]{2,5}c", short), ("x(yz)*", long)):
        for sequence in sequences:
            assert re.fullmatch(regex, text_of(sequence)), text_of(sequence)
            assert (sequence.finish_reason, sequence.tokens[-1]) == ("stop", 1)
    assert played(engine, constrained(engine, "[ab]{2,5}c", first_prompt=3)).items() <= together.items()


@pytest.mark.heavy
@pytest.mark.parametrize("settings", [{"max_slots": 3}, {"kv_bytes": 1}, {"num_devices": 1}])
def test_slots_and_memory_do_not_show(tiny_model, settings):
    engine = engine_for(tiny_model)
    expected = played(engine, constrained(engine, "[a-z ]{0,19}"))
    if "kv_bytes" in settings:
        settings = {"kv_bytes": 330 * engine.bytes_per_token}
    other = engine_for(tiny_model, **settings)
    assert played(other, constrained(other, "[a-z ]{0,19}")) == expected


@pytest.mark.heavy
def test_devices_that_share_the_weights_sample_the_same(tiny_model):
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    one, two = engine_for(tiny_model), engine_for(tiny_model, num_devices=2, tp=2)
    assert played(one, constrained(one, "[a-f]{3,9}")) == played(two, constrained(two, "[a-f]{3,9}"))


SETTINGS = [
    {"top_k": 2, "min_tokens": 20},
    {"top_p": 0.5, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 0.0, "logit_bias": {67: -100.0}},
    {"min_p": 0.2, "stop_token_ids": (69,)},
]


@pytest.mark.heavy
@pytest.mark.parametrize("settings", SETTINGS)
def test_other_settings_apply_to_what_is_allowed(tiny_model, settings):
    engine = engine_for(tiny_model)
    sequences = constrained(engine, "a[bcd]{0,9}e", replace(PARAMS, **settings))
    for sequence in engine.stream(sequences):
        regex = "a[bcd]{0,9}e|a[bcd]*c" if "stop_token_ids" in settings else "a[bcd]{0,9}e"
        assert re.fullmatch(regex, text_of(sequence)), text_of(sequence)
        assert np.isfinite(sequence.policy_logps).all()
        assert np.isfinite(sequence.sampler_logps).all()


def test_constraints_that_cannot_be_kept_any_longer_end_completions(tiny_model):
    engine = engine_for(tiny_model)
    with pytest.raises(ValueError, match="the constraint cannot be kept any longer: "):
        list(engine.stream(constrained(engine, "a\u00e9")))
    free, faulty = engine.sequences(PROMPTS, PARAMS), constrained(engine, "a\u00e9", first_prompt=3)
    ends = {each.prompt_index: each for each, _ in engine.updates([*free, *faulty]) if each.finish_reason}
    assert [bool(ends[index].fault) for index in range(6)] == [False] * 3 + [True] * 3


@pytest.mark.heavy
def test_log_probs_are_those_of_both_distributions(tiny_model):
    engine = engine_for(tiny_model)
    params = replace(PARAMS, temperature=0.7, n=2)
    [sequence, *_] = engine.stream(constrained(engine, "[ab][cd]{3}", params))
    tokens = [*sequence.prompt, *sequence.tokens]
    scores = np.asarray(logits(tiny_model.config, tiny_model.params, jnp.asarray(tokens, jnp.int32)[None]))[0]
    scores = scores[len(sequence.prompt) - 1 : -1] / np.float32(0.7)
    allowed = [[2 + ord(letter) - 32 for letter in letters] for letters in ("ab", "cd", "cd", "cd")] + [[1]]
    for index, (row, ids) in enumerate(zip(scores, allowed, strict=True)):
        token = sequence.tokens[index]
        policy = row[token] - np.logaddexp.reduce(row)
        sampler = row[token] - np.logaddexp.reduce(row[ids])
        np.testing.assert_allclose(sequence.policy_logps[index], policy, atol=1e-5)
        np.testing.assert_allclose(sequence.sampler_logps[index], sampler, atol=1e-5)


@pytest.mark.parametrize("is_plain", [True, pytest.param(False, marks=pytest.mark.heavy)])
def test_draws_are_those_that_rejection_keeps(is_plain):
    rng, B, V = np.random.default_rng(0), 20_000, 40
    row = rng.normal(size=V).astype(np.float32) * 2
    allowed = rng.random(V) < 0.3
    arrays = jnp.broadcast_to(jnp.asarray(row), (B, V)), jnp.asarray(rng.random((B, 2)), jnp.float32)
    history = None if is_plain else history_of(B)
    settings = settings_array(B, **({} if is_plain else {"top_p": 0.999999}))
    mask = jnp.broadcast_to(jnp.asarray(allowed), (B, V))
    constrained_draws = np.asarray(sample(*arrays, settings, history, mask).token)
    assert allowed[constrained_draws].all()
    free = np.asarray(sample(*arrays, settings, history).token)
    kept = free[allowed[free]]  # what rejection sampling keeps
    expected = np.exp(row.astype(np.float64)) * allowed
    for draws in (constrained_draws, kept):
        counts = np.bincount(draws, minlength=V)[allowed]
        assert chisquare(counts, expected[allowed] / expected.sum() * len(draws)).pvalue > 1e-3


@pytest.mark.heavy
def test_a_toy_grammar_has_the_distribution_of_rejection_sampling(tiny_model):
    """Where all texts have one token, sampling again until the text is allowed gives the same distribution."""
    engine = engine_for(tiny_model)
    params = SamplingParams(n=4000, max_tokens=2, seed=1, temperature=2.0)
    tokens = [each.tokens[0] for each in engine.stream(constrained(engine, "[a-h]", params, PROMPTS[:1]))]
    ids = [2 + ord(letter) - 32 for letter in "abcdefgh"]
    free = [each.tokens[0] for each in engine.stream(engine.sequences(PROMPTS[:1], replace(params, n=16_000, seed=2)))]
    kept = np.bincount([token for token in free if token in ids], minlength=96)[ids]
    found = np.bincount(tokens, minlength=96)[ids]
    assert found.sum() == 4000
    assert kept.sum() > 500
    assert chi2_contingency([found, kept]).pvalue > 1e-3


def test_constraints_that_make_no_sense_are_refused(tiny_model):
    with pytest.raises(ValueError, match="regex and json_schema are two constraints"):
        SamplingParams(regex="a", json_schema="{}")
    with pytest.raises(ValueError, match="needs a tokenizer"):
        engine_of(tiny_model).sequences(PROMPTS, SamplingParams(regex="a", max_tokens=9))
    with pytest.raises(ValueError, match="with regex completions are sampled from another distribution"):
        GRPOConfig(regex="a")


PET = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}


@pytest.mark.long
def test_every_completion_of_a_real_model_is_valid(stories):
    validators = pytest.importorskip("jsonschema")
    engine = Engine.load(stories)
    params = SamplingParams(n=1000, max_tokens=120, seed=1, json_schema=json.dumps(PET))
    [group] = engine.generate("Once upon a time", params)
    whole = [completion for completion in group if completion.finish_reason == "stop"]
    for completion in whole:
        validators.validate(json.loads(completion.text), PET)
    assert len(whole) > 500
    with pytest.raises(ValueError, match="json_schema has 'not', which is not supported"):
        engine.generate("Once", replace(params, json_schema='{"not": {}}'))


@pytest.mark.heavy
def test_training_on_constrained_completions(stories, tmp_path):
    seen = []

    def reward(completions, **columns):
        seen.extend(completions)
        return [float(len(completion)) for completion in completions]

    args = GRPOConfig(
        output_dir=str(tmp_path),
        max_steps=2,
        prompts_per_step=2,
        num_generations=4,
        max_completion_length=24,
        regex=" (yes|no|maybe)( please)*[.]",
        rollout_correction="token_truncate",
    )
    dataset = [{"prompt": "Once upon a time"}, {"prompt": "One day"}]
    trainer = GRPOTrainer(str(stories), reward, args=args, train_dataset=dataset)
    trainer.train()
    assert len(seen) == 16
    assert all(re.fullmatch(" ?(yes|no|maybe)( please)*[.]", text) for text in seen)
    with pytest.raises(ValueError, match=r"regex is not supported: .*look-around"):
        GRPOTrainer(str(stories), reward, args=replace(args, regex="(?=a)b"), train_dataset=dataset)
