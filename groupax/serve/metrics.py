"""What a server counts, in Prometheus' text format."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping

from groupax.serve.loop import EngineLoop

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """How many durations, in seconds, are at most as long as each of `SECONDS`."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds

    def lines(self, name: str) -> Iterator[str]:
        """In Prometheus' format."""
        total = 0
        for bound, count in zip([*map(str, SECONDS), "+Inf"], self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self.sum}"
        yield f"{name}_count {total}"


class Metrics:
    """Counts of one server.

    Attributes:
        requests: answered ones by path and status.
        seconds: how long each took.
        first_token_seconds: until the first tokens of each were there.
    """

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.seconds, self.first_token_seconds = Histogram(), Histogram()

    def text(self, loop: EngineLoop) -> str:
        """All of it, for a scrape."""
        lines: list[str] = []
        counts = loop.counts
        gauges = {
            "sequences_running": ("sequences in slots", counts.num_running),
            "sequences_waiting": ("sequences that wait for a slot", counts.num_waiting),
        }
        totals = {
            "prompt_tokens_total": ("tokens of prompts", counts.num_prompt_tokens),
            "completion_tokens_total": ("tokens sampled", counts.num_tokens),
            "completions_total": ("completions that came to their end", counts.num_finished),
            "completions_cancelled_total": ("completions given up", counts.num_cancelled),
            "chunks_total": ("chunks decoded", counts.num_chunks),
        }
        for kind, entries in (("gauge", gauges), ("counter", totals)):
            for name, (meaning, value) in entries.items():
                lines += _family(name, kind, meaning, {"": value})
        versions = {f'{{model="{_escaped(name)}"}}': engine.version for name, engine in loop.engines.items()}
        lines += _family("weights_version", "gauge", "of the weights", versions)
        requests = {f'{{path="{path}",status="{status}"}}': num for (path, status), num in self.requests.items()}
        lines += _family("requests_total", "counter", "answered requests", requests)
        for name, meaning, histogram in (
            ("request_seconds", "until the end of an answer", self.seconds),
            ("first_token_seconds", "until the first tokens of an answer", self.first_token_seconds),
        ):
            lines += [*_head(name, "histogram", meaning), *histogram.lines(f"groupax_{name}")]
        return "\n".join(lines) + "\n"


def _family(name: str, kind: str, meaning: str, values: Mapping[str, int | float]) -> list[str]:
    return [*_head(name, kind, meaning), *(f"groupax_{name}{labels} {value}" for labels, value in values.items())]


def _head(name: str, kind: str, meaning: str) -> list[str]:
    return [f"# HELP groupax_{name} {meaning}", f"# TYPE groupax_{name} {kind}"]


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
