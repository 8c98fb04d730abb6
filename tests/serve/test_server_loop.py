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
from groupax.serve.app import Limits, create_app
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
    loop = EngineLoop({"tiny": engine})
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
def test_a_pause_keeps_requests_which_continue_as_if_there_had_been_none(loop, engine):
    loop.start()
    [[expected]] = engine.generate([PROMPT], LONG)
    told, deltas = started(loop)
    loop.pause("keep").result(60)
    assert loop.is_paused
    num_chunks = loop.counts.num_chunks
    later = queue.Queue()
    job = loop.submit("tiny", [PROMPT], LONG, later.put)
    gone = loop.submit("tiny", [PROMPT], LONG, later.put)
    loop.cancel(gone)
    loop.between_chunks(lambda: None).result(60)
    assert loop.counts.num_chunks == num_chunks
    assert loop.counts.num_waiting == len(job.sequences)
    loop.resume().result(60)
    assert tokens_of(deltas + finished(told)) == tokens_of(finished(later)) == expected.tokens


@pytest.mark.heavy
def test_pauses_wait_for_running_requests_or_abort_them(loop):
    loop.start()
    told, deltas = started(loop)
    pause, later = loop.pause("wait"), ask(loop)
    pause.result(60)
    assert (deltas + finished(told))[-1].finish_reason == "length"
    assert later.empty()
    loop.resume().result(60)
    assert finished(later)[-1].finish_reason == "length"
    told, deltas = started(loop)
    loop.pause("keep").result(60)
    loop.pause("abort").result(60)
    assert finished(told)[-1].finish_reason == "abort"
    assert (loop.counts.num_running, loop.counts.num_waiting) == (0, 0)
    loop.resume().result(60)
    told, deltas = started(loop)
    pauses = [loop.pause("wait"), loop.pause("keep")]
    loop.close()
    assert (deltas + finished(told))[-1].finish_reason in ("abort", "length")
    assert all(pause.done() for pause in pauses)


def test_a_server_is_paused_with_a_key_only(loop):
    loop.start()

    async def statuses():
        async def status(limits, method, path, **headers):
            app = httpx.ASGITransport(create_app(loop, limits))
            async with httpx.AsyncClient(transport=app, base_url="http://localhost", headers=headers) as client:
                answer = await client.request(method, path)
                return answer.status_code, answer.json()

        keyed, key = Limits(api_keys=("secret",)), {"authorization": "Bearer secret"}
        assert (await status(Limits(), "POST", "/pause?mode=keep"))[0] == 403
        assert (await status(keyed, "POST", "/pause?mode=keep"))[0] == 401
        for query, message in (
            ("mode=stop%0A", "mode must be one of keep, wait, abort"),
            ("mode=keep&clear_cache=true", "'clear_cache' is not supported; a pause has only a mode"),
        ):
            code, answer = await status(keyed, "POST", f"/pause?{query}", **key)
            assert code == 400
            assert message in answer["error"]["message"]
        assert await status(keyed, "POST", "/pause?mode=keep", **key) == (200, {"status": "paused"})
        assert await status(keyed, "GET", "/is_paused", **key) == (200, {"is_paused": True})
        assert await status(keyed, "POST", "/resume", **key) == (200, {"status": "resumed"})
        assert await status(keyed, "GET", "/is_paused", **key) == (200, {"is_paused": False})

    asyncio.run(statuses())


@pytest.mark.heavy
def test_wide_requests_join_in_parts_and_small_ones_pass_them(loop, engine, monkeypatch):
    monkeypatch.setattr(loop_module, "PART", 4)
    params = SamplingParams(n=30, max_tokens=24, seed=5, ignore_eos=True)
    [expected] = engine.generate([PROMPT], params)
    wide, num_running = queue.Queue(), []
    loop = EngineLoop({"tiny": engine}).start()

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
    loop = EngineLoop({"tiny": engine})
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
        loop.programs["tiny"].close()  # three completions never get four slots, and share two
        finished(ask(loop, SamplingParams(n=3, max_tokens=16), [5, 6]), 3)
    finally:
        loop.close()


@pytest.mark.heavy
def test_a_completion_starts_before_all_is_compiled_that_it_may_need(compiled):
    model = init_model({**TINY, "max_position_embeddings": 1024}, seed=0)
    with running({"tiny": engine_for(model, 1)}) as loop:
        loop.warm_up([1], 16)
        num_before, told, num_compiled = loop.programs["tiny"].num_compiled, queue.Queue(), []
        params = SamplingParams(max_tokens=400, seed=3, ignore_eos=True)

        def tell(growth):
            num_compiled.append(loop.programs["tiny"].num_compiled)
            told.put(growth)

        compiled.clear()
        loop.submit("tiny", [np.array([5, 6], np.int32)], params, tell)
        deltas = finished(told)
        assert num_compiled[0] < loop.programs["tiny"].num_compiled
        assert num_compiled[-1] > num_before
        assert not [seconds for name, seconds in compiled if name == "engine"]
        [[expected]] = engine_for(model, 1).generate([np.array([5, 6])], params)
        assert tokens_of(deltas) == expected.tokens
