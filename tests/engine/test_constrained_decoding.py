"""Completions that match an expression or a schema: which texts that allows, log-probs, distribution and limits."""

import contextlib
import json
import re
import sys
import time
from dataclasses import replace
from decimal import Decimal
from functools import cache, partial

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from groupax import SamplingParams
from groupax.engine.constraints import MAX_CHARACTERS, ConstraintCompiler, fault_of
from groupax.engine.sampling import sample
from groupax.models.decoder import logits
from tests.data.chat_tokenizers import VOCAB_SIZE, chat_tokenizer
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


# -- which texts are allowed


@pytest.fixture(scope="module")
def compiler():
    tokenizer = chat_tokenizer()
    return ConstraintCompiler(tokenizer, VOCAB_SIZE, (tokenizer.eos_token_id,))


def matcher_of(compiler, constraint):
    kind = "regex" if isinstance(constraint, str) else "json_schema"
    return compiler.matcher(kind, constraint if kind == "regex" else json.dumps(constraint))


def allows(compiler, matcher, text):
    matcher, ids = matcher.deep_copy(), compiler.tokenizer(text)["input_ids"]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


PET = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", 'a "dog"\\', None]},
        "age": {"type": "integer", "minimum": -3, "exclusiveMaximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["age"],
}
TREE = {
    "$ref": "#/$defs/a%25%20node",
    "$defs": {
        "a% node": {
            "type": "object",
            "properties": {
                "value": {"type": "null"},
                "left": {"anyOf": [{"$ref": "#/$defs/a%25 node"}, {"type": "null"}]},
            },
            "required": ["value"],
        }
    },
}
NAMED = {"allOf": [{"properties": {"a": {"type": "null"}}, "required": ["a"]}, {"properties": {"b": {"const": 1}}}]}
EITHER = {"oneOf": [{"type": "object", "properties": {"k": {"const": "A"}}, "required": ["k"]}, {"type": "boolean"}]}
ALLOWED = [
    ("[a-z ]*", ["", "a b"], ["A"]),
    (r"\d*", ["", "12"], ["\u0661", "a"]),
    ("(a|b)*", ["", "ab"], ["c"]),
    ("", [""], ["a"]),
    ("^a|b$", ["a", "b"], ["ab", ""]),
    (r"[^\]é€/]{1,3}/", ["a/", "[\n\u0800/"], ["]/", "é/", "/"]),
    ("(?i)[a-f]+?x{2,}", ["Bxx", "axX"], ["bx"]),
    (r"(?s)..|\S\D\W", ["\n\n", "é€", "ab-"], ["a", "a1-"]),
    (PET, ['{"age": 119}', '{"kind": "cat", "age":-3,"tags":["ab", "é"]}'], ['{"age": 120}', '{"tags": []}', "{}"]),
    (PET, ['{"kind": "a \\"dog\\"\\\\", "age": 0}'], ['{"age": 1, "more": 2}', '{"age":  1}', ' {"age": 1}']),
    (TREE, ['{"value": null, "left": {"value": null, "left": null}}'], ['{"left": null}', '{"value": 1}']),
    (NAMED, ['{"a": null}', '{"a": null, "b": 1}'], ['{"b": 1}', '{"a": null, "b": 2}']),
    (EITHER, ["true", '{"k": "A"}'], ['{"k": "B"}', "1"]),
    ({"type": "integer", "minimum": -15, "maximum": 1203}, ["-15", "0", "99", "1203"], ["-16", "1204", "007"]),
    ({"type": "number", "minimum": 0.2, "maximum": 0.57}, ["0.2", "0.569", "0.57"], ["0.19", "0.571", "1"]),
    ({"type": "integer", "multipleOf": 5, "minimum": 1, "maximum": 23}, ["5", "20"], ["0", "21", "25"]),
    ({"type": "number", "multipleOf": 0.01}, ["1.25", "-3"], ["1.255"]),
    ({"type": "array", "minItems": 2, "uniqueItems": False}, ["[1, 1]"], ["[1]"]),
    ({"prefixItems": [{"format": "date", "type": "string"}], "items": False}, ['["2024-02-29"]'], ["[1]"]),
    ({"type": "string", "pattern": "^[A-Z]+$", "minLength": 2, "maxLength": 3}, ['"AB"'], ['"A"', '"ABCD"', '"ab"']),
    ({"type": "string", "pattern": "a|^b", "format": "date"}, [], ['"2024-02-29"', '"a"']),
    ({"patternProperties": {"^x": {"type": "null"}}, "additionalProperties": False}, ['{"xy": null}'], ['{"y": null}']),
    ({}, ["null", '"\\n"', '{"a": {"b": [-0.5E+3, true]}}'], ['"\n"', "[1,]", '"\\ud800"', "01"]),
]  # fmt: skip


@pytest.mark.parametrize(("constraint", "allowed", "refused"), ALLOWED)
def test_constraints_allow_what_they_describe(compiler, constraint, allowed, refused):
    if not allowed:
        with pytest.raises(ValueError, match=r"no text satisfies it|empty"):
            matcher_of(compiler, constraint)
        return
    matcher = matcher_of(compiler, constraint)
    assert [text for text in allowed if not allows(compiler, matcher, text)] == []
    assert [text for text in refused if allows(compiler, matcher, text)] == []


REFUSED = [
    ("(", "regex is not valid: missing \\)"),
    ("(?=a)b", "look-around"),
    (r"(a)\1", "backreferences"),
    (r"a\bc", "lookarounds not supported"),
    ("(?m)^a$", "lookarounds not supported"),
    ("\ud800", "half of a surrogate pair"),
    ("a" * (MAX_CHARACTERS + 1), "65,537 characters, more than 65,536"),
    ({"not": {}}, 'Unimplemented keys: ."not"'),
    ({"anyOf": [{"properties": {"a": {"if": {}}}}]}, 'Unimplemented keys: ."if"'),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "string", "format": "color"}, "Unknown format"),
    ({"$ref": "#/$defs/a"}, "does not exist"),
    ({"$ref": "#"}, "no text satisfies it"),
    ({"type": "integer", "minimum": 2, "maximum": 1}, "minimum .2. is greater"),
    ([], "must be an object or a boolean"),
    (False, "allows no document"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "use anyOf"),
    ({"type": "object", "minProperties": 2}, "minProperties above 1"),
    ({"type": "number", "minimum": float("inf")}, "Infinity"),
    *(({"type": "integer", key: 10**309}, "out of range") for key in ("minimum", "maximum")),
    *(({key: 10**309}, "out of range") for key in ("minItems", "maxLength", "const")),
    ({"type": "integer", "multipleOf": 99991}, "at most 10,000"),
    ({"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]}, "2 of multipleOf"),
    ({"allOf": [{"type": "string", "pattern": "[a-z]" + "x" * n} for n in range(40)]}, "40 of pattern"),
    ({"type": "string", "maxLength": 10**12}, "decimal literal invalid"),
    ({"enum": [f"value {n}" for n in range(10_000)]}, "more than 65,536"),
]


@pytest.mark.parametrize(("constraint", "message"), REFUSED)
def test_what_cannot_be_kept_is_refused(compiler, constraint, message):
    with pytest.raises(ValueError, match=message):
        matcher_of(compiler, constraint)


def sampled(compiler, matcher, rng, most):
    """Random tokens that may follow each other, with a preference for ends, and whether they are a whole text."""
    tokens, eos = [], compiler.eos_ids[0]
    while len(tokens) < most and not fault_of(matcher):
        [words] = compiler.masks([(matcher, 0)], 1)
        may_follow = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB_SIZE])
        endings = [token for token in may_follow if compiler.tokenizer.decode(token) in ('"', "]", "}", "<|im_end|>")]
        token = int(rng.choice(endings if endings and rng.random() < 0.3 else may_follow))
        if token == eos:
            return compiler.tokenizer.decode(tokens), True
        if not matcher.consume_token(token):
            assert fault_of(matcher)
            break
        tokens.append(token)
    return compiler.tokenizer.decode(tokens), False


@pytest.mark.parametrize("schema", [each for each, allowed, _ in ALLOWED if allowed and isinstance(each, dict)])
def test_sampled_documents_are_valid_for_their_schema(compiler, schema):
    jsonschema, rng = pytest.importorskip("jsonschema"), np.random.default_rng(0)
    exact = partial(json.loads, parse_float=Decimal)  # of which 0.01 divides 0.07
    texts = [sampled(compiler, matcher_of(compiler, schema), rng, 300) for _ in range(8)]
    assert any(is_whole for _, is_whole in texts)
    for text in (text for text, is_whole in texts if is_whole):
        jsonschema.validate(exact(text), exact(json.dumps(schema)), format_checker=jsonschema.FormatChecker())


def test_only_what_spells_text_may_follow(compiler):
    [words] = compiler.masks([(compiler.matcher("regex", "[^a]*"), 0)], 1)
    may_follow = np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    special = [token for token, each in compiler.tokenizer.added_tokens_decoder.items() if each.special]
    assert [token for token in special if may_follow[token]] == [compiler.tokenizer.eos_token_id]


WORST = [
    *(f"a{{{n}}}" for n in (1200, 4000)),
    "(?:a{1000}){10000}",
    "(?:a|b)*a(?:a|b){20}",
    "(?s:.*)a(?s:.){500}",
    "(?:.*[a-f].*[g-k]){50}.*",
    "(?:(?:a?){100}){100}b",
    {"type": "object"},
    {"type": "string", "maxLength": 500_000},
    {"type": "integer", "multipleOf": 9973, "minimum": 1, "maximum": 1e300},
    {"enum": [f"v{n}" for n in range(5000)]},
    {"properties": {f"p{n}": {"type": "null"} for n in range(2000)}, "type": "object"},
    {"allOf": [{"type": "string", "pattern": f"(a|b)*{c}(a|b){{500}}"} for c in "ab"]},
    {"anyOf": [{"properties": {f"a{n}": {}}} for n in range(60)], "type": "object"},
    {"$ref": "#/$defs/0", "$defs": {str(n): {"anyOf": [{"$ref": f"#/$defs/{(n + 1) % 40}"}] * 2} for n in range(40)}},
]  # fmt: skip


@pytest.mark.parametrize("constraint", WORST)
def test_the_worst_constraints_cost_little_or_are_given_up(compiler, constraint):
    started_s = time.process_time()
    with contextlib.suppress(ValueError):
        sampled(compiler, matcher_of(compiler, constraint), np.random.default_rng(0), 100)
    assert time.process_time() - started_s < 1.5


def test_what_a_constraint_needs(compiler, monkeypatch):
    for changes, message in (({"tokenizer": None}, "needs a tokenizer"), ({"eos_ids": ()}, "an end-of-sequence token")):
        given = {"tokenizer": compiler.tokenizer, "vocab_size": VOCAB_SIZE, "eos_ids": compiler.eos_ids} | changes
        with pytest.raises(ValueError, match=message):
            ConstraintCompiler(**given).matcher("regex", "a")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"a constraint .* pip install 'groupax\[constraints\]'"):
        ConstraintCompiler(compiler.tokenizer, VOCAB_SIZE, compiler.eos_ids).matcher("regex", "a")
