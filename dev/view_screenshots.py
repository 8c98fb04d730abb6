"""The pictures of the page in docs/: `python dev/view_screenshots.py [--runs FOLDER] [NAME ...]`, by default all.

Trains the runs that are not in the folder yet (about ten minutes on two cores), by default `build/view_runs`: three
seeds of the recipe `arithmetic`, one with a learning rate that is far too high, one whose reward can be hacked, and one
of the recipe `shapes`, whose prompts have images. Then serves them, opens the page in headless Chromium, wide and as on
a phone, light and dark, and writes docs/images/view_NAME_THEME.png with few colors, so that they stay small. Needs
selenium, pillow, and Chromium with its driver.
"""

import argparse
import io
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver

from groupax.satellites.view.runs import Runs
from groupax.satellites.view.server import make_server

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
NUM_COLORS = 128
SETTLED_S = 2.5
HACKABLE = "--reward_funcs think_answer_correct hacked:many_sevens --reward_weights 0.2 1"
STEPS = "--recipe arithmetic --max_steps 60 --progress_bar none"
RUNS = {
    "baseline-s0": f"{STEPS} --seed 0 --eval_steps 20",
    "baseline-s1": f"{STEPS} --seed 1",
    "baseline-s2": f"{STEPS} --seed 2",
    "lr-high": f"{STEPS} --learning_rate 5e-2 --beta 0.02",
    "hacked": f"{STEPS} {HACKABLE} --learning_rate 2e-3",
}
RUNS_WITH_IMAGES = {"shapes": "--recipe shapes --max_steps 25 --progress_bar none"}
HACKED = "def many_sevens(completions, **kwargs):\n    return [text.count('7') / 4 for text in completions]\n"
WIDE, PHONE = (1400, 900, 1.0, False), (390, 844, 1.0, True)
OPEN_FIRST = "document.querySelector('.item summary').click()"
OPEN_GAINED = """const order = document.querySelector('[name="order"]');
order.value = 'gained';
order.dispatchEvent(new Event('change'));
setTimeout(() => document.querySelector('tbody a').click(), 800);"""
Pictures = dict[str, tuple[str, tuple[int, int, float, bool], tuple[str, ...], str]]
# Of each picture the place, the size, the themes, and what to do on the page.
PICTURES: Pictures = {
    "overview": ("overview?run=baseline-s0", WIDE, ("light", "dark"), ""),
    "diagnostics": ("overview?run=hacked", WIDE, ("light",), ""),
    "runs": ("runs", WIDE, ("light", "dark"), ""),
    "curves": ("curves", WIDE, ("light", "dark"), ""),
    "rollouts": ("rollouts?run=baseline-s0&step=20", WIDE, ("light", "dark"), ""),
    "prompt": ("prompts?run=baseline-s0", WIDE, ("light", "dark"), OPEN_GAINED),
    "evaluation": ("evaluations?run=baseline-s1", WIDE, ("light", "dark"), OPEN_FIRST),
    "settings": ("settings", WIDE, ("light",), ""),
    "phone_overview": ("overview?run=baseline-s0", PHONE, ("light", "dark"), ""),
    "phone_rollouts": ("rollouts?run=baseline-s0&step=20", PHONE, ("light", "dark"), ""),
}
PICTURES_WITH_IMAGES: Pictures = {"images": ("rollouts?run=shapes&step=10", WIDE, ("light", "dark"), "")}


def main() -> None:
    """Makes the runs and takes the pictures."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("names", nargs="*", metavar="NAME")
    flags.add_argument("--runs", type=Path, default=ROOT / "build" / "view_runs")
    given = flags.parse_args()
    if unknown := set(given.names) - {*PICTURES, *PICTURES_WITH_IMAGES}:
        flags.error(f"there is no picture {', '.join(sorted(unknown))}")
    IMAGES.mkdir(exist_ok=True)
    for runs, pictures in ((RUNS, PICTURES), (RUNS_WITH_IMAGES, PICTURES_WITH_IMAGES)):
        chosen = {name: picture for name, picture in pictures.items() if not given.names or name in given.names}
        if chosen:
            make_runs(given.runs, runs)
            take_pictures([given.runs / name for name in runs], chosen)


def take_pictures(runs: Iterable[Path], pictures: Pictures) -> None:
    """Takes pictures of the page of some runs."""
    browser = opened_browser()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        server = make_server(Runs([*runs]), port, None)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            for name, (place, size, themes, action) in pictures.items():
                for theme in themes:
                    take(browser, f"http://127.0.0.1:{port}/", f"{name}_{theme}", place, size, action)
        finally:
            browser.quit()
            server.should_exit = True
            thread.join()


def make_runs(folder: Path, runs: Mapping[str, str]) -> None:
    """Trains the runs that are not there yet, by commands that anyone can repeat."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hacked.py").write_text(HACKED)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}
    for name, flags in runs.items():
        if not (folder / name / "result.json").exists():
            command = [sys.executable, "-m", "groupax", "train", *flags.split(), "--output_dir", str(folder / name)]
            subprocess.run(command, check=True, env=environment)


def opened_browser() -> Any:
    """Returns headless Chromium."""
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))


def take(browser: Any, address: str, name: str, place: str, size: tuple[int, int, float, bool], action: str) -> None:
    """Takes a picture of a place of the page."""
    width, height, scale, is_mobile = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": is_mobile}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(address)
    browser.execute_script("localStorage.setItem('groupax-theme', arguments[0])", name.rpartition("_")[2])
    browser.execute_script("localStorage.setItem('groupax-smoothing', '0.5')")
    browser.execute_script("localStorage.setItem('groupax-compared', '\"median\"')")
    browser.get("about:blank")
    browser.get(f"{address}#/{place}")
    time.sleep(SETTLED_S)
    if action:
        browser.execute_script(action)
        time.sleep(SETTLED_S)
    picture = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    small = picture.quantize(NUM_COLORS, dither=Image.Dither.NONE)
    small.save(IMAGES / f"view_{name}.png", optimize=True)


if __name__ == "__main__":
    main()
