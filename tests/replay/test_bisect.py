"""The step that a metric went wrong in, and what differs in it today."""

import shutil
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from groupax import bisect_run, init_model
from groupax.satellites.replay.bisect import bisected, parsed_condition
from groupax.satellites.replay.recorded import recorded_run
from groupax.satellites.replay.trainer import ReplayTrainer
from groupax.training.optimizer import make_optimizer
from tests.data.test_config_and_data import a_tokenizer
from tests.runs.stopped_run import letters
from tests.training.test_trainer import PROMPTS, a_trainer

from .test_replay import ONE_LAYER

SETTINGS = {"max_steps": 6, "beta": 0.001, "scale_rewards": "none"}


def with_rate(trainer, at=3):
    """Gives one update of a trainer another learning rate."""
    learner, update = trainer.learner, trainer.learner.update

    def spoiled(rows):
        own = learner.schedule, learner.optimizer
        if learner.num_updates + 1 == at:
            learner.schedule = lambda _: jnp.float32(1.0)
            learner.optimizer = make_optimizer(learner.settings.optimizer, learner.schedule)
        try:
            return update(rows)
        finally:
            learner.schedule, learner.optimizer = own

    learner.update = spoiled


def with_nan(trainer, at=4):
    """Damages a row of one update of a trainer."""
    next_rows = trainer.next_rows

    def spoiled():
        rows = next_rows()
        if trainer.cursor.step + 1 == at:
            rows[5] = replace(rows[5], advantages=rows[5].advantages * np.float32(np.nan))
        return rows

    trainer.next_rows = spoiled


def makes(reward=letters, data=PROMPTS):
    def make(target, args):
        model, tokenizer = init_model(ONE_LAYER, seed=0), a_tokenizer(eos_token="<eos>")
        return ReplayTrainer(target, model, reward, args, data, None, tokenizer)

    return make


def found(folder, trainer, until, make, window=4):
    run = recorded_run(folder / "run")
    found = bisected(run, parsed_condition(until), make, window)
    return found, str(found)


def with_a_flip(folder, **settings):
    """Trains a run in whose step 4 the reward of one completion is 50, and returns its trainer."""

    def reward(prompts, completion_ids, log_extra):
        scores = letters(prompts, completion_ids, log_extra)
        if trainer.cursor.step != 3 or flipped:
            return scores
        flipped.append(prompts[0])
        return [scores[0], 50.0, *scores[2:]]

    flipped = []
    reward.__name__ = "letters"
    trainer = a_trainer(folder, reward, **SETTINGS, **settings)
    trainer.train()
    return trainer


@pytest.mark.heavy
def test_a_reward_that_was_flipped_once(tmp_path):
    trainer = with_a_flip(tmp_path)
    bisection, text = found(tmp_path, trainer, "grad_norm > 5", makes())
    assert bisection.step == 4
    assert bisection.parted.step == 4
    assert "50 in the run" in text


def test_a_condition_that_holds_in_the_first_step_or_in_none(tmp_path):
    trainer = a_trainer(tmp_path, letters, **SETTINGS | {"max_steps": 2})
    trainer.train()
    bisection, text = found(tmp_path, trainer, "learning_rate > 0.001", makes())
    assert (bisection.step, bisection.before, bisection.parted) == (1, 0, None)
    assert "step 1 is computed as recorded" in text
    with pytest.raises(ValueError, match=r"holds in no step up to 2: kl is .* to "):
        found(tmp_path, trainer, "kl > 100", makes())


@pytest.mark.drawn(2, "sabotage")
@pytest.mark.heavy
def test_a_learning_rate_spike(tmp_path):
    trainer = a_trainer(tmp_path, letters, **SETTINGS)
    with_rate(trainer)
    trainer.train()
    bisection, text = found(tmp_path, trainer, "kl > 0.5", makes())
    assert (bisection.step, bisection.parted.step) == (4, 3)
    assert "update     DIFFERS: learning_rate 1 in the run, 0.01 now" in text


@pytest.mark.drawn(2, "sabotage")
@pytest.mark.heavy
def test_a_row_of_the_dataset_that_has_changed(tmp_path):
    def gold(prompts, completion_ids, gold, log_extra):
        bonus = [90.0 * ids.count(3) if each == "!" else 0.0 for each, ids in zip(gold, completion_ids, strict=True)]
        return [a + b for a, b in zip(letters(prompts, completion_ids, log_extra), bonus, strict=True)]

    data = [{**row, "gold": "!"} if row["prompt"] == "ef" else row for row in PROMPTS]
    trainer = a_trainer(tmp_path, gold, data, **SETTINGS)
    trainer.train()
    bisection, text = found(tmp_path, trainer, "grad_norm > 5", makes(gold))
    assert bisection.parted.stages[0].stage == "data"
    assert len(bisection.parted.stages[0].places) == 1
    assert "a column of the dataset other than the prompt" in text


@pytest.mark.drawn(2, "sabotage")
@pytest.mark.heavy
def test_a_loss_that_is_not_finite(tmp_path):
    trainer = a_trainer(tmp_path / "once", letters, **SETTINGS)
    with_nan(trainer)
    trainer.train()
    bisection, text = found(tmp_path / "once", trainer, "loss is nan", makes())
    assert (bisection.step, bisection.parted.step) == (4, 4)
    assert "loss       DIFFERS: rows 5; loss not finite in the run" in text


@pytest.mark.drawn(2, "sabotage")
@pytest.mark.heavy
def test_a_learning_rate_that_came_with_a_continuation(tmp_path):
    settings = {"save_steps": 2, "lr_scheduler_type": "constant", "beta": 0.01, "learning_rate": 1e-3}
    a_trainer(tmp_path, letters, **settings, max_steps=2).train()
    run = tmp_path / "run"
    shutil.rmtree(run / "model")
    a_trainer(tmp_path, letters, **settings | {"learning_rate": 1.0, "resume": str(run)}, max_steps=4).train()
    model, tokenizer = init_model(ONE_LAYER, seed=0), a_tokenizer(eos_token="<eos>")
    found = bisect_run(run, "kl > 0.5", model, letters, train_dataset=PROMPTS, processing_class=tokenizer)
    assert found.step in (3, 4)
    text = str(found)
    assert "before step 3 the run was continued with other settings: " in text
    assert "learning_rate 0.001 -> 1.0" in text
    with pytest.raises(ValueError, match="at least 1 step, got 0"):
        bisect_run(run, "kl > 0.5", model, letters, train_dataset=PROMPTS, window=0)
