"""The record of an episode while it is played: a stream of tokens to which tokens are only ever appended."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from groupax.core.settings.rollouts import EpisodeSettings
from groupax.core.types import CallRecord, FinishReason, Rollout, Turn
from groupax.engine.prefix_cache import Place
from groupax.engine.sequence import Sequence as Completion
from groupax.episodes.environment import OpenEnvironment
from groupax.episodes.record import Question
from groupax.episodes.rules import Setup
from groupax.tools.calls import ParsedTurn, ToolCall, assistant_message
from groupax.tools.results import ToolResult
from groupax.tools.runner import Outcome
from groupax.tools.tool import Tool, match_call

SEEDS = 1 << 31


def group_seed(seed: int, step: int, prompt_index: int) -> int:
    """Returns the seed that the episodes of a group share."""
    return int(np.random.SeedSequence([seed % (1 << 64), step, prompt_index]).generate_state(1)[0]) % SEEDS


class EpisodeFailed(Exception):  # noqa: N818 - not an error of the run
    """The environment of an episode, or a program, has failed."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


class Episode:
    """One rollout of one prompt.

    Attributes:
        mask, policy_logps, sampler_logps: Which of the tokens after the prompt the model sampled; and their log-probs,
            0 for those that it did not sample.
        num_calls, num_tool_turns: Number of tool calls that were run, and of turns with any.
        turns: Turns so far.
        messages: Messages after the prompt.
        is_answered: Whether the environment's `act` has answered the last turn.
        tool_states: What tools that were called have opened for this episode, by their `open`; None in processes that
            do not make its calls.
        reward: Sum of the rewards of the environment; None without one, and if it failed or scores None.
        failure: Error after which it cannot begin again.
        finish_reason: Reason of its end; None while it is played.
        run: The `ProgramRun` that it is; None for other episodes.
    """

    def __init__(
        self,
        first: Completion,
        example: Mapping[str, Any],
        setup: Setup,
        environment: OpenEnvironment | None,
        max_tokens: int,
        num_retries: int,
        place: Place | None = None,
    ) -> None:
        self.first, self.example, self.setup, self._environment = first, example, setup, environment
        self.max_tokens, self.num_retries, self.place = max_tokens, num_retries, place
        self.num_calls = self.num_tool_turns = 0
        self._tokens = np.array(first.prompt, np.int32)  # with room for more
        self._digest = hashlib.blake2b(self._tokens.tobytes(), digest_size=8)
        self.mask: list[bool] = []
        self.policy_logps: list[float] = []
        self.sampler_logps: list[float] = []
        self.experts: list[np.ndarray | None] = []  # of each token, None where they were not recorded
        self.turns: list[Turn] = []
        self.messages: list[dict[str, Any]] = []
        self.is_answered = False
        self.tool_states: dict[Callable[[int], Any], Any] = {}
        self.reward: float | None = None if setup.environment is None else 0.0
        self.failure = None if environment is None else environment.failure
        self.finish_reason: FinishReason | None = None
        self.run: Any = None

    @property
    def stream(self) -> np.ndarray:
        """Token ids of the prompt and of everything after it."""
        return self._tokens[: len(self.first.prompt) + len(self.mask)]

    @property
    def environment(self) -> OpenEnvironment:
        """The environment of an episode that has one."""
        assert self._environment is not None, "it has one"
        return self._environment

    @property
    def index(self) -> tuple[int, int]:
        """Indices of its prompt and of its sample."""
        return self.first.prompt_index, self.first.sample_index

    @property
    def num_left(self) -> int:
        """Number of tokens that may follow."""
        return self.max_tokens - len(self.mask)

    def matched(self, call: ToolCall, seed: int) -> tuple[Tool | None, ToolCall]:
        """Returns a call with the tool of this episode, for which its tools open what they need."""
        for open_state, state in self.tool_states.items():
            if state is None:
                self.tool_states[open_state] = open_state(seed)
        tool, call = match_call(self.setup.tools, call)
        if tool is None:
            return None, call
        if tool.name in self.setup.own_tools:
            return tool.bind(self.environment.instance), call
        return tool if tool.open is None else tool.bind(self.tool_states[tool.open]), call

    def exceeds_calls(self, settings: EpisodeSettings, num_calls: int) -> bool:
        """Returns whether the calls of a new turn are more than an episode may have."""
        calls, turns = settings.max_tool_calls, settings.max_tool_turns
        is_one_more = num_calls > 0 and turns is not None and self.num_tool_turns >= turns
        return is_one_more or (calls is not None and self.num_calls + num_calls > calls)

    def question(self, what: str) -> Question:
        """Returns what is asked of its environment now."""
        return Question(self.index, len(self.turns), what, stream=self._digest.hexdigest())

    def questions(self, calls: Sequence[ToolCall]) -> list[Question]:
        """Returns the calls of its last turn as questions, and prepares for what their tools open."""
        asked, tools, with_state = self.question("call"), self.setup.tools, set(self.setup.own_tools)
        for call in calls:
            tool = tools.get(call.name)
            if tool is not None and tool.open is not None:
                self.tool_states.setdefault(tool.open, None)
                with_state.add(call.name)
        return [
            replace(asked, has_state=call.name in with_state, index=index, name=call.name, arguments=call.arguments)
            for index, call in enumerate(calls)
        ]

    def add_turn(self, sampled: Completion, parsed: ParsedTurn) -> None:
        """Appends the tokens of a sampled turn."""
        start = len(self.mask)
        self._append(np.asarray(sampled.tokens, np.int32), True, sampled.policy_logps, sampled.sampler_logps)
        self.experts += sampled.experts or [None] * len(sampled.tokens)
        self.turns.append(Turn(start, len(self.mask), parsed.content))
        calls = [(call.name, call.arguments) for call in parsed.calls]
        self.messages.append(assistant_message(parsed.content, parsed.reasoning, calls, self.num_calls))
        self.is_answered = False

    def add_results(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[dict[str, Any]]:
        """Records the results of the last turn's calls, and returns them as messages."""
        ids = [call["id"] for call in self.messages[-1].get("tool_calls", ())]
        records = tuple(
            CallRecord(call.name, call.arguments, result.text, result.seconds, result.error)
            for call, result in zip(calls, results, strict=True)
        )
        rewards = [result.reward for result in results if result.reward is not None]
        self.close_turn(records, sum(rewards) if rewards else None)
        return [
            {"role": "tool", "name": call.name, "tool_call_id": call_id, "content": result.text}
            for call_id, call, result in zip(ids, calls, results, strict=True)
        ]

    def close_turn(self, calls: tuple[CallRecord, ...], reward: float | None) -> None:
        """Adds calls and a reward to the last turn."""
        last = self.turns[-1]
        self.num_calls += len(calls)
        self.num_tool_turns += bool(calls)
        self.turns[-1] = Turn(last.start, last.end, last.text, last.calls + calls, last.reward + (reward or 0.0))
        if reward is not None and self.reward is not None:
            self.reward += reward

    def add_bridge(self, ids: np.ndarray, messages: Sequence[Mapping[str, Any]]) -> None:
        """Appends what stands before the next turn."""
        zeros = [0.0] * len(ids)
        self._append(np.asarray(ids, np.int32), False, zeros, zeros)
        self.experts += [None] * len(ids)
        self.messages += [dict(message) for message in messages]

    def _append(
        self, ids: np.ndarray, is_sampled: bool, policy_logps: Sequence[float], sampler_logps: Sequence[float]
    ) -> None:
        end = len(self.stream)
        if end + len(ids) > len(self._tokens):  # doubled, so that a token is copied a few times in all
            room = np.zeros(2 * (end + len(ids)), np.int32)
            room[:end] = self.stream
            self._tokens = room
        self._tokens[end : end + len(ids)] = ids
        self._digest.update(ids.tobytes())
        self.mask += [is_sampled] * len(ids)
        self.policy_logps += policy_logps
        self.sampler_logps += sampler_logps

    def rollout(self, policy_version: int) -> Rollout:
        """Returns the finished episode without its text."""
        assert self.finish_reason is not None, "finished"
        if not self.mask:  # of a turn that failed at its first token: one that counts nowhere
            self.add_bridge(self.first.prompt[-1:], ())
        is_text = isinstance(self.example["prompt"], str)
        return Rollout(
            prompt_index=self.first.prompt_index,
            sample_index=self.first.sample_index,
            example=self.example,
            prompt_ids=self.first.prompt,
            completion_ids=self.stream[len(self.first.prompt) :].copy(),
            policy_logps=np.asarray(self.policy_logps, np.float32),
            sampler_logps=np.asarray(self.sampler_logps, np.float32),
            finish_reason=self.finish_reason,
            policy_version=policy_version,
            text="",
            mask=np.asarray(self.mask, bool),
            turns=tuple(self.turns),
            messages=None if is_text else tuple(self.messages),
            environment_reward=self.reward,
            environment=None if self._environment is None else self._environment.instance,
            images=self.first.images,
            experts=stacked_experts(self.experts),
        )


def stacked_experts(experts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Returns the experts of all tokens, -1 where they were not recorded; None if they never were."""
    recorded = next((each for each in experts if each is not None), None)
    if recorded is None:
        return None
    missing = np.full_like(recorded, -1)
    return np.stack([missing if each is None else each for each in experts])
