"""One whole GRPO step, by phase: groupax beside TRL, one machine, one run.

    python benchmarks/step.py [--json] [--steps 4] [--long_tailed]

A 7M-parameter Qwen2-shaped model with random weights: 4 prompts of 192 tokens, 8 completions each of 128 tokens, beta
0.04. With --long_tailed completions have up to 512 tokens and end with each token at about the same small chance: 128
in the mean if there were no limit. Both sides in float32 and in bfloat16, of which the faster one counts. Medians over
the steps after the first two, which compile and warm up; with --long_tailed groupax meets new shapes in its first ten,
which do not count either. Without TRL it is left out.
"""

import importlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from models import QWEN_7M, parser, show

from groupax import GRPOConfig, GRPOTrainer, Model, init_model, save_model
from groupax.models.decoder import causal_hidden

PROMPT_TOKENS, NEW_TOKENS, PROMPTS, GROUP = 192, 128, 4, 8
LONGEST_TOKENS, MEAN_TOKENS = 512, 128
WARM_UP, WARM_UP_OF_SHAPES = 2, 10
DTYPES = ("float32", "bfloat16")


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


def ending_model() -> Model:
    """A model that ends its completions with about the same chance at each token, 1 / `MEAN_TOKENS`.

    The last layer's values have a bias, which every position's hidden state gets whatever it attends to, and the end's
    embedding lies along it.
    """
    model = init_model(QWEN_7M, seed=0)
    last, end = model.params["layers"][-1], QWEN_7M["eos_token_id"]
    last["v_bias"] = 4.0 * jax.random.normal(jax.random.key(1), last["v_bias"].shape)
    tokens = jax.random.randint(jax.random.key(2), (8, 256), 1, 8000)
    hidden = causal_hidden(model.config, model.params, tokens, jnp.zeros(8, jnp.int32)).reshape(-1, 256)
    along = hidden.mean(axis=0) / jnp.linalg.norm(hidden.mean(axis=0))
    others = jax.nn.logsumexp(hidden @ model.params["embed"][:end].T, axis=-1)
    lengths = np.geomspace(1e-3, 1e3, 2000)
    ends = [float(jax.nn.sigmoid(length * hidden @ along - others).mean()) for length in lengths]
    length = lengths[int(np.searchsorted(ends, 1 / MEAN_TOKENS))]
    model.params["embed"] = model.params["embed"].at[end].set(length * along)
    return model


def groupax_steps(
    model_folder: Path,
    run_folder: Path,
    num_steps: int,
    dtype: Literal["float32", "bfloat16"],
    new_tokens: int,
    warm_up: int = WARM_UP,
) -> dict[str, float]:
    """Median seconds of a step and of its phases."""
    args = GRPOConfig(
        output_dir=str(run_folder),
        prompts_per_step=PROMPTS,
        num_generations=GROUP,
        max_completion_length=new_tokens,
        max_steps=warm_up + num_steps,
        beta=0.04,
        dtype=dtype,
        progress_bar="none",
        log_completions=False,
    )
    GRPOTrainer(model_folder, reward, args, prompts(), processing_class=tokenizer()).train()
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()][warm_up:]
    return {name: statistics.median(line[name] for line in lines) for name in ("step_time", *PHASES)}


PHASES = ("time/rollout_s", "time/train_s", "completions/mean_length")


def trl_step_s(model_folder: Path, run_folder: Path, num_steps: int, dtype: str, new_tokens: int) -> float | None:
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
        max_completion_length=new_tokens,
        max_steps=WARM_UP + num_steps,
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
    flags.add_argument("--steps", type=int, default=4)
    flags.add_argument("--long_tailed", action="store_true")
    args = flags.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, longest = (ending_model(), LONGEST_TOKENS) if args.long_tailed else (init_model(QWEN_7M), NEW_TOKENS)
        warm_up = WARM_UP_OF_SHAPES if args.long_tailed else WARM_UP
        save_model(model, folder / "model", tokenizer())
        for dtype in DTYPES:
            ours = groupax_steps(folder / "model", folder / f"groupax_{dtype}", args.steps, dtype, longest, warm_up)
            phases = {phase: ours[phase] for phase in PHASES}
            rows.append({"trainer": f"groupax, {dtype}", "step_s": ours["step_time"], **phases})
        for dtype in DTYPES:
            step_s = trl_step_s(folder / "model", folder / f"trl_{dtype}", args.steps, dtype, longest)
            if step_s is not None:
                rows.append({"trainer": f"TRL, {dtype}", "step_s": step_s, **dict.fromkeys(PHASES)})
    trl = [row["step_s"] for row in rows if row["trainer"].startswith("TRL")]
    show([{**row, "over_best_trl": min(trl) / row["step_s"]} for row in rows] if trl else rows, args.json)


if __name__ == "__main__":
    main()
