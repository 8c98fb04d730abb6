"""Rollouts that a function of the user's samples itself, instead of turns that are sampled and answered.

function(request) ──► request.generate(prompts) ──► completions of the engine ──► ... ──► trajectories
"""

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from groupax.core.errors import RunError
from groupax.core.settings.sampling import SamplingParams
from groupax.core.terminal.printable import short_repr
from groupax.core.types import Branch, Prompt, Rollout
from groupax.data.examples import with_values
from groupax.data.tokenizer import decode, encode_prompts, is_conversational
from groupax.engine.sequence import Sampler
from groupax.engine.sequence import Sequence as Completion


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
        failure: Why it is left out of the comparison and of the loss; empty if it counts.
    """

    prompt_ids: Any
    completion_ids: Any
    logprobs: Any
    mask: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    branches: tuple[Branch, ...] = ()
    failure: str = ""


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

        A completion that is given up, since its constraint cannot be kept, says why in `fault`.

        Args:
            prompts: Token ids.
            params: Sampling parameters; None for those of the run. One completion is sampled whatever their `n`.
        """
        first = next(self._numbers)
        self._numbers = itertools.count(first + len(prompts))
        sequences = self._sampler.sequences(list(prompts), replace(params or self.params, n=1), self.step, first)
        with closing(self._sampler.session()) as session:
            session.submit(sequences)
            while session.busy:
                list(session.step())
        for fault in sorted({sequence.fault for sequence in sequences if sequence.fault}):
            warnings.warn(f"a completion was given up: {fault}", stacklevel=2)
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
    """Returns a function that samples rollouts, with its columns; None without one."""
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
        rollouts = []
        for number, trajectory in enumerate(trajectories[n * index : n * (index + 1)]):
            values = _checked(
                trajectory, f"rollout {n * index + number} of the function that samples rollouts", function
            )
            text = decode(request.tokenizer, [values["completion_ids"].tolist()])[0]
            indices = {"prompt_index": first_prompt + index, "sample_index": number, "policy_version": policy_version}
            rollouts.append(Rollout(example=with_values(example, trajectory.columns), text=text, **indices, **values))
        yield rollouts


def _checked(trajectory: Trajectory, name: str, function: RolloutFunction) -> dict[str, Any]:
    """Returns the fields of a rollout that a trajectory determines."""
    given = trajectory
    prompt = _ids(given.prompt_ids, name)
    if given.failure and not len(given.completion_ids):  # a token that counts nowhere, since a rollout has one
        given = replace(given, completion_ids=prompt[-1:], logprobs=[0.0], mask=[False])
    completion = _ids(given.completion_ids, name)
    try:
        logps = np.asarray(given.logprobs, np.float32)
        mask = np.ones(len(completion), bool) if given.mask is None else np.asarray(given.mask).astype(bool)
    except (TypeError, ValueError) as error:
        raise RunError(f"{name} has log-probs or a mask that are not numbers: {error}") from error
    if logps.shape != completion.shape or mask.shape != completion.shape:
        raise RunError(
            f"{name} has {len(completion)} tokens after the prompt, log-probs of shape {list(logps.shape)} and a mask "
            f"of shape {list(mask.shape)}; each token needs one number of both"
        )
    if not np.isfinite(logps[mask]).all() or (logps[mask] > 0).any():
        raise RunError(f"{name} has log-probs of sampled tokens that are not numbers of at most 0")
    missing = sorted(set(function.columns) - set(given.columns))
    if missing:
        raise RunError(f"{name} lacks the column {missing[0]!r}; it has {', '.join(given.columns) or 'none'}")
    for before, after in [(prompt, completion), *((each.prompt_ids, each.completion_ids) for each in given.branches)]:
        if len(before) + len(after) > function.max_tokens:
            raise RunError(
                f"{name} has {len(before)} + {len(after)} tokens, and the model {function.max_tokens} positions"
            )
        if max(before.max(), after.max()) >= function.vocab_size:
            raise RunError(f"{name} has a token that is not among the model's {function.vocab_size}")
    logps = np.where(mask, logps, np.float32(0.0))
    end = "stop" if int(completion[-1]) in function.eos_ids else "length"
    return {
        "prompt_ids": prompt,
        "completion_ids": completion,
        "policy_logps": logps,
        "sampler_logps": logps,
        "finish_reason": "env_error" if given.failure else end,
        "mask": mask,
        "branches": given.branches,
    }


def _ids(given: Any, name: str) -> np.ndarray:
    try:
        ids = np.asarray(given)
    except ValueError:  # rows of different lengths
        ids = np.zeros((0, 0))
    if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0:
        raise RunError(
            f"{name} must have token ids of its prompt and after it, at least one each, got {short_repr(given)}"
        )
    return ids.astype(np.int32)
