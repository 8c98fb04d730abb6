"""compat.trl's tools, environments and rollout functions."""

import asyncio

import numpy as np
import pytest

from groupax import init_model
from groupax.compat import trl
from groupax.compat.trl.environments import Agents
from groupax.compat.trl.rollout_func import trajectories_of
from groupax.core.errors import RunError
from groupax.core.settings.sampling import SamplingParams
from groupax.episodes.custom import RolloutFunction, RolloutRequest, Trajectory, custom_rollouts
from tests.conftest import TINY
from tests.data.chat_tokenizers import VOCAB_SIZE, chat_tokenizer
from tests.episodes.test_episodes import TOKENIZER, Script, add, call, played

MODEL = {**TINY, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 4096}


class Counter:
    """An environment of TRL."""

    made = 0

    def __init__(self):
        self.number = Counter.made
        Counter.made += 1

    def reset(self, start=0, **columns):
        self.total, self.columns = start, columns
        return f"Counter {self.number}"

    def act(self, step: int) -> dict:
        """Counts.

        Args:
            step: A step.
        """
        self.total += step
        return {"total": self.total}

    async def wait(self) -> str:
        """Waits."""
        await asyncio.sleep(0)
        return "done"

    @property
    def broken(self):
        raise AssertionError("properties are not evaluated")

    def get_reward(self):
        return float(self.total)


def a_trainer(tmp_path, reward=None, dataset=None, settings=None, **more):
    given = {"per_device_train_batch_size": 4, "num_generations": 2, "max_steps": 2, "max_completion_length": 600}
    args = trl.GRPOConfig(str(tmp_path / "run"), save_strategy="no", logging_steps=1, **{**given, **(settings or {})})
    model = init_model(MODEL, seed=0)
    return trl.GRPOTrainer(model, reward, args, dataset, processing_class=chat_tokenizer(), **more)


@pytest.mark.heavy
def test_a_script_of_trl_trains_with_tools_and_environments(tmp_path):
    seen = []

    def reward(completions, environments, name, **_):
        seen.append(([each.total for each in environments], [len(messages) for messages in completions], name))
        return [0.0] * len(completions)

    Counter.made = 0
    rows = [{"environment": "count", "start": 1, "name": "a"}, {"environment": "plain", "start": 2, "name": "b"}]
    factories = {"count": Counter, "plain": Counter}
    trainer = a_trainer(
        tmp_path,
        reward,
        rows,
        {"shuffle_dataset": False, "max_tool_calling_iterations": 2, "reward_weights": [0.5]},
        tools=[add],
        environment_factory=factories,
    )
    assert trainer.reward_func_names == ["reward", "Counter"]
    assert trainer.reward_weights.tolist() == [0.5, 1.0]
    assert trainer.num_generations == 2

    def answer(text, sample, turn):
        return [call("act", step=sample + 1), call("wait") + call("add", a=1, b=1), call("act", step=100)][turn]

    trainer.native.collector.engine = Scripted(answer, trainer.native.collector.engine)
    trainer.train()
    line = next(line for line in reversed(trainer.state.log_history) if "reward" in line)
    assert line["tools/call_frequency"] == 3  # the last call is one too many, and is not run
    assert line["tools/failure_frequency"] == 0
    assert line["stop/max_tool_calls"] == 1
    assert line["rewards/Counter/mean"] == 3.0
    assert [sorted(each[0]) for each in seen[:2]] == [[2, 3, 3, 4]] * 2  # start + 1 and start + 2, a call per step
    assert seen[0][1] == [6] * 4
    assert Counter.made == 4  # of each name two, which both steps have used


class Scripted(Script):
    """A script in the place of a run's engine."""

    def __init__(self, answer, engine):
        super().__init__(answer)
        self.params = engine.params

    def release(self):
        pass


def test_environments_have_their_own_prompts_and_the_results_are_the_texts_of_trl():
    Counter.made = 0
    agents = Agents(None, Counter)
    [group], _ = played(
        lambda text, sample, turn: [call("act", step=1), "ok"][turn],
        environments=agents.environments(has_prompts=False),
        params=SamplingParams(n=2, max_tokens=2000),
    )
    contents = [row.example["prompt"][-1]["content"] for row in group]
    assert contents[0] != contents[1]
    assert all(each.startswith("goCounter") for each in contents)
    assert [row.environment for row in group] == [agents.pool.take("Counter", place) for place in range(2)]
    assert [message["content"] for message in group[0].messages or ()][1] == "{'total': 1}"
    assert list(agents.environments(False).tools) == ["act", "wait"]


@pytest.mark.heavy
def test_a_rollout_func_samples_whole_batches(tmp_path):
    prompts_seen = []

    def rollout_func(prompts, trainer):
        prompts_seen.append(len(prompts))
        first = trl.generate_rollout_completions(trainer, prompts, generation_overrides={"max_tokens": 3})
        texts = [trainer.processing_class.decode(each["prompt_ids"] + each["completion_ids"]) for each in first]
        second = trl.generate_rollout_completions(trainer, [f"{text} more" for text in texts])
        sizes = [len(each["prompt_ids"]) + len(each["completion_ids"]) for each in first]
        bridges = [each["prompt_ids"][size:] for each, size in zip(second, sizes, strict=True)]
        pairs = list(zip(first, bridges, second, strict=True))
        return {
            "prompt_ids": [each["prompt_ids"] for each in first],
            "completion_ids": [a["completion_ids"] + b + c["completion_ids"] for a, b, c in pairs],
            "logprobs": [a["logprobs"] + [0.0] * len(b) + [[x] for x in c["logprobs"]] for a, b, c in pairs],
            "env_mask": [
                [1] * len(a["completion_ids"]) + [0] * len(b) + [1] * len(c["completion_ids"]) for a, b, c in pairs
            ],
            "env_reward": [float(index) for index in range(len(prompts))],
            "epoch": 7,
        }

    def reward(completions, env_reward, epoch, **_):
        assert set(epoch) == {7}
        return env_reward

    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("one", "two")]
    settings = {"max_completion_length": 5, "max_steps": 1}
    trainer = a_trainer(tmp_path, reward, rows, settings, rollout_func=rollout_func)
    with pytest.raises(ValueError, match="while it runs, and none does"):
        trl.generate_rollout_completions(trainer, ["a"])
    trainer.train()
    line = next(line for line in reversed(trainer.state.log_history) if "reward" in line)
    assert prompts_seen == [4]
    assert line["reward"] == 1.5
    assert 2 <= line["completions/mean_length"] <= 8  # of sampled tokens
    assert line["grad_norm"] > 0


def test_outputs_of_rollout_funcs_are_checked():
    with pytest.raises(ValueError, match=r"rollout_func must return keys \['logprobs'\]"):
        trajectories_of({"prompt_ids": [], "completion_ids": []})
    rows = {"prompt_ids": [[1]] * 2, "completion_ids": [[2, 3]] * 2, "logprobs": [[-1.0, -2.0]] * 2}
    masks = np.array([[1, 0], [1, 1]])
    assert [each.mask.tolist() for each in trajectories_of({**rows, "env_mask": masks})] == masks.tolist()
    assert [each.mask for each in trajectories_of({**rows, "env_mask": None})] == [None, None]
    with pytest.raises(ValueError, match=r"one value for each completion under every key, returned .*'env_mask': 0"):
        trajectories_of({**rows, "env_mask": []})

    def rollouts(*trajectories, **fields):
        request = RolloutRequest(Script(None), TOKENIZER, [{"prompt": "a"}], SamplingParams(n=2), 0, {})
        function = RolloutFunction(lambda _: trajectories, eos_ids=(5,), max_tokens=9, vocab_size=90, **fields)
        return next(iter(custom_rollouts(function, request, 0, 0)))

    good = Trajectory([1, 2], [3, 5], [-1.0, np.nan], [1, 0], {"x": 1})
    first, second = rollouts(good, Trajectory([1], [3, 4], [-1.0, -2.0]))
    assert (first.finish_reason, second.finish_reason) == ("stop", "length")
    assert first.policy_logps.tolist() == [-1.0, 0.0]
    assert first.example == {"prompt": "a", "x": 1}
    for made, columns, message in (
        ([good, Trajectory([1], [], [])], (), "must have token ids"),
        ([good, Trajectory([1], [2, 3], [-1.0])], (), "each token needs one number of both"),
        ([good, Trajectory([1], [2], [0.5])], (), "not numbers of at most 0"),
        ([good, Trajectory([1], [2, 90], [-1.0, -1.0])], (), "not among the model's 90"),
        ([good, Trajectory([1] * 8, [2, 3], [-1.0, -1.0])], (), "8 \\+ 2 tokens"),
        ([good], (), "returned 1 for 1 prompts with 2"),
        ([good, Trajectory([1], [2], [-1.0])], ("x",), "lacks the column 'x'"),
    ):
        with pytest.raises(RunError, match=message):
            rollouts(*made, columns=columns)
