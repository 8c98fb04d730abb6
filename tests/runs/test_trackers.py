"""Trackers are told what the run folder is told, and nothing that they do reaches training."""

import json
import re
import struct
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from groupax import GRPOConfig
from groupax.core.errors import EXTRAS
from groupax.core.types import Rollout
from groupax.events import StepEnded
from groupax.runs.trackers.tracker import TrackedRun, open_tracker, samples_of
from tests.training.test_trainer import PROMPTS, a_trainer

from .lines_tracker import LINES

HOSTILE = "<script>alert(1)</script> \x1b[31m \ud800 | `x`"
TRACKED = {
    "max_steps": 4,
    "eval_steps": 2,
    "track_memory": True,
    "run_name": "a name",
    "project": "a-project",
}


def num_letters(completions):
    return [float(len(set(text))) for text in completions]


def a_tracked_run(folder, *trackers, **settings):
    trainer = a_trainer(folder, num_letters, eval_dataset=PROMPTS[:2], report_to=trackers, **{**TRACKED, **settings})
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """A run that was told to TensorBoard and to lines of JSON, and its folder."""
    folder = tmp_path_factory.mktemp("tracked")
    return a_tracked_run(folder, "tensorboard", LINES), folder / "run"


def logged(folder):
    """The finite numbers of metrics.jsonl: {(name, step): value}."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        (name, int(line["step"])): value
        for line in lines
        for name, value in line.items()
        if value is not None and name != "step"
    }


def diagnostics_of(folder):
    return [json.loads(line) for line in (folder / "diagnostics.jsonl").read_text().splitlines()]


def tensorboard_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def test_tensorboards_own_reader_gives_the_numbers_of_metrics_jsonl(tracked):
    _, folder = tracked
    events, wanted = tensorboard_events(folder), logged(folder)
    read = {(name, event.step): event.value for name in events.Tags()["scalars"] for event in events.Scalars(name)}
    assert read == {key: float(np.float32(value)) for key, value in wanted.items()}
    assert {step for name, step in read if name == "eval_reward"} == {2, 4}
    texts = {
        name.partition("/")[0]: events.Tensors(name)[0].tensor_proto.string_val[0] for name in events.Tags()["tensors"]
    }
    assert b"&quot;run_name&quot;: &quot;a name&quot;" in texts["config"]
    assert b"finish_reason" in texts["samples"]


def test_a_tracker_receives_everything(tracked):
    trainer, folder = tracked
    lines = [json.loads(line) for line in (folder / "tracked.jsonl").read_text().splitlines()]
    kinds = {line["kind"] for line in lines}
    assert {"run", "metrics", "samples"} <= kinds
    assert (lines[0]["name"], lines[0]["project"]) == ("a name", "a-project")
    assert GRPOConfig.from_mapping(lines[0]["config"]) == trainer.args
    read = {
        (name, line["step"]): value
        for line in lines
        if line["kind"] == "metrics"
        for name, value in line["metrics"].items()
    }
    assert read == logged(folder)
    [first, *_] = [line["samples"] for line in lines if line["kind"] == "samples"]
    assert {"step", "prompt", "completion", "rewards/num_letters", "advantage", "finish_reason"} == set(first[0])


def test_what_others_wrote_is_told_as_text(tmp_path):
    none, logps = np.zeros(0, np.int32), np.zeros(0, np.float32)
    row = Rollout(0, 0, {"prompt": HOSTILE}, none, none, logps, logps, "stop", 0, HOSTILE, advantage=0.0)
    for name in ("tensorboard", LINES):
        tracker = open_tracker(name, a_tracked(tmp_path))
        tracker.samples(1, samples_of(1, [row], 1))
        tracker.diagnostic(1, "odd", HOSTILE.replace("\ud800", ""))
        tracker.close()
    lines = [json.loads(line) for line in (tmp_path / "tracked.jsonl").read_text().splitlines()]
    [sample] = next(line["samples"] for line in lines if line["kind"] == "samples")
    assert sample["prompt"] == sample["completion"] == HOSTILE.replace("\ud800", "\\ud800")
    events = tensorboard_events(tmp_path)
    texts = [events.Tensors(tag)[0].tensor_proto.string_val[0] for tag in events.Tags()["tensors"]]
    assert sum(text.count(b"&lt;script&gt;") for text in texts) == 3
    assert not any(b"<script" in text for text in texts)


def test_the_memory_in_use_is_logged(tracked):
    numbers = logged(tracked[1])
    assert numbers["memory/process_bytes", 1] > numbers["memory/arrays_bytes", 1] > 0


BROKEN = """
from groupax.runs.trackers.tracker import Tracker

class Raises(Tracker):
    def metrics(self, step, metrics):
        if step == 2:
            raise SystemExit("the service is down")
"""


def test_a_tracker_that_raises_changes_nothing(tracked, tmp_path, monkeypatch, caplog):
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    trainer = a_tracked_run(tmp_path, "broken:Raises", LINES)
    whole = tracked[0].learner.state
    for mine, wanted in zip(jax.tree.leaves(trainer.learner.state), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(mine, wanted)
    [diagnostic] = [each for each in diagnostics_of(tmp_path / "run") if each["name"].startswith("tracker_broken")]
    assert re.search("Raises failed .*the service is down", diagnostic["text"])
    assert diagnostic["text"] in caplog.text
    lines = [json.loads(line) for line in (tmp_path / "run" / "tracked.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines if line["kind"] == "metrics"} == {1, 2, 3, 4}, "others receive the rest"


def a_tracked(folder, first_step=0):
    return TrackedRun("abcd", "name", "project", folder, {}, first_step)


@pytest.mark.heavy
def test_a_run_that_goes_on_is_the_same_one_there(tracked, tmp_path):
    first = a_trainer(tmp_path, num_letters, eval_dataset=PROMPTS[:2], report_to=("tensorboard", LINES), **TRACKED)
    first.listeners = [lambda event: isinstance(event, StepEnded) and event.step == 3]
    first.train()
    run, whole = tmp_path / "run", tracked[1]
    run_id = json.loads((run / "run.json").read_text())["id"]
    a_tracked_run(tmp_path, "tensorboard", LINES, resume="auto")
    about = json.loads((run / "run.json").read_text())
    assert (about["id"], len(about["processes"])) == (run_id, 2)
    events, expected = (tensorboard_events(folder).Scalars("loss") for folder in (run, whole))
    assert [event.step for event in events] == [1, 2, 3, 4]
    assert [event.value for event in events] == [event.value for event in expected]
    lines = [json.loads(line) for line in (run / "tracked.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "metrics" and "loss" in line["metrics"]] == [1, 2, 3, 4]


@pytest.mark.heavy
def test_wandb_without_a_key_asks_for_none(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "online", "HOME": tmp_path, "NETRC": tmp_path / "none"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    wandb.teardown()
    try:
        with pytest.raises(ValueError, match="it has no key: run `wandb login`"):
            a_trainer(tmp_path, report_to=("wandb",))
        assert not (tmp_path / "run").exists()
    finally:
        wandb.teardown()


@pytest.mark.heavy
def test_the_tracker_and_the_listener_of_the_document(tmp_path, monkeypatch):
    text = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    [tracker] = [block for block in blocks if "class CSVTracker" in block]
    [listener] = [block for block in blocks if "def stop_when_solved" in block]
    (tmp_path / "my_trackers.py").write_text(tracker)
    monkeypatch.syspath_prepend(tmp_path)
    exec(listener, namespace := {})
    trainer = a_trainer(tmp_path, num_letters, report_to=("my_trackers:CSVTracker",), max_steps=5)
    trainer.listeners = [namespace["stop_when_solved"]]
    assert trainer.train().num_steps == 1
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert (tmp_path / "run" / "rewards.csv").read_text() == f"1,{line['reward']}\n"


@pytest.mark.parametrize(
    ("report_to", "message"),
    [
        (("wandbb",), "or trackers of your own as 'module:class', got 'wandbb'; did you mean wandb"),
        (("wandb", "wandb"), "names a tracker twice"),
        (("trackio",), r"groupax\[trackio\]' \(No module named 'no_such_module_of_it'\)"),
        (("checked_tracker:Mine",), "the server does not answer"),
    ],
)
def test_trackers_that_cannot_be_are_refused_before_the_start(report_to, message, tmp_path, monkeypatch):
    (tmp_path / "broken_tracker.py").write_text("import no_such_module_of_it")
    source = "from groupax.runs.trackers.tracker import Tracker\nclass Mine(Tracker):\n    @classmethod\n"
    source += "    def check(cls):\n        raise ValueError('the server does not answer')\n"
    (tmp_path / "checked_tracker.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(EXTRAS, "trackio", ("broken_tracker",))
    with pytest.raises(ValueError, match=message):
        a_trainer(tmp_path, report_to=report_to)


def wandb_records(path):
    """The records of a .wandb file: a header of 7 bytes, then LevelDB's log format of blocks and fragments."""
    from wandb.proto import wandb_internal_pb2

    data, position, whole = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full, or the last fragment
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


@pytest.mark.heavy
def test_wandbs_offline_files_give_the_numbers_of_metrics_jsonl(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_API_KEY", "")
    trainer = a_tracked_run(tmp_path, "wandb")
    folder = tmp_path / "run"
    assert not [each for each in diagnostics_of(folder) if each["name"].startswith("tracker")]
    [file] = folder.glob("wandb/offline-run-*/*.wandb")
    read, config, runs, tables = {}, {}, [], 0
    for record in wandb_records(file):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            runs.append(record.run)
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if kind == "history":
            items = {tuple(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = int(items.pop(("step",)))
            tables += items.get(("samples", "_type")) == "table-file"
            read |= {(name, step): value for (name, *inside), value in items.items() if not inside and name[0] != "_"}
    assert read == logged(folder)
    assert (runs[0].run_id, runs[0].display_name, runs[0].project) == (trainer.run_folder.id, "a name", "a-project")
    assert config["learning_rate"] == trainer.args.learning_rate
    assert tables > 0


@pytest.mark.heavy
def test_trackio_gives_the_numbers_of_metrics_jsonl(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    a_tracked_run(tmp_path, "trackio", learning_rate=0.0)
    folder = tmp_path / "run"
    assert not [each for each in diagnostics_of(folder) if each["name"].startswith("tracker")]
    from trackio.sqlite_storage import SQLiteStorage

    [run] = SQLiteStorage.get_runs("a-project")
    assert run.startswith("a name-")
    read = {
        (name, row["step"]): value
        for row in SQLiteStorage.get_logs("a-project", run)
        for name, value in row.items()
        if isinstance(value, (int, float)) and name != "step"
    }
    assert read == logged(folder)
    [alert] = SQLiteStorage.get_alerts("a-project")
    assert (alert["title"], alert["level"], alert["step"]) == ("learning_rate_zero", "error", 0)
    assert "the model will not change" in alert["text"]
