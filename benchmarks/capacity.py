"""A decoding step costs what is present: the same live length under small and large limits.

    python benchmarks/capacity.py [--json]

32 rows of a 7M-parameter model with prompts of 64 tokens decode 64 tokens and are then cancelled. Only `max_tokens`,
the most that each could have become, differs.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from models import QWEN_7M, parser, show

from groupax import Engine, SamplingParams, init_model

ROWS, GROUP, PROMPT_TOKENS, LIVE_TOKENS = 32, 8, 64, 64


def main() -> None:
    flags = parser(__doc__ or "")
    flags.set_defaults(repeats=7)
    args = flags.parse_args()
    model = init_model({**QWEN_7M, "max_position_embeddings": 8192}, seed=0)
    engine = Engine(model.config, model.params, model.mesh, eos_ids=())
    prompts = list(np.random.default_rng(0).integers(0, 8000, (ROWS // GROUP, PROMPT_TOKENS)).astype(np.int32))
    seconds: dict[int, list[float]] = {128: [], 4096: []}
    for repeat in range(args.repeats + 1):  # the first compiles
        for capacity, times in seconds.items():
            sequences = engine.sequences(prompts, SamplingParams(n=GROUP, max_tokens=capacity, seed=repeat))
            started_s = time.perf_counter()
            for sequence, _ in engine.updates(sequences):
                if len(sequence.tokens) >= LIVE_TOKENS:
                    sequence.cancel()
            if repeat:
                times.append(time.perf_counter() - started_s)
    medians = {capacity: statistics.median(times) for capacity, times in seconds.items()}
    rows: list[dict[str, Any]] = [
        {"max_tokens": capacity, "seconds": value, "over_128": value / medians[128]}
        for capacity, value in medians.items()
    ]
    show(rows, args.json)


if __name__ == "__main__":
    main()
