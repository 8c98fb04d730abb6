"""Supervised fine-tuning in TRL and through `groupax.compat.trl`: the loss of each step, and time.

    python benchmarks/trl_sft.py MODEL DATASET [--json] [--steps 24] [--packing]

MODEL is the folder of a small story model, DATASET a JSONL file of GSM8K. Both trainers get the same settings and
examples; only the import differs. 8 examples of at most 512 tokens a step, in float32; with --packing 4 sequences of
512 tokens. The table has the largest difference of a step's losses, and seconds: the median of a step, and of the whole
run with everything that is compiled or loaded.
"""

import importlib
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from models import parser, show

NUM_EXAMPLES = 64


def examples_of(path: Path) -> list[dict[str, str]]:
    """The first problems of a file, each with its solution."""
    lines = path.read_text(encoding="utf-8").splitlines()[:NUM_EXAMPLES]
    rows = map(json.loads, lines)
    return [{"prompt": f"{row['question']}\n", "completion": row["answer"]} for row in rows]


def train(
    library: str, model: str, rows: list[dict[str, str]], folder: Path, num_steps: int, packing: bool = False
) -> dict[str, Any]:
    """One run: its losses by step, the median seconds of a step, and the seconds of all."""
    from datasets import Dataset

    trl: Any = importlib.import_module(library)
    settings = {
        "per_device_train_batch_size": 2 if packing else 4,
        "gradient_accumulation_steps": 2,
        "max_length": 512,
        "packing": packing,
        "max_steps": num_steps,
        "learning_rate": 1e-3,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "model_init_kwargs": {"dtype": "float32"},
    }
    times: list[float] = []

    class Clock(importlib.import_module("transformers").TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        begun_s = time.perf_counter()
        trainer = trl.SFTTrainer(
            model=model,
            args=trl.SFTConfig(output_dir=str(folder), **settings),
            train_dataset=Dataset.from_list(rows),
            callbacks=[Clock()],
        )
        trainer.train()
    return {
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "step_s": statistics.median(np.diff(times)),
        "run_s": time.perf_counter() - begun_s,
    }


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("model")
    flags.add_argument("dataset", type=Path)
    flags.add_argument("--steps", type=int, default=24)
    flags.add_argument("--packing", action="store_true")
    args = flags.parse_args()
    rows, runs = examples_of(args.dataset), {}
    for library in ("trl", "groupax.compat.trl"):
        with tempfile.TemporaryDirectory() as folder:
            runs[library] = train(library, args.model, rows, Path(folder), args.steps, args.packing)
    ours, theirs = (np.array(runs[library]["losses"]) for library in ("groupax.compat.trl", "trl"))
    difference = float(np.abs(ours - theirs).max())
    compared: list[dict[str, Any]] = [
        {"trainer": library, "first loss": run["losses"][0], "last loss": run["losses"][-1]}
        | {"largest difference": difference, "step_s": run["step_s"], "run_s": run["run_s"]}
        for library, run in runs.items()
    ]
    show(compared, args.json)


if __name__ == "__main__":
    main()
