"""Calls that run at once, within limits, whatever the tools do."""

import asyncio
import logging
import threading
import time
from functools import partial

import numpy as np
import pytest

from groupax.tools.calls import ToolCall
from groupax.tools.runner import ToolRunner
from groupax.tools.tool import Step, Tool


def make(function, name=None, properties=None, **more):
    name = name or function.__name__
    parameters = {"type": "object", "properties": properties or {}, "required": list(properties or {})}
    schema = {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}
    return Tool(name, function, schema, asyncio.iscoroutinefunction(function), **more)


def run(runner, *pairs):
    """The results of calls that are started at once."""
    done, found = threading.Event(), {}

    def on_done(index, result):
        assert index not in found
        found[index] = result
        if len(found) == len(pairs):
            done.set()

    for index, (tool, call) in enumerate(pairs):
        runner.call_tool(tool, call, partial(on_done, index))
    assert done.wait(20)
    return [found[index] for index in range(len(pairs))]


def call(tool, **arguments):
    return tool, ToolCall(tool.name, arguments)


@pytest.fixture
def runner():
    with ToolRunner(num_workers=64, timeout_s=5.0, max_result_bytes=10_000) as runner:
        yield runner


def returns(value):
    return make(lambda: value, "f")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is ", "as it is "),
        (None, ""),
        (True, "True"),
        ({"a": "é", "b": [1, None]}, '{"a": "é", "b": [1, null]}'),
        ((1, 2), "(1, 2)"),
        ("half \ud800", "half ?"),
        (Step("won", reward=np.float32(0.5), done=np.bool_(True)), "won"),
        (Step(reward=1), ""),
    ],
)
def test_what_is_returned_becomes_text_and_a_step_has_a_reward_and_may_end_the_episode(runner, value, text):
    [result] = run(runner, call(returns(value)))
    assert (result.text, result.error) == (text, "")
    reward, done = (value.reward, value.done) if isinstance(value, Step) else (None, False)
    assert (result.reward, result.done) == (reward, done)
    assert (type(result.reward), type(result.done)) == (type(None) if reward is None else float, bool)


class HostileError(Exception):
    def __str__(self):
        raise RuntimeError("no text either")


@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_a_tool_raises_is_a_result(runner, is_async):
    stopped = "coroutine raised StopIteration" if is_async else "StopIteration"
    for error, message in (
        (ValueError("boom"), "boom"),
        (ValueError(), "ValueError"),
        (SystemExit(3), "3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (GeneratorExit(), "GeneratorExit"),
        (StopIteration(), stopped),
        (asyncio.CancelledError("own"), "own"),
        (HostileError(), "HostileError"),
    ):

        def fails(error=error):
            raise error

        async def fails_later(error=error):
            raise error

        [result] = run(runner, call(make(fails_later if is_async else fails)))
        assert result.text == str({"error": message})
        assert message in result.error
    [after] = run(runner, call(make(lambda: "alive", "f")))
    assert after.text == "alive"


def test_calls_that_cannot_be_made(runner):
    add = make(lambda a: a, "add", {"a": {"type": "integer"}})
    results = run(
        runner,
        (None, ToolCall("sub", {}, "Tool sub not found; the tools are add.")),
        (add, ToolCall("add", {"a": 1}, "broken JSON")),
        call(add, b=1),
        call(add, a="x"),
        call(add, a="7"),
    )
    assert [result.error for result in results[:2]] == [
        "Tool sub not found; the tools are add.",
        "broken JSON",
    ]
    assert "has no argument 'b'" in results[2].error
    assert "must be an integer" in results[3].error
    assert results[4].text == "7"


def sleeper(name, seconds, is_async=False):
    def sync():
        time.sleep(seconds)
        return name

    async def later():
        await asyncio.sleep(seconds)
        return name

    return make(later if is_async else sync, name)


def test_calls_overlap(runner):
    tools = [sleeper("slow", 0.4, is_async=True), sleeper("fast", 0.05), sleeper("slow2", 0.3)]
    start = time.perf_counter()
    results = run(runner, *map(call, tools), (None, ToolCall("x", {})))
    assert time.perf_counter() - start < 0.65
    assert [result.text for result in results[:3]] == ["slow", "fast", "slow2"]


def test_at_most_num_workers_calls_run_at_once():
    running, most, lock = [0], [0], threading.Lock()

    def count():
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.02)
        with lock:
            running[0] -= 1

    tool = make(count)
    with ToolRunner(num_workers=3, timeout_s=5.0, max_result_bytes=100) as runner:
        run(runner, *[call(tool)] * 20)
    assert most == [3]


def test_hanging_functions_are_abandoned_and_told_once(caplog):
    release = threading.Event()
    hang = make(release.wait, "hang", timeout_s=0.2)
    with ToolRunner(num_workers=1, timeout_s=5.0, max_result_bytes=100) as runner:
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                start = time.perf_counter()
                [result] = run(runner, call(hang))
                assert time.perf_counter() - start < 2
                assert result.error == "timed out after 0.2 s"
                assert result.text == "{'error': 'timed out after 0.2 s'}"
                assert 0.1 < result.seconds < 2
        assert sum("did not end within" in record.message for record in caplog.records) == 1
        [result] = run(runner, call(returns("alive")))
        assert result.text == "alive"
        release.set()


def test_coroutines_that_hang_are_cancelled(caplog):
    cancelled = threading.Event()

    async def hang():
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    with ToolRunner(num_workers=1, timeout_s=0.2, max_result_bytes=100) as runner, caplog.at_level(logging.WARNING):
        [result] = run(runner, call(make(hang)))
        assert result.error == "timed out after 0.2 s"
        assert cancelled.wait(5)
        assert "did not end within" not in caplog.text


def test_coroutines_that_block_their_loop_are_told_and_the_loop_replaced(caplog):
    release = threading.Event()

    async def block():
        release.wait()

    async def fine():
        await asyncio.sleep(0)
        return "fine"

    with ToolRunner(num_workers=2, timeout_s=0.2, max_result_bytes=100) as runner, caplog.at_level(logging.WARNING):
        [result] = run(runner, call(make(block)))
        assert result.error == "timed out after 0.2 s"
        assert sum("did not end within" in record.message for record in caplog.records) == 1
        [result] = run(runner, call(make(fine)))
        assert result.text == "fine"
        release.set()


def test_long_results_are_cut_in_the_middle():
    text = "é" * 3_000_000
    with ToolRunner(num_workers=1, timeout_s=20.0, max_result_bytes=1000) as runner:
        [result] = run(runner, call(returns(text)))
        [error] = run(runner, call(make(lambda: 1 / int("x" * 5000), "f")))
    assert 900 < len(result.text.encode()) <= 1000
    start, _, rest = result.text.partition("\n[... ")
    note, _, end = rest.partition(" characters left out ...]\n")
    assert 0 < len(start) == len(end)
    assert start + end == text[: len(start + end)]
    assert note == f"{len(text) - len(start) - len(end):,}"
    assert len(error.text.encode()) <= 1000
    assert len(error.error.encode()) <= 1000


def test_closing_waits_for_nothing_and_ends_every_start():
    release, found = threading.Event(), []
    hang = make(release.wait, "hang")

    async def sleep():
        await asyncio.sleep(60)

    with ToolRunner(num_workers=3, timeout_s=60.0, max_result_bytes=100) as runner:
        for tool in (hang, make(sleep), hang, hang, returns("never")):
            runner.call_tool(*call(tool), found.append)
        time.sleep(0.1)
        start = time.perf_counter()
    assert time.perf_counter() - start < 2
    assert len(found) == 5
    assert all(result.error == "the run has ended" for result in found)
    runner.close()
    with pytest.raises(RuntimeError, match="the tool runner is closed"):
        runner.call_tool(*call(hang), found.append)
    release.set()
