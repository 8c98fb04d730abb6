"""Sampling of groups of completions with an engine or with servers."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from groupax.data.tokenizer import decode, special_token_ids
from groupax.engine.sequence import Sequence as Completion
from groupax.settings.sampling import SamplingParams
from groupax.types import Rollout


@runtime_checkable
class Sampler(Protocol):
    """Samples completions: an `Engine`, or servers that take its place."""

    def sequences(
        self, prompts: list[np.ndarray], params: SamplingParams, step: int = 0, first_prompt: int = 0
    ) -> list[Completion]:
        """Returns sequences that have not started (see `Engine.sequences`)."""
        ...

    def stream(self, sequences: Iterable[Completion]) -> Iterator[Completion]:
        """Runs sequences to their ends and yields each as soon as it is finished."""
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


def rollout(
    engine: Sampler,
    tokenizer: Any,
    examples: Any,
    prompt_ids: Sequence[np.ndarray],
    params: SamplingParams,
    step: int,
    policy_version: int = 0,
    first_prompt: int = 0,
) -> Generator[list[Rollout], None, None]:
    """Yields the group of each prompt as soon as its last completion is finished.

    A stop string that is a special token is treated as a stop token, since servers may omit it from their texts.

    Args:
        engine: Sampler with the weights to sample from.
        tokenizer: Tokenizer that decodes the completions.
        examples: Dataset rows by index.
        prompt_ids: Token ids of the rows' prompts.
        params: Sampling parameters; `n` is the size of a group.
        step: Number that distinguishes rollouts with the same seed.
        policy_version: Version of the weights, which is recorded in each rollout.
        first_prompt: Index of the first of these prompts in its rollout.
    """
    if params.stop:
        assert not isinstance(params.stop_token_ids, int), "made a tuple of one when it was set"
        special = special_token_ids(tokenizer, params.stop)
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *special))
    unfinished: dict[int, list[Any]] = {}
    for sequence in engine.stream(engine.sequences(list(prompt_ids), params, step, first_prompt)):
        group = unfinished.setdefault(sequence.prompt_index, [])
        group.append(sequence)
        if len(group) < params.n:
            continue
        group = sorted(unfinished.pop(sequence.prompt_index), key=lambda member: member.sample_index)
        texts = decode(tokenizer, [member.tokens for member in group])
        example = examples[sequence.prompt_index - first_prompt]
        yield [_rollout_of(*each, example, policy_version) for each in zip(group, texts, strict=True)]


def _rollout_of(completion: Any, text: str, example: Mapping[str, Any], policy_version: int) -> Rollout:
    return Rollout(
        prompt_index=completion.prompt_index,
        sample_index=completion.sample_index,
        example=example,
        prompt_ids=completion.prompt,
        completion_ids=np.asarray(completion.tokens, np.int32),
        policy_logps=np.asarray(completion.policy_logps, np.float32),
        sampler_logps=np.asarray(completion.sampler_logps, np.float32),
        finish_reason=completion.finish_reason,
        policy_version=policy_version,
        text=text,
    )
