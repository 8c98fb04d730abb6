"""The pictures of docs/view.md: `python dev/view_screenshots.py RUNS_FOLDER`, e.g. with two runs of the demo.

Serves the runs, opens the page in headless Chromium, light and dark, and writes docs/images/view_NAME_THEME.png with
few colours, so that they stay small. Needs selenium, and Chromium with its driver.
"""

import io
import socket
import sys
import threading
import time
from pathlib import Path

from PIL import Image
from selenium import webdriver

from groupax.view.runs import Runs
from groupax.view.server import make_server

IMAGES = Path(__file__).parents[1] / "docs" / "images"
NUM_COLOURS = 200
SETTLED_S = 4.0
PLACES = {"curves": "curves", "rollouts": "rollouts?step=3&prompt=1", "settings": "settings"}
THEMES = {"curves": ("light", "dark"), "rollouts": ("light", "dark"), "settings": ("light",)}


def main() -> None:
    """Take the pictures."""
    IMAGES.mkdir(exist_ok=True)
    options = webdriver.ChromeOptions()
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--window-size=1400,980",
        "--hide-scrollbars",
    ):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        server, page = make_server(Runs([Path(folder) for folder in sys.argv[1:]]), port, None)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            for name, place in PLACES.items():
                for theme in THEMES[name]:
                    browser.get(f"http://127.0.0.1:{port}/")
                    browser.execute_script("localStorage.setItem('groupax-theme', arguments[0])", theme)
                    browser.execute_script("localStorage.setItem('groupax-smoothing', '0.7')")
                    browser.get("about:blank")
                    browser.get(f"http://127.0.0.1:{port}/#/{place}")
                    time.sleep(SETTLED_S)
                    picture = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
                    small = picture.quantize(NUM_COLOURS, dither=Image.Dither.NONE)
                    small.save(IMAGES / f"view_{name}_{theme}.png", optimize=True)
        finally:
            browser.quit()
            server.should_exit = True
            thread.join()
            page.close()


if __name__ == "__main__":
    main()
