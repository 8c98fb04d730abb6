"""TRL's `rollout_func`, a function that samples a whole batch itself. Imports no jax."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from groupax.compat.trl.config import GENERATION
from groupax.core.settings.fields import check_known
from groupax.core.settings.sampling import SamplingParams
from groupax.core.types import Prompt
from groupax.episodes.custom import RolloutFunction, RolloutRequest, Trajectory
from groupax.rewards.contract import ARGUMENTS

REQUIRED = ("completion_ids", "logprobs", "prompt_ids")


def as_rollout_function(rollout_func: Callable[..., Any], trainer: Any, columns: Sequence[str]) -> RolloutFunction:
    """Returns TRL's `rollout_func` as groupax takes it; the trainer has the request while the function runs."""

    def sample(request: RolloutRequest) -> list[Trajectory]:
        prompts = [copy.deepcopy(row["prompt"]) for row in request.examples for _ in range(request.params.n)]
        trainer.rollout_request = request
        try:
            return trajectories_of(rollout_func(prompts, trainer))
        finally:
            trainer.rollout_request = None

    return RolloutFunction(sample, columns)


def trajectories_of(output: Any) -> list[Trajectory]:
    """Returns the completions in the output of a `rollout_func`.

    Args:
        output: Token ids of prompts and completions with their log-probs, 1 in `env_mask` for each token that the model
            sampled, and further values for reward functions, as lists or one value for all completions.

    Raises:
        ValueError: It lacks one of the required keys, or has values for more or fewer completions in another one.
    """
    missing = [key for key in REQUIRED if not isinstance(output, Mapping) or key not in output]
    if missing:
        raise ValueError(f"rollout_func must return keys {missing} in its output dict")
    columns = {key: value for key, value in output.items() if key not in (*REQUIRED, "env_mask")}
    masks = output.get("env_mask")
    masks = [None] * len(output["completion_ids"]) if masks is None else masks
    counts = {key: len(output[key]) for key in REQUIRED} | {"env_mask": len(masks)}
    if len({*counts.values()}) > 1:
        raise ValueError(f"rollout_func must return one value for each completion under every key, returned {counts}")
    rows = zip(output["prompt_ids"], output["completion_ids"], output["logprobs"], masks, strict=True)
    return [
        Trajectory(
            prompt_ids,
            completion_ids,
            # servers return a list for each token, here of the sampled one alone
            [each[0] if isinstance(each, (list, tuple)) and len(each) == 1 else each for each in logprobs],
            mask,
            {name: values[index] if isinstance(values, list) else values for name, values in columns.items()},
        )
        for index, (prompt_ids, completion_ids, logprobs, mask) in enumerate(rows)
    ]


def expected_columns(rewards: Sequence[Any], known: Sequence[str]) -> list[str]:
    """Returns the arguments that reward functions need and that are not columns of the dataset."""
    supplied = {*ARGUMENTS, *known}
    needed = [
        each.name
        for reward in rewards
        if callable(reward)
        for each in inspect.signature(reward).parameters.values()
        if each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    return [name for name in dict.fromkeys(needed) if name not in supplied]


def generate_rollout_completions(
    trainer: Any,
    prompts: Sequence[Prompt],
    *,
    generation_overrides: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Samples a completion of each prompt with the policy, within a `rollout_func`.

    Args:
        trainer: The trainer that `rollout_func` has received.
        prompts: Texts, which are encoded as they are, or conversations, which the chat template renders.
        generation_overrides: Sampling parameters that differ from those of the run, by TRL's names.

    Returns:
        For each prompt its `prompt_ids`, `completion_ids`, `logprobs` and `text`.

    Raises:
        ValueError: No `rollout_func` runs, or a parameter is unknown.
    """
    request = trainer.rollout_request
    if request is None:
        raise ValueError("generate_rollout_completions samples for a rollout_func while it runs, and none does")
    ids = request.encode(list(prompts))
    completions = request.generate(ids, _overridden(request.params, generation_overrides or {}))
    return [
        {
            "prompt_ids": prompt.tolist(),
            "completion_ids": list(completion.tokens),
            "logprobs": list(completion.policy_logps),
            "text": request.tokenizer.decode(completion.tokens, skip_special_tokens=True),
        }
        for prompt, completion in zip(ids, completions, strict=True)
    ]


def _overridden(params: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    names = {**GENERATION, "max_tokens": "max_tokens", "max_new_tokens": "max_tokens"}
    for name in given:
        check_known(name, names, f"generation_overrides has {name!r}")
    return replace(params, **{names[name]: value for name, value in given.items() if value is not None})
