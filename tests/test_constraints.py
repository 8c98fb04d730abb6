"""Regular expressions and JSON schemas as automata, over bytes and over tokens."""

import json
import re

import numpy as np
import pytest

from groupax.constraints.byte_automaton import MAX_BYTE_STATES, compile_regex
from groupax.constraints.characters import complement, encodings, union
from groupax.constraints.json_schema import regex_of_schema
from groupax.constraints.token_automaton import TokenTrie, token_automaton
from groupax.constraints.token_bytes import token_bytes

from .automata import accepts, automaton_of, random_text, schema_automaton
from .conftest import rest_heavy

REGEXES = [
    "a|ab|abc",
    "[1-9][0-9]{0,4}|0",
    "(?i)[a-f]+?x{2,}",
    "^[^a-zé€]{1,3}$",
    r"\w+@\w+\.(?:com|org)",
    "(a|b)*abb",
    "x{0}|(?:yz?){2,3}",
    r"(?s)..|\S\D\W",
    "[\u0800-\U00012345]",
]
TEXTS = ["", "a", "ab", "abc", "abcd", "0", "07", "12345", "123456", "BADxx", "bx", "é", "€a", "ABC", "me@here.org"]
TEXTS += ["a.b", "babb", "abba", "yy", "yzyzy", "yzyzyzy", "\n\n", "x y", "-- ", "\u0800", "\U00012345", "\U00012346"]


@pytest.mark.parametrize("regex", REGEXES)
def test_an_automaton_accepts_what_the_expression_matches(regex):
    automaton = automaton_of(regex)
    for text in TEXTS:
        assert accepts(automaton, text) == bool(re.fullmatch(regex, text, re.ASCII)), (regex, text)
    rng = np.random.default_rng(0)
    for _ in range(20):
        assert re.fullmatch(regex, random_text(automaton, rng), re.ASCII)


@pytest.mark.parametrize("regex", rest_heavy(["a|ab|abc", r"(?:a|b){0,9}c", "é*x"]))
def test_a_compiled_automaton_is_the_smallest(regex):
    compiled, whole = compile_regex(regex), automaton_of(regex)
    assert len(compiled.next_state) <= len(whole.next_state)
    for text in [*TEXTS, "éx", "ababc", "c"]:
        assert accepts(compiled, text) == accepts(whole, text)


REFUSED = [
    ("(", "is not valid: missing \\)"),
    ("(?=a)b", "look-around"),
    (r"(a)\1", "a backreference"),
    (r"a\bc", "an anchor or a word boundary"),
    ("(?m)^a$", "flag m"),
    ("(?:a|b)*a(?:a|b){20}", f"more than {MAX_BYTE_STATES:,} states"),
    ("(?:a{1000}){10000}", "lower the bounds of its repetitions|takes more than"),
]


@pytest.mark.parametrize(("regex", "message"), rest_heavy(REFUSED))
def test_expressions_that_cannot_be_compiled_are_refused(regex, message):
    with pytest.raises(ValueError, match=message):
        compile_regex(regex)


def test_sets_of_characters():
    assert union([(5, 7), (1, 2), (3, 3)]) == ((1, 3), (5, 7))
    assert complement(((0, 4), (9, 0x10FFFF))) == ((5, 8),)
    wanted = {chr(code).encode() for code in range(0x7E0, 0x900)}
    found = set()
    for ranges in encodings(((0x7E0, 0x8FF),)):
        found |= {bytes(each) for each in _product(ranges)}
    assert found == wanted


def _product(ranges):
    if not ranges:
        return [()]
    (low, high), *rest = ranges
    return [(byte, *others) for byte in range(low, high + 1) for others in _product(rest)]


PET = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", 'a "dog"\\', None]},
        "age": {"type": "integer", "minimum": -3, "exclusiveMaximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["age"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"value": {"type": "null"}, "left": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["value"],
        }
    },
}
SCHEMAS = [
    PET,
    TREE,
    {"type": ["number", "null"], "minimum": 0.25, "maximum": 3},
    {"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": 0},
    {"type": "integer", "multipleOf": 5, "minimum": 1, "maximum": 23},
    {"type": "array", "prefixItems": [{"type": "string", "format": "date"}, {"type": "boolean"}], "items": False},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2},
    {"type": "string", "pattern": '^[A-Z"]{2}-\\d+\\.$'},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "object", "additionalProperties": {"const": [1, {"a": "é"}]}, "minProperties": 1, "maxProperties": 2},
    {"allOf": [{"properties": {"a": {"type": "null"}}, "required": ["a"]}, {"properties": {"b": {"const": 1}}}]},
    {"oneOf": [{"type": "object", "properties": {"k": {"const": "A"}}, "required": ["k"]}, {"type": "boolean"}]},
    {"type": "object"},
]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_documents_of_a_schema_are_valid(schema):
    validators = pytest.importorskip("jsonschema")
    validator = validators.Draft202012Validator(schema, format_checker=validators.FormatChecker(("date",)))
    automaton, rng = schema_automaton(schema), np.random.default_rng(0)
    documents = {random_text(automaton, rng) for _ in range(20)}
    for document in documents:
        validator.validate(json.loads(document))


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (PET, ['{"age": 119}', '{"kind": "cat", "age":-3,"tags":["ab", "é"]}'], ['{"age": 120}', '{"tags": []}', "{}"]),
        ({"type": "integer", "minimum": -15, "maximum": 1203}, ["-15", "0", "99", "1203"], ["-16", "1204", "007"]),
        ({"type": "number", "minimum": 0.2, "maximum": 0.57}, ["0.2", "0.569", "0.57"], ["0.19", "0.571", "1"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, ["0.001", "1", "1.0"], ["0", "0.00", "1.01"]),
        ({"type": "array", "maxItems": 1}, ["[]", '[{"a": [1e5]}]'], ["[1, 2]"]),
        ({}, ["null", '"\\u00e9\\n"', '{"a": {"b": [-0.5E+3, true]}}'], ['"\n"', "[1,]", '"\\ud800"', "01"]),
    ],
)
def test_bounds_of_a_schema(schema, valid, invalid):
    automaton = schema_automaton(schema)
    assert [text for text in valid if not accepts(automaton, text)] == []
    assert [text for text in invalid if accepts(automaton, text)] == []


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": {}}, "'not', which is not supported"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "strin"}, "types are object, array"),
        ({"type": "string", "pattern": "a", "minLength": 2}, "two of pattern, format and a length"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"$ref": "http://somewhere/else"}, "only those within the schema"),
        ({"$ref": "#/$defs/a"}, "leads nowhere"),
        ({"$ref": "#"}, "no document of finite depth"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "no document of finite depth"),
        ({"type": "integer", "minimum": "2"}, "must be a number"),
        ({"properties": []}, "must be an object"),
        (
            {"allOf": [{"properties": {"a": {}}, "additionalProperties": False}, {"properties": {"b": {}}}]},
            "rule it out",
        ),
        ([], "must be an object or a boolean"),
    ],
)
def test_schemas_that_cannot_be_kept_are_refused(schema, message):
    with pytest.raises(ValueError, match=message):
        regex_of_schema(json.dumps(schema))


@pytest.mark.heavy
def test_references_that_multiply_are_refused():
    definitions = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**definitions, "d40": {"type": "integer"}}}
    with pytest.raises(ValueError, match="simplify its references"):
        regex_of_schema(json.dumps(schema))


TOKENS = [b"", b"", b"a", b"b", b"ab", b"\xc3", b"\xa9", b"ba", b"c", b"abc"]


def test_tokens_follow_the_bytes():
    found = token_automaton(automaton_of("(ab)*é?"), TokenTrie(TOKENS), eos_ids=(1,))
    spelled = {
        (): True,
        (4, 4): True,
        (2, 3, 5, 6): True,
        (4, 5): False,
        (2, 7, 3): True,
        (3,): False,
        (5, 6, 4): False,
    }
    for tokens, is_whole in spelled.items():
        state = 0
        for token in tokens:
            state = found.next_state[state, found.token_class[token]] if state >= 0 else -1
        can_end = state >= 0 and found.next_state[state, found.token_class[1]] >= 0
        assert can_end == is_whole, tokens
    assert found.min_tokens == 1
    assert found.token_class[8] == found.token_class[9] == found.token_class[0]  # never occur
    assert token_automaton(automaton_of("abab"), TokenTrie(TOKENS), (1,)).min_tokens == 3


def test_what_no_tokens_spell_is_refused():
    with pytest.raises(ValueError, match="no tokens that spell"):
        token_automaton(automaton_of("x"), TokenTrie(TOKENS), (1,))
    with pytest.raises(ValueError, match="end-of-sequence token"):
        token_automaton(automaton_of("a"), TokenTrie(TOKENS), ())


def test_bytes_of_the_tokens_of_a_real_tokenizer(stories):
    from groupax.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(stories)
    found = token_bytes(tokenizer, 512)
    assert found[tokenizer.convert_tokens_to_ids("<0x0A>")] == b"\n"
    assert found[tokenizer.convert_tokens_to_ids("\u2581the")] == b" the"
    assert found[tokenizer.eos_token_id] == b""
