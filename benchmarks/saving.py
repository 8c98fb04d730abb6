"""What checkpoints cost: the arithmetic recipe with `save_steps=10`, how long training waits for them.

The runs are made in one process, after one that compiles. Wall times on a busy machine differ by more than checkpoints
cost, so that the time that training waits is measured by itself too.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

from groupax import GRPOConfig, GRPOTrainer
from groupax.recipes import load_recipe
from groupax.runs.checkpoints.saver import RunSaver

SAVE_STEPS = 10


def run(folder: str, **settings: Any) -> tuple[float, float, int]:
    """Seconds of a run's loop, seconds of these that it waited for checkpoints, and how many were begun."""
    recipe = load_recipe("arithmetic")
    args = GRPOConfig.from_mapping({**recipe.config, "output_dir": folder, "progress_bar": "none", **settings})
    trainer = GRPOTrainer(recipe.model, list(recipe.reward_funcs), args, recipe.train_dataset())
    waits: list[float] = []
    save = RunSaver.save

    def timed(self: RunSaver) -> None:
        begun_s = time.perf_counter()
        save(self)
        waits.append(time.perf_counter() - begun_s)

    RunSaver.save = timed
    try:
        result = trainer.train()
    finally:
        RunSaver.save = save
    return result.train_seconds, sum(waits), len(waits)


def main() -> None:
    """Print both runs and the share."""
    with tempfile.TemporaryDirectory() as folder:
        run(str(Path(folder) / "warm_up"), save_steps=SAVE_STEPS, max_steps=20)
        without, _, _ = run(str(Path(folder) / "without"), save_interval_minutes=0.0, do_last_save=False)
        seconds, waited, count = run(str(Path(folder) / "with"), save_steps=SAVE_STEPS)
    change = seconds / without - 1
    print(f"without checkpoints {without:.1f} s, with save_steps={SAVE_STEPS} {seconds:.1f} s ({change:+.1%})")
    print(f"training waited {waited:.2f} s for {count} checkpoints: {waited / seconds:.2%} of the wall time")


if __name__ == "__main__":
    main()
