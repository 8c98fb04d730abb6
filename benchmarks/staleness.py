"""What rollouts made ahead save where rewards are slow: the arithmetic recipe with a judge that sleeps.

For each seed one run in turn (`max_staleness` 0) and one with rollouts made ahead: the recipe's own rewards and one of
weight 0 that takes some seconds per group, for all groups at the same time, as a judge behind a network would.
Steps per hour are counted from the sixth step on; the first ones compile. At the end the held-out problems are solved
greedily.

    python benchmarks/staleness.py [--seeds 0 1 2] [--staleness 0 1] [--steps 60] [--sleep 2.0] [--json]
"""

import argparse
import asyncio
import json
import logging
import tempfile
import time
from pathlib import Path

import numpy as np

from groupax import GRPOConfig, GRPOTrainer
from groupax.events import Event, StepEnded
from groupax.recipes import load_recipe

FIRST_STEPS = 5  # which compile


def run(seed: int, max_staleness: int, num_steps: int, sleep_s: float) -> dict[str, float]:
    """One run, and what came of it."""
    ends_s = []

    async def judge(completions: list[str]) -> list[float]:
        await asyncio.sleep(sleep_s)
        return [0.0] * len(completions)

    def step_end(event: Event) -> None:
        if isinstance(event, StepEnded):
            ends_s.append(time.perf_counter())

    recipe = load_recipe("arithmetic")
    rewards = [*recipe.reward_funcs, judge]
    with tempfile.TemporaryDirectory() as folder:
        own = {"output_dir": folder, "seed": seed, "max_staleness": max_staleness, "max_steps": num_steps}
        own |= {"rollout_correction": "token_truncate" if max_staleness else "none", "eval_steps": 0}
        own |= {"save_interval_minutes": 0, "do_last_save": False, "progress_bar": "none"}
        own["reward_weights"] = (*(recipe.config.get("reward_weights") or [1.0] * len(recipe.reward_funcs)), 0.0)
        args = GRPOConfig.from_mapping({**recipe.config, **own})
        data = recipe.train_dataset(), recipe.eval_dataset()
        trainer = GRPOTrainer(recipe.model, rewards, args, *data, listeners=[step_end])
        trainer.train()
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        solved = trainer.evaluate().metrics["pass@1"]
    seconds = ends_s[-1] - ends_s[FIRST_STEPS - 1]
    last = lines[-10:]
    return {
        "seed": seed,
        "max_staleness": max_staleness,
        "steps_per_hour": 3600 * (len(ends_s) - FIRST_STEPS) / seconds,
        "reward_last_10_steps": float(np.mean([line["reward"] for line in last])),
        "pass@1": solved,
        "correction_mean": float(np.mean([line.get("rollout/correction_mean", 1.0) for line in lines])),
        "wait_s": float(np.mean([line.get("time/wait_s", line["time/reward_s"]) for line in lines[FIRST_STEPS:]])),
    }


def main() -> None:
    """Print a line per run, and the means."""
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sleep", type=float, default=2.0)
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    results = []
    for seed in flags.seeds:
        for staleness in flags.staleness:
            results.append(run(seed, staleness, flags.steps, flags.sleep))
            if not flags.json:
                print(results[-1], flush=True)
    if flags.json:
        print(json.dumps(results, indent=2))
        return
    for staleness in flags.staleness:
        own = [result for result in results if result["max_staleness"] == staleness]
        means = {name: float(np.mean([result[name] for result in own])) for name in own[0] if name != "seed"}
        spread = float(np.ptp([result["reward_last_10_steps"] for result in own]))
        print(f"means: {means}, reward from lowest to highest seed {spread:.3f}")


if __name__ == "__main__":
    main()
