"""One whole GRPO step, by phase: groupax beside TRL, one machine, one run.

    python benchmarks/step.py [--json] [--steps 6]

A 7M-parameter Qwen2-shaped model with random weights: 4 prompts of 192 tokens, 8 completions each of 128 tokens, beta
0.04. groupax in float32; TRL in float32 and in bfloat16, of which the faster one counts. Medians over the steps after
the first two, which compile and warm up. Without TRL it is left out.
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
TRL_DTYPES = ("float32", "bfloat16")


def tokenizer() -> Any:
    """A tokenizer whose token i is the word "i"."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # special tokens are found inside of words too: they have numbers that are part of no prompt's
    backend = Tokenizer(models.WordLevel({str(i): i for i in range(QWEN_7M["vocab_size"])}, unk_token="8189"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="8191", pad_token="8190", unk_token="8189")


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
    GRPOTrainer(model_folder, reward, args, prompts(), processing_class=tokenizer()).train()
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()][WARM_UP:]
    return {name: statistics.median(line[name] for line in lines) for name in ("step_time", *PHASES)}


PHASES = ("time/rollout_s", "time/train_s")


def trl_step_s(model_folder: Path, run_folder: Path, num_steps: int, dtype: str) -> float | None:
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
        bf16=dtype == "bfloat16",
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1000,
    )
    trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_folder, dtype=getattr(torch, dtype)),
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list(prompts()),
        processing_class=tokenizer(),
        callbacks=[Clock()],
    ).train()
    return float(statistics.median(np.diff(times)[WARM_UP - 1 :]))


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--steps", type=int, default=6)
    args = flags.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(init_model(QWEN_7M, seed=0), folder / "model", tokenizer())
        ours = groupax_steps(folder / "model", folder / "ours", args.steps)
        trl = {dtype: trl_step_s(folder / "model", folder / dtype, args.steps, dtype) for dtype in TRL_DTYPES}
    rows: list[dict[str, Any]] = [
        {"trainer": "groupax", "step_s": ours["step_time"], **{name: ours[name] for name in PHASES}}
    ]
    times = {dtype: seconds for dtype, seconds in trl.items() if seconds}
    rows += [{"trainer": f"TRL, {dtype}", "step_s": time_s, **dict.fromkeys(PHASES)} for dtype, time_s in times.items()]
    if times:
        rows = [{**row, "over_best_trl": min(times.values()) / row["step_s"]} for row in rows]
    show(rows, args.json)


if __name__ == "__main__":
    main()
