"""Rollout routing replay: the engine records the experts of each token, and an update chooses the same."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupax import Engine, SamplingParams, init_model, replay_step
from groupax.core.types import Row
from groupax.models.config import Experts
from groupax.models.experts import route
from groupax.models.logprobs import grouped_logprobs
from groupax.rollouts.state import Experience
from groupax.runs.checkpoints.record import read_rollout, write_rollout
from groupax.satellites.replay.recorded import recorded_run
from groupax.training.packing import pack, unpack
from tests.conftest import TINY, assert_trees_match, one_device_mesh
from tests.data.test_config_and_data import a_tokenizer
from tests.episodes.test_turns import one_turn

from .test_trainer import PROMPTS, a_trainer, count_a

HF = {**TINY, "model_type": "qwen3_moe", "num_hidden_layers": 3, "head_dim": 8, "moe_intermediate_size": 16}
HF |= {"num_experts": 6, "num_experts_per_tok": 2, "mlp_only_layers": [1], "norm_topk_prob": True}


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_a_recorded_choice_has_the_weights_and_gradients_of_this_router(scores):
    experts = Experts(num=5, per_token=2, ffn_size=1, norm_topk_prob=True, layers=(0,), scores=scores)
    logits = jax.random.normal(jax.random.key(0), (4, 5))
    recorded = jnp.array([[4, 0], [-1, -1], [2, 1], [-1, -1]], jnp.int16)
    weights, routing = route(experts, logits, None, recorded)
    _, own = route(experts, logits)
    np.testing.assert_array_equal(routing.chosen[0::2], recorded[0::2])
    np.testing.assert_array_equal(routing.chosen[1::2], own.chosen[1::2])
    plain = np.exp(logits) if scores == "softmax" else 1 / (1 + np.exp(-np.asarray(logits)))
    expected = np.take_along_axis(np.asarray(plain), np.asarray(routing.chosen), axis=1)
    np.testing.assert_allclose(weights, expected / expected.sum(axis=1, keepdims=True), atol=1e-6)
    slopes = jax.grad(lambda logits: jnp.sum(route(experts, logits, None, recorded)[0][:, 0]))(logits)
    assert (np.abs(np.take_along_axis(np.asarray(slopes), np.asarray(routing.chosen), axis=1)) > 1e-4).all()


def rows_of(groups, prompts, with_experts):
    rows = []
    for group, (sequences, prompt) in enumerate(zip(groups, prompts, strict=True)):
        for each in sequences:
            num, zeros = len(each.tokens), np.zeros(len(each.tokens))
            experts = np.stack(each.experts) if with_experts else None
            row = Row(group, prompt, np.array(each.tokens), np.ones(num, bool), zeros, np.array(each.policy_logps))
            rows.append(replace(row, experts=experts))
    return rows


def updated(model, rows):
    """The trainer's log-probs of the rows' tokens, and the experts that it chose for their inputs."""
    logps, chosen = [], []
    packed, _ = pack(rows, 1, 4096)
    for part in packed:
        ragged = jax.tree.map(jnp.asarray, part.batch.ragged)
        logp, _, routings = jax.jit(lambda ragged: grouped_logprobs(model.config, model.params, ragged, 1.0))(ragged)
        first = len(ragged.tokens) - len(ragged.targets)
        of_tokens = np.concatenate([routing.chosen for routing in routings], axis=1)[first:]
        cells = part.batch.cells
        logps.append(np.where(cells < 0, 0, np.asarray(logp)[cells]))
        chosen.append(of_tokens[cells])
    return unpack(packed, logps, rows), unpack(packed, chosen, rows)


@pytest.mark.heavy
def test_an_update_follows_what_another_engine_recorded_and_agrees_with_its_own():
    model = init_model(HF, seed=1, mesh=one_device_mesh())
    model = replace(model, params=jax.tree.map(lambda x: 6 * x if x.ndim > 1 else x, model.params))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 96, length).astype(np.int32) for length in (1, 9, 16)]

    def sampled(params):
        engine = Engine(model.config, params, model.mesh, eos_ids=(), record_experts=True, chunk_steps=8)
        return engine.generate(prompts, SamplingParams(n=2, max_tokens=20))

    own = sampled(model.params)
    recorded = [np.stack(each.experts) for group in own for each in group]
    assert {each.shape for each in recorded} == {(20, 4)}
    for with_experts in (False, True):
        rows = rows_of(own, prompts, with_experts)
        logps, chosen = updated(model, rows)
        for row, logp, experts, record in zip(rows, logps, chosen, recorded, strict=True):
            np.testing.assert_allclose(logp, row.rollout_logp, atol=1e-5)
            np.testing.assert_array_equal(experts, record)  # engine and trainer choose alike

    def perturbed(path, x):
        noise = jax.random.normal(jax.random.key(2), x.shape) * jnp.std(x)
        return x + noise if path[-1] == jax.tree_util.DictKey("router") else x

    others = sampled(jax.tree_util.tree_map_with_path(perturbed, model.params))
    recorded = [np.stack(each.experts) for group in others for each in group]
    without, routers = updated(model, rows_of(others, prompts, False))
    logps, chosen = updated(model, rows_of(others, prompts, True))
    assert_trees_match(chosen, recorded)
    assert any((experts != record).any() for experts, record in zip(routers, recorded, strict=True))
    assert max(np.abs(a - b).max() for a, b in zip(logps, without, strict=True)) > 1e-3


@pytest.mark.heavy
def test_a_step_with_recorded_experts_is_replayed(tmp_path):
    def model():
        return init_model({**HF, "vocab_size": 13}, seed=1, dtype="bfloat16")

    run = tmp_path / "run"
    a_trainer(tmp_path, model=model(), max_steps=3, routing_replay=True).train()
    tokenizer = a_tokenizer(eos_token="<eos>")
    for stage in ("data", "loss"):
        given = {"train_dataset": PROMPTS, "processing_class": tokenizer, "stage": stage}
        assert replay_step(run, 3, model(), count_a, **given).is_equal
    columns = recorded_run(run).table(2)
    widths = {
        len(experts) / len(ids) for experts, ids in zip(columns["experts"], columns["completion_ids"], strict=True)
    }
    assert widths == {4}


def test_a_checkpoint_keeps_the_experts_of_a_rollout(tmp_path):
    experts = np.arange(20, dtype=np.int16).reshape(5, 4) - 4
    group = [replace(one_turn(0), experts=experts), one_turn(1)]
    write_rollout(Experience([group], {}, {}, first_prompt=0, num_tokens=10), tmp_path)
    state = {"metrics": {}, "errors": {}, "first_prompt": 0, "num_tokens": 10, "num_used": 0}
    found, _ = read_rollout(tmp_path, state, lambda _: (group[0].example, None))
    np.testing.assert_array_equal(found.groups[0][0].experts, experts)
    assert found.groups[0][0].experts.dtype == np.int16
    assert found.groups[0][1].experts is None
