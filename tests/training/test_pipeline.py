"""Rollouts made ahead: the same run every time, by the policies it should be, and nothing left behind."""

import os
import random
import signal
import threading
import time

import pytest

from groupax.core.errors import PreemptedError, RewardError
from groupax.parallel.preemption import FairLock, RolloutCancelled
from groupax.runs.checkpoints.arrays import read_on_host
from tests.conftest import rest_heavy
from tests.runs.stopped_run import final_state, letters
from tests.runs.test_resume import assert_same, check_killed, needing_signals, rollouts_of

from .test_trainer import PROMPTS, a_trainer, before_updates, count_a, lines_of

AHEAD = {"max_staleness": 1, "rollout_correction": "token_truncate", "max_steps": 5, "max_completion_length": 8}
# Several updates on each rollout, dynamic sampling, several rollouts ahead.
REUSE = {
    "max_staleness": 5,
    "num_iterations": 2,
    "updates_per_rollout": 2,
    "prompts_per_step": 2,
    "filter_zero_variance": True,
    "beta": 0.05,
    "max_steps": 12,
}


def ahead(folder, rewards=count_a, **settings):
    return a_trainer(folder, rewards, eval_dataset=PROMPTS[:4], **{**AHEAD, **settings})


def steps_of(folder):
    """The lines of optimizer steps, without those of evaluations."""
    return [line for line in lines_of(folder) if "loss" in line]


def rollout_threads():
    return [thread for thread in threading.enumerate() if thread.name == "rollout"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What an undisturbed run ends with, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = ahead(folder)
    trainer.train()
    return final_state(trainer), folder


def test_each_rollout_is_sampled_by_the_policy_of_max_staleness_steps_before(whole):
    _, folder = whole
    versions = [{row["policy_version"] for row in rows} for rows in rollouts_of(folder).values()]
    assert versions == [{0}, {0}, {1}, {2}, {3}]
    lines = lines_of(folder)
    assert [line["rollout/staleness"] for line in lines] == [0, 1, 1, 1, 1]
    corrections = [line["rollout/correction_mean"] for line in lines]
    assert corrections[0] == pytest.approx(1, abs=1e-6)
    assert min(abs(correction - 1) for correction in corrections[1:]) > 1e-5  # the sampler is another policy
    assert [line["clip_ratio/region_mean"] for line in lines] == [0] * 5  # the ratio is to the policy of this update
    assert not rollout_threads()


@pytest.mark.heavy
@pytest.mark.parametrize("settings", [{}, REUSE], ids=["plain", "reuse"])
def test_how_long_things_take_changes_nothing(tmp_path, whole, settings):
    def slow(prompts, completion_ids, log_extra):
        time.sleep(random.uniform(0, 0.05))
        return letters(prompts, completion_ids, log_extra) if settings else count_a(completion_ids)

    slow.__name__ = "slow" if settings else "count_a"
    trainers = [ahead(tmp_path / name, slow, reward_concurrency=4, **settings) for name in ("one", "two")]
    for trainer in trainers:
        trainer.train()
    if not settings:
        assert_same(trainers[0], tmp_path / "one", whole)
    assert_same(trainers[0], tmp_path / "one", (final_state(trainers[1]), tmp_path / "two"))


@pytest.mark.heavy
def test_several_updates_on_a_rollout(tmp_path):
    ahead(tmp_path, letters, **REUSE).train()
    staleness = [line["rollout/staleness"] for line in lines_of(tmp_path)]
    assert staleness == [0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8]  # of rollouts before the steps 1, 5 and 9


# -- stopping and going on


@pytest.mark.drawn(4, "resume")
@pytest.mark.parametrize("phase", rest_heavy(["update", "reward"]))
def test_a_run_that_was_stopped_goes_on_exactly(tmp_path, whole, phase):
    signaled = threading.Lock()  # once: a second signal ends the program

    def stops(completion_ids, trainer_state):
        if phase == "reward" and trainer_state.step == 3:
            if signaled.acquire(blocking=False):
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        return count_a(completion_ids)

    stops.__name__ = "count_a"
    trainer = ahead(tmp_path, stops)
    stops_at = 2 if phase == "update" else None
    before_updates(trainer, lambda _: os.kill(os.getpid(), signal.SIGTERM) if trainer.cursor.step == stops_at else None)
    begun_s = time.monotonic()
    with pytest.raises(PreemptedError, match=r"after step [23]; its state is in"):
        trainer.train()
    assert time.monotonic() - begun_s < 25 or phase == "update"  # nobody waited for the reward
    assert not rollout_threads()
    saved = tmp_path / "run" / "checkpoints" / f"step_00000{trainer.cursor.step}"
    assert {name.split(".")[0] for name in read_on_host(saved / "policies")} == {str(trainer.cursor.step - 1)}
    resumed = ahead(tmp_path)
    resumed.train()
    assert_same(resumed, tmp_path, whole)


@pytest.mark.long
def test_killed_at_random_moments_it_goes_on_exactly(tmp_path):
    ahead = {"max_staleness": 3, "rollout_correction": "token_truncate", "updates_per_rollout": 1, "max_steps": 12}
    check_killed(tmp_path, 4, ahead, seed=2)


# -- what goes wrong in a thread


def test_a_closed_lock_refuses_those_that_wait_and_those_that_come():
    lock, refused = FairLock(), []

    def enter():
        with pytest.raises(RolloutCancelled), lock:
            pass
        refused.append(1)

    with lock:
        (waiting := threading.Thread(target=enter)).start()
        lock.close()
        waiting.join(10)
    enter()
    assert len(refused) == 2


@pytest.mark.heavy
def test_what_goes_wrong_in_a_thread_ends_the_run(tmp_path):
    def fails(completion_ids, trainer_state):
        if trainer_state.step == 2:
            raise KeyError("no such judge")
        return count_a(completion_ids)

    with pytest.raises(RewardError, match="no such judge"):
        ahead(tmp_path, fails, reward_errors="raise").train()
    assert not rollout_threads()
    assert (tmp_path / "run" / "checkpoints" / "step_000002").is_dir()  # from which it can go on


@pytest.mark.heavy
def test_rewards_that_need_signals_get_the_main_thread(tmp_path):
    trainer = ahead(tmp_path, needing_signals, eval_steps=2)
    trainer.train()
    assert all(line["rewards/needing_signals/failures"] == 0 for line in steps_of(tmp_path))
