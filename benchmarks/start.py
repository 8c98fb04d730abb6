"""From `groupax train` to the end of the first step, with and without compiled programs on disk.

    python benchmarks/start.py [--json] [--repeats 3]

The command is started as a user starts it, in a process of its own, on the 7M-parameter model of the other benchmarks:
4 prompts of 192 tokens, 8 completions each of 128 tokens. It counts until the first line of `metrics.jsonl` is there.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from models import QWEN_7M, parser, show
from step import GROUP, NEW_TOKENS, PROMPTS, prompts, tokenizer

from groupax import init_model, save_model

REWARD = """
def reward(completion_ids, **_):
    return [float(sum(ids) / len(ids) % 1) for ids in completion_ids]
"""


def first_step_s(folder: Path, run: str) -> float:
    """Seconds until the first step's metrics are there.

    Raises:
        RuntimeError: the command failed.
    """
    settings = {
        "model": folder / "model",
        "dataset": folder / "prompts.jsonl",
        "reward_funcs": "rewards:reward",
        "output_dir": folder / run,
        "prompts_per_step": PROMPTS,
        "num_generations": GROUP,
        "max_completion_length": NEW_TOKENS,
        "max_steps": 1,
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    command = [str(Path(sys.executable).with_name("groupax")), "train", *flags]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder / "programs"), "HF_HUB_OFFLINE": "1"}
    metrics = folder / run / "metrics.jsonl"
    start_s = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder)
    while not (metrics.exists() and metrics.stat().st_size):
        if process.poll() is not None:
            raise RuntimeError(process.communicate()[0].decode())
        time.sleep(0.01)
    took_s = time.perf_counter() - start_s
    process.communicate()
    return took_s


def main() -> None:
    args = parser(__doc__ or "").parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(init_model(QWEN_7M, seed=0), folder / "model", tokenizer())
        (folder / "rewards.py").write_text(REWARD)
        (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts()))
        cold = first_step_s(folder, "cold")
        warm = [first_step_s(folder, f"warm{index}") for index in range(args.repeats)]
    rows: list[dict[str, Any]] = [
        {"programs": "none on disk", "first_step_s": cold},
        {"programs": "on disk", "first_step_s": statistics.median(warm)},
    ]
    show(rows, args.json)


if __name__ == "__main__":
    main()
