"""The record of an episode while it is played: a stream of tokens to which tokens are only ever appended."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from groupax.engine.prefix_cache import Place
from groupax.engine.sequence import Sequence as Completion
from groupax.episodes.rules import Kind
from groupax.tools.calls import ParsedTurn, ToolCall
from groupax.tools.runner import ToolResult
from groupax.types import CallRecord, FinishReason, Rollout, Turn


class Episode:
    """One rollout of one prompt.

    Args:
        first: Unstarted sequence of the first turn.
        example: Dataset row with the prompt.
        kind: Its tools and environment.
        max_tokens: Most tokens after the prompt.
        instance: The user's environment, if it has one and this process makes its calls.

    Attributes:
        ids, mask, policy_logps, sampler_logps: Token ids after the prompt; which of them the model sampled; and their
            log-probs, 0 for those that it did not sample.
        turns: Turns so far.
        messages: Messages after the prompt.
        tool_states: What tools that were called have opened for this episode, by their `open`; None in processes that
            do not make its calls.
        reward: Sum of the rewards of the environment; None without one, and if it failed or scores None.
        finish_reason: Reason of its end; None while it is played.
        place: Place for its keys and values between two turns, if the sampler has any.
    """

    def __init__(
        self, first: Completion, example: Mapping[str, Any], kind: Kind, max_tokens: int, instance: Any = None
    ) -> None:
        self.first, self.example, self.kind, self.instance = first, example, kind, instance
        self.max_tokens = max_tokens
        self.ids: list[int] = []
        self.mask: list[bool] = []
        self.policy_logps: list[float] = []
        self.sampler_logps: list[float] = []
        self.turns: list[Turn] = []
        self.messages: list[dict[str, Any]] = []
        self.tool_states: dict[Callable[[int], Any], Any] = {}
        self.reward: float | None = None if kind.environment is None else 0.0
        self.finish_reason: FinishReason | None = None
        self.place: Place | None = None

    @property
    def stream(self) -> np.ndarray:
        """Token ids of the prompt and of everything after it."""
        return np.concatenate([self.first.prompt, np.asarray(self.ids, np.int32)])

    @property
    def num_left(self) -> int:
        """Number of tokens that may follow."""
        return self.max_tokens - len(self.ids)

    @property
    def num_calls(self) -> int:
        """Number of tool calls that were run."""
        return sum(len(turn.calls) for turn in self.turns)

    def add_turn(self, sampled: Completion, parsed: ParsedTurn) -> None:
        """Appends the tokens of a sampled turn."""
        start = len(self.ids)
        self.ids += sampled.tokens
        self.mask += [True] * len(sampled.tokens)
        self.policy_logps += sampled.policy_logps
        self.sampler_logps += sampled.sampler_logps
        self.turns.append(Turn(start, len(self.ids), parsed.content))
        self.messages.append(_message(parsed, self.num_calls))

    def add_results(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[dict[str, Any]]:
        """Records the results of the last turn's calls, and returns them as messages."""
        ids = [call["id"] for call in self.messages[-1].get("tool_calls", ())]
        records = tuple(
            CallRecord(call.name, call.arguments, result.text, result.seconds, result.error)
            for call, result in zip(calls, results, strict=True)
        )
        rewards = [result.reward for result in results if result.reward is not None]
        self._close_turn(records, sum(rewards) if rewards else None)
        return [
            {"role": "tool", "name": call.name, "tool_call_id": call_id, "content": result.text}
            for call_id, call, result in zip(ids, calls, results, strict=True)
        ]

    def add_reward(self, reward: float | None) -> None:
        """Adds a reward of the environment to the last turn."""
        self._close_turn((), reward)

    def add_bridge(self, ids: np.ndarray, messages: Sequence[Mapping[str, Any]]) -> None:
        """Appends what stands before the next turn."""
        self.ids += ids.tolist()
        for values, value in ((self.mask, False), (self.policy_logps, 0.0), (self.sampler_logps, 0.0)):
            values += [value] * len(ids)
        self.messages += [dict(message) for message in messages]

    def _close_turn(self, calls: tuple[CallRecord, ...], reward: float | None) -> None:
        last = self.turns[-1]
        self.turns[-1] = Turn(last.start, last.end, last.text, last.calls + calls, last.reward + (reward or 0.0))
        if reward is not None and self.reward is not None:
            self.reward += reward

    def rollout(self, text: str, policy_version: int) -> Rollout:
        """Returns the finished episode.

        Args:
            text: Decoded tokens after the prompt, without special tokens.
            policy_version: Version of the weights that sampled it.
        """
        assert self.finish_reason is not None, "finished"
        is_conversation = self.kind.has_turns and not isinstance(self.example["prompt"], str)
        return Rollout(
            prompt_index=self.first.prompt_index,
            sample_index=self.first.sample_index,
            example=self.example,
            prompt_ids=self.first.prompt,
            completion_ids=np.asarray(self.ids, np.int32),
            policy_logps=np.asarray(self.policy_logps, np.float32),
            sampler_logps=np.asarray(self.sampler_logps, np.float32),
            finish_reason=self.finish_reason,
            policy_version=policy_version,
            text=text,
            mask=np.asarray(self.mask, bool),
            turns=tuple(self.turns) if self.kind.has_turns else (),
            messages=tuple(self.messages) if is_conversation else None,
            environment_reward=self.reward,
            environment=self.instance,
        )


def _message(parsed: ParsedTurn, num_calls: int) -> dict[str, Any]:
    """Returns the assistant's message of a turn.

    Args:
        parsed: The turn.
        num_calls: Number of calls of earlier turns, by which calls are numbered.
    """
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        # nine letters and digits, which is all that some templates take for an id
        message["tool_calls"] = [
            {
                "type": "function",
                "id": f"call{number:05d}",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for number, call in enumerate(parsed.calls, num_calls)
        ]
    return message
