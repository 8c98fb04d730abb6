"""A bundle carries a step to another machine, and nothing that runs there."""

import functools
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from safetensors.numpy import load_file, save_file

from groupax import bundle_step, init_model, replay_bundle
from groupax.cli.main import main
from groupax.replay import recorded
from groupax.replay.bundle import pack, unpack
from groupax.replay.bundled import open_bundle
from groupax.replay.recorded import RecordedRun
from tests.data.test_config_and_data import a_tokenizer
from tests.runs.stopped_run import letters
from tests.training.test_trainer import PROMPTS

from .test_replay import ONE_LAYER, STALE, a_run


def bundled(run, step, path, **named):
    model, tokenizer = init_model(ONE_LAYER, seed=0), a_tokenizer(eos_token="<eos>")
    return bundle_step(run, step, path, model, letters, train_dataset=PROMPTS, processing_class=tokenizer, **named)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return a_run(tmp_path_factory.mktemp("bundled"), loss_type="dapo")


@pytest.fixture(scope="module")
def archive(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("archives") / "bug.tar.zst"
    made = bundled(run, 3, path)
    assert made.outcome.is_equal
    return path


def names_in(path):
    with pyarrow.input_stream(str(path), compression="zstd") as stream:
        return tarfile.open(fileobj=io.BytesIO(stream.read())).getnames()


def written(path, members):
    """An archive of these members: names with their bytes, or tarfile's own records."""
    data = io.BytesIO()
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in members if isinstance(name, str)}
    with tarfile.open(fileobj=data, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for member, content in [*members, ("sha256.json", json.dumps(sums).encode())]:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    with pyarrow.CompressedOutputStream(str(path), "zstd") as stream:
        stream.write(data.getvalue())
    return path


@pytest.mark.heavy
def test_a_bundle_is_replayed_elsewhere_with_equal_bits(run, archive):
    names = names_in(archive)
    places = {"bundle.json", "sha256.json", "rows.jsonl", "after.safetensors", "run", "state", "model"}
    assert {name.partition("/")[0] for name in names} == places
    assert not [name for name in names if name.endswith((".py", ".pkl", ".bin"))]
    assert Path(archive).stat().st_size < 400_000
    with pytest.raises(ValueError, match="exists already"):
        bundled(run, 3, archive)
    moved = run.with_name("moved")
    run.rename(moved)  # nothing of the run is needed
    try:
        outcome = replay_bundle(archive)
    finally:
        moved.rename(run)
    assert outcome.is_equal
    assert outcome.sampled == ()
    assert outcome.step - 1 == outcome.first_step


@pytest.mark.heavy
@pytest.mark.long
def test_policies_of_earlier_steps_are_included(tmp_path):
    run = a_run(tmp_path, max_steps=6, **STALE)
    assert bundled(run, 5, tmp_path / "bug.tar.zst").outcome.is_equal
    assert replay_bundle(tmp_path / "bug.tar.zst").is_equal


@pytest.mark.heavy
def test_a_bundle_is_replayed_from_a_shell(archive, capsys):
    assert main(["replay", str(archive), "--why"]) == 0
    text = capsys.readouterr().out
    assert "rewards are those of the record" in text
    assert "update     equal" in text
    assert "by their share of the gradient" in text
    assert main(["replay", str(archive), "--with", "learning_rate=0.1"]) == 0
    assert "learning_rate 0.01 in the run, 0.1 now" not in capsys.readouterr().err
    assert main(["replay", str(archive), "--step", "2"]) == 2
    assert "has step 3, not 2" in capsys.readouterr().err
    assert main(["replay", str(archive), "--bundle", "x"]) == 2


def test_files_that_a_bundle_has_not_are_refused(tmp_path):
    manifest = ("bundle.json", b"{}")
    link = tarfile.TarInfo("run/config.json")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    names = ("../evil.json", "/tmp/evil", "model/run.py", "model/pytorch_model.bin", "model/a/b.json", "bundle.json")
    for number, name in enumerate([*names, "run/tokenizer/.hidden.json", link]):
        path = written(tmp_path / f"{number}.tar.zst", [manifest, (name, b"")])
        with pytest.raises(ValueError, match="is no bundle of groupax: it has"):
            unpack(path, tmp_path / f"out{number}", 10**6)
    assert not [name for name in os.listdir(tmp_path) if "evil" in name]


def test_damaged_and_huge_files_are_refused(tmp_path):
    rows = np.random.default_rng(0).bytes(10**5)
    noise = written(tmp_path / "noise.tar.zst", [("bundle.json", b"{}"), ("rows.jsonl", rows)])
    content = bytearray(noise.read_bytes())
    content[len(content) // 2] ^= 4
    (tmp_path / "flipped.tar.zst").write_bytes(content)
    big = written(tmp_path / "big.tar.zst", [("bundle.json", b"{}"), ("rows.jsonl", bytes(10**6))])
    assert big.stat().st_size < 2000
    whole = big.read_bytes()
    (tmp_path / "cut.tar.zst").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.tar.zst").write_bytes(b"hello")
    written(tmp_path / "no.tar.zst", [("rows.jsonl", b"")])
    for name, message in (
        ("flipped", r"is damaged: 'rows\.jsonl' is not what was packed"),
        ("big", r"unpacks to more than 0\.0005 GB"),
        ("cut", "is no bundle of groupax"),
        ("text", "is no bundle of groupax"),
        ("no", r"it has no bundle\.json"),
    ):
        with pytest.raises(ValueError, match=message):
            unpack(tmp_path / f"{name}.tar.zst", tmp_path / name, 5 * 10**5 if name == "big" else 10**9)
    with pytest.raises(ValueError, match="max_gb must be a finite number above 0"):
        open_bundle(big, tmp_path / "none", max_gb=float("nan"))
    for number, manifest, message in (
        (0, {"format": 2, "groupax": "0.1.0"}, r"bundle\.json is damaged: step is None"),
        (1, {"format": 3, "groupax": "9"}, "written by groupax '9', and this groupax reads format 2"),
    ):
        made = written(tmp_path / f"m{number}.tar.zst", [("bundle.json", json.dumps(manifest).encode())])
        with pytest.raises(ValueError, match=message):
            open_bundle(made, tmp_path / f"m{number}")


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("config.json", [1], r"config\.json is damaged: it has \[1\]"),
        ("run.json", {"processes": [{"step": "7"}]}, "are no processes of a run"),
        ("command.json", "x", r"command\.json is damaged"),
    ],
)
def test_a_run_with_damaged_files_is_refused_in_one_line(run, tmp_path, name, content, fault):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / name).write_text(json.dumps(content))
    damaged = RecordedRun(tmp_path / "run")
    with pytest.raises(ValueError, match=fault):
        _ = damaged.config, damaged.changes, damaged.command(1), damaged.settings(1)


def nested(depth):
    return functools.reduce(lambda value, _: [value], range(depth), 1)


@pytest.mark.drawn(5)
@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("bundle.json", {"tools": [{"is_async": False}]}, r"bundle\.json is damaged: tools is \[\{'is_async"),
        ("bundle.json", {"rewards": [1]}, r"bundle\.json is damaged: rewards is"),
        ("bundle.json", {"visits": {"-1": 0}}, r"bundle\.json is damaged: visits is"),
        ("bundle.json", {"visits": {"1": 99}}, r"has \d rows, and the step visited its row 99"),
        ("bundle.json", {"identity": {"adapter": [1]}}, r"bundle\.json is damaged: identity is"),
        (
            "bundle.json",
            {"start": 0, "identity": {"adapter": {"rank": 8}}},
            "the adapter that bundle.json describes is",
        ),
        ("rows.jsonl", {"more": nested(99_000)}, r"rows\.jsonl of the bundle is nested more than 64 levels deep"),
        ("run/record.jsonl", {"data": nested(99_000)}, r"has no step in record\.jsonl"),
        ("state/state.json", {"cursor": nested(99_000)}, r"state\.json of the bundle is nested more than 64 levels"),
        ("state/state.json", {"identity": {"settings": 1}}, r"state\.json of the bundle is damaged: it is not of the"),
        ("state/state.json", {"format": 1}, r"state\.json of the bundle has format 1, and this groupax reads \d"),
        ("state/state.json", {"step": 99}, r"state\.json of the bundle is damaged: it is of steps \(99, \d\)"),
        ("state/state.json", {"cursor": {"step": 1}}, r"state\.json of the bundle is damaged: cursor is \{'step': 1"),
        ("state/state.json", {"learner": {"adapters": {"a": 1}}}, r"state\.json of the bundle is damaged: learner is"),
        ("state/state.json", {"policies": [[1]]}, r"state\.json of the bundle is damaged: policies is \[\[1\]\]"),
    ],
)
def test_content_that_is_no_run_s_is_refused_in_one_line(archive, tmp_path, name, change, fault):
    unpack(archive, tmp_path / "bundle", 10**9)
    path = tmp_path / "bundle" / name
    text = path.read_text()
    parts = text.splitlines() if path.suffix == ".jsonl" else [text]
    path.write_text("".join(as_json({**json.loads(part), **change}) for part in parts))
    pack(tmp_path / "bundle", tmp_path / "bug.tar.zst")
    with pytest.raises(ValueError, match=fault):
        replay_bundle(tmp_path / "bug.tar.zst")


def as_json(content):
    """Returns a line of JSON, also of lists that are nested more deeply than `json` writes them."""
    depths = {name: depth for name, value in content.items() if (depth := depth_of(value)) > 100}
    text = json.dumps({**content, **{name: f"<{name}>" for name in depths}}) + "\n"
    for name, depth in depths.items():
        text = text.replace(f'"<{name}>"', "[" * depth + "1" + "]" * depth)
    return text


def depth_of(value):
    depth = 0
    while isinstance(value, list) and value:
        value, depth = value[0], depth + 1
    return depth


def with_column(name, values, kind=None):
    return lambda table: table.set_column(table.schema.get_field_index(name), name, pyarrow.array(values(table), kind))


def bomb(table):
    count = 8 * 10**7  # 320 MB
    ids = pyarrow.ListArray.from_arrays(pyarrow.array([0, count], "int32"), pyarrow.nulls(count, "int32"))
    return pyarrow.table({"completion_ids": ids})


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda table: table.drop_columns("sampler_logps"), "its column sampler_logps is missing, not"),
        (with_column("prompt_index", lambda table: ["x"] * len(table)), "its column prompt_index is string, not int32"),
        (with_column("advantage", lambda table: [None] * len(table), "float"), "advantage has no value in some row"),
        (with_column("prompt_index", lambda table: [-9] * len(table), "int32"), "row 0 of the completions .* damaged"),
        (lambda table: table.append_column("turns", pyarrow.array(["[1]"] * len(table))), "row 0 of the completions"),
        (bomb, r"needs more than 0\.1 GB of memory"),
    ],
    ids=["lacking", "type", "null", "index", "turns", "bomb"],
)
def test_completions_that_are_none_are_refused_in_one_line(archive, tmp_path, change, fault, monkeypatch):
    monkeypatch.setattr(recorded, "LEAST_BYTES", 10**8)
    unpack(archive, tmp_path / "bundle", 10**9)
    path = tmp_path / "bundle/run/rollouts/step_000003.parquet"
    pyarrow.parquet.write_table(change(pyarrow.parquet.read_table(path)), path)
    pack(tmp_path / "bundle", tmp_path / "bug.tar.zst")
    with pytest.raises(ValueError, match=fault):
        replay_bundle(tmp_path / "bug.tar.zst", stage="advantage")


@pytest.mark.heavy
def test_functions_and_models_are_not_loaded_unless_the_user_says_so(archive, tmp_path, monkeypatch):
    folder, packed = tmp_path / "bundle", tmp_path / "code.tar.zst"
    unpack(archive, folder, 10**9)
    (tmp_path / "evil-mod.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    config, about = (json.loads((folder / "run" / name).read_text()) for name in ("config.json", "run.json"))
    for name, value in [
        ("loss_type", "os:system"),
        ("kl_estimator", f"{tmp_path}/evil-mod.py:f"),
        ("advantage_estimator", " evil-mod : f"),
    ]:
        processes = [{**each, "settings": {**each["settings"], name: value}} for each in about["processes"]]
        for changed in ({"config.json": {**config, name: value}}, {"run.json": {**about, "processes": processes}}):
            for file, content in ({"config.json": config, "run.json": about} | changed).items():
                (folder / "run" / file).write_text(json.dumps(content))
            pack(folder, packed)
            with pytest.raises(ValueError, match=f"computes with functions of its own: {name} "):
                replay_bundle(packed)
    (folder / "run" / "run.json").write_text(json.dumps(about))
    shutil.rmtree(folder / "model")
    shutil.rmtree(folder / "state")
    pack(folder, packed)
    with pytest.raises(ValueError, match="the model that the run started from is not in the bundle"):
        replay_bundle(packed)
    with pytest.raises(ValueError, match="the weights before step 3 are not in the bundle"):
        replay_bundle(packed, base="elsewhere")


@pytest.mark.drawn(3, "replays")
@pytest.mark.heavy
def test_a_step_after_a_continuation_with_other_settings(tmp_path, caplog):
    run = a_run(tmp_path, max_steps=4, save_steps=2)
    shutil.rmtree(run / "model")
    a_run(tmp_path, resume=str(run), max_steps=8, learning_rate=3e-3)
    for step in (4, 5, 7):
        assert bundled(run, step, tmp_path / f"{step}.tar.zst").outcome.is_equal
        caplog.clear()
        assert replay_bundle(tmp_path / f"{step}.tar.zst").is_equal
        assert "continued with other settings" not in caplog.text


@pytest.mark.heavy
def test_where_other_tokens_come_out_later_stages_have_the_run_s(archive, tmp_path):
    unpack(archive, tmp_path / "bundle", 10**9)
    path, rng = tmp_path / "bundle/state/params.safetensors", np.random.default_rng(0)
    moved = {name: leaf + rng.normal(0, 1e-2, leaf.shape) for name, leaf in load_file(path).items()}
    save_file({name: leaf.astype(np.float32) for name, leaf in moved.items()}, path)  # as another machine, only more
    pack(tmp_path / "bundle", tmp_path / "other.tar.zst")
    outcome = replay_bundle(tmp_path / "other.tar.zst")
    assert [stage.stage for stage in outcome.stages if not stage.is_equal] == ["rollout", "loss", "update"]
    assert re.search(
        r"rollout +DIFFERS: .*\n  from here on with the completions of the run:\n  reward +equal", str(outcome)
    )
    assert "9728 of 9728 weights differ" in str(outcome)
    assert "of their norm" in outcome.stages[-1].text


@pytest.mark.drawn(3, "replays")
@pytest.mark.heavy
def test_completions_that_were_not_kept_are_computed_for_the_bundle(tmp_path):
    run = a_run(tmp_path, loss_type="dapo", log_completions=False)
    made = bundled(run, 3, tmp_path / "bug.tar.zst")
    assert made.outcome.is_equal
    assert replay_bundle(tmp_path / "bug.tar.zst").is_equal
    lines = [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]
    lines[2]["reward"] = ["00000000"] * 4
    (run / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=r"completions of step 3 were not kept in .*, and others come out here"):
        bundled(run, 3, tmp_path / "other.tar.zst")


@pytest.mark.heavy
def test_what_a_bundle_cannot_show_is_refused(archive, run, tmp_path, capsys):
    for change in (["--with", "temperature=0.5"], ["--model", "elsewhere"]):
        assert main(["replay", str(archive), *change]) == 2
        assert "new completions have no recorded reward: give --reward" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "none.tar.zst")]) == 2
    assert "there is no file" in capsys.readouterr().err
    with pytest.raises(ValueError, match="is no folder that can be written to"):
        bundled(run, 3, tmp_path / "none" / "bug.tar.zst")
    saving = a_run(tmp_path / "saving", save_steps=1, save_total_limit=0)
    bundled(saving, 3, tmp_path / "bare.tar.zst", include=("model",))
    with pytest.raises(ValueError, match="is the state after step 1, and that after step 2 is needed"):
        replay_bundle(tmp_path / "bare.tar.zst", state=str(saving / "checkpoints" / "step_000001"))
    assert replay_bundle(tmp_path / "bare.tar.zst", state=str(saving / "checkpoints" / "step_000002")).is_equal


@pytest.mark.heavy
def test_a_state_that_is_not_the_run_s_is_not_bundled(run, tmp_path):
    other = tmp_path / "run"
    shutil.copytree(run, other)
    lines = [json.loads(line) for line in (other / "record.jsonl").read_text().splitlines()]
    lines[1]["update"] = "0" * 16
    (other / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match="the weights after step 2 come out otherwise here"):
        bundled(other, 3, tmp_path / "bug.tar.zst")
