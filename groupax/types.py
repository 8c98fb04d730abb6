"""The records that the parts of a run exchange, from a sampled completion to a row of an update. Imports no jax."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Int

Prompt = str | list[dict[str, Any]]  # text, or the messages of a conversation
FinishReason = Literal["stop", "length", "abort"]
Metrics = dict[str, float]


@dataclass(frozen=True)
class TrainerState:
    """The progress of the run, for rewards that change with it.

    Attributes:
        step: Number of optimizer steps so far.
        num_steps: Number of optimizer steps of the whole run.
        epoch: Number of passes over the dataset so far.
    """

    step: int = 0
    num_steps: int = 0
    epoch: float = 0.0

    @property
    def global_step(self) -> int:
        """`step`, as transformers calls it."""
        return self.step

    @property
    def max_steps(self) -> int:
        """`num_steps`, as transformers calls it."""
        return self.num_steps


@dataclass(frozen=True, eq=False)
class Rollout:
    """One completion of one prompt, on the host.

    Attributes:
        prompt_index: Index of the prompt in its rollout.
        sample_index: Index of the completion in its group.
        example: Dataset row with the prompt.
        prompt_ids: Token ids of the prompt.
        completion_ids: Token ids of the completion, including its stop token or the tokens of its stop string.
        policy_logps: Natural log-prob of each completion token under softmax(logits / temperature), by the engine.
        sampler_logps: Log-probs under the truncated distribution that was drawn from.
        finish_reason: "stop" for a stop token or stop string, "length" for the token limit.
        policy_version: Number of optimizer steps that the sampling weights had seen.
        text: Decoded completion, including its stop string, without special tokens.
        rewards: Reward of each reward function, None where it does not apply; empty before scoring.
        advantage: Advantage; NaN before scoring.
        extra: Values that reward functions logged in addition to rewards.
    """

    prompt_index: int
    sample_index: int
    example: Mapping[str, Any]
    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    policy_logps: np.ndarray
    sampler_logps: np.ndarray
    finish_reason: FinishReason
    policy_version: int
    text: str
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    advantage: float = float("nan")
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prompt(self) -> Prompt:
        """The prompt as the dataset has it."""
        return self.example["prompt"]

    @property
    def completion(self) -> str | list[dict[str, str]]:
        """The completion in the form of the prompt: a string, or a list with the assistant's message."""
        return [{"role": "assistant", "content": self.text}] if not isinstance(self.prompt, str) else self.text


@dataclass(frozen=True, eq=False)
class Row:
    """One completion, ready to be trained on.

    Attributes:
        group: Number that the rows of one prompt share.
        prompt: Token ids of the prompt.
        completion: Token ids of the completion, including its stop token.
        mask: Completion tokens that count in the loss.
        advantage: Advantage of the completion.
        rollout_logp: The engine's log-prob of each completion token under the policy that sampled it.
        old_logp: Log-prob of each completion token as in `objective.LossInputs`; None while the policy is the one that
            sampled it.
        ref_logp, sampler_logp, policy_mask: Further values per token as in `objective.LossInputs`; None in all rows of
            a step or in none.
        policy_version: Number of optimizer steps that the sampling policy had seen.
    """

    group: int
    prompt: Int[np.ndarray, "S"]
    completion: Int[np.ndarray, "T"]
    mask: Bool[np.ndarray, "T"]
    advantage: float
    rollout_logp: Float[np.ndarray, "T"]
    old_logp: Float[np.ndarray, "T"] | None = None
    ref_logp: Float[np.ndarray, "T"] | None = None
    sampler_logp: Float[np.ndarray, "T"] | None = None
    policy_mask: Bool[np.ndarray, "T"] | None = None
    policy_version: int = 0
