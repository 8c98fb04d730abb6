"""Requests in all protocols with random faults get an error with status 400 or an answer, never another exception."""

import copy
import json
import random

import pytest

from groupax.serve.prompts import detokenize, prepare, tokenize
from groupax.serve.protocols import PROTOCOLS
from groupax.serve.requests import parse_json
from groupax.serve.web import ApiError

from .test_bridge import LOOKUP, byte_tokenizer
from .test_serve_chats import served

pytestmark = pytest.mark.heavy

SCHEMA = LOOKUP["function"]["parameters"]
CALL = {"id": "a", "type": "function", "function": {"name": "lookup", "arguments": '{"value": "x"}'}}
CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "42"},
]
INPUT = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "reasoning", "id": "x", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]},
    {"type": "function_call", "call_id": "a", "name": "lookup", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "42"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
]
MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "h", "signature": ""},
        {"type": "text", "text": "x"},
        {"type": "tool_use", "id": "a", "name": "lookup", "input": {"value": "x"}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "42"}]}
    ]},
]  # fmt: skip
BODIES = {
    "/v1/completions": {"prompt": ["a", [1, 2]], "echo": True, "logprobs": 2, "max_tokens": 0, "prompt_logprobs": 2},
    "/v1/chat/completions": {
        "messages": CHAT, "tools": [LOOKUP], "tool_choice": {"type": "function", "function": {"name": "lookup"}},
        "max_tokens": 5, "stop": ["a"], "response_format": {"type": "text"},
        "chat_template_kwargs": {}, "parallel_tool_calls": True, "n": 1,
        "logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}, "reasoning_effort": None,
    },
    "/v1/responses": {
        "input": INPUT, "instructions": "s", "max_output_tokens": 5, "include": [], "top_logprobs": 0,
        "tools": [{"type": "function", "name": "lookup", "parameters": SCHEMA}], "truncation": "disabled",
        "tool_choice": {"type": "function", "name": "lookup"}, "reasoning": {"effort": None},
        "text": {"format": {"type": "text"}},
    },
    "/v1/messages": {
        "messages": MESSAGES, "max_tokens": 5, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"],
        "tools": [{"name": "lookup", "description": "d", "input_schema": SCHEMA}], "thinking": {"type": "enabled"},
        "tool_choice": {"type": "tool", "name": "lookup", "disable_parallel_tool_use": True},
        "output_config": {"effort": "high"},
    },
    "/tokenize": {"messages": CHAT, "tools": [LOOKUP], "return_token_strs": True, "model": "m"},
    "/detokenize": {"tokens": [1, 2]},
}  # fmt: skip
VALUES = [
    *(None, True, False, 0, -1, 1.5, 1e300, 2**70, "", "a", "\ud800", "\0", "<|im_end|>", "required", "x" * 5000),
    *([], [[]], [None], [1], ["a"], [{}], {}, {"a": 1}, {"type": "function"}, {"type": "text", "text": "\ud800"}),
    *({"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {"type": []}}}),
    *({"type": "tool_result"}, {"type": []}, {"role": {}}, {"role": "user"}, {"$ref": "#"}, [[[[[[]]]]]]),
]


def places(value, path=()):
    """The paths of all values inside of a value."""
    if path:
        yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def with_a_fault(body, rng):
    body = copy.deepcopy(body)
    for _ in range(rng.choice([1, 1, 2])):
        paths = [*places(body)]
        if paths:
            *outer, last = rng.choice(paths)
            inside = body
            for key in outer:
                inside = inside[key]
            if rng.random() < 0.2:
                del inside[last]
            else:
                inside[last] = copy.deepcopy(rng.choice(VALUES))
    return body


@pytest.mark.parametrize("num_requests", [300, pytest.param(1500, marks=pytest.mark.long)])
def test_requests_with_faults_are_answered_or_refused(num_requests):
    rng, model = random.Random(0), served(byte_tokenizer())
    statuses = []
    for number in range(num_requests):
        path = [*BODIES][number % len(BODIES)]
        body = with_a_fault(BODIES[path], rng)
        try:
            if path in PROTOCOLS:
                prepare(PROTOCOLS[path].parse(json.dumps(body).encode()), model, 8, 8)
            else:
                given = {
                    name: value for name, value in parse_json(json.dumps(body).encode()).items() if value is not None
                }
                (tokenize if path == "/tokenize" else detokenize)(given, model)
            statuses.append(200)
        except ApiError as error:
            statuses.append(error.status)
            for each in PROTOCOLS.values():
                json.dumps([each.error_body(error), each.error_event(error)], ensure_ascii=False).encode()
    assert set(statuses) == {200, 400}
    assert num_requests / 15 < statuses.count(200) < num_requests * 2 / 3


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ("/v1/responses", {"include": 3}, "include must be a list, got 3"),
        ("/v1/responses", {"include": ["message.output_text"]}, "include has an unknown value"),
        ("/v1/responses", {"input": []}, "input must be a text or a list of at least one item"),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, r"input\.0 must be a message"),
        ("/v1/responses", {"tools": [{"type": "web_search"}]}, r"tools\.0 must be a function of yours"),
        ("/v1/responses", {"background": True}, "background=True is not supported"),
        ("/v1/responses", {"n": 2}, "unknown field 'n'"),
        ("/v1/messages", {"tool_choice": {"type": {}}}, "tool_choice must have the type auto, any, tool or none"),
        ("/v1/messages", {"max_tokens": None}, "max_tokens is missing"),
        ("/v1/messages", {"messages": [{"role": "system", "content": "x"}]}, r"messages\.0\.role must be user or"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "must have a source with type base64",
        ),
        ("/v1/messages", {"thinking": {"type": "x"}}, "thinking must have the type"),
        ("/v1/messages", {"output_config": {"format": {"type": "x"}}}, "output_config.format must have the type"),
    ],
)
def test_faults_have_messages(path, change, message):
    with pytest.raises(ApiError, match=message):
        PROTOCOLS[path].parse(json.dumps({**BODIES[path], **change}).encode())
