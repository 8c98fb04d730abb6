"""Sampling by a model whose `generate` is the script's own, in the place of groupax's engine.

TRL's trainer calls `model.generate` for whole batches. A script that replaces this method, or passes a model of a class
that overrides it, expects its completions to be trained on.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from groupax.compat import hf
from groupax.config import GRPOConfig
from groupax.engine.sequence import PolicySampler
from groupax.engine.sequence import Sequence as Completion
from groupax.settings.sampling import SamplingParams
from groupax.training.adapters import PolicyLearner
from groupax.types import Row

LIBRARIES = ("transformers.", "peft.")  # whose own methods are no overrides


def own_generate(model: Any) -> Callable[..., Any] | None:
    """Returns the method `generate` of a model if a script has written it; None for that of a library."""
    models = [model, model.get_base_model()] if hf.is_peft_model(model) else [model]
    is_own = any("generate" in vars(each) or _is_overridden(type(each)) for each in models)
    return model.generate if is_own else None


def _is_overridden(cls: type) -> bool:
    function = getattr(cls, "generate", None)
    if function is None or function is hf.CausalLM.generate:
        return False
    return not str(getattr(function, "__module__", "")).startswith(LIBRARIES)


class ModelSampler:
    """A sampler that calls a model's `generate` for all that it samples.

    Args:
        generate: The method.
        engine: Engine of the run, which says how sequences start and end.
        learner: Learner that computes log-probs of the completions.
        settings: Settings of the run.
        pad_id: Token for padding.
    """

    def __init__(
        self,
        generate: Callable[..., Any],
        engine: PolicySampler,
        learner: PolicyLearner,
        settings: GRPOConfig,
        pad_id: int,
    ) -> None:
        self.generate, self.engine, self.learner = generate, engine, learner
        self.settings, self.pad_id = settings, pad_id

    @property
    def params(self) -> dict[str, Any]:
        """The weights of the engine; those of the model are the learner's."""
        return self.engine.params

    @params.setter
    def params(self, params: dict[str, Any]) -> None:
        self.engine.params = params

    def release(self) -> None:
        """Frees what the engine does not need between rollouts."""
        self.engine.release()

    def sequences(
        self, prompts: list[np.ndarray], params: SamplingParams, step: int = 0, first_prompt: int = 0
    ) -> list[Completion]:
        """Returns sequences that have not started (see `Engine.sequences`)."""
        return self.engine.sequences(prompts, params, step, first_prompt)

    def session(self) -> "GenerateSession":
        """Returns a new session."""
        return GenerateSession(self)


class GenerateSession:
    """A session whose every step samples all that waits, in one call of `generate`."""

    takes_whole_batches = True

    def __init__(self, sampler: ModelSampler) -> None:
        self._sampler, self._waiting = sampler, list[Completion]()

    @property
    def busy(self) -> bool:
        """True while any sequence waits."""
        return bool(self._waiting)

    def submit(self, sequences: Iterable[Completion]) -> None:
        """Adds unstarted sequences."""
        self._waiting += sequences

    def step(self) -> Iterator[tuple[Completion, int]]:
        """Samples all completions and yields them.

        Raises:
            ValueError: The tensor that `generate` returns does not fit to the prompts.
        """
        rows, self._waiting = sorted(self._waiting, key=lambda row: (row.prompt_index, row.sample_index)), []
        for row, tokens in zip(rows, self._completions(rows), strict=True):
            ends = [index for index, token in enumerate(tokens) if token in row.stop_ids]
            row.tokens = tokens[: ends[0] + 1 if ends else None][: row.params.max_tokens]
            row.finish_reason = "stop" if row.tokens[-1] in row.stop_ids else "length"
        logps = self._logps(rows)
        for row, values in zip(rows, logps, strict=True):
            row.policy_logps = row.sampler_logps = values.tolist()
            row.versions = [0] * len(row.tokens)
            yield row, len(row.tokens)

    def close(self) -> None:
        """Drops everything that waits."""
        self._waiting = []

    def _completions(self, rows: Sequence[Completion]) -> list[list[int]]:
        import torch
        from transformers import GenerationConfig

        sampler, args = self._sampler, self._sampler.settings
        longest = max(len(row.prompt) for row in rows)
        ids = np.full((len(rows), longest), sampler.pad_id)
        mask = np.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, longest - len(row.prompt) :] = row.prompt
            mask[index, longest - len(row.prompt) :] = 1
        config = GenerationConfig(
            max_new_tokens=args.max_completion_length,
            do_sample=True,
            pad_token_id=sampler.pad_id,
            eos_token_id=list(rows[0].stop_ids),
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p or None,
            repetition_penalty=args.repetition_penalty,
        )
        with torch.no_grad():
            inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
            out = sampler.generate(**inputs, generation_config=config)
        if out.ndim != 2 or len(out) != len(rows) or out.shape[1] <= longest:
            raise ValueError(
                f"the model's own generate returned {list(out.shape)} for {len(rows)} prompts of {longest} tokens; it "
                "must return the prompts, each with a completion after it"
            )
        return out[:, longest:].tolist()

    def _logps(self, sequences: Sequence[Completion]) -> list[np.ndarray]:
        """Returns the log-probs of the completions' tokens under the policy."""
        rows = [
            Row(
                group=index,
                prompt=sequence.prompt,
                completion=np.asarray(sequence.tokens, np.int32),
                mask=np.ones(len(sequence.tokens), bool),
                advantages=np.zeros(len(sequence.tokens), np.float32),
                rollout_logp=np.zeros(len(sequence.tokens), np.float32),
            )
            for index, sequence in enumerate(sequences)
        ]
        learner = self._sampler.learner
        return learner.logprobs(learner.policy, rows)[0]
