"""Log-probs of prompts, computed by the engine's thread between two chunks."""

import asyncio
from collections.abc import Iterator
from functools import partial

import numpy as np
from starlette.concurrency import run_in_threadpool

from groupax.engine.engine import Engine
from groupax.engine.prompt_logps import PromptLogps, compile_for, num_columns, prompts_per_call, score
from groupax.serve.loop import EngineLoop, adapter_of
from groupax.serve.web import ApiError


class PromptScorer:
    """Computes the log-probs of prompts. Completions continue between two calls of its program.

    Args:
        loop: The engines.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._turn = asyncio.Semaphore(1)
        self._num_waiting = 0

    async def score(
        self, model: str, prompts: list[np.ndarray], temperature: float, num_alternatives: int
    ) -> list[PromptLogps]:
        """Returns the log-probs of prompts, in their order.

        Args:
            model: Name of the engine's model.
            prompts: Token ids of each prompt.
            temperature: Divisor of the logits; 0 counts as 1.
            num_alternatives: Number of alternatives to return for each token.

        Raises:
            ApiError: too many prompts wait.
            ClosedError: the loop has stopped.
        """
        if self._num_waiting + len(prompts) > self._loop.max_sequences:
            message = f"{self._num_waiting} prompts wait for their log-probs; try again later"
            raise ApiError(429, message, code="queue_full", headers={"retry-after": "1"})
        self._num_waiting += len(prompts)
        try:
            engine, found = self._loop.engines[model], {}
            for columns, indices in _batches(engine, prompts):
                await run_in_threadpool(compile_for, engine, columns)
                async with self._turn:
                    chosen = [prompts[index] for index in indices]
                    work = partial(score, engine, chosen, temperature, num_alternatives, adapter_of(engine, model))
                    results = await asyncio.wrap_future(self._loop.between_chunks(work))
                found |= dict(zip(indices, results, strict=True))
            return [found[index] for index in range(len(prompts))]
        finally:
            self._num_waiting -= len(prompts)


def _batches(engine: Engine, prompts: list[np.ndarray]) -> Iterator[tuple[int, list[int]]]:
    """Yields, for each call, a number of columns and the indices of prompts of about this length."""
    by_size: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_size.setdefault(num_columns(len(prompt)), []).append(index)
    for columns, indices in by_size.items():
        size = prompts_per_call(engine, columns)
        for first in range(0, len(indices), size):
            yield columns, indices[first : first + size]
