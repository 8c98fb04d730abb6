"""Ten ways to end a run: `python dev/endings.py FOLDER [NAME ...]`, about six minutes on two cores.

Makes runs with the embedded models in FOLDER/runs, prints the sentence that the run folder, the page, `groupax
checkpoints` and `groupax report` have of each, and writes pictures of their pages. A full disk needs
the right to mount one. Needs selenium and Chromium with its driver.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import view_screenshots

from groupax.runs.ending import ending_of
from groupax.satellites.view.runs import Runs

ROOT = Path(__file__).parents[1]
COMMON = "--max_steps 8 --prompts_per_step 2 --num_generations 4 --max_completion_length 16 --save_steps 2"
MODEL = f"--model {ROOT}/groupax/recipes/arithmetic/model --dataset {{folder}}/sums.jsonl"
AGENT = f"--model {ROOT}/groupax/recipes/agents/model --dataset {{folder}}/chats.jsonl --max_completion_length 64"
SLOW = f"{MODEL} --reward_funcs endings_parts:slow"
LARGE = "--prompts_per_step 8 --num_generations 1024 --max_completion_length 256 --max_concurrent_rows 8192"
MEMORY_BYTES = 4 << 30  # of addresses
# Options of each run, and what is done after two steps to its process or in the folder that it is in.
RUNS: dict[str, tuple[str, Any]] = {
    "reward": (f"{MODEL} --reward_funcs endings_parts:broken --reward_errors raise", None),
    "tool": (f"{AGENT} --tools endings_parts:unreachable --reward_funcs endings_parts:slow", None),
    "memory": (f"{SLOW} {LARGE}", None),  # of which MEMORY_BYTES are too few
    "sigterm": (SLOW, lambda pid, _: os.kill(pid, signal.SIGTERM)),
    "sigint": (SLOW, lambda pid, _: [(os.kill(pid, signal.SIGINT), time.sleep(0.3)) for _ in range(2)]),
    "sigkill": (SLOW, lambda pid, _: os.kill(pid, signal.SIGKILL)),
    "disk": (SLOW, lambda _, place: fill(place)),
    "nan": (f"{SLOW} --loss_type endings_parts:undefined --max_bad_steps 2", None),
    "preempted": (SLOW, lambda pid, _: os.kill(pid, signal.SIGTERM)),  # and started again
    "done": (SLOW, None),
}
PARTS = '''import time
from groupax import InfrastructureError
calls = []
def slow(completions, **kwargs):
    time.sleep(0.5)
    return [len(str(text)) % 3 / 4 for text in completions]
def broken(completions, **kwargs):
    calls.append(1)
    return [{}[text] if len(calls) > 6 else text.count("1") for text in completions]
def undefined(terms, settings):
    return terms.advantage / terms.advantage * terms.log_ratio * float("nan")
def unreachable(expression: str) -> int:
    """Calculates.

    Args:
        expression: Like 12*34.
    """
    raise InfrastructureError("the calculator's server refuses connections")
'''


def main() -> None:
    """Makes the runs, and shows how each has ended."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("folder", type=Path)
    flags.add_argument("names", nargs="*", choices=[[], *RUNS])
    given = flags.parse_args()
    folder = given.folder.absolute()
    (folder / "full").mkdir(parents=True, exist_ok=True)
    (folder / "endings_parts.py").write_text(PARTS)
    sums = [f"What is {number}*7?" for number in range(8)]
    for file, prompts in (("sums", sums), ("chats", [[{"role": "user", "content": text}] for text in sums])):
        (folder / f"{file}.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    paths = [make(folder, name) for name in given.names or RUNS]
    places = {"all": "runs", **{path.name: f"overview?run={path.name}" for path in paths}}
    view_screenshots.IMAGES = folder
    for label, size in (("", view_screenshots.WIDE), ("_phone", view_screenshots.PHONE)):
        pictures = {f"{name}{label}": (place, size, ("light",), "") for name, place in places.items()}
        view_screenshots.take_pictures(paths, pictures)


def make(folder: Path, name: str) -> Path:
    """Makes a run, ends it after two steps, and prints what is said of it; returns its folder."""
    options, act = RUNS[name]
    path = folder / ("full" if name == "disk" else "runs") / name
    if name == "disk" and not path.parent.is_mount():
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(path.parent)], check=True)
    command = [sys.executable, "-m", "groupax", "train", *f"{COMMON} {options}".format(folder=folder).split()]
    command += ["--output_dir", str(path), "--progress_bar", "none"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}
    limited = ["prlimit", f"--as={MEMORY_BYTES}"] if name == "memory" else []
    process, metrics = subprocess.Popen([*limited, *command], env=environment), path / "metrics.jsonl"
    while act and process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 2):
        time.sleep(0.1)
    if act:
        act(process.pid, path.parent)
    show(name, path, process.wait())
    if name == "preempted":
        show(name, path, subprocess.run(command, env=environment).returncode)
    return path


def show(name: str, path: Path, status: int) -> None:
    """Prints what the record, the page, the list of checkpoints and the report say of how a run ended."""
    runs = Runs([path])
    runs.refresh()
    state = next(iter(runs.named().values())).state()
    commands = [[sys.executable, "-m", "groupax", command, str(path)] for command in ("checkpoints", "report")]
    listed, _ = (subprocess.run(command, capture_output=True, text=True, cwd=ROOT) for command in commands)
    report = (path / "report.md").read_text() if (path / "report.md").exists() else ""
    print(f"== {name}: exit status {status}\n  record       {ending_of(path).sentence}")
    print(f"  page         {state['status']}: {state['ending'].partition(chr(10))[0]}")
    for label, text in (("checkpoints", listed.stdout + listed.stderr), ("report", report)):
        print(f"  {label:11}  {''.join(line for line in text.splitlines() if ' ended' in line)}", flush=True)


def fill(place: Path) -> None:
    """Leaves no room on the file system of a folder."""
    with suppress(OSError), (place / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))


if __name__ == "__main__":
    main()
