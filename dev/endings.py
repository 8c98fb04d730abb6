"""Ten ways to end a run: `python dev/endings.py FOLDER [NAME ...]`, about six minutes on two cores.

Makes runs with the embedded models in FOLDER/runs, prints the sentence that the run folder, the page, `groupax
checkpoints` and `groupax report` have of each, and writes pictures of their pages, FOLDER/NAME.png. A full disk needs
the right to mount one. Needs selenium and Chromium with its driver.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from view_screenshots import PHONE, WIDE, opened_browser

from groupax.runs.ending import ending_of
from groupax.satellites.view.runs import Runs
from groupax.satellites.view.server import make_server

ROOT = Path(__file__).parents[1]
COMMON = "--max_steps 8 --prompts_per_step 2 --num_generations 4 --max_completion_length 16 --save_steps 2"
ARITHMETIC = f"--model {ROOT}/groupax/recipes/arithmetic/model --dataset {{folder}}/sums.jsonl {COMMON}"
AGENT = ARITHMETIC.replace("arithmetic", "agents").replace("sums", "chats") + " --max_completion_length 64"
SLOW = "--reward_funcs endings_parts:slow"
LARGE = "--prompts_per_step 8 --num_generations 1024 --max_completion_length 256 --max_concurrent_rows 8192"
MEMORY_BYTES = 4 << 30  # of addresses
# Options of each run, and what is done to its process after two steps.
RUNS: dict[str, tuple[str, Any]] = {
    "reward": (f"{ARITHMETIC} --reward_funcs endings_parts:broken --reward_errors raise", None),
    "tool": (f"{AGENT} --tools endings_parts:unreachable --reward_funcs endings_parts:slow", None),
    "memory": (f"{ARITHMETIC} {SLOW} {LARGE}", None),  # of which MEMORY_BYTES are too few
    "sigterm": (f"{ARITHMETIC} {SLOW}", lambda pid: os.kill(pid, signal.SIGTERM)),
    "sigint": (
        f"{ARITHMETIC} {SLOW}",
        lambda pid: [os.kill(pid, signal.SIGINT), time.sleep(0.3), os.kill(pid, signal.SIGINT)],
    ),
    "sigkill": (f"{ARITHMETIC} {SLOW}", lambda pid: os.kill(pid, signal.SIGKILL)),
    "disk": (f"{ARITHMETIC} {SLOW}", lambda place: fill(place)),
    "nan": (f"{ARITHMETIC} {SLOW} --loss_type endings_parts:undefined --max_bad_steps 2", None),
    "preempted": (f"{ARITHMETIC} {SLOW}", lambda pid: os.kill(pid, signal.SIGTERM)),
    "done": (f"{ARITHMETIC} {SLOW}", None),
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
    chosen = {name: run for name, run in RUNS.items() if not given.names or name in given.names}
    folder = given.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "endings_parts.py").write_text(PARTS)
    sums = [f"What is {number}*7?" for number in range(8)]
    for file, prompts in (("sums", sums), ("chats", [[{"role": "user", "content": text}] for text in sums])):
        lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
        (folder / f"{file}.jsonl").write_text("".join(lines))
    paths = [make(folder, name, *run) for name, run in chosen.items()]
    take_pictures(folder, paths)


def make(folder: Path, name: str, flags: str, act: Any) -> Path:
    """Makes a run, ends it after two steps, and prints what is said of it; returns its folder."""
    path = folder / "runs" / name
    if name == "disk" and not path.is_mount():
        path.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(path)], check=True)
    command = [sys.executable, "-m", "groupax", "train", *flags.format(folder=folder).split()]
    command += ["--output_dir", str(path / "run" if name == "disk" else path), "--progress_bar", "none"]
    path = path / "run" if name == "disk" else path
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}
    limited = ["prlimit", f"--as={MEMORY_BYTES}"] if name == "memory" else []
    process = subprocess.Popen([*limited, *command], env=environment, stderr=(folder / f"{name}.log").open("wb"))
    while act and num_steps(path) < 2 and process.poll() is None:
        time.sleep(0.1)
    if act:
        act(process.pid if name != "disk" else path.parent)
    status = process.wait()
    if name == "preempted":
        said(name, path, status)
        subprocess.run(command, env=environment, check=True, capture_output=True)
    said(name, path, status)
    return path


def said(name: str, path: Path, status: int) -> None:
    """Prints what the record, the page, the list of checkpoints and the report say of how a run ended."""
    runs = Runs([path])
    runs.refresh()
    state = next(iter(runs.named().values())).state()
    listed = groupax("checkpoints", str(path))
    groupax("report", str(path))
    report = (path / "report.md").read_text() if (path / "report.md").exists() else ""
    print(f"== {name}: exit status {status}\n  record       {ending_of(path).sentence}")
    print(f"  page         {state['status']}: {state['ending'].partition(chr(10))[0]}")
    for label, text in (("checkpoints", listed), ("report", report)):
        print(
            f"  {label:11}  {next((line for line in text.splitlines() if ' ended' in line), text[-300:])}", flush=True
        )


def groupax(*command: str) -> str:
    """Returns what a command prints."""
    done = subprocess.run([sys.executable, "-m", "groupax", *command], capture_output=True, text=True, cwd=ROOT)
    return (done.stdout or done.stderr).strip()


def num_steps(path: Path) -> int:
    """Returns the number of steps that a run has logged."""
    metrics = path / "metrics.jsonl"
    return len(metrics.read_bytes().splitlines()) if metrics.exists() else 0


def interrupt_twice(pid: int) -> None:
    """Does what a person does who presses Ctrl-C twice."""
    os.kill(pid, signal.SIGINT)
    time.sleep(0.3)
    os.kill(pid, signal.SIGINT)


def fill(place: Path) -> None:
    """Leaves no room on the file system of a folder."""
    with (place / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 12))
        except OSError:
            pass


def take_pictures(folder: Path, runs: list[Path]) -> None:
    """Takes a picture of the overview of each run, and of the table of all, wide and as on a phone."""
    browser = opened_browser()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        served = Runs(runs)
        served.refresh()
        server = make_server(served, port := listening.getsockname()[1], None)
        threading.Thread(target=server.run, kwargs={"sockets": [listening]}).start()
        for name in [*served.named(), ""]:
            for label, (width, height, scale, is_mobile) in (("", WIDE), ("_phone", PHONE)):
                size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": is_mobile}
                browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
                browser.get("about:blank")
                browser.get(f"http://127.0.0.1:{port}/#/{f'overview?run={name}' if name else 'runs'}")
                time.sleep(2)
                browser.save_screenshot(str(folder / f"{(name or 'all').replace('/', '_')}{label}.png"))
        browser.quit()
        server.should_exit = True


if __name__ == "__main__":
    main()
