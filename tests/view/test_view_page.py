"""The page of `groupax view` in a real browser, headless: what a person does with it, and hostile content."""

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

import pytest

from groupax import init_model, save_model
from groupax.evaluation.items import Completion, Item
from groupax.runs.folder import RunFolder
from tests.conftest import TINY
from tests.data.test_config_and_data import a_tokenizer

from .test_view import HOSTILE, LONG, a_rollout, serving, write_run
from .test_view_episodes import write_episodes

# One worker for all of them: the run that goes on, its server and the browser are shared.
pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.xdist_group("page")]

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
GROUND = "return getComputedStyle(document.documentElement).backgroundColor"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run that goes on, one that is over, and one with hostile content."""
    home = tmp_path_factory.mktemp("page")
    save_model(
        init_model({**TINY, "vocab_size": 13, "num_hidden_layers": 1}), home / "model", a_tokenizer(eos_token="<eos>")
    )
    (home / "data.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in ("ab", "cd", "abc", "d")))
    (home / "rewards_of_a.py").write_text(REWARDS)
    write_run(home / "runs" / "earlier", {"beta": 0.25, "max_steps": 6})
    (home / "runs" / "earlier" / "model").mkdir()
    write_run(home / "runs" / HOSTILE_NAME, {"beta": 0.5, HOSTILE: HOSTILE})
    flags = "--prompts_per_step 4 --num_generations 4 --max_completion_length 8 --max_steps 100000 --progress_bar none"
    command = f"train --model {home}/model --dataset data.jsonl --output_dir runs/training {flags}".split()
    rewards = ["--reward_funcs", "rewards_of_a:many_a", "rewards_of_a:few_a"]
    environment = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    with (home / "log").open("w") as log:
        training = subprocess.Popen(
            [sys.executable, "-m", "groupax", *command, *rewards], cwd=home, stdout=log, stderr=log, env=environment
        )
    try:
        yield home / "runs"
    finally:
        if training.poll() not in (None, 0):
            print((home / "log").read_text())
        training.kill()
        training.wait()


@pytest.fixture(scope="module")
def address(runs):
    """Of a `groupax view` in a process of its own."""
    command = [sys.executable, "-m", "groupax", "view", str(runs), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stdout is not None
            told = serving.stdout.readline()
            yield told.split()[2].rstrip("/")
        finally:
            serving.terminate()


@pytest.fixture(scope="module")
def browser():
    """Chromium that can reach this machine alone."""
    selenium = pytest.importorskip("selenium.webdriver", reason="no selenium")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("no chromium with chromedriver (Debian: apt-get install chromium chromium-driver)")
    options = selenium.ChromeOptions()
    options.binary_location = program
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,1000"):
        options.add_argument(flag)
    options.add_argument("--disable-background-networking")
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chromium = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    yield chromium
    chromium.quit()


def until(check, seconds=240.0, told=str):
    """The first true answer of a check that looks again and again; what it looks at may come, go and move meanwhile.

    `told()` says more if it does not come.
    """
    from selenium.common.exceptions import WebDriverException

    end_s = time.monotonic() + seconds
    while True:
        why = None
        try:
            if found := check():
                return found
        except WebDriverException as error:
            why = error
        if time.monotonic() > end_s:
            raise AssertionError(f"this did not come. {told()}") from why
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
        self.one(css, lambda element: element.click())

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
        from selenium.webdriver.common.keys import Keys

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
    from selenium.webdriver.common.keys import Keys

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
    until(lambda: "token 1: “⟨0⟩” · id 0 · ratio trainer / policy" in hovered(page))
    page.keys(".card:last-child pre[tabindex]", Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    until(lambda: page.text(".token-reading") == "token 2: “⟨1⟩” · id 1 · ratio trainer / policy 1.284")
    page.press(Keys.ARROW_RIGHT)
    until(lambda: "prompt 1 of step 4" in page.text(".turns"))
    until(lambda: page.value("input[name=step]") == "4")
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
    assert "q=answer+1+of+step+2" in page.run("return document.querySelector('.found .joined a').href")
    page.click("input[name='regex']")
    until(lambda: "2 completions" in page.text(".found [role=status]"))
    page.choose("hits-order", "longest")
    lengths = until(lambda: len(page.all(".hits li")) == 2 and page.texts(".hits .facts"))
    assert lengths == ["A -0.5 · 4 tokens", "A -0.5 · 4 tokens"]
    page.click('.found select[name="end"] option[value="truncated"]')
    until(lambda: "No completion matches." in page.text(".found"))
    page.click('.found select[name="end"] option[value="complete"]')
    until(lambda: page.all(".hits a"))
    page.click(".hits a")
    until(lambda: "step 2 · 4 completions" in page.text(".prompt header"))


def test_the_list_is_filtered_by_reward_and_length(page):
    from selenium.webdriver.common.keys import Keys

    page.open("rollouts?run=earlier&step=3&sort=highest")
    until(lambda: page.texts(".groups b") == ["1", "2", "0"])
    assert page.texts(".strip output") == ["0 to 1", "3 to 6"]
    assert page.text(".prompt h2") == "Prompt 1"
    page.keys('input[name="reward-at-least"]', Keys.END)
    until(lambda: "1 of 3 groups" in page.text(".list .summary"))
    assert page.texts(".groups b") == ["1"]
    page.keys('input[name="reward-at-least"]', Keys.HOME)
    page.keys('input[name="reward-at-most"]', Keys.HOME)
    until(lambda: page.texts(".groups b") == ["2"])
    assert page.value('input[name="reward-at-most"]', "ariaValueText") == "0"
    page.keys('input[name="tokens-at-least"]', Keys.END)
    until(lambda: page.texts(".strip output") == ["0 to 0", "6 to 6"])
    until(lambda: "No matching group" in page.text(".detail"))  # no completion is in both ranges
    page.keys('input[name="tokens-at-least"]', Keys.HOME)
    until(lambda: page.texts(".groups b") == ["2"])
    page.press(Keys.ARROW_RIGHT)  # the range stays
    until(lambda: page.text(".prompt header small").startswith("step 4"))
    assert page.texts(".groups b") == ["2"]
    page.press(Keys.ESCAPE)
    until(lambda: "3 groups, 12 completions" in page.text(".list .summary"))


def test_completions_are_pinned_copied_and_linked_to(page):
    from selenium.webdriver.common.keys import Keys

    copied = "window.copied = []; navigator.clipboard.writeText = async (text) => { window.copied.push(text) }"
    page.open("rollouts?run=earlier&step=3&prompt=1&sample=2")
    current = ".card[aria-current] .facts"
    until(lambda: page.text(current).endswith("#2"))
    page.choose("order", "sampled")
    page.choose("channel", "")
    until(lambda: not page.all(".tok") and page.text(current).endswith("#2"))
    page.run(copied)
    page.press("j")
    until(lambda: page.text(current).endswith("#3"))
    page.press("j", "k", "k")
    until(lambda: page.text(current).endswith("#1"))
    page.press("c", "p")
    until(lambda: page.text(".told") == "Link to completion 1 copied")
    text, link = page.run("return window.copied")
    assert text == "answer 1 of step 3"
    assert link == f"{page.address}/#/rollouts?run=earlier&step=3&prompt=1&sample=1"
    page.run("navigator.clipboard.writeText = async () => { throw new Error() }")
    page.press("c")
    until(lambda: page.text(".told") == "The browser does not let this page write to the clipboard")
    pins = '[aria-label="Pin completion {}"]'
    page.click(pins.format(1))
    until(lambda: "Completion 1 is pinned" in page.text(".pinned"))
    page.keys(pins.format(3), Keys.ENTER)
    until(lambda: page.text(".pinned h3") == "From completion 1 (1) to 3 (1)")
    assert (page.texts(".pinned del"), page.texts(".pinned ins")) == (["1"], ["3"])
    page.click(pins.format(0))
    until(lambda: page.text(".pinned h3") == "From completion 3 (1) to 0 (1)")
    assert page.value(pins.format(1), "ariaPressed") == "false"
    page.choose("order", "best")
    until(lambda: page.value(pins.format(3), "ariaPressed") == "true")
    page.click(pins.format(3))
    until(lambda: "Completion 0 is pinned" in page.text(".pinned"))
    page.press(Keys.ARROW_UP)
    until(lambda: page.text(".prompt h2") != "Prompt 1")
    assert page.text(".pinned") == ""


def test_a_diagnostic_leads_to_what_it_asks_to_read(browser, tmp_path):
    run = write_run(tmp_path / "run", {}, num_steps=3)
    run.write_diagnostic(3, "reward_hacking", "read the completions with the highest reward")
    run.write_diagnostic(3, "length_explosion", "look at the longest ones")
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
        page.open("diagnostics")
        page.click('.diagnostics a[href*="sort=longest"]')
        until(lambda: page.text(".card[aria-current] .facts") == "6 tokens · #3")


def test_clipped_tokens_are_hatched_and_say_why(browser, tmp_path):
    settings = {"loss_type": "grpo", "importance_sampling_level": "token", "epsilon": 0.2, "epsilon_high": None}
    run = write_run(tmp_path / "run", {**settings, "mask_truncated_completions": True, "delta": None}, num_steps=1)
    with reading(browser, run.path) as page:
        page.open("rollouts?run=run&step=1&prompt=0")
        until(lambda: page.all(".card .tok"))
        page.choose("channel", "advantage x ratio")
        until(lambda: len(page.all(".dropped.tok")) == 5 + 6)
        assert "clipped or masked: 0" in page.text(".scale")
        titles = page.run("return [...document.querySelectorAll('.dropped.tok')].map((each) => each.title)")
        assert {title: titles.count(title) for title in titles} == {
            "clipped by the loss, so that its push is 0": 5,
            "masked in the loss, so that its push is 0": 6,
        }
        page.run(
            "arguments[0].dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))", page.all(".dropped.tok")[0]
        )
        assert page.text(".token-reading").endswith("push is 0")


def test_an_evaluation_is_compared_with_that_of_another_run(browser, tmp_path):
    def items(solved):
        made = [Completion(f"answer {each}", 5, "stop", {"right": float(each)}, float(each), each) for each in solved]
        return [Item(f"k{n}", n, f"question {n}", {}, [each]) for n, each in enumerate(made)]

    write_run(tmp_path / "one", {}, num_steps=1).write_items("after.eval", items([True, False, False]))
    other = write_run(tmp_path / HOSTILE_NAME, {}, num_steps=1)
    other.write_items("after.eval", items([False, True, True]))
    other.write_items("after.elsewhere", items([True]))
    with reading(browser, tmp_path) as page:
        page.open("evaluations?run=one")
        until(lambda: page.text(".summary") == "1 to 3 of 3 items")
        assert page.texts('select[name="before"] option') == ["none", f"after.eval of {HOSTILE_NAME}"]
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
        page.click('select[name="before"] option[value="0"]')
        until(lambda: page.text(".summary") == "1 to 3 of 3 items")
        browser.set_window_size(390, 800)  # a phone
        until(lambda: page.run("return innerWidth") < 520)
        assert page.run("return document.documentElement.scrollWidth <= innerWidth")
        browser.set_window_size(1400, 1000)


def test_a_button_tells_why_a_step_is_what_it_is(page):
    page.open("rollouts?run=earlier&step=3")
    until(lambda: page.all(".card"))
    page.click(".stepper button[aria-pressed]")
    until(lambda: page.text(".why h2") == "What the update of step 3 was made of")
    assert "an estimate" in page.text(".why")
    assert "--step 3 --why" in page.text(".why .commands")
    page.click(".why .rows button")
    until(lambda: page.all(".card"))
    assert page.value(".stepper button[aria-pressed]", "ariaPressed") == "false"


def test_a_search_of_all_steps_stays_when_the_list_comes_later(page):
    from selenium.webdriver.common.keys import Keys

    page.open("rollouts?run=earlier&step=4")
    until(lambda: len(page.all(".groups li")) == 3)
    page.run(HOLD, "/step?")
    page.write("answer 2 of step 4")
    until(lambda: page.run("return window.release !== undefined"))
    page.keys('main input[name="search"]', Keys.SHIFT, Keys.ENTER)
    until(lambda: "Search complete" in page.text(".found"))
    page.release()
    until(lambda: "2 of 3 groups" in page.text(".list .summary"))
    assert "Search complete" in page.text(".found")
    page.run("window.slow = '/group?'")
    page.click(".groups li:last-child")
    until(lambda: page.run("return window.release !== undefined"))
    page.keys('main input[name="search"]', Keys.SHIFT, Keys.ENTER)
    until(lambda: "Search complete" in page.text(".found"))
    page.release()
    assert "Search complete" in page.text(".found")


def test_a_hit_in_the_group_that_was_open_opens_it_again(page):
    from selenium.webdriver.common.keys import Keys

    page.open("rollouts?run=earlier&step=2&prompt=1")
    until(lambda: page.text(".prompt h2") == "Prompt 1")
    page.write("answer 1 of step 2")
    page.keys('main input[name="search"]', Keys.SHIFT, Keys.ENTER)
    until(lambda: "Search complete" in page.text(".found"))
    page.click('.found a[href$="run=earlier&step=2&prompt=1&sample=1"]')
    until(lambda: page.text(".prompt h2") == "Prompt 1")
    until(lambda: page.text(".card[aria-current] .facts").endswith("#1"))
    assert page.value('main input[name="search"]') == ""


def hovered(page):
    page.run("document.querySelector('.tok').dispatchEvent(new MouseEvent('mouseover', { bubbles: true }))")
    return page.text(".token-reading")


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
    page.click("main a")
    until(lambda: "What is 1+1?" in page.text("tbody"))


def test_themes_switch_and_stay(page):
    page.open("curves")
    until(lambda: page.all(".chart canvas"))
    ground = page.run(GROUND)
    page.press("t")
    other = until(lambda: (now := page.run(GROUND)) != ground and now)
    page.browser.refresh()
    until(lambda: page.all(".chart canvas"))
    assert page.run(GROUND) == other
    page.click("#theme")
    until(lambda: page.run(GROUND) == ground)


READY = {  # of each view what is there when it shows its data
    "overview": ".overview-facts dl",
    "runs": "table",
    "curves": ".chart",
    "distributions": "canvas",
    "time": ".phase",
    "rollouts": ".card",
    "prompts": "table",
    "evaluations": "h2",
    "settings": "table",
    "diagnostics": ".diagnostics",
}


def test_everything_is_named_and_reached_with_the_keyboard(page):
    from selenium.webdriver.common.keys import Keys

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


AXE = """const done = arguments[0];
const told = ({ id, nodes }) => `${id}: ${nodes.map((node) => node.html)}`;
axe.run().then(({ violations }) => done(violations.map(told)));"""


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
                page.choose("channel", "advantage x ratio")
                for sample in (0, 1):
                    page.click(f'[aria-label="Pin completion {sample}"]')
                until(lambda: page.all(".pinned ins"))
            page.run(source)
            assert page.browser.execute_async_script(AXE) == [], place
            assert page.run("return document.documentElement.scrollWidth <= innerWidth"), place
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_hostile_content_is_shown_as_text(page):
    from selenium.webdriver.common.keys import Keys

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
    from selenium.webdriver.common.keys import Keys

    write_episodes(tmp_path / "run")
    with reading(browser, tmp_path / "run") as page:
        page.open("rollouts?run=run&step=1&prompt=0")
        until(lambda: page.all(".card .chat"))
        page.choose("channel", "")
        page.choose("order", "sampled")
        card = ".card:first-child"
        until(lambda: len(page.all(f"{card} .call")) == 5 and not page.all(f"{card} .tok"))
        assert page.texts(f"{card} .chat > li > b") == [
            *("assistant · turn 1 +1.25 advantage 0.5", "assistant · turn 2 +0.25 advantage -0.5"),
            *("assistant · turn 3 +0.25 advantage 0", "assistant · turn 4 0 advantage 1.5"),
            *("user", "assistant · turn 5 +0.75 advantage 2"),
        ]
        title = page.run(f"return document.querySelector('{card} .turn-reward').title")
        assert title == f"Reward of this turn\nShop 1\n{SHOWN_HOSTILE} 0.25"
        calls = page.texts(f"{card} .call header")
        assert "look_up" in calls[0]
        assert " ms" in calls[0]
        assert [("error" in told) for told in calls] == [False, False, True, True, False]
        assert page.texts(f"{card} .call-name")[3] == SHOWN_HOSTILE
        assert page.text(f"{card} .call .result .text") == SHOWN_HOSTILE
        assert SHOWN_HOSTILE in page.text(f"{card} .by-others")
        assert "<script>alert(1)</script>" in page.text(f"{card} .arguments")
        assert "the environment ended it" in page.text(f"{card} header")
        long = f"{card} .call:nth-of-type(3) .result"
        length = f"return document.querySelector('{long} .text').textContent.length"
        assert page.run(length) == 400
        assert page.text(f"{long} button") == "Show all (4,200 characters)"
        page.click(f"{long} button")
        until(lambda: page.run(length) == 4200)
        assert page.run(NAMELESS) == []
        assert not page.all("main script, main img")
        page.choose("channel", "policy_logps")  # now by tokens; what the model read is another kind, and folded
        until(lambda: page.all(f"{card} .turn-text .tok"))
        assert not page.all(f"{card} .turn-text > pre .outside")
        page.keys(f"{card} .between summary", Keys.ENTER)
        page.run("arguments[0].dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))", page.all(".outside")[0])
        assert page.text(".token-reading").endswith("not sampled by the model")
        assert len(page.all(f"{card} .call")) == 5
        assert page.run("return document.documentElement.scrollWidth <= innerWidth")
        browser.set_window_size(390, 800)  # a phone
        until(lambda: page.run("return innerWidth") < 500)
        assert page.run("return document.documentElement.scrollWidth <= innerWidth")
        browser.set_window_size(1400, 1000)
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


def test_a_server_that_is_gone_is_told(page, runs):
    """Also in a test of its own server: this one ends it."""
    command = [sys.executable, "-m", "groupax", "view", str(Path(runs) / "earlier"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        own = serving.stdout.readline().split()[2].rstrip("/")
        page.browser.get(f"{own}/#/curves")
        until(lambda: page.all(".chart canvas"))
        serving.terminate()
    until(lambda: page.text(".connection") == "no connection")
    page.open("curves")
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
        until(lambda: page.text(".summary") == "1 to 1 of 1 item")
        until(lambda: page.value('select[name="evaluation"]') == "step_000003.eval")
        page.choose("evaluation", "step_000004.eval")
        until(lambda: "0 items became better, 0 worse, 1 did not change" in page.text(".summary"))
        page.click(".item summary")
        until(lambda: len(page.all(".item .card")) == 2)


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
    write_run(tmp_path / "some", {}, num_steps=1)
    run = RunFolder(tmp_path / "some")
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


def test_what_is_shown_stays_when_another_run_comes_and_changes_when_its_own_goes(browser, tmp_path):
    from selenium.webdriver.common.keys import Keys

    write_run(tmp_path / "some", {}, num_steps=3)
    with reading(browser, tmp_path) as page:
        page.open("rollouts?run=some")
        until(lambda: page.all(".card .tok"))
        page.run(HOLD, "/search?")
        page.write("answer 1 of step 2")
        page.keys('main input[name="search"]', Keys.SHIFT, Keys.ENTER)
        until(lambda: page.run("return window.release !== undefined"))
        write_run(tmp_path / "other", {"beta": 0.5}, num_steps=2)
        until(lambda: page.all('select[name="run"] option[value="other"]'))
        page.release()
        until(lambda: "Search complete" in page.text(".found"), seconds=20.0)
        for place, css in (("curves", ".chart canvas"), ("settings", "tbody")):
            page.open(place)
            until(lambda css=css: page.all(css))
            page.write("beta")
            write_run(tmp_path / f"with_{place}", {"beta": 0.75}, num_steps=1)
            until(lambda place=place: f"with_{place}" in page.text("#side"))
            assert page.value('main input[name="search"]') == "beta"
        until(lambda: "with_settings" in page.text("main thead"))
        for place in ("rollouts", "prompts", "evaluations"):
            page.open(f"{place}?run=some")
            until(lambda: page.value('select[name="run"]') == "some")
            (tmp_path / "some").rename(tmp_path / "gone")
            until(lambda: page.value('select[name="run"]') == "gone")
            (tmp_path / "gone").rename(tmp_path / "some")
            until(lambda: page.value('select[name="run"]') == "some")
            (tmp_path / "other").rename(tmp_path / "others")
            until(lambda: page.all('select[name="run"] option[value="others"]'))
            (tmp_path / "others").rename(tmp_path / "other")
        page.open("rollouts?run=late")
        until(lambda: page.all(".card .tok"))
        write_run(tmp_path / "late", {}, num_steps=1)
        until(lambda: page.value('select[name="run"]') == "late")
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
    from selenium.webdriver.common.keys import Keys

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
    from selenium.webdriver.common.keys import Keys

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
    swept.press("5")
    until(lambda: swept.all(".phase"))
    assert swept.value('select[name="run"]').endswith("-seed2"), "of the run that was shown before"


def test_names_stay_different_where_they_are_short():
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node")
    module = Path(__file__).parents[2] / "groupax" / "view" / "static" / "js" / "names.js"
    sets = {
        ("lr1-warmup100-model0.5B-seed1", "lr2-warmup100-model0.5B-seed2"): ["lr1-…-seed1", "lr2-…-seed2"],
        ("baseline-s0", "baseline-s1", "lr-high"): ["baseline-s0", "baseline-s1", "lr-high"],
        ("alphabet-betas", "betas-alphabet"): ["alphabet-betas", "betas-alphabet"],  # both would be an ellipsis
        ("experiments/one-seed1", "experiments/one-seed2", "experiments/one-seed3", "other"): [
            "…-seed1",
            "…-seed2",
            "…-seed3",
            "other",
        ],
        ("alone-without-others",): ["alone-without-others"],
        (): [],
    }
    script = f"""import {{ shortNames }} from {json.dumps(module.as_uri())};
    console.log(JSON.stringify({json.dumps(list(sets))}.map((names) => [...shortNames(names).values()])))"""
    told = subprocess.run(
        [node, "--input-type=module", "-e", script], capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(told) == list(sets.values())


def test_many_lines_have_a_legend_of_what_they_have_in_common(swept):
    from selenium.webdriver.common.keys import Keys

    swept.open("curves")
    legend = '[data-title="Rewards by function"] .legend'
    until(lambda: swept.texts(f"{legend} button") == ["f", "g"])
    assert "10 lines, in the colors of the list of runs" in swept.text(legend)
    swept.click(f"{legend} li:first-child button")
    until(lambda: swept.one(f"{legend} button", lambda each: each.get_attribute("aria-pressed")) == "false")
    swept.keys('[data-title="Rewards by function"] .canvas', Keys.END)
    reading = until(lambda: swept.text('[data-title="Rewards by function"] .reading'))
    assert "…-seed1: g" in reading
    assert "…-seed1: f" not in reading
    swept.keys("input[name=range-from]", "2", Keys.TAB, "3", Keys.TAB)
    until(lambda: swept.last_point("Reward") == 3)
    swept.keys('[data-title="Reward"] .canvas', Keys.HOME)
    assert swept.text('[data-title="Reward"] .reading').startswith("step 2\n")
    swept.choose("x-axis", "time")
    label = '[data-title="Reward"] .canvas'
    until(lambda: "kl runaway at step 3" in swept.one(label, lambda element: element.get_attribute("aria-label")))
    assert swept.value("input[name=range-from]") == ""


def test_a_chart_is_saved_as_a_picture(swept, tmp_path):
    saved = {"behavior": "allow", "downloadPath": str(tmp_path / "saved")}
    swept.browser.execute_cdp_cmd("Browser.setDownloadBehavior", saved)
    try:
        swept.open("curves")
        until(lambda: swept.all('[data-title="Reward"] canvas'))
        for button in swept.all('[data-title="Reward"] .saving button'):
            button.click()
        picture = tmp_path / "saved" / "Reward.png"
        until(picture.exists, seconds=30.0)
        assert picture.read_bytes().startswith(b"\x89PNG")
        swept.open("rollouts?step=2")
        until(lambda: swept.all(".card"))
        swept.click('button[title^="Save the rollouts"]')
        step = tmp_path / "saved" / "step_2.jsonl"
        until(step.exists, seconds=30.0)
        assert [json.loads(line)["step"] for line in step.read_text().splitlines()] == [2, 2]
    finally:
        swept.browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "default"})


def test_compilation_does_not_flatten_the_time_axis(swept):
    swept.open("time")
    until(lambda: swept.all(".phase.cut"))
    widths = swept.run("return [...document.querySelectorAll('.phase')].map((each) => each.offsetWidth)")
    assert max(widths) < 8 * sorted(widths)[len(widths) // 2]
    swept.click("details.more summary")
    cells = until(lambda: [text for text in swept.texts("details.more tbody tr:first-child > *") if text])
    assert cells == ["1", "28", "0", "0", "1", "1"]
    swept.choose("number", "10")
    until(lambda: swept.value("details.more", "open"), seconds=10.0)
    swept.click("details.more tbody a")
    until(lambda: swept.value("input[name=step]") == "1")


COLOURS = (
    """return [...document.querySelectorAll('#side .runs li')].map((each) => each.style.getPropertyValue('--key'))"""
)


def test_runs_share_the_color_of_a_setting_and_fit_a_phone(swept):
    swept.open("runs")
    until(lambda: len(set(swept.run(COLOURS))) == 5)
    swept.choose("colour-by", "beta")
    colours = until(lambda: len(set(found := swept.run(COLOURS))) == 2 and found)
    assert colours[0] == colours[1] != colours[2] == colours[3] == colours[4]
    swept.open("curves")
    until(lambda: swept.run(COLOURS) == colours)
    size = {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    swept.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        swept.open("runs")
        until(lambda: swept.all("tbody td"))
        cells = "td[data-label=Last], td[data-label=Best]"
        ends = "return [...document.querySelectorAll(arguments[0])].map((each) => each.getBoundingClientRect().right)"
        assert 0 < max(swept.run(ends, cells)) <= 390
        swept.open("curves")
        until(lambda: "Slide a finger" in swept.text(".toolbar"))
        assert "Drag across" not in swept.text(".toolbar")
    finally:
        swept.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_settings_are_compared_with_their_defaults(swept):
    swept.open("settings")
    until(lambda: "2 settings of" in swept.text(".summary"))
    swept.choose("show", "changed")
    rows = until(lambda: len(found := swept.texts("tbody tr")) == 2 and found)
    third = [swept.text(f"tbody tr:nth-child({row}) td:nth-child(4)") for row in (1, 2)]
    assert third == ["3 default 0", "0.5 default 0"], rows
