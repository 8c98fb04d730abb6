"""The time saved by scoring during decoding: a reward that sleeps for a second per group, and 8 groups.

    python benchmarks/reward_overlap.py [--json]

A 7M-parameter model with random weights decodes 8 groups of 4 completions, two groups at a time. The times are those of
one rollout with its rewards, after one that compiles.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from models import QWEN_7M, parser

from groupax import Engine, SamplingParams, init_model
from groupax.core.settings.rollouts import RewardSettings
from groupax.episodes.play import Prompts
from groupax.rewards.resolve import resolve_rewards
from groupax.rewards.runner import RewardRunner
from groupax.rollouts.collector import sample_groups

GROUPS, GROUP, NEW_TOKENS, SLEEP_S = 8, 4, 512, 1.0


class Texts:
    """The methods of a tokenizer that rollouts need."""

    def batch_decode(self, completions: list[list[int]], **_: Any) -> list[str]:
        """Returns the ids as words."""
        return [" ".join(map(str, ids)) for ids in completions]


def sleeps(completions: list[str]) -> list[float]:
    """Sleeps for a second, like a request to a judge."""
    time.sleep(SLEEP_S)
    return [float(len(text)) for text in completions]


def main() -> None:
    flags = parser(__doc__ or "").parse_args()
    model = init_model(QWEN_7M, seed=0)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 8000, 64).astype(np.int32) for _ in range(GROUPS)]
    engine = Engine(model.config, model.params, model.mesh, eos_ids=(8191,), max_slots=2 * GROUP)
    params = SamplingParams(n=GROUP, max_tokens=NEW_TOKENS)
    examples = [{"prompt": ""}] * GROUPS

    def timed(**settings: Any) -> dict[str, float]:
        with RewardRunner(resolve_rewards(sleeps, []), RewardSettings(**settings)) as runner:
            started_s = time.perf_counter()
            scored = runner.score(sample_groups(engine, Texts(), Prompts(examples, prompts), params, step=0))
            whole_s = time.perf_counter() - started_s
        return {"whole_s": whole_s, "decoding_s": scored.rollout_s, "waiting_for_rewards_s": scored.reward_s}

    timed()
    results = {
        "one call after the rollout per group, as without overlap": timed(reward_scope="rollout")["decoding_s"]
        + GROUPS * SLEEP_S,
        "beside decoding, one call at a time": timed(),
        "beside decoding, 4 calls at a time": timed(reward_concurrency=4),
    }
    if flags.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{GROUPS} groups, each {SLEEP_S:.0f} s of reward")
    for name, result in results.items():
        if isinstance(result, float):
            print(f"{name}: {result:.2f} s (decoding and {GROUPS} calls added up)")
        else:
            print(f"{name}: {', '.join(f'{key} {value:.2f}' for key, value in result.items())}")


if __name__ == "__main__":
    main()
