"""A report says what the files of a run's folder say, shows what others wrote as text, and needs nothing else."""

import html
import json
import re
import shlex
import shutil
from html.parser import HTMLParser

import pytest

from groupax import GRPOConfig
from groupax.cli.main import main
from groupax.cli.train import Train
from groupax.core.settings.command_line import parsed
from groupax.evaluation.items import Completion, Item, write_items
from groupax.events import EventStream
from groupax.recipes import load_recipe
from groupax.runs.folder import RunFolder
from groupax.runs.log import RunLog
from groupax.runs.report.contents import contents_of
from groupax.runs.report.page import curve, write_run_report
from groupax.runs.report.record import read_run
from tests.training.test_trainer import a_trainer, count_a

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)> \x1b[31m\x00 | `x` </pre>"
PROMPTS = [{"prompt": "abc" + HOSTILE, "gold": "a"}, {"prompt": "bcd", "gold": "b"}]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of four steps on two prompts with markup in one of them."""
    folder = tmp_path_factory.mktemp("reported")
    trainer = a_trainer(
        folder, count_a, PROMPTS, prompts_per_step=2, max_steps=4, eval_dataset=PROMPTS, eval_steps=2, track_memory=True
    )
    trainer.train()
    return folder / "run"


@pytest.fixture(scope="module")
def report(run, tmp_path_factory):
    """Its HTML and its Markdown."""
    to = tmp_path_factory.mktemp("written")
    page, markdown = write_run_report(run, to, price_per_hour=3600.0)
    return page.read_text(encoding="utf-8"), markdown.read_text(encoding="utf-8")


class Page(HTMLParser):
    """Its elements, their attributes, and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.names, self.text = set(), set(), ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.names |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.text += data


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_page_needs_nothing_else_and_shows_what_others_wrote_as_text(report):
    html, markdown = report
    page = Page(html)
    assert not page.tags & {"script", "img", "link", "iframe", "object", "form", "a"}
    assert not {name for name in page.names if name.startswith("on")} | (page.names & {"src", "href"})
    assert "default-src 'none'" in html
    assert not re.search(r"url\(|@import|https?://", html)
    assert "abc" + HOSTILE.split(" \x1b")[0] in page.text
    assert "␛[31m␀" in html
    for text in report:
        assert "<script" not in text
        assert "<img" not in text
        assert not re.search("[\x00-\x08\x0b-\x1f]", text)
    assert markdown.count("<pre>") == markdown.count("</pre>") > 0


def test_numbers_are_those_of_the_metrics(run, report):
    record = read_run(run)
    lines = [line for line in metrics_of(run) if "loss" in line]
    assert record.num_steps == 4
    assert record.total("step_time") == pytest.approx(sum(line["step_time"] for line in lines))
    [cost] = [row[1] for row in contents_of(record, 3600.0)["summary"] if row[0] == "cost"]
    assert cost.startswith(f"{record.total('step_time'):,.2f} at 3600 per machine hour")
    assert cost in report[1]
    [curve_of_rewards] = [each for each in contents_of(record)["curves"] if each.title == "reward"]
    assert curve_of_rewards.series["reward"] == [line["reward"] for line in lines]
    evaluations = [line for line in metrics_of(run) if "eval_reward" in line]
    [rewards] = [row[1:] for row in contents_of(record)["evaluations"] if row[0] == "reward"]
    assert [cell.split(" [")[0] for cell in rewards] == [f"{line['eval_reward']:.3f}" for line in evaluations]


def test_the_seconds_of_a_rollout_count_once_however_many_steps_are_made_on_it(tmp_path):
    folder = RunFolder(tmp_path)
    folder.start({})
    log = RunLog(GRPOConfig(progress_bar="none", log_completions=False), folder, 4, EventStream())
    sampled = {"time/rollout_s": 3.0, "time/reward_s": 1.0, "reward": 0.5}
    log.rollout(0, [], sampled, {})
    for step in (1, 2):
        log.step(step, {"loss": 0.0, "time/train_s": 0.5})
    log.resume(log.state(), [], sampled)
    log.step(3, {"loss": 0.0, "time/train_s": 0.5})
    for _ in range(2):  # a step may take what is left of one and some of the next
        log.rollout(3, [], sampled, {})
    log.step(4, {"loss": 0.0, "time/train_s": 0.5})
    lines = metrics_of(tmp_path)
    assert [line["time/rollout_s"] for line in lines] == [3.0, 0.0, 0.0, 6.0]
    assert [line["reward"] for line in lines] == [0.5] * 4


def test_the_same_prompts_are_shown_early_and_late(run, tmp_path):
    assert {pair.when for pair in read_run(run).samples} == {("step 2", "step 4")}, (
        "of evaluations where there are such"
    )
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "evaluations")
    samples = read_run(tmp_path / "run").samples
    assert {pair.when for pair in samples} == {("step 1", "step 4")}
    assert len({pair.prompt for pair in samples}) == 2


def test_a_run_that_goes_on_and_damaged_files_are_read_as_far_as_they_go(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": null, "reward": nu')
    (folder / "diagnostics.jsonl").write_bytes(b'{"step": 3, "name": "\xff<b>", "text": "<i>odd</i>"}\n[1]\nnothing\n')
    (folder / "run.json").write_text("{")
    (folder / "config.json").unlink()
    shutil.rmtree(folder / "evaluations")
    for path in (folder / "rollouts").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    texts = [path.read_text(encoding="utf-8") for path in write_run_report(folder)]
    assert "&lt;i&gt;odd&lt;/i&gt;" in texts[0]
    assert "<i>odd" not in "".join(texts)
    assert read_run(folder).num_steps == 4


def test_what_is_no_run_is_refused(tmp_path, capsys):
    with pytest.raises(ValueError, match=r"is not a run folder: it has no metrics\.jsonl"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval_reward": 1.0}\n')
    with pytest.raises(ValueError, match="has not come to a logged step"):
        read_run(tmp_path)
    assert main(["report", str(tmp_path)]) == 2
    assert "has not come to a logged step" in capsys.readouterr().err


def test_a_curve_goes_through_its_values_and_leaves_gaps():
    drawn = curve("a <title>", [1.0, 2.0, 3.0, 4.0], {"x": [0.0, 1.0, float("nan"), 0.5]})
    first, second = re.findall(r'<polyline points="([^"]+)"', drawn)
    assert first.split() == ["0.0,140.0", "140.0,0.0"], "y points down"
    assert second.split() == 2 * ["420.0,70.0"], "a value alone is a dot"
    assert 'aria-label="a &lt;title&gt;: x, from 0 to 1"' in drawn
    assert "<small>0 to 1, steps 1 to 4</small>" in drawn
    assert len(curve("t", [*map(float, range(10_000))], {"x": [0.0, 1.0] * 5000})) < 10_000
    assert curve("t", [1.0], {"x": [float("nan")]}) == ""


def test_a_report_names_what_was_trained_on_what_and_the_command(tmp_path):
    settings = {"chat_template_kwargs": {"enable_thinking": False}, "stop": ("```", "a_b*c\n"), "beta": 0.5}
    run = RunFolder(tmp_path)
    rewards = ["rewards:right"]
    run.command = {
        "recipe": "arithmetic",
        "dataset": "my data.jsonl",
        "eval_dataset": ["x.jsonl"],
        "reward_funcs": rewards,
    }
    run.start(GRPOConfig.from_mapping(dict(load_recipe("arithmetic").config) | settings).to_dict())
    run.write_process({"run": {"model": str(tmp_path / "some-model"), "parameters": "12, all trained"}})
    run.write_metrics({"step": 1.0, "reward": 0.5, "loss": 0.1})
    page, markdown = (path.read_text(encoding="utf-8") for path in write_run_report(tmp_path))
    text = markdown.replace("\\", "")
    for row in ("model | some-model", "parameters | 12, all trained", "recipe | arithmetic", "data | my data.jsonl"):
        assert f"| {row} |" in text
    assert "| reward functions | rewards:right |" in text
    [(_, command)] = re.findall(r"^(````+)\n(groupax .*?)\n\1$", markdown, re.MULTILINE | re.DOTALL)
    assert f"<pre>{command}</pre>" in html.unescape(page)
    assert "--num_generations" not in command  # the recipe has it
    repeated = parsed(Train, "train", shlex.split(command)[2:])  # it can be pasted, whatever it has
    assert {name: getattr(repeated.args, name) for name in settings} == settings
    assert repeated.eval_dataset == ("x.jsonl",)
    assert (repeated.dataset, repeated.reward_funcs) == ("my data.jsonl", ("rewards:right",))


def test_held_out_prompts_are_counted_by_how_their_answers_changed(run, tmp_path):
    def write(name, *rows):
        items = [
            Item(key, 0, f"prompt {key}", {}, [Completion("x", 1, "stop", {}, reward, solved)], False)
            for key, solved, reward in rows
        ]
        write_items(copy / "evaluations" / f"{name}.jsonl", items)

    copy = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(copy / "evaluations")
    solved = {"a": (False, True), "b": (True, False), "c": (True, True), "d": (False, False), "e": (False, True)}
    for when, index in (("before", 0), ("after", 1)):
        write(f"{when}.eval", *((key, both[index], 0.5) for key, both in solved.items()))
        write(f"{when}.more", ("f", None, -float(index)), ("g", None, 0.0))
    assert read_run(copy).changes == {"eval": (2, 1, 2), "more": (0, 1, 1)}
    page, markdown = (path.read_text(encoding="utf-8") for path in write_run_report(copy))
    assert "| eval | 2 | 1 | 2 |" in markdown
    assert "<td>more</td><td>0</td><td>1</td><td>1</td>" in page
    (copy / "evaluations" / "after.eval.jsonl").write_text("damaged")
    assert read_run(copy).changes == {"more": (0, 1, 1)}
    assert [pair.prompt for pair in read_run(copy).samples] == ["prompt g", "prompt f"], "the one that lost comes once"
