"""Episodes in `groupax view`: turns, calls with their results, and what a browser shows of them."""

import functools
from dataclasses import replace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from groupax import Step, tool
from groupax.core.settings.sampling import SamplingParams
from groupax.episodes.as_json import DTYPES, branches_as_json, branches_from_json
from groupax.episodes.branches import SampledTurn, rollout_of
from groupax.evaluation.items import make_items
from groupax.rollouts.completions import episode_metrics
from groupax.runs.folder import RunFolder
from tests.episodes.test_episodes import TOKENIZER, call, played

from .test_view import HOSTILE, ask, serving


class Shop:
    """Answers in words of its own, and has rewards for turns."""

    def reset(self):
        return None

    @tool
    def look_up(self, text: str) -> Step:
        """Looks a text up.

        Args:
            text: Anything.
        """
        if text == "fail":
            raise ValueError(HOSTILE)
        return Step(text if text == HOSTILE else text * 600, reward=0.5, done=text == "end")

    def act(self, message):
        return Step(f"go on {HOSTILE}", reward=-0.25)


@functools.cache
def episodes():
    """Two episodes of five turns each: long and hostile results, an error, an unknown tool, and an end by a tool."""

    def answer(text, sample, turn):
        if turn == 3:
            return HOSTILE.replace("\0", "")
        texts = {0: [HOSTILE, "result "], 1: ["fail"], 2: [], 4: ["end"]}[turn]
        calls = "".join(call("look_up", text=each) for each in texts)
        return f"turn {turn} " + (calls or call(HOSTILE, text=HOSTILE))

    [group], _ = played(answer, environments=Shop, params=SamplingParams(n=2, max_tokens=20_000))
    scored = {"rewards": {"Shop": group[0].environment_reward}, "advantage": 0.0}
    turns = [replace(turn, rewards={"Shop": turn.reward, HOSTILE: 0.25}) for turn in group[0].turns]
    return [replace(group[0], **scored, turns=tuple(turns)), replace(group[1], **scored)]


def write_episodes(folder):
    """A run with episodes and its tokenizer."""
    run = RunFolder(folder)
    run.start({})
    TOKENIZER.save_pretrained(run.path / "tokenizer")
    run.write_rollouts(1, episodes())
    run.write_metrics(
        {"step": 1.0, "reward": 0.5, "tools/call_frequency": 5.0, "stop/done": 1.0, "stop/max_turns": 0.0}
    )
    run.write_items("step_000001.eval", make_items([episodes()], ["Shop"], np.ones(1), None))
    return run


def test_an_episode_is_a_chat_with_its_calls(tmp_path):
    """As the page shows it in tests/view/test_view_page.py."""
    run = write_episodes(tmp_path / "run")
    with serving(run.path) as port:
        ask(port, "runs")
        chat = ask(port, "group", run="run", step=1, prompt=0)["rows"][0]["episode"]
        assert [part.get("turn") for part in chat] == [0, 1, 2, 3, None, 4]
        where = {"run": "run", "step": 1, "prompt": 0, "sample": 0}
        assert ask(port, "text", **where, turn=0, call=1)["text"] == "result " * 600
        assert ask(port, "text", **where, turn=1)["text"] == "turn 1"
        assert "with a call 2" in ask(port, "text", 404, **where, turn=0, call=2)["error"]
        tokens = ask(port, "tokens", **where, channel="policy_logps")["rows"]["0"]
        for part in chat:
            if part["role"] == "assistant":
                assert all(tokens["sampled"][part["start"] : part["end"]])
        pairs = zip(tokens["values"], tokens["sampled"], strict=True)
        assert {value for value, sampled in pairs if not sampled} == {None}
        evaluated = ask(port, "items", run="run", name="step_000001.eval")["items"][0]["completions"][0]["episode"]
        assert untimed(evaluated) == untimed(chat)


def test_the_streams_of_a_program_are_chats_of_their_own(tmp_path):
    def turn(prompt, tokens, said, *asked, before=()):
        logps = [-1.0] * len(tokens)
        asked = [{"role": "user", "content": text} for text in asked]
        messages = (*before, *asked, {"role": "assistant", "content": said})
        return SampledTurn(np.asarray(prompt, np.int32), tokens, logps, logps, said, None, messages)

    first = turn([1], [2], "a", "go")
    turns = [first, turn([1, 2, 3], [4], "b", "more", before=first.messages), turn([9], [8, 8], "c", HOSTILE)]
    rollout = rollout_of(turns, (0, 0), {"prompt": "?"}, np.zeros(1, np.int32), "done", 0.5, 0)
    [branch] = rollout.branches
    [back] = branches_from_json(branches_as_json(rollout.branches))
    assert (back.turns, back.messages, back.prompt) == (branch.turns, branch.messages, branch.prompt)
    assert all(np.array_equal(getattr(back, name), getattr(branch, name)) for name in DTYPES)
    metrics = episode_metrics([rollout])
    names = ("episodes/turns", "episodes/streams", "episodes/turns_per_stream")
    assert [metrics[name] for name in names] == [3.0, 2.0, 1.5]
    run = RunFolder(tmp_path / "run")
    run.start({})
    run.write_rollouts(1, [replace(rollout, rewards={"r": 1.0}, advantage=0.0)])
    run.write_metrics({"step": 1.0, "reward": 0.5})
    with serving(run.path) as port:
        ask(port, "runs")
        [row] = ask(port, "group", run="run", step=1, prompt=0)["rows"]
    assert [part["text"] for part in row["episode"]] == ["a", "more", "b"]
    [stream] = row["streams"]
    assert (stream["num_turns"], stream["num_tokens"]) == (1, 2)
    assert [(part["role"], part["text"]) for part in stream["parts"]] == [("user, prompt", HOSTILE), ("assistant", "c")]


def untimed(chat):
    def without_seconds(calls):
        return [{**each, "seconds": 0} for each in calls]

    return [{**part, "advantage": None, "calls": without_seconds(part.get("calls", ()))} for part in chat]


@pytest.mark.parametrize(
    ("turns", "messages"), [("{", "[]"), ("[1, null]", "[]"), ("[" * 100_000, ""), ('[{"calls": 7}]', '[{"role": 3}]')]
)
def test_damaged_turns_are_plain_completions(tmp_path, turns, messages):
    run = write_episodes(tmp_path / "run")
    path = run.path / "rollouts" / "step_000001.parquet"
    table = pyarrow.parquet.read_table(path)
    for name, text in (("turns", turns), ("messages", messages)):
        column = table.column_names.index(name)
        table = table.set_column(column, name, pyarrow.array([text] * table.num_rows))
    pyarrow.parquet.write_table(table, path)
    with serving(run.path) as port:
        ask(port, "runs")
        row = ask(port, "group", run="run", step=1, prompt=0)["rows"][0]
    assert row["text"]
    assert not row["episode"] or all("role" in part for part in row["episode"])
