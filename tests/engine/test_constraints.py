"""Which texts expressions and schemas allow, what is refused, and what the worst ones cost."""

import contextlib
import json
import sys
import time

import numpy as np
import pytest

from groupax.constraints import MAX_CHARACTERS, ConstraintCompiler, fault_of
from tests.data.chat_tokenizers import VOCAB_SIZE, chat_tokenizer


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
    ("a*", ["", "aa"], ["b"]),
    ("[a-z ]*", ["", "a b"], ["A"]),
    (r"\d*", ["", "12"], ["\u0661", "a"]),
    ("(a|b)*", ["", "ab"], ["c"]),
    ("", [""], ["a"]),
    ("^a|b$", ["a", "b"], ["ab", ""]),
    (r"a\$", ["a$"], ["a"]),
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
    ({"type": "array", "maxItems": 1}, ["[]", '[{"a": [1e5]}]'], ["[1, 2]"]),
    ({"type": "array", "minItems": 2, "uniqueItems": False}, ["[1, 1]"], ["[1]"]),
    ({"prefixItems": [{"format": "date", "type": "string"}], "items": False}, ['["2024-02-29"]'], ["[1]"]),
    ({"type": "string", "pattern": "^[A-Z]+$", "minLength": 2, "maxLength": 3}, ['"AB"'], ['"A"', '"ABCD"', '"ab"']),
    ({"type": "string", "pattern": "a|^b", "format": "date"}, [], ['"2024-02-29"', '"a"']),
    ({"patternProperties": {"^x": {"type": "null"}}, "additionalProperties": False}, ['{"xy": null}'], ['{"y": null}']),
    ({"type": "object", "minProperties": 1}, ['{"a": 1}'], ["{}"]),
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
    ("a++b", "possessive"),
    ("[a&&[b]]", "operations on sets"),
    ("\ud800", "half of a surrogate pair"),
    ("a" * (MAX_CHARACTERS + 1), "65,537 characters, more than 65,536"),
    ({"not": {}}, "'not', which is not supported"),
    ({"typo": 1}, "'typo', which is not supported"),
    ({"type": "string", "nullable": True}, "'nullable'"),
    ({"anyOf": [{"properties": {"a": {"if": {}}}}]}, "'if'"),
    ({"type": "object", "x-guidance": {"lenient": True}}, "'x-guidance'"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "strin"}, "Invalid type: strin"),
    ({"type": "string", "pattern": "(?=a)"}, "look-around"),
    ({"type": "string", "format": "color"}, "Unknown format"),
    ({"$ref": "http://somewhere/else"}, "not present"),
    ({"$ref": "#/$defs/a"}, "does not exist"),
    ({"$ref": "#"}, "no text satisfies it"),
    ({"type": "integer", "minimum": 2, "maximum": 1}, "minimum .2. is greater"),
    ({"type": "integer", "minimum": "2"}, "Expected f64 for 'minimum'"),
    ({"properties": []}, "must be an object"),
    ([], "must be an object or a boolean"),
    (False, "allows no document"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "use anyOf"),
    ({"type": "object", "minProperties": 2}, "minProperties of 2"),
    ({"type": "number", "minimum": float("inf")}, "Infinity"),
    *(({"type": "integer", key: 10**309}, "integers up to 2\\^53") for key in ("minimum", "maximum", "multipleOf")),
    *(({key: 10**309}, "integers up to 2\\^53") for key in ("minItems", "maxLength", "const")),
    ({"enum": [1, [2**53 + 1]]}, "9007199254740993 in 'enum'"),
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


def is_pet(pet):
    tags = pet.get("tags", [])
    is_sound = pet.keys() <= PET["properties"].keys() and pet.get("kind") in PET["properties"]["kind"]["enum"]
    return is_sound and -3 <= pet["age"] < 120 and len(tags) <= 2 and all(len(tag) <= 3 for tag in tags)


def is_tree(tree):
    return "value" in tree and tree["value"] is None and (tree.get("left") is None or is_tree(tree["left"]))


@pytest.mark.parametrize(
    ("schema", "is_valid"),
    [
        (PET, is_pet),
        (TREE, is_tree),
        ({"type": "string", "minLength": 2, "maxLength": 4}, lambda text: 2 <= len(text) <= 4),
        ({"type": ["number", "null"], "minimum": 0.25, "maximum": 3}, lambda x: x is None or 0.25 <= x <= 3),
        ({"type": "object"}, lambda value: isinstance(value, dict)),
    ],
)
def test_sampled_documents_are_valid(compiler, schema, is_valid):
    rng, prototype = np.random.default_rng(0), matcher_of(compiler, schema)
    texts = [
        text for text, is_whole in (sampled(compiler, prototype.deep_copy(), rng, 60) for _ in range(20)) if is_whole
    ]
    assert texts
    for text in texts:
        assert is_valid(json.loads(text)), text


def test_only_what_spells_text_may_follow(compiler, stories):
    [words] = compiler.masks([(compiler.matcher("regex", "[^a]*"), 0)], 1)
    may_follow = np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    special = [token for token, each in compiler.tokenizer.added_tokens_decoder.items() if each.special]
    assert [token for token in special if may_follow[token]] == [compiler.tokenizer.eos_token_id]
    from groupax.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(stories)
    tokens = ConstraintCompiler(tokenizer, 512, (tokenizer.eos_token_id,)).load_tokens()
    for token, spelled in (("<0x0A>", b"\n"), ("\u2581the", b" the")):
        assert tokens.decode_bytes([tokenizer.convert_tokens_to_ids(token)]) == spelled


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
