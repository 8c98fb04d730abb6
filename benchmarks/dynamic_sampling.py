"""What dynamic sampling is worth: the arithmetic recipe to a pass@1, with and without `filter_zero_variance`.

After every step the held-out problems are solved greedily; a run ends when the last goal is reached. Times are those
of rollouts, rewards and updates, without the evaluations.

    python benchmarks/dynamic_sampling.py [--seeds 0 1 2] [--json]
"""

import argparse
import json
import logging
import tempfile
from pathlib import Path

import numpy as np

from groupax import GRPOConfig, GRPOTrainer
from groupax.evaluation.evaluate import Evaluation
from groupax.recipes import load_recipe

GOALS = (0.8, 0.95)


class ReachedError(Exception):
    """The last goal is reached."""


class UntilSolved(GRPOTrainer):
    """Notes when each goal is reached and stops at the last."""

    reached: dict[float, int]

    def evaluate(self, params=None) -> Evaluation:
        evaluation = super().evaluate(params)
        solved = evaluation.metrics["pass@1"]
        for goal in GOALS:
            if solved >= goal:
                self.reached.setdefault(goal, self.cursor.step)
        if len(self.reached) == len(GOALS):
            raise ReachedError
        return evaluation


def run(seed: int, filter_zero_variance: bool) -> list[dict[str, float]]:
    """One run: a record per goal."""
    recipe = load_recipe("arithmetic")
    with tempfile.TemporaryDirectory() as folder:
        settings = {"output_dir": folder, "seed": seed, "filter_zero_variance": filter_zero_variance}
        args = GRPOConfig(**{**recipe.config, **settings, "eval_steps": 1, "progress_bar": "none"})
        trainer = UntilSolved(
            recipe.model, list(recipe.reward_funcs), args, recipe.train_dataset(), recipe.eval_dataset()
        )
        trainer.reached = {}
        try:
            trainer.train()
            raise SystemExit(f"seed {seed}: pass@1 {GOALS[-1]} was not reached in {args.max_steps} steps")
        except ReachedError:
            pass
        logged = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in logged if "loss" in line]
    return [record(args, steps[: trainer.reached[goal]], goal) for goal in GOALS]


def record(args: GRPOConfig, steps: list[dict[str, float]], goal: float) -> dict[str, float]:
    """What it took to reach a goal."""
    G, P = args.num_generations, args.prompts_per_step
    return {
        "goal": goal,
        "filter": args.filter_zero_variance,
        "seed": args.seed,
        "steps": len(steps),
        "rollouts": sum(line.get("filter/sampled_prompts", P) for line in steps) * G,
        "seconds": sum(line["time/rollout_s"] + line["time/reward_s"] + line["time/train_s"] for line in steps),
        "groups_without_signal": float(np.mean([line["frac_reward_zero_std"] for line in steps])),
        "tokens_of_full_batch": float(
            np.mean([line["loss_tokens"] / (P * G * line["completions/mean_length"]) for line in steps])
        ),
    }


def main() -> None:
    """Print a line per run and the means."""
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    run(99, True)  # compiles the programs of both
    results = [line for seed in options.seeds for on in (False, True) for line in run(seed, on)]
    if options.json:
        print(json.dumps(results, indent=2))
        return
    columns = ("steps", "rollouts", "seconds", "groups_without_signal", "tokens_of_full_batch")
    print("| pass@1 | filter | seed | " + " | ".join(columns) + " |\n" + "|---" * (3 + len(columns)) + "|")
    for goal in GOALS:
        for on in (False, True):
            rows = [line for line in results if line["filter"] == on and line["goal"] == goal]
            mean = {name: float(np.mean([row[name] for row in rows])) for name in columns}
            for row in [*rows, {"seed": "mean", **mean}]:
                figures = " | ".join(f"{row[name]:.4g}" for name in columns)
                print(f"| {goal} | {'on' if on else 'off'} | {row['seed']} | {figures} |")


if __name__ == "__main__":
    main()
