"""A tool that runs Python code, with an interpreter for each episode. Imports no jax."""

from functools import partial
from typing import Any

from groupax.rewards.interpreter import START_S, Interpreter
from groupax.rewards.sandbox import Limits, Sandbox, check_sandbox
from groupax.tools.tool import Tool

CPU_CALLS = 20  # calls' worth of processor time of an interpreter
SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs Python code and returns what it prints, and the value of a last line that is an "
        "expression. Variables, functions and imports are kept for later calls. There is no network.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The Python code to run."}},
            "required": ["code"],
        },
    },
}


def python_tool(
    timeout_s: int | float = 5.0,
    *,
    memory_mb: int = 512,
    output_kb: int | float = 16.0,
    sandbox: Sandbox = "bwrap",
) -> Tool:
    """Returns a tool with which the model runs Python code, for `GRPOTrainer(tools=[python_tool()])`.

    Each episode that calls it gets an interpreter, which keeps variables from call to call. Hashes and `random` are
    seeded. The code has no network, no environment and no files but those of the system and of Python.

    Args:
        timeout_s: Time limit of a call. An interpreter that exceeds it is ended, and a new one starts with the next
            call, as the model reads.
        memory_mb: Memory of an interpreter.
        output_kb: Most output of a call, in thousands of characters; the middle of a longer one is left out.
        sandbox: "none" runs the code with the permissions of this process.

    Raises:
        RunError: bubblewrap is not installed, or it cannot work here.
        ValueError: A limit is not positive.
    """
    for name, value in (("timeout_s", timeout_s), ("memory_mb", memory_mb), ("output_kb", output_kb)):
        if not value > 0:
            raise ValueError(f"python_tool takes a positive {name}, got {value}")
    check_sandbox(sandbox)
    limits = Limits(seconds=float(CPU_CALLS * timeout_s), memory_bytes=memory_mb << 20)
    create = partial(Interpreter, limits, timeout_s, int(1000 * output_kb), sandbox)
    return Tool("python", Interpreter.run, SCHEMA, timeout_s=timeout_s + 2 * START_S, takes_owner=True, open=create)
