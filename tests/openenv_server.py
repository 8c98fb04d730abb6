"""Two environments of OpenEnv's own package, served by it on loopback: `python openenv_server.py words|tools PORT`.

`words` answers texts and likes a letter; `tools` has the tools `multiply` and `fail`. `Recorded` in `openenv_small.py`
speaks the same protocol without the package.
"""

import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Said(Action):
    text: str


class Heard(Observation):
    text: str = ""


class Words(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, topic="letters", **_: Any):
        self._state = State(episode_id=episode_id)
        self.letter = "aeiou"[seed % 5]
        return Heard(text=f" Say {self.letter} ({topic}).")

    def step(self, action, timeout_s=None, **_: Any):
        if action.text.startswith("crash"):
            raise RuntimeError("crashed")
        self._state.step_count += 1
        reward = action.text.count(self.letter) / 10
        return Heard(text=f"Again, {self.letter}.", reward=reward, done=self._state.step_count == 3)

    @property
    def state(self):
        return self._state


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server: FastMCP = FastMCP("calculator")
        self._state = State()

        @server.tool
        def multiply(a: int, b: int) -> int:
            """Multiplies two integers."""
            return a * b

        @server.tool
        def fail(reason: str) -> str:
            """Fails."""
            raise ValueError(reason)

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **_: Any):
        self._state = State(episode_id=episode_id)
        return Observation(metadata={"seed": seed})

    async def step_async(self, action, timeout_s=None, **kwargs: Any):
        observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if isinstance(observation, CallToolObservation) and observation.error is None:
            observation.reward = 0.5
        return observation

    def _step_impl(self, action, timeout_s=None, **_: Any):
        return Observation(done=True)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    kinds = {"words": (Words, Said, Heard), "tools": (Tools, CallToolAction, CallToolObservation)}
    app = create_fastapi_app(*kinds[sys.argv[1]], max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="error")
