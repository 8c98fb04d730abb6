"""The page of `groupax view` in a real browser, headless: what a person does with it, and hostile content."""

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

import pytest

from groupax import init_model, save_model
from groupax.cli.main import main
from groupax.evaluation.items import Completion, Item
from groupax.runs.folder import RunFolder
from groupax.runs.note import Note, write_note
from tests.conftest import TINY
from tests.data.test_config_and_data import a_tokenizer

from .test_view import HOSTILE, LONG, a_rollout, serving, write_run
from .test_view_episodes import write_episodes

webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium")
Keys = webdriver.Keys
WebDriverException = pytest.importorskip("selenium.common.exceptions").WebDriverException
# One worker for all of them: the run that goes on, its server and the browser are shared.
pytestmark = [pytest.mark.heavy, pytest.mark.xdist_group("page")]

REWARDS = """
import time

def many_a(completions, **kwargs):
    time.sleep(1.0)
    return [float(text.count("a")) for text in completions]

def few_a(completions, **kwargs):
    return [-float(text.count("a")) / 2 for text in completions]
"""
SHOWN_HOSTILE = "<script>alert(1)</script>␛[31m⟨U+202E⟩txt.exe<img src=x onerror=alert(2)>␀"
HOSTILE_NAME = '"><img src=x onerror=alert(3)>'
HOSTILE_RUN = urlencode({"run": HOSTILE_NAME})
NAMELESS = """return [...document.querySelectorAll('button, input, select, a[href], [tabindex="0"]')].filter((each) =>
  !(each.getAttribute('aria-label') ?? each.closest('label')?.textContent ?? each.textContent).trim()
).map((each) => each.outerHTML)"""
FRAMED = """const [address, done] = arguments, frame = document.createElement('iframe');
frame.onload = () => { try { done(frame.contentDocument?.title ?? 'closed') } catch (error) { done('closed') } };
frame.src = address;
document.body.append(frame);"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run that goes on, one that is over, and one with hostile content."""
    home = tmp_path_factory.mktemp("page")
    model = init_model({**TINY, "vocab_size": 13, "num_hidden_layers": 1})
    save_model(model, home / "model", a_tokenizer(eos_token="<eos>"))
    (home / "data.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in ("ab", "cd", "abc", "d")))
    (home / "rewards_of_a.py").write_text(REWARDS)
    write_run(home / "runs" / "earlier", {"beta": 0.25, "max_steps": 6})
    (home / "runs" / "earlier" / "model").mkdir()
    write_run(home / "runs" / HOSTILE_NAME, {"beta": 0.5, HOSTILE: HOSTILE})
    command = "-m groupax train --model model --dataset data.jsonl --output_dir runs/training --prompts_per_step 4"
    command += " --num_generations 4 --max_completion_length 8 --max_steps 100000 --progress_bar none"
    command += " --reward_funcs rewards_of_a:many_a rewards_of_a:few_a"
    environment = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    with (home / "log").open("w") as log:
        words = [sys.executable, *command.split()]
        training = subprocess.Popen(words, cwd=home, stdout=log, stderr=log, env=environment)
    yield home / "runs"
    if training.poll() not in (None, 0):
        print((home / "log").read_text())
    training.kill()
    training.wait()


@pytest.fixture(scope="module")
def address(runs):
    """Of a `groupax view` in a process of its own."""
    command = [sys.executable, "-m", "groupax", "view", str(runs), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as view:
        yield view.stdout.readline().split()[2].rstrip("/")
        view.terminate()


@pytest.fixture(scope="module")
def browser():
    """Chromium that can reach this machine alone."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("no chromium with chromedriver (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    flags = "--headless=new --no-sandbox --disable-dev-shm-usage --disable-background-networking"
    for flag in [*flags.split(), "--window-size=1400,1000", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chromium = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    chromium.set_script_timeout(240.0)
    yield chromium
    chromium.quit()


def until(check, seconds=240.0, told=str):
    """The first true answer of a check that looks again and again, since what it looks at comes, goes and moves.

    `told()` says more if it does not come.
    """
    end_s = time.monotonic() + seconds
    while True:
        with suppress(WebDriverException):
            if found := check():
                return found
        assert time.monotonic() < end_s, f"this did not come. {told()}"
        time.sleep(0.1)


class Reader:
    """Who looks at the page."""

    def __init__(self, browser, address):
        self.browser, self.address = browser, address

    def open(self, place):
        self.browser.get("about:blank")
        self.browser.get(f"{self.address}/#/{place}")

    def all(self, css):
        return self.browser.find_elements("css selector", css)

    def one(self, css, action):
        """What an action on an element gives; the page may put another one in its place meanwhile."""
        return until(lambda: [action(self.browser.find_element("css selector", css))])[0]

    def text(self, css):
        return self.one(css, lambda element: element.text)

    def texts(self, css):
        return until(lambda: [[element.text for element in self.all(css)]])[0]

    def value(self, css, name="value"):
        return self.one(css, lambda element: element.get_property(name))

    def click(self, css):
        def scroll_and_click(element):  # out of what stays at the edges of the window
            self.run("arguments[0].scrollIntoView({ block: 'center' })", element)
            element.click()

        self.one(css, scroll_and_click)

    def click_all(self, css):
        for element in self.all(css):
            element.click()

    def keys(self, css, *keys):
        self.one(css, lambda element: element.send_keys(*keys))

    def press(self, *keys):
        self.keys("body", *keys)

    def choose(self, name, value):
        self.click(f'select[name="{name}"] option[value="{value}"]')

    def write(self, text):
        field = 'main input[name="search"]'
        self.one(field, lambda element: element.clear())
        self.keys(field, text)

    def run(self, script, *values):
        return self.browser.execute_script(script, *values)

    def last_point(self, title):
        """The last step that a curve shows, read with the keyboard."""
        if not self.all(f'[data-title="{title}"] canvas'):
            return 0  # there, the key would scroll the page to its end, where the curve is out of sight
        self.keys(f'[data-title="{title}"] .canvas', Keys.END)
        told = self.text(f'[data-title="{title}"] .reading')
        return int(told.splitlines()[0].removeprefix("step ").replace(",", "")) if told else 0

    def release(self):
        """The answer that `HOLD` holds back."""
        self.browser.execute_async_script("window.release().then(() => setTimeout(arguments[0]))")
        self.run("window.release = undefined")

    def errors(self):
        """What the console told, and requests to others, since the last time."""
        told = [entry["message"] for entry in self.browser.get_log("browser")]
        for entry in self.browser.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                url = message["params"]["request"]["url"]
                if not url.startswith((self.address, "data:", "about:")):
                    told.append(f"request to {url}")
        return told


def a_reader(browser, address):
    """Whose browser has forgotten what was before."""
    browser.get("about:blank")
    reader = Reader(browser, address)
    reader.errors()
    return reader


@pytest.fixture
def page(browser, address):
    reader = a_reader(browser, address)
    yield reader
    assert reader.errors() == []
    reader.run("localStorage.clear()")


@contextmanager
def reading(browser, folder):
    """The page of a server of its own."""
    with serving(folder) as port:
        reader = a_reader(browser, f"http://127.0.0.1:{port}")
        yield reader
        assert reader.errors() == []
        reader.run("localStorage.clear()")
        browser.get("about:blank")


def test_groups_are_opened_filtered_and_searched(page):
    page.open("rollouts?run=earlier&step=3&sort=order")
    until(lambda: len(page.all(".groups li")) == 3)
    page.press(Keys.ARROW_DOWN)
    until(lambda: page.text(".prompt h2") == "Prompt 1")
    until(lambda: page.text(".turns") == "system\nBe brief.\nuser\nprompt 1 of step 3")
    until(lambda: page.all(".card .tok"))
    totals = page.texts(".card .total")
    assert totals == sorted(totals, reverse=True)
    page.choose("order", "sampled")
    until(lambda: "right\n0\n<b>brief</b>\n1\n" in page.text(".card:first-child"))
    until(lambda: "truncated" in page.text(".card:last-child"))
    page.choose("channel", "ratio trainer / policy")
    page.keys(".card:last-child pre[tabindex]", Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    until(lambda: page.text(".token-reading") == "token 2: “⟨1⟩” · id 1 · ratio trainer / policy 1.284")
    page.press(Keys.ARROW_RIGHT)
    until(lambda: "prompt 1 of step 4" in page.text(".turns"))
    for kept, badge in (("zero", "no variance"), ("disagree", "disagree"), ("truncated", "truncated")):
        page.choose("filter", kept)
        until(lambda badge=badge: all(badge in group.text for group in page.all(".groups li")))
    page.choose("filter", "all")
    page.choose("sort", "lowest")
    means = until(lambda: len(page.all(".groups li")) == 3 and [float(each.text) for each in page.all(".groups .mean")])
    assert means == sorted(means)
    page.press("/")
    page.browser.switch_to.active_element.send_keys("answer 2 of step 4")
    until(lambda: "2 of 3 groups" in page.text(".list .summary"))
    page.write("nowhere at all")
    until(lambda: "No matching group" in page.text(".detail"))
    page.write("answer 1 of step 2")
    page.browser.switch_to.active_element.send_keys(Keys.SHIFT, Keys.ENTER)
    until(lambda: "Search complete" in page.text(".found"))
    page.choose("hits-order", "longest")
    until(lambda: page.texts(".hits .facts") == ["A -0.5 · 4 tokens", "A -0.5 · 4 tokens"])
    page.click('.found select[name="end"] option[value="truncated"]')
    until(lambda: "No completion matches." in page.text(".found"))
    page.click('.found select[name="end"] option[value="complete"]')
    until(lambda: page.all(".hits a"))
    page.click(".hits a")
    until(lambda: "step 2 · 4 completions" in page.text(".prompt header"))


def test_completions_are_pinned_copied_and_linked_to(page):
    copied = "window.copied = []; navigator.clipboard.writeText = async (text) => { window.copied.push(text) }"
    page.open("rollouts?run=earlier&step=3&prompt=1&sample=2")
    current = ".card[aria-current] .facts"
    until(lambda: page.text(current).endswith("#2"))
    page.choose("order", "sampled")
    page.choose("channel", "")
    until(lambda: not page.all(".tok") and page.text(current).endswith("#2"))
    page.run(copied)
    page.press("j", "k", "k")
    until(lambda: page.text(current).endswith("#1"))
    page.press("c", "p")
    until(lambda: page.text(".told") == "Link to completion 1 copied")
    place = f"{page.address}/#/rollouts?run=earlier&step=3&prompt=1&sample=1"
    assert page.run("return window.copied") == ["answer 1 of step 3", place]
    pins = '[aria-label="Pin completion {}"]'
    page.click(pins.format(1))
    until(lambda: "Completion 1 is pinned" in page.text(".pinned"))
    page.keys(pins.format(3), Keys.ENTER)
    until(lambda: page.text(".pinned h3") == "From completion 1 (1) to 3 (1)")
    assert (page.texts(".pinned del"), page.texts(".pinned ins")) == (["1"], ["3"])
    page.press(Keys.ARROW_UP)
    until(lambda: page.text(".prompt h2") != "Prompt 1")
    assert page.text(".pinned") == ""


def test_a_diagnostic_leads_to_what_it_asks_to_read(browser, tmp_path):
    run = write_run(tmp_path / "run", {}, num_steps=3)
    run.write_diagnostic(3, "reward_hacking", "read the completions with the highest reward")
    library = '  File "/usr/lib/python3.11/json/decoder.py", line 337, in decode\n    obj, end = self.raw_decode(s)\n'
    own = '  File "/home/me/rewards.py", line 4, in right\n    return json.loads(text)\n           ^^^^^^\n'
    error = "json.decoder.JSONDecodeError: Expecting value"
    begun = "Traceback (most recent call last):\n"
    cause = f'{begun}  File "/home/me/other.py", line 1, in f\nKeyError: 1\n\nDuring handling:\n\n'
    run.write_diagnostic(3, "reward right", f"right failed: {cause}{begun}{own}{library}{error}")
    with reading(browser, run.path) as page:
        page.open("diagnostics")
        until(lambda: page.all(".trace"))
        assert page.text(".trace") == f"{own}{error}"
        page.click('.diagnostics a[href*="sort=highest"]')
        until(lambda: page.text(".prompt h2") == "Prompt 1")
        until(lambda: page.all(".card[aria-current]"))
        assert page.text(".card[aria-current] .total") == "1"


def test_an_evaluation_is_compared_with_that_of_another_run(browser, tmp_path):
    def items(solved):
        made = [Completion(f"answer {each}", 5, "stop", {"right": float(each)}, float(each), each) for each in solved]
        return [Item(f"k{n}", n, f"question {n}", {}, [each]) for n, each in enumerate(made)]

    write_run(tmp_path / "one", {}, num_steps=1).write_items("after.eval", items([True, False, False]))
    other = write_run(tmp_path / HOSTILE_NAME, {}, num_steps=1)
    other.write_items("after.eval", items([False, True, True]))
    other.write_items("after.elsewhere", items([True]))
    (other.path / "evaluations" / "step_000020.eval.jsonl").write_text("{}\n")
    with reading(browser, tmp_path) as page:
        page.open("evaluations?run=one")
        until(lambda: page.text(".summary") == "1 to 3 of 3 items")
        page.click('select[name="before"] optgroup option')
        until(lambda: f"1 item better than in {HOSTILE_NAME}, 2 worse, 0 the same" in page.text(".summary"))
        assert page.texts(".estimates thead th")[-4:-2] == [f"{HOSTILE_NAME}, after.eval", "one, after.eval"]
        page.click(".item summary")
        until(lambda: page.texts(".item ins") == ["False"])
        assert page.texts(".item del") == ["True"]
        page.choose("which", "gained")
        until(lambda: len(page.all(".item")) == 1)
        page.browser.refresh()
        until(lambda: "2 worse" in page.text(".summary"))
        assert not page.all("main script, main img")


def test_one_prompt_is_followed_over_steps(page):
    page.open("rollouts?run=earlier&step=2&prompt=0")
    until(lambda: page.text(".prompt h2") == "Prompt 0")
    page.click(".prompt header .button")
    until(lambda: page.text(".prompt-text") == "What is 1+1?")
    page.click("main details summary")
    until(lambda: len(page.all("tbody tr")) == 6)
    until(lambda: len(page.all(".columns-of-steps .card")) == 3)
    assert page.texts(".columns-of-steps ins") == ["4", "6"]  # of "answer 0 of step 4"
    assert page.texts(".columns-of-steps del") == ["1", "4"]
    page.choose("column-0", "4")
    until(lambda: page.texts(".columns-of-steps del") == ["5", "4"])
    page.choose("compared", "worst")
    until(lambda: "answer 3 of step 5" in page.text(".columns-of-steps .card"))
    assert page.last_point("Reward of this prompt") == 6
    page.click("select[name=with] option:nth-child(2)")
    until(lambda: len(cards := page.texts(".columns-of-steps .card")) == 2 and f"of {HOSTILE_NAME}" in cards[1])
    page.click("main a")
    until(lambda: "What is 1+1?" in page.text("tbody"))


READY = {  # of each view what is there when it shows its data
    "overview": ".overview-facts dl",
    "runs": "table",
    "curves": ".chart",
    "time": ".share-bar",
    "rollouts": ".card",
    "prompts": "table",
    "evaluations": "h2",
    "settings": "table",
    "diagnostics": ".diagnostics",
}


def test_everything_is_named_and_reached_with_the_keyboard(page):
    page.open("curves")
    until(lambda: page.all(".chart canvas"))
    for number, (place, ready) in enumerate(READY.items(), 1):
        page.press(str(number % 10))
        until(lambda ready=ready: page.all(f"main {ready}"))
        until(lambda place=place: page.run("return location.hash").startswith(f"#/{place}"))
        assert page.run(NAMELESS) == []
        assert len(page.all("h1")) == 1
    page.press("?")
    until(lambda: "Shift+Enter" in page.text("dialog[open]"))
    page.press(Keys.ESCAPE)
    until(lambda: not page.all("dialog[open]"))
    ground = "return getComputedStyle(document.documentElement).backgroundColor"
    before = page.run(ground)
    page.press("t")
    other = until(lambda: (now := page.run(ground)) != before and now)
    page.browser.refresh()
    until(lambda: page.all("main h1, main h2"))
    assert page.run(ground) == other, "the theme stays"


AXE = """axe.run().then(({ violations }) =>
  arguments[0](violations.map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.html)}`)));"""


@pytest.mark.skipif("AXE_CORE" not in os.environ, reason="AXE_CORE is not the path of axe.min.js (npm pack axe-core)")
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_axe_core_finds_no_violation(page, theme, width):
    source = Path(os.environ["AXE_CORE"]).read_text()
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.open("prompts?run=earlier")
    key = page.one("tbody a", lambda element: element.get_attribute("href").partition("#/")[2])
    page.run("localStorage.setItem('groupax-theme', arguments[0])", theme)
    try:
        group = "rollouts?run=earlier&step=3&sample=1"
        for place, ready in [*READY.items(), (key, ".columns-of-steps .card"), (group, ".tok")]:
            page.open(f"{place}?run=earlier" if "?" not in place else place)
            until(lambda ready=ready: page.all(f"main {ready}"))
            if place == group:
                page.choose("channel", "entropies")
                for sample in (0, 1):
                    page.click(f'[aria-label="Pin completion {sample}"]')
                until(lambda: page.all(".pinned ins"))
            page.run(source)
            assert page.browser.execute_async_script(AXE) == [], place
            assert page.run("return document.documentElement.scrollWidth <= innerWidth"), place
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_an_exported_run_needs_no_server(browser, runs, tmp_path):
    file = tmp_path / "a run.html"
    assert main(["export", str(runs / HOSTILE_NAME), "-o", str(file)]) == 0
    page = a_reader(browser, f"{file.as_uri()}?")
    for place, ready in READY.items():
        if place in ("runs", "prompts"):  # which an exported page does not have
            continue
        page.open(place)
        until(lambda ready=ready: page.all(f"main {ready}"))
        assert not page.all("main script, main img, aside img, aside script, .failed"), place
        if "AXE_CORE" in os.environ:
            page.run(Path(os.environ["AXE_CORE"]).read_text())
            assert page.browser.execute_async_script(AXE) == [], place
    page.open("rollouts?step=3&prompt=2")
    until(lambda: SHOWN_HOSTILE in page.text("main .prompt-text, .prompt .text") and page.all(".tok"))
    assert page.errors() == []
    assert file.stat().st_size < 3e6


def test_hostile_content_is_shown_as_text(page):
    page.open(f"rollouts?{HOSTILE_RUN}&step=3&prompt=2")
    until(lambda: page.text(".prompt h2") == "Prompt 2")
    until(lambda: page.text(".prompt .text") == SHOWN_HOSTILE)
    page.choose("channel", "")
    page.choose("order", "sampled")
    until(lambda: len(page.all(".card .completion .text")) == 4)
    until(lambda: page.texts(".card .completion .text")[1] == SHOWN_HOSTILE)
    long = ".card:first-child .completion"
    until(lambda: page.run(f"return document.querySelector('{long} .text').textContent.length") == 4000)
    until(lambda: page.text(f"{long} button") == "Show all (1,200 kB)")
    # what arrives late is drawn again, as a reader would click again
    length = f"return document.querySelector('{long} .text').textContent.length"
    until(lambda: page.run(length) == len(LONG) or page.click_all(f"{long} button"))
    until(lambda: SHOWN_HOSTILE in page.text(".extra") or page.click_all(".extra summary"))
    page.press(Keys.ESCAPE)
    for place, css in (("diagnostics", ".diagnostics"), ("settings", ".settings"), ("prompts", "table")):
        page.open(f"{place}?{HOSTILE_RUN}")
        until(lambda css=css: SHOWN_HOSTILE in page.text(f"main {css}"))
        assert not page.all("main script, main img, aside img, aside script")
    until(lambda: HOSTILE_NAME in page.text("aside"))


def test_an_episode_is_a_chat_in_which_nothing_is_markup(browser, tmp_path):
    write_episodes(tmp_path / "run")
    with reading(browser, tmp_path / "run") as page:
        page.open("rollouts?run=run&step=1&prompt=0")
        until(lambda: page.all(".card .chat"))
        page.choose("channel", "")
        page.choose("order", "sampled")
        card = ".card:first-child"
        until(lambda: len(page.all(f"{card} .call")) == 5 and not page.all(f"{card} .tok"))
        turns = page.texts(f"{card} .chat > li > b")
        assert turns[0] == "assistant · turn 1 +1.25"
        assert turns[4:] == ["user", "assistant · turn 5 +0.75"]
        title = page.run(f"return document.querySelector('{card} .turn-reward').title")
        assert title == f"Reward of this turn\nShop 1\n{SHOWN_HOSTILE} 0.25"
        calls = page.texts(f"{card} .call header")
        assert [("error" in told) for told in calls] == [False, False, True, True, False]
        assert page.texts(f"{card} .call-name")[3] == SHOWN_HOSTILE
        assert page.text(f"{card} .call .result .text") == SHOWN_HOSTILE
        assert SHOWN_HOSTILE in page.text(f"{card} .by-others")
        assert "the environment ended it" in page.text(f"{card} header")
        long = f"{card} .call:nth-of-type(3) .result"
        assert page.text(f"{long} button") == "Show all (4,200 characters)"
        page.click(f"{long} button")
        until(lambda: page.run(f"return document.querySelector('{long} .text').textContent.length") == 4200)
        assert page.run(NAMELESS) == []
        page.choose("channel", "policy_logps")  # now by tokens; what the model read is another kind, and folded
        until(lambda: page.all(f"{card} .turn-text .tok"))
        page.keys(f"{card} .between summary", Keys.ENTER)
        page.run("arguments[0].dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))", page.all(".outside")[0])
        assert page.text(".token-reading").endswith("not sampled by the model")
        page.open("evaluations?run=run")
        until(lambda: page.all(".item summary"))
        page.click(".item summary")
        until(lambda: len(page.all(".item .call")) == 10)
        assert not page.all("main script, main img")
        page.open("curves")
        until(lambda: page.all('[data-title="Ends of episodes"]'))


class OtherOrigin(http.server.BaseHTTPRequestHandler):
    """A page of somebody else."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>other</title><link rel=icon href=data:,>")

    def log_message(self, *args):
        pass


def test_pages_of_others_get_nothing(browser, address):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OtherOrigin) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        browser.get(f"http://127.0.0.1:{other.server_port}/")
        for options in ("{}", "{mode: 'no-cors'}", "{credentials: 'include'}"):
            script = f"fetch('{address}/api/runs', {options}).then((a) => a.text(), String).then(arguments[0])"
            found = browser.execute_async_script(script)
            assert found in ("TypeError: Failed to fetch", ""), found
        assert browser.execute_async_script(FRAMED, f"{address}/") == "closed"
        other.shutdown()
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get_log("performance")


def test_a_server_that_is_gone_is_told(browser, tmp_path):
    run = write_run(tmp_path / "run", {}, num_steps=2)
    with serving(run.path) as port:
        page = a_reader(browser, f"http://127.0.0.1:{port}")
        page.open("curves")
        until(lambda: page.all(".chart canvas"))
    until(lambda: page.text(".connection") == "no connection")
    browser.get("about:blank")
    page.errors()


def test_a_run_that_is_begun_again_and_evaluated(browser, tmp_path):
    run = write_run(tmp_path / "run", {}, num_steps=2)
    item = Item("k", 0, "a question", {}, [Completion("an answer", 2, "stop", {}, 1.0, True)])
    with reading(browser, run.path) as page:
        page.open("curves")
        until(lambda: page.last_point("Reward") == 2)
        lines = (run.path / "metrics.jsonl").read_bytes()
        (run.path / "metrics.jsonl").write_bytes(b"")
        until(lambda: "No metrics yet" in page.text(".sections"))
        (run.path / "metrics.jsonl").write_bytes(lines)
        until(lambda: page.last_point("Reward") == 2)
        page.open("evaluations")
        until(lambda: "No evaluations" in page.text("main"))
        for step in (3, 4):
            run.write_items(f"step_{step:06d}.eval", [item])
            run.write_metrics({"step": float(step), "reward": 0.5})
            until(lambda step=step: len(page.all('select[name="evaluation"] option')) == step - 2)
        page.press("/")
        until(lambda: page.browser.switch_to.active_element.get_attribute("name") == "search")
        page.choose("evaluation", "step_000004.eval")
        until(lambda: "0 items became better, 0 worse, 1 did not change" in page.text(".summary"))
        run.write_process({"step": 0})
        run.write_end(f"failed: ValueError: {HOSTILE}")
        until(lambda: page.text("#side .fault") == f"failed: ValueError: {SHOWN_HOSTILE}")
        page.open("overview?run=run")
        until(lambda: page.text(".overview-head .status") == "failed")
        assert page.text(".overview-head .fault") == f"failed: ValueError: {SHOWN_HOSTILE}"
        write_note(run.path, Note("First", ["slow"], HOSTILE))
        until(lambda: page.text(".run-title h2") == page.text("#side .name") == "First")
        assert page.text(".notes") == SHOWN_HOSTILE
        page.open("runs")
        page.keys("input[name=search]", "slow")
        until(lambda: page.texts("tbody .tag") == ["slow"])
        page.keys("input[name=search]", "er")
        until(lambda: "No matching run" in page.text("main"))


HOLD = """const { fetch } = window;
const held = (url, { signal }) => new Promise((resolve, reject) => {
  window.release = async () => {
    const answer = await fetch(url);
    resolve(answer);
    await answer.clone().text();
  };
  signal.addEventListener("abort", () => reject(signal.reason));
});
window.fetch = (url, options) => url.includes(window.slow) ? held(url, options) : fetch(url, options);
window.slow = arguments[0];"""


def test_answers_that_come_too_late_are_left_out(browser, tmp_path):
    """And a long prompt is cut until all of it is asked for."""
    write_run(tmp_path / "none", {}, num_steps=0)
    run = write_run(tmp_path / "some", {}, num_steps=1)
    run.write_rollouts(2, [replace(a_rollout(1, 0, 0), example={"prompt": "a" * 50_000})])
    with reading(browser, tmp_path) as page:
        page.open("settings")
        until(lambda: page.all("main h1"))
        page.run(HOLD, "/steps?run=none")
        for place, css in (("rollouts?run=some", ".prompt"), ("curves", ".toolbar")):
            page.run("location.hash = '#/rollouts?run=none'")
            until(lambda: page.run("return window.release !== undefined"))
            page.run("location.hash = arguments[0]", f"#/{place}")
            until(lambda css=css: page.all(f"main {css}"))
            page.release()
            assert "No rollouts yet" not in page.text("main")
        page.open("rollouts?run=some&step=2")
        until(lambda: page.text(".prompt button").startswith("Show all (50 kB"))
        page.click(".prompt button")
        until(lambda: page.run("return document.querySelector('.prompt .text').textContent.length") == 50_000)
        page.run(HOLD, "/search?")  # another run comes meanwhile
        page.write("aa")
        page.keys('main input[name="search"]', Keys.SHIFT, Keys.ENTER)
        until(lambda: page.run("return window.release !== undefined"))
        write_run(tmp_path / "other", {"beta": 0.5}, num_steps=1)
        until(lambda: page.all('select[name="run"] option[value="other"]'))
        page.release()
        until(lambda: "Search complete" in page.text(".found"), seconds=20.0)
        (tmp_path / "some").rename(tmp_path / "gone")
        until(lambda: page.value('select[name="run"]') == "gone")
        assert [each for each in page.errors() if "404" not in each] == [], "of a run that went while it was asked for"


def test_a_curve_grows_without_a_reload(page, runs):
    def told():
        asked = "return [document.hidden, document.querySelector('.connection').textContent, location.href]"
        log = (runs.parent / "log").read_text()[-2000:]
        metrics = (runs / "training" / "metrics.jsonl").read_text().count("\n")
        return f"{page.run(asked)}; {page.text('#side')}; first {first}; {metrics} lines; {log}"

    page.open("curves")
    page.run("window.notReloaded = true")
    first = until(lambda: page.last_point("Reward"))
    until(lambda: "live" in page.text(".connection"))
    later = until(lambda: (now := page.last_point("Reward")) > first and now, told=told)
    until(lambda: page.last_point("Reward") > later)
    assert page.run("return window.notReloaded")
    label = page.one('[data-title="Reward"] .canvas', lambda element: element.get_attribute("aria-label"))
    assert "training: " in label
    assert "Arrow keys read the values" in label


def test_two_runs_are_compared(page):
    page.open("curves")
    until(lambda: len(page.all('[data-title="Reward"] .legend li')) == 3)
    page.click(f"input[name='run-{HOSTILE_NAME}']")
    legend = until(
        lambda: (found := page.text('[data-title="Reward"] .legend')) and HOSTILE_NAME not in found and found
    )
    assert "earlier" in legend
    assert "training" in legend
    page.run("const s = document.querySelector('[name=smoothing]'); s.value = 0.9; s.dispatchEvent(new Event('input'))")
    until(lambda: "0.90" in page.text(".toolbar output"))
    page.write("kl")
    until(lambda: not page.all('[data-title="Reward"]'))
    page.open("settings")
    until(lambda: "differ between 2 runs" in page.text(".summary"))
    rows = [[cell.text for cell in row.find_elements("css selector", "th, td")] for row in page.all("tbody tr")]
    assert ["max_steps", "6", "100000"] in rows
    assert ["beta", "0.25", "0"] in rows


def test_rollouts_of_a_run_that_goes_on(page):
    page.open("rollouts?run=training")
    until(lambda: len(page.all(".groups li")) == 4)
    first = int(page.value("input[name=step]"))
    page.choose("channel", "policy_logps")
    tokens = until(lambda: [token.text for token in page.all(".card:first-child .tok")])
    assert set("".join(tokens)) & set("abcd")  # by the run's tokenizer
    until(lambda: "many_a" in page.text(".card .rewards"))
    until(lambda: int(page.value("input[name=step-slider]", "max")) > first)
    page.press(Keys.END)
    until(lambda: int(page.value("input[name=step]")) > first)


def sweep(folder, num_runs, num_steps=4):
    """Runs with a long name that differs at its end, and two reward functions; the second wrote last."""
    for number in range(1, num_runs + 1):
        run = RunFolder(folder / f"a_sweep_of_settings_whose_runs_have_long_names-seed{number}")
        run.start({"seed": number, "beta": 0.5 if number > 2 else 0.0})
        for step in range(1, num_steps + 1):
            rewards = {"reward": step / number, "rewards/f/mean": step / 2, "rewards/g/mean": step / 3}
            times = {"step_time": 30.0 if step == 1 else 2.0, "time/train_s": 29.0 if step == 1 else 1.0}
            run.write_metrics(
                {"step": float(step), **rewards, **times, "time/compile_s": 28.0 if step == 1 else 0.0, "entropy": 0.1}
            )
            run.write_rollouts(step, [a_rollout(step, 1, sample) for sample in range(2)])
        run.write_diagnostic(3, "kl_runaway", "KL runs away")
        written_s = time.time() - 1000 + (500 if number == 2 else number)
        os.utime(run.path / "metrics.jsonl", (written_s, written_s))


@pytest.fixture
def swept(browser, tmp_path):
    """The page of five such runs."""
    sweep(tmp_path, 5)
    with reading(browser, tmp_path) as reader:
        reader.browser.get(reader.address)
        reader.run("localStorage.clear()")
        yield reader


def test_the_page_opens_on_the_overview_of_the_run_that_wrote_last(swept):
    swept.browser.get("about:blank")
    swept.browser.get(swept.address)
    until(lambda: swept.text(".run-title h2").endswith("-seed2"))
    assert swept.texts("#side .name") == [f"…-seed{number}" for number in range(1, 6)]
    until(lambda: swept.all('[data-title="Reward"] canvas'))
    label = swept.one('[data-title="Reward"] .canvas', lambda element: element.get_attribute("aria-label"))
    assert "…-seed2: kl runaway" in label
    until(lambda: "answer 0 of step 4" in swept.text(".overview-samples"))
    swept.keys('[data-title="Reward"] .canvas', Keys.HOME, Keys.ENTER)
    until(lambda: swept.value("input[name=step]") == "1")
    until(lambda: swept.value('select[name="run"]').endswith("-seed2"))
    swept.press("4")
    until(lambda: swept.all(".share-bar i"))
    assert swept.value('select[name="run"]').endswith("-seed2"), "of the run that was shown before"


def test_many_lines_have_a_legend_of_what_they_have_in_common(swept):
    swept.open("curves")
    legend = '[data-title="Rewards by function"] .legend'
    until(lambda: swept.texts(f"{legend} button") == ["f", "g"])
    swept.click(f"{legend} li:first-child button")
    until(lambda: swept.one(f"{legend} button", lambda each: each.get_attribute("aria-pressed")) == "false")
    swept.keys('[data-title="Rewards by function"] .canvas', Keys.END)
    reading = until(lambda: swept.text('[data-title="Rewards by function"] .reading'))
    assert "…-seed1: g" in reading
    assert "…-seed1: f" not in reading
    swept.keys("input[name=range-from]", "2", Keys.TAB, "3", Keys.TAB)
    until(lambda: swept.last_point("Reward") == 3)


def test_a_chart_is_saved_as_a_picture(swept, tmp_path):
    saved = tmp_path / "saved"
    behavior = {"behavior": "allow", "downloadPath": str(saved)}
    swept.browser.execute_cdp_cmd("Browser.setDownloadBehavior", behavior)
    swept.open("curves")
    until(lambda: swept.all('[data-title="Reward"] canvas'))
    for button in swept.all('[data-title="Reward"] .saving button'):
        button.click()
    until((saved / "Reward.png").exists, seconds=30.0)
    assert (saved / "Reward.png").read_bytes().startswith(b"\x89PNG")
    swept.browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "default"})


COLOURS = (
    """return [...document.querySelectorAll('#side .runs li')].map((each) => each.style.getPropertyValue('--key'))"""
)


def test_runs_share_the_color_of_a_setting_and_fit_a_phone(swept):
    swept.open("runs")
    until(lambda: len(set(swept.run(COLOURS))) == 5)
    swept.choose("colour-by", "beta")
    colours = until(lambda: len(set(found := swept.run(COLOURS))) == 2 and found)
    assert colours[0] == colours[1] != colours[2] == colours[3] == colours[4]
    swept.open("settings")
    until(lambda: "2 settings of" in swept.text(".summary"))
    swept.choose("show", "changed")
    until(lambda: len(swept.texts("tbody tr")) == 2)
    third = [swept.text(f"tbody tr:nth-child({row}) td:nth-child(4)") for row in (1, 2)]
    assert third == ["3 default 0", "0.5 default 0"]
    size = {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    swept.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        for place, ready in (("runs", "tbody td"), ("curves", ".chart canvas"), ("rollouts", ".card")):
            swept.open(place)
            until(lambda ready=ready: swept.all(f"main {ready}"))
            assert swept.run("return document.documentElement.scrollWidth <= innerWidth"), place
    finally:
        swept.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
