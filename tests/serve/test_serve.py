"""The server's parts by themselves: requests, prompts of chats, turns and texts that grow, responses, metrics."""

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import fields, replace

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from groupax import SamplingParams
from groupax.data.tokenizer import context_tokens, decode, decode_after
from groupax.engine.constraints import ConstraintCompiler
from groupax.engine.sequence import text_before_stop
from groupax.serve.exchange import TextStream, TokenTexts
from groupax.serve.prompts import ServedModel, chat_prompt, encoded_chat, prepare
from groupax.serve.protocols import PROTOCOLS, EventStream
from groupax.serve.requests import SETTINGS, ChatRequest, Incoming, parse
from groupax.serve.turns import Turn, TurnFormat, TurnFormats, TurnReader, TurnStream
from groupax.serve.web import ApiError
from groupax.tools.formats import FORMATS, CallFormat
from tests.data.test_bridge import HERMES, LOOKUP, byte_tokenizer
from tests.engine.test_engine import engine_for
from tests.episodes.test_tool_formats import written

THINKING = HERMES.replace("{{ m.content }}", "{% if m.x %}</think>{% endif %}{{ m.content }}").replace(
    "assistant\n{% endif %}", "assistant\n{% if think %}<think>\n{% endif %}{% endif %}"
)
USER = [{"role": "user", "content": "What is a word?"}]
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


def test_settings_default_to_those_of_the_engine():
    own = parsed(seed=0).sampling_params(16)
    assert own == SamplingParams(max_tokens=16)
    assert {*SETTINGS, "max_tokens", "logprobs", "grammar"} == {each.name for each in fields(SamplingParams)}


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"response_format": FORMAT}, ("json_schema", json.dumps(SCHEMA))),
        ({"response_format": {"type": "text"}, "regex": "a+"}, ("regex", "a+")),
        ({"json_schema": json.dumps(SCHEMA)}, ("json_schema", json.dumps(SCHEMA))),
        ({"response_format": None}, None),
    ],
)
def test_constraints_of_requests(fields, constraint):
    assert parsed(**fields).sampling_params(16).constraint == constraint


FAULTS = [
    ({"prompt": []}, "prompt must be"),
    ({"temperature": "hot"}, "temperature must be a valid number"),
    ({"temperature": 1e-36}, "temperature must be 0 or between 1e-06 and 1000, got 1e-36"),
    ({"stop": ["a"] * 17}, "stop must have at most 16 items, not 17"),
    ({"logit_bias": {"a": 1}}, "logit_bias must have token ids as its keys"),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ({"echo": True}, "echo=True is not supported"),
    ({"max_token": 3}, "unknown field 'max_token'; did you mean max_tokens"),
    ({"response_format": {"type": "xml"}}, "response_format must have the type text, json_object or json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "an object with a schema"),
    ({"regex": "a", "response_format": FORMAT}, "regex and json_schema are two constraints"),
    ({"json_schema": "{}", "response_format": FORMAT}, "response_format and json_schema are two constraints"),
]
CHAT_FAULTS = [
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part of a message must be {'type'"),
    ({"top_logprobs": 1}, "top_logprobs needs logprobs=true"),
    ({"tools": [LOOKUP, LOOKUP]}, "tools must have different names, got 'lookup'"),
    ({"tools": [{"type": "web_search"}]}, "tools.0 must be .* got {'type': 'web_search'}"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 3}}]}, "must be a JSON schema, got 3"),
    ({"tools": [LOOKUP], "tool_choice": "any"}, "tool_choice must be one of none, auto, required"),
    ({"continue_final_message": True}, "needs add_generation_prompt=false"),
    ({"continue_final_message": True, "add_generation_prompt": False}, "needs a last message with a text of the"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]}, "JSON"),
]


@pytest.mark.parametrize(
    ("is_chat", "fields", "message"), [(False, *each) for each in FAULTS] + [(True, *each) for each in CHAT_FAULTS]
)
def test_requests_that_make_no_sense_are_refused(is_chat, fields, message):
    with pytest.raises(ApiError, match=message) as caught:
        (chat if is_chat else parsed)(**fields).sampling_params(16)
    assert caught.value.status == 400
    assert set(caught.value.body["error"]) == {"message", "type", "param", "code"}


def test_many_results_of_tools_are_checked_in_linear_time():
    calls = [
        {"id": str(number), "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for number in range(20_000)
    ]
    messages = [*USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    messages += [{"role": "tool", "content": "", "tool_call_id": "19999"}] * 20_000
    begun_s = time.process_time()
    parse(json.dumps({"messages": messages}).encode(), True)
    assert time.process_time() - begun_s < 6  # of a slow core; 30 with a search for each


# -- prompts and turns of chats


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
        (HERMES, {"tools": [LOOKUP], "response_format": FORMAT}, "by tools or by a format, not by both"),
        (THINKING, {"chat_template_kwargs": {"think": True}, "response_format": FORMAT}, "template opens reasoning"),
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


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f"<think>\nHm <b>.\n</think>\n\nLook: {CALLS}\n{CALLS} and <tool"),
        ("hermes", 'Broken: <tool_call>{"name": "lookup", "arguments": {"value": }}</tool_call> more'),
        ("hermes", f"{CALLS}<tool_call>{{"),
        ("qwen_xml", "Fine.\n" + written("qwen_xml", [("lookup", {"value": "7"})])),
        ("mistral", "[THINK]Hm.[/THINK]Fine. " + written("mistral", [("lookup", {"value": "a"})])),
        ("llama", '{"name": "lookup", "parameters": {"value": "a"}}; {"name": "lookup", "parameters": {}}'),
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
    [([2, 4], [3, 4, 2], " bc a"), ([2] * 20, [6, 4], "  c"), ([1], [3, 4, 2], "bc a"), ([1, 5], [3], " b")],
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
    code = """import sys, groupax.trainer
assert not any(name.startswith('groupax.serve') for name in sys.modules)
import groupax.serve.client
assert not {'pydantic', 'starlette', 'uvicorn', 'prometheus_client'} & set(sys.modules)"""
    subprocess.run([sys.executable, "-c", code], check=True)
