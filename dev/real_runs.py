"""Trains a real model on its two recipes with several seeds, one run after the other, and tabulates the runs.

    python dev/real_runs.py run MODEL RUNS [--recipes instructions word_problems] [--seeds 0 1 2] [--trl]
    python dev/real_runs.py table RUNS
    python dev/real_runs.py pictures RUNS

MODEL is the folder that `dev/smollm2.py` makes. Each run is `RUNS/RECIPE-SEED`; with --trl there is the same run in TRL
in `RUNS/RECIPE-SEED-trl`. `run` skips complete runs and resumes interrupted ones (those in TRL begin again), so it may
be killed and repeated. `pictures` shows complete runs as `groupax view` does, in docs/images/view_real_*.png.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def commands(args: argparse.Namespace) -> dict[Path, list[str]]:
    """Returns the commands by the file that a complete run has."""
    found = {}
    for seed in args.seeds:
        for recipe in args.recipes:
            folder = args.runs / f"{recipe}-{seed}"
            train = [sys.executable, "-m", "groupax", "train", "--recipe", recipe, "--model", str(args.model)]
            train += ["--output_dir", str(folder), "--seed", str(seed), "--progress_bar", "none"]
            found[folder / "result.json"] = [*train, *args.flags]
            if args.trl:
                peer = folder.with_name(f"{folder.name}-trl")
                script = str(ROOT / "benchmarks" / "trl_recipe.py")
                found[peer / "model"] = [
                    sys.executable,
                    script,
                    recipe,
                    str(args.model),
                    str(peer),
                    "--seed",
                    str(seed),
                ]
    return found


def run(args: argparse.Namespace) -> None:
    """Runs what is not complete."""
    os.nice(19)
    args.runs.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    for result, command in commands(args).items():
        if result.exists():
            continue
        print(" ".join(command), flush=True)
        with (args.runs / f"{result.parent.name}.log").open("a") as log:
            code = subprocess.run(command, env=env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT).returncode
        print(f"{result.parent.name}: {'complete' if result.exists() else f'ended with code {code}'}", flush=True)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Returns the metrics of the training steps of a run."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "reward" in line]


def table(args: argparse.Namespace) -> None:
    """Prints a Markdown table of the runs in a folder: their length, and pass@1 on held-out items before and after."""
    print("| run | steps | hours | tokens/s | reward, first and last 10 steps | held-out set | before | after | p |")
    print("|---|---|---|---|---|---|---|---|---|")
    for path in sorted(args.runs.glob("*/metrics.jsonl")):
        steps = metrics_of(path.parent)
        rewards, seconds = [step["reward"] for step in steps], sum(step["step_time"] for step in steps)
        ends = [sum(part) / max(len(part), 1) for part in (rewards[:10], rewards[-10:])]
        tokens = sum(step.get("loss_tokens") or 64 * step["completions/mean_length"] for step in steps)
        about = f"{path.parent.name} | {len(steps)} | {seconds / 3600:.2f} | {tokens / max(seconds, 1):.0f}"
        about += f" | {ends[0]:.3f}, {ends[1]:.3f}"
        result = path.parent / "result.json"
        sets = json.loads(result.read_text())["sets"] if result.exists() else {}
        for name, each in sets.items():
            p = each["comparison"]["differences"]["pass@1"]["p_value"]
            print(f"| {about} | {name} | {_shown(each['before'])} | {_shown(each['after'])} | {p:.1e} |")
        if not sets:
            print(f"| {about} | | | | |")


def pictures(args: argparse.Namespace) -> None:
    """Takes a picture of the overview of each complete run, and one of the curves of all of them."""
    from view_screenshots import WIDE, Pictures, take_pictures

    runs = sorted(path.parent for path in args.runs.glob("*/result.json"))
    light: Pictures = {f"real_{run.name}": (f"overview?run={run.name}", WIDE, ("light",), "") for run in runs}
    take_pictures(runs, {**light, "real_curves": ("curves", WIDE, ("light",), "")})


def _shown(estimates: dict[str, Any]) -> str:
    estimate = estimates["pass@1"]
    return f"{estimate['value']:.3f} ({estimate['low']:.3f} to {estimate['high']:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    runner = verbs.add_parser("run")
    runner.add_argument("model", type=Path)
    runner.add_argument("runs", type=Path)
    runner.add_argument("--recipes", nargs="+", default=["instructions", "word_problems"])
    runner.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    runner.add_argument("--trl", action="store_true", help="also train in TRL")
    runner.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of groupax train")
    runner.set_defaults(verb=run)
    for name, verb in (("table", table), ("pictures", pictures)):
        reader = verbs.add_parser(name)
        reader.add_argument("runs", type=Path)
        reader.set_defaults(verb=verb)
    args = parser.parse_args()
    args.verb(args)


if __name__ == "__main__":
    main()
