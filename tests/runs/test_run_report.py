"""A report says what the files of a run's folder say, and shows what others wrote as text."""

import json
import re
import shlex
import shutil

import pytest

from groupax import GRPOConfig
from groupax.cli.main import main
from groupax.cli.train import Train
from groupax.core.settings.command_line import parsed
from groupax.evaluation.items import Completion, Item, write_items
from groupax.events import EventStream
from groupax.recipes import load_recipe
from groupax.rollouts.state import Experience
from groupax.runs.folder import RunFolder
from groupax.runs.log import RunLog
from groupax.runs.report import read_run, write_report
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


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_report_has_the_numbers_of_the_metrics_and_shows_what_others_wrote_as_text(run, tmp_path):
    record, text = read_run(run), write_report(run, tmp_path).read_text(encoding="utf-8")
    lines = [line for line in metrics_of(run) if "loss" in line]
    assert record.total("step_time") == pytest.approx(sum(line["step_time"] for line in lines))
    assert "| optimizer steps | 4 |" in text
    first, last = (f"{line['eval_reward']:.3f}" for line in metrics_of(run) if "eval_reward" in line)
    assert f"| reward | {first} | {last} |" in text
    assert re.search(r"\| rewards/count\\_a/mean \| \S+ \| [▁▂▃▄▅▆▇█]{4} \| \S+ \|", text)
    assert "␛[31m␀" in text
    outside = re.sub(r"^(```+)\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert "abc<script>" in text
    assert "<" not in outside
    assert not re.search("[\x00-\x08\x0b-\x1f]", text)


def test_the_seconds_of_a_rollout_count_once_however_many_steps_are_made_on_it(tmp_path):
    folder = RunFolder(tmp_path)
    folder.start({})
    log = RunLog(GRPOConfig(progress_bar="none", log_completions=False), folder, 4, EventStream())
    sampled = {"time/rollout_s": 3.0, "time/reward_s": 1.0, "reward": 0.5}
    log.rollout(0, [], sampled, {})
    for step in (1, 2):
        log.step(step, {"loss": 0.0, "time/train_s": 0.5})
    log.resume(log.state(), Experience([], sampled, {}, first_prompt=0, num_tokens=0))
    log.step(3, {"loss": 0.0, "time/train_s": 0.5})
    log.rollout(3, [], sampled, {})
    log.step(4, {"loss": 0.0, "time/train_s": 0.5})
    lines = metrics_of(tmp_path)
    assert [line["time/rollout_s"] for line in lines] == [3.0, 0.0, 0.0, 3.0]
    assert [line["reward"] for line in lines] == [0.5] * 4


def test_the_same_prompts_are_shown_early_and_late(run):
    origins = [[when for when, _, _ in sample.answers] for sample in read_run(run).samples]
    assert origins == 2 * [["step 2", "step 4"]]


def test_a_run_that_goes_on_and_damaged_files_are_read_as_far_as_they_go(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": null, "reward": nu')
    (folder / "diagnostics.jsonl").write_bytes(b'{"step": 3, "name": "\xff<b>", "text": "<i>odd</i>"}\n[1]\nnothing\n')
    (folder / "run.json").write_text("{")
    (folder / "config.json").unlink()
    shutil.rmtree(folder / "evaluations")
    assert "&lt;i&gt;odd&lt;/i&gt;" in write_report(folder).read_text(encoding="utf-8")
    assert len(read_run(folder).metrics) == 4


def test_what_is_no_run_is_refused(tmp_path, capsys):
    with pytest.raises(ValueError, match=r"is not a run folder: it has no metrics\.jsonl"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval_reward": 1.0}\n')
    with pytest.raises(ValueError, match="has not come to a logged step"):
        read_run(tmp_path)
    assert main(["report", str(tmp_path)]) == 2
    assert "has not come to a logged step" in capsys.readouterr().err


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
    markdown = write_report(tmp_path).read_text(encoding="utf-8")
    text = markdown.replace("\\", "")
    for row in ("model | some-model", "parameters | 12, all trained", "recipe | arithmetic", "data | my data.jsonl"):
        assert f"| {row} |" in text
    assert "| reward functions | rewards:right |" in text
    [(_, command)] = re.findall(r"^(````+)\n(groupax .*?)\n\1$", markdown, re.MULTILINE | re.DOTALL)
    assert "--num_generations" not in command  # the recipe has it
    repeated = parsed(Train, "train", shlex.split(command)[2:])  # it can be pasted, whatever it has
    assert {name: getattr(repeated.args, name) for name in settings} == settings
    assert repeated.eval_dataset == ("x.jsonl",)
    assert (repeated.dataset, repeated.reward_funcs) == ("my data.jsonl", ("rewards:right",))


def test_the_prompts_that_gained_most_and_the_one_that_lost_most_are_shown(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(copy / "evaluations")
    gains = {"a": 0.0, "b": 3.0, "c": -1.0, "d": 1.0, "e": 2.0, "f": -2.0}
    for when in ("before", "after"):
        found = [(key, gain if when == "after" else 0.0) for key, gain in gains.items()]
        items = [
            Item(key, 0, f"prompt {key}", {}, [Completion("x", 1, "stop", {}, reward, None)], False)
            for key, reward in found
        ]
        write_items(copy / "evaluations" / f"{when}.eval.jsonl", items)
    assert [sample.prompt for sample in read_run(copy).samples] == ["prompt b", "prompt e", "prompt d", "prompt f"]
    (copy / "evaluations" / "after.eval.jsonl").write_text("damaged")
    assert read_run(copy).samples == []
