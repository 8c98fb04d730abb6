"""Asks a running `groupax serve` with the clients of others: tools, schemas, streams, an evaluation.

    pip install openai anthropic litellm inspect-ai
    python dev/clients.py [NAME ...]

The model is that of the calculator's recipe, which often guesses, so that its first turn must be a call. Each client
prints what it has received.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[1]))

from groupax.parallel.processes import listen
from groupax.recipes import load_recipe
from groupax.recipes.agents.calculator import calculator

KEY = "secret"
QUESTION = "What is 123*45?"
EXPRESSION = {"type": "string", "description": "Like 12*34.", "pattern": r"^[0-9]{1,3}\*[0-9]{1,3}$"}
PARAMETERS = {"type": "object", "properties": {"expression": EXPRESSION}, "required": ["expression"]}
FUNCTION = {"name": "calculator", "description": "Calculates.", "parameters": PARAMETERS}
TOOL: Any = {"type": "function", "function": FUNCTION}
ASKED: Any = [{"role": "user", "content": QUESTION}]


def openai(url: str) -> str:
    """Calls the tool and answers with its result, parses a pydantic model, and asks for a response."""
    from openai import OpenAI
    from pydantic import BaseModel, Field

    class Verdict(BaseModel):
        word: Literal["yes", "no"]
        number: int = Field(ge=0, le=99)

    with OpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        must: Any = {"model": "agents", "tools": [TOOL], "tool_choice": "required", "temperature": 0}
        said = client.chat.completions.create(messages=ASKED, **must)
        message: Any = said.choices[0].message
        [call] = message.tool_calls
        result = str(calculator(**json.loads(call.function.arguments)))
        told: Any = [*ASKED, message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        answer = client.chat.completions.create(model="agents", messages=told, tools=[TOOL], temperature=0)
        parsed = client.chat.completions.parse(model="agents", messages=ASKED, response_format=Verdict)
        tool: Any = {"type": "function", **FUNCTION}
        response = client.responses.create(
            model="agents", input=QUESTION, tools=[tool], tool_choice="required", temperature=0
        )
        kinds = [item.type for item in response.output]
    return (
        f"{call.function.arguments} -> {answer.choices[0].message.content}; {parsed.choices[0].message.parsed}; {kinds}"
    )


def anthropic(url: str) -> str:
    """Calls the tool and answers with its result, streamed."""
    from anthropic import Anthropic

    tools: Any = [{"name": "calculator", "description": "Calculates.", "input_schema": PARAMETERS}]
    with Anthropic(base_url=url, api_key=KEY) as client:
        limits: Any = {"model": "agents", "max_tokens": 80, "tools": tools, "extra_body": {"temperature": 0}}
        said = client.messages.create(messages=ASKED, tool_choice={"type": "any"}, **limits)
        [call] = [each for each in said.content if each.type == "tool_use"]
        expression: Any = call.input
        result = {"type": "tool_result", "tool_use_id": call.id, "content": str(calculator(**expression))}
        told: Any = [*ASKED, {"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
        with client.messages.stream(messages=told, **limits) as stream:
            return f"{call.input} -> {stream.get_final_text()}"


def litellm(url: str) -> str:
    """Calls the tool as OpenAI's, vLLM's and Anthropic's client, in full and streamed."""
    import litellm as client

    found = []
    for model, base in (("openai/agents", f"{url}/v1"), ("hosted_vllm/agents", f"{url}/v1"), ("anthropic/agents", url)):
        for stream in (False, True):
            given: Any = {
                "model": model,
                "api_base": base,
                "api_key": KEY,
                "messages": ASKED,
                "tools": [TOOL],
                "tool_choice": "required",
            }
            said: Any = client.completion(**given, max_tokens=80, temperature=0, stream=stream)
            said = client.stream_chunk_builder(list(said)) if stream else said
            [call] = said.choices[0].message.tool_calls
            found.append(calculator(**json.loads(call.function.arguments)))
    response: Any = client.responses(model="openai/agents", api_base=f"{url}/v1", api_key=KEY, input=QUESTION)
    return f"{found}, a response that is {response.status}"


def inspect_ai(url: str) -> str:
    """Evaluates five questions with the tool, whose calls are made by the evaluation, over three protocols."""
    from inspect_ai import Task
    from inspect_ai import eval as evaluate
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import tool

    seen = []

    @tool(name="calculator")
    def calculating() -> Any:
        async def execute(expression: str) -> str:
            """Calculates.

            Args:
                expression: Like 12*34.
            """
            seen.append(expression)
            try:
                return str(calculator(expression))
            except ValueError as error:
                return str(error)

        return execute

    os.environ |= {"GROUPAX_BASE_URL": f"{url}/v1", "GROUPAX_API_KEY": KEY, "INSPECT_DISPLAY": "none"}
    os.environ |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": KEY}
    rows = [
        Sample(f"What is {a}*{b}?", target=str(a * b)) for a, b in ((123, 45), (67, 89), (12, 34), (56, 78), (9, 87))
    ]
    found = []
    for name, options in (
        ("openai-api/groupax/agents", {}),
        ("openai-api/groupax/agents", {"responses_api": True}),
        ("anthropic/agents", {}),
    ):
        seen.clear()
        must, may_not = (use_tools(calculating(), tool_choice=choice) for choice in ("any", "none"))
        task = Task(rows, solver=[must, generate(tool_calls="single"), may_not, generate()], scorer=includes())
        model = get_model(name, config=GenerateConfig(max_tokens=80, temperature=0.0), **options)
        with tempfile.TemporaryDirectory() as folder:
            [log] = evaluate(task, model=model, log_dir=folder, display="none")
        results: Any = log.results
        if log.status != "success":
            raise SystemExit(f"{name} {options or ''}: {log.error}")
        accuracy = results.scores[0].metrics["accuracy"].value
        found.append(f"{name} {options or ''}: {log.status}, {len(seen)} calls, accuracy {accuracy}")
    return "; ".join(found)


CLIENTS = {
    "openai": (openai, "openai"),
    "anthropic": (anthropic, "anthropic"),
    "litellm": (litellm, "litellm"),
    "inspect-ai": (inspect_ai, "inspect-ai"),
}


def main() -> None:
    """Starts the server, and asks it with each client."""
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "groupax", "serve", "--name", "agents"]
    command += ["--model", str(load_recipe("calculator").model), "--port", str(port)]
    server = subprocess.Popen(command, env={**os.environ, "GROUPAX_API_KEY": KEY})
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{url}/ready", server)
        for name in sys.argv[1:] or CLIENTS:
            ask, package = CLIENTS[name]
            print(f"{package} {importlib.metadata.version(package)}: {ask(url)}", flush=True)
    finally:
        server.terminate()
        server.wait()


def wait_for(url: str, server: "subprocess.Popen[bytes]") -> None:
    """Waits until the server has compiled its programs."""
    while server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise SystemExit("the server has not started")


if __name__ == "__main__":
    main()
