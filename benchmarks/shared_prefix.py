"""What computing a prompt once for its group saves in an update.

    python benchmarks/shared_prefix.py [--json]

The 7M-parameter model, 2 prompts of 512 tokens with 8 completions of 128 tokens each: operations that the layers and
the head need, tokens that are computed, and seconds of an update, with `share_prefix` "always" and "never".
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from models import QWEN_7M, parser, show

from groupax import GRPOConfig, init_model
from groupax.core.types import Row
from groupax.models.flops import forward_flops
from groupax.runs.build import learner_settings
from groupax.training.learner import Learner

PROMPTS, PROMPT_TOKENS, GROUP, NEW_TOKENS = 2, 512, 8, 128


def main() -> None:
    args = parser(__doc__ or "").parse_args()
    model = init_model(QWEN_7M, seed=0)
    rng = np.random.default_rng(0)
    rows = []
    for group in range(PROMPTS):
        prompt = rng.integers(1, 8000, PROMPT_TOKENS)
        for _ in range(GROUP):
            completion, logps = rng.integers(1, 8000, NEW_TOKENS), np.full(NEW_TOKENS, -9.0)
            mask, advantages = np.ones(NEW_TOKENS, bool), np.full(NEW_TOKENS, rng.normal(), np.float32)
            rows.append(Row(group, prompt, completion, mask, advantages, logps))
    sequences: dict[Literal["always", "never"], list[tuple[int, list[int]]]] = {
        "always": [(PROMPT_TOKENS, [NEW_TOKENS] * GROUP)] * PROMPTS,
        "never": [(PROMPT_TOKENS, [NEW_TOKENS])] * GROUP * PROMPTS,
    }
    results: list[dict[str, Any]] = []
    for share_prefix, groups in sequences.items():
        config = GRPOConfig(beta=0.0, share_prefix=share_prefix, learning_rate=1e-6)
        learner = Learner(model, learner_settings(config), 100)
        seconds = []
        for _ in range(args.repeats + 1):  # the first compiles
            started_s = time.perf_counter()
            learner.update(rows)
            seconds.append(time.perf_counter() - started_s)
        results.append(
            {
                "share_prefix": share_prefix,
                "GFLOP": 3 * forward_flops(model.config, groups) / 1e9,
                "tokens": sum(prompt - 1 + sum(lengths) for prompt, lengths in groups),
                "update_s": statistics.median(seconds[1:]),
            }
        )
    for row in results:
        row["speedup"] = results[-1]["update_s"] / row["update_s"]
    show(results, args.json)


if __name__ == "__main__":
    main()
