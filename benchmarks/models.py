"""The models that benchmarks run: random weights in the shapes of real ones."""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

KEY = "benchmark"

QWEN_7M: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 8192,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 768,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 8191,
}

QWEN_05B: dict[str, Any] = {
    **QWEN_7M,
    "vocab_size": 151936,
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "intermediate_size": 4864,
    "eos_token_id": 151643,
}

# Shapes for compilers: of the published config.json, with the number of layers left to the benchmark.
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "eos_token_id": 151645,
}
QWEN3_06B = {
    **_QWEN3,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "intermediate_size": 3072,
}
QWEN3_17B = {
    **_QWEN3,
    "hidden_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "intermediate_size": 6144,
}
QWEN3_4B = {
    **_QWEN3,
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 9728,
}
QWEN25_7B = {
    **QWEN_05B,
    "vocab_size": 152064,
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B = {
    **_QWEN3,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def parser(description: str) -> argparse.ArgumentParser:
    """Flags that all benchmarks share."""
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    flags.add_argument("--repeats", type=int, default=3, help="timed runs, of which the median counts")
    return flags


def read_bytes_per_s(num_threads: int) -> float:
    """The fastest of several sums over 256 MB per thread."""
    parts = [np.ones(1 << 26, np.float32) for _ in range(num_threads)]
    fastest = 0.0
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(8):
            started_s = time.perf_counter()
            list(pool.map(np.sum, parts))
            fastest = max(fastest, num_threads * parts[0].nbytes / (time.perf_counter() - started_s))
    return fastest


def show(rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """Print rows with the same keys."""
    if as_json:
        print(json.dumps({"rows": list(rows)}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)


@contextmanager
def served(folder: Path, config: Mapping[str, Any], dtype: str, *options: str) -> Iterator[tuple[str, int]]:
    """Address and id of a `groupax serve` in another process, with random weights of a shape; its key is KEY.

    Args:
        folder: where the model is written.
        config: its `config.json`.
        dtype: of its weights.
        options: further ones of the command.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    from groupax import init_model, save_model

    words = Tokenizer(WordLevel({"<unk>": 0, **{str(number): number for number in range(1, 100)}}, "<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<unk>")
    save_model(init_model(config, dtype=dtype), folder, tokenizer)
    command = [sys.executable, "-m", "groupax", "serve", "--model", str(folder), "--port", "0", "--api_key", KEY]
    command.append("--no_log_requests")  # nobody reads its output
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None, "piped"
        try:
            yield server.stdout.readline().split(" at ")[1].strip().removesuffix("/v1"), server.pid
        finally:
            server.terminate()
