"""A recorded step is the same again, bit for bit; what differs is named."""

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from groupax import init_model, replay_step
from groupax.cli.main import main
from groupax.episodes.record import NOT_RECORDED, Question, Record, remove_records
from groupax.runs.step_record import STAGES, parsed_records
from groupax.satellites.replay.bisect import first_line, parsed_condition
from groupax.satellites.replay.outcome import comparison
from groupax.satellites.replay.recorded import read_completions, recorded_run
from groupax.tools.results import ToolResult
from tests.conftest import TINY
from tests.data.test_config_and_data import a_tokenizer
from tests.runs.stopped_run import REUSE, letters
from tests.training.test_trainer import PROMPTS, a_trainer

ONE_LAYER = {**TINY, "vocab_size": 13, "num_hidden_layers": 1}
STALE = {"max_staleness": 2, "rollout_correction": "token_truncate", "save_steps": 3}


def a_run(folder, **settings):
    trainer = a_trainer(folder, letters, **{"max_steps": 4, **settings})
    trainer.train()
    return folder / "run"


def again(run, step, reward=letters, data=PROMPTS, **named):
    model = init_model(ONE_LAYER, seed=0)
    tokenizer = a_tokenizer(eos_token="<eos>")
    return replay_step(run, step, model, reward, train_dataset=data, processing_class=tokenizer, **named)


def flipped(prompts, completion_ids, log_extra):
    scores = letters(prompts, completion_ids, log_extra)
    return [1.0 - score if index == 1 else score for index, score in enumerate(scores)]


flipped.__name__ = "letters"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return a_run(tmp_path_factory.mktemp("replayed"))


def test_a_step_is_the_same_again_and_the_run_is_not_touched(run):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    outcome = again(run, 3)
    assert outcome.is_equal
    assert outcome.first_step == 0
    assert outcome.sampled == ()
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert [line.split() for line in comparison(outcome)][1:] == [[stage, "equal"] for stage in STAGES]


@pytest.mark.heavy
@pytest.mark.parametrize(
    "settings",
    [REUSE, pytest.param(STALE, marks=pytest.mark.long), pytest.param({**REUSE, **STALE}, marks=pytest.mark.long)],
    ids=["reuse", "stale", "both"],
)
def test_every_step_is_the_same_again(tmp_path, settings):
    run = a_run(tmp_path, max_steps=8, **settings)
    for step in (2, 5, 8):
        assert again(run, step).is_equal, step


@pytest.mark.heavy
@pytest.mark.parametrize("stage", ["reward", "advantage", "loss", "update"])
def test_earlier_stages_are_taken_from_the_record(run, stage):
    assert again(run, 2, stage=stage).is_equal


def test_a_reward_that_differs_is_named(run):
    outcome = again(run, 2, flipped, stage="reward")
    assert not outcome.is_equal
    by_name = {stage.stage: stage for stage in outcome.stages}
    assert by_name["data"].is_equal
    assert by_name["rollout"].is_equal
    assert "letters of row 1 (group 0, sample 1)" in by_name["reward"].text
    assert not by_name["update"].is_equal


@pytest.mark.heavy
def test_a_row_of_the_dataset_that_changed_is_named(run):
    changed = [{**row, "gold": "x"} if row["prompt"] == "ge" else row for row in PROMPTS]
    found = [again(run, step, data=changed).stages[0] for step in (1, 2)]
    assert sum(len(stage.places) for stage in found) == 1  # two steps visit every row once


@pytest.mark.heavy
def test_rollouts_that_were_not_kept_are_sampled_again(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "rollouts")
    outcome = again(copy, 3)
    assert outcome.is_equal
    assert outcome.sampled == (0, 1)
    assert any("rollouts 0, 1 were not kept" in line for line in comparison(outcome))


@pytest.mark.drawn(3, "replays")
@pytest.mark.heavy
def test_a_run_that_was_continued_with_other_settings(tmp_path, caplog):
    run = a_run(tmp_path, max_steps=4, save_steps=2, lr_scheduler_type="linear")
    shutil.rmtree(run / "model")
    again_with = {"resume": str(run), "max_steps": 8, "lr_scheduler_type": "linear", "num_iterations": 1}
    a_run(tmp_path, **again_with, learning_rate=3e-3, beta=0.0, epsilon=0.3)
    recorded = recorded_run(run)
    assert [*recorded.changes] == [4]
    assert recorded.changes[4]["learning_rate"] == (1e-2, 3e-3)
    assert recorded.settings(4)["max_steps"] == 4
    caplog.clear()
    for step in (2, 4, 5, 8):
        assert again(run, step).is_equal, step
    assert "continued with other settings" not in caplog.text  # they are the run's own
    shutil.rmtree(run / "checkpoints")
    assert again(run, 4).is_equal
    with pytest.raises(ValueError, match="was continued with other settings after step 4, and it has no checkpoint"):
        again(run, 7)


@pytest.mark.drawn(3, "replays")
@pytest.mark.heavy
def test_a_run_that_starts_from_another_run(tmp_path):
    origin = a_run(tmp_path / "a", max_steps=4, save_steps=2)
    (tmp_path / "b").mkdir()
    run = a_run(tmp_path / "b", resume=str(origin / "checkpoints" / "step_000002"), max_steps=6, learning_rate=1e-3)
    assert min(recorded_run(run).records) == 3
    assert again(run, 6).is_equal
    shutil.rmtree(run / "checkpoints")
    assert again(run, 6).is_equal
    shutil.rmtree(origin)
    with pytest.raises(ValueError, match="which is not there"):
        again(run, 6)


def test_the_arguments_of_a_trainer_may_have_names(run):
    model, tokenizer = init_model(ONE_LAYER, seed=0), a_tokenizer(eos_token="<eos>")
    given = {"model": model, "reward_funcs": letters, "train_dataset": PROMPTS, "processing_class": tokenizer}
    assert replay_step(run, 1, **given, stage="loss").is_equal
    with pytest.raises(TypeError, match="got 3 positions"):
        replay_step(run, 1, model, letters, None, train_dataset=PROMPTS)


def test_a_step_that_is_not_there_is_refused(run, tmp_path, capsys):
    with pytest.raises(ValueError, match=r"step 9 is not in the record of .*, which has the steps 1 to 4"):
        again(run, 9)
    with pytest.raises(ValueError, match=r"is not a run folder: it has no config\.json"):
        again(tmp_path, 1)
    assert main(["replay", str(run), "--step", "1"]) == 2
    assert "was started from Python; replay it there: groupax.replay_step(" in capsys.readouterr().err


def test_conditions_on_metrics_are_parsed():
    condition = parsed_condition("kl > 1 and loss < -2e-1 or grad_norm is nan")
    assert condition.metrics == ("kl", "loss", "grad_norm")
    assert condition.holds({"kl": 2.0, "loss": -1.0, "grad_norm": 1.0})
    assert condition.holds({"kl": 0.0, "loss": 0.0, "grad_norm": None})
    assert not condition.holds({"kl": 2.0, "loss": 0.0})
    assert not condition.holds({"kl": None, "loss": -1.0})
    for text in ("kl", "kl > x", "kl > 1 and", "__import__('os') > 1", "kl > 1; 2", "kl > 1.1.1"):
        with pytest.raises(ValueError, match="is not a condition on metrics"):
            parsed_condition(text)
    lines = [{"step": 2.0, "kl": 0.1}, {"step": 4.0, "kl": 3.0}]
    assert first_line(lines, parsed_condition("kl > 1")) == (4, 2)
    with pytest.raises(ValueError, match="holds in no step up to 4"):
        first_line(lines, parsed_condition("kl > 9"))
    with pytest.raises(ValueError, match=r"no metric 'kll' in its metrics\.jsonl; did you mean kl\?"):
        first_line(lines, parsed_condition("kll > 9"))
    with pytest.raises(ValueError, match="it is logged where beta is not 0"):
        first_line([{"step": 2.0, "loss": 0.1}], parsed_condition("kl > 1"))


def test_records_survive_damaged_lines(run):
    text = (run / "record.jsonl").read_bytes()
    records = parsed_records(b"{}\n" + text + b'{"step": 9, "da')
    assert sorted(records) == [1, 2, 3, 4]
    assert records[2].step == 2
    assert len(text) < 4 * 2000


@pytest.mark.parametrize("first", [[], [None]])
def test_completions_without_a_column_or_a_value_are_refused(run, tmp_path, first):
    table = pq.read_table(run / "rollouts" / "step_000001.parquet")
    ids, table = table["completion_ids"].to_pylist(), table.drop_columns("completion_ids")
    pq.write_table(
        table.append_column("completion_ids", pa.array(first + ids[1:])) if first else table, tmp_path / "x.parquet"
    )
    with pytest.raises(ValueError, match="completion_ids is missing, or has no value in some row"):
        read_completions(tmp_path / "x.parquet")


def test_a_replay_makes_no_call_that_is_not_in_the_record(tmp_path):
    asked, other = (Question((0, 0), 1, "call", has_state=False, name=name) for name in ("add", "delete"))
    record = Record(tmp_path, "rollout_000000")
    assert record.answer(asked) is None
    record.add(asked, ToolResult("3", 0.1))
    record.close()
    closed = Record(tmp_path, "rollout_000000", is_closed=True)
    assert closed.answer(asked).text == "3"
    assert NOT_RECORDED in closed.answer(other).text
    assert Record(tmp_path, "rollout_000000").answer(other) is None


def test_the_newest_answers_of_tools_are_kept_for_replays(tmp_path):
    for number in range(4):
        (tmp_path / f"rollout_{number:06d}.0.jsonl").write_text("x" * 10)
    remove_records(tmp_path, 3, max_bytes=20)
    assert sorted(path.name[8:14] for path in tmp_path.iterdir()) == ["000001", "000002", "000003"]
    remove_records(tmp_path, 4, max_bytes=10, kept={1})
    assert sorted(path.name[8:14] for path in tmp_path.iterdir()) == ["000001", "000003"]
