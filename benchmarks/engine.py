"""Decoding throughput of groupax's engine, of `transformers` generate and of vLLM, on one machine, in one run.

    python benchmarks/engine.py [--json] [--cases 32 128 long-tailed 0.5B] [--repeats 3] [--dtype float32]
    python benchmarks/engine.py --model build/smollm2 --vllm VENV/bin/python       # and a real model; and vLLM

Prompts with 8 completions each, sampled at temperature 1. With random weights and prompts of 192 tokens: 32 and 128
rows of 128 new tokens on a 7M-parameter Qwen2-shaped model; 128 rows on it whose lengths are geometric with mean 96, at
most 512; 16 rows of 128 new tokens on the shape of Qwen2.5-0.5B. With --model, prompts of 128 random tokens and the
weights of a folder: 32 and 128 rows of 64 new tokens, and 64 rows of geometric lengths with mean 48, at most 256.

The engines take turns; medians are compared. Without torch the first peer is left out, and without --vllm, the
interpreter of an environment that has vLLM, the second. `of_bound` is the part of the throughput that the machine would
allow: for each step the longer of the arithmetic, at the measured rate of products of square matrices, and of reading
the weights and the rows' keys and values, at the measured bandwidth; of the prompts the arithmetic alone.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from models import QWEN_05B, QWEN_7M, parser, read_bytes_per_s, show

from groupax import Engine, Model, SamplingParams, init_model, load_model, save_model
from groupax.models.flops import forward_flops
from groupax.parallel.memory import peak_flops

GROUP = 8


@dataclass(frozen=True, eq=False)
class Case:
    """A model, None for that of --model, the number of new tokens of each row, and the length of prompts."""

    config: dict[str, Any] | None
    lengths: np.ndarray
    prompt_tokens: int = 192

    def prompts(self) -> list[np.ndarray]:
        """Returns a random prompt for each group."""
        size = len(self.lengths) // GROUP, self.prompt_tokens
        return list(np.random.default_rng(0).integers(0, 8000, size).astype(np.int32))


def geometric(rows: int, mean: int, longest: int) -> np.ndarray:
    """Returns lengths of rows with a long tail."""
    return np.minimum(np.random.default_rng(0).geometric(1 / mean, rows), longest)


CASES = {
    "32": Case(QWEN_7M, np.full(32, 128)),
    "128": Case(QWEN_7M, np.full(128, 128)),
    "long-tailed": Case(QWEN_7M, geometric(128, 96, 512)),
    "0.5B": Case(QWEN_05B, np.full(16, 128)),
    "model-32": Case(None, np.full(32, 64), 128),
    "model-128": Case(None, np.full(128, 64), 128),
    "model-long-tailed": Case(None, geometric(64, 48, 256), 128),
}


def bound_s(model: Model, case: Case) -> float:
    """Returns the least seconds that the machine would need for a case (see the top of this file)."""
    config, width = model.config, jax.tree.leaves(model.params)[0].dtype.itemsize
    flops_per_s, bytes_per_s = peak_flops(model.mesh, jnp.float32), read_bytes_per_s(jax.device_count())
    weights = sum(x.nbytes for x in jax.tree.leaves(model.params))
    of_column = 2 * config.num_kv_heads * config.head_dim * config.num_layers * width
    groups = len(case.lengths) // GROUP
    seconds = forward_flops(config, [(case.prompt_tokens, [])]) * groups / flops_per_s
    for step in range(int(case.lengths.max())):
        rows = int((case.lengths > step).sum())
        before = forward_flops(config, [(case.prompt_tokens + step, [])])
        flops = rows * (forward_flops(config, [(case.prompt_tokens + step, [1])]) - before)
        columns = groups * case.prompt_tokens + rows * step
        seconds += max(flops / flops_per_s, (weights + columns * of_column) / bytes_per_s)
    return seconds


Sample = Callable[[int], int]  # samples with a seed, and returns the number of tokens


def groupax_run(model: Model, case: Case) -> Sample:
    """Returns a function that samples with groupax."""
    prompts, lengths = case.prompts(), case.lengths
    engine = Engine(model.config, model.params, model.mesh, eos_ids=())

    def run(seed: int) -> int:
        sequences = engine.sequences(prompts, SamplingParams(n=GROUP, max_tokens=int(lengths.max()), seed=seed))
        for sequence, length in zip(sequences, lengths, strict=True):
            sequence.params = replace(sequence.params, max_tokens=int(length))
        return sum(len(sequence.tokens) for sequence in engine.stream(sequences))

    return run


def transformers_run(folder: Path, case: Case, dtype: str) -> Sample | None:
    """Returns the same for `transformers`, every row with its own prompt copy; None without torch."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        return None
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    rows = torch.tensor(np.repeat(case.prompts(), GROUP, axis=0))
    lengths = case.lengths
    limits = torch.tensor(lengths) + case.prompt_tokens
    settings = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "max_new_tokens": int(lengths.max())}

    def ended(ids: Any, _: Any, **__: Any) -> Any:
        return limits <= ids.shape[1]

    def run(seed: int) -> int:
        torch.manual_seed(seed)
        with torch.no_grad():
            mask = torch.ones_like(rows)
            model.generate(rows, attention_mask=mask, stopping_criteria=[ended], eos_token_id=None, **settings)
        return int(lengths.sum())

    return run


@contextmanager
def vllm_run(python: str | None, folder: Path, case: Case, dtype: str, work: Path) -> Iterator[Sample | None]:
    """Gives the same for vLLM, in a process of its own; None without its interpreter."""
    if python is None:
        yield None
        return
    rows, log = work / "rows.json", work / "vllm.log"
    rows.write_text(json.dumps([[p.tolist() for p in case.prompts() for _ in range(GROUP)], case.lengths.tolist()]))
    command = [python, str(Path(__file__).parent / "vllm_peer.py"), str(folder), str(rows), dtype]
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):

        def run(seed: int) -> int:
            print(seed, file=process.stdin, flush=True)
            answer = process.stdout.readline() if process.stdout else ""
            if not answer:
                raise RuntimeError(f"vLLM ended: {log.read_text()[-2000:]}")
            return int(answer)

        yield run


def speeds(runs: dict[str, Sample], repeats: int) -> dict[str, float]:
    """Returns the median tokens per second of each engine, in turns; the first turn compiles and warms up."""
    found: dict[str, list[float]] = {engine: [] for engine in runs}
    for repeat in range(repeats + 1):
        for engine, run in runs.items():
            started_s = time.perf_counter()
            num_tokens = run(repeat)
            if repeat:
                found[engine].append(num_tokens / (time.perf_counter() - started_s))
    return {engine: statistics.median(values) for engine, values in found.items()}


def measured(name: str, args: Any) -> list[dict[str, Any]]:
    """Returns the rows of the table for a case."""
    case = CASES[name]
    if case.config is None:
        model = load_model(args.model, dtype=args.dtype)
    else:
        model = init_model(case.config, seed=0, dtype=args.dtype)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(args.model) if case.config is None else save_model(model, Path(work) / "model")
        with vllm_run(args.vllm, folder, case, args.dtype, Path(work)) as vllm:
            peers = {"transformers": transformers_run(folder, case, args.dtype), "vLLM": vllm}
            runs = {"groupax": groupax_run(model, case), **peers}
            medians = speeds({engine: run for engine, run in runs.items() if run}, args.repeats)
    bound = case.lengths.sum() / bound_s(model, case)
    return [
        {
            "case": name,
            "engine": engine,
            "tokens_per_s": speed,
            "groupax_over": medians["groupax"] / speed,
            "of_bound": float(speed / bound),
            "GFLOP/s": peak_flops(model.mesh, jnp.float32) / 1e9,
        }
        for engine, speed in medians.items()
    ]


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--model", help="folder of a real model, whose cases are added")
    flags.add_argument("--vllm", metavar="PYTHON", help="interpreter of an environment that has vLLM")
    flags.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights of all")
    flags.add_argument("--cases", nargs="+", choices=list(CASES))
    args = flags.parse_args()
    chosen = args.cases or [name for name, case in CASES.items() if case.config or args.model]
    show([row for name in chosen for row in measured(name, args)], args.json)


if __name__ == "__main__":
    main()
