"""What the options of a run do in the loop: reuse of rollouts, dynamic sampling, references, masks, bad steps."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet
import pytest

from groupax import init_model
from groupax.compat.trl.batches import TRLBatchTrainer, trl_schedule
from groupax.core.errors import DivergedError, RunError
from groupax.events import (
    CheckpointSaved,
    Diagnosed,
    Message,
    PhaseAdvanced,
    PhaseStarted,
    RolloutScored,
    RunDescribed,
    RunEnded,
    RunStarted,
    StepEnded,
    StepStarted,
)
from groupax.models.flops import forward_flops
from groupax.models.lora import LoRAConfig
from groupax.models.specs import num_params
from groupax.rollouts.completions import solved_metrics
from tests.conftest import TINY, assert_trees_match, rest_heavy, steps_started

from .test_trainer import PROMPTS, a_trainer, before_updates, count_a, lines_of, trained, updates_of


def leaves(trainer):
    return [np.asarray(x) for x in jax.tree.leaves(trainer.learner.state.params)]


# -- reuse of rollouts


@pytest.mark.heavy
@pytest.mark.parametrize("reuse", [{"num_iterations": 3}, {"updates_per_rollout": 2}], ids=str)
def test_the_first_update_on_a_rollout_needs_no_old_logprobs_and_has_ratio_one(tmp_path, reuse):
    trainer = a_trainer(tmp_path, prompts_per_step=2, max_steps=3, learning_rate=3e-2, **reuse)
    scored, logprobs, updated = [], trainer.learner.logprobs, updates_of(trainer)
    trainer.learner.logprobs = lambda params, rows: scored.append(len(rows)) or logprobs(params, rows)
    trainer.train()
    assert updated[0][0].old_logp is None
    # only minibatches whose first update is not on policy are scored: none, or the second of each rollout
    assert scored == ([] if "num_iterations" in reuse else [8, 8])
    first, second, _ = lines_of(tmp_path)
    assert first["clip_ratio/region_mean"] == 0
    assert updated[1][0].old_logp is not None
    assert first["rollout/logp_diff_max"] < 1e-5 > second["rollout/logp_diff_max"]  # of the same weights, always


@pytest.mark.heavy
def test_the_old_logprobs_are_those_of_the_first_update(tmp_path):
    trainer = a_trainer(tmp_path, num_iterations=2, max_steps=2)
    updates, policy_before = updates_of(trainer), jax.tree.map(jnp.copy, trainer.learner.policy)
    trainer.train()
    expected = trainer.learner.logprobs(policy_before, updates[1])[0]
    assert_trees_match([row.old_logp for row in updates[1]], expected, atol=1e-6)


# -- dynamic sampling


def sometimes(prompts, completion_ids):
    """No signal for half of the prompts."""
    return [
        0.0 if prompt[0] in "abcd" else float(ids.count(3)) for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


@pytest.mark.heavy
def test_groups_without_signal_are_replaced(tmp_path):
    trainer = a_trainer(tmp_path, sometimes, filter_zero_variance=True, filter_budget=8.0, max_steps=3)
    updates = updates_of(trainer)
    trainer.train()
    for line, rows in zip(lines_of(tmp_path), updates, strict=True):
        assert len(rows) == 16
        by_group = {group: [row.advantages[0] for row in rows if row.group == group] for group in range(4)}
        assert all(np.ptp(advantages) > 0 for advantages in by_group.values())
        assert line["filter/sampled_prompts"] > 4
        assert line["filter/rounds"] > 1
        assert line["filter/filled_up_frac"] == 0
        np.testing.assert_allclose(line["filter/dropped_frac"], 1 - 4 / line["filter/sampled_prompts"])
        assert line["frac_reward_zero_std"] == line["filter/dropped_frac"]  # rewards are of all that was sampled
    assert trainer.cursor.num_prompts == sum(line["filter/sampled_prompts"] for line in lines_of(tmp_path))


@pytest.mark.heavy
def test_the_budget_ends_the_search_and_the_step_keeps_its_size(tmp_path, caplog):
    def flat(completions):
        return [1.0] * len(completions)

    trainer = a_trainer(tmp_path, flat, filter_zero_variance=True, filter_budget=2.5, max_steps=5)
    start = leaves(trainer)
    trainer.train()
    for line in lines_of(tmp_path):
        assert line["filter/sampled_prompts"] == 10
        assert line["filter/filled_up_frac"] == 1
        assert line["loss"] == 0
    assert "more than half of the groups had no signal" in caplog.text
    assert_trees_match(start, leaves(trainer))


# -- reference, masks, entropy


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.optimized)])
def test_the_reference_moves_towards_the_policy(tmp_path, dtype):
    settings = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.75}
    settings["dtype"] = dtype
    trainer = a_trainer(tmp_path, max_steps=2, **settings)
    start = leaves(trainer)
    trainer.train()
    reference = jax.tree.leaves(trainer.learner.reference)
    for ref, new, old in zip(reference, leaves(trainer), start, strict=True):
        assert ref.dtype == np.float32  # it would not follow a policy that moves by less than a unit of bfloat16
        np.testing.assert_allclose(ref, 0.75 * new + 0.25 * old, atol=1e-6)
    still = trained(tmp_path / "still", max_steps=1, **settings)
    assert_trees_match(still.learner.reference, start)


@pytest.mark.heavy
def test_only_top_entropy_tokens_are_trained_on_however_the_step_is_cut(tmp_path):
    grads = []
    for budget in (64, 4096):
        trainer = a_trainer(tmp_path / str(budget), top_entropy_quantile=0.2, micro_batch_tokens=budget, max_steps=1)
        rows = []
        with_masks = trainer.learner._with_policy_masks
        trainer.learner._with_policy_masks = lambda given, w=with_masks, rows=rows: rows.extend(w(given)) or rows
        trainer.train()
        grads.append(lines_of(tmp_path / str(budget))[0]["grad_norm"])
        num_tokens = sum(len(row.completion) for row in rows)
        kept = sum(int(row.policy_mask.sum()) for row in rows)
        # completions of a group begin with the same distribution, so the one at the threshold may be there four times
        assert 0 <= kept - (num_tokens - np.ceil(round((num_tokens - 1) * 0.8, 6))) <= 3
    np.testing.assert_allclose(*grads, rtol=1e-5)


@pytest.mark.heavy
def test_the_adaptive_bonus_is_applied_below_its_target(tmp_path):
    settings = {"use_adaptive_entropy": True, "entropy_coef_delta": 0.1, "entropy_target": 10.0}
    a_trainer(tmp_path, max_steps=4, entropy_coef_max=0.25, **settings).train()
    np.testing.assert_allclose([line["entropy_coef"] for line in lines_of(tmp_path)], [0, 0.1, 0.2, 0.25])
    a_trainer(tmp_path / "above", max_steps=2, **{**settings, "entropy_target": 0.0, "entropy_coef": 0.2}).train()
    assert [line["entropy_coef"] for line in lines_of(tmp_path / "above")] == [0.2, 0.0]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("settings", "metric"),
    [
        ({"rollout_correction": "token_truncate", "top_p": 0.7}, "rollout/correction_mean"),
        ({"rollout_correction": "sequence_mask", "top_k": 3, "loss_type": "vespo"}, "rollout/correction_mean"),
        ({"off_policy_mask_threshold": 0.0, "num_iterations": 3, "learning_rate": 5e-2}, "off_policy_masked_frac"),
        ({"loss_type": "cispo", "epsilon_high": 1.05, "num_iterations": 3}, "cispo_clip_ratio"),
        ({"loss_type": "vespo", "num_iterations": 3}, "vespo/phi_mean"),
    ],
    ids=str,
)
def test_options_report_what_they_do(tmp_path, settings, metric):
    a_trainer(tmp_path, **settings).train()
    values = [line[metric] for line in lines_of(tmp_path)]
    assert all(np.isfinite(values))
    assert max(values) > 0
    if "top_p" in settings or "top_k" in settings:
        assert lines_of(tmp_path)[0]["rollout/sampler_gap_mean"] > 0.01
        assert values[0] < 1  # the sampler was surer of its tokens than the policy


# -- metrics


def test_pass_at_k_is_the_unbiased_estimate():
    solved = np.array([[True, False, False, False], [True] * 4, [False] * 4])
    metrics = solved_metrics(solved)
    assert metrics["pass@1"] == pytest.approx((0.25 + 1 + 0) / 3)
    assert metrics["pass@2"] == pytest.approx((0.5 + 1 + 0) / 3)
    assert metrics["pass@4"] == pytest.approx(2 / 3)
    assert metrics["groups/all_right_frac"] == metrics["groups/all_wrong_frac"] == pytest.approx(1 / 3)


@pytest.mark.heavy
def test_solved_groups_are_reported(tmp_path):
    def right(completions, gold):
        return [float(index % 4 == 0) if letter == "a" else None for index, letter in enumerate(gold)]

    a_trainer(tmp_path, [count_a, right], correctness_reward="right", max_steps=1, prompts_per_step=8).train()
    line = lines_of(tmp_path, timings=True)[0]
    assert line["pass@1"] == 0.25  # of the one prompt of eight that begins with a: to the others it does not apply
    assert line["groups/all_wrong_frac"] == 0
    assert 0 < line["mfu"] < 2
    assert line["memory/peak_bytes"] > 1e6
    with pytest.raises(ValueError, match=r"'rigth', which is not a reward function of the run; .*; did you mean right"):
        a_trainer(tmp_path, right, correctness_reward="rigth")


def test_flops_are_two_per_weight_and_token_and_some_attention():
    config = init_model({**TINY, "tie_word_embeddings": False}).config
    one_token = forward_flops(config, [(0, [1])])
    matrices = num_params(config) - config.vocab_size * config.hidden_size - 5 * config.hidden_size
    attention = 4 * config.num_heads * config.head_dim * config.num_layers
    assert one_token == 2 * matrices + attention
    # a prompt is counted once for all that continue it, and the vocabulary not at all
    shared, alone = forward_flops(config, [(10, [1, 1])]), forward_flops(config, [(10, [1])] * 2)
    assert alone - shared == forward_flops(config, [(10, [])])


# -- precision


@pytest.mark.optimized
@pytest.mark.heavy
def test_masters_move_in_bfloat16_as_in_float32(tmp_path):
    """At a rate of 1e-6 a bfloat16 weight cannot move; its float32 master moves as it would in float32."""
    moved = {}
    for dtype in ("float32", "bfloat16"):
        trainer = a_trainer(tmp_path / dtype, dtype=dtype, learning_rate=1e-6)
        rows = fixed_rows(trainer)
        start = leaves(trainer)
        for _ in range(100):
            assert trainer.learner.update(rows).applied
        moved[dtype] = np.concatenate([(a - b).ravel() for a, b in zip(leaves(trainer), start, strict=True)])
    cosine = moved["float32"] @ moved["bfloat16"] / np.prod([np.linalg.norm(x) for x in moved.values()])
    assert cosine > 0.99
    assert np.linalg.norm(moved["bfloat16"]) == pytest.approx(np.linalg.norm(moved["float32"]), rel=0.05)
    without_masters = jnp.asarray(np.concatenate([x.ravel() for x in start]), jnp.bfloat16)
    updated = without_masters + jnp.asarray(moved["bfloat16"] / 100, jnp.bfloat16)
    large = jnp.abs(without_masters) > 1e-3
    assert large.mean() > 0.9
    np.testing.assert_array_equal(updated[large], without_masters[large])


def fixed_rows(trainer):
    with trainer.reward_runner:
        groups = trainer.collector.collect(trainer.cursor).groups
    return [row for minibatch in trainer.collector.cut(groups) for row in minibatch]


# -- bad steps


@pytest.mark.heavy
def test_bad_updates_are_skipped_kept_and_end_the_run(tmp_path, caplog):

    trainer = a_trainer(tmp_path, max_steps=10, max_bad_steps=2)
    start = leaves(trainer)

    def sometimes_bad(rows):
        bad = [replace(row, advantages=row.advantages + np.inf) for row in rows]
        return bad if trainer.cursor.step + 1 in (3, 5, 6) else rows

    before_updates(trainer, sometimes_bad)
    with pytest.raises(DivergedError, match=r"2 updates in a row were not finite \(max_bad_steps\), .* in step 6"):
        trainer.train()
    lines = lines_of(tmp_path)
    assert [line["update_skipped"] for line in lines] == [0, 0, 1, 0, 1, 1]
    assert lines[2]["loss"] is None
    files = sorted(path.name for path in (tmp_path / "run" / "bad_steps").iterdir())
    assert files == ["step_000003.parquet", "step_000005.parquet", "step_000006.parquet"]
    rows = pyarrow.parquet.read_table(tmp_path / "run" / "bad_steps" / files[0]).to_pylist()
    assert len(rows) == 16
    assert set(rows[0]) >= {"prompt", "completion", "mask", "advantages", "rollout_logp"}
    assert all(np.isfinite(x).all() for x in leaves(trainer))
    assert any((a != b).any() for a, b in zip(start, leaves(trainer), strict=True))
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert "the update was skipped, its batch is in" in caplog.text


@pytest.mark.heavy
def test_the_learning_rate_waits_for_skipped_updates(tmp_path):
    trainer = a_trainer(tmp_path, lr_scheduler_type="linear", max_steps=4)
    rows = fixed_rows(trainer)
    bad = [replace(row, advantages=row.advantages + np.nan) for row in rows]
    rates = [trainer.learner.update(given).metrics["learning_rate"] for given in (rows, bad, bad, rows)]
    np.testing.assert_allclose(rates, [1e-2, 0.75e-2, 0.75e-2, 0.75e-2], rtol=1e-6)


@pytest.mark.heavy
def test_the_entropy_coefficient_is_reported_as_trl_does_if_asked(tmp_path):
    adaptive = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 100.0}
    reported = {}
    for definitions in ("groupax", "trl"):
        trainer = a_trainer(tmp_path / definitions, metric_definitions=definitions, **adaptive)
        metrics = trainer.learner.update(fixed_rows(trainer)).metrics
        reported[definitions] = metrics["entropy_coef"]
        assert metrics["policy_loss"] == pytest.approx(metrics["loss"] + 0.01 * metrics["entropy"], abs=1e-6)
    assert reported == pytest.approx({"groupax": 0.01, "trl": 0.015})  # of this step, and of the next one


@pytest.mark.heavy
@pytest.mark.parametrize("loss_type", rest_heavy(["grpo", "dr_grpo", "luspo", "sapo", "dapo"], quick=1))
def test_masked_rows_count_in_the_denominator_only_if_asked(tmp_path, loss_type):
    updates = {}
    for counted in (False, True):
        settings = {"loss_type": loss_type, "masked_rows_in_denominator": counted, "optimizer": "sgd"}
        trainer = a_trainer(tmp_path / str(counted), max_grad_norm=0.0, **settings)
        rows = fixed_rows(trainer)
        rows = [replace(row, mask=row.mask & (index % 4 > 0)) for index, row in enumerate(rows)]
        rows = [replace(row, advantages=np.full(len(row.mask), index % 3 - 1.0)) for index, row in enumerate(rows)]
        updates[counted] = trainer.learner.update(rows)
    ratio = updates[True].metrics["grad_norm"] / updates[False].metrics["grad_norm"]
    assert ratio == pytest.approx(1.0 if loss_type == "dapo" else 0.75, rel=1e-4)


@pytest.mark.heavy
def test_all_rows_truncated_and_masked_change_nothing(tmp_path, caplog):
    trainer = a_trainer(tmp_path, max_completion_length=1, mask_truncated_completions=True, max_steps=5)
    trainer.eos_ids = trainer.engine.eos_ids = ()
    start = leaves(trainer)
    trainer.train()
    lines = lines_of(tmp_path)
    assert all(line["loss_tokens"] == 0 and line["loss"] == 0 and line["update_skipped"] == 0 for line in lines)
    assert all(line["entropy"] is None and line["clip_ratio/high_max"] is None for line in lines)  # of no tokens
    assert "no completion ended with a stop token" in caplog.text
    assert_trees_match(start, leaves(trainer))


# -- what rollouts decode with


@pytest.mark.heavy
def test_rollouts_may_decode_with_fewer_bits_and_little_memory(tmp_path):
    options = {"kv_cache_dtype": "bfloat16", "kv_cache_gb": 0.001, "rollout_correction": "token_truncate"}
    trainer = a_trainer(tmp_path, max_steps=2, decoding_weights="bfloat16", **options)
    assert trainer.engine.kv_bytes == 1_000_000
    assert trainer.engine.kv_dtype == jnp.bfloat16
    before = trainer.engine.params
    trainer.train()
    assert trainer.engine.params is not before, "cast again for each rollout"
    assert all(0 < line["rollout/logp_diff_max"] < 0.1 for line in lines_of(tmp_path))


# -- how updates are computed


@pytest.mark.heavy
def test_ways_of_computing_the_same_update(tmp_path):
    ways = {
        "plain": {},
        "never": {"share_prefix": "never"},
        "always": {"share_prefix": "always"},
        "full": {"gradient_checkpointing": "full"},
        "dots": {"gradient_checkpointing": "dots"},
        "all_dots": {"gradient_checkpointing": "all_dots"},
        "scanned": {"scan_layers": True},
        "scanned_full": {"scan_layers": True, "gradient_checkpointing": "full"},
        "small": {"micro_batch_tokens": 12},
    }
    results = {}
    for name, options in ways.items():
        trainer = trained(tmp_path / name, optimizer="sgd", learning_rate=1e-2, max_steps=1, beta=0.1, **options)
        results[name] = leaves(trainer)
    start = leaves(a_trainer(tmp_path / "start"))
    for name, weights in results.items():
        for a, b, c in zip(weights, results["plain"], start, strict=True):
            np.testing.assert_allclose(a - c, b - c, atol=1e-7, rtol=1e-4, err_msg=name)


@pytest.mark.heavy
def test_running_out_of_memory_is_explained(tmp_path, monkeypatch):
    trainer = a_trainer(tmp_path, max_steps=1)

    def no_memory(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 7 bytes")

    monkeypatch.setattr("groupax.training.learner.micro_step", no_memory)
    with pytest.raises(
        RunError, match=r"(?s)set micro_batch_tokens \(now 4096\) to 256, or gradient_checkpointing.*7 b"
    ):
        trainer.train()
    advice = "or scan_layers to False, so that no loop over layers copies their weights. The devices report:"
    with pytest.raises(RunError, match=advice):
        a_trainer(tmp_path / "looping", max_steps=1, scan_layers=True, gradient_checkpointing="full").train()
    monkeypatch.setattr("groupax.training.learner.micro_step", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        a_trainer(tmp_path / "other", max_steps=1).train()


@pytest.mark.heavy
def test_a_trace_of_some_steps(tmp_path):
    a_trainer(tmp_path, max_steps=4, profile=1).train()
    assert list((tmp_path / "run" / "profile").rglob("*.json.gz"))
    a_trainer(tmp_path / "short", max_steps=3, profile=5).train()
    assert list((tmp_path / "short" / "run" / "profile").rglob("*.json.gz")), "what there is when the run ends"


# -- rollouts of several steps


@pytest.mark.drawn(4, "resume")
@pytest.mark.heavy
@pytest.mark.parametrize("staleness", rest_heavy([0, 1]))
def test_a_run_that_ends_within_a_rollout_goes_on_with_the_rest_of_it(tmp_path, staleness):
    settings = {"updates_per_rollout": 3, "max_staleness": staleness, "prompts_per_step": 2}
    settings["lr_scheduler_type"] = "constant"
    settings |= {"rollout_correction": "token_truncate"} if staleness else {}
    whole = trained(tmp_path / "whole", max_steps=6, **settings)
    a_trainer(tmp_path / "parts", max_steps=4, **settings).train()
    longer = a_trainer(tmp_path / "parts", max_steps=6, resume=str(tmp_path / "parts/run"), **settings)
    assert steps_started(longer) == [4, 5]
    assert [line["step"] for line in lines_of(tmp_path / "parts")] == [1, 2, 3, 4, 5, 6]
    assert_trees_match(leaves(longer), leaves(whole))


@pytest.mark.heavy
def test_a_run_is_not_resumed_with_another_schedule(tmp_path):
    kinds = [partial(TRLBatchTrainer, trl_schedule(*numbers)) for numbers in ((2, 2, 4, 4, 1), (2, 1, 2, 4, 1))]
    a_trainer(tmp_path, kind=kinds[0], max_steps=1, do_last_save=True).train()
    other = a_trainer(tmp_path, kind=kinds[1], max_steps=1, resume=str(tmp_path / "run"))
    with pytest.raises(ValueError, match=r"schedule\.rows|schedule\.prompts_per_rollout"):
        other.train()


@pytest.mark.heavy
def test_listeners_receive_events_and_can_end_a_run(tmp_path):
    told = []

    def listen(event):
        told.append(type(event))
        if isinstance(event, StepEnded):
            assert event.logged["reward"] == event.metrics["reward"]
            assert len(event.rollouts) == len(event.scores) == 16
        return isinstance(event, StepEnded) and event.step == 2

    trainer = a_trainer(tmp_path, max_steps=5)
    trainer.listeners = [listen]
    assert trainer.train().num_steps == 2
    assert [each for each in told if each not in (Diagnosed, Message, PhaseStarted, PhaseAdvanced)] == [
        RunDescribed,
        RunStarted,
        *[StepStarted, RolloutScored, StepEnded] * 2,
        CheckpointSaved,
        RunEnded,
    ]
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.heavy
def test_what_rewards_log_takes_no_name_of_the_runs(tmp_path):
    def reward(completion_ids, log_metric):
        for name in ("reward", "loss", "step", "num_tokens", "own"):
            log_metric(name, 99.0)
        return count_a(completion_ids)

    trainer = trained(tmp_path, reward, max_steps=1, eval_dataset=PROMPTS[:2])
    [line] = lines_of(tmp_path)
    assert line["step"] == 1
    assert line["reward"] < 99
    assert line["loss"] != 99
    assert line["num_tokens"] == trainer.cursor.num_tokens
    assert {line[f"logged/{name}"] for name in ("reward", "loss", "step", "num_tokens")} == {line["own"]} == {99.0}
    evaluated = trainer.evaluate().metrics
    assert evaluated["reward"] < 99
    assert evaluated["logged/reward"] == 99


@pytest.mark.heavy
def test_old_log_probs_have_no_dropout(tmp_path):
    adapter = LoRAConfig(r=4, lora_dropout=0.5)
    settings = {"num_iterations": 2, "updates_per_rollout": 2, "prompts_per_step": 2, "max_steps": 8}
    trainer = a_trainer(tmp_path, peft_config=adapter, learning_rate=3e-2, **settings)
    gaps = []
    before_updates(
        trainer, lambda rows: gaps.append(max(float(np.abs(row.old_logp - row.rollout_logp).max()) for row in rows))
    )
    trainer.train()
    assert max(gaps) < 1e-4
