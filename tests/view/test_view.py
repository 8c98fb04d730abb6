"""`groupax view`: what its server tells of run folders, what it refuses, and the page in a real browser
(tests/view/test_view_page.py)."""

import fcntl
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from groupax.cli.main import main
from groupax.core.types import Rollout
from groupax.evaluation.items import Completion, Item
from groupax.events import TokenScores
from groupax.runs.files import check_unlocked
from groupax.runs.folder import RunFolder
from groupax.runs.report import read_run
from groupax.runs.rollout_log import rollout_table, write_table
from groupax.satellites.view.curves import mean_and_spread, smoothed, thinned
from groupax.satellites.view.evaluations import item_page
from groupax.satellites.view.groups import group_summaries
from groupax.satellites.view.rollouts import Step, cached_step, read_step
from groupax.satellites.view.runs import Run, Runs, Tail
from groupax.satellites.view.server import make_server
from groupax.satellites.view.token_values import TokenTexts

STATIC = Path(__file__).parents[2] / "groupax" / "satellites" / "view" / "static"
HOSTILE = "<script>alert(1)</script>\x1b[31m\u202etxt.exe<img src=x onerror=alert(2)>\x00"
NUM_STEPS, G = 6, 4
LONG = "ü" * 600_000  # 1.2 MB in one line


def a_rollout(step, prompt_index, sample_index):
    """Prompt 0 gets equal rewards, those of prompt 1 disagree, prompt 2 is hostile; the last completion is cut off."""
    question = "What is 1+1?" if prompt_index == 0 else f"prompt {prompt_index} of step {step}"
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    prompt = (question, chat, HOSTILE)[prompt_index]
    text = f"answer {sample_index} of step {step}"
    if prompt_index == 2:
        text = LONG if sample_index == 0 else HOSTILE
    right = 0.5 if prompt_index == 0 else sample_index / G
    logps = np.linspace(-2, -0.5, 3 + sample_index).astype(np.float32)
    ids = np.arange(3 + sample_index, dtype=np.int32)
    rewards = {"right": right, "<b>brief</b>": 1 - sample_index / G if prompt_index == 1 else None}
    drawn = {"policy_logps": logps, "sampler_logps": logps - 0.5, "policy_version": step - 1, "text": text}
    drawn["finish_reason"] = "length" if sample_index == G - 1 else "stop"
    prompt_ids, scored = np.arange(4, dtype=np.int32), {"rewards": rewards, "advantage": sample_index - 1.5}
    extra = {"note": HOSTILE}
    return Rollout(prompt_index, sample_index, {"prompt": prompt}, prompt_ids, ids, extra=extra, **drawn, **scored)


def write_run(folder, config, num_steps=NUM_STEPS):
    run = RunFolder(folder)
    run.start(config)
    for step in range(1, num_steps + 1):
        times = {"step_time": 2.0, "time/rollout_s": 1.5 - step / 10}
        run.write_metrics({"step": float(step), "reward": step / 10, "kl": float("nan"), **times})
        rows = [a_rollout(step, prompt, sample) for prompt in range(3) for sample in range(G)]
        scored = {
            index: TokenScores(row.policy_logps + 0.25, -row.policy_logps)
            for index, row in enumerate(rows)
            if index % G
        }
        run.write_rollouts(step, rows, scored)
    run.write_diagnostic(3, "kl_runaway", f"KL runs away {HOSTILE}")
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("view") / "runs"
    run = write_run(
        folder / "alpha", {"beta": 0.0, "seed": 1, "reward_weights": [1.0, 2.0], "correctness_reward": "right"}
    )
    done = Completion(HOSTILE, 5, "stop", {"right": 1.0}, 1.0, True)
    cut = Completion("wrong", 9, "length", {"right": 0.0}, 0.0, False)
    items = [Item(f"k{n}", n, f"question {n}", {"answer": n}, [done, done if n % 3 else cut]) for n in range(60)]
    run.write_items("step_000005.eval", items)
    hostile = folder / '"><img src=x onerror=alert(3)>'
    write_run(hostile, {"beta": 0.1, "seed": 1, HOSTILE: HOSTILE}, num_steps=2)
    for name in ("step_x.parquet", ".step_000009.parquet", "step_000010.parquet.part"):
        (folder / "alpha" / "rollouts" / name).write_bytes(b"")
    (folder / "alpha" / "rollouts" / "step_000007.parquet").write_bytes(b"PAR1 damaged")
    (folder.parent / "secret.jsonl").write_text('{"prompt": "secret", "completions": []}')
    return folder


@contextmanager
def serving(*folders, token=None):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        server = make_server(Runs(folders), port, token)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield port
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def port(folder):
    with serving(folder) as port:
        assert ask(port, "runs")["alpha"]["last_step"] == NUM_STEPS
        yield port


def request(port, path, method="GET", **headers):
    """Status, headers and body of the answer to exactly this path."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, headers={"Host": f"127.0.0.1:{port}", **given})
    answer = connection.getresponse()
    found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    connection.close()
    return found


def ask(port, route, expected=200, /, **parameters):
    status, headers, body = request(port, f"/api/{route}?{urlencode(parameters, doseq=True)}")
    assert status == expected, body
    assert headers["content-type"] == "application/json"
    return json.loads(body)


def test_every_run_of_a_folder_is_listed_with_its_state(port):
    runs = ask(port, "runs")
    assert list(runs) == ['"><img src=x onerror=alert(3)>', "alpha"]
    state = runs["alpha"]
    assert (state["last_step"], state["num_rollout_steps"]) == (NUM_STEPS, NUM_STEPS + 1)
    assert state["diagnostics"] == {"kl_runaway": "error"}
    assert state["latest"] == {"reward": NUM_STEPS / 10, "kl": None}
    assert state["status"] == "live"
    assert ask(port, "names") == ["kl", "reward", "step_time", "time/rollout_s"]


def test_series_are_what_was_logged(port):
    found = ask(port, "series", run=["alpha"], name=["reward", "kl", "none"])["alpha"]
    assert found["reward"] == {"x": [1, 2, 3, 4, 5, 6], "y": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], "num_points": 6}
    assert found["kl"]["y"] == [None] * 6
    assert "none" not in found
    for points in ("-5", "0", "inf", "-inf", "1e300"):
        assert ask(port, "series", run="alpha", name="reward", points=points)["alpha"]["reward"]["x"][0] == 1
    part = ask(port, "series", **{"run": "alpha", "name": "reward", "from": 2.5, "to": 4, "smooth": 0.5})
    assert part["alpha"]["reward"]["x"] == [3, 4]
    assert part["alpha"]["reward"]["y"] == pytest.approx(smoothed(np.arange(1, 7) / 10, 0.5)[2:4])


def test_curves_and_marks_have_positions_of_tokens_and_of_time(tmp_path):
    run = RunFolder(tmp_path / "=1+1")
    run.start({})
    for step, reward in ((1, 0.25), (2, float("nan")), (3, 0.75)):
        run.write_metrics({"step": float(step), "reward": reward, "step_time": 3.0, "num_tokens": 1e2 * step})
    run.write_diagnostic(2, "kl_runaway", "")
    with serving(run.path) as port:
        ask(port, "runs")
        by_tokens = ask(port, "series", run="=1+1", name="reward", by="tokens")["=1+1"]["reward"]
        assert by_tokens["x"] == [100, 200, 300]
        marks = ask(port, "diagnostics", run="=1+1", by="time")["=1+1"]
        assert [(mark["step"], mark["x"]) for mark in marks] == [(2, 6)]


def test_the_band_of_seeds_is_their_mean_and_deviation(port):
    curves = [(np.array([1.0, 3.0]), np.array([0.0, 2.0])), (np.array([1.0, 2.0, 4.0]), np.array([2.0, np.nan, 5.0]))]
    x, mean, std = mean_and_spread(curves)
    assert x.tolist() == [1, 3, 4]
    assert mean == pytest.approx([1.0, 3.0, 5.0])  # the second curve is 4 at 3, the first ends there
    assert std == pytest.approx([1.0, 1.0, 0.0])
    band = ask(port, "band", run=["alpha", '"><img src=x onerror=alert(3)>'], name=["reward", "none"])
    assert list(band) == ["reward"]
    assert (band["reward"]["num_runs"], band["reward"]["low"][:2]) == (2, [0.1, 0.2])


def test_curves_are_smoothed_by_what_is_near_and_thinned_to_their_extremes():
    y = np.array([1.0, np.nan, 4.0, 2.0])
    weights = 0.5 ** np.arange(3)[::-1]
    assert smoothed(y, 0.5)[3] == pytest.approx((weights @ [1.0, 4.0, 2.0]) / weights.sum())
    assert np.isnan(smoothed(y, 0.5)[1])
    x = np.arange(10_000.0)
    y = np.sin(x / 300)
    y[1234], y[7777], y[5000:5100] = 9.0, -9.0, np.nan
    thin_x, thin_y = thinned(x, y, 500)
    assert len(thin_x) <= 502
    assert (thin_x[0], thin_x[-1]) == (0, 9999)
    assert {(1234.0, 9.0), (7777.0, -9.0)} <= set(zip(thin_x.tolist(), thin_y.tolist(), strict=True))
    assert thinned(x[:500], y[:500], 500)[1].tolist() == y[:500].tolist()


def test_steps_have_shares_of_phases(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.start({})
    times = {"rollout": 1.8, "reward": 0.2, "wait": 0.5, "train": 1.0}
    for step in (1.0, 2.0):
        of_step = {f"time/{name}_s": value for name, value in times.items()}
        run.write_metrics({"step": step, "step_time": 2.0, **of_step})
    with serving(run.path) as other:
        ask(other, "runs")
        found = ask(other, "shares", run="run")
    assert {each["phase"]: each["share"] for each in found} == {"wait": 0.25, "train": 0.5, "other": 0.25}


def test_the_overview_says_what_a_run_is_how_far_it_is_and_what_changed(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.start({"max_steps": -1, "reward_weights": [0.5, 1.0], "learning_rate": 1e-3})
    facts = {"model": "m", "rewards": "a, b", "steps": "1,000, each on 8 completions", "devices": "1 x cpu"}
    early = {"started_at": "then", "step": 0, "settings": {"beta": 0.1, "output_dir": "a"}}
    late = {"started_at": "now", "step": 7, "settings": {"beta": 0.25, "output_dir": "b"}, "commit": "0", "run": facts}
    late |= {"processor": "P", "cores": 2, "python": "3.11", "versions": {"jax": "1"}, "mesh": {"dp": 2, "tp": 1}}
    (run.path / "run.json").write_text(json.dumps({"processes": [early, late]}))
    (run.path / "command.json").write_text(json.dumps({"model": "m", "reward_funcs": ["a", "b"]}))
    for step, step_s, compile_s in ((10, 30.0, 20.0), (20, 2.0, 0.0)):
        metrics = {"reward": step / 10, "num_tokens": 7.0 * step, "step_time": step_s, "time/compile_s": compile_s}
        run.write_metrics({"step": float(step), **metrics})
    with serving(run.path) as port:
        ask(port, "runs")
        found = ask(port, "overview", run="run")
        progress = {"step": 20, "num_steps": 1000, "elapsed_s": 320, "remaining_s": 1960, "tokens": 140}
        assert found["progress"] == {**progress, "started_at": "then", "fleet": ""}
        assert found["facts"]["rewards"] == "a × 0.5, b × 1"
        assert found["facts"]["command"].startswith("groupax train --model m --reward_funcs a b")
        assert (found["facts"]["commit"], found["facts"]["continued"]) == ("0", "now")
        assert found["facts"]["changed settings"] == "after step 7: beta 0.1 → 0.25"
        [change] = found["changes"]
        assert (change["before"]["value"], change["after"]["value"], change["set"]) == (1.0, 2.0, "training prompts")
        for step in range(30, 90, 10):
            run.write_metrics({"step": float(step), "reward": step / 10})
        ask(port, "runs")
        [change] = ask(port, "overview", run="run")["changes"]
        assert (change["before"]["value"], change["after"]["value"]) == (1.5, 7.5)
        assert change["when"] == ["steps 10 to 20", "steps 70 to 80"]
        found = ask(port, "config")["run"]
        assert found["defaults"] == {"learning_rate": 1e-6, "reward_weights": None}
        hardware = {"devices": "1 x cpu", "mesh": "dp 2", "processor": "P, 2 cores", "commit": "0"}
        assert found["machine"] == {**hardware, "Python": "3.11", "jax": "1"}
        difference = {"value": 0.5, "low": 0.25, "high": 0.625}
        pair = {"before": 0.25, "after": 0.75, "difference": difference, "p_value": 0.01}
        estimates = {"before": {"pass@1": {"value": 0.25, "low": 0.125, "high": 0.5}}, "after": {}}
        result = {"sets": {"eval": {**estimates, "comparison": {"differences": {"pass@1": pair}}}}}
        (run.path / "result.json").write_text(json.dumps(result))
        [change] = ask(port, "overview", run="run")["changes"]
        assert change["before"] == {"value": 0.25, "low": 0.125, "high": 0.5}
        assert change["after"] == {"value": 0.75, "low": None, "high": None}
        assert ask(port, "table")["run"]["held_out"]["difference"]["low"] == 0.25
        for name in ("run.json", "result.json", "command.json"):
            (run.path / name).write_text('{"processes": [7], "sets": 3, "recipe": []}')
        assert ask(port, "overview", run="run")["facts"]["folder"] == str(run.path)


def test_metrics_are_read_while_they_are_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    run = Run(tmp_path)
    run.refresh()
    assert run.state()["status"] == "waiting"
    path.write_bytes(b'{"step": 1, "reward": 0.5}\n{"step": 2, "rew')
    run.refresh()
    assert run.state()["status"] == "live"
    assert run.series("reward")[1].tolist() == [0.5]
    with path.open("ab") as file:
        file.write(b'ard": NaN}\nno json\n[1]\n{"step": "x", "reward": 1}\n\xff\xfe\n')
        file.write(b'{"step": 3, "reward": 1e999, "t": "x"}\n')
    run.refresh()
    steps, values = run.series("reward")
    assert steps.tolist() == [1, 2, 3]
    assert values[0] == 0.5
    assert np.isnan(values[1:]).all()
    assert run.state()["num_bad_lines"] == 4
    os.utime(path, (time.time() - 3600,) * 2)
    assert run.state()["status"] == "quiet"
    partial = tmp_path / "again"
    partial.write_text('{"step": 1, "reward": 0.25}\n')
    partial.rename(path)  # as a run that goes on from an earlier step does
    run.refresh()
    assert run.series("reward")[1].tolist() == [0.25]
    assert run.generation == 1


def test_a_run_that_has_ended_says_why(tmp_path):
    path = tmp_path / "run"
    folder = RunFolder(path)
    run = Run(path)

    def told():
        run.refresh()
        state = run.state()
        return state["status"], state["ending"]

    folder.start({})
    folder.write_end("failed before it began")
    folder.write_metrics({"step": 1.0, "reward": 0.5})
    assert told() == ("live", "")
    for end, status in (("stopped (SIGTERM) after step 1", "stopped"), ("failed: ValueError: " + HOSTILE, "failed")):
        folder.write_process({"step": 0})
        assert told() == ("live", "")
        folder.write_end(end)
        assert told() == (status, end)
    lock = f"process {{}} on {socket.gethostname()} since then\n"
    gone = subprocess.Popen(["true"])
    gone.wait()
    (path / ".lock").write_text(lock.format(gone.pid))
    status, ending = told()
    assert status == "dead"
    assert re.match(r"its process has ended without a message \(killed, .*; no sign of life since ", ending)
    with (path / ".lock").open() as held:  # by a process of a container, for one
        fcntl.flock(held, fcntl.LOCK_EX)
        assert told() == ("live", "")
    for holder in (lock.format(os.getpid()), f"process {gone.pid} on {socket.gethostname()}.elsewhere since then", "?"):
        (path / ".lock").write_text(holder)
        assert told() == ("live", "")
    os.utime(path / "metrics.jsonl", (time.time() - 3600,) * 2)
    assert told()[0] == "quiet"
    assert told()[1].startswith("no sign of life since ")
    (path / ".lock").write_text(lock.format(gone.pid))
    for _ in range(2):
        assert folder.lock()
        folder.unlock()
        assert told()[0] == "dead", "a process that did nothing changes nothing"
    assert folder.lock()
    folder.write_process({"step": 1})
    folder.write_end("done after step 1")
    assert told() == ("done", "done after step 1"), "by the process that has the lock"
    folder.write_process({"step": 1})
    assert told()[0] == "quiet"
    with (path / ".lock").open("a") as lock:  # as on a full disk
        lock.write("failed after step 1: RunError: no room\n")
    assert told() == ("failed", "failed after step 1: RunError: no room")


def test_a_run_has_a_name_tags_and_notes(tmp_path, capsys):
    run = write_run(tmp_path / "run", {}, num_steps=1)
    for given in (["--name", "First", "--notes", HOSTILE], ["--tags", "slow", "long"], []):
        assert main(["note", str(run.path), *given]) == 0
    assert capsys.readouterr().out.splitlines()[-3:-1] == ["name   First", "tags   slow long"]
    assert Run(run.path).state()["note"] == {"name": "First", "tags": ["slow", "long"], "notes": HOSTILE}
    assert main(["note", str(run.path), "--tags", "two words"]) == 2
    assert main(["note", str(tmp_path), "--name", "no run"]) == 2
    (run.path / "note.json").write_text('{"name": 3, "tags": "a"}')
    assert Run(run.path).state()["note"] == {"name": "3", "tags": [], "notes": ""}


def test_an_asynchronous_run_says_who_waits_for_whom(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.start({"max_staleness": 2, "rollout_servers": ["http://a:1", "http://b:1"]})
    for step, wait_s in ((1, 1.0), (2, 3.0)):
        times = {"step_time": 4.0, "time/wait_s": wait_s, "time/rollout_s": 3.5}
        run.write_metrics({"step": float(step), "reward": 0.5, "rollout/staleness": 1.0, **times})
    with serving(run.path) as port:
        ask(port, "runs")
        assert ask(port, "overview", run="run")["progress"]["fleet"] == (
            "2 rollout servers · updates wait for rollouts 50 % of the time · a rollout takes 3.5 s, a step 4 s · "
            "rollouts are 1 steps old, of at most 2"
        )


def test_steps_are_kept_in_memory_up_to_a_size(folder, monkeypatch):
    paths = [folder / "alpha" / "rollouts" / f"step_00000{step}.parquet" for step in (1, 2)]
    assert cached_step(paths[0], None) is cached_step(paths[0], None) is not cached_step(paths[0], [1.0, 2.0])
    monkeypatch.setattr("groupax.satellites.view.rollouts.MAX_CACHED_BYTES", 0)
    first = cached_step(paths[0], None)
    assert cached_step(paths[0], None) is first
    cached_step(paths[1], None)
    assert cached_step(paths[0], None) is not first


DEEP = "[" * 400 + "]" * 400
DAMAGE = {
    "config.json": f'{{"reward_weights": [[1], 1{"0" * 400}], "max_steps": 1{"0" * 400}, "deep": {DEEP}}}',
    "run.json": f'{{"processes": [{{"run": {{"steps": "{"9" * 5000}, each"}}, "settings": 7, "end": {DEEP}}}]}}',
    "diagnostics.jsonl": f'{{"name": {DEEP}, "text": {DEEP}, "step": 1e999}}\n',
    "evaluations/step_000005.eval.jsonl": f'{{"prompt": {"[" * 5000}\n',
    "rollouts/step_2.parquet": "",
    f"rollouts/step_{'9' * 200}.parquet": "",
    "evaluations/step_000006.eval.jsonl": None,  # a link to nothing
    "completion_ids": 7,
    "images": 7,
    "completion": [["x"]],
    "prompt_index": 2**62,
    "sample_index": b"\xff",
    "advantage": 1e308,
    "turns": '[{"reward": 1e999, "calls": [3, {}], "rewards": 7, "start": 1e999}]',
}


def test_damaged_files_are_no_failures_of_the_page(folder, tmp_path):
    for number, (name, value) in enumerate(DAMAGE.items()):
        path = shutil.copytree(folder / "alpha", tmp_path / f"run{number}") / name
        if "." not in name:
            path = path.parent / "rollouts" / "step_000001.parquet"
            table = pq.read_table(path)
            rest = table.drop_columns([name] if name in table.column_names else [])
            pq.write_table(rest.append_column(name, pyarrow.array([value] * len(table))), path)
        elif value is None:
            path.symlink_to("nothing")
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(value)
    (tmp_path / os.fsdecode(b"run-\xff")).mkdir()
    (tmp_path / os.fsdecode(b"run-\xff") / "metrics.jsonl").write_text("")
    place = {"step": 1, "prompt": 0, "sample": 0, "turn": 0, "name": "reward", "channel": "policy_logps"}
    routes = "overview extremes table shares config diagnostics step group tokens text estimates export"
    with serving(tmp_path) as port:
        names = [*ask(port, "runs")]
        assert "run-?" in names
        for name in names:
            for route in routes.split():
                status, _, body = request(port, f"/api/{route}?{urlencode({'run': name, **place, 'by': 'time'})}")
                assert status in (200, 400, 404), (name, route, body)
            assert ask(port, "search", run=name, q="answer 1 of step 6")["hits"] or name == "run-?"
            until_s = time.monotonic() + 20.0
            while (progress := ask(port, "prompts", run=name)["progress"])["num_done"] < progress["num_steps"]:
                assert time.monotonic() < until_s, (name, progress)


def test_prompts_that_were_never_solved_are_counted(tmp_path):
    for name, config in (("judged", {"correctness_reward": "right"}), ("unjudged", {})):
        solved = replace(a_rollout(1, 0, 0), rewards={"right": 1.0})
        write_run(tmp_path / name, config, num_steps=1).write_rollouts(2, [solved])
    with serving(tmp_path) as port:
        ask(port, "runs")
        found = ask(port, "prompts", run="judged")
        assert (found["num_prompts"], found["num_unsolved"], len(found["prompts"])) == (3, 2, 3)
        assert [each["count"] for each in ask(port, "prompts", run="judged", show="unsolved")["prompts"]] == [1, 1]
        assert ask(port, "prompts", run="unjudged")["num_unsolved"] is None


def test_endless_lines_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("groupax.satellites.view.runs.MAX_LINE_BYTES", 64)
    (tmp_path / "f").write_text('{"a": 1}\n{"a": "' + "x" * 500 + '"}\n{"a": 2}\n{"a": "' + "y" * 500)
    tail = Tail(tmp_path / "f")
    assert list(tail.new_objects()) == [{"a": 1}, {"a": 2}]
    assert tail.num_bad_lines == 1


def test_tokens_with_their_numbers(port):
    def tokens(channel, **more):
        return ask(port, "tokens", run="alpha", step=3, prompt=1, channel=channel, **more)

    ratios = tokens("ratio trainer / policy")["rows"]
    assert ratios["1"]["values"] == pytest.approx([np.exp(0.25)] * 4, abs=1e-4)
    assert ratios["0"]["values"] == [None] * 3  # the step did not train on it
    assert tokens("entropies")["rows"]["3"]["values"] == pytest.approx(np.linspace(2, 0.5, 6), abs=1e-4)
    one = tokens("policy_logps", sample=2)
    assert {sample: row["texts"] for sample, row in one["rows"].items()} == {"2": ["⟨0⟩", "⟨1⟩", "⟨2⟩", "⟨3⟩", "⟨4⟩"]}
    assert "no tokenizer/tokenizer.json" in one["fault"]


def test_texts_of_tokens_join_to_the_text(tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "a 🙂ü <b>\n"
    ids, texts = tokenizer.encode(text).ids, TokenTexts(tmp_path)
    assert len(texts.pieces(ids)) == len(ids) == len(text.encode())
    assert "".join(texts.pieces(ids)) == text
    assert texts.pieces([ids[0], -1]) == ["a", "⟨-1⟩"]
    assert texts.pieces(ids[2:4]) == ["", "\ufffd"]  # cut within a character


def test_a_small_file_that_repeats_a_long_text_stays_small(tmp_path):
    text, num_rows = "needle " + "x" * 1_000_000, 3000
    rows = [replace(a_rollout(1, 0, 0), sample_index=index, text="") for index in range(num_rows)]
    table = rollout_table(1, rows, {})
    values = pyarrow.DictionaryArray.from_arrays(np.zeros(num_rows, np.int32), [text])
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    path = tmp_path / "run" / "rollouts" / "step_000001.parquet"
    write_table(path, table.set_column(table.column_names.index("completion"), "completion", values))
    assert path.stat().st_size < 1_000_000
    with serving(tmp_path / "run") as port:
        ask(port, "runs")
        assert read_step(path).table.nbytes < 10_000_000
        found = ask(port, "group", run="run", step=1, prompt=0)["rows"]
        assert sum(len(row["text"]) for row in found) <= 4_000_000
        assert all(row["is_cut"] for row in found)
        assert len(ask(port, "search", run="run", q="NEEDLE")["hits"]) == 50
        assert ask(port, "search", run="run", q="nowhere")["hits"] == []


def test_bytes_that_are_no_text_are_shown(tmp_path):
    write_run(tmp_path / "run", {}, num_steps=1)
    (tmp_path / "run" / "config.json").write_bytes(b'{"name": "\xff\xfe"}')
    table = rollout_table(1, [a_rollout(1, 0, 0)], {})
    bad = pyarrow.array([b"ab\xff\xc3"], pyarrow.binary()).cast(pyarrow.string(), safe=False)
    changed = table.set_column(table.column_names.index("completion"), "completion", bad)
    write_table(tmp_path / "run" / "rollouts" / "step_000001.parquet", changed)
    with serving(tmp_path / "run") as port:
        ask(port, "runs")
        assert ask(port, "group", run="run", step=1, prompt=0)["rows"][0]["text"] == "ab\ufffd\ufffd"
        assert ask(port, "config")["run"]["config"] == {"name": "\ufffd\ufffd"}
        (tmp_path / "run" / "config.json").write_text("[1]")
        assert "must be a JSON object" in ask(port, "config")["run"]["fault"]


def found_in(port, **conditions):
    """Places of all hits, newest steps first."""
    hits, rest = [], {}
    while rest is not None:
        found = ask(port, "search", run="alpha", **rest, **conditions)
        hits, rest = hits + found["hits"], found["next"]
    return [(hit["step"], hit["prompt_index"], hit["sample_index"]) for hit in hits]


@pytest.mark.parametrize(("name", "value"), [("MAX_HITS", 5), ("BUDGET_S", -1.0)])
def test_a_search_combines_expressions_and_ranges_and_may_pause(port, monkeypatch, name, value):
    monkeypatch.setattr(f"groupax.satellites.view.search.{name}", value)
    found = found_in(port, q=r"answer [02] of step [12]$", regex="1", max_length=4)
    assert found == [(2, 0, 0), (2, 1, 0), (1, 0, 0), (1, 1, 0)]
    assert found_in(port, q="step 4", end="truncated", max_reward=1.3, min_advantage=1) == [(4, 0, 3), (4, 1, 3)]
    assert found_in(port, min_reward=2) == [(step, 1, 0) for step in range(6, 0, -1)]
    assert len(set(found_in(port, end="complete"))) == len(found_in(port, end="complete")) == 6 * 3 * (G - 1)


def test_an_expression_that_could_be_tried_for_ages_ends(tmp_path):
    run = write_run(tmp_path / "run", {}, num_steps=1)
    run.write_rollouts(2, [replace(a_rollout(1, 0, 0), text="ü" + "a" * 5000 + "b")])
    with serving(tmp_path / "run") as port:
        ask(port, "runs")
        assert ask(port, "search", run="run", q="(a|aa)+$", regex="1")["hits"] == []
        [hit] = ask(port, "search", run="run", q="(a|aa)+B$", regex="1")["hits"]
        assert hit["excerpt"] == "ü" + "a" * 319


def test_hits_are_newest_first(port):
    hit = ask(port, "search", run="alpha", q="Answer 1 OF step")["hits"][0]
    assert (hit["step"], hit["excerpt"], hit["advantage"]) == (6, "answer 1 of step 6", -0.5)
    hits = ask(port, "search", run="alpha", q=HOSTILE, max_length=3)["hits"]
    assert [hit["step"] for hit in hits] == [6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize(
    ("name", "parameters", "status", "told"),
    [
        ("step", {"run": "alpha", "step": 99}, 404, "step 99 has no rollout log"),
        ("step", {"run": "alpha", "step": 7}, 400, "step_000007.parquet cannot be read"),
        ("step", {"run": "alpha", "step": "9" * 5000}, 400, "not a non-negative integer"),
        ("step", {"run": "nobody", "step": 1}, 404, "there is no run 'nobody'"),
        ("series", {"run": "alpha", "name": "reward", "by": "x"}, 400, "x"),
        ("search", {"run": "alpha"}, 400, "q is empty"),
        ("search", {"run": "alpha", "q": "(", "regex": "1"}, 400, "'(' is not a regular expression"),
        ("search", {"run": "alpha", "end": "x"}, 400, "end='x' is none of truncated, complete"),
        ("tokens", {"run": "alpha", "step": 3, "prompt": 1, "channel": "x"}, 404, "has no 'x' per token"),
        ("differences", {"run": "alpha", "name": "step_000005.eval"}, 404, "no evaluation ''"),
        ("group", {"run": "alpha", "step": 1, "prompt": 50}, 404, "no prompt 50; it has 3"),
        ("text", {"run": "alpha", "step": 1, "prompt": 0, "sample": 50}, 404, "no sample 50; it has 4"),
        ("series", {"run": "alpha", "name": "reward", "smooth": "2"}, 400, "must be in [0, 1)"),
        ("series", {"run": "alpha", "name": "reward", "points": "nan"}, 400, "points='nan' is not a number"),
        ("items", {"run": "alpha", "name": "../../../secret"}, 404, "no evaluation '../../../secret'"),
        ("items", {"run": "alpha", "name": "step_000005.eval", "first": "inf"}, 400, "not a non-negative integer"),
        ("prompt", {"run": "alpha", "key": "zz"}, 404, "is not a prompt key"),
    ],
)
def test_odd_questions_are_answered_with_what_is_wrong(port, name, parameters, status, told):
    assert told in ask(port, name, status, **parameters)["error"]


def test_files_outside_the_page_are_not_given(port):
    for path in (
        *("/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static//etc/passwd", "//etc/passwd"),
        *("/../../../../etc/passwd", "/static/js/../../app.py", "/%2e%2e/%2e%2e/secret.jsonl", "/etc/passwd"),
        *("/static", "/static/", "/static/vendor/uPlot.LICENSE"),
    ):
        status, _, body = request(port, path)
        assert (status, body) == (404, b"Not Found"), path


def test_requests_of_others_are_refused(port):
    def status(path="/api/runs", method="GET", **headers):
        return request(port, path, method, **headers)[0]

    own = f"http://127.0.0.1:{port}"
    assert status() == status(Origin=own, Sec_Fetch_Site="same-origin") == status(Host=f"localhost:{port}") == 200
    assert status(Host=f"[::1]:{port}") == 200
    for host in (f"evil.example:{port}", "127.0.0.1.evil.example", "[::1", "", f"10.0.0.1:{port}"):
        assert status(Host=host) in (400, 403), host
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{port + 1}", f"{own}.evil.example", "http://[::1"):
        assert status(Origin=origin) == 403, origin
    assert status(Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors") == 403
    assert status(Sec_Fetch_Site="same-site", Sec_Fetch_Mode="navigate", Sec_Fetch_Dest="document") == 403
    link = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    assert status("/", **link, Sec_Fetch_Dest="document") == 200
    assert status("/", **link, Sec_Fetch_Dest="iframe") == 403
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert status(method=method) == 403
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nHost: evil.example\r\n\r\n".encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400 ")


def test_a_browser_may_do_nothing_but_show_the_page(port):
    for path in ("/", "/api/runs", "/static/js/main.js", "/none"):
        _, headers, _ = request(port, path)
        assert "default-src 'none'; script-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert not any(name.startswith("access-control") for name in headers)
    assert request(port, "/", Host="evil.example")[1]["content-security-policy"]


def test_a_token_opens_the_page(folder):
    with serving(folder, token="right") as port:
        assert (
            request(port, "/")[0] == request(port, "/?token=wrong")[0] == request(port, "/static/style.css")[0] == 401
        )
        assert request(port, "/api/runs", Cookie=f"groupax_view_{port}=wrong")[0] == 401
        status, headers, _ = request(port, "/?token=right")
        assert (status, headers["location"]) == (303, "/")
        assert "HttpOnly; SameSite=Strict" in headers["set-cookie"]
        cookie = headers["set-cookie"].partition(";")[0]
        assert request(port, "/api/runs", Cookie=f"a=b; {cookie}")[0] == 200
        assert request(port, "/api/runs", Authorization="Bearer right")[0] == 200
        assert request(port, "/api/runs", Authorization="Bearer right", Host="gpu.example:80")[0] == 200
        assert request(port, "/api/runs", Authorization="Bearer right", Origin="http://evil.example")[0] == 403


def test_the_command_tells_its_address_and_needs_a_token_elsewhere(folder, monkeypatch, capsys):
    monkeypatch.setattr("uvicorn.Server.run", lambda server, sockets: sockets[0].close())
    view = ["view", str(folder), "--port", "0"]
    for more, address in (([], r"1:\d+/  "), (["--host", "0.0.0.0"], r"/\?token=[\w-]{43} "), (["--token"], "token=")):
        assert main([*view, *more]) == 0
        assert re.search(f"http://.*{address}", capsys.readouterr().out)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["view", str(folder), "--port", str(taken.getsockname()[1])]) == 2
    assert "choose another --host or --port" in capsys.readouterr().err
    for words, told in (
        ([str(folder / "none")], "is not a folder; pass the output_dir"),
        ([], "no run folder is given"),
        ([str(folder), "--port=70000"], "cannot listen on 127.0.0.1, port 70000"),
    ):
        assert main(["view", *words]) == 2
        assert told in capsys.readouterr().err


def test_the_page_asks_this_server_alone(port):
    texts = {
        path: request(port, path)[2].decode() for path in ("/", "/static/style.css", "/static/vendor/uPlot.min.css")
    }
    texts |= {f"/static/js/{file.name}": file.read_text() for file in (STATIC / "js").iterdir()}
    for path, text in texts.items():
        assert not re.search(r"https?://|\burl\(|innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(", text), (
            path
        )
    named = re.findall(r'(?:src|href)="(/[^"]+)"', texts["/"])
    named += [f"/static/js/{name}" for text in texts.values() for name in re.findall(r'from "\./([\w.]+)"', text)]
    assert len(set(named)) > 10
    assert all(request(port, path)[0] == 200 for path in set(named))


def test_the_chart_library_is_the_one_that_was_vendored():
    recorded = json.loads((STATIC / "vendor" / "uPlot.json").read_text())
    for name, digest in recorded["sha256"].items():
        assert sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == digest
    assert recorded["version"] in (STATIC / "vendor" / "uPlot.iife.min.js").read_text()[:200]


def a_step(prompt_index, rewards):
    """A step with these columns."""
    num_rows = len(prompt_index)
    columns = {name: np.asarray(values, float) for name, values in rewards.items()}
    table = pyarrow.table({"prompt": [f"prompt {index}" for index in prompt_index]})
    truncated, lengths = np.arange(num_rows) % 3 == 0, np.arange(num_rows)
    total = np.nansum([*columns.values()], axis=0) if columns else np.full(num_rows, np.nan)
    return Step(table, np.asarray(prompt_index), columns, total, np.zeros(num_rows), truncated, lengths)


def test_groups_are_summed_up_as_each_would_be_alone():
    rng = np.random.default_rng(0)
    for _ in range(50):
        num_rows = int(rng.integers(1, 40))
        index = rng.integers(3, 9, num_rows)
        rewards = {name: np.where(rng.random(num_rows) < 0.2, np.nan, rng.integers(0, 3, num_rows)) for name in "abc"}
        step = a_step(index, rewards)
        found = group_summaries(step)
        assert [each["prompt_index"] for each in found] == list(dict.fromkeys(index.tolist()))
        for each in found:
            rows = np.flatnonzero(index == each["prompt_index"])
            pairs = [(i, j, a, b) for i in rows for j in rows for a in rewards.values() for b in rewards.values()]
            assert each["disagree"] == any((a[i] - a[j]) * (b[i] - b[j]) < 0 for i, j, a, b in pairs)
            assert each["totals"] == step.total[rows].tolist()
            assert each["mean"] == pytest.approx(step.total[rows].mean())
            assert each["std"] == pytest.approx(step.total[rows].std())
            assert each["zero_variance"] == (np.ptp(step.total[rows]) == 0)
            assert each["size"] == len(rows)
            assert each["num_truncated"] == step.truncated[rows].sum()
            assert each["mean_tokens"] == pytest.approx(step.num_tokens[rows].mean())
            assert each["preview"] == f"prompt {each['prompt_index']}"


def test_a_group_may_have_all_of_a_large_step_and_no_rewards():
    num_rows = 100_000  # pairs of these would take 80 GB
    [each] = group_summaries(a_step(np.zeros(num_rows, int), {"a": np.arange(num_rows), "b": -np.arange(num_rows)}))
    assert each["disagree"]
    [each] = group_summaries(a_step([0, 0], {}))
    assert np.isnan(each["mean"])
    assert group_summaries(a_step([], {})) == []


def make_huge(path):
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), make_huge])
@pytest.mark.parametrize(
    "name",
    [
        *("run.json", "config.json", "command.json", "result.json", "diagnostics.jsonl", ".lock"),
        *("evaluations/a.jsonl", "rollouts/step_000001.parquet"),
    ],
)
def test_files_of_a_strangers_run_are_read_only_if_they_are_files_of_a_usual_size(tmp_path, make, name):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1.0, "reward": 1.0, "loss": 1.0}\n')
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    make(path)
    if make is make_huge and path.suffix == ".jsonl":
        return  # read line by line
    run = Run(tmp_path)
    assert run.refresh(1.0)
    assert read_run(tmp_path).metrics
    for read in (
        *(run.config, run.command, run.state, partial(check_unlocked, tmp_path)),
        *(partial(run.record, "run.json"), partial(run.record, "result.json")),
        lambda: read_step(run.rollout_file(1)),
        partial(item_page, tmp_path / "evaluations/a.jsonl", 0, "all", ""),
    ):
        with suppress(ValueError):
            read()
