"""The server's parts by themselves: requests, prompts of chats, turns and texts that grow, responses, metrics."""

import asyncio
import gc
import json
import subprocess
import sys
import time
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from groupax import SamplingParams, save_model
from groupax.cli.serve import Serve, engines_of, models_of
from groupax.constraints import ConstraintCompiler
from groupax.data.tokenizer import context_tokens, decode, decode_after
from groupax.engine.sequence import text_before_stop
from groupax.parallel import memory as peak
from groupax.serve.exchange import Completion, Delta, Exchange, TextStream, TokenTexts
from groupax.serve.loop import EngineLoop
from groupax.serve.metrics import Metrics, RequestRecord
from groupax.serve.prompts import ServedModel, chat_prompt, encoded, encoded_chat, prepare
from groupax.serve.protocols import PROTOCOLS, EventStream
from groupax.serve.protocols.openai import ResponseBuilder
from groupax.serve.requests import SETTINGS, ChatRequest, Incoming, parse, parse_json
from groupax.serve.turns import Turn, TurnFormat, TurnFormats, TurnReader, TurnStream
from groupax.serve.web import ApiError
from groupax.serve.weights import Weights
from groupax.tools.formats import FORMATS, CallFormat
from tests.data.test_bridge import HERMES, LOOKUP, byte_tokenizer
from tests.data.test_config_and_data import a_tokenizer
from tests.engine.test_engine import engine_for
from tests.episodes.test_tool_formats import written

THINKING = HERMES.replace("{{ m.content }}", "{% if m.x %}</think>{% endif %}{{ m.content }}").replace(
    "assistant\n{% endif %}", "assistant\n{% if think %}<think>\n{% endif %}{% endif %}"
)
USER = [{"role": "user", "content": "What is a word?"}]
NAMED = {"type": "function", "function": {"name": "lookup"}}
CALLS = '<tool_call>{"name": "lookup", "arguments": {"value": "a<b"}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


def parsed(is_chat=False, **fields):
    return parse(json.dumps({"prompt": "x", **fields} if not is_chat else fields).encode(), is_chat)


def chat(**fields):
    request = parse(json.dumps({"messages": USER, **fields}).encode(), True)
    assert isinstance(request, ChatRequest)
    return request


def served(tokenizer):
    compiler = ConstraintCompiler(tokenizer, 300, (1,))
    return ServedModel("m", tokenizer, TurnFormats(tokenizer), TokenTexts(tokenizer), compiler, 300, 4096)


def reader_of(tokenizer, **fields):
    return encoded_chat(chat(**fields), served(tokenizer), {})[2]


# -- requests


def test_settings_of_a_request():
    request = parsed(n=2, top_k=-1, stop="a", logit_bias={"3": -1}, seed=7, logprobs=0, stream=True, max_tokens=9)
    params = request.sampling_params(16)
    assert (params.n, params.top_k, params.stop, params.seed, params.max_tokens) == (2, 0, ("a",), 7, 9)
    assert params.logit_bias == {3: -1.0}
    assert request.logprobs == 0
    assert request.stream
    assert parsed(max_tokens=None).sampling_params(16).max_tokens == 16
    assert parsed().seed != parsed().seed
    assert parsed(prompt=[[1, 2], [3]]).prompts == [[1, 2], [3]]
    assert parsed(prompt=[1, 2]).prompts == [[1, 2]]
    assert parsed(user="somebody", best_of=1, suffix=None).prompts == ["x"]
    assert parsed(row_keys=[[1, 2**32 - 1]]).row_keys == [[1, 2**32 - 1]]


def test_settings_of_a_chat():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    request = parsed(True, messages=messages, max_completion_tokens=5, max_tokens=9, logprobs=True, top_logprobs=3)
    assert request.prompts == [[{"role": "user", "content": "ab"}]]
    assert request.sampling_params(100).max_tokens == 5
    assert request.logprobs == 3
    assert parsed(True, messages=messages, tools=[], response_format={"type": "text"}).logprobs is None


def test_settings_default_to_those_of_the_engine():
    own = parsed(seed=0).sampling_params(16)
    assert own == SamplingParams(max_tokens=16)
    assert {*SETTINGS, "max_tokens", "logprobs", "grammar"} == {each.name for each in fields(SamplingParams)}


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"response_format": FORMAT}, ("json_schema", json.dumps(SCHEMA))),
        ({"response_format": {"type": "json_object"}}, ("json_schema", '{"type": "object"}')),
        ({"response_format": {"type": "text"}, "regex": "a+"}, ("regex", "a+")),
        ({"json_schema": json.dumps(SCHEMA)}, ("json_schema", json.dumps(SCHEMA))),
        ({"guided_json": SCHEMA}, ("json_schema", json.dumps(SCHEMA))),
        ({"guided_regex": "a|b"}, ("regex", "a|b")),
        ({"guided_choice": ["a.", "b"]}, ("regex", "a\\.|b")),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, ("json_schema", json.dumps(SCHEMA))),
        ({"structured_outputs": {"json_object": True}}, ("json_schema", '{"type": "object"}')),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ("regex", "yes|no")),
        ({"structured_outputs": {}, "response_format": None}, None),
    ],
)
def test_constraints_under_the_names_of_all_servers(fields, constraint):
    assert parsed(**fields).sampling_params(16).constraint == constraint


FAULTS = [
    ({"prompt": None}, "prompt is missing"),
    ({"prompt": []}, "prompt must be"),
    ({"prompt": [True]}, "a prompt must be"),
    ({"prompt": [1, 2.5]}, "a prompt must be"),
    ({"prompt": {"a": 1}}, "prompt must be"),
    ({"temperature": "hot"}, "temperature must be a valid number"),
    ({"temperature": 1e300}, "temperature must be less than or equal to 1000000000, got 1e\\+300"),
    ({"temperature": True}, "temperature must be a valid number"),
    ({"temperature": 1e-36}, "temperature must be 0 or between 1e-06 and 1000, got 1e-36"),
    ({"n": 1.5}, "n must be a valid integer, got 1.5"),
    ({"n": 1 << 40}, "n must be less than 2147483648, got 1099511627776"),
    ({"seed": 1 << 70}, "seed must be less than 9223372036854775808"),
    ({"stop": [1]}, "stop.0 must be a valid string, got 1"),
    ({"stop": ["a"] * 17}, "stop must have at most 16 items, not 17"),
    ({"stop": [""]}, "stop must be texts that are not empty"),
    ({"logit_bias": {"a": 1}}, "logit_bias must have token ids as its keys"),
    ({"logit_bias": {"1" * 5000: 1}}, "logit_bias must have token ids as its keys"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1 must be less than or equal to 100, got 101"),
    ({"logit_bias": [1]}, "logit_bias must be a valid object"),
    ({"logprobs": 21}, "logprobs must be less than or equal to 20, got 21"),
    ({"echo": 1}, "echo must be a valid boolean, got 1"),
    ({"max_tokens": 0}, "max_tokens is 0, but nothing of the prompt is requested"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs cannot be streamed"),
    ({"stream_options": 1}, "stream_options must be a valid object"),
    ({"best_of": 3}, "best_of=3 is not supported"),
    ({"max_token": 3}, "unknown field 'max_token'; did you mean max_tokens"),
    ({"messages": []}, "unknown field 'messages'"),
    ({"model": 3}, "model must be a valid string"),
    ({"min_tokens": 20}, "min_tokens must be in"),
    ({"row_keys": [[1]]}, "row_keys.0 must have at least 2 items, not 1"),
    ({"row_keys": [[1, -1]]}, "row_keys.0.1 must be greater than or equal to 0, got -1"),
    ({"response_format": {"type": "xml"}}, "response_format must have the type text, json_object or json_schema"),
    ({"response_format": "json"}, "response_format must have the type"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "an object with a schema"),
    ({"guided_json": 3}, "guided_json must be a JSON schema, got 3"),
    ({"guided_choice": []}, "guided_choice must be a list of texts"),
    ({"regex": 1}, "regex must be a text"),
    ({"regex": "a", "guided_json": SCHEMA}, "regex and guided_json are several constraints"),
    ({"structured_outputs": {"grammar": "root ::= a"}}, "structured_outputs has 'grammar', which is not supported"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "several constraints"),
    ({"guided_grammar": "x"}, "unknown field 'guided_grammar'"),
    ({"grammar": 'start: "x"'}, "unknown field 'grammar'"),
]
CHAT_FAULTS = [
    ({"messages": None}, "messages is missing"),
    ({"messages": [{"role": "user"}]}, "messages.0.content is missing"),
    ({"messages": [{"content": "x"}]}, "messages.0.role is missing"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part of a message must be {'type'"),
    ({"top_logprobs": 1}, "top_logprobs needs logprobs=true"),
    ({"tools": [{}]}, "tools.0.function must have a name"),
    ({"prompt": "x"}, "unknown field 'prompt'"),
    ({"tools": 3}, "tools must be a list of at most 256 functions, got 3"),
    ({"tools": [LOOKUP] * 257}, "tools must be a list of at most 256"),
    ({"tools": [LOOKUP, LOOKUP]}, "tools must have different names, got 'lookup'"),
    ({"tools": [{"type": "web_search"}]}, "tools.0 must be .* got {'type': 'web_search'}"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 3}}]}, "must be a JSON schema, got 3"),
    ({"tools": [LOOKUP], "tool_choice": "any"}, "tool_choice must be one of none, auto, required"),
    ({"tool_choice": "required"}, "tool_choice is required, but there are no tools"),
    ({"tools": [LOOKUP], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "function 'x'"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs has 'tools'"),
    ({"chat_template_kwargs": 3}, "chat_template_kwargs must be a mapping"),
    ({"continue_final_message": True}, "needs add_generation_prompt=false"),
    ({"continue_final_message": True, "add_generation_prompt": False}, "needs a last message with a text of the"),
    ({"messages": [*USER, {"role": "tool", "tool_call_id": "a"}]}, "messages.1.content is missing"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]}, "JSON"),
    ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "tool_calls must be a list of calls"),
]


@pytest.mark.parametrize(
    ("is_chat", "fields", "message"), [(False, *each) for each in FAULTS] + [(True, *each) for each in CHAT_FAULTS]
)
def test_requests_that_make_no_sense_are_refused(is_chat, fields, message):
    with pytest.raises(ApiError, match=message) as caught:
        (chat if is_chat else parsed)(**fields).sampling_params(16)
    assert caught.value.status == 400
    assert set(caught.value.body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("body", [b"", b"[]", b'{"a": NaN}', b"\xff", b"[" * 100_000, b"1"])
def test_bodies_that_are_no_objects_are_refused(body):
    with pytest.raises(ApiError, match="the body"):
        parse_json(body)


@pytest.mark.parametrize(
    "value",
    [
        *(b'"\\ud800"', b'[{"a": ["\\udc00x"]}]', b'{"\\ud83d": 1}', b'"\xed\xa0\x80"', b'"\xe9"', b"1e999"),
        *(b'{"a": [-1e400]}', b"Infinity"),
    ],
)
@pytest.mark.parametrize("path", [*PROTOCOLS])
def test_values_that_a_response_could_not_repeat_are_refused(path, value):
    for name in (b"metadata", b"user", b"prompt", b"instructions", b"messages", b"input", b"unknown"):
        with pytest.raises(ApiError, match="the body is not JSON") as caught:
            PROTOCOLS[path].parse(b'{"%s": %s}' % (name, value))
        assert caught.value.status == 400
    PROTOCOLS["/v1/responses"].parse(b'{"input": "x", "metadata": "\\ud83d\\ude00"}')
    body = ApiError(400, "demo has no tensors \ud800, é").body
    assert json.loads(json.dumps(body, ensure_ascii=False).encode())["error"]["message"].endswith(r" \ud800, é")


def test_prompts_are_counted_before_they_are_encoded():
    tokenizer = a_tokenizer()
    mixed = parsed(prompt=["ab", [3, 4], "c", [5]])
    expected = [tokenizer("ab")["input_ids"], [3, 4], tokenizer("c")["input_ids"], [5]]
    assert [ids.tolist() for ids in encoded(mixed, tokenizer, 256)] == expected
    model = replace(served(byte_tokenizer()), tokenizer=None)  # with which nothing can be encoded
    for request in (parsed(prompt=["a"] * 5), parsed(prompt=["a", "b"], n=3), parsed(prompt=["a"] * 5, n=-1)):
        with pytest.raises(ApiError, match="a request may have 4 completions"):
            prepare(Incoming(request), model, 4, 1024)


# -- prompts and turns of chats


def test_prompts_have_the_tools_and_results_of_earlier_calls():
    history = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call00001", "type": "function", "function": {"name": "lookup", "arguments": '{"value": "word"}'}}
        ]},
        {"role": "tool", "tool_call_id": "call00001", "content": [{"type": "text", "text": "42"}]},
    ]  # fmt: skip
    text = chat_prompt(chat(messages=history, tools=[LOOKUP]), byte_tokenizer(), {}).text
    assert "Looks a word up." in text
    assert '<tool_call>{"name": "lookup", "arguments": {"value": "word"}}</tool_call>' in text
    assert text.endswith("<tool_response>42</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert "Looks" not in chat_prompt(chat(tools=[LOOKUP], tool_choice="none"), byte_tokenizer(), {}).text


def test_a_required_call_is_begun_by_the_prompt():
    required = chat_prompt(chat(tools=[LOOKUP], tool_choice="required"), byte_tokenizer(), {})
    assert required.text.endswith('<|im_start|>assistant\n<tool_call>{"name": "')
    named = chat_prompt(chat(tools=[LOOKUP], tool_choice=NAMED), byte_tokenizer(THINKING), {"think": True})
    assert named.text.endswith('<|im_start|>assistant\n<tool_call>{"name": "lookup", "')
    reader = reader_of(byte_tokenizer(), tools=[LOOKUP], tool_choice=NAMED)
    turn = reader.read('arguments": {"value": "w"}}</tool_call>', "stop", [1])
    assert [(call.name, call.arguments) for call in turn.calls] == [("lookup", '{"value": "w"}')]
    assert (turn.content, turn.finish_reason) == ("", "tool_calls")


def test_a_last_message_can_be_continued():
    messages = [*USER, {"role": "assistant", "content": "It is "}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert chat_prompt(chat(**fields), byte_tokenizer(), {}).text.endswith("<|im_start|>assistant\nIt is")
    assert chat_prompt(chat(add_generation_prompt=False), byte_tokenizer(), {}).text.endswith("word?<|im_end|>\n")


def test_template_arguments_open_reasoning():
    tokenizer = byte_tokenizer(THINKING)
    reader = reader_of(tokenizer, chat_template_kwargs={"think": True})
    turn = reader.read("Hm.\n</think>\n\nYes.", "stop", [])
    assert (turn.reasoning, turn.content, turn.calls) == ("Hm.", "Yes.", ())
    assert reader_of(tokenizer).read("Yes.", "stop", []).content == "Yes."
    plain = reader_of(byte_tokenizer()).read("<think>Hm.</think> Yes. ", "stop", [])
    assert (plain.reasoning, plain.content) == ("", "<think>Hm.</think> Yes. ")  # the template knows no reasoning


@pytest.mark.parametrize(
    ("template", "fields", "message"),
    [
        (HERMES, {"chat_template_kwargs": {"thinking": True}}, "the chat template reads no 'thinking'"),
        (HERMES, {"reasoning_effort": "high"}, "the chat template reads no 'reasoning_effort'"),
        ("{{ messages[0].content }}", {"tools": [LOOKUP]}, "m has no tools: the chat template writes no tool calls"),
        (None, {}, "the model has no chat template"),
    ],
)
def test_chats_that_a_template_cannot_write_are_refused(template, fields, message):
    with pytest.raises(ApiError, match=message):
        prepare(Incoming(chat(**fields)), served(byte_tokenizer(template)), 8, 8)


def joined(pieces):
    return Turn(
        "".join(piece.content for piece in pieces),
        "".join(piece.reasoning for piece in pieces),
        tuple(call for piece in pieces for call in piece.calls),
        pieces[-1].finish_reason,
        pieces[-1].stop_string,
    )


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f"<think>\nHm <b>.\n</think>\n\nLook: {CALLS}\n{CALLS} and <tool"),
        ("hermes", 'Broken: <tool_call>{"name": "lookup", "arguments": {"value": }}</tool_call> more'),
        ("hermes", f"{CALLS}<tool_call>{{"),
        ("qwen_xml", "Fine.\n" + written("qwen_xml", [("lookup", {"value": "7"})])),
        ("mistral", "[THINK]Hm.[/THINK]Fine. " + written("mistral", [("lookup", {"value": "a"})])),
        ("llama", '{"name": "lookup", "parameters": {"value": "a"}}; {"name": "lookup", "parameters": {}}'),
        ("llama", '{"answer": 4}'),
        (
            "gpt_oss",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        ),
        ("gpt_oss", "<|channel|>analysis<|message|>H<|end|><|start|>assistant" + written("gpt_oss", [("lookup", {})])),
    ],
)  # fmt: skip
def test_turns_that_grow_are_the_whole_turn(name, text, size):
    reader, marks = FORMATS[name]
    turn_reader = TurnReader(TurnFormat(None, CallFormat(name, reader, (), ""), marks), [LOOKUP])
    whole = turn_reader.read(text, "stop", [1, 2])
    stream = TurnStream(turn_reader, [1, 2])
    pieces = [stream.add(text[start : start + size]) for start in range(0, len(text), size)]
    assert joined([*pieces, stream.end(text, "stop", None)]) == whole
    assert whole.content + whole.reasoning + "".join(call.arguments for call in whole.calls)
    assert len({call.id for call in whole.calls}) == len(whole.calls)
    if size == 1 and name != "llama":  # most of it comes early
        early = joined([*pieces, Turn()])
        assert (early.reasoning, len(early.calls)) == (whole.reasoning, len(whole.calls))


def test_arguments_without_types_get_those_of_the_schema():
    tool = {"type": "function", "function": {"name": "add", "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]
    }}}  # fmt: skip

    def arguments(**given):
        reader = TurnReader(TurnFormat(None, CallFormat("qwen_xml", FORMATS["qwen_xml"][0], (), "")), [tool])
        [call] = reader.read(written("qwen_xml", [("add", given)]), "stop", []).calls
        return json.loads(call.arguments)

    assert arguments(a=7, b="7") == {"a": 7, "b": "7"}
    assert arguments(a="x") == {"a": "x"}  # the client sees what the model wrote


def test_a_turn_has_one_call_if_more_are_not_wanted():
    reader = reader_of(byte_tokenizer(), tools=[LOOKUP], parallel_tool_calls=False)
    assert len(reader.read(CALLS + CALLS, "stop", []).calls) == 1
    cut = reader_of(byte_tokenizer(), tools=[LOOKUP]).read(CALLS + "<tool_call>{", "length", [])
    assert (len(cut.calls), cut.content, cut.finish_reason) == (1, "<tool_call>{", "length")


def test_special_tokens_that_are_no_marks_are_left_out():
    tokenizer = byte_tokenizer()
    reader = reader_of(tokenizer, tools=[LOOKUP], stop=["b"])
    ids = tokenizer(CALLS + "<|im_end|>", add_special_tokens=False)["input_ids"]
    assert reader.text([], ids) == (CALLS.partition("b")[0], "b")
    assert reader_of(tokenizer, tools=[LOOKUP]).text([], ids) == (CALLS, None)


def test_ids_of_calls_depend_on_prompt_and_seed():
    tokenizer = byte_tokenizer()
    ids = tokenizer(CALLS, add_special_tokens=False)["input_ids"]

    def call_id(seed, index):
        given = Incoming(chat(tools=[LOOKUP], seed=seed, n=2))
        exchange = prepare(given, served(tokenizer), 8, 8).exchange
        return exchange.reader.read(exchange.reader.text([], ids)[0], "stop", exchange.seed(index)).calls[0].id

    assert call_id(3, 0) == call_id(3, 0)
    assert len({call_id(3, 0), call_id(3, 1), call_id(4, 0)}) == 3


# -- texts that grow


@pytest.mark.parametrize("size", [1, 2, 3, 7, 40])
@pytest.mark.parametrize(
    ("text", "stop", "min_tokens"),
    [
        *(("héllo wörld — ✓ hello world", stop, 0) for stop in ((), ("lo w",), ("xyz", "rld!", "world?"))),
        *(("hello, hello — hello world", ("hello",), min_tokens) for min_tokens in (0, 5, 7, 8, 26, 40)),
    ],
)
def test_streamed_texts_are_never_taken_back(text, stop, min_tokens, size):
    data = text.encode()
    stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"), stop, min_tokens=min_tokens)
    whole = text_before_stop(text, stop, len(data[:min_tokens].decode(errors="ignore")))
    told = ""
    for start in range(0, len(data), size):
        told += stream.add(list(data[start : start + size]))
        assert whole.startswith(told)
    assert told + stream.end(whole) == whole


def a_tokenizer_of_words():
    """One that decodes as SentencePiece does, without the space before the first word."""
    vocab = {"<unk>": 0, "<eos>": 1, "\u2581a": 2, "\u2581b": 3, "c": 4, "\u2581": 5, "\u2581\u2581": 6}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", left=1, right=0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>")


@pytest.mark.parametrize(
    ("prompt", "tokens", "text"),
    [
        ([2, 4], [3, 4, 2], " bc a"),
        ([2, 4], [4, 3], "c b"),
        ([2] * 20, [6, 4], "  c"),
        ([1], [3, 4, 2], "bc a"),
        ([1, 5], [3], " b"),
        ([], [3, 1, 2], "b a"),
    ],
)
def test_completions_keep_the_space_before_their_first_word(prompt, tokens, text):
    tokenizer = a_tokenizer_of_words()
    context = context_tokens(tokenizer, prompt)
    assert decode_after(tokenizer, context, tokens) == text
    stream = TextStream(lambda ids: decode(tokenizer, [ids])[0], (), context)
    assert "".join([stream.add([token]) for token in tokens]) + stream.end(text) == text
    vocabulary = TokenTexts(tokenizer)
    if len(prompt) > 1 and 1 not in prompt:
        assert "".join(vocabulary.text(token) for token in tokens) == text


def test_a_prompt_that_ends_within_a_character_is_no_context():
    class Bytes:
        def batch_decode(self, rows, **_):
            return [bytes(row).decode(errors="replace") for row in rows]

    whole, cut = "né".encode(), "né".encode()[:-1]
    assert context_tokens(Bytes(), whole) == list(whole)
    assert context_tokens(Bytes(), cut) == []
    assert decode_after(Bytes(), context_tokens(Bytes(), cut), whole[-1:] + b"x") == "\ufffdx"


@pytest.mark.heavy
def test_texts_and_stops_of_a_session_stand_behind_the_prompt(tiny_model):
    engine = engine_for(tiny_model, 1)
    engine.tokenizer = a_tokenizer_of_words()
    params = SamplingParams(max_tokens=4, temperature=0.0, logit_bias={3: 100.0})
    [[behind], [first]] = engine.generate([[2, 4], [1]], params)
    assert (behind.tokens, behind.text, first.text) == ([3] * 4, " b b b b", "b b b b")
    [[behind], [first]] = engine.generate([[2, 4], [1]], replace(params, stop=" b"))
    assert (behind.tokens, behind.text, first.tokens, first.text) == ([3], "", [3, 3], "b")


# -- responses, metrics, engines


def test_answers_in_pieces_are_the_whole_one():
    tokenizer = a_tokenizer(eos_token="<eos>")
    request = parsed(logprobs=1, n=1, return_token_ids=True, stream_options={"include_usage": True})
    answers = ResponseBuilder(Exchange(request, {}, "m", [[1, 2]], [], TokenTexts(tokenizer)))
    parts = [
        Delta(0, 0, [3, 4], [-0.5, -1.0], [-0.4, -0.9], [[(3, -0.5)], [(5, -0.2)]], [1, 1], None, ""),
        Delta(0, 2, [5], [-0.1], [-0.1], [[(5, -0.1)]], [2], "stop", "abc"),
    ]
    pieces, streamed, completion = [], Completion(), Completion()
    for part in parts:
        pieces += answers.events(part, Turn(), streamed)[0]["choices"]
        streamed.add(part)
        completion.add(part)
    [whole] = answers.full([completion])["choices"]
    assert (whole["text"], whole["finish_reason"], whole["weight_versions"]) == ("abc", "stop", [[1, 2], [2, 1]])
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert pieces[0]["logprobs"][name] + pieces[1]["logprobs"][name] == whole["logprobs"][name]
    assert pieces[0]["token_ids"] + pieces[1]["token_ids"] == whole["token_ids"] == [3, 4, 5]
    assert "prompt_token_ids" not in pieces[1]
    assert answers.last_events([completion])[0]["usage"] == answers.usage([completion])
    completion.add(Delta(0, 0, [6], [-1.0], [-1.0], [[(6, -1.0)]], [3], "length", "d"))  # had to begin again
    assert (completion.tokens, completion.versions) == ([6], [3])


def test_alternatives_include_the_token_itself():
    texts = TokenTexts(a_tokenizer(eos_token="<eos>"))
    answers = ResponseBuilder(Exchange(parsed(logprobs=1), {}, "m", [[1, 2]], [], texts))
    completion = Completion()
    completion.add(Delta(0, 0, [3, 4], [-0.5, -2.0], [0.0, 0.0], [[(3, -0.5)], [(5, -0.2)]], [1, 1], "stop", "ab"))
    [choice] = answers.full([completion])["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"a": -0.5}, {"c": -0.2, "b": -2.0}]


@pytest.mark.parametrize("model", [[], None, 3])
def test_an_upload_for_no_model_is_refused(model):
    with pytest.raises(ApiError, match="model must be a valid string") as caught:
        Weights(EngineLoop({}), {}).begin({"model": model})
    assert caught.value.status == 400


def test_metrics_have_the_names_that_dashboards_use():
    metrics = Metrics(EngineLoop({}))
    metrics.requests.labels("/v1/models", 200).inc()
    for seconds in (0.01, 0.02, 1000.0):
        metrics.seconds.observe(seconds)
    lines = dict(line.rsplit(" ", 1) for line in metrics.text().decode().splitlines())
    assert lines['groupax_requests_total{path="/v1/models",status="200"}'] == "1.0"
    assert lines['groupax_request_seconds_bucket{le="0.03"}'] == "2.0"
    assert lines['groupax_request_seconds_bucket{le="+Inf"}'] == lines["groupax_request_seconds_count"] == "3.0"
    record = RequestRecord(metrics, time.monotonic(), "m")

    async def deltas():
        for start, tokens in ((0, [3]), (1, [4] * 4)):
            yield Delta(0, start, tokens, [], [], [], [], None, "")

    async def watch():
        return [delta async for delta in record.watch(deltas())]

    assert len(asyncio.run(watch())) == 2
    lines = dict(line.rsplit(" ", 1) for line in metrics.text().decode().splitlines())
    assert lines['vllm:time_to_first_token_seconds_count{model_name="m"}'] == "1.0"
    assert lines['vllm:inter_token_latency_seconds_count{model_name="m"}'] == "4.0"


def test_memory_is_measured_when_the_weights_to_decode_with_are_there(tiny_model, tmp_path, monkeypatch):
    folder = save_model(tiny_model, tmp_path, a_tokenizer())
    measure, seen = peak.free_memory_bytes, []

    def num_copied():
        return sum(array.dtype == jnp.bfloat16 for array in jax.live_arrays())

    def measured(mesh):
        seen.append(num_copied())
        return measure(mesh)

    monkeypatch.setattr(peak, "free_memory_bytes", measured)
    command = Serve(model=str(folder), name="tiny", weights="bfloat16")
    gc.collect()
    before = num_copied()
    [engine] = engines_of(command, models_of(command)).values()
    assert seen == [before + len(jax.tree.leaves(engine.params))]
    assert engine.kv_bytes > 0
    [engine] = engines_of(replace(command, kv_cache_gb=0.5), models_of(command)).values()
    assert engine.kv_bytes == 5e8


def test_an_error_inside_a_stream_is_told_and_counted(caplog):
    sent, ended = [], []

    async def events():
        yield {"a": 1}
        raise KeyError("b")

    async def send(message):
        sent.append(message)

    async def stream():
        answer = EventStream(events(), PROTOCOLS["/v1/completions"], lambda: None, deadline_s=time.monotonic() + 60)
        answer.on_end = lambda: ended.append(answer.status_code)
        await answer({"method": "POST", "path": "/v1/completions"}, asyncio.Event().wait, send)

    asyncio.run(stream())
    assert ended == [500]
    told = [json.loads(message["body"].removeprefix(b"data: ")) for message in sent[1:]]
    assert (told[0], told[1]["error"]["message"][:26]) == ({"a": 1}, "an error inside the server")
    assert "POST /v1/completions failed" in caplog.text


def test_training_imports_no_server_and_its_rollout_clients_no_package_of_servers():
    code = (
        "import sys, groupax.trainer; assert not any(name.startswith('groupax.serve') for name in sys.modules); "
        "import groupax.serve.client; "
        "assert not {'pydantic', 'starlette', 'uvicorn', 'prometheus_client'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
