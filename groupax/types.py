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
    """Where the run stands, for rewards that change with it.

    Attributes:
        step: optimizer steps that were made.
        num_steps: optimizer steps of the whole run.
        epoch: passes over the dataset so far.
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
        prompt_index: of the prompt in its rollout.
        sample_index: of the completion in its group.
        example: the dataset row with the prompt.
        prompt_ids: token ids of the prompt.
        completion_ids: token ids of the completion, its stop token or the tokens of its stop text included.
        policy_logps: natural log-probability of each completion token under softmax(logits / temperature), by the
            engine.
        sampler_logps: the same under the truncated distribution that was drawn from.
        finish_reason: a stop token or text, or the limit of tokens.
        policy_version: optimizer steps that the sampling weights had seen.
        text: the completion as its tokens say it, its stop text included, without special tokens.
        rewards: by reward function, None where one does not apply; empty before scoring.
        advantage: NaN before scoring.
        extra: what reward functions logged of it beside its rewards.
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
        """The completion in the prompt's own form: a string, or a list with the assistant's message."""
        return [{"role": "assistant", "content": self.text}] if not isinstance(self.prompt, str) else self.text


@dataclass(frozen=True, eq=False)
class Row:
    """One completion, ready to be trained on.

    Attributes:
        group: rows of one prompt share it.
        prompt: token ids of the prompt.
        completion: token ids of the completion, its stop token included.
        mask: which completion tokens count in the loss.
        advantage: of the completion.
        rollout_logp: the engine's log-probability of each completion token under the policy that sampled it.
        old_logp: of each completion token, as in `objective.LossInputs`; None as long as the policy is the one that
            sampled it.
        ref_logp, sampler_logp, policy_mask: likewise; None where there is none, in all rows of a step alike.
        policy_version: optimizer steps that the policy had seen which sampled it.
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
