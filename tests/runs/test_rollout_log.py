"""Every completion of a logged step is kept, whatever it holds, within a budget, for any reader of Parquet."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from groupax.core.settings.run import RolloutLogSettings
from groupax.core.types import Rollout
from groupax.events import Diagnosed, StepEnded
from groupax.runs.folder import RunFolder
from groupax.runs.log import FolderSink
from groupax.runs.rollout_log import RolloutLog, simple_column, to_remove
from tests.package.test_docs import DOCS, python_blocks
from tests.training.test_trainer import a_trainer, count_a

HOSTILE = "<script>alert(1)</script> \x1b[31m\x00 \ud800 " + "x" * 1_000_000
COLUMNS = {
    "step": "int32",
    "prompt_index": "int32",
    "sample_index": "int32",
    "prompt": "string",
    "completion": "string",
    "finish_reason": "string",
    "policy_version": "int32",
    "advantage": "float",
    "rewards/count_a": "double",
    "rewards/spread": "double",
    "extra/note": "string",
    "extra/length": "int64",
    "prompt_ids": "list<item: int32>",
    "completion_ids": "list<item: int32>",
    "policy_logps": "list<item: float>",
    "sampler_logps": "list<item: float>",
    "trainer_logps": "list<item: float>",
    "entropies": "list<item: float>",
}


def a_rollout(index=0, text="abc", prompt="ab", **fields):
    ids, logps = np.arange(3) + index, -np.ones(3, np.float32)
    return Rollout(
        0, index, {"prompt": prompt}, np.arange(2), ids, logps, logps, "stop", 0, text, {"right": 1.0}, 0.5, **fields
    )


def spread(completions, log_extra):
    log_extra("note", [HOSTILE] * len(completions))
    log_extra("length", [len(text) for text in completions])
    return [float(len(set(text))) if text else None for text in completions]


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """The rollouts/ of a run of six steps with two steps to a rollout, of which every second one is kept."""
    folder = tmp_path_factory.mktemp("logged")
    trainer = a_trainer(
        folder,
        [count_a, spread],
        max_steps=6,
        log_completions_steps=4,
        replay_steps=0,
        prompts_per_step=2,
        updates_per_rollout=2,
    )
    trainer.train()
    return folder / "run" / "rollouts"


def test_the_steps_asked_for_are_kept_and_the_first_and_the_last(logged):
    assert sorted(path.name for path in logged.iterdir()) == [f"step_{step:06d}.parquet" for step in (1, 4, 6)]


def test_the_last_steps_and_those_with_findings_are_kept_for_replays(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.start({})
    settings = RolloutLogSettings(log_completions_steps=5, replay_steps=3)
    sink = FolderSink(settings, run, logging_steps=1, num_steps=20)
    rollouts = [a_rollout()]
    for step in range(1, 13):
        if step == 4:
            sink(Diagnosed(step, "kl_runaway", "KL runs away"))
        if step == 7:
            run.write_bad_batch(step, [])
        metrics = {"reward": 1.0, "update_skipped": float(step == 7)}
        sink(StepEnded(step, metrics, {"step": float(step)}, rollouts))
    kept = sorted(int(path.stem.removeprefix("step_")) for path in (run.path / "rollouts").iterdir())
    assert kept == [1, 4, 5, 7, 10, 11, 12]
    assert to_remove(dict.fromkeys(range(1, 8), 10), 30, kept={3, 6}) == [2, 4, 5]


def test_all_that_is_known_of_a_completion_is_there_in_simple_types(logged):
    table = pq.read_table(logged / "step_000004.parquet")
    assert {field.name: str(field.type).replace("element", "item") for field in table.schema} == COLUMNS
    rows = table.to_pylist()
    assert [(row["prompt_index"], row["sample_index"]) for row in rows] == [(p, s) for p in range(4) for s in range(4)]
    for row in rows:
        assert row["step"] == 4
        assert row["rewards/count_a"] == pytest.approx(row["completion_ids"].count(3) / len(row["completion_ids"]))
        assert row["extra/length"] == len(row["completion"])
        assert len(row["policy_logps"]) == len(row["sampler_logps"]) == len(row["completion_ids"])
    # Step 4 is the second one on its rollout: it trained on the later half, with weights that one update has moved.
    assert [row["trainer_logps"] is None for row in rows] == [True] * 8 + [False] * 8
    differences = [np.subtract(row["trainer_logps"], row["policy_logps"]) for row in rows[8:]]
    assert 1e-4 < max(np.abs(each).max() for each in differences) < 1.0
    assert all(0 < entropy < np.log(13) for row in rows[8:] for entropy in row["entropies"])


def test_on_policy_log_probs_of_engine_and_trainer_agree(logged):
    rows = pq.read_table(logged / "step_000001.parquet").to_pylist()
    for row in rows[:8]:
        np.testing.assert_allclose(row["trainer_logps"], row["policy_logps"], atol=1e-5, rtol=0)
    mean = np.mean([entropy for row in rows[:8] for entropy in row["entropies"]])
    [first, *_] = [json.loads(line) for line in (logged.parent / "metrics.jsonl").read_text().splitlines()]
    assert first["entropy"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.heavy
def test_pandas_and_duckdb_read_it_the_latter_as_the_page_about_monitoring_says(logged, monkeypatch):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("duckdb", reason="the parity extra has duckdb")
    tables = [pq.read_table(path) for path in sorted(logged.iterdir())]
    wanted = [sum(row["rewards/count_a"] for row in table.to_pylist()) for table in tables]
    frame = pandas.concat([pandas.read_parquet(path) for path in sorted(logged.iterdir())])
    assert set(frame.columns) == set(COLUMNS)
    assert frame.groupby("step")["rewards/count_a"].sum().to_list() == pytest.approx(wanted)
    [query] = [block for block in python_blocks(DOCS / "monitoring.md") if "duckdb" in block]
    query = query.replace("runs/len/", "").replace("rewards/right", "rewards/count_a")
    monkeypatch.chdir(logged.parent)
    exec(query.replace("duckdb.sql(", "found = duckdb.sql("), namespace := {})
    assert [step for step, *_ in namespace["found"].fetchall()] == [1, 4, 6]


def test_hostile_texts_are_kept_as_they_are_but_for_halves_of_surrogate_pairs(tmp_path):
    conversation = [{"role": "user", "content": HOSTILE}]
    rollouts = [a_rollout(0, HOSTILE, HOSTILE), a_rollout(1, "", conversation, extra={"a\ud800/b": HOSTILE})]
    RolloutLog(tmp_path / "rollouts").write(1, rollouts, {})
    rows = pq.read_table(tmp_path / "rollouts" / "step_000001.parquet").to_pylist()
    assert rows[0]["completion"] == rows[0]["prompt"] == HOSTILE.replace("\ud800", "\\ud800")
    assert json.loads(rows[1]["prompt"]) == conversation
    assert rows[1]["extra/a\\ud800/b"] == HOSTILE.replace("\ud800", "\\ud800")
    assert rows[0]["trainer_logps"] is None


@pytest.mark.parametrize(
    ("values", "kind", "wanted"),
    [
        ([True, None], "bool", [True, None]),
        ([1, np.int32(2)], "int64", [1, 2]),
        ([1, 0.5], "double", [1.0, 0.5]),
        ([1, "a"], "string", ["1", "a"]),
        ([{"a": [1]}, None, 1 << 70], "string", ['{"a": [1]}', None, str(1 << 70)]),
        ([{1}, "\udfff"], "string", ["{1}", "\\udfff"]),
        ([None, None], "string", [None, None]),
    ],
    ids=str,
)
def test_what_reward_functions_log_becomes_a_column_of_a_simple_type(values, kind, wanted):
    column = simple_column(values)
    assert (str(column.type), column.to_pylist()) == (kind, wanted)


def test_files_beyond_the_budget_go_evenly_but_for_the_first_and_the_newest():
    sizes = dict.fromkeys(range(1, 101), 10)
    left = sorted(sizes.keys() - set(to_remove(sizes, 210)))
    assert len(left) == 21
    assert (left[0], left[-1]) == (1, 100)
    gaps = np.diff(left)
    assert gaps.max() <= 2 * gaps.min()


def test_a_log_keeps_to_its_budget_over_processes(tmp_path):
    def write(log, step):
        log.write(step, [a_rollout(text=f"{step}")], {})
        return {int(path.stem[5:]) for path in tmp_path.glob("step_*")}

    write(RolloutLog(tmp_path), 1)
    size = (tmp_path / "step_000001.parquet").stat().st_size
    log = RolloutLog(tmp_path, 6 * size + size // 2)
    for step in range(2, 21):
        left = write(log, step)
    assert left >= {1, 20}, "the first and the newest"
    assert len(left) <= 6
    left = write(RolloutLog(tmp_path, 4 * size + size // 2), 21)  # another process, with less
    assert left >= {1, 21}
    assert len(left) <= 4
