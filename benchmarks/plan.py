"""Plans for TPU slices, made on this machine: python benchmarks/plan.py shows | scaling

`shows` plans the runs of docs/planning.md and prints what `groupax plan` prints; `scaling` plans one run on slices of
8, 32 and 128 chips, with as many completions on all of them and with as many on each chip, and prints a table. Shapes
are those of the models' published config.json. libtpu has to be in build/libtpu (see `groupax plan --help`).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from models import show

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
LLAMA_70B: dict[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
AYA_8B: dict[str, Any] = {
    **LLAMA_8B,
    "model_type": "cohere",
    "vocab_size": 256000,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.125,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
LENGTHS = ["--max_prompt_length", "2048", "--max_completion_length", "2048", "--beta", "0.04", "--mesh", "1,-1,1,1,1"]
SMALL = ["--prompts_per_step", "8", "--num_generations", "4"]
LARGE = ["--prompts_per_step", "64", "--num_generations", "8"]
FULL = ["--gradient_checkpointing", "full"]
SHOWS = {
    "aya-expanse-8b": (AYA_8B, "v4-64", SMALL),
    "llama-3.1-8b": (LLAMA_8B, "v5e-32", SMALL + FULL),
    "llama-3.3-70b": (LLAMA_70B, "v5p-128", LARGE + FULL),
}


def planned(model: dict[str, Any], devices: str, flags: list[str], quiet: bool) -> list[dict[str, Any]]:
    """The plans of `groupax plan`, the one that was asked for and the one that fits if that does not."""
    with tempfile.TemporaryDirectory() as folder:
        config, out = Path(folder, "config.json"), Path(folder, "plan.json")
        config.write_text(json.dumps(model))
        command = [sys.executable, "-m", "groupax", "plan", "--model", str(config), "--devices", devices]
        output = subprocess.DEVNULL if quiet else None
        done = subprocess.run([*command, *LENGTHS, *flags, "--json", str(out)], stdout=output, check=False)
        if done.returncode not in (0, 1):
            raise SystemExit(done.returncode)
        return json.loads(out.read_text())


def scaling(num_chips: int, rows: int) -> dict[str, Any]:
    """Of one device, where `rows` completions are spread over so many chips."""
    flags = ["--prompts_per_step", str(rows // 4), "--num_generations", "4", "--decoding_tp", "4", *FULL]
    [plan] = planned(LLAMA_8B, f"v4-{2 * num_chips}", flags, quiet=True)
    programs = {program["name"]: program for program in plan["programs"]}
    train = programs["micro_step"]
    exchanged = sum(train["exchanged"].values()) * train["runs"]
    seconds = plan["step_seconds"]
    return {
        "chips": num_chips,
        "completions": rows,
        "memory_gb": max(program["total"] for program in plan["programs"]) / 1e9,
        "update_tflop": train["flops"] * train["runs"] / 1e12,
        "update_gb_to_others": exchanged / 1e9,
        "update_s": seconds["updates"],
        "links_s": train["seconds"]["links"] * train["runs"],
        "rollout_s": seconds["rollout"],
        "tokens_per_s": rows * 2048 / sum(seconds.values()),
    }


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("what", choices=["shows", "scaling"])
    flags.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = flags.parse_args()
    if args.what == "scaling":
        show(
            [scaling(chips, rows) for chips, rows in ((8, 128), (32, 128), (128, 128), (8, 32), (128, 512))], args.json
        )
        return
    for name, (model, devices, own) in SHOWS.items():
        print(f"== {name} on {devices}, {' '.join([*LENGTHS, *own])}", flush=True)
        started_s = time.perf_counter()
        planned(model, devices, own, quiet=False)
        print(f"== {time.perf_counter() - started_s:.0f} s\n", flush=True)


if __name__ == "__main__":
    main()
