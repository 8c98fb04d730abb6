"""Decoding throughput: groupax's engine beside `transformers` generate, one machine, one run.

    python benchmarks/engine.py [--json] [--rows 32 128] [--repeats 3]

A 7M-parameter Qwen2-shaped model with random weights, float32, prompts of 192 tokens with 8 completions each, 128 new
tokens, sampled at temperature 1. The two take turns; medians are compared. Without torch the peer is left out.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from models import QWEN_7M, parser, show

from groupax import Engine, Model, SamplingParams, init_model, save_model

PROMPT_TOKENS, NEW_TOKENS, GROUP = 192, 128, 8


def groupax_run(model: Model, prompts: np.ndarray) -> Callable[[int], int]:
    """A function that samples with a seed and returns the number of tokens."""
    engine = Engine(model.config, model.params, model.mesh, eos_ids=())

    def run(seed: int) -> int:
        groups = engine.generate(list(prompts), SamplingParams(n=GROUP, max_tokens=NEW_TOKENS, seed=seed))
        return sum(len(sequence.tokens) for group in groups for sequence in group)

    return run


def transformers_run(folder: Path, prompts: np.ndarray) -> Callable[[int], int] | None:
    """The same through `transformers`, every row with its own prompt copy; None without torch."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        return None
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = torch.tensor(np.repeat(prompts, GROUP, axis=0))
    settings = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "max_new_tokens": NEW_TOKENS}

    def run(seed: int) -> int:
        torch.manual_seed(seed)
        with torch.no_grad():
            out = model.generate(rows, attention_mask=torch.ones_like(rows), min_new_tokens=NEW_TOKENS, **settings)
        return out.numel() - rows.numel()

    return run


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--rows", type=int, nargs="+", default=[32, 128])
    args = flags.parse_args()
    model = init_model(QWEN_7M, seed=0)
    rng = np.random.default_rng(0)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        saved = save_model(model, Path(folder) / "model")
        for num_rows in args.rows:
            prompts = rng.integers(0, 8000, (num_rows // GROUP, PROMPT_TOKENS))
            runs = {"groupax": groupax_run(model, prompts), "transformers": transformers_run(saved, prompts)}
            speeds: dict[str, list[float]] = {name: [] for name, run in runs.items() if run}
            for repeat in range(args.repeats + 1):  # the first compiles and warms up
                for name in speeds:
                    run = runs[name]
                    assert run is not None, "only runs that exist are timed"
                    started_s = time.perf_counter()
                    num_tokens = run(repeat)
                    if repeat:
                        speeds[name].append(num_tokens / (time.perf_counter() - started_s))
            medians = {name: statistics.median(values) for name, values in speeds.items()}
            for name, speed in medians.items():
                ratio = speed / medians["transformers"] if "transformers" in medians else None
                results.append({"rows": num_rows, "engine": name, "tokens_per_s": speed, "over_transformers": ratio})
    show(results, args.json)


if __name__ == "__main__":
    main()
