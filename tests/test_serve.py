"""The server's parts by themselves: requests, texts that grow, answers, counts."""

import asyncio
import gc
import json
import queue
import subprocess
import sys
import threading
import time
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from groupax import SamplingParams, save_model
from groupax.cli.serve import Serve, engines_of, models_of
from groupax.data.tokenizer import context_tokens, decode, decode_after
from groupax.engine.sequence import text_before_stop
from groupax.parallel import memory as peak
from groupax.serve.app import EventStream, Limits, Server
from groupax.serve.errors import ApiError
from groupax.serve.exchange import Completion, Exchange, TokenTexts
from groupax.serve.loop import Delta, EngineLoop
from groupax.serve.metrics import Metrics
from groupax.serve.prepare import encoded, prepare
from groupax.serve.protocols.incoming import Incoming
from groupax.serve.protocols.table import PROTOCOLS
from groupax.serve.requests import SETTINGS, parse, parse_json
from groupax.serve.responses import ResponseBuilder
from groupax.serve.text import TextStream
from groupax.serve.turns import Turn
from groupax.serve.weights import Weights

from .test_config_and_data import a_tokenizer
from .test_engine import engine_for


def parsed(is_chat=False, **fields):
    return parse(json.dumps({"prompt": "x", **fields} if not is_chat else fields).encode(), is_chat)


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
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
    ],
)
def test_requests_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(ApiError, match=message) as caught:
        parsed(**fields).sampling_params(16)
    assert caught.value.status == 400
    assert set(caught.value.body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "messages is missing"),
        ({"messages": [{"role": "user"}]}, "messages.0.content is missing"),
        ({"messages": [{"content": "x"}]}, "messages.0.role is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "a part of a message must be {'type': 'image_url'",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 1}, "top_logprobs needs logprobs=true"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools.0.function must have a name"),
        ({"messages": [{"role": "user", "content": "x"}], "prompt": "x"}, "unknown field 'prompt'"),
    ],
)
def test_chats_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(ApiError, match=message):
        parsed(True, **fields)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"a": NaN}', b"\xff", b"[" * 100_000, b"1"])
def test_bodies_that_are_no_objects_are_refused(body):
    with pytest.raises(ApiError, match="the body"):
        parse_json(body)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b'"\\ud800"', "half of a surrogate pair"),
        (b'[{"a": ["\\udc00x"]}]', "half of a surrogate pair"),
        (b'{"\\ud83d": 1}', "half of a surrogate pair"),
        (b'"\xed\xa0\x80"', "not UTF-8"),
        (b'"\xe9"', "not UTF-8"),
        (b"1e999", "not JSON"),
        (b'{"a": [-1e400]}', "not JSON"),
        (b"Infinity", "not JSON"),
    ],
)
@pytest.mark.parametrize("path", [*PROTOCOLS])
def test_values_that_a_response_could_not_repeat_are_refused(path, value, message):
    for name in (b"metadata", b"user", b"prompt", b"instructions", b"messages", b"input", b"unknown"):
        with pytest.raises(ApiError, match=f"the body (is|has) {message}") as caught:
            PROTOCOLS[path].parse(b'{"%s": %s}' % (name, value))
        assert caught.value.status == 400
    PROTOCOLS["/v1/responses"].parse(b'{"input": "x", "metadata": "\\ud83d\\ude00"}')
    body = ApiError(400, "demo has no tensors \ud800, é").body
    assert json.loads(json.dumps(body, ensure_ascii=False).encode())["error"]["message"].endswith(r" \ud800, é")


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("stop", [(), ("lo w",), ("xyz", "rld!", "world?")])
def test_streamed_texts_are_never_taken_back(size, stop):
    text = "héllo wörld — ✓ hello world"
    data = text.encode()
    stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"), stop)
    whole = text[: min([text.find(each) for each in stop if each in text], default=None)]
    told = ""
    for start in range(0, len(data), size):
        told += stream.add(list(data[start : start + size]))
        assert whole.startswith(told)
    assert told + stream.end(whole) == whole


@pytest.mark.parametrize("size", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("min_tokens", [0, 5, 7, 8, 26, 40])
def test_streamed_texts_are_cut_only_behind_min_tokens(size, min_tokens):
    text, stop = "hello, hello — hello world", "hello"
    data = text.encode()
    stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"), (stop,), min_tokens=min_tokens)
    exempt = len(data[:min_tokens].decode(errors="ignore"))
    whole = text_before_stop(text, (stop,), exempt)
    assert whole == {0: "", 5: "hello, ", 7: "hello, ", 8: "hello, ", 26: text, 40: text}.get(min_tokens)
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


@pytest.mark.parametrize("dtype", ["int8", "auto"])
def test_a_dtype_that_weights_cannot_have_is_refused_at_once(dtype, capsys):
    with pytest.raises(SystemExit):
        tyro.cli(Serve, args=["--model", "x", "--dtype", dtype])
    assert "bfloat16" in capsys.readouterr().err


def test_metrics_have_the_names_that_dashboards_use():
    metrics = Metrics(EngineLoop({}))
    metrics.requests.labels("/v1/models", 200).inc()
    for seconds in (0.01, 0.02, 1000.0):
        metrics.seconds.observe(seconds)
    lines = dict(line.rsplit(" ", 1) for line in metrics.text().decode().splitlines())
    assert lines['groupax_requests_total{path="/v1/models",status="200"}'] == "1.0"
    assert lines['groupax_request_seconds_bucket{le="0.03"}'] == "2.0"
    assert lines['groupax_request_seconds_bucket{le="+Inf"}'] == lines["groupax_request_seconds_count"] == "3.0"
    metrics.first_token_s.labels("m").observe(0.05)
    metrics.add_tokens("m", 4, 0.2)
    lines = dict(line.rsplit(" ", 1) for line in metrics.text().decode().splitlines())
    assert lines['vllm:time_to_first_token_seconds_sum{model_name="m"}'] == "0.05"
    assert lines['vllm:inter_token_latency_seconds_count{model_name="m"}'] == "4.0"


def test_settings_default_to_those_of_the_engine():
    own = parsed(seed=0).sampling_params(16)
    assert own == SamplingParams(max_tokens=16)
    assert {*SETTINGS, "max_tokens", "logprobs", "grammar"} == {each.name for each in fields(SamplingParams)}


# -- the loop


PROMPT = np.array([5, 6, 7], np.int32)


@pytest.fixture
def loop(tiny_model):
    loop = EngineLoop({"tiny": engine_for(tiny_model, 1, kv_bytes=1 << 26)})
    yield loop
    loop.close()


def test_what_is_told_has_been_counted(loop):
    told = queue.Queue()
    params = SamplingParams(n=2, max_tokens=12, ignore_eos=True)

    def ask():
        loop.submit("tiny", [PROMPT], params, lambda growth: told.put((growth, loop.counts)))

    ask()
    loop.start()
    growths = [told.get()]
    while not (growths[-1][0].finish_reason and growths[-1][0].index):
        growths.append(told.get())
    assert [counts.num_tokens for _, counts in growths] == [2 * (each.start + len(each.tokens)) for each, _ in growths]
    assert [counts.num_chunks for _, counts in growths] == [1 + index // 2 for index in range(len(growths))]
    assert [growth.finish_reason for growth, _ in growths][-2:] == ["length", "length"]
    last = growths[-1][1]
    assert (last.num_running, last.num_waiting, last.num_finished, last.num_prompt_tokens) == (0, 0, 2, 3)

    def broken():
        loop.engines["tiny"].params = {}

    loop.between_chunks(broken).result()
    ask()
    assert [told.get()[0].finish_reason for _ in range(2)] == ["abort"] * 2
    assert (loop.counts.num_chunks, loop.counts.num_finished) == (last.num_chunks, 2)


def test_what_was_cancelled_before_it_began_is_not_run(loop):
    run = []
    given_up = loop.between_chunks(lambda: run.append("given up"))
    assert given_up.cancel()
    done = loop.between_chunks(lambda: run.append("done"))
    loop.start()
    done.result()
    assert run == ["done"]
    assert loop.is_alive


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("dies", [False, True])
def test_what_still_waits_at_the_end_hears_of_it(loop, dies):
    begun, may_end, told = threading.Event(), threading.Event(), queue.Queue()

    def last():
        begun.set()
        may_end.wait()
        if dies:
            raise SystemExit

    loop.start()
    loop.between_chunks(last)
    begun.wait()
    loop.submit("tiny", [PROMPT], SamplingParams(n=2, max_tokens=12), told.put)
    waiting = loop.between_chunks(lambda: "done")
    if not dies:
        closing = threading.Thread(target=loop.close)
        closing.start()
        while not loop._closed:
            pass
    may_end.set()
    assert [told.get().finish_reason for _ in range(2)] == ["abort"] * 2
    assert waiting.result() == "done"
    loop.close()
    assert (loop._num_sequences, loop.is_alive) == (0, False)


# -- the server


def test_prompts_are_counted_before_they_are_encoded(loop):
    loop.engines["tiny"].tokenizer = tokenizer = a_tokenizer()
    server = Server(loop, Limits(max_completions=4), Weights(loop, {}))
    mixed = parsed(prompt=["ab", [3, 4], "c", [5]])
    assert [ids.tolist() for ids in encoded(mixed, tokenizer, 256)] == [
        tokenizer("ab")["input_ids"], [3, 4], tokenizer("c")["input_ids"], [5],
    ]  # fmt: skip
    model = replace(server.models["tiny"], tokenizer=None)  # with which nothing can be encoded
    for request in (parsed(prompt=["a"] * 5), parsed(prompt=["a", "b"], n=3), parsed(prompt=["a"] * 5, n=-1)):
        with pytest.raises(ApiError, match="a request may have 4 completions"):
            prepare(Incoming(request), model, server.limits.max_completions, 1024)


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
        "import groupax.serve.client, groupax.serve.broadcast_sampler; "
        "assert not {'pydantic', 'starlette', 'uvicorn', 'httptools', 'prometheus_client'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
