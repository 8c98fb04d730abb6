"""Runs with tools that are killed: they end with the same bits, and make no recorded call again."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import TINY
from tests.data.chat_tokenizers import VOCAB_SIZE
from tests.runs.test_resume import Killed
from tests.training.test_trainer import is_measured

from .stopped_agent import END

REPO = Path(__file__).parents[2]
MODEL = TINY | {"vocab_size": VOCAB_SIZE, "eos_token_id": END, "max_position_embeddings": 2048, "num_hidden_layers": 1}


class Agent(Killed):
    """Runs `stopped_agent` in processes, and kills them."""

    def __init__(self, folder, settings, pause_s):
        self.folder, self.settings, self.pause_s = folder, settings, pause_s
        folder.mkdir()
        (folder.parent / "model.json").write_text(json.dumps(MODEL))
        self.log = folder / "calls.log"
        self.log.touch()

    def start(self):
        arguments = [str(self.folder), json.dumps(self.settings), str(self.pause_s)]
        environment = {**os.environ, "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, str(REPO / "tests" / "episodes" / "stopped_agent.py"), *arguments]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)

    def kill_after(self, num_calls, pause_s):
        """Kills the process when so many more calls have begun; False if it ended before."""
        before = self.log.read_bytes().count(b"begin")
        while self.log.read_bytes().count(b"begin") < before + num_calls:
            if self.process.poll() is not None:
                return False
            time.sleep(0.002)
        time.sleep(pause_s)
        self.process.send_signal(signal.SIGKILL)
        _, err = self.process.communicate()
        assert self.process.returncode == -signal.SIGKILL, err.decode()
        return True

    def begun(self):
        """How often each call has begun."""
        lines = self.log.read_text().splitlines()
        return Counter(line.removeprefix("begin ") for line in lines if line.startswith("begin"))

    def recorded(self):
        """The calls that must not be made again: of tools, and of environments whose episodes have ended."""
        lines = []
        for path in (self.folder / "run" / "calls").glob("*.jsonl"):
            for line in path.read_text().split("\n"):
                if line.endswith("}"):
                    lines.append((path.name, json.loads(line)))
        ended = {(name, *line["episode"]) for name, line in lines if line["what"] == "end"}
        calls = [(name, line) for name, line in lines if line["what"] == "call"]
        return {
            f"{line['name']} {line['arguments']['call']}"
            for name, line in calls
            if not line["has_state"] or (name, *line["episode"]) in ended
        }

    def results(self):
        """Everything that the run has left, without timings."""
        import pyarrow.parquet

        run = self.folder / "run"
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rollouts = [pyarrow.parquet.read_table(path).to_pylist() for path in sorted((run / "rollouts").iterdir())]
        for row in (row for rows in rollouts for row in rows):
            for turn in (turns := json.loads(row["turns"])):
                for each in turn["calls"]:
                    each["seconds"] = 0
            row["turns"] = turns
        return [{name: value for name, value in line.items() if not is_measured(name)} for line in lines], rollouts


def check_killed(tmp_path, num_kills, settings, seed):
    """Kills a run that often during a tool, and compares it with one that was left alone."""
    alone = Agent(tmp_path / "alone", settings, 0.0)
    alone.start()
    expected = alone.finish()
    killed, moments = Agent(tmp_path / "killed", settings, 0.2), random.Random(seed)
    made_before: dict[str, int] = {}  # recorded calls with how often they had begun by then
    num_replayed = 0
    for _ in range(num_kills):
        killed.start()
        assert killed.kill_after(moments.randint(1, 12), moments.uniform(0, 0.3))
        begun, recorded = killed.begun(), killed.recorded()
        num_replayed += len(recorded)
        made_before = {**{name: begun[name] for name in recorded}, **made_before}
    killed.start()
    found = killed.finish()
    begun = killed.begun()
    assert {name for name, count in made_before.items() if begun[name] != count} == set()
    assert made_before
    assert begun.keys() == alone.begun().keys()
    assert set(alone.begun().values()) == {1}
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    assert found.keys() == expected.keys()
    assert killed.results() == alone.results()
    assert (tmp_path / "killed" / "run" / "calls").is_dir()  # for replays
    more = sum(begun.values()) - len(begun)
    print(f"{num_kills} kills: {len(begun)} calls, {num_replayed} answered from the record, {more} made again")


STALE = {"rollout_correction": "token_truncate"}


@pytest.mark.drawn(4, "resume")
@pytest.mark.heavy
def test_killed_during_a_tool_a_run_ends_with_the_same_bits_and_makes_no_recorded_call_again(tmp_path):
    check_killed(tmp_path, 2, {"max_steps": 3, "max_staleness": 1, **STALE}, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_killed_ten_times_during_tools_a_run_ends_with_the_same_bits(tmp_path, max_staleness):
    settings = {"max_steps": 8, "max_staleness": max_staleness, **(STALE if max_staleness else {})}
    check_killed(tmp_path, 10, settings, seed=10 + max_staleness)
