"""Plans for TPU slices, made on this machine: python benchmarks/plan.py shows | scaling

`shows` plans the runs of docs/planning.md and prints what `groupax plan` prints. `scaling` counts one run on slices of
8, 32 and 128 chips, with as many completions on all of them and with as many on each chip; it compiles nothing, so that
memory is without what is temporary. Shapes are those of the models' published config.json. libtpu has to be in
build/libtpu (see `groupax plan --help`).
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

from groupax.planning.devices import prepare

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
    from groupax import GRPOConfig
    from groupax.models.families import read_config
    from groupax.planning.counting import count_program
    from groupax.planning.devices import find_target
    from groupax.planning.measured import Measured, step_seconds
    from groupax.planning.programs import device_bytes
    from groupax.planning.run import trace_run
    from groupax.runs.build import mesh_of

    args = GRPOConfig(
        mesh="1,-1,1,1,1",
        decoding_tp=4,
        prompts_per_step=rows // 4,
        num_generations=4,
        max_concurrent_rows=rows,
        max_prompt_length=2048,
        max_completion_length=2048,
        beta=0.04,
        gradient_checkpointing="full",
        micro_batch_tokens=4096,
    )
    target = find_target(f"v4-{2 * num_chips}")
    chip, mesh = target.chip, mesh_of(args, target.devices)
    assert chip is not None
    assert mesh is not None
    run = trace_run(read_config(LLAMA_8B), mesh, args, None, chip.memory_bytes)
    always = {kind: device_bytes({kind: tree}) for kind, tree in run.residents.items()}
    measured = [
        Measured(each.name, each.runs, always, count_program(each.traced.jaxpr, each.loop_steps))
        for each in run.programs
    ]
    programs, seconds = {each.name: each for each in measured}, step_seconds(measured, run, chip)
    train, admits = programs["micro_step"], run.programs[0]
    links_s = train.counts.sent_bytes / chip.link_bytes_per_s * train.runs
    return {
        "chips": num_chips,
        "completions": rows,
        "weights_and_optimizer_gb": device_bytes(run.residents) / 1e9,
        "rollout_gb": device_bytes(admits.arguments) / 1e9,
        "update_tflop": train.counts.flops * train.runs / 1e12,
        "update_gb_to_others": train.counts.sent_bytes * train.runs / 1e9,
        "update_s": seconds["updates"],
        "of_it_links_s": links_s,
        "rollout_s": seconds["rollout"],
        "tokens_per_s": rows * 2048 / sum(seconds.values()),
    }


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("what", choices=["shows", "scaling"])
    flags.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = flags.parse_args()
    if args.what == "scaling":
        prepare("v4-256", Path("build/libtpu"))
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
