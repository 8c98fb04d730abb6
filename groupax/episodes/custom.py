"""Rollouts that a function of the user's samples itself, instead of turns that are sampled and answered.

function(request) ──► request.generate(prompts) ──► completions of the engine ──► ... ──► trajectories
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from groupax.data.examples import with_values
from groupax.data.tokenizer import decode, encode_prompts, is_conversational
from groupax.engine.sequence import Sampler
from groupax.engine.sequence import Sequence as Completion
from groupax.errors import RunError
from groupax.settings.sampling import SamplingParams
from groupax.terminal.printable import short_repr
from groupax.types import Branch, Prompt, Rollout


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One rollout as a user's function has sampled it. It is checked when it is used.

    Attributes:
        prompt_ids: Token ids of its prompt, at least one.
        completion_ids: Token ids of everything after the prompt, at least one.
        logprobs: Natural log-prob of each token that was sampled; those of other tokens are ignored.
        mask: Whether the model sampled each token; None for all of them.
        columns: Values for reward functions, in addition to those of the dataset's row.
        branches: Further streams of tokens of the same rollout, which have its advantage.
    """

    prompt_ids: Any
    completion_ids: Any
    logprobs: Any
    mask: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    branches: tuple[Branch, ...] = ()


class RolloutRequest:
    """A request to a user's function: a number of rollouts for each of several rows.

    Args:
        sampler: Sampler with the weights to sample from.
        tokenizer: Tokenizer of the model.
        examples: Dataset rows with their prompts.
        params: Sampling parameters; `n` is the number of rollouts of each row, one row after the other.
        step: Number that distinguishes rollouts with the same seed.
        template_kwargs: Arguments of the chat template.
    """

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: Any,
        examples: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        step: int,
        template_kwargs: Mapping[str, Any],
    ) -> None:
        self._sampler, self._numbers = sampler, itertools.count()
        self.tokenizer, self.examples, self.params, self.step = tokenizer, examples, params, step
        self.template_kwargs = template_kwargs

    def encode(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Returns the token ids of prompts: conversations are rendered by the chat template."""
        kwargs = [self.template_kwargs if is_conversational(prompt) else {} for prompt in prompts]
        return encode_prompts(self.tokenizer, prompts, kwargs)

    def generate(self, prompts: Sequence[np.ndarray], params: SamplingParams | None = None) -> list[Completion]:
        """Samples a completion after each prompt with the policy's weights.

        Args:
            prompts: Token ids.
            params: Sampling parameters; None for those of the run. One completion is sampled whatever their `n`.
        """
        first = next(self._numbers)
        self._numbers = itertools.count(first + len(prompts))
        own = replace(params or self.params, n=1)
        sequences = self._sampler.sequences(list(prompts), own, self.step, first)
        with closing(self._sampler.session()) as session:
            session.submit(sequences)
            while session.busy:
                for sequence, _ in session.step():
                    if sequence.fault:
                        raise RunError(f"a completion of prompt {sequence.prompt_index} has no end: {sequence.fault}")
        return sequences


@dataclass(frozen=True, eq=False)
class RolloutFunction:
    """A function that samples rollouts itself.

    Attributes:
        function: Returns a trajectory for each rollout of a request, those of a row after those of the row before.
        columns: Names of the columns that its trajectories have.
        is_recorded: Whether other weights than the run's have sampled, which takes importance correction.
        eos_ids: Tokens that end a completion, which the run sets; a completion that ends otherwise was cut off.
        max_tokens: Most tokens of a prompt with its completion, which the run sets.
        vocab_size: Number of tokens of the model, which the run sets.
    """

    function: Callable[..., Sequence[Trajectory]]
    columns: Sequence[str] = ()
    is_recorded: bool = False
    eos_ids: Sequence[int] = ()
    max_tokens: int = 1 << 31
    vocab_size: int = 1 << 31


def as_rollout_function(given: Any) -> RolloutFunction | None:
    """Returns a function that samples rollouts, with its columns; None without one.

    Raises:
        ValueError: It cannot be called.
    """
    if given is None:
        return None
    if isinstance(given, RolloutFunction):
        return given
    if not callable(given):
        raise ValueError(f"rollout_func must be a function of a RolloutRequest, got {short_repr(given)}")
    function: Callable[..., Any] = given
    return RolloutFunction(function)


def custom_rollouts(
    function: RolloutFunction, request: RolloutRequest, first_prompt: int, policy_version: int
) -> Iterator[list[Rollout]]:
    """Yields the groups of the rollouts that a user's function has sampled.

    Args:
        function: The function.
        request: What it is to sample.
        first_prompt: Index of the first of the rows in its rollout.
        policy_version: Version of the weights, which is recorded in each rollout.

    Raises:
        RunError: The trajectories are not as many as requested, or one is not made of tokens and log-probs.
    """
    n, examples = request.params.n, request.examples
    trajectories = list(function.function(request))
    if len(trajectories) != n * len(examples):
        raise RunError(
            f"the function that samples rollouts returned {len(trajectories)} for {len(examples)} prompts with {n} "
            f"rollouts each; it must return {n * len(examples)}, those of a prompt after those of the prompt before"
        )
    for index, example in enumerate(examples):
        own = trajectories[n * index : n * (index + 1)]
        fields = [_fields(each, n * index + number, function) for number, each in enumerate(own)]
        texts = decode(request.tokenizer, [each["completion_ids"].tolist() for each in fields])
        yield [
            Rollout(
                prompt_index=first_prompt + index,
                sample_index=number,
                example=with_values(example, trajectory.columns),
                policy_version=policy_version,
                text=text,
                **values,
            )
            for number, (trajectory, values, text) in enumerate(zip(own, fields, texts, strict=True))
        ]


def _fields(trajectory: Trajectory, number: int, function: RolloutFunction) -> dict[str, Any]:
    """Returns the fields of a rollout that a trajectory determines.

    Raises:
        RunError: It is not made of tokens and log-probs, or lacks a column.
    """
    name = f"rollout {number} of the function that samples rollouts"
    branches = trajectory.branches
    prompt, completion = (_ids(ids, name) for ids in (trajectory.prompt_ids, trajectory.completion_ids))
    try:
        logps = np.asarray(trajectory.logprobs, np.float32)
        mask = np.ones(len(completion), bool) if trajectory.mask is None else np.asarray(trajectory.mask).astype(bool)
    except (TypeError, ValueError) as error:
        raise RunError(f"{name} has log-probs or a mask that are no numbers: {error}") from error
    if logps.shape != completion.shape or mask.shape != completion.shape:
        raise RunError(
            f"{name} has {len(completion)} tokens after the prompt, log-probs of shape {list(logps.shape)} and a mask "
            f"of shape {list(mask.shape)}; each token needs one number of both"
        )
    if not np.isfinite(logps[mask]).all() or (logps[mask] > 0).any():
        raise RunError(f"{name} has log-probs of sampled tokens that are no numbers of at most 0")
    missing = sorted(set(function.columns) - set(trajectory.columns))
    if missing:
        raise RunError(f"{name} lacks the column {missing[0]!r}; it has {', '.join(trajectory.columns) or 'none'}")
    for prompt_ids, ids in [(prompt, completion), *((each.prompt_ids, each.completion_ids) for each in branches)]:
        if len(prompt_ids) + len(ids) > function.max_tokens:
            raise RunError(
                f"{name} has {len(prompt_ids)} + {len(ids)} tokens, and the model {function.max_tokens} positions"
            )
        if max(prompt_ids.max(), ids.max()) >= function.vocab_size:
            raise RunError(f"{name} has a token that is not among the model's {function.vocab_size}")
    logps = np.where(mask, logps, np.float32(0.0))
    ended = int(completion[-1]) in function.eos_ids
    return {
        "prompt_ids": prompt,
        "completion_ids": completion,
        "policy_logps": logps,
        "sampler_logps": logps,
        "finish_reason": "stop" if ended else "length",
        "mask": mask,
        "branches": branches,
    }


def _ids(given: Any, name: str) -> np.ndarray:
    """Returns token ids.

    Raises:
        RunError: They are none, or there are no ids.
    """
    try:
        ids = np.asarray(given)
    except ValueError:  # rows of different lengths
        ids = np.zeros((0, 0))
    if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0:
        raise RunError(
            f"{name} must have token ids of its prompt and after it, at least one each, got {short_repr(given)}"
        )
    return ids.astype(np.int32)
