"""Plans for absent GPUs and TPUs, made on this machine: python benchmarks/plan.py shows [NAME ...] | scaling

`shows` plans the runs of docs/planning.md with `groupax plan` and prints its tables in Markdown, with the seconds to
the estimate and to the plan. `scaling` counts one run on slices of 8, 32 and 128 chips, with as many completions on all
of them and with as many on each chip; it compiles nothing, so that memory is without what is temporary. Shapes are
those of the models' published config.json. The compilers have to be in build/cuda and build/libtpu (see `groupax plan
--help`).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from models import QWEN3_4B, QWEN3_30B_A3B, QWEN25_7B, QWEN_05B, show

from groupax.satellites.planning.devices import prepare
from groupax.satellites.planning.tables import KINDS, milliseconds

QWEN_7B: dict[str, Any] = {**QWEN25_7B, "max_position_embeddings": 32768}
QWEN3_8B: dict[str, Any] = {
    **QWEN3_4B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
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
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "rope_theta": 150000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 10000.0,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
}
SHORT = "--max_prompt_length 512 --max_completion_length 1024 --num_generations 8"
LONG = (
    "--max_prompt_length 2048 --max_completion_length 2048 --beta 0.04 --prompts_per_step 64 --num_generations 8 "
    "--mesh 1,-1,1,1,1 --gradient_checkpointing full --decoding_tp 8"
)
SHOWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "qwen2.5-0.5b": (QWEN_05B | {"max_position_embeddings": 32768}, "rtx4090-1", f"--prompts_per_step 8 {SHORT}"),
    "qwen3-4b-lora-rtx4090": (QWEN3_4B, "rtx4090-1", f"--prompts_per_step 8 {SHORT} --lora_r 16"),
    "qwen3-8b-qlora-rtx4090": (
        QWEN3_8B,
        "rtx4090-1",
        f"--prompts_per_step 8 {SHORT} --lora_r 16 --base_weights nf4",
    ),
    "qwen3-4b-lora": (QWEN3_4B, "h100-1", f"--prompts_per_step 32 {SHORT} --lora_r 16"),
    "qwen2.5-7b": (
        QWEN_7B,
        "h100-8",
        f"--prompts_per_step 64 {SHORT} --mesh 1,-1,1,1,1 --gradient_checkpointing full",
    ),
    "gpt-oss-20b-lora": (
        GPT_OSS_20B,
        "h100-1",
        f"--prompts_per_step 16 {SHORT} --lora_r 16 --gradient_checkpointing full --scan_layers False",
    ),
    "qwen3-30b-a3b": (
        QWEN3_30B_A3B,
        "h100-8",
        f"--prompts_per_step 64 {SHORT} --mesh 1,-1,1,1,1 --gradient_checkpointing full --decoding_tp 4 "
        "--scan_layers False --micro_batch_tokens 4096",
    ),
    "deepseek-v3": (
        DEEPSEEK_V3,
        "v5p-512",
        f"--prompts_per_step 64 {SHORT} --mesh 1,32,8,1,1 --gradient_checkpointing full --decoding_tp 64 "
        "--offload_optimizer",
    ),
    "llama-3.3-70b-h100": (LLAMA_70B, "h100-64", LONG),
    "llama-3.3-70b-v5p": (LLAMA_70B, "v5p-128", LONG),
}


def planned(model: Mapping[str, Any], devices: str, flags: str) -> tuple[list[dict[str, Any]], float, float]:
    """Returns the plans of `groupax plan` (another one if the first does not fit), and seconds to estimate and plan."""
    with tempfile.TemporaryDirectory() as folder:
        config, out = Path(folder, "config.json"), Path(folder, "plan.json")
        config.write_text(json.dumps(model))
        command = [sys.executable, "-m", "groupax", "plan", "--model", str(config), "--devices", devices]
        started_s, estimate_s = time.perf_counter(), 0.0
        with subprocess.Popen([*command, *flags.split(), "--json", str(out)], stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None, "it is a pipe"
            for line in run.stdout:
                if line.startswith("probably") and not estimate_s:
                    estimate_s = time.perf_counter() - started_s
        if run.returncode not in (0, 1):
            raise SystemExit(run.returncode)
        return json.loads(out.read_text()), estimate_s, time.perf_counter() - started_s


def markdown(plan: Mapping[str, Any]) -> str:
    """Returns a plan as a table: memory in GB, and the least time."""
    programs = plan["programs"]
    kinds = [kind for kind in KINDS if any(each["memory"].get(kind, 0) >= 5e6 for each in programs)]
    head = [
        "GB of a device",
        *kinds,
        "total",
        "runs",
        "at least, a run",
    ]
    rows = [head, ["---"] * len(head)]
    for each in programs:
        bound = max(each["seconds"], key=each["seconds"].get)
        sizes = [each["memory"].get(kind, 0.0) / 1e9 for kind in kinds]
        cells = [f"{size:.2f}" if size >= 0.005 else "" for size in sizes]
        least = f"{milliseconds(each['seconds'][bound])}, {bound}" if each["seconds"][bound] >= 5e-5 else ""
        rows.append([f"`{each['name']}`", *cells, f"{each['total'] / 1e9:.2f}", str(each["runs"]), least])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def scaling(num_chips: int, rows: int) -> dict[str, Any]:
    """Of one device, where `rows` completions are spread over so many chips."""
    from groupax import GRPOConfig
    from groupax.models.families import read_config
    from groupax.runs.build import mesh_of
    from groupax.satellites.planning.abstract import device_bytes
    from groupax.satellites.planning.counting import count_program
    from groupax.satellites.planning.devices import find_target
    from groupax.satellites.planning.measured import Measured, step_seconds
    from groupax.satellites.planning.run import trace_run

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
    flags.add_argument("names", nargs="*", help=f"which of {', '.join(SHOWS)}; by default all")
    flags.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = flags.parse_args()
    if args.what == "scaling":
        prepare("v4-256")
        show(
            [scaling(chips, rows) for chips, rows in ((8, 128), (32, 128), (128, 128), (8, 32), (128, 512))], args.json
        )
        return
    for name in args.names or SHOWS:
        model, devices, own = SHOWS[name]
        plans, estimate_s, total_s = planned(model, devices, own)
        if args.json:
            print(json.dumps({"name": name, "plans": plans, "estimate_s": estimate_s, "total_s": total_s}), flush=True)
            continue
        print(f"\n**{name} on {devices}**: `groupax plan --devices {devices} {own}`\n")
        for plan in plans:
            print(
                f"{', '.join(plan['changes']) or 'As requested'}: {plan['fault'] or ('fits' if plan['fits'] else 'no')}"
            )
            if "programs" in plan:
                seconds = {kind: round(value, 2) for kind, value in plan["step_seconds"].items()}
                print(f"\n{markdown(plan)}\n\nA step takes at least {sum(seconds.values()):.3g} s: {seconds}.")
        print(f"Estimate after {estimate_s:.0f} s, plan after {total_s:.0f} s.", flush=True)


if __name__ == "__main__":
    main()
