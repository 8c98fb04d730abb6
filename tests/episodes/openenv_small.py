"""A server on loopback that speaks OpenEnv's protocol as recorded from the package's own (0.10.0)."""

import asyncio
import json
import threading
from http import HTTPStatus

from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed


def field(name, kind):
    return {name: {"title": name.title(), "type": kind}}


METADATA = {"metadata": {"additionalProperties": True, "title": "Metadata", "type": "object"}}
CALL = {**METADATA, **field("type", "string"), **field("tool_name", "string"), **field("arguments", "object")}
SCHEMAS = {
    "words": {"action": {"properties": {**METADATA, **field("text", "string")}, "required": ["text"]}},
    "tools": {"action": {"properties": CALL, "required": ["tool_name"], "title": "CallToolAction"}},
    "moves": {"action": {"properties": {**METADATA, **field("x", "integer"), **field("y", "integer")}}},
}
NUMBERS = {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"], "type": "object"}
REASON = {"properties": {"reason": {"type": "string"}}, "required": ["reason"], "type": "object"}
TOOLS = [
    {"name": "multiply", "description": "Multiplies two integers.", "input_schema": NUMBERS},
    {"name": "fail", "description": "Fails.", "input_schema": REASON},
]


def observation(reward=None, done=False, **fields):
    data = {"observation": {"metadata": {}, **fields}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def error(code, message, **more):
    return {"type": "error", "data": {"message": message, "code": code, **more}}


class Words:
    """Answers texts and likes a letter. Some words make it fail in its own ways."""

    def __init__(self):
        self.count = 0

    def reset(self, data):
        self.letter = "aeiou"[data["seed"] % 5]
        return observation(text=f" Say {self.letter} ({data.get('topic', 'letters')}).")

    def step(self, data):
        text = data.get("text")
        if text is None:
            faults = [{"type": "missing", "loc": ["text"], "msg": "Field required", "input": data}]
            return error("VALIDATION_ERROR", "Invalid message", errors=faults)
        kinds = {
            "crash": error("EXECUTION_ERROR", "crashed"),
            "nan": observation(reward=float("nan"), text="x"),
            "odd": {"type": "observation", "data": 7},
            "hang": None,
            "leave": "leave",
        }
        for word, answer in kinds.items():
            if text.startswith(word):
                return answer
        self.count += 1
        return observation(text.count(self.letter) / 10, self.count == 3, text=f"Again, {self.letter}.")


class Tools:
    """Has tools, which give a reward for each result."""

    def reset(self, data):
        return observation()

    def step(self, data):
        if data["type"] == "list_tools":
            return observation(tools=TOOLS)
        name, arguments = data["tool_name"], data["arguments"]
        if name == "fail":
            fault = {"error_type": "execution_error", "message": f"Error calling tool 'fail': {arguments['reason']}"}
            return observation(tool_name=name, result=None, error=fault)
        product = arguments["a"] * arguments["b"]
        content = [{"type": "text", "text": str(product), "annotations": None, "meta": None}]
        result = {"content": content, "structured_content": {"result": product}, "data": product, "is_error": False}
        return observation(0.5, tool_name=name, result=result, error=None)


class SmallServer:
    """A server in a thread; `messages` are those that it has received. It is a context."""

    def __init__(self, kind):
        self.kind, self.messages, self.num_sessions = kind, [], 0
        self._ready, self._stop = threading.Event(), None

    def __enter__(self):
        threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True).start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._stop.set)

    async def _run(self):
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with serve(self._session, "127.0.0.1", 0, process_request=self._page) as server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            self._ready.set()
            await self._stop.wait()

    def _page(self, connection, request):
        if request.path == "/ws":
            return None
        return connection.respond(HTTPStatus.OK, json.dumps(SCHEMAS[self.kind]))

    async def _session(self, socket):
        self.num_sessions += 1
        environment = Tools() if self.kind == "tools" else Words()
        try:
            async for text in socket:
                message = json.loads(text)
                self.messages.append(message)
                if message["type"] == "close":
                    return
                answer = (environment.reset if message["type"] == "reset" else environment.step)(message["data"])
                if answer == "leave":
                    return
                if answer is not None:
                    await socket.send(json.dumps(answer))
        except ConnectionClosed:
            pass
        finally:
            self.num_sessions -= 1
