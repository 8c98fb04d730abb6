"""Completions that match an expression or a schema: their tokens, log-probs, distribution and limits."""

import re
from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from groupax import SamplingParams
from groupax.engine.sampling import sample
from groupax.models.decoder import logits
from tests.training.test_trainer import a_trainer

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
@pytest.mark.parametrize(
    "settings", [{"max_slots": 3}, {"kv_bytes": 1}, {"num_devices": 1}, {"num_devices": 2, "tp": 2}]
)
def test_slots_memory_and_devices_do_not_show(tiny_model, settings):
    engine = engine_for(tiny_model)
    expected = played(engine, constrained(engine, "[a-z ]{0,19}"))
    if "kv_bytes" in settings:
        settings = {"kv_bytes": 330 * engine.bytes_per_token}
    other = engine_for(tiny_model, **settings)
    assert played(other, constrained(other, "[a-z ]{0,19}")) == expected


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


def test_constraints_that_make_no_sense_are_refused(tiny_model):
    with pytest.raises(ValueError, match="regex and json_schema are two constraints"):
        SamplingParams(regex="a", json_schema="{}")
    with pytest.raises(ValueError, match="needs a tokenizer"):
        engine_of(tiny_model).sequences(PROMPTS, SamplingParams(regex="a", max_tokens=9))


@pytest.mark.heavy
def test_training_on_constrained_completions(stories, tmp_path):
    seen = []

    def reward(completions):
        seen.extend(completions)
        return [float(len(completion)) for completion in completions]

    dataset = [{"prompt": "Once upon a time"}, {"prompt": "One day"}]
    given = {"model": str(stories), "tokenizer": None, "max_steps": 2, "prompts_per_step": 2, "learning_rate": 1e-6}
    given |= {"regex": " (yes|no|maybe)( please)*[.]", "rollout_correction": "token_truncate"}
    given["max_completion_length"] = 24
    a_trainer(tmp_path, reward, dataset, **given).train()
    assert len(seen) == 16
    assert all(re.fullmatch(" ?(yes|no|maybe)( please)*[.]", text) for text in seen)
    with pytest.raises(ValueError, match=r"regex is not supported: .*look-around"):
        a_trainer(tmp_path, reward, dataset, **given | {"regex": "(?=a)b"})
