"""What scripts of TRL do with evaluations, streams, logs and reports of a trainer."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from groupax.compat import trl
from groupax.compat.callbacks import CallbackListener, State
from groupax.compat.fields import CompatWarning
from groupax.compat.trl.base import Accelerator, BaseTrainer
from groupax.compat.trl.policy import own_generate
from groupax.compat.trl.streams import check_streams, evaluation_rows, training_rows
from groupax.events import RunEnded, RunStarted, StepEnded
from tests.training.test_trainer import PROMPTS, count_a


def a_trainer(folder, tmp_path, **settings):
    given = {name: settings.pop(name) for name in ("eval_dataset", "callbacks", "reward_funcs") if name in settings}
    own = {"max_completion_length": 8, "learning_rate": 1e-2, "disable_tqdm": True, "logging_steps": 2, "max_steps": 3}
    config = trl.GRPOConfig(str(tmp_path / "run"), **{**own, "save_strategy": "no", **settings})
    return trl.GRPOTrainer(str(folder), given.pop("reward_funcs", count_a), config, PROMPTS, **given)


class Stream:
    """A stream of numbered rows, in another order in every epoch."""

    def __init__(self, num_rows):
        self.num_rows, self.epoch = num_rows, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def shuffle(self, seed):
        return self

    def __iter__(self):
        return iter([{"prompt": f"{self.epoch}{index}"} for index in range(self.num_rows)])


@pytest.fixture
def streams(monkeypatch):
    monkeypatch.setattr("groupax.compat.trl.streams.is_stream", lambda dataset: isinstance(dataset, Stream))

    def rows(num_rows, **settings):
        args = trl.GRPOConfig("out", **settings)
        return [row["prompt"] for row in training_rows(Stream(num_rows), args, args.schedule())]

    return rows


# -- logs and reports


def test_the_last_line_of_a_log_is_about_the_run_and_the_steps_since_the_line_before(tmp_path):
    seen = []

    class Watch:
        def on_log(self, args, state, control, logs, **more):
            seen.append(logs)

        def on_train_end(self, args, state, control, **more):
            seen.append("end")

    state = State(logging_steps=2)
    listener = CallbackListener([Watch], None, 2, state, {}, rows_per_step=8)
    listener(RunStarted(0, 3))
    for step in (1, 2, 3):
        metrics = {"loss": float(step), "reward": 10.0 * step, "kl": float("nan")}
        listener(StepEnded(step, metrics, metrics if step > 1 else None))
    listener(RunEnded(3))
    (first, last, end), (line, closing) = seen, state.log_history
    assert first == {"epoch": 1.0, "loss": 2.0, "reward": 20.0, "kl": pytest.approx(np.nan, nan_ok=True)}
    assert end == "end"
    assert line["step"] == 2
    assert closing == {"step": 3, **last}
    assert closing["train_loss"] == 2.0
    assert closing["reward"] == 30.0
    assert "loss" not in closing
    assert closing["train_samples_per_second"] == pytest.approx(8 * closing["train_steps_per_second"], rel=0.01)
    state.save_to_json(tmp_path / "trainer_state.json")
    saved = json.loads((tmp_path / "trainer_state.json").read_text())
    assert saved["log_history"][1]["kl"] is None
    assert saved["logging_steps"] == 2


def test_metrics_and_the_state_are_printed_and_saved_as_by_transformers(tmp_path, capsys):
    reports = BaseTrainer()
    reports.args, reports._output_dir, reports.state = None, str(tmp_path / "run"), State(global_step=3)
    reports.log_metrics("train", {"train_runtime": 3723.456, "train_loss": 0.123456, "rows": 8})
    assert capsys.readouterr().out.splitlines() == [
        "***** train metrics *****",
        "  rows = 8",
        "  train_loss = 0.1235",
        "  train_runtime = 3723.456",
    ]
    reports.save_metrics("train", {"train_loss": 0.5})
    reports.save_metrics("eval", {"eval_loss": float("nan")})
    reports.save_metrics("test", {"test_loss": 1.0}, combined=False)
    reports.save_state()
    read = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "run").glob("*.json")}
    assert read["train_results"] == {"train_loss": 0.5}
    assert read["test_results"] == {"test_loss": 1.0}
    assert read["all_results"] == {"train_loss": 0.5, "eval_loss": None}
    assert read["trainer_state"]["global_step"] == 3


def test_an_accelerator_has_what_scripts_use_of_it(capsys):
    accelerator = Accelerator()
    accelerator.print("once")
    assert capsys.readouterr().out == "once\n"
    assert accelerator.is_main_process
    assert (accelerator.num_processes, accelerator.process_index) == (1, 0)
    accelerator.wait_for_everyone()
    assert accelerator.unwrap_model(3) == 3
    with pytest.raises(AttributeError, match=r"has no 'backward': groupax trains with JAX, .* is_main_process"):
        accelerator.backward(0)


@pytest.mark.parametrize(
    ("loss_type", "level", "text"),
    [
        ("dapo", "sequence", "weights each sequence by its completion length"),
        ("grpo", "sequence", None),
        ("dapo", "token", None),
    ],
)
def test_losses_that_do_not_fit_to_their_ratios_are_reported(loss_type, level, text, caplog):
    trl.GRPOConfig(loss_type=loss_type, importance_sampling_level=level).to_native()
    assert (text in caplog.text) if text else not caplog.text


# -- streams


def test_a_stream_is_read_as_far_as_the_steps_need_it(streams):
    # 2 prompts a step; an epoch drops the last row
    rows = streams(5, max_steps=3, per_device_train_batch_size=16, gradient_accumulation_steps=1)
    assert rows == ["00", "01", "02", "03", "10", "11"]
    assert streams(5, max_steps=4, num_iterations=2) == ["00", "01"]
    assert evaluation_rows({"a": Stream(2), "b": PROMPTS})["a"] == [{"prompt": "00"}, {"prompt": "01"}]


def test_what_a_stream_cannot_be_used_for_is_refused(streams):
    with pytest.raises(ValueError, match="set max_steps"):
        streams(5)
    with pytest.raises(ValueError, match="has 1 rows, fewer than the 2 prompts of a generation"):
        streams(1, max_steps=3, per_device_train_batch_size=16)
    with pytest.warns(CompatWarning):
        args = trl.GRPOConfig("out", accelerator_config={"dispatch_batches": True})
    with pytest.raises(ValueError, match="require `dispatch_batches=False`"):
        check_streams(args, PROMPTS, {"a": Stream(5)})


# -- evaluation


@pytest.mark.heavy
def test_an_evaluation_has_trls_metrics_and_leaves_training_as_it_is(folder, tmp_path):
    evaluated = []

    class Watch:
        def on_evaluate(self, args, state, control, metrics, **more):
            evaluated.append((state.global_step, set(metrics)))

    settings = {"beta": 0.1, "entropy_coef": 0.01, "num_generations_eval": 4}
    trainer = a_trainer(folder, tmp_path, eval_dataset=PROMPTS[:3], callbacks=[Watch()], **settings)
    other = {"few": PROMPTS[:2], "more": PROMPTS[:4]}
    before = trainer.evaluate(other)
    assert before["eval_few_kl"] == pytest.approx(0, abs=1e-6)
    assert before["eval_more_reward_std"] > 0
    own = trainer.evaluate(metric_key_prefix="test")
    assert own["test_loss"] == pytest.approx(own["test_policy_loss"] - 0.01 * own["test_entropy"], abs=1e-6)
    trainer.train()
    assert trainer.evaluate()["eval_kl"] > 0
    assert [step for step, _ in evaluated] == [0, 0, 0, 3]
    assert {"eval_few_loss", "eval_few_reward"} <= evaluated[0][1]
    undisturbed = a_trainer(folder, tmp_path, eval_dataset=PROMPTS[:3], **settings)
    undisturbed.train()
    losses = [[line["loss"] for line in each.state.log_history if "loss" in line] for each in (trainer, undisturbed)]
    assert losses[0] == losses[1]
    with pytest.raises(ValueError, match="there is no evaluation set 'hard'"):
        trainer.evaluate("hard")


@pytest.mark.heavy
def test_what_scripts_read_of_a_trainer(folder, tmp_path, caplog):
    def reward(completions, **columns):
        return [None] * len(completions)

    adaptive = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_coef_delta": 0.005, "entropy_target": 99.0}
    trainer = a_trainer(folder, tmp_path, reward_funcs=reward, beta=0.1, epsilon=0.3, **adaptive)
    reference = trainer.ref_model
    assert reference is not None
    before = np.asarray(reference.model.params["embed"])
    trainer.train()
    assert "All reward functions returned None for the following kwargs:" in caplog.text
    assert trainer.entropy_coef == pytest.approx(0.01 + 3 * 0.005)
    assert (trainer.epsilon_low, trainer.epsilon_high, trainer.beta) == (0.3, 0.3, 0.1)
    assert not trainer.aux_loss_enabled
    assert trainer.reward_processing_classes == [None]
    assert trainer.ref_model is not None
    np.testing.assert_array_equal(trainer.ref_model.model.params["embed"], before)
    with pytest.raises(AttributeError, match="no attribute 'bet'; did you mean beta"):
        _ = trainer.bet
    with pytest.raises(ValueError, match="must match reward_funcs: it has 2 entries for 1"):
        trl.GRPOTrainer(str(folder), reward, trainer.args, PROMPTS, reward_processing_classes=[None, None])


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_a_model_with_a_generate_of_its_own_samples_itself(folder, tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    calls = []

    def generate(input_ids, attention_mask, generation_config):
        calls.append((tuple(input_ids.shape), generation_config.max_new_tokens))
        assert attention_mask.sum(1).min() > 0
        completions = torch.tensor([[3, 4, 5, 0], [5, 0, 1, 1], [3, 3, 3, 3], [4, 4, 0, 1]] * 2)
        return torch.cat([input_ids, completions], 1)

    settings = {"num_generations": 4, "num_generations_eval": 4, "per_device_train_batch_size": 8, "logging_steps": 1}
    trainer = a_trainer(folder, tmp_path, eval_dataset=PROMPTS[:2], **settings)
    trainer.model.generate = generate
    collector, seen = trainer.native.collector, []
    cut = collector.cut
    collector.cut = lambda groups: seen.append(groups) or cut(groups)
    trainer.train()
    assert len(calls) == 3
    assert {shape[0] for shape, _ in calls} == {8}
    assert calls[0][1] == 8
    [rollouts, *_] = seen[-1]
    assert rollouts[0].completion_ids.tolist() == [3, 4, 5, 0]
    first = cut([rollouts])[0][0]
    assert (first.rollout_logp < 0).all()
    trainer.evaluate()
    assert len(calls) == 4
    trainer.model.generate = lambda **inputs: inputs["input_ids"]
    with pytest.raises(ValueError, match=r"the model's own generate returned .* for 8 prompts"):
        trainer.evaluate()
    del trainer.model.generate
    assert own_generate(trainer.model) is None


@pytest.mark.parity
def test_masks_of_tensors_are_trls():
    torch = pytest.importorskip("torch")
    trainer = pytest.importorskip("trl").GRPOTrainer
    draw = torch.Generator().manual_seed(0)
    entropies, mask = torch.rand((3, 7), generator=draw), (torch.rand((3, 7), generator=draw) < 0.8).int()
    alone = SimpleNamespace(num_processes=1, gather=lambda x: x, pad_across_processes=lambda x, **_: x)
    accelerated: Any = SimpleNamespace(accelerator=alone)
    for threshold in (0.0, 0.3, 0.8, 1.0):
        theirs = trainer.get_high_entropy_mask(accelerated, entropies, mask, threshold)
        assert torch.equal(trl.GRPOTrainer.get_high_entropy_mask(accelerated, entropies, mask, threshold), theirs)
    logps, sampled = -torch.rand((3, 7), generator=draw), -torch.rand((3, 7), generator=draw)
    sampled[0, 2] = torch.nan
    given = torch.tensor([[-1.0], [1.0], [-0.5]]), logps, sampled, mask
    for threshold in (0.0, 0.05, 2.0):
        ours = trl.GRPOTrainer.get_off_policy_mask(*given, threshold)
        assert torch.equal(ours, trainer.get_off_policy_mask(*given, threshold))


@pytest.mark.parity
def test_streams_are_read_in_trls_order():
    datasets = pytest.importorskip("datasets")
    repeat = pytest.importorskip("trl.trainer.utils").repeat_iterable_dataset
    stream = datasets.IterableDataset.from_generator(lambda: ({"prompt": str(index)} for index in range(11)))
    args = trl.GRPOConfig("out", max_steps=9, per_device_train_batch_size=16)
    ours = [row["prompt"] for row in training_rows(stream, args, args.schedule())]
    theirs = repeat(stream.shuffle(seed=args.seed), mini_repeat_count=8, batch_size=2, repeat_count=1)
    read = []
    for epoch in range(2):
        theirs.set_epoch(epoch)
        read += [row["prompt"] for row in theirs][::8]
    assert ours == read[:18]
