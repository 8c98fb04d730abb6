"""Chats with tools and reasoning, without an engine: requests, prompts, turns in full and as they grow."""

import json
import time

import numpy as np
import pytest

from groupax.constraints import ConstraintCompiler
from groupax.serve.chat_prompt import chat_prompt
from groupax.serve.errors import ApiError
from groupax.serve.exchange import TokenTexts
from groupax.serve.prepare import ServedModel, encoded_chat, prepare
from groupax.serve.protocols.incoming import Incoming
from groupax.serve.requests import ChatRequest, parse
from groupax.serve.turn_format import TurnFormats
from groupax.serve.turns import Turn, TurnReader, TurnStream

from .test_bridge import HERMES, LOOKUP, byte_tokenizer
from .test_tool_formats import written

THINKING = HERMES.replace("{{ m.content }}", "{% if m.x %}</think>{% endif %}{{ m.content }}").replace(
    "assistant\n{% endif %}", "assistant\n{% if think %}<think>\n{% endif %}{% endif %}"
)
USER = [{"role": "user", "content": "What is a word?"}]
NAMED = {"type": "function", "function": {"name": "lookup"}}
CALLS = '<tool_call>{"name": "lookup", "arguments": {"value": "a<b"}}</tool_call>'


def chat(**fields):
    request = parse(json.dumps({"messages": USER, **fields}).encode(), True)
    assert isinstance(request, ChatRequest)
    return request


def incoming(**fields):
    return Incoming(chat(**fields))


def served(tokenizer):
    return ServedModel(
        "m",
        tokenizer,
        TurnFormats(tokenizer),
        TokenTexts(tokenizer),
        ConstraintCompiler(tokenizer, 300, (1,)),
        300,
        4096,
    )


def reader_of(tokenizer, **fields):
    return encoded_chat(chat(**fields), served(tokenizer), {})[2]


def joined(pieces):
    return Turn(
        "".join(piece.content for piece in pieces),
        "".join(piece.reasoning for piece in pieces),
        tuple(call for piece in pieces for call in piece.calls),
        pieces[-1].finish_reason,
        pieces[-1].stop_string,
    )


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
    from groupax.serve.turn_format import TurnFormat
    from groupax.tools.formats import FORMATS, CallFormat

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
    from groupax.serve.turn_format import TurnFormat
    from groupax.tools.formats import FORMATS, CallFormat

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


CALLED = {"role": "assistant", "tool_calls": [{"id": "b", "function": {"name": "lookup", "arguments": "{}"}}]}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "3"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": 3}, "tools must be a list of at most 256 functions, got 3"),
        ({"tools": [LOOKUP] * 257}, "tools must be a list of at most 256"),
        ({"tools": [LOOKUP, LOOKUP]}, "two tools have the name 'lookup'"),
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
        ({"messages": [*USER, RESULT]}, "1, a tool's, is the result of the call 'a'; there is no call"),
        ({"messages": [*USER, CALLED, RESULT]}, r"the calls before it have the ids 'b'"),
        ({"messages": [*USER, CALLED, {"role": "tool", "content": "3"}]}, "messages.2, a tool's, has no tool_call_id"),
        ({"messages": [RESULT, {**CALLED, "tool_calls": [{**CALLED["tool_calls"][0], "id": "a"}]}]}, "no call before"),
    ],
)  # fmt: skip
def test_chats_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(ApiError, match=message) as caught:
        chat(**fields)
    assert caught.value.status == 400


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
        prepare(incoming(**fields), served(byte_tokenizer(template)), 8, 8)


def test_ids_of_calls_depend_on_prompt_and_seed():
    tokenizer = byte_tokenizer()
    exchange = prepare(incoming(tools=[LOOKUP], seed=3, n=2), served(tokenizer), 8, 8).exchange
    same = prepare(incoming(tools=[LOOKUP], seed=3, n=2), served(tokenizer), 8, 8).exchange
    other = prepare(incoming(tools=[LOOKUP], seed=4, n=2), served(tokenizer), 8, 8).exchange
    ids = tokenizer(CALLS, add_special_tokens=False)["input_ids"]
    assert exchange.reader is not None

    def call_id(of, index):
        assert of.reader is not None
        return of.reader.read(of.reader.text([], ids)[0], "stop", of.seed(index)).calls[0].id

    assert call_id(exchange, 0) == call_id(same, 0)
    assert len({call_id(exchange, 0), call_id(exchange, 1), call_id(other, 0)}) == 3
    assert np.array_equal(exchange.prompts[0], same.prompts[0])


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
