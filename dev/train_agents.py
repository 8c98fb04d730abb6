"""Trains agents of published packages for five steps each, and checks their traces by OpenEnv's own rules.

    pip install openai-agents langgraph langchain-openai smolagents inspect-ai anthropic openenv
    python dev/train_agents.py [NAME ...]

The model has random weights, and whole calls and blocks of code as tokens, so that it uses tools now and then. The last
agent runs in another process, as on another machine: it is asked over HTTP, and asks the model at its public address.
"""

import atexit
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from groupax import GRPOConfig, GRPOTrainer, TraceFile, init_model, program
from groupax.events import RolloutScored
from tests.conftest import TINY
from tests.data.chat_tokenizers import VOCAB_SIZE, chat_tokenizer

PIECES = [
    f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'
    for a in range(6)
    for b in range(6)
] + [f"<code>\nfinal_answer(add({a}, {b}))\n</code>" for a in range(8) for b in range(8)]
TOKENIZER = chat_tokenizer(*PIECES)
ROWS = [{"question": "What is 2 + 3?", "prompt": [{"role": "user", "content": "What is 2 + 3?"}]}] * 4
SETTINGS: dict[str, Any] = {
    "max_steps": 5,
    "prompts_per_step": 2,
    "num_generations": 2,
    "max_completion_length": 4000,
    "max_turn_tokens": 60,
    "max_turns": 8,
    "seed": 3,
    "progress_bar": "none",
    "stop": ("</tool_call>", "</code>"),
}


def add(a: int, b: int) -> int:
    """Adds two integers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def openai_agents() -> Any:
    """An agent of openai-agents, over the responses protocol."""
    from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    async def agent(question: str, base_url: str, api_key: str, model: str) -> float:
        there = OpenAIResponsesModel(model=model, openai_client=AsyncOpenAI(base_url=base_url, api_key=api_key))
        asked = Agent(name="Adder", instructions="Use tools.", tools=[function_tool(add)], model=there)
        return score((await Runner.run(asked, question, max_turns=3)).final_output)

    return program(agent, error_reward=-1.0)


def langgraph() -> Any:
    """A ReAct agent of langgraph."""
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    def agent(question: str, base_url: str, api_key: Any, model: str) -> float:
        graph = create_react_agent(ChatOpenAI(model=model, base_url=base_url, api_key=api_key), [add])
        return score(graph.invoke({"messages": [("user", question)]})["messages"][-1].content)

    return program(agent, error_reward=-1.0)


def smolagents() -> Any:
    """An agent of smolagents that writes code."""
    from smolagents import CodeAgent, OpenAIServerModel, tool

    def agent(question: str, base_url: str, api_key: str, model: str) -> float:
        there = OpenAIServerModel(model, api_base=base_url, api_key=api_key)
        return score(CodeAgent(tools=[tool(add)], model=there, max_steps=2, verbosity_level=0).run(question))

    return program(agent, error_reward=-1.0)


INSPECT = """
import os, sys, tempfile
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

@tool
def add():
    async def execute(a: int, b: int):
        '''Adds two integers.

        Args:
            a: The first.
            b: The second.
        '''
        return a + b
    return execute

task = Task([Sample(sys.argv[1], target="5")], solver=[use_tools(add()), generate()], scorer=includes())
[log] = eval(task, model="openai/" + os.environ["GROUPAX_MODEL"], display="none", log_dir=tempfile.mkdtemp())
print(log.results.scores[0].metrics["accuracy"].value)
"""


def inspect_ai() -> Any:
    """An evaluation of inspect-ai with a tool, as a command."""
    return program([sys.executable, "-c", INSPECT, "{question}"], score="stdout", error_reward=-1.0)


def anthropic() -> Any:
    """A loop over Anthropic's own client, with a tool."""
    from anthropic import Anthropic

    tools: Any = [{"name": "add", "description": "Adds two integers.", "input_schema": INTEGERS}]

    def agent(question: str, anthropic_base_url: str, api_key: str, model: str) -> float:
        messages: Any = [{"role": "user", "content": question}]
        with Anthropic(base_url=anthropic_base_url, api_key=api_key) as client:
            while True:
                said = client.messages.create(model=model, max_tokens=60, messages=messages, tools=tools)
                calls = [each for each in said.content if each.type == "tool_use"]
                if not calls or len(messages) > 4:
                    return score(said.content)
                results = [{"type": "tool_result", "tool_use_id": each.id, "content": "5"} for each in calls]
                messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": results}]

    return program(agent, error_reward=-1.0)


INTEGERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
SERVICE = """
import http.server, json, sys
from openai import OpenAI

class Agent(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        given = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with OpenAI(base_url=given["base_url"], api_key=given["api_key"]) as client:
            messages = [{"role": "user", "content": given["question"]}]
            for _ in range(2):
                said = client.chat.completions.create(model=given["model"], messages=messages).choices[0].message
                messages += [said, {"role": "user", "content": "Are you sure?"}]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(len(said.content or "") % 7).encode())

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Agent)
print(server.server_port, flush=True)
server.serve_forever()
"""


def service() -> Any:
    """An agent that is a service in another process."""
    process = subprocess.Popen([sys.executable, "-c", SERVICE], stdout=subprocess.PIPE, text=True)
    atexit.register(process.kill)
    assert process.stdout is not None, "piped"
    port = int(process.stdout.readline())

    def agent(question: str, base_url: str, api_key: str, model: str) -> float:
        given = {"question": question, "base_url": base_url, "api_key": api_key, "model": model}
        asked = urllib.request.Request(f"http://127.0.0.1:{port}", json.dumps(given).encode())
        with urllib.request.urlopen(asked) as response:
            return float(response.read())

    return program(agent, host="0.0.0.0", public_url="http://127.0.0.1:{port}")


def score(answer: Any) -> float:
    """Returns a reward that differs between answers."""
    return len(str(answer)) % 7 / 7


AGENTS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "openai-agents": (openai_agents, ("openai-agents", "openai")),
    "langgraph": (langgraph, ("langgraph", "langchain-openai")),
    "smolagents": (smolagents, ("smolagents",)),
    "inspect-ai": (inspect_ai, ("inspect-ai",)),
    "anthropic": (anthropic, ("anthropic",)),
    "service": (service, ("openai",)),
}


def main() -> None:
    """Trains each agent, and prints a row of the table for each."""
    os.environ["INSPECT_DISPLAY"] = "none"
    for name in sys.argv[1:] or AGENTS:
        make, packages = AGENTS[name]
        versions = ", ".join(f"{each} {importlib.metadata.version(each)}" for each in packages)
        with tempfile.TemporaryDirectory() as folder:
            print(f"| {versions} | {trained(make(), Path(folder))} |", flush=True)


def trained(agents: Any, folder: Path) -> str:
    """Returns what training an agent has shown."""
    config = {**TINY, "vocab_size": VOCAB_SIZE + len(PIECES), "max_position_embeddings": 16384}
    model = init_model({**config, "eos_token_id": TOKENIZER.eos_token_id}, seed=0)
    episodes = []
    trainer = GRPOTrainer(
        model,
        None,
        GRPOConfig(output_dir=str(folder / "run"), **SETTINGS),
        ROWS,
        processing_class=TOKENIZER,
        environments=agents,
        listeners=[TraceFile(folder / "traces.jsonl"), lambda event: keep(episodes, event)],
    )
    worst = max(0.0, trainer.train().metrics["rollout/logp_diff_max"])
    calls = sum(len(turn.calls) for each in episodes for turn in each.turns)
    failed = sum(each.environment_reward is None for each in episodes)
    traces = (folder / "traces.jsonl").read_text().splitlines()
    return (
        f"{trainer.cursor.step} steps, {len(episodes)} episodes ({failed} failed), "
        f"{sum(len(each.turns) for each in episodes)} turns, {sum(len(each.branches) for each in episodes)} further "
        f"streams, {calls} calls | {worst:.1e} | {validated(traces)} of {len(traces)}"
    )


def keep(episodes: list[Any], event: Any) -> None:
    """Keeps the episodes of a rollout."""
    if isinstance(event, RolloutScored):
        episodes.extend(each for group in event.groups for each in group)


def validated(lines: list[str]) -> int:
    """Returns the number of traces that OpenEnv's model accepts, which checks each turn with its own validator."""
    from openenv.core.harness.training import TrainingTrace

    return sum(bool(TrainingTrace.model_validate_json(line).turns) for line in lines)


if __name__ == "__main__":
    main()
