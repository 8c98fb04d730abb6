"""TRL's batch arithmetic: the same prompts, generations and optimizer steps, recorded from TRL 1.16."""

import json

import numpy as np
import pytest

from groupax import init_model
from groupax.compat.trl import GRPOConfig
from groupax.compat.trl.batches import TRLBatchTrainer
from groupax.core.types import Rollout
from groupax.rollouts.state import Experience
from groupax.training.learner import Update
from tests.conftest import TINY, one_device_mesh
from tests.data.test_config_and_data import a_tokenizer

from .trl_batches import CASES, FILE, record

RECORDED = json.loads(FILE.read_text())
assert [(case["num_prompts"], case["settings"]) for case in RECORDED] == CASES
NAMES = [" ".join(f"{name}={value}" for name, value in settings.items()) or "defaults" for _, settings in CASES]
METRICS = {"time/rollout_s": 1.0, "frac_reward_zero_std": 0.0, "completions/clipped_ratio": 0.0}


@pytest.fixture(scope="module")
def model():
    return init_model({**TINY, "vocab_size": 13}, mesh=one_device_mesh())


class Counting(TRLBatchTrainer):
    """As in `trl_batches.record`: only generation and update are replaced."""

    def count(self):
        self.generations, self.updates = [], []
        self.learner.update, self.collector.collect = self.made, self.collected
        return self

    def collected(self, cursor):
        visited = self.collector.visited(cursor.num_prompts, self.schedule.prompts_per_rollout)
        G = self.args.num_generations
        groups = [
            [self.completion(index, sample, len(self.generations)) for sample in range(G)]
            for index in range(len(visited))
        ]
        self.generations.append([cursor.step, visited])
        minibatches = self.collector.cut(groups)
        return Experience(groups, METRICS, {}, cursor.num_prompts, 0, minibatches)

    def completion(self, index, sample, generation):
        return Rollout(
            prompt_index=index,
            sample_index=sample,
            example={"prompt": "abc"},
            prompt_ids=np.array([3], np.int32),
            completion_ids=np.array([generation, index * self.args.num_generations + sample], np.int32),
            policy_logps=np.zeros(2, np.float32),
            sampler_logps=np.zeros(2, np.float32),
            finish_reason="stop",
            policy_version=0,
            text="",
            advantage=0.0,
        )

    def made(self, rows):
        by_group = {}
        for row in rows:
            by_group.setdefault(row.group, set()).add(int(row.completion[0]))
        assert all(len(generations) == 1 for generations in by_group.values())  # groups are told apart
        self.updates.append([row.completion.tolist() for row in rows])
        return Update(
            {"loss": 0.0, "grad_norm": 0.0, "learning_rate": 0.0},
            True,
            [np.zeros(2) for _ in rows],
            [np.zeros(2) for _ in rows],
        )


@pytest.mark.drawn(4)
@pytest.mark.parametrize("case", RECORDED, ids=NAMES)
def test_prompts_generations_and_steps_are_those_of_trl(tmp_path, model, case):
    args = GRPOConfig(str(tmp_path / "run"), disable_tqdm=True, max_completion_length=8, **case["settings"])
    num_prompts, rows = case["num_prompts"], args.batches()[0]
    dataset = [{"prompt": "abc"}] * num_prompts
    tokenizer = a_tokenizer(eos_token="<eos>")
    native = args.to_native(1, num_prompts)
    reward = lambda completions: [0.0] * len(completions)  # noqa: E731
    trainer = Counting(args.schedule(), model, reward, native, dataset, None, tokenizer).count()
    trainer.train()
    assert trainer.generations == case["generations"]
    assert len(trainer.updates) == len(case["steps"])
    for rows_of_step, parts in zip(trainer.updates, case["steps"], strict=True):
        # TRL shuffles a generation's rows before it cuts them; the parts are the same
        expected = [[generation, part * rows + row] for generation, part in parts for row in range(rows)]
        assert sorted(rows_of_step) == sorted(expected)


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", RECORDED, ids=NAMES)
def test_trl_still_does_what_was_recorded(case):
    pytest.importorskip("trl")
    found = record(case["num_prompts"], case["settings"])
    assert found == {name: case[name] for name in found}
