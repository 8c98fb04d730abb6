"""A report says what the files of a run's folder say, shows what others wrote as text, and needs nothing else."""

import html
import json
import math
import re
import shlex
import shutil
from html.parser import HTMLParser

import pytest

from groupax import GRPOConfig
from groupax.cli.main import main
from groupax.cli.train import Train
from groupax.evaluation.items import Completion, Item, write_items
from groupax.events import EventStream
from groupax.runs.folder import RunFolder
from groupax.runs.log import RunLog
from groupax.runs.report.contents import contents_of, time_split
from groupax.runs.report.page import curve, numbers, write_run_report
from groupax.runs.report.record import read_run
from groupax.settings.command_line import parsed
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


def test_the_page_has_the_parts_of_a_report(run, report):
    page = Page(report[0])
    headings = ("Evaluation", "Diagnostics", "Curves", "Completions early and late", "Time", "Settings", "Hardware")
    assert [page.text.index(heading) for heading in headings] == sorted(map(page.text.index, headings))
    assert report[0].count("<svg") > 10
    assert "prompts_per_step" in page.text
    assert "learning_rate_end" not in page.text, "that is the default"
    [process] = json.loads((run / "run.json").read_text())["processes"]
    assert process["processor"] in page.text
    assert f"jax {process['versions']['jax']}" in page.text


def test_the_page_needs_nothing_else_and_runs_nothing(report):
    page = Page(report[0])
    assert not page.tags & {"script", "img", "link", "iframe", "object", "form", "a"}
    assert not {name for name in page.names if name.startswith("on")} | (page.names & {"src", "href"})
    assert "default-src 'none'" in report[0]
    assert not re.search(r"url\(|@import|https?://", report[0])


def test_what_others_wrote_is_shown_as_text(report):
    html, markdown = report
    assert "abc" + HOSTILE.split(" \x1b")[0] in Page(html).text
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
    [cost] = [row for row in contents_of(record, 3600.0)["summary"] if row[0] == "cost"]
    assert cost[1].startswith(f"{record.total('step_time'):,.2f} at 3600 per machine hour")
    [curve_of_rewards] = [each for each in contents_of(record)["curves"] if each.title == "reward"]
    assert curve_of_rewards.series["reward"] == [line["reward"] for line in lines]
    evaluations = [line for line in metrics_of(run) if "eval_reward" in line]
    [rewards] = [row[1:] for row in contents_of(record)["evaluations"] if row[0] == "reward"]
    assert [cell.split(" [")[0] for cell in rewards] == [f"{line['eval_reward']:.3f}" for line in evaluations]
    assert "cost" not in dict(row[:2] for row in contents_of(record)["summary"])
    assert cost[1] in report[1]


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
    split = time_split(read_run(tmp_path))
    assert (split["sampling"], split["waiting for rewards"], split["update"]) == (9.0, 3.0, 2.0)


def test_time_beside_updates_is_no_part_of_the_run(tmp_path):
    line = {"step": 1.0, "loss": 0.0, "step_time": 2.0, "time/rollout_s": 1.8, "time/train_s": 1.0, "time/wait_s": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    split = time_split(read_run(tmp_path))
    assert split == {"waiting for rollouts": 0.5, "update": 1.0, "the rest": 0.5}


def test_the_same_prompts_are_shown_early_and_late(run, tmp_path):
    record = read_run(run)
    assert {pair.when for pair in record.samples} == {("step 2", "step 4")}, "of evaluations where there are such"
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "evaluations")
    samples = read_run(tmp_path / "run").samples
    assert {pair.when for pair in samples} == {("step 1", "step 4")}
    assert len({pair.prompt for pair in samples}) == 2


def test_a_run_that_goes_on_and_damaged_files_are_read_as_far_as_they_go(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    folder = tmp_path / "run"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": null, "reward": nu')
    (folder / "diagnostics.jsonl").write_bytes(b'{"step": 3, "name": "\xff<b>", "text": "<i>odd</i>"}\n[1]\nnothing\n')
    (folder / "run.json").write_text("{")
    (folder / "config.json").unlink()
    shutil.rmtree(folder / "evaluations")
    for path in (folder / "rollouts").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    page, markdown = write_run_report(folder)
    assert page == folder / "report.html"
    text = page.read_text(encoding="utf-8")
    assert "&lt;i&gt;odd&lt;/i&gt;" in text
    assert "<i>odd" not in text + markdown.read_text(encoding="utf-8")
    assert read_run(folder).num_steps == 4


def test_what_is_no_run_is_refused(tmp_path, capsys):
    with pytest.raises(ValueError, match=r"is no run folder: it has no metrics\.jsonl"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval_reward": 1.0}\n')
    with pytest.raises(ValueError, match="has not come to a logged step"):
        read_run(tmp_path)
    assert main(["report", str(tmp_path)]) == 2
    assert "has not come to a logged step" in capsys.readouterr().err


# -- curves


def test_a_curve_goes_through_its_values_and_leaves_gaps():
    drawn = curve("a <title>", [1.0, 2.0, 3.0, 4.0], {"x": [0.0, 1.0, float("nan"), 0.5]})
    first, second = re.findall(r'<polyline points="([^"]+)"', drawn)
    assert first.split() == ["0.0,140.0", "140.0,0.0"], "y points down"
    assert second == "420.0,70.0"
    assert 'aria-label="a &lt;title&gt;: x, from 0 to 1"' in drawn
    assert "<small>0 to 1, steps 1 to 4</small>" in drawn
    assert len(curve("t", [*map(float, range(10_000))], {"x": [0.0, 1.0] * 5000})) < 10_000
    assert curve("t", [1.0], {"x": [float("nan")]}) == ""


def test_a_report_names_what_was_trained_on_what_and_the_command(tmp_path):
    from groupax.recipes import load_recipe

    folder = tmp_path / "named"
    run = RunFolder(folder)
    run.command = {
        "recipe": "arithmetic",
        "model": None,
        "dataset": "my data.jsonl",
        "eval_dataset": None,
        "reward_funcs": ["rewards:right"],
    }
    args = GRPOConfig.from_mapping(dict(load_recipe("arithmetic").config) | {"output_dir": str(folder), "beta": 0.5})
    run.start(args.to_dict())
    run.write_process({"run": {"model": str(tmp_path / "some-model"), "parameters": "12, all trained"}})
    run.write_metrics({"step": 1.0, "reward": 0.5, "loss": 0.1})
    page, markdown = (path.read_text(encoding="utf-8") for path in write_run_report(folder))
    text = markdown.replace("\\", "")
    for row in (
        "| model | some-model |",
        "| parameters | 12, all trained |",
        "| recipe | arithmetic |",
        "| data | my data.jsonl |",
        "| reward functions | rewards:right |",
    ):
        assert row in text
    [command] = re.findall(r"^```\n(groupax .*)\n```$", markdown, re.MULTILINE)
    assert f"<pre>{html.escape(command, quote=False)}</pre>" in page.replace("&#39;", "'")
    assert command.startswith(
        "groupax train --recipe arithmetic --dataset 'my data.jsonl' --reward_funcs rewards:right"
    )
    assert f"--output_dir {folder}" in command
    assert "--beta 0.5" in command
    assert "--num_generations" not in command  # the recipe has it


def test_a_command_can_be_pasted_whatever_it_has(tmp_path):
    settings = {"chat_template_kwargs": {"enable_thinking": False}, "stop": ("```", "a_b*c\n")}
    run = RunFolder(tmp_path)
    run.command = {"model": "m", "dataset": "d", "reward_funcs": ["r:f"], "eval_dataset": ["held_out.jsonl"]}
    run.start(GRPOConfig(**settings).to_dict())
    run.write_process({"run": {}})
    run.write_metrics({"step": 1.0, "reward": 0.5, "loss": 0.1})
    _, markdown = write_run_report(tmp_path)
    [(_, command)] = re.findall(r"^(````+)\n(groupax .*?)\n\1$", markdown.read_text(), re.MULTILINE | re.DOTALL)
    repeated = parsed(Train, "train", shlex.split(command)[2:])
    assert {name: getattr(repeated.args, name) for name in settings} == settings
    assert repeated.eval_dataset == ("held_out.jsonl",)


def test_held_out_prompts_are_counted_by_how_their_answers_changed(run, tmp_path):
    def item(key, solved, reward):
        completion = Completion("x", 1, "stop", {}, reward, solved)
        return Item(key, 0, f"prompt {key}", {}, [completion], False)

    copy = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(copy / "evaluations")
    solved = {"a": (False, True), "b": (True, False), "c": (True, True), "d": (False, False), "e": (False, True)}
    for when, index in (("before", 0), ("after", 1)):
        write_items(
            copy / "evaluations" / f"{when}.eval.jsonl", [item(key, both[index], 0.5) for key, both in solved.items()]
        )
        write_items(copy / "evaluations" / f"{when}.more.jsonl", [item("f", None, -float(index)), item("g", None, 0.0)])
    assert read_run(copy).changes == {"eval": (2, 1, 2), "more": (0, 1, 1)}
    page, markdown = (path.read_text(encoding="utf-8") for path in write_run_report(copy))
    assert "| eval | 2 | 1 | 2 |" in markdown
    assert "<td>more</td><td>0</td><td>1</td><td>1</td>" in page
    (copy / "evaluations" / "after.eval.jsonl").write_text("damaged")
    assert read_run(copy).changes == {"more": (0, 1, 1)}


def test_numbers_that_are_compared_have_the_same_decimals():
    assert numbers([0.356, 0.99]) == ["0.356", "0.990"]
    assert numbers([12.6, 8.0]) == ["12.6", "8.0"]
    assert numbers([0.0, 150.0, 1e6]) == ["0", "150", "1 M"]
    assert numbers([1e-5, 0.5]) == ["1e-05", "0.5"]
    assert numbers([math.nan, 0.5]) == ["nan", "0.500"]


def test_diagnostics_come_errors_first(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    lines = [{"step": step, "name": name, "text": "t"} for step, name in ((1, "padding_waste"), (2, "kl_runaway"))]
    (copy / "diagnostics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    text = write_run_report(copy)[1].read_text(encoding="utf-8")
    assert text.index("**kl\\_runaway**, error, step 2") < text.index("**padding\\_waste**, note, step 1")
