"""Pauses: requests are kept, finished or aborted, and what arrives meanwhile waits."""

import asyncio
import queue

import httpx
import numpy as np
import pytest

from groupax import SamplingParams
from groupax.serve.app import Limits, create_app
from groupax.serve.loop import EngineLoop

from .test_config_and_data import a_tokenizer
from .test_engine import engine_for

PROMPT = np.array([5, 6, 7], np.int32)
LONG = SamplingParams(max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny_model):
    engine = engine_for(tiny_model, 1, kv_bytes=1 << 26)
    engine.tokenizer = a_tokenizer(eos_token="<eos>")
    return engine


@pytest.fixture
def loop(engine):
    loop = EngineLoop({"tiny": engine}).start()
    yield loop
    loop.close()


def started(loop):
    """A request some of whose tokens have arrived, and the queue of the others."""
    told = queue.Queue()
    loop.submit("tiny", [PROMPT], LONG, told.put)
    return told, [told.get(timeout=60)]


def rest(told, deltas):
    """All deltas of a request when it has ended."""
    while deltas[-1].finish_reason is None:
        deltas.append(told.get(timeout=60))
    return deltas


def tokens_of(deltas):
    return [token for delta in deltas for token in delta.tokens]


@pytest.mark.heavy
def test_a_pause_keeps_requests_which_continue_as_if_there_had_been_none(loop, engine):
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
    assert tokens_of(rest(told, deltas)) == expected.tokens
    assert tokens_of(rest(later, [later.get(timeout=60)])) == expected.tokens


@pytest.mark.heavy
def test_a_pause_waits_for_running_requests_and_not_for_later_ones(loop):
    told, deltas = started(loop)
    pause = loop.pause("wait")
    later = queue.Queue()
    loop.submit("tiny", [PROMPT], LONG, later.put)
    pause.result(60)
    assert rest(told, deltas)[-1].finish_reason == "length"
    assert later.empty()
    loop.resume().result(60)
    assert rest(later, [later.get(timeout=60)])[-1].finish_reason == "length"


def test_a_pause_aborts_requests(loop):
    told, deltas = started(loop)
    loop.pause("keep").result(60)
    loop.pause("abort").result(60)
    assert rest(told, deltas)[-1].finish_reason == "abort"
    assert (loop.counts.num_running, loop.counts.num_waiting) == (0, 0)
    loop.resume().result(60)
    assert started(loop)[1][0].tokens


def test_a_paused_loop_can_be_closed(engine):
    loop = EngineLoop({"tiny": engine}).start()
    told, deltas = started(loop)
    pauses = [loop.pause("wait"), loop.pause("keep")]
    loop.close()
    assert rest(told, deltas)[-1].finish_reason in ("abort", "length")
    assert all(pause.done() for pause in pauses)


def test_a_server_is_paused_with_a_key_only(loop):
    async def statuses():
        async def status(limits, method, path, **headers):
            app = httpx.ASGITransport(create_app(loop, limits))
            async with httpx.AsyncClient(transport=app, base_url="http://localhost", headers=headers) as client:
                answer = await client.request(method, path)
                return answer.status_code, answer.json()

        keyed, key = Limits(api_keys=("secret",)), {"authorization": "Bearer secret"}
        assert (await status(Limits(), "POST", "/pause?mode=keep"))[0] == 403
        assert (await status(keyed, "POST", "/pause?mode=keep"))[0] == 401
        for query, more, message in (
            ("mode=stop%0A", {}, "mode must be one of keep, wait, abort"),
            ("mod=x", {}, "unknown query"),
            ("mode=keep&clear_cache=true", {}, "clear_cache is not supported: a kept request continues"),
            ("wait_for_inflight_requests=true", {}, "set mode=wait"),
            ("mode=keep", {"content-length": "16"}, "its mode is in the query"),
            ("mode=keep", {"transfer-encoding": "chunked"}, "its mode is in the query"),
        ):
            code, answer = await status(keyed, "POST", f"/pause?{query}", **key, **more)
            assert code == 400
            assert message in answer["error"]["message"]
        assert await status(keyed, "POST", "/pause?mode=keep", **key) == (200, {"status": "paused"})
        assert await status(keyed, "GET", "/is_paused", **key) == (200, {"is_paused": True})
        assert await status(keyed, "POST", "/resume", **key) == (200, {"status": "resumed"})
        assert await status(keyed, "GET", "/is_paused", **key) == (200, {"is_paused": False})

    asyncio.run(statuses())
