"""How quick `groupax view` is with a long run: 10,000 steps with 100 rollouts each, 1,000,000 in all.

Makes such a run folder (about 10,000 files; an existing one is used again), and with `--runs 40` further ones of the
same metrics without rollouts, serves them with `groupax view` in a process of its own, and opens them in headless
Chromium. Prints the browser's own time of the first paint, when each view had drawn its data, how long steps take to
open from the key press to their groups being on the page, the first hits of a search in all steps and all of it, what
the index of all prompts takes, and the greatest memory of the server. With `--large N` a last step has N rollouts.

Needs selenium, and Chromium with its driver (Debian: chromium, chromium-driver).
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pyarrow

from groupax.core.types import Rollout
from groupax.events import TokenScores
from groupax.runs.rollout_log import rollout_table, write_table

GROUP = 10
TOKENS = 120
PAINT = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
DRAWN = "return Number(document.documentElement.dataset.drawn) || null"
# From a key press until the groups of the step are on the page and painted.
OPENED = """const [key, done] = arguments, html = document.documentElement, before = html.dataset.step;
const begun = performance.now();
const look = () => html.dataset.step === before ? requestAnimationFrame(look)
  : requestAnimationFrame(() => done(performance.now() - begun));
document.body.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
look();"""
VIEWS = ["overview", "runs", "curves", "time", "rollouts", "prompts", "evaluations", "settings"]
# The milliseconds until the first hits of a search in all steps are on the page, and until it ends.
SEARCHED = """const [text, done] = arguments, field = document.querySelector('main input[name="search"]');
const begun = performance.now();
let first = null;
field.value = text;
field.dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter', shiftKey: true, bubbles: true }));
const look = () => {
  const status = document.querySelector('.found [role=status]')?.textContent ?? '';
  if (first === null && document.querySelector('.hits li')) first = performance.now() - begun;
  const isEnd = /Search complete|No completion/.test(status) || document.querySelectorAll('.hits li').length >= 100;
  return isEnd ? done([first, performance.now() - begun, status]) : requestAnimationFrame(look);
};
look();"""
# Completions of a group that are there.
CARDS = "return document.querySelectorAll('.card').length"


def make_run(folder: Path, num_steps: int, num_rollouts: int, num_large: int) -> None:
    """A run folder with that many steps and rollouts per step, and a further step with `num_large` rollouts."""
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    words = np.array(["so", "then", "we", "add", "numbers", "and", "get", "a", "sum", "that", "was", "asked", "for"])
    prompts = [f"What is {a} + {b}? Think before you answer." for a, b in rng.integers(0, 1000, (5000, 2))]
    rows = [
        Rollout(
            prompt_index=index // GROUP,
            sample_index=index % GROUP,
            example={"prompt": ""},
            prompt_ids=rng.integers(0, 32000, 20, dtype=np.int32),
            completion_ids=rng.integers(0, 32000, TOKENS, dtype=np.int32),
            policy_logps=-rng.exponential(0.5, TOKENS).astype(np.float32),
            sampler_logps=-rng.exponential(0.5, TOKENS).astype(np.float32),
            finish_reason="stop" if rng.random() < 0.9 else "length",
            policy_version=0,
            text=" ".join(rng.choice(words, TOKENS)),
            rewards={"right": float(rng.random() < 0.5), "form": float(rng.random() < 0.8)},
            advantage=float(rng.normal()),
        )
        for index in range(num_rollouts)
    ]
    table = rollout_table(
        1, rows, {index: TokenScores(row.policy_logps, -row.policy_logps) for index, row in enumerate(rows)}
    )
    place = table.column_names.index("prompt")
    for step in range(1, num_steps + 1):
        chosen = rng.choice(len(prompts), -(-num_rollouts // GROUP))
        texts = [prompts[chosen[index // GROUP]] for index in range(num_rollouts)]
        write_table(
            folder / "rollouts" / f"step_{step:06d}.parquet",
            table.set_column(0, "step", [[step] * num_rollouts]).set_column(place, "prompt", [texts]),
        )
    if num_large:
        copies = pyarrow.concat_tables([table] * -(-num_large // num_rollouts)).slice(0, num_large)
        large = copies.set_column(0, "step", [[num_steps + 1] * num_large])
        groups = pyarrow.array(np.arange(num_large, dtype=np.int32) // GROUP)
        large = large.set_column(large.column_names.index("prompt_index"), "prompt_index", groups)
        texts = [prompts[index // GROUP % len(prompts)] for index in range(num_large)]
        write_table(
            folder / "rollouts" / f"step_{num_steps + 1:06d}.parquet", large.set_column(place, "prompt", [texts])
        )
    write_metrics(folder, num_steps, rng)


def write_metrics(folder: Path, num_steps: int, rng: np.random.Generator) -> None:
    """Writes metrics and settings of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = np.arange(1, num_steps + 1)
    noise = rng.normal(0, 0.05, (num_steps, 60))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in steps:
            others = {f"other/metric_{n}": float(value) for n, value in enumerate(noise[step - 1])}
            line = {
                "step": int(step),
                "reward": float(1 - np.exp(-step / 3000) + noise[step - 1, 0]),
                "kl": float(step / 1e5 + abs(noise[step - 1, 1]) / 10),
                "entropy": float(np.exp(-step / 5000) + noise[step - 1, 2]),
                "step_time": float(3 + noise[step - 1, 3]),
                "time/rollout_s": 1.5,
                "time/train_s": 1.2,
                "completions/mean_length": 120.0,
                **others,
            }
            file.write(json.dumps(line) + "\n")
    seed = int(rng.integers(1000))
    settings = {"max_steps": num_steps, "num_generations": GROUP, "seed": seed, "learning_rate": 1e-6 * (1 + seed % 3)}
    (folder / "config.json").write_text(json.dumps(settings))


def opened_browser() -> Any:
    """Headless Chromium."""
    from selenium import webdriver

    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        raise SystemExit("no chromium with chromedriver; apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,1000"):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


def waited_for(look: Callable[[], Any]) -> Any:
    """The first true answer."""
    for _ in range(6000):
        if found := look():
            return found
        time.sleep(0.02)
    raise SystemExit("the page does not show what was asked for within two minutes")


def answer(address: str, question: str) -> Any:
    """What the server says."""
    with urlopen(f"{address}api/{question}") as found:
        return json.load(found)


def peak_memory_mb(pid: int) -> float:
    """Most that a process has had in memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/view_run"))
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rollouts", type=int, default=100, help="per step")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--large", type=int, default=0, help="rollouts of a further step")
    parser.add_argument("--make-only", action="store_true")
    args = parser.parse_args()
    long = args.folder / "long"
    if not (long / "config.json").exists():
        make_run(long, args.steps, args.rollouts, args.large)
    for number in range(1, args.runs):
        name = args.folder / f"lr{1 + number % 3}e-6-warmup100-group10-model0.5B-seed{number}"
        if not name.exists():
            write_metrics(name, args.steps, np.random.default_rng(number))
    if args.make_only:
        return
    command = [sys.executable, "-m", "groupax", "view", str(args.folder), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = server.stdout.readline().split()[2]
    browser = opened_browser()
    try:
        report: dict[str, Any] = {"first_paint_ms": [], "curves_drawn_ms": []}
        started_s = time.perf_counter()
        for visit in range(3):  # the first one while the server still reads metrics.jsonl
            if visit == 1:
                waited_for(lambda: all(run["last_step"] == args.steps for run in answer(address, "runs").values()))
                report["logs_read_s"] = round(time.perf_counter() - started_s, 1)
            browser.get("about:blank")
            browser.get(f"{address}#/curves")
            report["curves_drawn_ms"].append(int(waited_for(lambda: browser.execute_script(DRAWN))))
            report["first_paint_ms"].append(round(waited_for(lambda: browser.execute_script(PAINT))))
        report["views_drawn_ms"] = {}
        for view in VIEWS:
            browser.get("about:blank")
            browser.get(f"{address}#/{view}{'' if view == 'runs' else '?run=long'}")
            report["views_drawn_ms"][view] = int(waited_for(lambda: browser.execute_script(DRAWN)))
        if args.large:
            browser.get("about:blank")
            browser.get(f"{address}#/rollouts?run=long&step={args.steps + 1}")
            report["large_step_ms"] = int(waited_for(lambda: browser.execute_script(DRAWN)))
        browser.get("about:blank")
        browser.get(f"{address}#/rollouts?run=long&step={args.steps // 2}")
        waited_for(lambda: browser.execute_script(CARDS))
        keys = ["ArrowRight"] * 10 + ["ArrowLeft", "Home", "ArrowRight", "ArrowLeft", "ArrowRight"]
        opened = [browser.execute_async_script(OPENED, key) for key in keys]
        report["step_opens_ms"] = {"median": round(float(np.median(opened))), "most": round(max(opened))}
        waited_for(lambda: browser.execute_script(CARDS))
        browser.set_script_timeout(120)
        for name, text in (("common", "numbers"), ("absent", "nowhere to be found")):
            report[f"search_{name}_ms"] = browser.execute_async_script(SEARCHED, text)
        report["server_mb"] = {"curves and steps": round(peak_memory_mb(server.pid))}
        begun_s = time.perf_counter()
        progress = {"num_done": 0, "num_steps": 1}
        while progress["num_done"] < progress["num_steps"]:
            time.sleep(0.2)
            progress = answer(address, "prompts?run=long")["progress"]
        report["index_s"] = round(time.perf_counter() - begun_s, 1)
        report["server_mb"]["with the index of all prompts"] = round(peak_memory_mb(server.pid))
        print(json.dumps(report, indent=2))
    finally:
        browser.quit()
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
