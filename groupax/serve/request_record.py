"""Records of requests, for metrics and for the log of requests."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from groupax.serve.jobs import Delta, Job
from groupax.serve.metrics import Metrics
from groupax.terminal.printable import one_line

MAX_CHARACTERS = 200


@dataclass(eq=False)
class RequestRecord:
    """A request for completions, as its response proceeds.

    Attributes:
        metrics: Metrics that its tokens are added to.
        started_s: Time at which it arrived, by `time.monotonic`.
        model: Name of the model; empty until it is known.
        job: The request in the loop; None if it needs no tokens.
        num_prompt_tokens: Number of tokens of all prompts.
        num_tokens: Number of tokens of each completion so far.
        finish_reasons: Reasons of the ends of completions.
        first_s: Time of the first tokens; None before.
    """

    metrics: Metrics
    started_s: float
    model: str = ""
    job: Job | None = None
    num_prompt_tokens: int = 0
    num_tokens: dict[int, int] = field(default_factory=dict)
    finish_reasons: list[str] = field(default_factory=list)
    first_s: float | None = None
    _last_s: dict[int, float] = field(default_factory=dict)

    def begin(self, model: str, num_prompt_tokens: int) -> None:
        """Adds what is known when the prompts are encoded."""
        self.model, self.num_prompt_tokens = model, num_prompt_tokens
        self.metrics.prompt_tokens.labels(model).inc(num_prompt_tokens)

    async def watch(self, arriving: AsyncIterator[Delta]) -> AsyncIterator[Delta]:
        """Yields the deltas of the response, and measures them."""
        async for delta in arriving:
            self._add(delta)
            yield delta

    def end(self) -> None:
        """Adds the whole request to the metrics."""
        if not self.model:
            return
        ended_s, sequences = time.monotonic(), self.job.sequences if self.job else []
        values: dict[str, float] = {
            "prompt_tokens": self.num_prompt_tokens,
            "generation_tokens": sum(self.num_tokens.values()),
            "max_num_generation_tokens": max(self.num_tokens.values(), default=0),
        }
        if sequences:
            params = sequences[0].params
            values |= {"params_n": params.n, "params_max_tokens": params.max_tokens}
        admitted_s = min((each.admitted_s for each in sequences if each.admitted_s is not None), default=None)
        if admitted_s is not None and self.first_s is not None:
            values["queue_time_seconds"] = max(0.0, admitted_s - self.started_s)
            values["prefill_time_seconds"] = max(0.0, self.first_s - admitted_s)
            values["decode_time_seconds"] = ended_s - self.first_s
            values["inference_time_seconds"] = max(0.0, ended_s - admitted_s)
        self.metrics.add_request(self.model, ended_s - self.started_s, {name: float(x) for name, x in values.items()})

    def line(self, method: str, path: str, status: int, message: str = "") -> str:
        """Returns the request as a line of the log."""
        parts = [method, path, str(status)]
        if self.model:
            parts += [f"model={self.model}", f"prompt_tokens={self.num_prompt_tokens}"]
            parts += [f"completion_tokens={sum(self.num_tokens.values())}"]
            parts += [f"finish={','.join(sorted(set(self.finish_reasons))) or 'none'}"]
        if self.first_s is not None:
            parts.append(f"first_token_s={self.first_s - self.started_s:.3f}")
        parts.append(f"seconds={time.monotonic() - self.started_s:.3f}")
        return one_line(" ".join([*parts, message]).rstrip(), MAX_CHARACTERS)

    def _add(self, delta: Delta) -> None:
        now_s, num_before = time.monotonic(), self.num_tokens.get(delta.index, 0)
        num_new = max(0, delta.start + len(delta.tokens) - num_before)
        self.num_tokens[delta.index] = num_before + num_new
        self.metrics.generation_tokens.labels(self.model).inc(num_new)
        if self.first_s is None:
            self.first_s = now_s
            self.metrics.first_token_s.labels(self.model).observe(now_s - self.started_s)
        elif num_new and delta.index in self._last_s:
            self.metrics.add_tokens(self.model, num_new, now_s - self._last_s[delta.index])
        self._last_s[delta.index] = now_s
        if delta.finish_reason is not None:
            self.finish_reasons.append(delta.finish_reason)
            self.metrics.finished.labels(self.model, delta.finish_reason).inc()
