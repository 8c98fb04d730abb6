"""The same run in TRL and through `groupax.compat.trl`: reward by step, and time.

    python benchmarks/trl_curves.py MODEL [--json] [--steps 60] [--seeds 3] [--algorithm RLOO]

MODEL is the folder of a small story model. Both trainers get the same settings, prompts and reward function; only the
import differs. 2 prompts x 8 completions x 24 tokens a step in float32; the reward is the share of the letter "e". The
table has means over blocks of steps and over seeds, the spread of these means between seeds, and seconds: the median of
a step, and of the whole run with everything that is compiled or loaded.
"""

import importlib
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from models import parser, show

STARTS = ("Once upon a time", "One day, a girl", "The little dog", "Tom and his mom", "There was a big", "In the park")
NAMES = ("Lily", "Tim", "Sue", "Max")
PROMPTS = [{"prompt": f"{start} {name}"} for start in STARTS for name in NAMES]
BLOCK = 10  # steps


def share_of_e(completions: list[str], **_: Any) -> list[float]:
    """How much of each completion is the letter e."""
    return [text.count("e") / max(len(text), 1) for text in completions]


def train(library: str, algorithm: str, model: str, folder: Path, num_steps: int, seed: int) -> dict[str, Any]:
    """One run: its rewards by step, the median seconds of a step, and the seconds of all."""
    from datasets import Dataset

    trl: Any = importlib.import_module(library)
    settings = {
        "per_device_train_batch_size": 16,
        "num_generations": 8,
        "max_completion_length": 24,
        "max_steps": num_steps,
        "learning_rate": 5e-4,
        "lr_scheduler_type": "constant",
        "beta": 0.02,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "seed": seed,
    }
    times: list[float] = []

    class Clock(importlib.import_module("transformers").TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        begun_s = time.perf_counter()
        trainer = getattr(trl, f"{algorithm}Trainer")(
            model=model,
            reward_funcs=share_of_e,
            args=getattr(trl, f"{algorithm}Config")(output_dir=str(folder), **settings),
            train_dataset=Dataset.from_list(PROMPTS),
            callbacks=[Clock()],
        )
        trainer.train()
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    return {
        "rewards": rewards[:num_steps],
        "step_s": statistics.median(np.diff(times)),
        "run_s": time.perf_counter() - begun_s,
    }


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("model")
    flags.add_argument("--steps", type=int, default=60)
    flags.add_argument("--seeds", type=int, default=3)
    flags.add_argument("--algorithm", choices=["GRPO", "RLOO"], default="GRPO")
    args = flags.parse_args()
    libraries, runs = ("trl", "groupax.compat.trl"), dict[str, list[dict[str, Any]]]()
    with tempfile.TemporaryDirectory() as name:
        for library in libraries:
            for seed in range(args.seeds):
                folder = Path(name, library, str(seed))
                runs.setdefault(library, []).append(
                    train(library, args.algorithm, args.model, folder, args.steps, seed)
                )
    rows: list[dict[str, Any]] = []
    for start in range(0, args.steps, BLOCK):
        row: dict[str, Any] = {"steps": f"{start + 1}-{min(start + BLOCK, args.steps)}"}
        for library, own in runs.items():
            means = [float(np.mean(run["rewards"][start : start + BLOCK])) for run in own]
            row |= {
                library: float(np.mean(means)),
                f"{library}, spread": float(np.std(means, ddof=min(1, len(means) - 1))),
            }
        rows.append(row)
    show(rows, args.json)
    seconds: list[dict[str, Any]] = [
        {"trainer": library} | {name: statistics.median(run[name] for run in own) for name in ("step_s", "run_s")}
        for library, own in runs.items()
    ]
    show([{**row, "over_trl": seconds[0]["step_s"] / row["step_s"]} for row in seconds], args.json)


if __name__ == "__main__":
    main()
