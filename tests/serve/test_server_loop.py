"""The loop of the server: requests join, pause and end, and none waits long for another."""

import asyncio
import queue
import threading

import httpx
import jax
import numpy as np
import pytest

from groupax import SamplingParams, init_model
from groupax.engine import programs
from groupax.engine.plan import CacheShape
from groupax.serve import loop as loop_module
from groupax.serve.app import create_app
from groupax.serve.loop import EngineLoop
from tests.conftest import TINY
from tests.data.test_config_and_data import a_tokenizer
from tests.engine.test_engine import engine_for

from .test_server import running

PROMPT = np.array([5, 6, 7], np.int32)
LONG = SamplingParams(max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny_model):
    engine = engine_for(tiny_model, 1, kv_bytes=1 << 26)
    engine.tokenizer = a_tokenizer(eos_token="<eos>")
    return engine


@pytest.fixture
def loop(engine):
    loop = EngineLoop(engine, "tiny")
    yield loop
    loop.close()


def ask(loop, params=LONG, prompt=PROMPT):
    told = queue.Queue()
    loop.submit("tiny", [np.asarray(prompt, np.int32)], params, told.put)
    return told


def started(loop):
    """A request some of whose tokens have arrived, and the queue of the others."""
    told = ask(loop)
    return told, [told.get(timeout=60)]


def finished(told, number=1):
    """All deltas of a request when so many completions have ended."""
    deltas = []
    while sum(delta.finish_reason is not None for delta in deltas) < number:
        deltas.append(told.get(timeout=60))
    return deltas


def tokens_of(deltas, index=0):
    return [token for delta in deltas if delta.index == index for token in delta.tokens]


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


@pytest.mark.heavy
def test_wide_requests_join_in_parts_and_small_ones_pass_them(loop, engine, monkeypatch):
    monkeypatch.setattr(loop_module, "PART", 4)
    params = SamplingParams(n=30, max_tokens=24, seed=5, ignore_eos=True)
    [expected] = engine.generate([PROMPT], params)
    wide, num_running = queue.Queue(), []
    loop = EngineLoop(engine, "tiny").start()

    def tell(delta):
        wide.put(delta)
        num_running.append(loop.counts.num_running)

    loop.submit("tiny", [PROMPT], params, tell)
    deltas = finished(wide)
    assert finished(ask(loop, SamplingParams(max_tokens=2, ignore_eos=True)))[-1].finish_reason == "length"
    assert wide.qsize() < 29 * 24
    deltas += finished(wide, 29)
    assert [tokens_of(deltas, index) for index in range(30)] == [each.tokens for each in expected]
    assert num_running[0] <= 4
    assert loop.counts.num_waiting == 0
    job = loop.submit("tiny", [PROMPT], params, wide.put)
    loop.cancel(job)
    assert finished(ask(loop))[-1].finish_reason == "length"
    loop.close()


# -- compiling beside decoding


def test_waiting_for_programs_ends_when_the_server_is_closed(engine, monkeypatch):
    may_end = threading.Event()
    monkeypatch.setattr(programs.Tracer, "traced", lambda *_: may_end.wait(60) and ())
    own = programs.Programs(engine, lambda: None)
    shapes = [CacheShape(1 << n, 1, 256, 128) for n in range(4)]  # of which threads compile two
    own.request(own.missing(map(programs.Admit, shapes)))
    waiting = threading.Thread(target=own.wait, args=(map(programs.Admit, shapes),), daemon=True)
    waiting.start()
    threading.Timer(0.1, may_end.set).start()
    own.close()
    waiting.join(10)
    assert not waiting.is_alive()


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
def test_a_server_is_ready_when_it_is_warm(engine, compiled):
    loop = EngineLoop(engine, "tiny")
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
        requests = [ask(loop, SamplingParams(max_tokens=16), prompt) for prompt in ([5, 6], [7] * 16)]
        assert [finished(each)[-1].finish_reason is not None for each in requests] == [True] * 2
        assert compiled == []
        loop.programs.close()  # three completions never get four slots, and share two
        finished(ask(loop, SamplingParams(n=3, max_tokens=16), [5, 6]), 3)
    finally:
        loop.close()


@pytest.mark.heavy
def test_a_completion_starts_before_all_is_compiled_that_it_may_need(compiled):
    model = init_model({**TINY, "max_position_embeddings": 1024}, seed=0)
    with running(engine_for(model, 1), "tiny") as loop:
        loop.warm_up([1], 16)
        num_before, told, num_compiled = loop.programs.num_compiled, queue.Queue(), []
        params = SamplingParams(max_tokens=400, seed=3, ignore_eos=True)

        def tell(growth):
            num_compiled.append(loop.programs.num_compiled)
            told.put(growth)

        compiled.clear()
        loop.submit("tiny", [np.array([5, 6], np.int32)], params, tell)
        deltas = finished(told)
        assert num_compiled[0] < loop.programs.num_compiled
        assert num_compiled[-1] > num_before
        assert not [seconds for name, seconds in compiled if name == "engine"]
        [[expected]] = engine_for(model, 1).generate([np.array([5, 6])], params)
        assert tokens_of(deltas) == expected.tokens
