"""Metrics of a server in Prometheus' text format."""

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from groupax.serve.loop import EngineLoop

__all__ = ["CONTENT_TYPE", "Metrics"]

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """The metrics of one server.

    Attributes:
        requests: Finished requests, by path and status.
        seconds: Duration of each.
        first_token_seconds: Time until the first tokens of each were sampled.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_LoopCollector(loop))
        registered = {"registry": self._registry, "namespace": "groupax"}
        self.requests = Counter("requests", "Finished requests", ["path", "status"], **registered)
        self.seconds = Histogram("request_seconds", "Duration of a request", buckets=SECONDS, **registered)
        first = "Time until the first tokens of a response"
        self.first_token_seconds = Histogram("first_token_seconds", first, buckets=SECONDS, **registered)

    def text(self) -> bytes:
        """Returns the response to a scrape."""
        return generate_latest(self._registry)


class _LoopCollector(Collector):
    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        counts = self._loop.counts
        yield GaugeMetricFamily("groupax_sequences_running", "Sequences in slots", counts.num_running)
        yield GaugeMetricFamily("groupax_sequences_waiting", "Sequences waiting for a slot", counts.num_waiting)
        for name, meaning, value in (
            ("prompt_tokens", "Prompt tokens", counts.num_prompt_tokens),
            ("completion_tokens", "Sampled tokens", counts.num_tokens),
            ("completions", "Finished completions", counts.num_finished),
            ("completions_cancelled", "Cancelled completions", counts.num_cancelled),
            ("chunks", "Decoded chunks", counts.num_chunks),
        ):
            yield CounterMetricFamily(f"groupax_{name}", meaning, value)
        versions = GaugeMetricFamily("groupax_weights_version", "Version of the weights", labels=["model"])
        for name, engine in self._loop.engines.items():
            versions.add_metric([name], engine.version)
        yield versions
