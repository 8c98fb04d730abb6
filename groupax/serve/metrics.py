"""Metrics of a server in Prometheus' text format.

What vLLM measures too has its names, which dashboards for vLLM read; the rest begins with "groupax_".
"""

from collections.abc import Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from groupax.serve.loop import EngineLoop, adapter_of

__all__ = ["CONTENT_TYPE", "Metrics"]

SECONDS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
TOKENS = tuple(float(4**power) for power in range(10))


class Metrics:
    """The metrics of one server.

    Attributes:
        requests: Finished requests, by path and status.
        seconds: Duration of each.
        prompt_tokens, generation_tokens: Tokens, by model.
        finished: Finished completions, by model and reason.
        first_token_s: Time until the first tokens of each request, by model.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_LoopCollector(loop))
        registered = {"registry": self._registry, "namespace": "groupax"}
        self.requests = Counter("requests", "Finished requests", ["path", "status"], **registered)
        self.seconds = Histogram("request_seconds", "Duration of a request", buckets=SECONDS, **registered)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens")
        self.generation_tokens = self._counter("generation_tokens", "Sampled tokens")
        self.finished = self._counter("request_success", "Finished completions", "finished_reason")
        self.first_token_s = self._histogram("time_to_first_token_seconds", "Time to the first token", SECONDS)
        between = "Time between two tokens"
        self._between_tokens_s = [
            self._histogram(name, between, tuple(bound / 10 for bound in SECONDS))
            for name in ("inter_token_latency_seconds", "time_per_output_token_seconds")  # the newer and the older name
        ]
        self._of_requests = {
            name: self._histogram(f"request_{name}", meaning, TOKENS if name in OF_TOKENS else SECONDS)
            for name, meaning in OF_REQUESTS.items()
        }
        self._whole_s = self._histogram("e2e_request_latency_seconds", "Duration of a request", SECONDS)

    def add_tokens(self, model: str, num: int, seconds: float) -> None:
        """Adds tokens of a completion that have arrived together, as if each had taken the same time."""
        for histogram in self._between_tokens_s:
            for _ in range(num):
                histogram.labels(model).observe(seconds / num)

    def add_request(self, model: str, seconds: float, values: Mapping[str, float]) -> None:
        """Adds a request whose response has ended, with values of `OF_REQUESTS`."""
        self._whole_s.labels(model).observe(seconds)
        for name, value in values.items():
            self._of_requests[name].labels(model).observe(value)

    def text(self) -> bytes:
        """Returns the response to a scrape."""
        return generate_latest(self._registry)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"vllm:{name}", meaning, ["model_name", *labels], registry=self._registry)

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"vllm:{name}", meaning, ["model_name"], buckets=buckets, registry=self._registry)


OF_REQUESTS = {
    "queue_time_seconds": "Time until the first completion of a request entered a slot",
    "prefill_time_seconds": "Time from there to the first tokens",
    "decode_time_seconds": "Time from there to the end",
    "inference_time_seconds": "Time from entering a slot to the end",
    "prompt_tokens": "Prompt tokens of a request",
    "generation_tokens": "Sampled tokens of a request",
    "max_num_generation_tokens": "Tokens of the longest completion of a request",
    "params_n": "Completions of each prompt",
    "params_max_tokens": "Limit of the tokens of a completion",
}
OF_TOKENS = OF_REQUESTS.keys() - {name for name in OF_REQUESTS if name.endswith("seconds")}


class _LoopCollector(Collector):
    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        counts, loads = self._loop.counts, self._loop.loads
        for name, meaning, field in (
            ("num_requests_running", "Sequences in slots", "num_running"),
            ("num_requests_waiting", "Sequences without a slot", "num_waiting"),
            ("kv_cache_usage_perc", "Used fraction of the KV cache", "kv_frac"),
        ):
            values = {model: getattr(load, field) for model, load in loads.items()}
            yield _gauge(f"vllm:{name}", meaning, "model_name", values)
        engines = self._loop.engines
        versions = {model: engine.version_of(adapter_of(engine, model)) for model, engine in engines.items()}
        yield _gauge("groupax_weights_version", "Version of the weights", "model", versions)
        hits = CounterMetricFamily("vllm:prefix_cache_hits", "Prompt tokens that were looked up", labels=["model_name"])
        for model in loads:
            hits.add_metric([model], engines[model].prefixes.num_reused_tokens)
        yield hits
        yield CounterMetricFamily("groupax_completions_cancelled", "Cancelled completions", counts.num_cancelled)
        yield CounterMetricFamily("groupax_chunks", "Decoded chunks", counts.num_chunks)


def _gauge(name: str, meaning: str, label: str, values: Mapping[str, float | int]) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(name, meaning, labels=[label])
    for model, value in values.items():
        gauge.add_metric([model], value)
    return gauge
