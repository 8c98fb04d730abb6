"""What strangers cannot do to a server: hold it, be another site's page, or get anything but a clear error."""

import asyncio
import json
import queue
import random
import socket
import threading
from contextlib import closing, contextmanager, suppress

import httpx
import jax
import numpy as np
import openai
import pytest
import uvicorn

from groupax import SamplingParams
from groupax.serve.app import Limits, create_app
from groupax.serve.loop import EngineLoop
from groupax.serve.web import CallerCheck

from .test_config_and_data import a_tokenizer
from .test_engine import engine_for

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def engines():
    from groupax import init_model

    from .conftest import TINY

    engine = engine_for(init_model(TINY, seed=0), 1, kv_bytes=1 << 26)
    engine.tokenizer = a_tokenizer(eos_token="<eos>")
    engine.tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}{% endfor %}"
    return {"tiny": engine}


@pytest.fixture(scope="module")
def loop(engines):
    loop = EngineLoop(engines, max_sequences=64).start()
    yield loop
    loop.close()


@contextmanager
def listening(app):
    """The port of a server."""
    config = uvicorn.Config(app, ws="none", log_level="error", lifespan="off")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = server.force_exit = True
            thread.join()


def received(connection, timeout_s=20):
    """All that comes until the server closes the connection."""
    connection.settimeout(timeout_s)
    parts = []
    with suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def asked(port, data):
    with closing(socket.create_connection(("127.0.0.1", port))) as connection:
        with suppress(ConnectionError):
            connection.sendall(data)
        return received(connection)


def test_a_body_must_arrive_in_time(loop):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with listening(create_app(loop, Limits(receive_timeout_s=0.5))) as port:
        for body in (b"Content-Length: 50\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n50\r\n{"):
            answer = asked(port, head + body)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"the body did not arrive within 0.5 s" in answer
        assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 200


def test_heads_of_strangers(loop):
    with listening(create_app(loop)) as port:
        for head, status in (
            (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: b\r\nConnection: close\r\n\r\n", b"400"),
            (b"GET /v1/models HTTP/1.1\r\nHost: evil\xe9\r\nConnection: close\r\n\r\n", b"403"),
            (b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 19 + b"GET /health HTTP/1.0\r\n\r\n", b"200"),
            (b"nonsense\r\n\r\n", b"400"),
        ):
            assert asked(port, head).split(b" ")[1] == status
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200


@pytest.mark.heavy
def test_a_server_without_keys_answers_no_other_sites(loop):
    with listening(create_app(loop)) as port:
        url, body = f"http://127.0.0.1:{port}/v1/completions", json.dumps({"prompt": "ab", "max_tokens": 2}).encode()
        for name in ("127.0.0.1", "localhost"):
            with openai.OpenAI(base_url=f"http://{name}:{port}/v1", api_key="none", max_retries=0) as client:
                assert client.completions.create(model="tiny", prompt="ab", max_tokens=2).choices
        for headers, status, told in [
            ({"host": "evil.example"}, 403, "not a name of this server"),
            ({"host": "127.0.0.1.evil.example"}, 403, "not a name of this server"),
            ({"host": ""}, 403, "not a name of this server"),
            ({"origin": "http://evil.example"}, 403, "another origin"),
            ({"origin": "null"}, 403, "another origin"),
            ({"sec-fetch-site": "cross-site"}, 403, "other sites"),
            ({"content-type": "text/plain"}, 415, "application/json"),
            ({"content-type": "application/x-www-form-urlencoded"}, 415, "with curl"),
            ({"content-type": ""}, 415, "application/json"),
            ({"origin": f"http://127.0.0.1:{port}"}, 200, ""),
            ({"host": "[::1]:80"}, 200, ""),
        ]:
            answer = httpx.post(url, content=body, headers={**JSON, **headers})
            assert answer.status_code == status, headers
            assert told in (answer.json()["error"]["message"] if told else "")
    with listening(create_app(loop, Limits(api_keys=("k",)))) as port:
        headers = {"host": "evil.example", "origin": "http://evil.example", "authorization": "Bearer k"}
        assert httpx.get(f"http://127.0.0.1:{port}/v1/models", headers=headers).status_code == 200


def test_names_of_a_server_that_others_reach():
    open_to_all = CallerCheck("0.0.0.0", ("models.lan",))
    for host in ("192.0.2.7:8000", "[2001:db8::1]:8000", "models.lan", "MODELS.lan:80", socket.gethostname()):
        assert open_to_all.refusal({"host": host}) == ""
    for host in ("evil.example", "192.0.2.7.evil.example", ""):
        assert "not a name of this server" in open_to_all.refusal({"host": host})
    assert "not a name of this server" in CallerCheck("127.0.0.1").refusal({"host": "192.0.2.7:8000"})


# -- requests that make no sense


def bad_bodies():
    """Bodies that must be refused, each with the field that the error has to name; None for any."""
    rng = random.Random(0)
    deep = '{"a":' * 100_000 + "1" + "}" * 100_000
    raw = [b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"\x00", b"[" * 100_000, deep.encode(), b"{'a': 1}"]
    raw += [b'{"prompt": NaN}', b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "\\ud800"}', b'{"\\ud800": 1}']
    raw += [b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", b'{"prompt": "a"} {}', b'{"prompt": "a", "n": 1e999}']
    yield from ((each, None) for each in raw)
    wrong = [
        None,
        True,
        "x",
        [],
        {},
        [1],
        -1,
        0,
        2**31,
        2**63,
        10**30,
        1e308,
        -1e308,
        0.5,
        "NaN",
        [[]],
        {"a": 1},
        "\x00",
    ]
    right = {
        "n": [None, *range(1, 4)],
        "max_tokens": [None, *range(1, 20)],
        "min_tokens": [None, 0],
        "temperature": [None, 0, 0.5],
        "top_p": [None, 0.5],
        "top_k": [None, -1, 0, 2**31 - 1],
        "min_p": [None, 0, 0.5],
        "repetition_penalty": [None, 0.5, 2**31],
        "logit_bias": [None, {}],
        "seed": [None, True, *range(-1, 2), 2**31],
        "stop": [None, "x", "NaN", [], "\x00"],
        "stop_token_ids": [None, [], [1]],
        "logprobs": [None, 0],
        "stream": [None, True],
        "echo": [None, True],
        "model": [None],
        "ignore_eos": [None, True],
        "best_of": [None, 1],
        "tools": [None, []],
        "row_keys": [None],
        "stream_options": [None, {}],
        "return_token_ids": [None, True],
        "suffix": [None, ""],
    }
    cases = [(name, value) for name, fine in right.items() for value in wrong if not is_in(value, fine)]
    rng.shuffle(cases)
    for name, value in cases:
        if name == "seed" and isinstance(value, int) and abs(value) < 2**63:
            continue
        if name in ("temperature", "repetition_penalty") and value in (-1, 2**31, 2**63) and value > 0:
            continue
        yield json.dumps({"prompt": "ab", "max_tokens": 4, name: value}).encode(), name
    for extra, name in [
        ({"stop_token_ids": [96]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(90)) * 3}, "stop_token_ids"),
        ({"logit_bias": {"\u0663": 1}}, "logit_bias"),
        ({"logit_bias": {"07": 1}}, "logit_bias"),
        ({"logit_bias": {"96": 1}}, "logit_bias"),
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
    ]:
        yield json.dumps({"prompt": "ab", "max_tokens": 4, **extra}).encode(), name


def is_in(value, fine):
    return any(type(value) is type(each) and value == each for each in fine)


CHATS = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{}]}, "messages"),
    ({"messages": ["x"]}, "messages"),
    ({"messages": [{"role": 1, "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a" * 100_000}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools"),
    ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3}, "top_logprobs"),
]
PATHS = [
    ("GET", "/v1/completions"), ("PUT", "/v1/completions"), ("DELETE", "/v1/models"), ("POST", "/health"), ("GET", "/"),
    ("GET", "/v1/models/none"), ("GET", "/v1/../etc/passwd"), ("POST", "/v1/embeddings"), ("GET", "/%00"),
    ("TRACE", "/v1/models"), ("POST", "/groupax/v1/weights"), ("PUT", "/groupax/v1/weights/x/1"),
]  # fmt: skip


def test_bad_requests_get_clear_errors(loop, caplog):
    bodies = list(bad_bodies())

    async def ask_all():
        app = httpx.ASGITransport(create_app(loop, Limits(max_body_bytes=1 << 21)))
        async with httpx.AsyncClient(transport=app, base_url="http://localhost") as client:
            answers = []
            for body, name in bodies:
                answer = await client.post("/v1/completions", content=body, headers=JSON)
                answers.append((body[:80], name, answer))
            for given, name in CHATS:
                answers.append((given, name, await client.post("/v1/chat/completions", json=given)))
            for method, path in PATHS:
                answers.append((path, None, await client.request(method, path, headers=JSON)))
            return answers

    answers = asyncio.run(ask_all())
    assert len(answers) >= 150
    for asked_for, name, answer in answers:
        assert 400 <= answer.status_code < 500, (asked_for, name, answer.status_code, answer.text[:200])
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        if name is not None:
            assert error["param"] == name or name in error["message"], (asked_for, name, error)
    assert "Traceback" not in caplog.text


# -- compiling beside decoding


@pytest.fixture
def compiled():
    """Pairs of a thread's name and the seconds that it compiled for."""
    compiled = []

    def listen(event, seconds, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append((threading.current_thread().name, seconds))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield compiled
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.heavy
def test_others_go_on_while_programs_are_compiled_for_one(loop, compiled):
    def ask(num_tokens, n=1, prompt=(5, 6, 7)):
        told, done = [], threading.Event()

        def tell(growth):
            told.append(growth.finish_reason)
            if len([each for each in told if each]) == n:
                done.set()

        params = SamplingParams(n=n, max_tokens=num_tokens, ignore_eos=True)
        loop.submit("tiny", [np.array(prompt, np.int32)], params, tell)
        return told, done

    def finished(request):
        assert request[1].wait(120)
        return request[0].count("length")

    assert finished(ask(4)) == 1
    compiled.clear()
    other = ask(40, n=8, prompt=[5] * 140)  # more rows, and a longer prompt
    num_meanwhile = 0
    while not other[1].is_set():
        num_meanwhile += finished(ask(4))
    assert num_meanwhile >= 1
    assert finished(other) == 8
    by_engine = [seconds for name, seconds in compiled if name == "engine"]
    assert sum(by_engine) < 0.5 * sum(seconds for _, seconds in compiled), compiled


@pytest.mark.heavy
def test_a_server_is_ready_when_it_is_warm(engines, compiled):
    loop = EngineLoop(engines)
    loop.is_ready = False

    async def status(path):
        app = httpx.ASGITransport(create_app(loop))
        async with httpx.AsyncClient(transport=app, base_url="http://localhost") as client:
            answer = await client.get(path)
            return answer.status_code, answer.json()["status"]

    assert asyncio.run(status("/ready")) == (503, "the engine has stopped")
    loop.start()
    try:
        assert asyncio.run(status("/health")) == (200, "ok")
        assert asyncio.run(status("/ready")) == (503, "compiling")
        assert loop.warm_up([1, 2], 16) > 0
        assert loop.warm_up([1, 2], 16) == 0
        loop.is_ready = True
        assert asyncio.run(status("/ready")) == (200, "ready")
        compiled.clear()
        told = queue.Queue()
        for prompt in ([5, 6], [7] * 16):
            loop.submit("tiny", [np.array(prompt, np.int32)], SamplingParams(max_tokens=16), told.put)
        num_left = 2
        while num_left:
            num_left -= told.get(timeout=60).finish_reason is not None
        assert compiled == []
        loop.programs["tiny"].close()  # three completions never get four slots, and share two
        loop.submit("tiny", [np.array([5, 6], np.int32)], SamplingParams(n=3, max_tokens=16), told.put)
        num_left = 3
        while num_left:
            num_left -= told.get(timeout=60).finish_reason is not None
    finally:
        loop.close()


@pytest.mark.heavy
def test_a_completion_starts_before_all_is_compiled_that_it_may_need(compiled):
    from groupax import init_model

    from .conftest import TINY

    model = init_model({**TINY, "max_position_embeddings": 1024}, seed=0)
    loop = EngineLoop({"tiny": engine_for(model, 1)}).start()
    try:
        loop.warm_up([1], 16)
        num_before, told, num_at_first = loop.programs["tiny"].num_compiled, queue.Queue(), []
        params = SamplingParams(max_tokens=400, seed=3, ignore_eos=True)

        def tell(growth):
            num_at_first.append(loop.programs["tiny"].num_compiled)
            told.put(growth)

        compiled.clear()
        loop.submit("tiny", [np.array([5, 6], np.int32)], params, tell)
        growths = [told.get(timeout=60)]
        while growths[-1].finish_reason is None:
            growths.append(told.get(timeout=60))
        assert num_at_first[0] < loop.programs["tiny"].num_compiled
        assert num_at_first[-1] > num_before
        assert not [seconds for name, seconds in compiled if name == "engine"]
        [[expected]] = engine_for(model, 1).generate([np.array([5, 6])], params)
        assert [token for growth in growths for token in growth.tokens] == expected.tokens
    finally:
        loop.close()


@pytest.mark.heavy
@pytest.mark.parametrize("numbers", [[2], [1, 2], [6], [1, 1, 1]])
def test_requests_run_in_the_slots_that_are_compiled(tiny_model, numbers):
    loop = EngineLoop({"tiny": engine_for(tiny_model, 1)}).start()
    try:
        loop.warm_up([1, 4], 16)
        loop.programs["tiny"].close()
        told, num_left, prompt = queue.Queue(), sum(numbers), np.array([5, 6], np.int32)
        for number in numbers:
            loop.submit("tiny", [prompt], SamplingParams(n=number, max_tokens=16, ignore_eos=True), told.put)
        while num_left:
            num_left -= told.get(timeout=60).finish_reason is not None
    finally:
        loop.close()
