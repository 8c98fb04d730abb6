"""The loop: it learns, it repeats itself, it writes what it did, it refuses what cannot work."""

import json
import os
from dataclasses import replace

import jax
import numpy as np
import pytest

from groupax import GRPOConfig, GRPOTrainer, LoRAConfig, SamplingParams, init_model, load_model
from groupax.core.errors import RewardError
from groupax.core.types import Row
from groupax.engine.core import EngineCore
from groupax.rollouts.completions import window_mean
from tests.conftest import TINY, assert_trees_match
from tests.data.test_config_and_data import a_tokenizer

PROMPTS = [{"prompt": text, "gold": text[0]} for text in ("abc", "bcd", "ca", "dabc", "ef", "fed", "ge", "hi")]


def is_measured(name: str) -> bool:
    """A metric that depends on measurements of the machine, so that it differs between identical runs."""
    return (
        name.startswith(("time/", "memory/", "health/", "compile/"))
        or name in ("step_time", "mfu", "tools/seconds")
        or name.endswith("_per_s")
    )


def count_a(completion_ids):
    """Rewards the token of the letter a (3)."""
    return [ids.count(3) / len(ids) for ids in completion_ids]


def a_trainer(
    tmp_path,
    rewards=count_a,
    dataset=PROMPTS,
    model=None,
    eval_dataset=None,
    peft_config=None,
    kind=GRPOTrainer,
    tokenizer="letters",
    **settings,
):
    args = GRPOConfig(
        **{
            "output_dir": str(tmp_path / "run"),
            "prompts_per_step": 4,
            "num_generations": 4,
            "max_completion_length": 12,
            "max_steps": 3,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "progress_bar": "none",
            **settings,
        }
    )
    model = model or init_model({**TINY, "vocab_size": 13, "num_hidden_layers": 1}, seed=0)
    tokenizer = a_tokenizer(eos_token="<eos>") if tokenizer == "letters" else tokenizer
    return kind(model, rewards, args, dataset, eval_dataset, tokenizer, peft_config=peft_config)


def trained(tmp_path, rewards=count_a, **settings):
    trainer = a_trainer(tmp_path, rewards, **settings)
    trainer.train()
    return trainer


def before_updates(trainer, do):
    """Has `do(rows)` called before each update, which may return other rows."""
    update = trainer.learner.update
    trainer.learner.update = lambda rows: update(do(rows) or rows)


def updates_of(trainer):
    """A list that will have the rows of each update."""
    updates = []
    before_updates(trainer, updates.append)
    return updates


def lines_of(tmp_path, timings=False):
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if timings or not is_measured(k)} for line in lines]


def test_it_learns(tmp_path):
    trainer = a_trainer(tmp_path, max_steps=30, eval_dataset=PROMPTS, eval_temperature=1.0)
    before = trainer.evaluate(SamplingParams(n=8, max_tokens=12)).metrics["reward"]
    result = trainer.train()
    after = trainer.evaluate(SamplingParams(n=8, max_tokens=12)).metrics["reward"]
    assert before < 0.2
    assert after > 0.8
    assert result.num_steps == 30


@pytest.mark.heavy
@pytest.mark.parametrize("adapts", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_run_of_natural_lengths_compiles_few_programs(tmp_path, adapts, monkeypatch):
    """A run of 50 steps on a CPU with completions of up to 96 tokens, and with any lengths as accelerators decode."""
    plan = EngineCore.plan
    monkeypatch.setattr(EngineCore, "plan", lambda self: replace(plan(self), adapts=adapts))
    longest = 96 if adapts else 240
    model = init_model(
        {**TINY, "vocab_size": 13, "num_hidden_layers": 1, "intermediate_size": 72 if adapts else 56}, seed=0
    )
    settings = {"max_completion_length": longest, "max_steps": 50, "learning_rate": 1e-4, "eval_steps": 25}
    sampling = {"eval_num_generations": 8, "eval_temperature": 1.0, "prompts_per_step": 8, "num_generations": 8}
    trained(tmp_path, model=model, eval_dataset=PROMPTS, **settings, **sampling)
    lines = [line for line in lines_of(tmp_path, timings=True) if "step_time" in line]
    assert len(lines) == 50
    assert len({line["completions/max_length"] for line in lines}) > 5, "lengths differ from step to step"
    counts = [line["compile/num_large_programs"] for line in lines]
    assert counts == sorted(counts), "numbers since the start"
    assert 3 <= counts[-1] <= 6
    assert lines[-1]["compile/num_programs"] > counts[-1]
    assert lines[-1]["compile/total_s"] >= lines[0]["time/compile_s"] > 0


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param(
            {"updates_per_rollout": 2, "num_iterations": 2, "prompts_per_step": 2, "beta": 0.05, "max_steps": 6},
            marks=pytest.mark.heavy,
        ),
        pytest.param(
            {"mask_truncated_completions": True, "loss_type": "grpo", "top_k": 5, "top_p": 0.9, "min_p": 0.01},
            marks=pytest.mark.heavy,
        ),
    ],
    ids=str,
)
def test_the_same_seed_gives_the_same_run(tmp_path, settings):
    runs = []
    for name in ("one", "two"):
        trainer = trained(tmp_path / name, **settings)
        runs.append((lines_of(tmp_path / name), jax.device_get(trainer.learner.state.params)))
    assert runs[0][0] == runs[1][0]
    assert_trees_match(*(params for _, params in runs))
    trained(tmp_path / "three", seed=1, **settings)
    assert lines_of(tmp_path / "three") != runs[0][0]


def test_columns_reach_the_reward_once_per_completion(tmp_path):
    def reward(prompts, completions, gold):
        assert len(prompts) == len(completions) == len(gold) == 4
        assert all(prompt[0] == letter for prompt, letter in zip(prompts, gold, strict=True))
        return [float(index % 2) for index in range(4)]

    a_trainer(tmp_path, [reward, count_a], reward_weights=(1.0, 0.5), max_steps=1).train()
    [line] = lines_of(tmp_path)
    assert line["rewards/reward/mean"] == 0.5
    np.testing.assert_allclose(line["reward"], 0.5 + 0.5 * line["rewards/count_a/mean"])


@pytest.mark.parametrize("place", ["run", "~/run"])
def test_a_reward_that_changes_the_working_directory_does_not_move_the_run(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    def wanders(completions):
        os.chdir("/")
        return [1.0] * len(completions)

    a_trainer(tmp_path, wanders, output_dir=place, max_steps=1).train()
    assert {"metrics.jsonl", "rollouts", "model"} <= {path.name for path in (tmp_path / "run").iterdir()}
    assert len(lines_of(tmp_path)) == 1


def test_the_run_folder(tmp_path):
    import pyarrow.parquet

    options = {"logging_steps": 2, "eval_steps": 2, "eval_dataset": PROMPTS, "rollout_log_gb": 1e-9, "replay_steps": 0}
    trainer = trained(tmp_path, max_steps=4, **options)
    run = tmp_path / "run"
    assert GRPOConfig.from_mapping(json.loads((run / "config.json").read_text())) == trainer.args
    lines = lines_of(tmp_path, timings=True)
    assert [line["step"] for line in lines if "loss" in line] == [2, 4]
    assert [line["step"] for line in lines if "eval_reward" in line] == [2, 4]
    for name in ("loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "step_time", "entropy", "padding_frac"):
        assert name in lines[-2] or name in lines[-1], name
    assert len([*(run / "rollouts").iterdir()]) <= 3, "of the first, the best and the newest step"
    table = pyarrow.parquet.read_table(run / "rollouts" / "step_000004.parquet").to_pylist()
    assert len(table) == 16
    assert table[0]["rewards/count_a"] == table[0]["completion_ids"].count(3) / len(table[0]["completion_ids"])
    saved = load_model(run / "model")
    np.testing.assert_array_equal(saved.params["embed"], trainer.learner.state.params["embed"])
    assert (run / "model" / "tokenizer.json").is_file()


def test_a_trainer_that_cannot_be_made_moves_nothing(tmp_path):
    a_trainer(tmp_path, max_steps=1).train()
    with pytest.raises(ValueError, match="neither a model folder nor"):
        a_trainer(tmp_path, model="nowhere")
    assert not (tmp_path / "run.1").exists()


@pytest.mark.heavy
def test_a_models_own_weights_stay_as_they_are(tmp_path):
    model = init_model({**TINY, "vocab_size": 13, "num_hidden_layers": 1}, seed=0)
    before = jax.device_get(model.params)
    a_trainer(tmp_path, model=model, max_steps=2).train()
    assert_trees_match(before, model.params)


# -- diagnostics


@pytest.mark.parametrize(
    ("settings", "reward", "message"),
    [
        ({"max_steps": 5}, lambda completions: [1.0] * len(completions), "got the same reward"),
        ({"max_steps": 1, "learning_rate": 0.0}, count_a, "learning_rate is 0"),
    ],
)
def test_a_run_explains_what_is_off(tmp_path, caplog, settings, reward, message):
    a_trainer(tmp_path, reward, **settings).train()
    assert message in caplog.text


def test_an_update_that_is_not_finite_is_skipped(tmp_path):
    model = init_model({**TINY, "vocab_size": 13, "num_hidden_layers": 1}, seed=0)
    trainer = a_trainer(tmp_path, model=model, learning_rate=1e-2, max_steps=1)
    rows = [
        Row(0, np.array([3, 4]), np.array([5, 6]), np.ones(2, bool), np.full(2, np.nan), np.zeros(2)),
        Row(0, np.array([3, 4]), np.array([5, 6]), np.ones(2, bool), np.ones(2), np.zeros(2)),
    ]
    start = jax.device_get(trainer.learner.state.params)
    assert not trainer.learner.update(rows).applied
    assert_trees_match(start, trainer.learner.state.params)


# -- refusals


def named(completions, gold):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": []}, "train_dataset is empty"),
        ({"dataset": None}, "train_dataset is missing"),
        ({"dataset": [{"question": "?"}]}, "no column 'prompt'"),
        ({"max_completion_length": 256}, "leaves no room for a prompt"),
        ({"max_prompt_length": 3}, "prompt 3 has 4 tokens, at most 3 are allowed"),
        ({"reward_weights": (1.0, 2.0)}, "reward_weights has 2 entries for 1 reward functions"),
        ({"eval_steps": 2}, "there is no eval_dataset"),
        ({"rewards": []}, "reward_funcs is empty"),
        ({"output_dir": "gopher://x/y"}, "use a folder, s3:// or gs://"),
        ({"output_dir": "gs://bucket/run"}, r"pip install 'groupax\[gcs\]'"),
        ({"output_dir": "/dev/null/run"}, "output_dir .* cannot be written to"),
        ({"lora_alpha": 3.0}, "lora_alpha without an adapter: set lora_r"),
        ({"lora_r": 4, "peft_config": LoRAConfig()}, r"peft_config and lora_r \(4\) both ask"),
        ({"lora_r": 4, "sync_ref_model": True, "beta": 0.1}, "sync_ref_model moves the reference"),
        ({"lora_r": 4, "beta": 0.1, "offload_reference": True}, "its base, which is always needed; set it to False"),
        ({"lora_r": 4, "base_weights": "nf4"}, "give the model as a folder or hub id"),
        ({"base_weights": "nf4"}, "give the model as a folder or hub id, and set lora_r"),
        ({"lora_r": -1}, "lora_r must be between 0 and"),
        ({"eval_num_generations": 2}, "at eval_temperature 0 all completions of a prompt are the same"),
        ({"eval_top_p": 0.0}, "eval_top_p must be between 1e-06 and 1, got 0.0"),
        ({"eval_dataset": PROMPTS, "eval_max_completion_length": 256}, "length 256 leaves no room for a prompt"),
        ({"eval_max_completion_length": 0}, "eval_max_completion_length must be between 1 and"),
        ({"eval_dataset": {"x": []}}, "eval_dataset 'x' is empty"),
        ({"rewards": named, "eval_dataset": [{"prompt": "a"}]}, "no column 'gold', which the reward function"),
        ({"rewards": named, "correctness_reward": "name"}, "did you mean named"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "-".join(value),
)
def test_what_cannot_work_is_refused_before_anything_is_written(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        a_trainer(tmp_path, **settings)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.heavy
def test_evaluations_tell_rewards_where_the_run_stands_and_what_failed(tmp_path, caplog):
    states = []

    def noting(completions, trainer_state):
        states.append(trainer_state)
        return [trainer_state.step / trainer_state.num_steps] * len(completions)

    trainer = a_trainer(tmp_path, noting, max_steps=2, eval_steps=1, eval_dataset=PROMPTS)
    assert trainer.evaluate().metrics["reward"] == 0.0
    assert {(state.step, state.num_steps) for state in states} == {(0, 2)}
    trainer.train()
    assert [line["eval_reward"] for line in lines_of(tmp_path) if "eval_reward" in line] == [0.5, 1.0]

    def held_out_is_harder(completions, answer):
        return [1.0 / bool(gold) for gold in answer]

    rows = [{**row, "answer": 1} for row in PROMPTS], [{**row, "answer": 0} for row in PROMPTS]
    settings = {"dataset": rows[0], "eval_dataset": rows[1], "max_steps": 2, "eval_steps": 1}
    trainer = a_trainer(tmp_path / "failing", held_out_is_harder, **settings)
    assert "ZeroDivisionError" in trainer.evaluate().errors["held_out_is_harder"]
    trainer.train()
    assert caplog.text.count("ZeroDivisionError: ") == 1


def test_evaluation_needs_a_dataset(tmp_path):
    with pytest.raises(ValueError, match="no eval_dataset to evaluate on"):
        a_trainer(tmp_path).evaluate()


@pytest.mark.parametrize("returned", [[float("nan")] * 4, ["good"] * 4, [1.0] * 3])
def test_a_reward_that_only_returns_rubbish_stops_the_run(tmp_path, returned):
    with pytest.raises(RewardError, match=r"'bad' failed for every completion of the first rollout:\n.*'bad' returned"):
        a_trainer(tmp_path, bad(returned)).train()
    assert not (tmp_path / "run" / "model").exists()


def bad(returned):
    def bad(completions):
        return returned

    return bad


# -- parts


def test_window_keeps_extremes_and_counters():
    window = [
        {"loss": 1.0, "num_tokens": 5.0, "completions/min_length": 3.0, "completions/max_length": 7.0, "step": 1.0},
        {"loss": 3.0, "num_tokens": 9.0, "completions/min_length": 2.0, "completions/max_length": 6.0, "step": 2.0},
    ]
    window[0] |= {"rewards/math/mean": float("nan"), "rewards/code/mean": float("nan")}
    window[1] |= {"rewards/math/mean": 0.5, "rewards/code/mean": float("nan")}
    merged = {"loss": 2.0, "num_tokens": 9.0, "completions/min_length": 2.0, "completions/max_length": 7.0, "step": 2.0}
    found = window_mean(window)
    assert found.pop("rewards/math/mean") == 0.5  # of the steps in which it applied
    assert np.isnan(found.pop("rewards/code/mean"))
    assert found == merged
    in_trl = window_mean(window, "trl")
    assert (in_trl["completions/min_length"], in_trl["completions/max_length"]) == (2.5, 6.5)


@pytest.mark.heavy
def test_hostile_completions_do_not_reach_the_terminal(tmp_path, capfd):
    hostile = [{"prompt": "abc", "note": "x"}]

    def reward(completions):
        return [float(index % 2) for index, _ in enumerate(completions)]

    tokenizer = a_tokenizer(eos_token="<eos>")
    tokenizer.batch_decode = lambda ids, **_: ["\x1b[2J[bold]" + "x" * 100_000 for _ in ids]
    args = GRPOConfig(output_dir=str(tmp_path / "run"), max_steps=1, prompts_per_step=2, max_completion_length=8)
    GRPOTrainer(init_model({**TINY, "vocab_size": 13}), reward, args, hostile, processing_class=tokenizer).train()
    out = "".join(capfd.readouterr())
    assert "\x1b[2J" not in out
    assert "[bold]" in out
    assert len(out) < 20_000


# -- on real weights


@pytest.mark.optimized
@pytest.mark.heavy
def test_it_learns_on_real_weights(stories, tmp_path):
    names = ["Lily", "Tom", "Anna", "Ben", "Mia", "Sam", "Lucy", "Max"]
    prompts = [
        {"prompt": f"Once upon a time, there was a {who} named {name} who had a {pet}."}
        for who in ("child", "girl", "boy", "kid")
        for name in names
        for pet in ("dog", "cat", "bird", "fish")
    ]

    def talks(completions, **kwargs):
        return [min(text.count('"') + text.count("!"), 8) / 8 for text in completions]

    args = GRPOConfig(
        output_dir=str(tmp_path / "run"),
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        max_completion_length=64,
        max_steps=20,
        progress_bar="none",
    )
    GRPOTrainer(str(stories), talks, args, prompts).train()
    rewards = [line["reward"] for line in lines_of(tmp_path)]
    assert rewards[0] < 0.1
    assert np.mean(rewards[-5:]) > 0.9
    assert max(line["rollout/logp_diff_mean"] for line in lines_of(tmp_path)) < 1e-5
    assert max(line["rollout/logp_diff_max"] for line in lines_of(tmp_path)) < 1e-4


@pytest.mark.heavy
def test_weights_to_decode_with_are_gone_while_others_are_computed_with(tmp_path):
    """Copies in fewer bits here; weights that are gathered alike. And the trainer's model is its policy."""
    settings = {"decoding_weights": "bfloat16", "rollout_correction": "token_truncate", "beta": 0.1, "max_steps": 1}
    trainer = a_trainer(tmp_path, **settings)
    logprobs, update, seen = trainer.learner.logprobs, trainer.learner.update, []

    def watched(compute):
        def computes(*args):
            seen.append((compute.__name__, trainer.engine._params is None))
            return compute(*args)

        return computes

    trainer.learner.logprobs, trainer.learner.update = watched(logprobs), watched(update)
    trainer.train()
    assert seen == [("logprobs", True), ("update", True)]
    assert trainer.model.params is trainer.learner.policy
    assert trainer.start_model.params == {}, "those that it was loaded with"
