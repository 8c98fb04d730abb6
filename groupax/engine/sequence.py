"""A prompt and its completion, while it is sampled. Imports no jax."""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np

from groupax.core.settings.sampling import SamplingParams
from groupax.core.types import FinishReason, PromptImages
from groupax.data.tokenizer import REPLACEMENT, context_tokens, decode_after
from groupax.engine.prefix_cache import Place


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
        matcher: What its constraint allows after the tokens (see `constraints.ConstraintCompiler`); None without one.
        fault: Why the engine gave it up, if it did.
        adapter: Name of the engine's adapter that it is sampled with; None for the base, or without adapters.
        place: Place for the keys and values of the conversation that it is a turn of (see `Session.converse`).
        generation: Generation of the weights that it started with (see `prefix_cache.PrefixCache`).
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
    matcher: Any = None
    fault: str = ""
    adapter: str | None = None
    place: Place | None = None
    generation: int = 0
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


def check_request(
    prompts: Iterable[Any], params: SamplingParams, max_positions: int, vocab_size: int, has_tokenizer: bool
) -> None:
    """Checks that a model with this many positions and tokens can continue prompts.

    Raises:
        ValueError: A prompt or an option is not one that the model takes.
    """
    for index, prompt in enumerate(map(np.asarray, prompts)):
        if prompt.ndim != 1:
            raise ValueError(
                f"prompt {index} is an array of the shape {prompt.shape}; a prompt is one row of token ids, "
                "several are a list of such rows or an array of two dims"
            )
        if prompt.size == 0:
            raise ValueError(f"prompt {index} has no tokens; the model needs at least one to continue from")
        if prompt.size + params.max_tokens > max_positions:
            raise ValueError(
                f"prompt {index} has {prompt.size} tokens, which with max_tokens {params.max_tokens} exceeds the "
                f"model's {max_positions} positions; shorten the prompt or lower max_tokens"
            )
        if prompt.min() < 0 or prompt.max() >= vocab_size:
            raise ValueError(
                f"prompt {index} has token ids from {prompt.min()} to {prompt.max()}; the model's vocabulary has "
                f"{vocab_size} tokens: is this its tokenizer?"
            )
    if params.stop and not has_tokenizer:
        raise ValueError(f"stop strings ({', '.join(map(repr, params.stop))}) need a tokenizer; give the Engine one")
    outside = [token for token in params.logit_bias if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"logit_bias names tokens {outside}; the vocabulary has {vocab_size}")


Decode = Callable[[Many[int]], str]
# Characters that may differ at the start of a text that is decoded from the middle of its tokens.
SPARE_CHARACTERS = 8


def finish(sequence: Sequence, tokenizer: Any, num_before: int) -> None:
    """Looks for stop strings in the tokens after the first `num_before`, and sets the text of a finished sequence."""
    stop, min_tokens = sequence.params.stop, sequence.params.min_tokens
    if tokenizer is None:
        return
    text_of = partial(decode_after, tokenizer, context_tokens(tokenizer, sequence.prompt))
    if stop and sequence.finish_reason != "abort":
        kept = find_stop(text_of, sequence.tokens, num_before, stop, min_tokens)
        if kept is not None:
            sequence.cut(kept)
            sequence.finish_reason = "stop"
    if sequence.finish_reason:
        sequence.text = text_of(sequence.tokens)
        if stop:
            exempt = exempt_length(text_of, sequence.tokens, min_tokens)
            sequence.text = text_before_stop(sequence.text, stop, exempt)


def find_stop(decode: Decode, tokens: Many[int], num_checked: int, stop: Many[str], min_tokens: int) -> int | None:
    """Returns the number of tokens up to the end of the first stop string; None if there is none.

    A stop string may straddle tokens. Only one that ends after the text of the first `min_tokens` tokens counts. The
    result does not depend on how many tokens are checked together.
    """
    first = max(num_checked, min_tokens) + 1
    if len(tokens) < first or not any(end in _recent_text(decode, tokens, first - 1, stop) for end in stop):
        return None
    exempt = exempt_length(decode, tokens, min_tokens)
    if _first_stop(decode(tokens), stop, exempt) is None:
        return None
    low, high = first, len(tokens)  # more tokens never remove a text, so bisection finds the fewest
    while low < high:
        middle = (low + high) // 2
        if _first_stop(decode(tokens[:middle]), stop, exempt) is None:
            low = middle + 1
        else:
            high = middle
    return low


def text_before_stop(text: str, stop: Many[str], exempt: int = 0) -> str:
    """Returns the text before the first stop string that ends after the first `exempt` characters."""
    return text[: _first_stop(text, stop, exempt)]


def exempt_length(decode: Decode, tokens: Many[int], min_tokens: int) -> int:
    """Returns the length of the text of the first `min_tokens` tokens, in which stop strings do not count."""
    return len(decode(tokens[:min_tokens]).rstrip(REPLACEMENT)) if min_tokens else 0


def _recent_text(decode: Decode, tokens: Many[int], num_checked: int, stop: Many[str]) -> str:
    """Returns the end of the text, with every stop string that ends after the tokens that were checked.

    Only this end is decoded, so that long completions are not decoded again and again.
    """
    needed = max(map(len, stop)) + SPARE_CHARACTERS
    num_before = needed
    while num_before < num_checked:
        if len(decode(tokens[num_checked - num_before : num_checked])) >= needed:
            return decode(tokens[num_checked - num_before :])
        num_before *= 2
    return decode(tokens)


def _first_stop(text: str, stop: Many[str], exempt: int) -> int | None:
    """Returns the start of the first stop string that ends after the exempt characters."""
    starts = [text.find(end, max(exempt - len(end) + 1, 0)) for end in stop]
    return min((start for start in starts if start >= 0), default=None)


@runtime_checkable
class SamplingSession(Protocol):
    """Sequences that are sampled together, to which others are added while they run."""

    @property
    def busy(self) -> bool:
        """True while any sequence waits or runs."""
        ...

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Adds unstarted sequences."""
        ...

    def step(self) -> Iterator[tuple[Sequence, int]]:
        """Samples for a moment and yields sequences that have grown or finished, with their numbers of new tokens."""
        ...

    def close(self) -> None:
        """Drops everything that waits or runs."""
        ...


@runtime_checkable
class ConversingSession(SamplingSession, Protocol):
    """A session whose turns of conversations do not depend on each other, and which stores their keys and values."""

    def converse(self, number: int, max_prompt_tokens: int, max_tokens: int) -> list[Place]:
        """Begins conversations, and returns a place for each (see `Session.converse`)."""
        ...


@runtime_checkable
class Sampler(Protocol):
    """Samples completions: an `Engine`, or servers that take its place."""

    def sequences(
        self, prompts: list[np.ndarray], params: SamplingParams, step: int = 0, first_prompt: int = 0
    ) -> list[Sequence]:
        """Returns sequences that have not started (see `Engine.sequences`)."""
        ...

    def session(self) -> SamplingSession:
        """Returns a new session."""
        ...


@runtime_checkable
class PolicySampler(Sampler, Protocol):
    """A sampler whose weights are replaced before each rollout."""

    @property
    def params(self) -> dict[str, Any]:
        """The weights to sample from."""
        ...

    @params.setter
    def params(self, params: dict[str, Any]) -> None: ...

    def release(self) -> None:
        """Frees copies of the weights that only sampling needs; the next rollout creates them again."""
        ...


@runtime_checkable
class Cancellable(Protocol):
    """A sampler that another thread can interrupt while it waits, such as one that uses servers."""

    def cancel(self) -> None:
        """Cancels everything that is being sampled; its consumers receive a `RolloutCancelled`."""
        ...
