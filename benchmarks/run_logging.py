"""What logging costs: the arithmetic recipe with everything that is told of a run, how long training waits for it.

The run reports to TensorBoard, keeps the rollouts of every step, and diagnoses. Wall times on a busy
machine differ by more than that costs, so the time that the loop spends in its log is measured by itself, after the
first steps, which compile.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from groupax import GRPOConfig, GRPOTrainer
from groupax.events import Event, StepEnded
from groupax.recipes import load_recipe
from groupax.runs.log import RunLog

WARM_UP_STEPS = 20


class Stopwatch:
    """Adds up the wall time of calls that are not inside of one another."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.depth = 0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            begun_s = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.depth -= 1
                if not self.depth:
                    self.seconds += time.perf_counter() - begun_s

        return wrapper


def main() -> None:
    """Print the shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max_steps", type=int, default=120)
    parser.add_argument("--report_to", nargs="*", default=["tensorboard"])
    flags = parser.parse_args()
    recipe, watch = load_recipe("arithmetic"), Stopwatch()
    log_of_steps: list[tuple[float, float]] = []  # seconds in the log, wall time

    def listener(event: Event) -> None:
        if isinstance(event, StepEnded):
            log_of_steps.append((watch.seconds, time.perf_counter()))

    step, rollout = RunLog.step, RunLog.rollout
    RunLog.step, RunLog.rollout = watch.timed(step), watch.timed(rollout)
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            **recipe.config,
            "output_dir": str(Path(folder) / "run"),
            "progress_bar": "none",
            "max_steps": flags.max_steps,
            "report_to": tuple(flags.report_to),
            "track_memory": True,
        }
        trainer = GRPOTrainer(
            recipe.model,
            list(recipe.reward_funcs),
            GRPOConfig.from_mapping(settings),
            recipe.train_dataset(),
            listeners=[listener],
        )
        trainer.train()
    (first_s, begun_s), (last_s, ended_s) = log_of_steps[WARM_UP_STEPS], log_of_steps[-1]
    steps, wall_s = len(log_of_steps) - WARM_UP_STEPS - 1, ended_s - begun_s
    print(f"{steps} steps of {wall_s / steps:.2f} s, reporting to {', '.join(flags.report_to)}")
    print(f"in the log: {1e3 * (last_s - first_s) / steps:.1f} ms a step, {(last_s - first_s) / wall_s:.2%}")


if __name__ == "__main__":
    main()
