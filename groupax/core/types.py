"""The records that the parts of a run exchange, from a sampled completion to a row of an update. Imports no jax."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Bool, Float, Int

Prompt = str | list[dict[str, Any]]  # text, or the messages of a conversation
# The ends that a limit imposes, so that the model did not finish.
Truncation = Literal["length", "turn_length", "max_turns", "max_tool_calls", "tool_result_too_long"]
# The ends through no fault of the model, whose episodes are left out of comparisons and of the loss.
Failure = Literal["timeout", "env_error"]
EpisodeEnd = Literal["stop", "done", Truncation, "parse_error", Failure]
FinishReason = Literal[EpisodeEnd, "abort"]
TRUNCATIONS: frozenset[FinishReason] = frozenset(get_args(Truncation))
FAILURES: frozenset[FinishReason] = frozenset(get_args(Failure))
Metrics = dict[str, float]
_ALL_TOKENS: Any = None  # the default of a mask, which becomes an array


@dataclass(frozen=True)
class TrainerState:
    """The progress of the run, for rewards that change with it."""

    step: int = 0  # optimizer steps so far
    num_steps: int = 0  # optimizer steps of the whole run
    epoch: float = 0.0  # passes over the dataset so far

    @property
    def global_step(self) -> int:
        """`step`, as transformers calls it."""
        return self.step

    @property
    def max_steps(self) -> int:
        """`num_steps`, as transformers calls it."""
        return self.num_steps


@dataclass(frozen=True, eq=False)
class Image:
    """One image, ready for the tower of a model (see `models.vision`).

    The patches that become one feature follow each other, row by row, and so do features.
    """

    digest: str  # SHA-256 of the patches and their grid in hexadecimal: the identity of what the model sees
    patches: Float[np.ndarray, "I N C"]  # values of the N patches of each of its I tiles
    grid: tuple[int, int]  # rows and columns of patches of each tile


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of a prompt or example, and where its tokens stand for their features (see `models.vision.placement`).

    Attributes:
        images: The images in their order.
        num_tokens: Number of tokens that stand for each image.
        feature_index: Index of each prompt token's feature among those of all images; -1 for text.
        positions: Coordinates (frame, row, column) of each prompt token's position; None where positions are columns.
        position_offset: What is added to the columns of all tokens after the prompt to get their positions.
    """

    images: tuple[Image, ...]
    num_tokens: tuple[int, ...]
    feature_index: Int[np.ndarray, "S"]
    positions: Int[np.ndarray, "3 S"] | None = None
    position_offset: int = 0


@dataclass(frozen=True)
class CallRecord:
    """One call of a tool."""

    name: str
    arguments: Mapping[str, Any]
    result: str  # text that the model received
    seconds: float  # wall-clock time
    error: str = ""  # description of the failure; empty if there was none


@dataclass(frozen=True)
class Turn:
    """One turn of the model: the tokens that it sampled until it stopped."""

    start: int  # index of its first token among the tokens of the completion
    end: int  # index after its last token
    text: str  # without special tokens
    calls: tuple[CallRecord, ...] = ()  # of tools, which followed from it, in their order
    reward: float = 0.0  # that the environment gave for it
    rewards: Mapping[str, float] = field(default_factory=dict)  # of functions that gave one for each turn, by name


@dataclass(frozen=True, eq=False)
class Branch:
    """A further stream of tokens of an episode, whose prompt is not the stream of its rollout.

    The fields are those of `Rollout`, and the messages of its prompt. A token that an earlier stream of the episode
    counts is not counted again.
    """

    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    policy_logps: np.ndarray
    sampler_logps: np.ndarray
    mask: np.ndarray
    turns: tuple[Turn, ...] = ()
    messages: tuple[Mapping[str, Any], ...] | None = None
    prompt: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True, eq=False)
class Rollout:
    """One completion of one prompt, on the host: an episode of one or more turns.

    The completion is everything after the prompt. Between two turns of the model stand tokens of the environment, such
    as results of tools: the model attends to them, and they count neither in the loss nor in lengths.

    Attributes:
        prompt_index: Index of the prompt in its rollout.
        sample_index: Index of the completion in its group.
        example: Dataset row with the prompt.
        prompt_ids: Token ids of the prompt.
        completion_ids: Token ids of the completion, including its stop token or the tokens of its stop string.
        policy_logps: Natural log-prob of each completion token under softmax(logits / temperature), by the engine; 0 at
            tokens of the environment.
        sampler_logps: Log-probs under the truncated distribution that was drawn from; 0 at tokens of the environment.
        finish_reason: "stop" for a stop token or stop string, "length" for the token limit; an environment or a limit
            of the episode gives the others.
        policy_version: Number of optimizer steps that the sampling weights had seen.
        text: Decoded completion, including its stop string, without special tokens.
        rewards: Reward of each reward function for the whole, None where it does not apply; empty before scoring.
        advantage: Advantage of the episode; NaN before scoring.
        extra: Values that reward functions logged in addition to rewards.
        mask: Tokens that the model sampled; all of them by default.
        turns: The turns; by default one, of all tokens.
        messages: Messages after the prompt of a conversation of several turns; None where `text` is the only one.
        environment_reward: Sum of what the environment gave for the turns and for the whole; None without any.
        environment: The environment itself, until the episode is scored; None without one.
        branches: Further streams of tokens of an episode whose program has rewritten its history, or has had several
            conversations. They have the rollout's advantage.
        images: Images of the prompt; None for a prompt of text.
        experts: Experts that its sampler chose (see `Row.experts`); None if they were not recorded.

    Raises:
        ValueError: The lengths of the fields do not fit together.
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
    mask: np.ndarray = _ALL_TOKENS
    turns: tuple[Turn, ...] = ()
    messages: tuple[Mapping[str, Any], ...] | None = None
    environment_reward: float | None = None
    environment: Any = None
    branches: tuple[Branch, ...] = ()
    images: PromptImages | None = None
    experts: Int[np.ndarray, "T LA"] | None = None

    def __post_init__(self) -> None:
        num_tokens = len(self.completion_ids)
        if self.mask is None:
            object.__setattr__(self, "mask", np.ones(num_tokens, bool))
        if not self.turns:
            object.__setattr__(self, "turns", (Turn(0, num_tokens, self.text),))
        turns, mask = self.turns, self.mask
        if mask.shape != (num_tokens,) or mask.dtype != bool:
            raise ValueError(
                f"the mask of a rollout must be a bool for each of its {num_tokens} completion tokens, got "
                f"{mask.dtype} {list(mask.shape)}"
            )
        ends = [position for turn in turns for position in (turn.start, turn.end)]
        if ends != sorted(ends) or ends[0] < 0 or ends[-1] > num_tokens:
            raise ValueError(
                f"the turns of a rollout must follow each other within its {num_tokens} completion tokens, got the "
                f"ranges {[(turn.start, turn.end) for turn in turns]}"
            )
        in_turns = np.zeros(num_tokens, bool)
        for turn in turns:
            in_turns[turn.start : turn.end] = True
        if (mask & ~in_turns).any():
            first = int(np.argmax(mask & ~in_turns))
            raise ValueError(
                f"token {first} of a rollout is marked as sampled, and it is in none of its {len(turns)} turns"
            )

    @property
    def num_sampled_tokens(self) -> int:
        """The number of tokens that the model sampled."""
        return int(self.mask.sum()) + sum(int(branch.mask.sum()) for branch in self.branches)

    @property
    def has_turns(self) -> bool:
        """True for an episode with several turns or calls of tools, False for a plain completion."""
        return len(self.turns) > 1 or self.messages is not None or any(turn.calls for turn in self.turns)

    @property
    def is_failure(self) -> bool:
        """True if a failure ended the episode, through no fault of the model."""
        return self.finish_reason in FAILURES

    @property
    def prompt(self) -> Prompt:
        """The prompt as the dataset has it."""
        return self.example["prompt"]

    @property
    def completion(self) -> str | list[dict[str, Any]]:
        """The completion in the form of the prompt: a string, or the list of messages that follow the prompt."""
        if self.messages is not None:
            return [dict(message) for message in self.messages]
        return [{"role": "assistant", "content": self.text}] if not isinstance(self.prompt, str) else self.text


@dataclass(frozen=True, eq=False)
class Row:
    """One completion, ready to be trained on.

    Attributes:
        group: Number that the rows of one prompt share.
        prompt: Token ids of the prompt.
        completion: Token ids of the completion, including its stop token.
        mask: Completion tokens that count in the loss: sampled ones, unless the whole row is left out.
        advantages: Advantage of each completion token; those of other tokens have no effect.
        rollout_logp: The engine's log-prob of each completion token under the policy that sampled it.
        old_logp: Log-prob of each completion token as in `losses.LossInputs`; None while that policy is the one that
            sampled it.
        ref_logp, sampler_logp, policy_mask: Further values per token as in `losses.LossInputs`; None in all rows of
            a step or in none.
        policy_version: Number of optimizer steps that the sampling policy had seen.
        experts: Experts that the sampler chose for the input of each completion token in each layer with experts, layer
            by layer; -1 where they were not recorded. None leaves all choices to the model that is trained.
        is_failure: Whether it counts nowhere, as if it had never been, not even in the number of rows.
        is_branch: Whether it is a further stream of the episode of the row before.
        images: Images of the prompt, and of a supervised example's completion; None without any.
    """

    group: int
    prompt: Int[np.ndarray, "S"]
    completion: Int[np.ndarray, "T"]
    mask: Bool[np.ndarray, "T"]
    advantages: Float[np.ndarray, "T"]
    rollout_logp: Float[np.ndarray, "T"]
    old_logp: Float[np.ndarray, "T"] | None = None
    ref_logp: Float[np.ndarray, "T"] | None = None
    sampler_logp: Float[np.ndarray, "T"] | None = None
    policy_mask: Bool[np.ndarray, "T"] | None = None
    policy_version: int = 0
    experts: Int[np.ndarray, "T LA"] | None = None
    is_failure: bool = False
    is_branch: bool = False
    images: PromptImages | None = None
