"""Nine questions about runs, as actions and seconds: `groupax view`, TensorBoard and trackio.

Trains three runs that report to TensorBoard and trackio, unless `--runs` has them: the recipe `arithmetic`, the same
with a reward that can be hacked, and one whose reward function fails after some steps. Opens each tool's own page on
them in headless Chromium, does what a person who knows the page would do, and waits until the answer is visible in the
window. An action is a click, a chosen option, a typed text or a scroll; the time is the machine's, from opening the
page until the answer is there: people read and search longer. What a page does not show has no way to it, and the
reason is printed instead. Median of `--repeats` visits.

Needs selenium, and Chromium with its driver (Debian: chromium, chromium-driver), tensorboard and trackio.
"""

import argparse
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HACKED = """def many_sevens(completions, **kwargs):
    return [text.count('7') / 4 for text in completions]


def fails(completions, trainer_state, **kwargs):
    return [1 / (trainer_state.step < 3) for _ in completions]
"""
TRAIN = "train --recipe arithmetic --progress_bar none --report_to tensorboard trackio --project arithmetic"
RUNS = {
    "good": "--max_steps 60 --eval_steps 20",
    "crashed": "--max_steps 40 --reward_funcs think_answer_correct hacked:fails",
    "hacked": "--max_steps 40 --reward_funcs think_answer_correct hacked:many_sevens --reward_weights 0.2 1 "
    "--learning_rate 2e-3",
}
WAIT_S = 60.0
# The first element with the selector whose text matches; in the window if that is asked. Looks into shadow roots.
FOUND = """const [selector, pattern, inWindow] = arguments, wanted = new RegExp(pattern);
const search = (root) => {
  for (const each of root.querySelectorAll('*')) {
    if (each.shadowRoot) { const inner = search(each.shadowRoot); if (inner) return inner; }
    if (!each.matches(selector) || !wanted.test((each.innerText ?? each.textContent).trim())) continue;
    const { top, bottom, left, right, width, height } = each.getBoundingClientRect();
    if (!width || !height) continue;
    if (!inWindow || (bottom > 0 && top < innerHeight && right > 0 && left < innerWidth)) return each;
  }
  return null;
};
return search(document);"""


@dataclass(frozen=True)
class Act:
    """One action of a person: `kind` is click, choose (an option by its value), type or scroll."""

    kind: str
    selector: str
    pattern: str = ""
    text: str = ""


@dataclass(frozen=True)
class Way:
    """The way to an answer; without `seen` there is none.

    Attributes:
        seen: What is visible when the answer is there: selector and pattern of each element.
        acts: Actions after the page was opened.
        answer: What the page shows, or why it has no answer.
    """

    answer: str
    seen: Sequence[tuple[str, str]] = ()
    acts: Sequence[Act] = ()


QUESTIONS = (
    "Is it learning?",
    "When and why did it break?",
    "What does it say now, and what did it say at step 10?",
    "Which prompts are never solved?",
    "Where does the time go?",
    "How did the third run end, and where?",
    "Is it still alive?",
    "What is different between two runs?",
    "Send it to a colleague",
)


def tab(name: str) -> Act:
    """Returns a click on a view of `groupax view`."""
    return Act("click", "#tabs a", f"^{name}")


PROMPT = Act("click", "main td a", "=")
VIEW = (
    Way(
        "pass@1 on held-out prompts before and after, with the interval of the difference, of the run that wrote last",
        [(".from-to", "→"), (".changes .facts", r"^[+-]0\.\d")],
    ),
    Way(
        "the diagnostic with its step, cause and remedy, errors first",
        [("main *", "reward.hacking"), ("main *", "step \\d+")],
        [tab("Diagnostics")],
    ),
    Way(
        "completions of a prompt at several steps side by side, changed words marked",
        [(".comparison .completion", "answer")],
        [tab("Prompts"), PROMPT],
    ),
    Way(
        "their number, and they alone",
        [("main .summary", "prompts? never solved"), ("th", "Best reward")],
        [tab("Prompts"), Act("choose", 'select[name="show"]', text="unsolved")],
    ),
    Way("shares of phases in all steps", [("td", r"\d+ %")], [tab("Time")]),
    Way(
        "the error, the line of the user's code, and the traceback",
        [(".fault", "ZeroDivisionError"), (".fault", r"hacked.py., line \d+")],
        [Act("choose", 'select[name="run"]', text="crashed")],
    ),
    Way("the state of every run, e.g. failed, or that its process is gone", [("#side .status", "failed")]),
    Way("settings that differ, run by run", [("main .summary", "differ between 3 runs")], [tab("Settings")]),
    Way("a file of the run that needs no server", [("a.button", "^Save as one file$")]),
)
TAGS = 'input[placeholder^="Filter tags"]'
TENSORBOARD = (
    Way(
        "curves of reward and held-out pass@1; no comparison before and after",
        [("scalar-card", r"^reward\b[^]*good/tensorboard"), ("scalar-card", r"^eval_pass_1\b[^]*good/tensorboard")],
        [Act("type", TAGS, text="^reward$|^eval_pass_1$")],
    ),
    Way(
        "step and text of the diagnostic, among all texts",
        [("*", "^[^{]*reward_hacking")],
        [Act("click", "*", "^TEXT$"), Act("scroll", "*", "^diagnostics/reward_hacking")],
    ),
    Way(
        "up to 16 completions of some steps, of other prompts each time",
        [("td", "answer>")],
        [
            Act("click", "*", "^TEXT$"),
            Act("scroll", ".heading", "^samples"),
            Act("click", ".heading", "^samples"),
            Act("scroll", "td", "answer>"),
        ],
    ),
    Way("has no rewards by prompt"),
    Way(
        "one curve for each phase; no shares",
        [("scalar-card", r"compile_s\s[^]*good/tensorboard"), ("scalar-card", "rollout_s")],
        [Act("type", TAGS, text="^time/")],
    ),
    Way("its curves end"),
    Way("its curves grow or do not"),
    Way("settings are a text of each run, to be compared by eye"),
    Way("TensorBoard.dev has been shut down; a picture of the screen"),
)
FILTER = 'input[placeholder^="e.g., loss"]'
TRACKIO = (
    Way(
        "curves of reward and held-out pass@1; no comparison before and after",
        [("*", "^reward$"), ("*", "^eval_pass@1$")],
        [Act("type", FILTER, text="^reward$|^eval_pass@1$")],
    ),
    Way(
        "the text of the diagnostic among its alerts, without its step",
        [("*", "the policy may have found a way")],
        [Act("click", "*", "^reward_hacking$")],
    ),
    Way(
        "up to 16 completions of some steps, of other prompts each time",
        [("td", "answer")],
        [Act("click", "*", "^Media & Tables$")],
    ),
    Way("has no rewards by prompt"),
    Way(
        "one curve for each phase; no shares",
        [("*", "^time/rollout_s$|^rollout_s$")],
        [Act("type", FILTER, text="^time/")],
    ),
    Way("the last step of each run, and nothing about its end"),
    Way("the last step of each run, and nothing about its end"),
    Way("shows no settings"),
    Way("no file; a copy on a Space of the hub"),
)


def main() -> None:
    """Prints the table, and with `--pictures` writes what was on the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "question_runs")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--only", help="one of the tools")
    args = parser.parse_args()
    args.runs = args.runs.resolve()
    make_runs(args.runs)
    tools = {"groupax view": (view, VIEW), "TensorBoard": (tensorboard, TENSORBOARD), "trackio": (trackio, TRACKIO)}
    with opened_browser() as browser:
        for name, (serve, ways) in tools.items():
            if args.only in (None, name):
                with serve(args.runs) as address:
                    report(name, browser, address, ways, args.repeats, args.pictures)


def report(name: str, browser: Any, address: str, ways: Sequence[Way], repeats: int, pictures: Path | None) -> None:
    """Prints a line of a Markdown table for each question."""
    for number, (question, way) in enumerate(zip(QUESTIONS, ways, strict=True)):
        if not way.seen:
            print(f"| {question} | {name} | no answer | | {way.answer} |", flush=True)
            continue
        seconds = [answered_s(browser, address, way) for _ in range(repeats)]
        if pictures:
            pictures.mkdir(parents=True, exist_ok=True)
            browser.save_screenshot(str(pictures / f"{re.sub('[^a-z]+', '_', name.lower())}_{number + 1}.png"))
        middle = statistics.median(seconds)
        print(f"| {question} | {name} | {len(way.acts)} | {middle:.1f} s | {way.answer} |", flush=True)


def answered_s(browser: Any, address: str, way: Way) -> float:
    """Returns the seconds from opening the page until the answer is visible."""
    browser.get("about:blank")
    begun_s = time.perf_counter()
    browser.get(address)
    for act in way.acts:
        do(browser, act)
    for selector, pattern in way.seen:
        waited_for(browser, selector, pattern, in_window=True)
    return time.perf_counter() - begun_s


def do(browser: Any, act: Act) -> None:
    """Does what a person would do, as soon as the page allows it."""
    from selenium.common.exceptions import WebDriverException

    deadline_s = time.monotonic() + WAIT_S
    while True:
        element = waited_for(browser, act.selector, act.pattern)
        try:
            if act.kind == "click":
                element.click()
            elif act.kind == "type":
                element.send_keys(act.text)
            elif act.kind == "choose":
                element.find_element("css selector", f'option[value="{act.text}"]').click()
            else:
                browser.execute_script("arguments[0].scrollIntoView({ block: 'center' })", element)
            return
        except WebDriverException:  # it moves, or was drawn again
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def waited_for(browser: Any, selector: str, pattern: str, in_window: bool = False) -> Any:
    """Returns the element as soon as it is there."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        if element := browser.execute_script(FOUND, selector, pattern, in_window):
            return element
        time.sleep(0.05)
    browser.save_screenshot("build/question_missing.png")
    raise SystemExit(f"nothing with {pattern!r} in {selector!r} within {WAIT_S:.0f} s; see build/question_missing.png")


def make_runs(folder: Path) -> None:
    """Trains the runs that are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hacked.py").write_text(HACKED)
    for name, flags in RUNS.items():
        if not (folder / name / ("result.json" if name != "crashed" else "metrics.jsonl")).exists():
            command = [sys.executable, "-m", "groupax", *TRAIN.split(), *flags.split(), "--run_name", name]
            subprocess.run(
                [*command, "--output_dir", str(folder / name)], check=name != "crashed", env=environment(folder)
            )


def environment(folder: Path) -> Mapping[str, str]:
    """Returns the environment for commands on the runs."""
    of_runs = {"TRACKIO_DIR": str(folder / "trackio"), "PYTHONPATH": f"{ROOT}:{folder}"}
    return {**os.environ, **of_runs, "GRADIO_ANALYTICS_ENABLED": "False", "BROWSER": "true", "PYTHONUNBUFFERED": "1"}


@contextmanager
def served(command: Sequence[str], env: Mapping[str, str], announced: str) -> Iterator[str]:
    """Serves a page until the context ends; yields the address that the command prints."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=env, cwd=ROOT) as server:
        assert server.stdout is not None
        try:
            for line in server.stdout:
                if match := re.search(announced, line):
                    yield match[1]
                    return
            raise SystemExit(f"{command} ended without an address")
        finally:
            server.terminate()


def view(runs: Path) -> Any:
    """Serves `groupax view`."""
    command = [sys.executable, "-m", "groupax", "view", *(str(runs / name) for name in RUNS), "--port", "0"]
    return served(command, environment(runs), r"(http://\S+)")


def tensorboard(runs: Path) -> Any:
    """Serves TensorBoard on the event files of the runs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(runs), "--port", str(port)]
    return served(command, environment(runs), r"(http://\S+)")


def trackio(runs: Path) -> Any:
    """Serves trackio on its database of the runs."""
    program = shutil.which("trackio", path=str(Path(sys.executable).parent))
    if program is None:
        raise SystemExit("no trackio; pip install trackio")
    command = [program, "show", "--project", "arithmetic"]
    return served(command, environment(runs), r"UI launched at: (http[^\s\x1b]+)")


@contextmanager
def opened_browser() -> Iterator[Any]:
    """Yields headless Chromium with a window of 1400 x 1000."""
    from selenium import webdriver

    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        raise SystemExit("no chromium with chromedriver; apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,1000"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield browser
    finally:
        browser.quit()


if __name__ == "__main__":
    main()
