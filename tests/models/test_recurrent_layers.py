"""Layers with a recurrent state: the delta rule, convolutions, and what the engine keeps of a sequence."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupax import Engine, SamplingParams, init_model
from groupax.models.families import read_config
from groupax.models.recurrent import (
    delta_rule,
    delta_rule_step,
    unit_triangular_inverse,
)
from tests.conftest import TINY, one_device_mesh, rest_heavy
from tests.training.test_agreement import DELTA, LFM2
from tests.training.test_trainer import a_trainer, lines_of

KINDS = {"lfm2": LFM2, "qwen3_5_text": DELTA}


def a_model(family, mesh=None):
    model = init_model({**TINY, "model_type": family, **KINDS[family]}, seed=1, mesh=mesh)
    return replace(model, params=jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, model.params))


def tokens_of_heads(rng, B, T, N=2, K=6, V=4):
    q, k, v = (rng.normal(size=(B, T, N, size)) for size in (K, K, V))
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    return q, k, v, -rng.random((B, T, N)), rng.random((B, T, N))


def token_by_token(memory, q, k, v, g, b):
    """The delta rule in numpy, in float64."""
    out = []
    for t in range(q.shape[1]):
        memory = memory * np.exp(g[:, t])[..., None, None]
        known = np.einsum("bnkv,bnk->bnv", memory, k[:, t])
        memory = memory + np.einsum("bnk,bnv->bnkv", k[:, t], (v[:, t] - known) * b[:, t, :, None])
        out.append(np.einsum("bnkv,bnk->bnv", memory, q[:, t]))
    return np.stack(out, axis=1), memory


def in_float32(*arrays):
    return tuple(jnp.asarray(x, jnp.float32) for x in arrays)


# -- the delta rule


@pytest.mark.parametrize("num", rest_heavy([70, 1, 5, 64, 130]))
def test_chunks_are_the_rule_token_by_token(num):
    rng = np.random.default_rng(num)
    memory, given = rng.normal(size=(3, 2, 6, 4)), tokens_of_heads(rng, 3, num)
    expected, after = token_by_token(memory, *given)
    out, found = jax.jit(delta_rule)(*in_float32(memory, *given))
    np.testing.assert_allclose(out, expected, atol=2e-5)
    np.testing.assert_allclose(found, after, atol=2e-5)
    first = in_float32(memory, *(x[:, 0] for x in given))
    for a, b in zip(jax.jit(delta_rule_step)(*first), token_by_token(memory, *(x[:, :1] for x in given)), strict=True):
        np.testing.assert_allclose(a, b[:, 0] if b.ndim == 4 and b.shape[1] == 1 else b, atol=1e-5)


def test_the_same_key_again_and_again_is_solved_without_growing():
    """Powers of such a matrix grow beyond float32's range of whole numbers; its inverse has only 1 and -1."""
    lower = np.tril(np.ones((64, 64)), -1)
    np.testing.assert_allclose(
        jax.jit(unit_triangular_inverse)(jnp.asarray(lower, jnp.float32)), np.linalg.inv(np.eye(64) + lower), atol=1e-6
    )


@pytest.mark.parity
def test_the_delta_rule_and_its_gradients_are_those_of_transformers():
    import torch
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    rng = np.random.default_rng(1)
    q, k, v, g, b = tokens_of_heads(rng, 2, 150)
    memory, slopes = rng.normal(size=(2, 2, 6, 4)), rng.normal(size=v.shape)
    given = [torch.tensor(x, dtype=torch.float32, requires_grad=True) for x in (q, k, v, g, b, memory)]
    expected, after = torch_chunk_gated_delta_rule(*given[:5], initial_state=given[5], output_final_state=True)
    ((expected * torch.tensor(slopes, dtype=torch.float32)).sum() + after.square().sum()).backward()

    def loss(q, k, v, g, b, memory):
        out, after = delta_rule(memory, q * np.float32(6**-0.5), k, v, g, b)
        return jnp.sum(out * slopes.astype(np.float32)) + jnp.sum(jnp.square(after)), out

    grads, out = jax.jit(jax.grad(loss, range(6), has_aux=True))(*in_float32(q, k, v, g, b, memory))
    np.testing.assert_allclose(out, expected.detach().numpy(), atol=2e-5)
    for ours, theirs in zip(grads, given, strict=True):
        np.testing.assert_allclose(ours, theirs.grad.numpy(), atol=2e-4, rtol=1e-4)


# -- the engine


def completions(model, prompts, **settings):
    engine = Engine(model.config, model.params, model.mesh, eos_ids=(2,), **settings)
    groups = engine.generate(prompts, SamplingParams(n=3, max_tokens=70, seed=3))
    return [sequence.tokens for group in groups for sequence in group]


@pytest.mark.drawn(1)
@pytest.mark.heavy
@pytest.mark.parametrize("family", KINDS)
def test_completions_depend_neither_on_slots_nor_on_the_length_of_chunks(family):
    model = a_model(family, one_device_mesh())
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 96, length).astype(np.int32) for length in (1, 2, 5, 40, 90)]
    expected = completions(model, prompts)
    assert completions(model, prompts, max_slots=2, chunk_steps=5) == expected


@pytest.mark.drawn(1)
@pytest.mark.heavy
@pytest.mark.parametrize("family", KINDS)
def test_a_run_trains_on_what_its_engine_sampled(family, tmp_path):
    model = a_model(family)
    before = jax.tree.map(np.asarray, model.params)

    def variety(completions):
        return [float(len(set(text))) for text in completions]

    rows = [{"prompt": text} for text in ("ab", "abc", "abcde", "c")]
    trainer = a_trainer(tmp_path, variety, rows, model, max_steps=2, max_completion_length=24, learning_rate=1e-3)
    trainer.train()
    assert [line["rollout/logp_diff_max"] < 2e-5 for line in lines_of(tmp_path)] == [True] * 2
    changed = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - b).max() > 0, trainer.learner.state.params, before)
    assert all(jax.tree.leaves(changed))


# -- tables and costs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "none of the 3 layers has attention"),
        ({"layer_types": ["linear_attention", "conv", "full_attention"]}, r"layer_types has \['conv'\]; supported for"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "lists 2 layers, but num_hidden_layers is 3"),
        ({"linear_num_value_heads": 3}, "must be a multiple of its key heads, got 3 and 2"),
        ({"attn_output_gate": False}, "attn_output_gate=False; groupax supports only True"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim=0"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        read_config({**TINY, "model_type": "qwen3_5_text", **DELTA, **change})
