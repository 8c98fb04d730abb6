"""Tools of MCP servers, over standard streams and HTTP."""

import importlib.util
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from groupax import InfrastructureError, mcp
from groupax.core.settings.sampling import SamplingParams
from groupax.satellites.environments import mcp_tools

from .test_episodes import call, played

if importlib.util.find_spec("mcp") is None:
    pytest.skip("mcp is not installed", allow_module_level=True)

pytestmark = pytest.mark.heavy
SCRIPT = Path(__file__).with_name("mcp_server.py")
STDIO = f"stdio:{sys.executable} {SCRIPT} stdio"
TWO = SamplingParams(n=2, max_tokens=4000)


def results(row):
    return [(record.result, record.error) for turn in row.turns for record in turn.calls]


def answer(text, sample, turn):
    calls = [call("multiply", a=6, b=7), call("fail", reason="why"), call("multiply", a="x", b=1)]
    return calls[turn] if turn < 3 else "done"


def check(rows):
    for row in rows:
        product, failure, mistake = results(row)
        assert product == ("42", "")
        assert "Error executing tool fail" in failure[0]
        assert failure[1].startswith("ToolError")
        assert "must be an integer" in mistake[1]
        assert row.finish_reason == "stop"


def test_tools_of_a_server_that_is_started():
    tools = mcp(STDIO)
    assert [tool.name for tool in tools] == ["count", "fail", "multiply"]
    [group], script = played(answer, tools, params=TWO)
    assert '"name": "multiply", "description": "Multiplies two integers."' in script.prompts[0]
    check(group)
    assert [tool.name for tool in mcp(STDIO, only=["fail"])] == ["fail"]


def test_tools_of_a_server_with_a_url():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(SCRIPT), str(port)])
    try:
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        tools = mcp(f"http://127.0.0.1:{port}/mcp")
        [group], _ = played(answer, tools, params=TWO)
        check(group)
    finally:
        process.kill()
        process.wait()


@pytest.mark.drawn(4, "episodes")
def test_an_episode_may_have_a_session_of_its_own():
    def count(text, sample, turn):
        return call("count") if turn < 2 else "done"

    [group], _ = played(count, mcp(STDIO, stateful=True), params=TWO)
    assert [[result for result, _ in results(row)] for row in group] == [["1", "2"], ["1", "2"]]
    [group], _ = played(count, mcp(STDIO), params=TWO)
    assert sorted(result for row in group for result, _ in results(row)) == ["1", "2", "3", "4"]


def test_a_server_that_ends_leaves_the_episode_out_and_one_that_hangs_is_a_timeout():
    def die(text, sample, turn):
        return call("fail", reason="die" if sample else "hang") if turn == 0 else "so"

    tools = mcp(STDIO, stateful=True, timeout_s=2)
    with pytest.warns(UserWarning, match="tool fail: InfrastructureError"):
        [[hung, dead]], _ = played(die, tools, params=TWO)
    assert dead.finish_reason == "env_error"
    assert hung.finish_reason == "stop"
    assert "timed out after 2 s" in results(hung)[0][0]


# A server without the library, which can do what the protocol does not allow
SERVER = """
import json, sys
mode, schema, page = sys.argv[1], {"inputSchema": {"type": "object"}}, 0
for line in sys.stdin:
    request = json.loads(line)
    server = {"name": "s", "version": "1"}
    result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": server}
    if request["method"] == "tools/list":
        page += 1
        tool = {"name": "t" if mode == "twins" else f"t{page}", **({} if mode == "bare" else schema)}
        result = {"tools": [tool], "nextCursor": str(page)} if page == 1 or mode == "endless" else {"tools": [tool]}
    print("no message", flush=True)
    if "id" in request:
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
"""

SCRIPTED = f"stdio:{sys.executable} -c {shlex.quote(SERVER)}"


@pytest.mark.parametrize(("mode", "num_tools"), [("pages", 2), ("endless", 100)])
def test_lists_of_tools_have_pages(mode, num_tools, caplog, monkeypatch):
    monkeypatch.setattr(mcp_tools, "_said", set())
    tools = mcp(f"{SCRIPTED} {mode}")
    assert sorted(tool.name for tool in tools) == sorted(f"t{page}" for page in range(1, num_tools + 1))
    assert ("100 pages" in caplog.text) == (mode == "endless")
    assert "Traceback" not in caplog.text
    assert caplog.text.count("Failed to parse") == 1, "of several lines that are no messages"


@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        ("twins", "has two tools of the name 't'; rename one"),
        ("bare", "has sent what the protocol does not allow: tools.0.inputSchema: Field required"),
    ],
)
def test_tools_that_cannot_be_told_apart_or_called_are_refused(mode, fault):
    with pytest.raises(ValueError, match=f" {mode} {fault}"):
        mcp(f"{SCRIPTED} {mode}")


def test_mistakes_are_found_at_the_start():
    with pytest.raises(ValueError, match="takes 'stdio:command arguments' or"):
        mcp("python server.py")
    with pytest.raises(ValueError, match="cannot be read: No closing quotation"):
        mcp("stdio:'")
    with pytest.raises(ValueError, match="positive timeout_s, got 0"):
        mcp(STDIO, timeout_s=0)
    with pytest.raises(ValueError, match="has no tool add; it has count, fail, multiply"):
        mcp(STDIO, only=["add"])
    with pytest.raises(InfrastructureError, match=r"cannot be reached"):
        mcp("stdio:/no/such/program")
    with pytest.raises(InfrastructureError, match=r"cannot be reached"):
        mcp("http://127.0.0.1:1/mcp")
