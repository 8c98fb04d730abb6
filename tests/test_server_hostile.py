"""Hostile requests to every endpoint get errors of their protocols, and the server serves on."""

import asyncio
import json
import math

import httpx
import pytest

from groupax.serve.app import Limits, create_app
from groupax.serve.loop import EngineLoop

from .test_config_and_data import a_tokenizer
from .test_engine import engine_for

KEY = {"authorization": "Bearer k", "content-type": "application/json"}
USER = [{"role": "user", "content": "a"}]
DEEP = json.loads('{"a":' * 200 + "1" + "}" * 200)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


RESULT = {"type": "tool_result", "tool_use_id": "x", "content": "1"}


def tool(**fields):
    return {**TOOL, "function": {**TOOL["function"], **fields}}


HOSTILE = {
    "/v1/chat/completions": [
        {"messages": USER, "tools": [1]},
        {"messages": USER, "tools": {}},
        {"messages": USER, "tools": [{"type": "function"}]},
        {"messages": USER, "tools": [tool(name="")]},
        {"messages": USER, "tools": [tool(name=["f"])]},
        {"messages": USER, "tools": [tool(parameters=[])]},
        {"messages": USER, "tools": [TOOL], "tool_choice": "sometimes"},
        {"messages": USER, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        {"messages": USER, "tool_choice": "required"},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]},
        {"messages": [{"role": "assistant", "tool_calls": "x"}]},
        {"messages": USER, "chat_template_kwargs": []},
        {"messages": USER, "chat_template_kwargs": {"messages": [], "tokenize": 1}},
        {"messages": USER, "response_format": {"type": "json_schema"}},
        {"messages": USER, "response_format": {"type": "\x1b[31m"}},
        {"messages": USER, "response_format": []},
        {"messages": USER, "logprobs": "yes"},
        {"messages": USER, "stream": "true"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": {"a": 1}}]}]},
        {"messages": [{"role": "user", "content": DEEP}]},
    ],
    "/v1/completions": [
        {"prompt": "a", "prompt_logprobs": -2},
        {"prompt": "a", "prompt_logprobs": 10**9},
        {"prompt": "a", "max_tokens": 0, "n": -1},
        {"prompt": "a", "guided_regex": "(" * 1000},
        {"prompt": "a", "guided_json": "{"},
        {"prompt": "a", "structured_outputs": {"regex": "a", "json": {}}},
        {"prompt": "a", "echo": "x"},
    ],
    "/v1/responses": [
        {},
        {"input": 1},
        {"input": [{"type": "message"}]},
        {"input": "a", "metadata": "\ud800"},
        {"input": "a", "metadata": {"\udc00": [1]}},
        {"input": "a", "instructions": "b", "user": [math.inf]},
        {"input": "a", "tools": [{"type": "computer"}]},
        {"input": "a", "max_output_tokens": -1},
        {"input": "a", "previous_response_id": "../../etc/passwd"},
        {"input": "a", "text": {"format": {"type": "json_schema", "schema": 3}}},
        {"input": "a", "include": "message.output_text.logprobs"},
        {"input": "a", "include": [{}]},
        {"input": "a", "include": ["file_search\x1b[31m"]},
        {"input": "a", "top_logprobs": True},
        {"input": "a", "top_logprobs": 21},
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "1"}]},
    ],
    "/v1/messages": [
        {},
        {"messages": USER},
        {"messages": USER, "max_tokens": "x"},
        {"messages": USER, "max_tokens": 4, "system": 3},
        {"messages": USER, "max_tokens": 4, "tools": [{"name": 1}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}], "max_tokens": 4},
        {"messages": [{"role": "root", "content": "a"}], "max_tokens": 4},
        {"messages": [{"role": "user", "content": [RESULT]}], "max_tokens": 4},
    ],
    "/v1/messages/count_tokens": [{}, {"messages": 1}],
    "/tokenize": [{}, {"prompt": 1}, {"messages": {}}, []],
    "/detokenize": [{}, {"tokens": "x"}, {"tokens": [-1]}, {"tokens": [10**9]}, {"tokens": [1.5]}],
    "/pause?mode=" + "x" * 5000: [{}],
    "/pause?mode=keep&clear=1": [{}],
    "/pause?mode=%1b%5b31m": [{}],
    "/pause": [{"mode": "keep"}, {}],
    "/pause?mode=keep&clear_cache=false": [{}],
}


@pytest.fixture(scope="module")
def loop(tiny_model):
    engine = engine_for(tiny_model, 1, kv_bytes=1 << 26)
    engine.tokenizer = a_tokenizer(eos_token="<eos>")
    engine.tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}{% endfor %}"
    loop = EngineLoop({"tiny": engine}).start()
    yield loop
    loop.close()


@pytest.mark.heavy
def test_hostile_requests_get_errors(loop, caplog):
    lines = []

    async def send():
        app = httpx.ASGITransport(create_app(loop, Limits(api_keys=("k",)), write_line=lines.append))
        async with httpx.AsyncClient(transport=app, base_url="http://localhost", headers=KEY) as client:
            return [
                (path[:40], body, await client.post(path, content=json.dumps(body)))
                for path, bodies in HOSTILE.items()
                for body in bodies
            ]

    answers = asyncio.run(send())
    assert len(answers) >= 50
    wrong = [
        f"{path} {json.dumps(body)[:120]}: {answer.status_code} {answer.text[:200]}"
        for path, body, answer in answers
        if not (400 <= answer.status_code < 500 and answer.json()["error"]["message"])
    ]
    assert not wrong, "\n".join(wrong)
    assert "Traceback" not in caplog.text
    assert len(lines) == len(answers)
    assert all(line.isprintable() and len(line) < 300 for line in lines)
    assert not loop.is_paused
