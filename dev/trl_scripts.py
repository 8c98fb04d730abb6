"""Runs TRL's GRPO and RLOO scripts, notebooks and snippets with groupax, and prints a table.

    python dev/trl_scripts.py PATH_OF_A_TRL_CHECKOUT [part of a name ...] [--library trl]

Imports are changed, sizes made small (`dev/trl_runs.py`), models, datasets and environments are local
(`dev/trl_world.py`). A script counts as run if it ended, and what it saved loads with transformers and PEFT, and has
other weights than the model before.
"""

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dev import trl_runs, trl_snippets

MODEL = ("--model_name_or_path", "Qwen/Qwen3-0.6B", "--output_dir", "out")
EYES = ("--model_name_or_path", "HuggingFaceTB/SmolVLM2-2.2B-Instruct", "--output_dir", "out")
QWEN = trl_runs.QWEN_VISION_MODELS["qwen2_5_vl"]
SMALL = ("--max_steps", "2", "--learning_rate", "1e-3", "--max_completion_length", "64", "--report_to", "none")
QLORA = ("--reward_model_name_or_path", "reward_model", "--use_peft", "--lora_r", "4", "--load_in_4bit")
TOWER_TOO = ("--use_peft", "--lora_target_modules", "q_proj", "v_proj", "--log_completions")
GAME = ("--gradient-accumulation-steps", "8", "--dataset-size", "16")
INSTALLED = "trl/scripts"


@dataclass(frozen=True)
class Case:
    """A script, what its model writes (`trl_world.TURNS`), and its arguments."""

    path: str
    turns: str
    arguments: tuple[str, ...] = ()


CASES = (
    Case(
        f"{INSTALLED}/grpo.py",
        "math",
        (*MODEL, *SMALL, "--dataset_name", "trl-lib/DeepMath-103K", "--reward_funcs", "accuracy_reward"),
    ),
    Case(
        f"{INSTALLED}/grpo.py",
        "math",
        (*MODEL, *SMALL, "--dataset_name", "trl-lib/tldr", *QLORA),
    ),
    Case(
        f"{INSTALLED}/rloo.py",
        "math",
        (*MODEL, *SMALL, "--dataset_name", "trl-lib/DeepMath-103K", "--reward_funcs", "think_format_reward"),
    ),
    Case("examples/scripts/gspo.py", "math", (*MODEL, *SMALL, "--use_peft", "--importance_sampling_level", "sequence")),
    Case("examples/scripts/grpo_continuous_batching.py", "math", (*MODEL, *SMALL)),
    Case("examples/scripts/grpo_agent.py", "sql", (*MODEL, *SMALL, "--use_vllm", "True", "--vllm_mode", "colocate")),
    Case("examples/scripts/grpo_2048.py", "2048"),
    Case("examples/scripts/rloo.py", "math"),
    Case("examples/scripts/grpo_vlm.py", "images", (*EYES, *SMALL, *TOWER_TOO)),
    Case("examples/scripts/grpo_vlm.py", "qwen2_5_vl", ("--model_name_or_path", QWEN, *EYES[2:], *SMALL, *TOWER_TOO)),
    Case(
        "examples/scripts/gspo_vlm.py",
        "images",
        (*EYES, *SMALL, "--importance_sampling_level", "sequence", "--loss_type", "grpo"),
    ),
    Case("examples/scripts/openenv/catch.py", "catch", ("--env-mode", "space", "--dataset-size", "8")),
    Case("examples/scripts/openenv/echo.py", "echo"),
    Case("examples/scripts/openenv/multi_env.py", "games"),
    Case("examples/scripts/openenv/wordle.py", "wordle", GAME),
    Case(
        "examples/scripts/openenv/sudoku.py",
        "sudoku",
        (
            "--gradient-accumulation-steps",
            "8",
            "--dataset-size",
            "2",
            "--max-completion-length",
            "64",
            "--warmup-steps",
            "0",
        ),
    ),
    Case(
        "examples/scripts/openenv/browsergym_llm.py",
        "browser",
        (*GAME, "--max-completion-length", "64", "--warmup-steps", "1"),
    ),
    Case("examples/scripts/openenv/carla.py", "car", ("--env-urls", "a", "b", "c", "d")),
    Case("examples/scripts/openreward/seta.py", "sql"),
    Case("examples/scripts/harbor/data_agent.py", "sql"),
    Case("examples/scripts/openenv/opencode.py", "sql"),
    Case("examples/scripts/async_grpo.py", "math"),
    Case("examples/notebooks/grpo_agent.ipynb", "sql"),
    Case("examples/notebooks/grpo_rnj_1_instruct.ipynb", "answers"),
    Case("examples/notebooks/grpo_qwen3_vl.ipynb", "qwen3_vl"),
    Case("examples/notebooks/grpo_trl_lora_qlora.ipynb", "math"),
    Case("examples/notebooks/openenv_sudoku_grpo.ipynb", "sudoku"),
    Case("examples/notebooks/openenv_wordle_grpo.ipynb", "wordle"),
    *(
        Case(f"docs/source/{page}.md", "docs")
        for page in ("grpo_trainer", "rloo_trainer", "quickstart", "peft_integration", "rewards", "openenv")
    ),
)


def main() -> None:
    """Runs the cases, and prints a line of the table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("names", nargs="*", help="parts of the names of the scripts to run; all by default")
    parser.add_argument("--library", default="groupax.compat.trl", help="what to import in the place of trl")
    parser.add_argument("--worlds", type=Path, help="folder that keeps the models for the next time")
    parser.add_argument("--verbose", action="store_true", help="print what the scripts write")
    given = parser.parse_args()
    print("| script | result | saved in | largest change of a weight | s |\n|---|---|---|---|---|")
    cases = [case for case in CASES if not given.names or any(name in case.path for name in given.names)]
    with tempfile.TemporaryDirectory() as folder:
        _print_rows(cases, Path(folder), given)


def _print_rows(cases: Sequence[Case], folder: Path, given: argparse.Namespace) -> None:
    for number, case in enumerate(cases):
        world = (given.worlds or folder).absolute() / case.turns
        if not world.exists():
            trl_runs.make_world(world, case.turns)
        shutil.copytree(world, folder / str(number), symlinks=True)
        start = time.monotonic()
        outcomes = run_case(case, folder / str(number), given.checkout, given.library)
        seconds = time.monotonic() - start
        for name, outcome in outcomes.items():
            result = outcome.failure or "runs"
            change = f"{outcome.change:.1e}" if outcome.saved else ""
            print(
                f"| {name} | {result} | {outcome.saved and f'`{outcome.saved}`'} | {change} | {seconds:.0f} |",
                flush=True,
            )
            if given.verbose:
                print(outcome.output)


def run_case(case: Case, folder: Path, checkout: Path, library: str) -> dict[str, trl_runs.Outcome]:
    """Runs a script, or the snippets of a page; returns what became of each, by its name."""
    text = (checkout / case.path).read_text()
    if case.path.startswith(INSTALLED):
        text = (resources.files("trl") / "scripts" / Path(case.path).name).read_text()
    if case.path.endswith(".md"):
        return trl_snippets.run_page(folder, text, case.path, library)
    for file in (checkout / case.path).parent.glob("*.txt"):
        (folder / file.name).write_bytes(file.read_bytes())
    source = trl_runs.notebook_source(text) if case.path.endswith(".ipynb") else text
    source = trl_runs.made_small(trl_runs.with_import_changed(source, library))
    if case.turns == "images":
        source = trl_runs.without_system_prompt(source)
    change = trl_runs.mended_for_qwen3_vl if case.turns == "qwen3_vl" else trl_runs.without_parts
    source = change(source)
    peft = " --use_peft" if "--use_peft" in case.arguments else ""
    name = re.sub(r"^examples/(scripts/)?", "", case.path) + peft
    return {f"`{name}`": trl_runs.run_script(folder, source, case.arguments)}


if __name__ == "__main__":
    main()
