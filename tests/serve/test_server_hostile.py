"""What strangers cannot do to a server: be another site's page, hold it, or get anything but a clear error."""

import asyncio
import copy
import json
import math
import random
import socket
from contextlib import closing, suppress

import httpx
import openai
import pytest

from groupax.serve.app import Limits, create_app
from groupax.serve.prompts import prepare
from groupax.serve.protocols import PROTOCOLS
from groupax.serve.web import ApiError, CallerCheck
from tests.data.test_bridge import LOOKUP, byte_tokenizer
from tests.data.test_config_and_data import a_tokenizer
from tests.engine.test_engine import engine_for

from .test_serve import served
from .test_server import listening, running

JSON = {"content-type": "application/json"}
USER = [{"role": "user", "content": "a"}]
DEEP = json.loads('{"a":' * 200 + "1" + "}" * 200)
HOSTILE = [
    ("/v1/chat/completions", {"messages": USER, "response_format": {"type": "\x1b[31m"}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": DEEP}]}),
    ("/v1/completions", {"prompt": "a", "regex": "(" * 1000}),
    ("/v1/responses", {"input": "a", "metadata": {"\udc00": ["\ud800"]}}),
    ("/v1/responses", {"input": "a", "instructions": "b", "user": [math.inf]}),
    ("/v1/responses", {"input": "a", "include": ["file_search\x1b[31m"]}),
    ("/v1/messages", {"messages": [{"role": "root", "content": "a"}], "max_tokens": 4}),
    ("/v1/messages/count_tokens", {}),
    ("/%1b%5b31m?" + "x" * 5000, {}),
]
RAW = [
    *(b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"\x00", b"[" * 100_000, b"{'a': 1}"),
    ('{"a":' * 100_000 + "1" + "}" * 100_000).encode(),
    *(b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b'{"\\ud800": 1}'),
    *(b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", b'{"prompt": "a"} {}', b'{"prompt": "a", "n": 1e999}'),
]
NAMED = [  # with the field that the error has to name
    *(({name: value}, name) for name in ("n", "max_tokens", "top_k") for value in (True, 2**63, 0.5, "x")),
    *(({name: value}, name) for name in ("temperature", "top_p", "min_p") for value in (True, 1e308, -1, "NaN", [1])),
    *(({name: value}, name) for name in ("stream", "echo", "ignore_eos") for value in (1, "x", [])),
    *(({name: value}, name) for name in ("stop", "stop_token_ids", "row_keys") for value in (-1, [[]], {"a": 1})),
    ({"stop_token_ids": [96]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(90)) * 3}, "stop_token_ids"),
    *(({"logit_bias": {key: 1}}, "logit_bias") for key in ("\u0663", "07", "96")),
    ({"logit_bias": {str(i): 1 for i in range(600)}}, "logit_bias"),
    ({"prompt": [96]}, "prompt"),
    ({"prompt": "a" * 100_000}, "prompt"),
    ({"max_tokens": 10_000}, "prompt"),
    ({"n": 5000}, "n"),
    ({"prompt": ["a"] * 300}, "n"),
    ({"top_q": 1}, "top_q"),
    ({"model": "gpt"}, "model"),
    ({"messages": []}, "messages"),
    ({"weights_state": "x"}, "weights_state"),
    ({"row_keys": [[1, 2]] * 7}, "row_keys"),
]
PATHS = [
    ("GET", "/v1/completions"), ("PUT", "/v1/completions"), ("DELETE", "/v1/models"), ("POST", "/health"), ("GET", "/"),
    ("GET", "/v1/models/none"), ("GET", "/v1/../etc/passwd"), ("POST", "/v1/embeddings"), ("GET", "/%00"),
    ("TRACE", "/v1/models"), ("POST", "/groupax/v1/weights"), ("PUT", "/groupax/v1/weights"),
]  # fmt: skip


@pytest.fixture(scope="module")
def loop(tiny_model):
    engine = engine_for(tiny_model, 1, kv_bytes=1 << 26)
    engine.tokenizer = a_tokenizer(eos_token="<eos>")
    engine.tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}{% endfor %}"
    with running(engine, "tiny", max_sequences=64) as loop:
        yield loop


def test_bad_requests_get_clear_errors(loop, caplog):
    lines = []
    body = {"prompt": "ab", "max_tokens": 4}
    asked = [("POST", path, json.dumps(body), None) for path, body in HOSTILE]
    asked += [("POST", "/v1/completions", each, None) for each in RAW]
    asked += [("POST", "/v1/completions", json.dumps({**body, **each}), name) for each, name in NAMED]
    asked += [(method, path, "{}", None) for method, path in PATHS]

    async def answers():
        app = httpx.ASGITransport(
            create_app(loop, Limits(api_keys=("k",), max_body_bytes=1 << 21), write_line=lines.append)
        )
        headers = {**JSON, "authorization": "Bearer k"}
        async with httpx.AsyncClient(transport=app, base_url="http://localhost", headers=headers) as client:
            return [await client.request(method, path, content=content) for method, path, content, _ in asked]

    for (_, path, content, name), answer in zip(asked, asyncio.run(answers()), strict=True):
        told = (path[:40], content[:120], answer.status_code, answer.text[:200])
        assert 400 <= answer.status_code < 500, told
        error = answer.json()["error"]
        assert error["message"], told
        if path.startswith("/v1/c") and path != "/v1/count_tokens":
            assert set(error) == {"message", "type", "param", "code"}
        assert name is None or error["param"] == name or name in error["message"], told
    assert "Traceback" not in caplog.text
    assert len(lines) >= 60
    assert all(line.isprintable() and len(line) < 300 for line in lines)


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
    "/v1/completions": {"prompt": ["a", [1, 2]], "echo": False, "logprobs": 2, "max_tokens": 5},
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


@pytest.mark.heavy
@pytest.mark.parametrize("num_requests", [300, pytest.param(1500, marks=pytest.mark.long)])
def test_requests_with_faults_are_answered_or_refused(num_requests):
    rng, model = random.Random(0), served(byte_tokenizer())
    statuses = []
    for number in range(num_requests):
        path = [*BODIES][number % len(BODIES)]
        body = with_a_fault(BODIES[path], rng)
        try:
            prepare(PROTOCOLS[path].parse(json.dumps(body).encode()), model, 8, 8)
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
        ("/v1/responses", {"input": []}, "input must be a text or a list of at least one item"),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, r"input\.0 must be a message"),
        ("/v1/responses", {"tools": [{"type": "web_search"}]}, r"tools\.0 must be a function of yours"),
        ("/v1/responses", {"background": True}, "background=True is not supported"),
        ("/v1/responses", {"n": 2}, "unknown field 'n'"),
        ("/v1/messages", {"tool_choice": {"type": {}}}, "tool_choice must have the type auto, any, tool or none"),
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


# -- connections


def asked(address, data):
    """All that comes until the server closes the connection."""
    host, port = address.removeprefix("http://").split(":")
    parts = []
    with closing(socket.create_connection((host, int(port)), 20)) as connection, suppress(ConnectionError):
        connection.sendall(data)
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def test_a_body_must_arrive_in_time(loop):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with listening(create_app(loop, Limits(receive_timeout_s=0.5))) as address:
        for body in (b"Content-Length: 50\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n50\r\n{"):
            answer = asked(address, head + body)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"the body did not arrive within 0.5 s" in answer
        assert httpx.get(f"{address}/v1/models").status_code == 200


@pytest.mark.heavy
def test_a_server_without_keys_answers_no_other_sites(loop):
    with listening(create_app(loop, Limits(allowed_hosts=("models.lan",)))) as address:
        url, body = f"{address}/v1/completions", json.dumps({"prompt": "ab", "max_tokens": 2}).encode()
        port = address.rpartition(":")[2]
        for name in ("127.0.0.1", "localhost"):
            with openai.OpenAI(base_url=f"http://{name}:{port}/v1", api_key="none", max_retries=0) as client:
                assert client.completions.create(model="tiny", prompt="ab", max_tokens=2).choices
        for headers, status, told in [
            ({"host": "evil.example"}, 403, "not a name of this server"),
            ({"host": ""}, 403, "not a name of this server"),
            ({"origin": "http://evil.example"}, 403, "another origin"),
            ({"sec-fetch-site": "cross-site"}, 403, "other sites"),
            ({"content-type": "text/plain"}, 415, "application/json"),
            ({"content-type": ""}, 415, "with curl"),
            ({"origin": f"http://127.0.0.1:{port}"}, 200, ""),
            ({"host": "[::1]:80"}, 200, ""),
            ({"host": "models.lan"}, 200, ""),
        ]:
            answer = httpx.post(url, content=body, headers={**JSON, **headers})
            assert answer.status_code == status, headers
            assert told in (answer.json()["error"]["message"] if told else "")
    with listening(create_app(loop, Limits(api_keys=("k",)))) as address:
        headers = {"host": "evil.example", "origin": "http://evil.example", "authorization": "Bearer k"}
        assert httpx.get(f"{address}/v1/models", headers=headers).status_code == 200


def test_names_of_a_server_that_others_reach():
    open_to_all = CallerCheck("0.0.0.0", ("models.lan",))
    for host in ("192.0.2.7:8000", "[2001:db8::1]:8000", "models.lan", "MODELS.lan:80", socket.gethostname()):
        assert open_to_all.refusal({"host": host}) == ""
    for host in ("evil.example", "192.0.2.7.evil.example", ""):
        assert "not a name of this server" in open_to_all.refusal({"host": host})
    assert "not a name of this server" in CallerCheck("127.0.0.1").refusal({"host": "192.0.2.7:8000"})
