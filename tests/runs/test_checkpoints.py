"""Checkpoints as files: which are written and kept, which are used, what happens where they cannot be written."""

import json
import os
import re
import shutil
import signal
import subprocess
from dataclasses import replace

import jax
import numpy as np
import pytest

from groupax import GRPOConfig, init_model, load_model, save_model
from groupax.cli.main import main
from groupax.core.errors import DivergedError, PreemptedError, RewardError, RunError
from groupax.core.storage.buckets import RemoteFolder
from groupax.evaluation.evaluate import Evaluation
from groupax.evaluation.items import ONLY_SET
from groupax.parallel.collectives import weights_digest
from groupax.parallel.mesh import AXES
from groupax.runs.checkpoints import writer
from groupax.runs.checkpoints.choose import readable_checkpoints
from groupax.runs.checkpoints.fingerprint import differences
from groupax.runs.checkpoints.store import LocalStore, RemoteStore, damage, seal
from groupax.runs.ending import ending_of
from tests.conftest import TINY
from tests.data.test_config_and_data import a_tokenizer
from tests.training.test_trainer import PROMPTS, a_trainer, before_updates, count_a, lines_of

from .stopped_run import content_of, final_state, steps_in


def checkpoint(folder, step):
    return folder / "run" / "checkpoints" / f"step_{step:06d}"


def trained(*arguments, **settings):
    """Returns a trainer after its run."""
    trainer = a_trainer(*arguments, **settings)
    trainer.train()
    return trainer


def assert_same_end(a, b):
    found, expected = final_state(a), final_state(b)
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """A run of four steps with a checkpoint at each."""
    folder = tmp_path_factory.mktemp("earlier")
    trainer = trained(folder, save_steps=1, save_total_limit=0, max_steps=4)
    return trainer, folder


@pytest.fixture
def stopped(earlier, tmp_path):
    """A copy of it as it was after its third step."""
    trainer, folder = earlier
    shutil.copytree(folder / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    shutil.rmtree(checkpoint(tmp_path, 4))
    return trainer, folder


# -- what is written and kept


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"save_steps": 2, "save_total_limit": None}, [2, 4, 5]),
        ({"save_steps": 2, "save_total_limit": 0, "do_last_save": False}, [2, 4]),
        ({"save_interval_minutes": 1e-9, "save_total_limit": 3}, [3, 4, 5]),
        ({"save_steps": 1, "metric_for_best_model": "number", "save_total_limit": 1}, [2, 5]),
    ],
    ids=str,
)
def test_what_is_saved_and_kept(tmp_path, settings, expected):
    def numbered(completion_ids, trainer_state, log_metric):
        log_metric("number", [0.0, 7.0, -1.0, 3.0, 2.0][trainer_state.step])
        return count_a(completion_ids)

    trained(tmp_path, numbered, max_steps=5, **settings)
    assert steps_in(tmp_path) == [f"step_{step:06d}" for step in expected]
    assert [damage(checkpoint(tmp_path, step)) for step in expected] == [None] * len(expected)


@pytest.mark.heavy
def test_only_checkpoints_that_were_evaluated_are_compared_by_an_evaluation(tmp_path, caplog):
    settings = {"eval_steps": 2, "save_total_limit": 1, "metric_for_best_model": "eval_reward", "max_steps": 5}
    trainer = a_trainer(tmp_path, eval_dataset=PROMPTS, save_steps=1, **settings)
    rewards = iter([0.9, 0.5])
    whole = trainer.evaluate().sets[ONLY_SET]
    trainer.evaluate = lambda: Evaluation({ONLY_SET: replace(whole, metrics={"reward": next(rewards)})})
    trainer.train()
    assert steps_in(tmp_path) == ["step_000002", "step_000005"]
    assert "metric_for_best_model" not in caplog.text


@pytest.mark.heavy
def test_whatever_a_reward_logs_can_be_saved(tmp_path, caplog):
    def logging(completion_ids, log_extra):
        for name, value in {"half": "\ud800", "large": 2**70, "mixed": [1, "a", None, [2]]}.items():
            log_extra(name, [value] * len(completion_ids))
        return count_a(completion_ids)

    settings = {"updates_per_rollout": 2, "save_steps": 1, "max_steps": 2, "save_total_limit": 0}
    settings["metric_for_best_model"] = "rewrd"
    trained(tmp_path, logging, **settings)
    assert "could not be written" not in caplog.text
    told = "'rewrd', which is not among the metrics so far; no checkpoint is the best one; did you mean reward"
    assert caplog.text.count(told) == 1
    shutil.rmtree(checkpoint(tmp_path, 2))
    assert a_trainer(tmp_path, logging, **settings).train().num_steps == 2


@pytest.mark.heavy
def test_without_the_optimizer_it_begins_anew_at_the_right_learning_rate(tmp_path, caplog):
    settings = {"save_optimizer_state": False, "save_steps": 2, "max_steps": 4, "lr_scheduler_type": "linear"}
    trained(tmp_path, **settings)
    rates = [line["learning_rate"] for line in lines_of(tmp_path)]
    shutil.rmtree(checkpoint(tmp_path, 4))
    assert not (checkpoint(tmp_path, 2) / "optimizer").exists()
    resumed = trained(tmp_path, **settings)
    assert "the checkpoint has no optimizer state" in caplog.text
    assert [line["learning_rate"] for line in lines_of(tmp_path)] == rates
    counts = [x for x in jax.tree.leaves(resumed.learner.state.opt_state) if x.ndim == 0]
    assert sorted(int(count) for count in counts) == [2, 4]  # of the moments, and of the schedule


# -- damage


def flip_a_byte(folder):
    data = next(path for path in sorted((folder / "params").rglob("*")) if path.stat().st_size > 1000)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(bytes(content))


def lose_a_file(folder):
    (folder / "optimizer" / "manifest.ocdbt").unlink()


def cut_off_the_checksums(folder):
    sums = (folder / "SHA256SUMS").read_text().splitlines(keepends=True)
    (folder / "SHA256SUMS").write_text("".join(line for line in sums if "params" not in line))


def change_state(folder, remove=(), **entries):
    """Entries of a checkpoint's state.json, with right checksums again."""
    path = folder / "state.json"
    state = {**json.loads(path.read_text()), **entries}
    path.write_text(json.dumps({name: value for name, value in state.items() if name not in remove}))
    seal(folder)


# How a checkpoint is damaged, or another version's, and what is said of it.
FAULTS = [
    (flip_a_byte, r"damaged: params/.* \(\d+ bytes\) is not what was written: its checksum differs"),
    (lose_a_file, "damaged: optimizer/manifest.ocdbt is missing"),
    (cut_off_the_checksums, "SHA256SUMS does not list params/.*: it is damaged"),
    (lambda folder: change_state(folder, format=99), "has format 99, written by groupax"),
    (lambda folder: change_state(folder, remove=("format",)), "its state.json has no format"),
    (lambda folder: change_state(folder, remove=("cursor", "log")), "its state.json has no cursor, log"),
]


def test_a_checkpoint_that_cannot_be_continued_is_named_and_the_one_before_is_used(earlier, tmp_path):
    store, faults = LocalStore(tmp_path), {}
    for step in range(1, len(FAULTS) + 2):
        shutil.copytree(checkpoint(earlier[1], 4), tmp_path / f"step_{step:06d}")
    for step, (do, _) in enumerate(FAULTS, start=2):
        do(tmp_path / f"step_{step:06d}")
    assert [saved.step for saved in readable_checkpoints(store, faults)] == [1]
    for step, (_, named) in enumerate(FAULTS, start=2):
        assert re.search(f"step_{step:06d} .*{named}", faults[step].text), faults[step].text


@pytest.mark.heavy
def test_the_newest_checkpoint_that_can_be_read_is_continued(stopped, tmp_path, caplog):
    trainer, folder = stopped
    flip_a_byte(checkpoint(tmp_path, 3))
    leave_what_a_killed_process_leaves(tmp_path)
    resumed = a_trainer(tmp_path, max_steps=4)
    with caplog.at_level("INFO"):
        resumed.train()
    assert re.search("step_000003 is damaged: .*; it is not used", caplog.text)
    assert re.search(r"step_000003 is now .*step_000003.aside", caplog.text)
    assert "continuing after step 2, from" in caplog.text
    assert_same_end(resumed, trainer)
    assert lines_of(tmp_path) == lines_of(folder)
    assert not list((tmp_path / "run").glob(".*"))
    assert not (tmp_path / "run.1").exists()


def leave_what_a_killed_process_leaves(tmp_path):
    shutil.copytree(checkpoint(tmp_path, 2), tmp_path / "run" / "checkpoints" / ".step_000009.partial")
    (tmp_path / "run" / ".model.abc").mkdir()
    (tmp_path / "run" / "rollouts" / ".step_000009.parquet").write_text("")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4.0, "los')


@pytest.mark.heavy
def test_if_no_checkpoint_can_be_read_the_run_is_refused_and_nothing_is_touched(stopped, tmp_path):
    for step in (1, 2):
        flip_a_byte(checkpoint(tmp_path, step))
    change_state(checkpoint(tmp_path, 3), format=99)
    before = content_of(tmp_path)
    for resume in ("auto", str(tmp_path / "run")):
        with pytest.raises(ValueError, match="can be continued") as refused:
            trained(tmp_path, max_steps=4, resume=resume)
        assert str(refused.value).count("its checksum differs") == 2
    assert content_of(tmp_path) == before
    trained(tmp_path, max_steps=1, resume="never")
    assert (tmp_path / "run.1" / "checkpoints" / "step_000003").is_dir()


# -- which run


def test_stop_texts_distinguish_runs_and_those_of_evaluations_do_not():
    settings = {"stop": "a"}, {"stop": "b", "eval_stop": "c"}
    first, other = ({"settings": GRPOConfig(**each).to_dict()} for each in settings)
    assert differences(first, other).keys() == {"stop"}


@pytest.mark.heavy
def test_another_run_is_moved_aside_with_what_differs(stopped, tmp_path, caplog):
    with caplog.at_level("INFO"):
        trained(tmp_path, count_a, max_steps=4, temperature=0.9, num_generations=2)
    assert "temperature: 1.0 in the checkpoint, 0.9 now" in caplog.text
    assert "num_generations: 4 in the checkpoint, 2 now" in caplog.text
    assert "set resume to its folder" in caplog.text
    assert (tmp_path / "run.1" / "checkpoints").is_dir()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"beta": 0.1}, "beta: 0.0 in the checkpoint, 0.1 now"),
        ({"dataset": PROMPTS[:6]}, "train_dataset.prompts: 8 in the checkpoint, 6 now"),
        ({"model": init_model({**TINY, "vocab_size": 13, "num_hidden_layers": 1}, seed=1)}, "weights: '"),
        ({"model": init_model({**TINY, "vocab_size": 16}, seed=0)}, "model.vocab_size: 13 in the checkpoint, 16 now"),
        ({"template": "{{ messages }}"}, "tokenizer: '"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_go_on_is_refused_with_a_diff(stopped, tmp_path, settings, named):
    template = settings.pop("template", None)
    trainer = a_trainer(tmp_path, max_steps=4, resume=str(tmp_path / "run"), **settings)
    trainer.tokenizer.chat_template = template
    with pytest.raises(ValueError, match="cannot be continued by this run") as refused:
        trainer.train()
    assert named in str(refused.value)
    assert steps_in(tmp_path) == ["step_000001", "step_000002", "step_000003"]  # untouched
    assert len(lines_of(tmp_path)) == 4


@pytest.mark.heavy
def test_on_purpose_a_run_goes_on_with_other_settings(stopped, tmp_path, caplog):
    with caplog.at_level("INFO"):
        trained(tmp_path, max_steps=6, learning_rate=1e-3, resume=str(tmp_path / "run"))
    assert "is continued with other settings" in caplog.text
    assert "learning_rate: 0.01 in the checkpoint, 0.001 now" in caplog.text
    assert "The learning rate falls" not in caplog.text, "it is constant"
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose([line["learning_rate"] for line in lines], [1e-2] * 3 + [1e-3] * 3)
    assert lines[:3] == lines_of(stopped[1])[:3]


@pytest.mark.heavy
def test_an_earlier_checkpoint_can_be_chosen_and_later_ones_are_kept_aside(stopped, tmp_path):
    chosen = str(checkpoint(tmp_path, 1))
    assert_same_end(trained(tmp_path, max_steps=4, resume=chosen, save_total_limit=0), stopped[0])
    assert steps_in(tmp_path) == ["step_000001", "step_000002.aside", "step_000003.aside", "step_000004"]
    # started again in the same way, as a scheduler would, it does not go back
    trained(tmp_path, max_steps=4, resume=chosen, save_total_limit=0)
    assert steps_in(tmp_path) == ["step_000001", "step_000002.aside", "step_000003.aside", "step_000004"]


@pytest.mark.heavy
def test_a_run_can_begin_where_another_one_is(stopped, tmp_path):
    assert_same_end(trained(tmp_path / "new", max_steps=4, resume=str(checkpoint(tmp_path, 2))), stopped[0])
    assert [line["step"] for line in lines_of(tmp_path / "new")] == [3, 4]
    assert steps_in(tmp_path) == ["step_000001", "step_000002", "step_000003"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere", "there is no run in .*nowhere; a run is named by its output_dir"),
        ("run/checkpoints/step_000009", r"there is no checkpoint .* are checkpoints/step_000001,"),
    ],
)
def test_a_checkpoint_that_is_not_there(stopped, tmp_path, path, message):
    with pytest.raises(ValueError, match=message):
        trained(tmp_path, max_steps=4, resume=str(tmp_path / path))


@pytest.mark.heavy
def test_the_digest_of_weights_tells_apart_and_does_not_depend_on_the_mesh():
    devices = np.array(jax.devices())
    one, split = (jax.sharding.Mesh(devices[: np.prod(s)].reshape(s), AXES) for s in ((1,) * 5, (1, 2, 1, 2, 1)))
    hf = {**TINY, "vocab_size": 14}
    a, b = init_model(hf, mesh=one), init_model(hf, mesh=split)
    changed = {**a.params, "embed": a.params["embed"].at[3, 4].add(1e-7)}
    swapped = {**a.params, "embed": a.params["embed"][::-1]}
    first, second, *others = [weights_digest(params) for params in (a.params, b.params, changed, swapped)]
    assert first == second
    assert len({first, *others}) == 3


# -- where nothing can be written


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, of 8 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place):
    with (place / "filler").open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 12))
        except OSError:
            pass


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of tensorstore, after its error
@pytest.mark.parametrize("step", [3, 4], ids=["in the middle", "at the end"])
def test_without_room_a_run_stops_and_loses_nothing(small_disk, earlier, caplog, step):
    settings = {"max_steps": 4, "save_steps": 1, "save_total_limit": 0}

    def filling(completion_ids, trainer_state):
        if trainer_state.step == step - 1:
            trainer.run.saver.writer.wait()  # what it could not write would make room again
            fill(small_disk)
        return count_a(completion_ids)

    trainer = a_trainer(small_disk, filling, **settings)
    with pytest.raises(RunError, match=r"cannot be written to: .*No space left .*continues from its newest checkpoint"):
        trainer.train()
    assert f"the run's state is in {checkpoint(small_disk, step - 1)}" in caplog.text
    assert re.match(r"failed after step \d: RunError: .*No space left", ending_of(small_disk / "run").sentence)
    (small_disk / "filler").unlink()
    resumed = a_trainer(small_disk, **settings)
    resumed.train()
    assert_same_end(resumed, earlier[0])
    assert lines_of(small_disk) == lines_of(earlier[1])
    assert len(list((small_disk / "run" / "rollouts").iterdir())) == 4
    assert load_model(small_disk / "run" / "model").config.vocab_size == 13


@pytest.mark.heavy
def test_training_continues_after_a_checkpoint_that_cannot_be_written(tmp_path, caplog, monkeypatch):
    def failing_once(folder):
        monkeypatch.setattr(writer, "seal", seal)
        raise OSError("no answer")

    monkeypatch.setattr(writer, "seal", failing_once)
    a_trainer(tmp_path, max_steps=3, save_steps=1, save_total_limit=0).train()
    assert "the checkpoint of step 1 could not be written (no answer); there is none yet. Training cont" in caplog.text
    assert steps_in(tmp_path) == ["step_000002", "step_000003"]


# -- faults of other parts


@pytest.mark.heavy
def test_a_reward_service_that_goes_down_stops_the_run_and_costs_nothing(earlier, tmp_path, caplog):
    up = []

    def asks_a_service(completion_ids, trainer_state):
        if trainer_state.step == 2 and not up:
            raise ConnectionError("service down")
        return count_a(completion_ids)

    asks_a_service.__name__ = "count_a"
    with pytest.raises(RewardError, match=r"'count_a' failed for every completion of the rollout of step 3:") as down:
        trained(tmp_path, asks_a_service, max_steps=4)
    assert "ConnectionError: service down" in str(down.value)
    assert "the run's state is in" in caplog.text
    up.append(True)
    assert_same_end(trained(tmp_path, asks_a_service, max_steps=4), earlier[0])
    assert lines_of(tmp_path) == lines_of(earlier[1])


@pytest.mark.heavy
@pytest.mark.parametrize("where", ["update", "rollout"])
def test_out_of_memory_costs_nothing(earlier, tmp_path, where, monkeypatch):
    trainer = a_trainer(tmp_path, max_steps=4)

    def no_memory(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 7 bytes")

    def until(rows):
        if trainer.cursor.step == 2:
            monkeypatch.setattr("groupax.training.learner.micro_step", no_memory)

    if where == "update":
        before_updates(trainer, until)
    else:
        session = trainer.engine.session
        trainer.engine.session = lambda: no_memory() if trainer.cursor.step == 2 else session()
    advice = {"update": "set micro_batch_tokens", "rollout": "lower max_concurrent_rows"}[where]
    with pytest.raises(RunError, match=f"out of memory.*{advice}"):
        trainer.train()
    monkeypatch.undo()
    assert steps_in(tmp_path) == ["step_000002"]
    assert_same_end(trained(tmp_path, max_steps=4), earlier[0])


@pytest.mark.heavy
def test_an_update_that_failed_half_way_is_not_saved(earlier, tmp_path):
    trainer = a_trainer(tmp_path, max_steps=4, save_steps=1)
    update = trainer.learner.update

    def fails_at_the_end(rows):
        made = update(rows)
        if trainer.cursor.step == 2:
            raise RuntimeError("a device was lost")
        return made

    trainer.learner.update = fails_at_the_end
    with pytest.raises(RuntimeError, match="a device was lost"):
        trainer.train()
    assert steps_in(tmp_path)[-1] == "step_000002"
    assert_same_end(trained(tmp_path, max_steps=4), earlier[0])


@pytest.mark.heavy
def test_after_updates_that_are_not_finite_a_run_goes_on_behind_them(tmp_path, caplog):
    trainer = a_trainer(tmp_path, max_steps=5, max_bad_steps=2)

    def poison(rows):
        poisoned = [replace(row, advantages=row.advantages + np.inf) for row in rows]
        return poisoned if trainer.cursor.step in (2, 3) else rows

    before_updates(trainer, poison)
    with pytest.raises(DivergedError):
        trainer.train()
    assert steps_in(tmp_path) == ["step_000004"]
    trained(tmp_path, max_steps=5, max_bad_steps=2)
    assert [line["update_skipped"] for line in lines_of(tmp_path)] == [0, 0, 1, 1, 0]


# -- buckets


@pytest.fixture
def bucket(monkeypatch):
    """A real S3 API on loopback."""
    server_of = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    pytest.importorskip("s3fs")
    server = server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="bucket")
    yield server, lambda: server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.stop()


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")  # of moto and of the clients
def test_checkpoints_in_a_bucket(earlier, tmp_path, bucket, caplog, monkeypatch):
    """The server dies while a checkpoint is uploaded; the one before it stays usable, and later ones are written."""
    server, another = bucket
    place = "s3://bucket/runs/one"
    settings = {"max_steps": 4, "output_dir": place, "save_steps": 1, "save_total_limit": 2}
    first = a_trainer(tmp_path, **settings)
    upload, servers, uploads = RemoteFolder.upload, [server], []

    def dying(self, file, name):
        uploads.append(name)
        if "step_000002/params" in name and servers == [server]:
            servers.pop().stop()
        upload(self, file, name)

    monkeypatch.setattr(RemoteFolder, "upload", dying)

    def stop(rows):
        if first.cursor.step == 2:  # the third step
            first.run.saver.writer.wait()
            os.kill(os.getpid(), signal.SIGTERM)

    before_updates(first, stop)
    with pytest.raises(PreemptedError, match=r"could not be saved; the newest one is s3:.*/step_000001"):
        first.train()
    assert "the checkpoint of step 2 could not be written" in caplog.text
    servers.append(another())
    servers[0].start()
    begun = [name for name in uploads if "step_000002" in name]
    assert begun
    assert not any(name.endswith("SHA256SUMS") for name in begun)
    store = RemoteStore(RemoteFolder(place), tmp_path / "scratch")
    assert store.steps() == [1, 2]
    assert "SHA256SUMS is missing" in (damage(store.local(2)) or "")
    resumed = a_trainer(tmp_path, **settings)
    with caplog.at_level("INFO"):
        resumed.train()
    assert "step_000002 is damaged: SHA256SUMS is missing" in caplog.text
    assert "continuing after step 1, from s3://bucket/runs/one/checkpoints/step_000001" in caplog.text
    assert_same_end(resumed, earlier[0])
    assert store.steps() == [3, 4]
    assert main(["checkpoints", place, "verify"]) == 0
    assert main(["checkpoints", place, "export", "--to", str(tmp_path / "exported")]) == 0
    lines = RemoteFolder(place).read("metrics.jsonl").decode().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [line["loss"] for line in lines_of(earlier[1])]
    assert {"model", "rollouts", "checkpoints"} <= set(RemoteFolder(place).folders(""))
    exported = load_model(tmp_path / "exported")
    np.testing.assert_array_equal(exported.params["embed"], resumed.learner.state.params["embed"])
    assert (tmp_path / "exported" / "tokenizer.json").is_file()
    servers[0].stop()


# -- the command line


@pytest.mark.heavy
def test_resume_and_checkpoints_on_the_command_line(tmp_path, capsys, caplog):
    def told(status, *words):
        assert main([*words]) == status
        shown = capsys.readouterr()
        return shown.out + shown.err

    model = init_model({**TINY, "vocab_size": 13, "num_hidden_layers": 1})
    save_model(model, tmp_path / "model", a_tokenizer(eos_token="<eos>"))
    data, run = str(tmp_path / "data.jsonl"), str(tmp_path / "run")
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"prompt": p}) for p in ("ab", "cd")))
    flags = f"--model {tmp_path}/model --dataset {data} --output_dir {run} --progress_bar none"
    flags += " --prompts_per_step 2 --num_generations 2 --max_completion_length 8 --max_steps 2 --save_steps 1"
    told(0, "train", *flags.split(), "--reward_funcs", "think_answer_format")
    assert "step      1  20" in told(0, "checkpoints", run)
    (tmp_path / "longer.yaml").write_text("max_steps: 3\n")
    told(0, "resume", run, "--config", str(tmp_path / "longer.yaml"))
    assert "is continued with other settings" in caplog.text
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3]
    evaluating = ("eval", "--model", f"{run}/model", "--dataset", data, "--output_dir", run)
    assert "is the folder of a training run" in told(2, *evaluating)
    assert "and never overwrites; choose another folder" in told(2, "checkpoints", run, "export", "--to", run)
    told(0, "checkpoints", run, "export", "3", "--to", str(tmp_path / "three"))
    saved, exported = load_model(f"{run}/model"), load_model(tmp_path / "three")
    for a, b in zip(jax.tree.leaves(saved.params), jax.tree.leaves(exported.params), strict=True):
        np.testing.assert_array_equal(a, b)
    told(0, "checkpoints", run, "verify")
    flip_a_byte(checkpoint(tmp_path, 3))
    shown = told(2, "checkpoints", run, "verify")
    assert "step      2  whole\nstep      3  DAMAGED: params/" in shown
    assert "1 of 2 checkpoints" in shown
    damaged = f"{run}/checkpoints/step_000003"
    assert "step_000003 is damaged" in told(2, "checkpoints", damaged, "export", "--to", str(tmp_path / "no"))
    told(0, "checkpoints", run, "delete", "3")
    assert steps_in(tmp_path) == ["step_000002"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["resume", "nowhere"], "nowhere is not a run folder"),
        (["resume", "RUN"], "was started from Python"),
        (["checkpoints", "nowhere"], "nowhere has no checkpoints"),
        (["checkpoints", "RUN", "export"], "where to? give --to FOLDER"),
        (["checkpoints", "RUN", "delete", "9"], "no checkpoint of step 9; it has 1, 2, 3, 4"),
    ],
)
def test_mistakes_with_checkpoints_are_told(earlier, argv, message, capsys):
    assert main([word.replace("RUN", str(earlier[1] / "run")) for word in argv]) == 2
    assert message in capsys.readouterr().err
