"""Rewards during decoding: calls that raise, hang, block or end their process; threads, loops and processes."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import jax
import numpy as np
import pytest

from groupax.core.errors import RewardError
from groupax.core.settings.rollouts import RewardSettings
from groupax.rewards.resolve import resolve_rewards
from groupax.rewards.runner import RewardRunner
from tests.training.test_trainer import a_trainer, count_a, lines_of

from .test_rewards import rollouts_of, scores_of


def groups_of(*texts):
    return [rollouts_of(text) for text in texts]


def run_groups(function, groups, **settings):
    return [[list(score.values) for score in scores] for scores in scores_of_all(function, groups, **settings)]


def scores_of_all(function, groups, **settings):
    with RewardRunner(resolve_rewards(function, []), RewardSettings(**settings)) as runner:
        for group in groups:
            runner.start(group)
        return runner.finish()


def lengths(completions):
    return [float(len(text)) for text in completions]


def process_ids(completions):
    return [float(os.getpid()) for _ in completions]


def ends_its_process(completions):
    os._exit(1)


def hangs(completions):
    time.sleep(60)
    return [1.0] * len(completions)


def limits_its_time(completions):
    """Like math-verify: only a main thread may set a signal's handler, and the refusal is caught."""
    rewards = []
    for text in completions:
        try:
            before = signal.signal(signal.SIGALRM, lambda *_: None)
            signal.alarm(5)
            rewards.append(float(len(text)))
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
        except Exception:  # noqa: BLE001 - as users do
            rewards.append(0.0)
    return rewards


def ends_in_the_main_thread(completions):
    signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
    sys.exit(3)


def raises(completions):
    raise KeyError("no such thing")


def exits(completions):
    raise SystemExit(3)


async def is_cancelled_async(completions):
    raise asyncio.CancelledError("by a library")


def breaks_off(completions):
    yield 1.0
    raise KeyError("in a generator")


async def blocks(completions):
    time.sleep(3)
    return [1.0] * len(completions)


async def waits(completions):
    await asyncio.sleep(60)


@pytest.mark.parametrize("batch", ["group", "rollout"])
def test_groups_keep_their_order_and_rewards_theirs(batch):
    seen = []

    def noting(completions):
        seen.append(len(completions))
        return lengths(completions)

    results = run_groups(
        [noting, lambda completions: [0.0] * len(completions)], groups_of(["a", "bb"], ["ccc", "d"]), reward_scope=batch
    )
    assert results == [[[1.0, 2.0], [0.0, 0.0]], [[3.0, 1.0], [0.0, 0.0]]]
    assert seen == ([2, 2] if batch == "group" else [4])


def test_a_rollout_is_scored_in_the_order_of_its_prompts_in_calls_of_whole_groups():
    groups = [[replace(row, prompt_index=index) for row in group] for index, group in
              zip((2, 0, 1), groups_of(["a"], ["bb"], ["ccc"]), strict=True)]  # fmt: skip
    seen = []

    def noting(completions):
        seen.append(list(completions))
        return lengths(completions)

    with RewardRunner(resolve_rewards(noting, []), RewardSettings(reward_scope="rollout")) as runner:
        runner.groups_per_call = 2
        for group in groups:
            runner.start(group)
        assert [scores[0].values.tolist() for scores in runner.finish()] == [[1.0], [2.0], [3.0]]
    assert seen == [["bb", "ccc"], ["a"]]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "KeyError: 'no such thing'"),
        (exits, "raised SystemExit"),
        (is_cancelled_async, "raised CancelledError: by a library"),
        (breaks_off, "KeyError: 'in a generator'"),
        (hangs, "did not return within reward_timeout_s = 0.3"),
        (waits, "did not return within reward_timeout_s = 0.3"),
        (blocks, "did not return within reward_timeout_s = 0.3"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_call_that_fails_gives_no_reward_and_ends_in_time(function, message):
    started_s = time.monotonic()
    with RewardRunner(resolve_rewards([function, awaited_length], []), RewardSettings(reward_timeout_s=0.3)) as runner:
        runner.start(rollouts_of("ab"))
        [[failed, other]] = runner.finish()
        assert message in failed.error
        assert failed.num_failures == 2
        assert np.isnan(failed.values).all()
        assert other.values.tolist() == [1.0, 1.0]
        runner.start(rollouts_of("cd"))
        assert runner.finish()[0][1].values.tolist() == [1.0, 1.0]
        assert time.monotonic() - started_s < 5


async def awaited_length(completions):
    return lengths(completions)


def test_failed_calls_are_tried_again():
    attempts = []

    def third_time_lucky(completions):
        attempts.append(time.monotonic())
        if len(attempts) < 3:
            raise ConnectionError("try again")
        return lengths(completions)

    assert scores_of(third_time_lucky, rollouts_of("ab"), reward_retries=2).values.tolist() == [1.0, 1.0]
    first, second = np.diff(attempts)
    assert second > 1.5 * first > 0.5  # it waits longer each time
    attempts.clear()
    assert "try again" in scores_of(third_time_lucky, rollouts_of("ab"), reward_retries=1).error


def test_sync_functions_run_one_call_at_a_time_by_default():
    running, most = [], []
    lock = threading.Lock()

    def slow(completions):
        with lock:
            running.append(1)
            most.append(len(running))
        time.sleep(0.05)
        with lock:
            running.pop()
        return lengths(completions)

    run_groups(slow, groups_of(*["ab"] * 6))
    assert max(most) == 1
    most.clear()
    run_groups(slow, groups_of(*["ab"] * 6), reward_concurrency=3)
    assert max(most) == 3


def test_async_calls_run_together():
    async def slow(completions):
        await asyncio.sleep(0.2)
        return lengths(completions)

    started_s = time.monotonic()
    run_groups(slow, groups_of(*["ab"] * 10))
    assert time.monotonic() - started_s < 1.5


@pytest.mark.heavy
def test_processes():
    results = run_groups([process_ids, limits_its_time], groups_of(*["ab"] * 4), reward_workers=2)
    ids = {value for [processes, _] in results for value in processes}
    assert os.getpid() not in ids
    assert 1 <= len(ids) <= 2
    assert [lengths for _, lengths in results] == [[1.0, 1.0]] * 4  # each has its main thread for signals
    started_s = time.monotonic()
    runner = RewardRunner(resolve_rewards([hangs, lengths], []), RewardSettings(reward_workers=1, reward_timeout_s=4.0))
    runner.start(rollouts_of("ab"))
    [[killed, _]] = runner.finish()
    assert "did not return within" in killed.error
    runner.start(rollouts_of("ab"))
    runner.close()
    assert time.monotonic() - started_s < 30


@pytest.mark.heavy
def test_a_process_that_dies_takes_its_call_with_it_only():
    [[dead, exited, alive]] = scores_of_all([ends_its_process, exits, lengths], groups_of("ab"), reward_workers=2)
    assert dead.num_failures == 2
    assert dead.error
    assert "raised SystemExit" in exited.error
    assert alive.values.tolist() == [1.0, 1.0]


def test_processes_need_functions_that_can_be_imported():
    with pytest.raises(ValueError, match=r"cannot be sent to another process .* top level of a module"):
        RewardRunner(resolve_rewards(lambda completions: [], []), RewardSettings(reward_workers=1))


def test_a_hanging_function_does_not_keep_the_interpreter(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(os.getcwd())!r})\n"
        "from groupax.rewards.resolve import resolve_rewards\n"
        "from groupax.rewards.runner import RewardRunner\n"
        "from groupax.core.settings.rollouts import RewardSettings\n"
        "runner = RewardRunner(resolve_rewards(lambda completions: time.sleep(600), []), RewardSettings())\n"
        "class Row: prompt, completion, text, example = 'p', 'c', 'c', {}\n"
        "import numpy\n"
        "Row.completion_ids = numpy.zeros(1)\n"
        "runner.start([Row])\n"
        "time.sleep(0.2)\n"
        "print('leaving')\n"
    )
    done = subprocess.run([sys.executable, script], timeout=30, capture_output=True, text=True, check=True)
    assert done.stdout == "leaving\n"


# -- in the loop


@pytest.mark.heavy
def test_the_trainer_scores_during_decoding(tmp_path):
    calls = []

    def noting(completions, trainer_state):
        calls.append((len(completions), trainer_state.step, trainer_state.num_steps))
        return [float(index) for index, _ in enumerate(completions)]

    a_trainer(tmp_path, noting, max_steps=2).train()
    assert calls == [(4, 0, 2)] * 4 + [(4, 1, 2)] * 4


@pytest.mark.heavy
def test_a_reward_that_fails_now_and_then_is_counted_and_reported_once(tmp_path, caplog):
    calls = []

    def flaky(completion_ids):
        calls.append(1)
        if len(calls) % 4 == 0:
            raise ConnectionError("service down")
        return count_a(completion_ids)

    trainer = a_trainer(tmp_path, [flaky, count_a])
    trainer.train()
    lines = lines_of(tmp_path)
    assert [line["rewards/flaky/failures"] for line in lines] == [4, 4, 4]
    assert all(line["rewards/unscorable_frac"] == 0 for line in lines)  # the other reward still scores them
    assert caplog.text.count("the reward function 'flaky' failed; its completions go without") == 1
    assert "ConnectionError: service down" in caplog.text
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(trainer.learner.state.params))


@pytest.mark.heavy
def test_on_request_a_failure_stops_the_run(tmp_path):
    def fails_in_the_second_step(completion_ids, trainer_state):
        if trainer_state.step == 1:
            raise KeyError("no such thing")
        return count_a(completion_ids)

    with pytest.raises(
        RewardError, match=r"'fails_in_the_second_step' failed in step 2, group 0 \(reward_errors is 'raise'\)"
    ):
        a_trainer(tmp_path, fails_in_the_second_step, reward_errors="raise").train()
    assert len(lines_of(tmp_path)) == 1


@pytest.mark.parametrize("way", ["raises", "returns"])
def test_errors_that_quote_completions_are_visible_in_diagnostics_and_exceptions(way):
    hostile = "\x1b]0;owned\x07\x1b[2J\u202eGREEN"

    class Value:
        def __repr__(self):
            return hostile

    def quoting(completions):
        if way == "raises":
            raise ValueError(f"cannot read {completions[0]}")
        return [Value() for _ in completions]

    [[score]] = scores_of_all(quoting, groups_of([hostile]))
    assert "␛]0;owned␇␛[2J\\u202eGREEN" in score.error
    assert not {"\x1b", "\x07", "\u202e"} & set(score.error)


# -- signals, which only the main thread gets


@pytest.mark.parametrize("batch", ["group", "rollout"])
def test_a_function_that_needs_signals_is_called_in_the_main_thread(batch):
    values = run_groups(limits_its_time, groups_of(["a", "bb"], ["ccc", "d"]), reward_scope=batch)
    assert values == [[[1.0, 2.0]], [[3.0, 1.0]]]


def test_a_refusal_is_noticed_where_signal_was_imported_by_name():
    from signal import signal as set_handler

    def limited(completions):
        set_handler(signal.SIGALRM, set_handler(signal.SIGALRM, signal.SIG_DFL))
        return [1.0] * len(completions)

    assert run_groups(limited, groups_of(["a", "b"])) == [[[1.0, 1.0]]]


def test_a_function_cannot_end_the_program_from_the_main_thread():
    (scores,) = scores_of_all(ends_in_the_main_thread, groups_of(["a", "b"]))
    assert "raised SystemExit" in scores[0].error


def test_without_the_main_thread_the_refusal_is_explained():
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.extend(scores_of_all(limits_its_time, groups_of(["a", "b"]))))
    thread.start()
    thread.join()
    assert "set reward_workers" in outcomes[0][0].error
    assert np.isnan(outcomes[0][0].values).all()
