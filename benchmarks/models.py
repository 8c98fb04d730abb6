"""The models that benchmarks run: random weights in the shapes of real ones."""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

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


def parser(description: str) -> argparse.ArgumentParser:
    """Flags that all benchmarks share."""
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    flags.add_argument("--repeats", type=int, default=3, help="timed runs, of which the median counts")
    return flags


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
