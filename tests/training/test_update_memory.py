"""What a backward pass keeps in memory, and the checkpointing that is chosen for a device's memory."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from groupax import GRPOConfig, init_model
from groupax.engine import batch
from groupax.models.decoder import PassOptions, forward
from groupax.models.execution import Execution, FusedAttention
from groupax.models.families import read_config
from groupax.models.flops import activation_bytes_per_token
from groupax.models.kernels import fused_attention
from groupax.models.specs import model_specs
from groupax.rollouts.state import Cursor
from groupax.runs.build import learner_settings
from groupax.runs.checkpoints.record import restore_learner, start_writing, state_of
from groupax.training.learner import Learner
from groupax.training.memory import LEAST_FIRST, UpdateMemory
from tests.conftest import TINY, one_device_mesh

from .test_trainer import a_trainer

TOKENS = 48
QWEN3_06B = {**TINY, "model_type": "qwen3", "vocab_size": 128, "hidden_size": 1024, "intermediate_size": 3072}
QWEN3_06B |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960}
FAMILIES = {
    "qwen3": QWEN3_06B,
    "qwen2": {**QWEN3_06B, "model_type": "qwen2"},
    "gemma3": {**QWEN3_06B, "model_type": "gemma3_text", "query_pre_attn_scalar": 128},
    "olmo2": {**QWEN3_06B, "model_type": "olmo2"},
    "cohere": {**QWEN3_06B, "model_type": "cohere"},
}


@jax.custom_vjp
def kernel(q, k, v):
    """Stands in for an attention kernel: a batched product, whose backward pass reads its inputs and its output."""
    per_head = jnp.ones((q.shape[1], q.shape[2], q.shape[2]), q.dtype)
    return jnp.einsum("mnh,nhg->mng", q, per_head)


def kernel_backward(saved, cotangent):
    q, k, v, out = saved
    groups = jnp.sum((cotangent * out * q).reshape(*k.shape[:2], -1, k.shape[2]), axis=2)
    return cotangent, groups * v, groups * k


def kernel_forward(q, k, v):
    per_head = jnp.ones((q.shape[1], q.shape[2], q.shape[2]), q.dtype)
    out = jnp.einsum("mnh,nhg->mng", q, per_head)
    return out, (q, k, v, out)


kernel.defvjp(kernel_forward, kernel_backward)


@pytest.fixture(autouse=True)
def traced_for_a_gpu(monkeypatch):
    for module in ("layers", "matmul", "rope"):
        monkeypatch.setattr(f"groupax.models.{module}.traced_platform", lambda: "gpu")


def saved_arrays(model, num_layers, checkpointing):
    """Returns the shapes of what the backward pass of the layers keeps, beside their weights, in bfloat16."""
    config = read_config({**model, "num_hidden_layers": num_layers})
    params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16), model_specs(config))

    def backward(params):
        def hidden(params):
            tokens = jnp.zeros(TOKENS, jnp.int32)
            attend = lambda attn, cache, q, k, v: (kernel(q, k, v), cache)  # noqa: E731
            return forward(config, params, tokens, tokens, attend, options=PassOptions(Execution(checkpointing))).hidden

        return jax.vjp(hidden, params)[1]

    kept = jax.tree.leaves(jax.eval_shape(backward, params))
    return [each for each in kept if TOKENS in each.shape]


@pytest.mark.drawn(6)
@pytest.mark.parametrize("checkpointing", LEAST_FIRST)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_estimate_is_what_a_layer_keeps(family, checkpointing):
    fewer, more = (saved_arrays(FAMILIES[family], num, checkpointing) for num in (2, 3))
    kept = (sum(x.size * x.dtype.itemsize for x in more) - sum(x.size * x.dtype.itemsize for x in fewer)) / TOKENS
    configs = (read_config({**FAMILIES[family], "num_hidden_layers": num}) for num in (2, 3))
    few, many = (activation_bytes_per_token(config, 2, checkpointing) for config in configs)
    assert kept <= many - few + 4 * 30, "and a few statistics of norms"
    assert kept >= 0.8 * (many - few)


def memory(free_bytes, longest_row=16_384, is_fused=True, **change):
    config = read_config({**QWEN3_06B, "num_hidden_layers": 28, **change})
    return UpdateMemory(config, 2, longest_row, is_fused, float(free_bytes))


def test_the_least_recomputation_that_fits_is_chosen():
    sizes = [memory(1e9).bytes_per_token(way) for way in LEAST_FIRST]
    assert sizes == sorted(sizes, reverse=True)
    for way, size in zip(LEAST_FIRST, sizes, strict=True):
        assert memory(2 * size * 16_384).checkpointing("auto", None) == way
        assert memory(1.0).checkpointing(way, None) == way, "what is set is done"
    assert memory(2 * sizes[0] * 16_384).checkpointing("auto", 20_000) == "all_dots", "larger micro-batches"
    assert memory(2 * sizes[0] * 4096, longest_row=512).checkpointing("auto", None) == "none"
    assert memory(2 * sizes[0] * 512, longest_row=512).checkpointing("auto", 512) == "none"
    assert memory(float("inf")).checkpointing("auto", None) == "none"


def test_micro_batches_follow_the_memory():
    size = memory(1e9).bytes_per_token("none")
    assert memory(2 * size * 5000).fitting_tokens("none") == 4096
    assert memory(1e15).fitting_tokens("none") == 65_536
    assert memory(1e3).fitting_tokens("full") == 1024
    assert memory(float("inf")).fitting_tokens("none") == 1024, "of 1.5 GB, on CPU"
    assert [memory(4e9).scans_layers(choice, 2e9) for choice in (None, True)] == [False, True]
    assert memory(9e9).scans_layers(None, 2e9) is None
    assert memory(float("inf"), num_hidden_layers=2).fitting_tokens("none") == 4096


def test_rows_that_cannot_fit_are_refused():
    needed = memory(1e9).bytes_per_token("full") * 16_384
    memory(needed).check_longest_row()
    with pytest.raises(
        ValueError, match=r"a row of 16,384 tokens on one device needs 1\.\d+ GB .*; lower max_completion"
    ):
        memory(needed - 1).check_longest_row()


ENOUGH_FOR_DOTS = 2.0 * 4096 * UpdateMemory(read_config(TINY), 4, 90, False, 1.0).bytes_per_token("dots")


def a_learner(monkeypatch, free_bytes, **settings):
    """A learner of a device with this much free memory."""
    on_cpu = Learner.memory
    with monkeypatch.context() as patched:
        patched.setattr(Learner, "memory", lambda self: replace(on_cpu(self), free_bytes=free_bytes))
        model = init_model(TINY, mesh=one_device_mesh())
        return Learner(model, learner_settings(GRPOConfig(**settings)), 10, (30, 60))


@pytest.mark.heavy
def test_a_learner_chooses_what_fits(monkeypatch):
    assert a_learner(monkeypatch, float("inf")).execution.checkpointing == "none"
    assert a_learner(monkeypatch, ENOUGH_FOR_DOTS).execution.checkpointing == "dots"
    with pytest.raises(ValueError, match="a row of 90 tokens"):
        a_learner(monkeypatch, 1e3)
    assert a_learner(monkeypatch, 1e3, gradient_checkpointing="all_dots").execution.checkpointing == "all_dots"


@pytest.mark.heavy
def test_a_resumed_run_keeps_its_choice(monkeypatch, tmp_path):
    learner = a_learner(monkeypatch, ENOUGH_FOR_DOTS)
    model = init_model(TINY, mesh=one_device_mesh())
    state = state_of(Cursor(), learner, None, {}, {}, model)["learner"]
    start_writing(learner, {}, with_optimizer=True)(tmp_path)()
    roomier = a_learner(monkeypatch, float("inf"))
    restore_learner(roomier, tmp_path, state)
    assert roomier.execution == learner.execution
    other = a_learner(monkeypatch, float("inf"), gradient_checkpointing="full")
    restore_learner(other, tmp_path, state)
    assert other.execution.checkpointing == "full", "what is set is done"


@pytest.mark.heavy
def test_the_cache_of_a_rollout_is_as_large_as_planned(tmp_path, monkeypatch):
    engine = (trainer := a_trainer(tmp_path)).engine
    seen = []

    def decode_chunk(params, cache, *others, **options):
        seen.append(sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(cache.layers)))
        return decode(params, cache, *others, **options)

    decode = batch.decode_chunk
    monkeypatch.setattr(batch, "decode_chunk", decode_chunk)
    trainer.train()
    assert 0 < max(seen) <= engine.planned_bytes() < 4 * max(seen)


@pytest.mark.parametrize(("checkpointing", "runs"), [("none", 1), ("all_dots", 1), ("dots", 2), ("full", 2)])
def test_attention_kernels_run_again_only_where_their_results_are_not_saved(checkpointing, runs):
    config = read_config({**TINY, "num_hidden_layers": 1})
    params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), model_specs(config))
    fused = FusedAttention("splash", emulated=True)

    def attend(attn, cache, q, k, v):
        q, k, v = (x.reshape(1, 128, *x.shape[1:]) for x in (q, k, v))
        out = fused_attention.attend(q, k, v, jnp.zeros(1, jnp.int32), attn, fused)
        return out[0], cache

    def total(params):
        tokens = jnp.zeros(128, jnp.int32)
        options = PassOptions(Execution(checkpointing))
        return forward(config, params, tokens, tokens, attend, options=options).hidden.sum()

    program = str(jax.make_jaxpr(jax.grad(total))(params))
    assert program.count("name=splash_mha_fwd") == runs
