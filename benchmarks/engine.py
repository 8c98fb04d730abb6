"""Decoding throughput of groupax's engine and of `transformers` generate, on one machine, in one run.

    python benchmarks/engine.py [--json] [--cases 32 128 long-tailed 0.5B] [--repeats 3]

Random weights, float32, prompts of 192 tokens with 8 completions each, sampled at temperature 1. 32 and 128 rows of 128
new tokens on a 7M-parameter Qwen2-shaped model; 128 rows on it whose lengths are geometric with mean 96, at most 512;
16 rows of 128 new tokens on the shape of Qwen2.5-0.5B. The two take turns; medians are compared. Without torch the peer
is left out.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from models import QWEN_05B, QWEN_7M, parser, show

from groupax import Engine, Model, SamplingParams, init_model, save_model

PROMPT_TOKENS, GROUP = 192, 8


@dataclass(frozen=True, eq=False)
class Case:
    """A model and the number of new tokens of each row."""

    config: dict[str, Any]
    lengths: np.ndarray


CASES = {
    "32": Case(QWEN_7M, np.full(32, 128)),
    "128": Case(QWEN_7M, np.full(128, 128)),
    "long-tailed": Case(QWEN_7M, np.minimum(np.random.default_rng(0).geometric(1 / 96, 128), 512)),
    "0.5B": Case(QWEN_05B, np.full(16, 128)),
}


def groupax_run(model: Model, prompts: np.ndarray, lengths: np.ndarray) -> Callable[[int], int]:
    """Returns a function that samples with a seed and returns the number of tokens."""
    engine = Engine(model.config, model.params, model.mesh, eos_ids=())

    def run(seed: int) -> int:
        sequences = engine.sequences(list(prompts), SamplingParams(n=GROUP, max_tokens=int(lengths.max()), seed=seed))
        for sequence, length in zip(sequences, lengths, strict=True):
            sequence.params = replace(sequence.params, max_tokens=int(length))
        return sum(len(sequence.tokens) for sequence in engine.stream(sequences))

    return run


def transformers_run(folder: Path, prompts: np.ndarray, lengths: np.ndarray) -> Callable[[int], int] | None:
    """Returns the same for `transformers`, every row with its own prompt copy; None without torch."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        return None
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = torch.tensor(np.repeat(prompts, GROUP, axis=0))
    limits = torch.tensor(lengths) + PROMPT_TOKENS
    settings = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "max_new_tokens": int(lengths.max())}

    def ended(ids: Any, _: Any, **__: Any) -> Any:
        return limits <= ids.shape[1]

    def run(seed: int) -> int:
        torch.manual_seed(seed)
        with torch.no_grad():
            mask = torch.ones_like(rows)
            model.generate(rows, attention_mask=mask, stopping_criteria=[ended], eos_token_id=None, **settings)
        return int(lengths.sum())

    return run


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    args = flags.parse_args()
    rng = np.random.default_rng(0)
    results = []
    for name in args.cases:
        case = CASES[name]
        prompts = rng.integers(0, 8000, (len(case.lengths) // GROUP, PROMPT_TOKENS)).astype(np.int32)
        model = init_model(case.config, seed=0)
        with tempfile.TemporaryDirectory() as folder:
            saved = save_model(model, Path(folder) / "model")
            peer = transformers_run(saved, prompts, case.lengths)
        runs = {"groupax": groupax_run(model, prompts, case.lengths), "transformers": peer}
        speeds: dict[str, list[float]] = {engine: [] for engine, run in runs.items() if run}
        for repeat in range(args.repeats + 1):  # the first compiles and warms up
            for engine in speeds:
                run = runs[engine]
                assert run is not None, "only runs that exist are timed"
                started_s = time.perf_counter()
                num_tokens = run(repeat)
                if repeat:
                    speeds[engine].append(num_tokens / (time.perf_counter() - started_s))
        medians = {engine: statistics.median(values) for engine, values in speeds.items()}
        for engine, speed in medians.items():
            ratio = speed / medians["transformers"] if "transformers" in medians else None
            results.append({"case": name, "engine": engine, "tokens_per_s": speed, "over_transformers": ratio})
    show(results, args.json)


if __name__ == "__main__":
    main()
