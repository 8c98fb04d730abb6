"""The server, asked by OpenAI's own client and by clients that misbehave: answers are the engine's."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from urllib.parse import urlsplit

import jax
import numpy as np
import openai
import pytest
import uvicorn
from jax.sharding import Mesh

from groupax import Engine, SamplingParams, load_model
from groupax.data.tokenizer import load_tokenizer
from groupax.models.lora import LoRAConfig
from groupax.models.weights.checkpoint import add_adapter
from groupax.parallel.mesh import AXES
from groupax.recipes import load_recipe
from groupax.serve.app import Limits, create_app
from groupax.serve.loop import EngineLoop

pytestmark = pytest.mark.heavy

KEY = "a key"
LONG = {"max_tokens": 450, "extra_body": {"ignore_eos": True}}


def demo_model():
    """The demo's model on one device, and its tokenizer."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape((1,) * len(AXES)), AXES)
    model = load_model(load_recipe("arithmetic").model, mesh=mesh)
    return model, load_tokenizer(model.source, "plain")


def demo_engine():
    """The demo's model and an adapter of it that changes something."""
    model, tokenizer = demo_model()
    adapted = add_adapter(model, LoRAConfig(r=4, target_modules=["q_proj"]), seed=1)
    assert adapted.adapter is not None
    for layer in adapted.adapter.trained["layers"]:
        layer["q"] = replace(layer["q"], b=layer["q"].b + 0.3)
    return Engine.of(model, tokenizer, {"adapted": adapted}, chunk_steps=16, kv_bytes=1 << 28)


@contextmanager
def listening(app, port=0):
    """The address of a server with the application."""
    listener = socket.create_server(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(app, http="h11", log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()
        listener.close()


@contextmanager
def running(engine, name, **options):
    """A loop with this engine, that decodes."""
    loop = EngineLoop(engine, name, **options).start()
    try:
        yield loop
    finally:
        loop.close()


@contextmanager
def serving_engine(model, tokenizer, name):
    """The address of a server with one model, and a client of OpenAI."""
    engine = Engine.of(model, tokenizer, chunk_steps=8, kv_bytes=1 << 26)
    with (
        running(engine, name) as loop,
        listening(create_app(loop, Limits(api_keys=(KEY,)))) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client,
    ):
        yield address, client


@pytest.fixture(scope="module")
def loop():
    with running(demo_engine(), "demo", max_sequences=64) as loop:
        yield loop


@pytest.fixture(scope="module")
def address(loop):
    limits = Limits(api_keys=("another", KEY), max_completions=48, max_body_bytes=1 << 20)
    with listening(create_app(loop, limits)) as address:
        yield address


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def engine(loop):
    """The one behind the server, which must have nothing else to do."""
    wait_until(lambda: is_idle(loop))
    return loop.engine


def is_idle(loop):
    return loop.counts.num_running == loop.counts.num_waiting == loop._num_sequences == 0


def wait_until(holds, seconds=60):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "did not come to hold"
        time.sleep(0.01)


def flat(groups):
    return [sequence for group in groups for sequence in group]


@pytest.mark.optimized
def test_completions_are_the_engines(client, engine):
    prompts = ["8*(2+5)-17=", "1+2=", "99-3*7="]
    answer = client.completions.create(
        model="demo", prompt=prompts, n=3, seed=5, temperature=0.9, max_tokens=40, logprobs=2, stop=["</think>", "zz"],
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    params = SamplingParams(n=3, seed=5, temperature=0.9, max_tokens=40, logprobs=2, stop=("</think>", "zz"))
    expected = flat(engine.generate(prompts, params))
    assert [choice.index for choice in answer.choices] == list(range(9))
    for choice, sequence in zip(answer.choices, expected, strict=True):
        assert choice.text == sequence.text
        assert choice.finish_reason == sequence.finish_reason
        assert choice.logprobs.token_logprobs == pytest.approx(sequence.policy_logps, abs=1e-4)
        both = zip(sequence.tokens, sequence.policy_logps, sequence.alternatives, strict=True)
        for top, (token, own, pairs) in zip(choice.logprobs.top_logprobs, both, strict=True):
            with_itself = sorted({token: own, **dict(pairs)}.values())
            assert sorted(top.values()) == pytest.approx(with_itself, abs=1e-4)
        assert choice.token_ids == sequence.tokens
        assert choice.sampler_logps == pytest.approx(sequence.sampler_logps, abs=1e-4)
        assert choice.prompt_token_ids == sequence.prompt.tolist()
        assert choice.weight_versions == [[0, len(sequence.tokens)]]
    assert "stop" in {choice.finish_reason for choice in answer.choices}
    assert answer.usage.completion_tokens == sum(len(sequence.tokens) for sequence in expected)
    assert answer.usage.prompt_tokens == sum(len(engine.encode(prompt)[0]) for prompt in prompts)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 0.8, "presence_penalty": 0.7, "frequency_penalty": 0.4, "seed": 2**62},
        {"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.3, "min_tokens": 12},
        {"logit_bias": {"7": 5.0, "9": -100}, "stop_token_ids": [30], "ignore_eos": True},
        {"top_k": -1, "temperature": 0.0},
    ],
)
def test_all_settings_reach_the_engine(client, engine, settings):
    own = {"top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos"}
    ids = engine.encode("7*3-4=")[0]
    settings = {"seed": 3, **settings}
    answer = client.completions.create(
        model="demo", prompt=ids.tolist(), n=2, max_tokens=24,
        **{name: value for name, value in settings.items() if name not in own},
        extra_body={"return_token_ids": True, **{name: settings[name] for name in own & settings.keys()}},
    )  # fmt: skip
    biases = {int(token): bias for token, bias in settings.pop("logit_bias", {}).items()}
    stops = tuple(settings.pop("stop_token_ids", ()))
    settings["top_k"] = max(settings.get("top_k", 0), 0)
    params = SamplingParams(n=2, max_tokens=24, logit_bias=biases, stop_token_ids=stops, **settings)
    [expected] = engine.generate([ids], params)
    assert [choice.token_ids for choice in answer.choices] == [sequence.tokens for sequence in expected]


def test_a_stream_is_the_answer_in_pieces(client, engine):
    given = {"model": "demo", "prompt": ["8*(2+5)-17=", "4*4="], "n": 2, "seed": 11, "max_tokens": 60, "logprobs": 1}
    given |= {"stop": ["answer>3", "</th"], "extra_body": {"return_token_ids": True}}
    whole = client.completions.create(**given)
    *pieces, last = client.completions.create(**given, stream=True, stream_options={"include_usage": True})
    for index, choice in enumerate(whole.choices):
        own = [piece.choices[0] for piece in pieces if piece.choices[0].index == index]
        assert own
        assert "".join(each.text for each in own) == choice.text
        assert [token for each in own for token in each.token_ids] == choice.token_ids
        assert [x for each in own for x in each.logprobs.token_logprobs] == choice.logprobs.token_logprobs
        assert [each.finish_reason for each in own] == [None] * (len(own) - 1) + [choice.finish_reason]
    assert len(pieces) > len(whole.choices)
    assert last.choices == []
    assert last.usage == whole.usage


def test_chats_are_the_engines(client, engine):
    messages = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
    messages.append({"role": "user", "content": "3*3="})
    given = {"model": "demo", "messages": messages, "n": 2, "seed": 4, "max_completion_tokens": 30}
    given |= {"logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**given)
    [expected] = engine.generate([messages], SamplingParams(n=2, seed=4, max_tokens=30, logprobs=3))
    for choice, sequence in zip(whole.choices, expected, strict=True):
        assert choice.message.role == "assistant"
        assert choice.message.content == sequence.text
        logprobs = [entry.logprob for entry in choice.logprobs.content]
        assert logprobs == pytest.approx(sequence.policy_logps, abs=1e-4)
        assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [3] * len(sequence.tokens)
    contents = {0: "", 1: ""}
    for piece in client.chat.completions.create(**given, stream=True):
        contents[piece.choices[0].index] += piece.choices[0].delta.content
    assert list(contents.values()) == [choice.message.content for choice in whole.choices]
    messages[0] = {**messages[0], "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2="}]}
    again = client.chat.completions.create(**given)
    assert [choice.message.content for choice in again.choices] == list(contents.values())


def test_an_adapter_is_a_model_of_its_own(client, loop, engine):
    assert [model.id for model in client.models.list()] == ["demo", "adapted"]
    assert client.models.retrieve("adapted").max_model_len == 512
    texts = {}
    for name in loop.names:
        texts[name] = client.completions.create(model=name, prompt="8*(2+5)-17=", temperature=0, max_tokens=24)
        wait_until(lambda: is_idle(loop))
        params = SamplingParams(temperature=0.0, max_tokens=24)
        [[alone]] = engine.generate("8*(2+5)-17=", params, adapter=None if name == "demo" else name)
        assert texts[name].choices[0].text == alone.text
    assert texts["demo"].choices[0].text != texts["adapted"].choices[0].text


def test_many_clients_get_their_own_answers(address, engine):
    rng = np.random.default_rng(0)
    asked = [(f"{a}*({b}+{c})=", seed) for seed, (a, b, c) in enumerate(rng.integers(1, 99, (24, 3)).tolist())]
    params = [SamplingParams(n=1 + seed % 3, seed=seed, max_tokens=8 + 3 * seed) for _, seed in asked]
    expected = [engine.generate(prompt, each)[0] for (prompt, _), each in zip(asked, params, strict=True)]

    def ask(number):
        prompt, seed = asked[number]
        settings = {"n": params[number].n, "seed": seed, "max_tokens": params[number].max_tokens}
        with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
            if seed % 2:
                return [c.text for c in client.completions.create(model="demo", prompt=prompt, **settings).choices]
            texts = [""] * params[number].n
            for piece in client.completions.create(model="demo", prompt=prompt, **settings, stream=True):
                texts[piece.choices[0].index] += piece.choices[0].text
            return texts

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(len(asked))))
    assert answers == [[sequence.text for sequence in group] for group in expected]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_slots(client, loop, stream):
    wait_until(lambda: is_idle(loop))
    before = loop.counts.num_cancelled
    if stream:
        answer = client.completions.create(model="demo", prompt="1+1=", n=3, stream=True, **LONG)
        next(iter(answer))
        answer.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.1).completions.create(model="demo", prompt="1+1=", n=48, **LONG)
    wait_until(lambda: loop.counts.num_cancelled > before and is_idle(loop))


def test_mistakes_are_told_as_openai_tells_them(address, client):
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'; this server has demo") as caught:
        client.completions.create(model="gpt", prompt="1")
    assert caught.value.code == "model_not_found"
    for given, code in (({"max_tokens": 600}, "context_length_exceeded"), ({"prompt": "1+" * 100_000}, None)):
        with pytest.raises(openai.BadRequestError, match="exceeds the model's 512 positions") as caught:
            client.completions.create(**{"model": "demo", "prompt": "1", **given})
        assert code in (None, caught.value.code)
    with pytest.raises(openai.APIStatusError, match="the body has more than 1048576 bytes"):
        client.completions.create(model="demo", prompt="1+" * 5_000_000)
    with openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0) as stranger:
        for ask in (stranger.models.list, lambda: stranger.completions.create(model="demo", prompt="1")):
            with pytest.raises(openai.AuthenticationError, match="API key is missing or wrong"):
                ask()


def test_a_full_queue_says_so(client, loop):
    wait_until(lambda: is_idle(loop))
    with client.completions.create(model="demo", prompt="1+1=", n=40, stream=True, **LONG):
        with pytest.raises(openai.RateLimitError, match="64 completions wait or run") as caught:
            client.completions.create(model="demo", prompt="1+1=", n=40, max_tokens=8)
        assert caught.value.response.headers["retry-after"] == "1"
        assert client.completions.create(model="demo", prompt="1+1=", n=2, max_tokens=8).choices
    wait_until(lambda: is_idle(loop))


def test_a_request_that_takes_too_long_is_given_up(loop):
    wait_until(lambda: is_idle(loop))
    with (
        listening(create_app(loop, Limits(request_timeout_s=0.05))) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client,
    ):
        for stream in (False, True):
            with pytest.raises(openai.APIError, match="took longer than this server allows"):
                list(client.completions.create(model="demo", prompt="1+1=", n=48, stream=stream, **LONG) or ())
            wait_until(lambda: is_idle(loop))


def test_a_client_that_reads_nothing_holds_up_nobody(address, client, loop):
    body = json.dumps(
        {"prompt": "1+1=", "n": 48, "max_tokens": 450, "ignore_eos": True, "stream": True, "logprobs": 20}
    )
    fields = f"Host: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    fields += f"Content-Length: {len(body)}\r\n\r\n"
    host, port = address.removeprefix("http://").split(":")
    with closing(socket.socket()) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, int(port)))
        slow.sendall(f"POST /v1/completions HTTP/1.1\r\n{fields}{body}".encode())
        assert slow.recv(15) == b"HTTP/1.1 200 OK"
        assert client.completions.create(model="demo", prompt="1+1=", max_tokens=8).choices[0].finish_reason
    wait_until(lambda: is_idle(loop))
    assert client.completions.create(model="demo", prompt="1+1=", max_tokens=8).choices[0].finish_reason


def test_health_and_metrics(address, client):
    with urllib.request.urlopen(f"{address}/health") as response:
        assert json.loads(response.read()) == {"status": "ok"}
    client.completions.create(model="demo", prompt="1+1=", max_tokens=8)
    request = urllib.request.Request(f"{address}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request) as response:
        lines = response.read().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(values['groupax_requests_total{path="/v1/completions",status="200"}']) >= 1
    for name in ("generation_tokens_total", "prompt_tokens_total", "time_to_first_token_seconds_count"):
        assert float(values[f'vllm:{name}{{model_name="demo"}}']) >= 1, name
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f'vllm:{name}{{model_name="demo"}}' in values
    assert any(name.startswith("vllm:request_success_total{") for name in values)
    assert values['groupax_weights_version{model="demo"}'] == "0.0"
    assert not [name for name in values if 'status="500"' in name]


def test_the_command_serves_within_its_limits_and_drains():
    settings = ["--model", str(load_recipe("arithmetic").model), "--name", "demo", "--port", "0", "--chunk_steps", "8"]
    settings += ["--mesh", "-1", "1", "1", "1", "1", "--api_key", KEY, "--warmup", "1", "--warmup_tokens", "8"]
    settings += ["--chat_template", "plain", "--default_max_tokens", "3", "--max_queue", "6", "--max_body_mb", "0.001"]
    settings += ["--max_connections", "2", "--drain_s", "60", "--no_log_requests"]
    command = [sys.executable, "-m", "groupax", "serve", *settings]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = server.stdout.readline().split(" at ")[1].strip()
            assert re.match("ready: compiled .* for 1 simultaneous clients and 8 tokens in ", server.stdout.readline())
            host, port = urlsplit(address).hostname, urlsplit(address).port
            with openai.OpenAI(base_url=address, api_key=KEY, max_retries=0) as client:
                chat = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "1+1="}])
                assert chat.usage.completion_tokens <= 3
                for given, status in (({"prompt": "1+" * 600}, 413), ({"prompt": "1+1=", "n": 7}, 429)):
                    with pytest.raises(openai.APIStatusError) as refused:
                        client.completions.create(model="demo", max_tokens=2, **given)
                    assert refused.value.status_code == status
                with closing(socket.create_connection((host, port))), closing(socket.create_connection((host, port))):
                    until_s = time.monotonic() + 20  # connections are counted some time after they were accepted
                    with pytest.raises(openai.APIStatusError) as refused:  # noqa: PT012
                        while time.monotonic() < until_s:
                            client.models.list()
                    assert refused.value.status_code == 503
                pieces = client.completions.create(model="demo", prompt="1+1=", n=4, stream=True, **LONG)
                first = next(iter(pieces))
                server.send_signal(signal.SIGTERM)
                rest = list(pieces)
                assert len({c.index for p in [first, *rest] for c in p.choices if c.finish_reason == "length"}) == 4
            assert server.wait(60) == 0
            assert server.stdout.read() == "", "no line for each request"
        finally:
            with suppress(ProcessLookupError):
                server.kill()


def test_each_request_is_a_line_of_the_log(loop):
    lines = []
    with listening(create_app(loop, Limits(), write_line=lines.append)) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        client.completions.create(model="demo", prompt="secret 1+1=", max_tokens=2)
        list(client.completions.create(model="demo", prompt="secret", max_tokens=2, stream=True))
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="no\x1b[31m\nsuch", prompt="secret")
        client.models.list()
    assert [line.split()[:3] for line in lines] == [["POST", "/v1/completions", each] for each in ("200", "200", "404")]
    assert all("model=demo prompt_tokens=" in line and "completion_tokens=2 finish=" in line for line in lines[:2])
    assert "first_token_s=" in lines[1]
    assert "there is no model" in lines[2]
    assert not any("secret" in line or "\n" in line or "\x1b" in line for line in lines)
