"""Everything that only a GPU or a TPU can show, in nine minutes on one: agreement, speed, memory, resuming.

    python dev/on_device.py plan h100-1 PLANS     # anywhere, before: plans of the runs, from compiled programs
    python dev/on_device.py run OUT [--plans PLANS] [--seconds 540] [--emulate]
    python dev/on_device.py table OUT             # the table of docs/gpu.md

Each part is a process with a limit of time, the most telling ones first; what has ended is in the file OUT whatever
happens to the rest. Models have random weights, in the shapes of Qwen2.5-0.5B, Qwen3-1.7B and Qwen3-4B. With --emulate
the shapes are tiny, for any machine.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from models import QWEN3_4B, QWEN3_17B, QWEN_05B, QWEN_7M

ROOT = Path(__file__).parents[1]
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {**QWEN_05B, "max_position_embeddings": 32768},
    "1.7B": QWEN3_17B,
    "4B": QWEN3_4B,
    "tiny": QWEN_7M,
}
SETTINGS = "--max_prompt_length 512 --max_completion_length 512 --num_generations 8 --prompts_per_step 8"
TINY = "--max_prompt_length 24 --max_completion_length 16 --num_generations 2 --prompts_per_step 2"
# shape, flags and seconds of each run
SPEED = {
    "0.5B, all weights": ("0.5B", "", 75),
    "4B, LoRA": ("4B", "--lora_r 16", 110),
    "1.7B, all weights": ("1.7B", "", 90),
    "0.5B, float32": ("0.5B", "--dtype float32", 75),
    "0.5B, LoRA": ("0.5B", "--lora_r 16", 70),
}
EMULATED = {
    "tiny, all weights": ("tiny", "", 300),
    "tiny, bfloat16, LoRA": ("tiny", "--lora_r 4 --dtype bfloat16", 300),
}
STEPS = 4


def plan(devices: str, out: Path) -> None:
    """Plans the runs, by programs that are compiled for the devices."""
    plans = {}
    for name, (shape, flags, _) in SPEED.items():
        with tempfile.TemporaryDirectory() as folder:
            config, file = Path(folder, "config.json"), Path(folder, "plan.json")
            config.write_text(json.dumps(SHAPES[shape]))
            command = ["plan", "--model", str(config), "--devices", devices, "--json", str(file), *SETTINGS.split()]
            subprocess.run([sys.executable, "-m", "groupax", *command, *flags.split()], check=False)
            plans[name] = json.loads(file.read_text())[0] if file.exists() else None
        out.write_text(json.dumps(plans, indent=1))


def run(out: Path, plans: Mapping[str, Any], seconds: float, is_emulated: bool) -> None:
    """Runs the parts one after the other while there is time, and writes what they return."""
    ends_s = time.monotonic() + seconds
    found: dict[str, Any] = {"seconds": {}, "plans": plans}
    own = [sys.executable, str(Path(__file__).resolve()), "part"]
    parts: dict[str, tuple[Sequence[str], float]] = {
        "doctor": ([sys.executable, "-m", "groupax", "doctor", "--json", "{file}"], 150 if is_emulated else 120)
    }
    runs = EMULATED if is_emulated else SPEED
    for name, (shape, flags, limit_s) in runs.items():
        given = [shape, TINY if is_emulated else SETTINGS, flags]
        parts[name] = ([*own, "speed", "{file}", *given], limit_s)
    if not is_emulated:
        parts["demo"] = ([*own, "demo", "{file}"], 120)
    parts["kill and resume"] = ([*own, "killed", "{file}"], 300 if is_emulated else 120)
    for name, (command, limit_s) in parts.items():
        limit_s = min(limit_s, ends_s - time.monotonic())
        if limit_s < 10:
            found[name] = {"fault": "no time was left"}
            continue
        started_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "out.json")
            fault = _ended([word.replace("{file}", str(file)) for word in command], limit_s)
            found[name] = json.loads(file.read_text()) if file.exists() else {"fault": fault}
        found["seconds"][name] = round(time.monotonic() - started_s, 1)
        print(f"{name}: {found['seconds'][name]} s {found[name].get('fault', '')}", flush=True)
        out.write_text(json.dumps(found, indent=1))


def _ended(command: Sequence[str], limit_s: float) -> str:
    """Runs a program and everything that it starts, and returns how it failed; an empty text if it did not."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, env=environment, stderr=errors, start_new_session=True)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"no end within {limit_s:.0f} s"
        errors.seek(0)
        return errors.read().decode(errors="replace")[-2000:] if status else ""


def speed(out: Path, shape: str, settings: str, flags: str) -> None:
    """Trains a model of random weights for a few steps, a tiny one for two."""
    import jax
    import numpy as np
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from groupax import GRPOConfig, GRPOTrainer, init_model
    from groupax.core.settings.command_line import parsed

    backend = Tokenizer(models.WordLevel({str(i): i for i in range(8000)}, unk_token="7999"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="7998", unk_token="7999", eos_token="7997")
    with tempfile.TemporaryDirectory() as folder:
        defaults = GRPOConfig(
            output_dir=f"{folder}/run", max_steps=2 if shape == "tiny" else STEPS, progress_bar="none", save_steps=0
        )
        args = parsed(GRPOConfig, "on_device", [*settings.split(), *flags.split()], defaults)
        rng = np.random.default_rng(0)
        prompt_tokens = (args.max_prompt_length or 0) - 1
        rows = [{"prompt": " ".join(map(str, rng.integers(1, 7000, prompt_tokens)))} for _ in range(64)]
        model = init_model(SHAPES[shape], dtype="float32" if args.dtype == "float32" else "bfloat16")
        trainer = GRPOTrainer(model, lambda completion_ids, **_: [ids[0] % 7 for ids in completion_ids], args, rows,
                              processing_class=tokenizer)  # fmt: skip
        described = trainer.describe()
        trainer.train()
        steps = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        last = steps[-1]
    names = {
        "step_s": "step_time",
        "rollout_s": "time/rollout_s",
        "update_s": "time/train_s",
        "rollout_tokens_per_s": "rollout/tokens_per_s",
        "mfu": "mfu",
        "peak_bytes": "memory/peak_bytes",
        "logp_diff_mean": "rollout/logp_diff_mean",
    }
    result = {name: last.get(metric) for name, metric in names.items()}
    result |= {"device": jax.devices()[0].device_kind, "compile_s": last.get("compile/total_s")}
    result |= {"logp_diff_max": max(step["rollout/logp_diff_max"] for step in steps)}
    out.write_text(json.dumps({**result, "first_step_s": steps[0]["step_time"], **described.plans}))


def demo(out: Path) -> None:
    """Trains the recipe of the demo, whose task it has to learn."""
    with tempfile.TemporaryDirectory() as folder:
        result = _train(f"{folder}/run", "--max_steps", "60")
        assert result.wait() == 0, "it ends"
        about = json.loads(Path(folder, "run", "result.json").read_text())
    out.write_text(json.dumps({name: about[name] for name in ("steps", "train_seconds", "verdicts")}))


def killed(out: Path) -> None:
    """Compares a run that is killed after a checkpoint and resumed with one that is not, by their records."""
    with tempfile.TemporaryDirectory() as folder:
        records, rows = [], Path(folder, "rows.jsonl")
        rows.write_text("".join(f'{{"prompt": "{n}+{n}=", "answer": "{2 * n}"}}\n' for n in range(16)))
        flags = f"--max_steps 6 --save_steps 2 --prompts_per_step 2 --dataset {rows} --eval_dataset {rows}".split()
        for name in ("whole", "killed"):
            run = _train(f"{folder}/{name}", *flags)
            file = Path(folder, name, "record.jsonl")
            while name == "killed" and run.poll() is None:
                if file.exists() and file.read_text().count("\n") >= 4:
                    run.kill()
                time.sleep(0.01)
            run.wait()
            if name == "killed":
                assert _train(f"{folder}/{name}", *flags).wait() == 0, "it resumes"
            records.append(file.read_text().splitlines())
    out.write_text(json.dumps({"same_bits": records[0] == records[1], "steps": len(records[0])}))


def _train(folder: str, *flags: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "groupax", "train", "--recipe", "arithmetic", "--progress_bar", "none"]
    return subprocess.Popen([*command, "--output_dir", folder, *flags], stdout=subprocess.DEVNULL)


def table(found: Mapping[str, Any]) -> str:
    """Returns the runs as a table in Markdown, with what was planned."""
    head = ["run", "s a step", "at least, planned", "tokens/s of rollout", "MFU", "GB at the peak", "GB planned"]
    rows = [head, ["---"] * len(head)]
    for name in (*SPEED, *EMULATED):
        each, planned = found.get(name), (found.get("plans") or {}).get(name)
        if not each or "step_s" not in each:
            continue
        least = f"{sum(planned['step_seconds'].values()):.3g}" if planned else ""
        most = f"{max(program['total'] for program in planned['programs']) / 1e9:.1f}" if planned else ""
        numbers = [f"{each['step_s']:.3g}", least, f"{each['rollout_tokens_per_s'] or 0:,.0f}"]
        rows.append([name, *numbers, f"{each['mfu'] or 0:.2f}", f"{each['peak_bytes'] / 1e9:.1f}", most])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    planner = verbs.add_parser("plan")
    planner.add_argument("devices")
    planner.add_argument("out", type=Path)
    runner = verbs.add_parser("run")
    runner.add_argument("out", type=Path)
    runner.add_argument("--plans", type=Path)
    runner.add_argument("--seconds", type=float, default=540.0)
    runner.add_argument("--emulate", action="store_true")
    part = verbs.add_parser("part")
    part.add_argument("name", choices=["speed", "demo", "killed"])
    part.add_argument("out", type=Path)
    part.add_argument("given", nargs="*")
    verbs.add_parser("table").add_argument("out", type=Path)
    args = parser.parse_args()
    if args.verb == "plan":
        plan(args.devices, args.out)
    elif args.verb == "run":
        run(args.out, json.loads(args.plans.read_text()) if args.plans else {}, args.seconds, args.emulate)
    elif args.verb == "part":
        {"speed": speed, "demo": demo, "killed": killed}[args.name](args.out, *args.given)
    else:
        print(table(json.loads(args.out.read_text())))


if __name__ == "__main__":
    main()
