"""A prompt and its completion, while it is sampled. Imports no jax."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from groupax.engine.plan import Demand
from groupax.engine.prefix_cache import Place
from groupax.settings.sampling import SamplingParams
from groupax.types import FinishReason, PromptImages


@dataclass(eq=False)
class Sequence:
    """A prompt and the completion that grows after it.

    Attributes:
        prompt_index: Position of the prompt in the request; sequences of one prompt share its computation.
        sample_index: Index of the completion among those of its prompt.
        prompt: Token ids, at least one.
        params: Sampling parameters.
        stop_ids: Tokens that end the sequence.
        key: The source of its randomness, [2] uint32.
        tokens: Tokens sampled so far, an ending stop token included.
        policy_logps, sampler_logps: Natural log-probs of each token (see `sampling.Sampled`).
        alternatives: The likeliest tokens and their log-probs for each token, `params.logprobs` of them.
        versions: Version of the weights that sampled each token (see `Engine.version`).
        experts: Experts that the token before each sampled one went through in each layer with experts, layer by layer,
            [LA] int16; empty if the engine does not record them.
        finish_reason: A stop token or string, the limit of tokens, or `cancel`; None while the sequence runs.
        text: The text that the tokens add to the prompt's, without special tokens and without the stop string; empty
            until the sequence is finished, and if the engine has no tokenizer.
        request: Index of its request within a session; each request numbers its prompts from 0.
        admitted_s: Time at which it entered a slot, by `time.monotonic`; None while it waits.
        matcher: What its constraint allows after the tokens (see `constraints.ConstraintCompiler`); None without one.
        fault: Why the engine gave it up, if it did.
        adapter: Name of the engine's adapter that it is sampled with; None for the base, or without adapters.
        place: Place for the keys and values of the conversation that it is a turn of (see `Session.places`).
        images: Images of the beginning of the prompt; None for a prompt of text.
    """

    prompt_index: int
    sample_index: int
    prompt: np.ndarray
    params: SamplingParams
    stop_ids: tuple[int, ...]
    key: np.ndarray
    tokens: list[int] = field(default_factory=list)
    policy_logps: list[float] = field(default_factory=list)
    sampler_logps: list[float] = field(default_factory=list)
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    text: str = ""
    request: int = 0
    admitted_s: float | None = None
    matcher: Any = None
    fault: str = ""
    adapter: str | None = None
    place: Place | None = None
    images: PromptImages | None = None

    @property
    def group(self) -> tuple[int, int]:
        """A key that the sequences of one prompt share."""
        return self.request, self.prompt_index

    def cancel(self) -> None:
        """Ends the sequence after the next chunk, with the tokens that it has by then."""
        self.finish_reason = self.finish_reason or "abort"

    def cut(self, num_tokens: int) -> None:
        """Drops all but the first tokens."""
        lists = self.tokens, self.policy_logps, self.sampler_logps, self.alternatives, self.versions, self.experts
        for values in lists:
            del values[num_tokens:]
        if not num_tokens and self.matcher is not None:
            self.matcher.reset()


def demand_of(sequences: Iterable[Sequence]) -> Demand:
    """Returns what sequences need of the cache at most.

    Args:
        sequences: The sequences, at least one.
    """
    sizes: dict[Any, int] = {}
    longest_prompt = longest_completion = 0
    for sequence in sequences:
        # turns of conversations do not share a prompt slot: what follows the first ones differs
        shares = sequence.group if sequence.place is None else id(sequence)
        sizes[shares] = sizes.get(shares, 0) + 1
        longest_prompt = max(longest_prompt, len(sequence.prompt))
        longest_completion = max(longest_completion, sequence.params.max_tokens)
    return Demand(tuple(sizes.values()), longest_prompt - 1, longest_completion)
