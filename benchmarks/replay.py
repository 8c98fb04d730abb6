"""Random steps of four kinds of runs, replayed: whether the bits are equal, and how long each takes.

    python benchmarks/replay.py [--steps 20] [--runs demo adapter stale tools] [--max_steps N]
        [--folder FOLDER] [--model FOLDER]

demo is the recipe of `make demo`; adapter (LoRA on a base in nf4) and stale (max_staleness 1) are runs on the model in
--model, stories260K; tools is the recipe calculator. Runs in --folder that are complete are taken as they are. Times
are those of the replay alone, after its model, its data and its programs are loaded, and with all of that.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from groupax import GRPOTrainer
from groupax.cli.options import recorded
from groupax.cli.replay import maker
from groupax.cli.train import Train, inputs_of, train_defaults
from groupax.parallel.runtime import compilation
from groupax.replay.recorded import recorded_run
from groupax.replay.session import replay_target, settings_of
from groupax.replay.trainer import Target
from groupax.settings.command_line import parsed

STORIES = ["--max_steps", "40", "--prompts_per_step", "8", "--num_generations", "8", "--max_completion_length", "96"]
STORIES += ["--learning_rate", "2e-4", "--reward_funcs", "repetition_penalty"]
RUNS = {
    "demo": ["--recipe", "arithmetic"],
    "adapter": [*STORIES, "--lora_r", "8", "--base_weights", "nf4", "--learning_rate", "1e-3"],
    "stale": [*STORIES, "--max_staleness", "1", "--rollout_correction", "token_truncate"],
    "tools": ["--recipe", "calculator", "--max_steps", "30"],
}


def trained(kind: str, folder: Path, model: str, max_steps: int | None) -> Path:
    """Trains a run, unless it is there."""
    run = folder / kind
    if (run / "model").exists():
        return run
    stories = folder / "stories.jsonl"
    names = ("Lily", "Tom", "a cat", "the sun", "a big dog", "Mia", "Ben", "a bird")
    lines = [{"prompt": f"Once upon a time, {who} {did}"} for who in names for did in ("saw", "went to", "was")]
    stories.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = [*RUNS[kind], "--output_dir", str(run), "--progress_bar", "none"]
    options += [] if "--recipe" in options else ["--model", model, "--dataset", str(stories)]
    options += [] if max_steps is None else ["--max_steps", str(max_steps)]
    command = parsed(Train, "train", options, train_defaults(options))
    inputs = inputs_of(command)
    tools, environments = inputs.agents.load()
    dataset = inputs.dataset(command)
    args, _ = inputs.fitted(command, dataset)
    given = inputs.model, inputs.rewards, args, dataset
    trainer = GRPOTrainer(*given, tools=tools, environments=environments)
    trainer.run_folder.command = recorded(command)
    trainer.train()
    return run


def replayed(run: Path, steps: list[int]) -> list[tuple[bool, float, float]]:
    """Replays steps; returns of each whether it is equal, and its seconds after loading and in all."""
    run_record = recorded_run(run)
    found = []
    for step in steps:
        begun_s, loaded_s = time.perf_counter(), []

        def loaded(trainer: Any, seen: list[float] = loaded_s) -> None:
            del trainer
            seen += [time.perf_counter(), compilation().seconds]

        outcome = replay_target(Target(run_record, step), maker(run_record, "none"), settings_of(run_record), loaded)
        ended_s = time.perf_counter()
        compiled_s = compilation().seconds - loaded_s[1]
        found.append((outcome.is_equal, ended_s - loaded_s[0] - compiled_s, ended_s - begun_s))
        print(f"  {run.name} {step}: {found[-1]}", file=sys.stderr, flush=True)
    return found


def measure(folder: Path, kinds: list[str], num_steps: int, model: str, max_steps: int | None) -> None:
    """Prints a line per kind of run."""
    print("run         steps  equal   seconds, median  longest  with loading, median  longest")
    for kind in kinds:
        run = trained(kind, folder, model, max_steps)
        known = sorted(recorded_run(run).records)
        steps = np.random.default_rng(0).choice(known, min(num_steps, len(known)), replace=False).tolist()
        found = replayed(run, steps)
        equal = sum(is_equal for is_equal, _, _ in found)
        alone, whole = (np.array(each) for each in list(zip(*found, strict=True))[1:])
        print(
            f"{kind:10}{len(found):7}{equal:7}{np.median(alone):18.2f}{alone.max():9.2f}{np.median(whole):22.2f}"
            f"{whole.max():9.2f}",
            flush=True,
        )
        if equal < len(found):
            print("  other bits:", *(step for step, each in zip(steps, found, strict=True) if not each[0]))


def options() -> argparse.Namespace:
    default = Path(__file__).parents[2] / "shared" / "models" / "stories260K"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--runs", nargs="+", default=[*RUNS], choices=[*RUNS])
    parser.add_argument("--max_steps", type=int, help="length of the runs; their own by default")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--model", default=str(default))
    return parser.parse_args()


if __name__ == "__main__":
    given = options()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as scratch:
        given.folder = given.folder or Path(scratch)
        given.folder.mkdir(parents=True, exist_ok=True)
        measure(given.folder, given.runs, given.steps, given.model, given.max_steps)
