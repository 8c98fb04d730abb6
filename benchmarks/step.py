"""One whole GRPO step, by phase: groupax beside TRL, one machine, one run.

    python benchmarks/step.py [--json] [--steps 4]

A 7M-parameter Qwen2-shaped model with random weights, float32: 4 prompts of 192 tokens, 8 completions each of 128
tokens, beta 0.04. Medians over the steps after the first two, which compile and warm up. Without TRL it is left out.
"""

import importlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from models import QWEN_7M, parser, show

from groupax import GRPOConfig, GRPOTrainer, init_model, save_model

PROMPT_TOKENS, NEW_TOKENS, PROMPTS, GROUP = 192, 128, 4, 8
WARM_UP = 2


def tokenizer() -> Any:
    """A tokenizer whose token i is the word "i"."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({str(i): i for i in range(QWEN_7M["vocab_size"])}, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="8191", pad_token="0", unk_token="0")


def prompts() -> list[dict[str, str]]:
    """Random prompts of exactly `PROMPT_TOKENS` tokens."""
    rng = np.random.default_rng(0)
    return [{"prompt": " ".join(map(str, rng.integers(1, 8000, PROMPT_TOKENS)))} for _ in range(64)]


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A cheap reward that varies."""
    return [float(np.mean(ids) % 1) for ids in completion_ids]


def groupax_steps(model_folder: Path, run_folder: Path, num_steps: int) -> dict[str, float]:
    """Median seconds of a step and of its phases."""
    args = GRPOConfig(
        output_dir=str(run_folder),
        prompts_per_step=PROMPTS,
        num_generations=GROUP,
        max_completion_length=NEW_TOKENS,
        max_steps=num_steps,
        beta=0.04,
        progress_bar="none",
        log_completions=False,
    )
    GRPOTrainer(model_folder, reward, args, prompts()).train()
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()][WARM_UP:]
    return {name: statistics.median(line[name] for line in lines) for name in ("step_time", *PHASES)}


PHASES = ("time/rollout_s", "time/train_s")


def trl_steps(model_folder: Path, run_folder: Path, num_steps: int) -> dict[str, float] | None:
    """Median seconds of TRL's step; None if it is not installed."""
    try:
        import torch

        trl: Any = importlib.import_module("trl")
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, TrainerCallback
    except ImportError:
        return None
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    args = trl.GRPOConfig(
        output_dir=str(run_folder),
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=NEW_TOKENS,
        max_steps=num_steps,
        beta=0.04,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1000,
    )
    trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32),
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list(prompts()),
        processing_class=tokenizer(),
        callbacks=[Clock()],
    ).train()
    return {"step_time": statistics.median(np.diff(times)[WARM_UP - 1 :])}


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--steps", type=int, default=6)
    args = flags.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(init_model(QWEN_7M, seed=0), folder / "model", tokenizer())
        ours = groupax_steps(folder / "model", folder / "ours", args.steps)
        trl = trl_steps(folder / "model", folder / "trl", args.steps)
    rows: list[dict[str, Any]] = [
        {"trainer": "groupax", "step_s": ours["step_time"], **{name: ours[name] for name in PHASES}}
    ]
    if trl:
        rows.append({"trainer": "TRL", "step_s": trl["step_time"], **dict.fromkeys(PHASES)})
        rows = [{**row, "over_trl": trl["step_time"] / row["step_s"]} for row in rows]
    show(rows, args.json)


if __name__ == "__main__":
    main()
