"""The record of tools' answers: a rollout that is played again makes none of its recorded calls again."""

import random
import threading
import time
from typing import ClassVar

import numpy as np
import pytest

from groupax.core.errors import InfrastructureError
from groupax.core.settings.rollouts import EpisodeSettings
from groupax.core.settings.sampling import SamplingParams
from groupax.episodes.play import Prompts
from groupax.episodes.record import Question, Record, remove_records
from groupax.episodes.rules import make_rules
from groupax.rollouts.collector import sample_groups
from groupax.tools.results import ToolResult
from groupax.tools.tool import Step, tool
from tests.episodes.test_episodes import PROMPT, TOKENIZER, Script, call

PARAMS = SamplingParams(n=3, max_tokens=4000)


class Killed(BaseException):
    """The process ends here."""


def play(answer, record, tools=(), environments=None, num_prompts=2, step=0, **settings):
    """The groups of a rollout."""
    rules = make_rules(TOKENIZER, EpisodeSettings(**settings), tools, environments)
    schemas = rules.setup_of({}).schemas
    text = TOKENIZER.apply_chat_template(PROMPT, tools=schemas or None, add_generation_prompt=True, tokenize=False)
    ids = np.asarray(TOKENIZER.encode(text), np.int32)
    examples = [{"prompt": PROMPT, "words": ["a"]}] * num_prompts
    groups = sample_groups(
        Script(answer), TOKENIZER, Prompts(examples, [ids] * num_prompts), PARAMS, step, rules=rules, record=record
    )
    try:
        return sorted((list(group) for group in groups), key=lambda group: group[0].prompt_index)
    finally:
        groups.close()
        record.close()


def rows_of(groups):
    return [
        (row.completion_ids.tolist(), row.finish_reason, row.environment_reward, results_of(row))
        for group in groups
        for row in group
    ]


def results_of(row):
    return [(turn.reward, [(call.result, call.error) for call in turn.calls]) for turn in row.turns]


def killed_after(num_turns, answer):
    """The answers of a model whose process is killed when it has written that many turns."""
    count = 0

    def counted(text, sample, turn):
        nonlocal count
        count += 1
        if count > num_turns:
            raise Killed
        return answer(text, sample, turn)

    return counted


def counting(log):
    def look(number: int) -> str:
        """Looks a number up, and never gives the same answer twice.

        Args:
            number: Any number.
        """
        log.append(number)
        return f"{number} is {random.random()}"

    return look


def three_calls(text, sample, turn):
    return call("look", number=10 * turn + sample) * 2 if turn < 3 else f"the end {len(text)}"


@pytest.mark.parametrize("num_turns", [1, 9, 20])
def test_a_rollout_that_was_killed_makes_only_the_calls_that_are_missing(tmp_path, num_turns):
    log = []
    with pytest.raises(Killed):
        play(killed_after(num_turns, three_calls), Record(tmp_path, "r"), [counting(log)])
    num_before = len(log)
    time.sleep(0.05)  # a call that was running then may still end
    groups = play(three_calls, Record(tmp_path, "r"), [counting(log)])
    assert 36 <= len(log) <= 36 + 2 * 3 * 2, (num_before, len(log))
    assert rows_of(groups) == rows_of(play(three_calls, Record(tmp_path, "r"), [counting(log)]))


def test_a_call_after_other_tokens_is_another_call(tmp_path):
    log = []
    play(three_calls, Record(tmp_path, "r"), [counting(log)])
    del log[:]

    def other(text, sample, turn):
        return "so " * (turn == 1) + three_calls(text, sample, turn)

    play(other, Record(tmp_path, "r"), [counting(log)])
    assert sorted({number // 10 for number in log}) == [1, 2]
    assert len(log) == 2 * 3 * 2 * 2


class Counter:
    """An environment with a state: what it answers depends on how often it was asked."""

    log: ClassVar[list[str]] = []
    lock = threading.Lock()

    def reset(self, row, seed):
        self.total = 0
        self.note("reset")
        return f" {seed % 10}"

    def note(self, what):
        with self.lock:
            Counter.log.append(what)

    @tool
    def add(self, number: int) -> Step:
        """Adds to the total.

        Args:
            number: The number.
        """
        self.note("add")
        self.total += number
        return Step(f"total {self.total}", reward=self.total / 8, done=self.total > 6)

    def act(self, message):
        self.note("act")
        return f"go on from {self.total}"

    async def score(self):
        self.note("score")
        return float(self.total)

    def close(self):
        self.note("close")


def adds(text, sample, turn):
    return "hm" if turn == 1 else call("add", number=sample + 1)


def test_an_episode_that_leaves_its_record_begins_again_with_a_new_environment(tmp_path):
    play(adds, Record(tmp_path, "r"), environments=Counter)

    def other(text, sample, turn):
        return call("add", number=sample + 2) if turn == 3 and sample == 0 else adds(text, sample, turn)

    expected = rows_of(play(other, Record(), environments=Counter))
    Counter.log = []
    assert rows_of(play(other, Record(tmp_path, "r"), environments=Counter)) == expected
    assert Counter.log.count("reset") == 2  # the first episode of both groups
    Counter.log = []
    assert rows_of(play(other, Record(tmp_path, "r"), environments=Counter)) == expected
    assert not Counter.log


def test_an_environment_that_fails_once_is_given_the_same_episode_again():
    seen = []

    class Flaky(Counter):
        def act(self, message):
            seen.append(1)
            if len(seen) in (1, 3):
                raise InfrastructureError("the connection was lost") if len(seen) == 1 else ConnectionError("again")
            return super().act(message)

    expected = rows_of(play(adds, Record(), environments=Counter))
    log = []
    with pytest.warns(UserWarning, match="failed; its episode begins again"):
        assert rows_of(play(adds, Record(), [counting(log)], environments=Flaky)) == rows_of(
            play(adds, Record(), [counting(log)], environments=Counter)
        )
    assert len(seen) == 6 + 2
    assert len(expected) == 6


def question(**more):
    return Question(**{"episode": (1, 2), "turn": 3, "what": "call", "has_state": False, "stream": "ab", **more})


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    record = Record(tmp_path, "r")
    record.add(question(name="f", arguments={"x": "\ud800\n"}), ToolResult("one", 0.5))
    record.add(question(index=1, name="f"), ToolResult("two", 0.5, "error", -1.5, True))
    record.close()
    path = tmp_path / "r.0.jsonl"
    whole = path.read_bytes()
    for length in range(len(whole) - 2, len(whole) - 90, -23):
        path.write_bytes(whole[:length])
        record = Record(tmp_path, "r")
        assert record.answer(question(name="f", arguments={"x": "\ud800\n"})) == ToolResult("one", 0.5)
        assert record.answer(question(index=1, name="f")) is None
        record.add(question(index=1, name="f"), ToolResult("three", 0.5))
        record.close()
        assert Record(tmp_path, "r").answer(question(index=1, name="f")) == ToolResult("three", 0.5)
    path.write_bytes(b'{"at": 1}\n[]\n\0\0\0\n' + whole + b"\xff\xfe")
    assert Record(tmp_path, "r").answer(question(index=1, name="f")) == ToolResult("two", 0.5, "error", -1.5, True)


def test_records_that_cannot_be_written_do_not_stop_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    record = Record(tmp_path / "file", "r")
    with pytest.warns(UserWarning, match="cannot be recorded"):
        record.add(question(), ToolResult("one", 0.5))
    record.add(question(index=1), ToolResult("one", 0.5))


def test_records_of_rollouts_in_a_checkpoint_are_removed(tmp_path):
    for number in (3, 4, 12):
        record = Record(tmp_path / "calls", f"rollout_{number:06d}")
        record.add(question(), ToolResult("one", 0.5))
        record.close()
    remove_records(tmp_path / "calls", 4)
    assert sorted(path.name for path in (tmp_path / "calls").iterdir()) == [
        "rollout_000004.0.jsonl",
        "rollout_000012.0.jsonl",
    ]
    remove_records(tmp_path / "calls", 13)
    assert not (tmp_path / "calls").exists()
    remove_records(tmp_path / "calls", 14)
