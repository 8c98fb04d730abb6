"""Episodes of several turns in training: what the model did not sample counts nowhere, from the loss to the logs."""

import itertools
import json
from dataclasses import fields, replace
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet
import pytest

from groupax import init_model
from groupax.core.settings.objective import MaskSettings, ObjectiveSettings
from groupax.core.types import FAILURES, TRUNCATIONS, CallRecord, EpisodeEnd, Rollout, Row, Turn
from groupax.events import TokenScores
from groupax.models.decoder import logits
from groupax.models.execution import DIRECT
from groupax.objective.aggregation import Denominators, denominators
from groupax.objective.losses import LossInputs, policy_objective
from groupax.parallel.mesh import num_data_shards
from groupax.rewards.lengths import soft_overlong
from groupax.rewards.text import completion_text
from groupax.rollouts.completions import completion_metrics
from groupax.rollouts.state import Experience, masked_ends, row_of
from groupax.runs.checkpoints.record import read_rollout, write_rollout
from groupax.runs.folder import RunFolder
from groupax.satellites.view.rollouts import read_step
from groupax.satellites.view.token_values import token_values
from groupax.training.accumulator import all_reduce, zero_grads
from groupax.training.packing import pack
from groupax.training.step import StepSettings, micro_step, shard_batch
from tests.conftest import TINY, rest_heavy

HOSTILE = "<tool_call>\x00\x1b[31m </tool_call> \ud800 ü"
CALL = CallRecord("search", {"query": HOSTILE, "k": [1, {"deep": None}]}, HOSTILE, 0.1 + 0.2, "timed out")


def an_episode(sample_index=0, spans=((0, 3), (5, 6), (9, 12)), num_tokens=13, **changes):
    """A rollout of several turns: the tokens of the environment have log-probs of 0."""
    mask = np.zeros(num_tokens, bool)
    for start, end in spans:
        mask[start:end] = True
    logps = np.where(mask, -1.0 - np.arange(num_tokens) / 8, 0.0).astype(np.float32)
    turns = tuple(
        Turn(start, end, f"turn {start}", (CALL,) * (start > 0), start / 10, {"right": start / 7})
        for start, end in spans
    )
    given = {
        "prompt_index": 0,
        "sample_index": sample_index,
        "example": {"prompt": [{"role": "user", "content": "q"}]},
        "prompt_ids": np.arange(4, dtype=np.int32),
        "completion_ids": np.arange(num_tokens, dtype=np.int32),
        "policy_logps": logps,
        "sampler_logps": np.where(mask, logps + 0.5, 0.0).astype(np.float32),
        "finish_reason": "done",
        "policy_version": 3,
        "text": "the whole",
        "rewards": {"right": 0.5, "other": None},
        "advantage": 0.7,
        "mask": mask,
        "turns": turns,
        "messages": ({"role": "assistant", "content": HOSTILE}, {"role": "tool", "name": "search", "content": "4"}),
    }
    return Rollout(**{**given, **changes})


def one_turn(sample_index=1, num_tokens=5, finish_reason="stop"):
    ids, logps = np.arange(num_tokens, dtype=np.int32), -np.ones(num_tokens, np.float32)
    prompt = {"prompt": [{"role": "user", "content": "q"}]}
    prompt_ids = np.arange(4, dtype=np.int32)
    rewards = {"right": 1.0, "other": 0.0}
    return Rollout(0, sample_index, prompt, prompt_ids, ids, logps, logps, finish_reason, 3, "abc", rewards, 0.5)


# -- records


def test_a_completion_is_one_turn_of_sampled_tokens_by_default():
    rollout = one_turn()
    assert rollout.mask.all()
    assert rollout.turns == (Turn(0, 5, "abc"),)
    assert rollout.completion == [{"role": "assistant", "content": "abc"}]
    assert an_episode().completion == [*an_episode().messages]
    assert (rollout.num_sampled_tokens, an_episode().num_sampled_tokens) == (5, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": np.ones(4, bool)}, r"a bool for each of its 13 completion tokens, got bool \[4\]"),
        ({"mask": np.ones(13)}, "got float64"),
        ({"turns": (Turn(0, 6, ""), Turn(5, 12, ""))}, r"must follow each other .* \[\(0, 6\), \(5, 12\)\]"),
        ({"turns": (Turn(0, 14, ""),)}, "must follow each other within its 13"),
        ({"turns": (Turn(0, 6, ""),)}, "token 9 of a rollout is marked as sampled, and it is in none of its 1 turns"),
    ],
)
def test_turns_that_do_not_fit_the_tokens_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        an_episode(**changes)


def test_every_end_by_a_limit_is_a_truncation():
    def counts(reason, setting):
        ends = masked_ends(MaskSettings(mask_truncated_completions=setting))
        row = row_of(an_episode(finish_reason=reason), 0, ends, with_sampler_logps=False)
        assert row.is_failure == (reason in FAILURES)
        assert not row.mask.any() or (row.mask == an_episode().mask).all()
        return bool(row.mask.any())

    for reason in get_args(EpisodeEnd):
        lost = reason in FAILURES
        assert counts(reason, False) == (not lost)
        assert counts(reason, True) == (not lost and reason not in TRUNCATIONS)
        assert counts(reason, ("max_turns", "parse_error")) == (not lost and reason not in ("max_turns", "parse_error"))


# -- loss and gradient


def ragged_rows(rng):
    """Rows of no turn to four, with advantages that differ between them; one row does not count at all."""
    rows = []
    for group, prompt_length in enumerate((1, 7, 19)):
        prompt = rng.integers(2, 96, prompt_length)
        for num_turns in (0, 1, 2, 4):
            sizes = rng.integers(1, 7, 2 * num_turns)
            mask = np.repeat(np.arange(len(sizes)) % 2 == 0, sizes)
            advantages = np.repeat(rng.normal(size=len(sizes)), sizes).astype(np.float32)
            old, ref = (rng.normal(-4.5, 0.4, (2, len(mask)))).astype(np.float32)
            mask = mask & (len(rows) != 4)
            tokens = rng.integers(2, 96, len(mask))
            rows.append(Row(group, prompt, tokens, mask, advantages, old * mask, old_logp=old, ref_logp=ref))
    return rows


@partial(jax.jit, static_argnums=0)
def row_logps(config, params, tokens):
    return jax.nn.log_softmax(logits(config, params, tokens[None])[0])


def reference(settings, rows, model):
    """The loss and the gradients of the sampled tokens of each row by itself, without packing or padding."""
    num_rows, num_tokens = sum(row.mask.any() for row in rows), sum(row.mask.sum() for row in rows)
    counts = Denominators(jnp.float32(num_rows), jnp.float32(num_tokens))

    def loss(params):
        total = jnp.float32(0)
        for row in (row for row in rows if row.mask.any()):
            tokens = jnp.asarray(np.concatenate([row.prompt, row.completion]))
            sampled = len(row.prompt) - 1 + np.flatnonzero(row.mask), row.completion[row.mask]
            logp = row_logps(model.config, params, tokens)[sampled][None]
            values = row.advantages, row.rollout_logp, row.old_logp, row.ref_logp
            A, *others = (jnp.asarray(each[None, row.mask]) for each in values)
            inputs = LossInputs(A, jnp.ones(logp.shape, bool), *others)
            total += policy_objective(logp, jnp.zeros_like(logp), inputs, counts, settings)[0]
        return total

    return jax.value_and_grad(loss)(model.params)


def packed_gradient(settings, rows, model, budget, share_prefix="auto"):
    """The same from the trainer's micro-batches, with their sums for metrics."""
    counts = denominators(rows, with_masked_rows=False)
    static = {"config": model.config, "settings": settings, "mesh": model.mesh}
    totals = zero_grads(model.params, **static)
    for part in pack(rows, num_data_shards(model.mesh), budget, share_prefix=share_prefix)[0]:
        batch = shard_batch(part.batch, model.mesh)
        step = StepSettings(model.config, settings, model.mesh, DIRECT)
        totals, _ = micro_step(model.params, totals, batch, counts, jnp.float32(0.0), settings=step)
    totals = all_reduce(totals, config=model.config, mesh=model.mesh)
    return float(totals.loss), totals.grads, totals.metrics


@pytest.fixture(scope="module")
def model():
    return init_model({**TINY, "num_hidden_layers": 1}, seed=1)


CASES = [("grpo", "token"), ("dapo", "sequence")]
LOSSES = "grpo", "dapo", "cispo", "sapo", "dr_grpo", "luspo"
CASES += [case for case in itertools.product(LOSSES, ("token", "sequence")) if case not in CASES]


@pytest.mark.parametrize(("loss_type", "level"), rest_heavy(CASES, quick=2))
@pytest.mark.heavy
def test_packed_episodes_have_the_loss_and_gradient_of_each_row_by_itself(model, loss_type, level):
    settings = ObjectiveSettings(
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=0.1,
        epsilon_high=2.0 if loss_type == "cispo" else 0.28,
        max_completion_length=32,
    )
    rows = ragged_rows(np.random.default_rng(2))
    loss, grads = reference(settings, rows, model)
    assert max(np.abs(grad).max() for grad in jax.tree.leaves(grads)) > 1e-2
    for budget, share in ((48, "never"), (4096, "always")):
        found, found_grads, _ = packed_gradient(settings, rows, model, budget, share)
        assert found == pytest.approx(loss, abs=1e-6)
        for a, b in zip(jax.tree.leaves(found_grads), jax.tree.leaves(grads), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


# -- metrics, rewards and logs


def test_metrics_count_sampled_tokens_only():
    rollouts = [an_episode(), one_turn(), an_episode(2, finish_reason="max_turns")]
    metrics = completion_metrics(rollouts)
    assert metrics["completions/mean_length"] == pytest.approx((7 + 5 + 7) / 3)
    assert metrics["completions/max_terminated_length"] == 7
    assert metrics["completions/clipped_ratio"] == pytest.approx(1 / 3)
    assert metrics["rollout/sampler_gap_mean"] == pytest.approx(0.5 * 14 / 19)


def test_length_rewards_count_sampled_tokens_only():
    ids, mask = [[0] * 10, [0] * 10], [[True] * 10, [True] * 4 + [False] * 6]
    assert soft_overlong(ids, max_length=10, buffer=8) == [-1, -1]
    assert soft_overlong(ids, max_length=10, buffer=8, completion_mask=mask) == [-1, -0.25]


def test_the_answer_of_an_episode_is_the_last_thing_that_the_model_wrote():
    call = {"role": "assistant", "tool_calls": []}
    result = {"role": "tool", "content": "5"}
    assert completion_text([call, result, {"role": "assistant", "content": "4"}]) == "4"
    assert completion_text([{"role": "assistant", "content": "4"}, result]) == "4"
    assert completion_text([call, result]) == ""


def test_the_rollout_log_keeps_turns_and_the_view_counts_what_was_sampled(tmp_path):
    run = RunFolder(tmp_path)
    scores = {index: TokenScores(np.full(n, -2.0), np.ones(n)) for index, n in enumerate((13, 5))}
    run.write_rollouts(1, [an_episode(), one_turn()], scores)
    run.write_rollouts(2, [one_turn(0), one_turn(1)], scores)
    path, of_one_turn = (tmp_path / "rollouts" / f"step_00000{step}.parquet" for step in (1, 2))
    table = pyarrow.parquet.read_table(path).to_pylist()
    assert table[0]["mask"] == an_episode().mask.tolist()
    turns = json.loads(table[0]["turns"])
    assert [(turn["start"], turn["end"], turn["reward"]) for turn in turns] == [(0, 3, 0.0), (5, 6, 0.5), (9, 12, 0.9)]
    assert turns[1]["calls"] == [{**vars(CALL), "arguments": dict(CALL.arguments)}]
    assert json.loads(table[0]["messages"])[0]["content"] == HOSTILE
    assert (table[1]["mask"], table[1]["messages"]) == ([True] * 5, None)
    assert read_step(path).num_tokens.tolist() == [7, 5]
    values = token_values(path, 0, "policy_logps")
    assert np.isnan(values[0]["values"]).tolist() == (~an_episode().mask).tolist()
    assert not np.isnan(values[1]["values"]).any()

    assert not {"mask", "turns", "messages"} & set(pyarrow.parquet.read_schema(of_one_turn).names)
    assert read_step(of_one_turn).num_tokens.tolist() == [5, 5]


# -- checkpoints


def test_a_checkpoint_keeps_episodes_in_progress(tmp_path):
    groups = [[an_episode(), one_turn()], [an_episode(0, prompt_index=1), one_turn(1)]]
    groups[1][1] = replace(groups[1][1], prompt_index=1)
    experience = Experience(groups, {"reward": 0.5}, {}, first_prompt=0, num_tokens=9)
    write_rollout(experience, tmp_path)
    state = {"metrics": {"reward": 0.5}, "errors": {}, "first_prompt": 0, "num_tokens": 9, "num_used": 0}
    found, _ = read_rollout(tmp_path, state, lambda _: ({"prompt": [{"role": "user", "content": "q"}]}, None))
    pairs = [*zip(itertools.chain(*groups), itertools.chain(*found.groups), strict=True)]
    assert len(pairs) == 4
    for (a, b), field in itertools.product(pairs, fields(Rollout)):
        np.testing.assert_equal(getattr(b, field.name), getattr(a, field.name), err_msg=field.name)
        assert type(getattr(b, field.name)) is type(getattr(a, field.name)), field.name
