"""Metrics of a server in Prometheus' text format, and the records of requests that they are made of.

What vLLM measures too has its names, which dashboards for vLLM read; the rest begins with "groupax_".
"""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from groupax.core.terminal.printable import one_line
from groupax.serve.exchange import Delta
from groupax.serve.loop import EngineLoop

__all__ = ["CONTENT_TYPE", "Metrics", "RequestRecord"]

MAX_CHARACTERS = 200  # of a line of the log
SECONDS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
TENTHS = tuple(bound / 10 for bound in SECONDS)
TOKENS = tuple(float(4**power) for power in range(10))
# Histograms by model: meaning and buckets.
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Time to the first token", SECONDS),
    "inter_token_latency_seconds": ("Time per token between two arrivals of tokens", TENTHS),
    "e2e_request_latency_seconds": ("Duration of a request for completions", SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a request", TOKENS),
    "request_generation_tokens": ("Sampled tokens of a request", TOKENS),
}


class Metrics:
    """The metrics of one server."""

    def __init__(self, loop: EngineLoop) -> None:
        self._registry = CollectorRegistry()
        registered = {"registry": self._registry, "namespace": "groupax"}
        self.requests = Counter("requests", "Finished requests", ["path", "status"], **registered)
        self.seconds = Histogram("request_seconds", "Duration of a request", buckets=SECONDS, **registered)
        version = Gauge("weights_version", "Version of the weights", ["model"], **registered)
        version.labels(loop.names[0]).set_function(lambda: loop.engine.version)
        for name, meaning, value in (
            ("num_requests_running", "Sequences in slots", lambda: loop.counts.num_running),
            ("num_requests_waiting", "Sequences without a slot", lambda: loop.counts.num_waiting),
            ("kv_cache_usage_perc", "Used fraction of the KV cache", lambda: loop.counts.kv_frac),
        ):
            gauge = Gauge(f"vllm:{name}", meaning, ["model_name"], registry=self._registry)
            gauge.labels(loop.names[0]).set_function(value)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens")
        self.generation_tokens = self._counter("generation_tokens", "Sampled tokens")
        self.finished = self._counter("request_success", "Finished completions", "finished_reason")
        self._histograms = {
            name: Histogram(f"vllm:{name}", meaning, ["model_name"], buckets=buckets, registry=self._registry)
            for name, (meaning, buckets) in HISTOGRAMS.items()
        }

    def observe(self, name: str, model: str, value: int | float) -> None:
        """Adds a value of a model to one of `HISTOGRAMS`."""
        self._histograms[name].labels(model).observe(value)

    def text(self) -> bytes:
        """Returns the response to a scrape."""
        return generate_latest(self._registry)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"vllm:{name}", meaning, ["model_name", *labels], registry=self._registry)


@dataclass(eq=False)
class RequestRecord:
    """A request for completions, as its response proceeds, for metrics and for the log of requests.

    Attributes:
        metrics: Metrics that its tokens are added to.
        started_s: Time at which it arrived, by `time.monotonic`.
        model: Name of the model; empty until it is known.
        num_prompt_tokens: Number of tokens of all prompts.
        num_tokens: Number of tokens of each completion so far.
        finish_reasons: Reasons of the ends of completions.
        first_s: Time of the first tokens; None before.
    """

    metrics: Metrics
    started_s: float
    model: str = ""
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
        self.metrics.observe("e2e_request_latency_seconds", self.model, time.monotonic() - self.started_s)
        self.metrics.observe("request_prompt_tokens", self.model, self.num_prompt_tokens)
        self.metrics.observe("request_generation_tokens", self.model, sum(self.num_tokens.values()))

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
            self.metrics.observe("time_to_first_token_seconds", self.model, now_s - self.started_s)
        elif num_new and delta.index in self._last_s:
            self.metrics.observe(
                "inter_token_latency_seconds", self.model, (now_s - self._last_s[delta.index]) / num_new
            )
        self._last_s[delta.index] = now_s
        if delta.finish_reason is not None:
            self.finish_reasons.append(delta.finish_reason)
            self.metrics.finished.labels(self.model, delta.finish_reason).inc()
