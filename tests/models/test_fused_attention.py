"""Attention by kernels gives what the plain form gives. On this CPU the kernels' work is done by other operations:
splash's by pallas' interpreter, cuDNN's by XLA."""

import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupax import GRPOConfig, init_model
from groupax.core.types import Row
from groupax.models import attention
from groupax.models.attention import Prompts
from groupax.models.config import AttentionConfig
from groupax.models.execution import FusedAttention
from groupax.models.families import read_config
from groupax.models.kernels import fused_attention, splash
from groupax.models.kernels.fused_attention import select_fused_attention
from groupax.models.weights.checkpoint import reshard
from groupax.parallel.mesh import make_mesh
from groupax.runs.build import learner_settings
from groupax.training.learner import Learner
from tests.conftest import TINY, assert_trees_match, one_device_mesh

KERNELS = {
    "splash": partial(splash.attend, interpret=True),
    "cudnn": partial(fused_attention.cudnn_attend, implementation="xla"),
}


def behind_prompts(kernel):
    """A kernel's attention from rows to their prompts and to themselves, as `attention.attend_with_prompt`."""

    def attend(q, k, v, prompts, attn, **others):
        keys, values = jnp.concatenate([prompts.k, k], axis=1), jnp.concatenate([prompts.v, v], axis=1)
        return KERNELS[kernel](q, keys, values, prompts.starts, attn, **others)

    return attend


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def assert_alike(kernel, plain, arrays, counts):
    """Outputs where they count, and gradients of what counts."""
    cotangent = draw(9, *arrays[0].shape)

    def loss(attend):
        def of(*arrays):
            out = jnp.where(counts, attend(*arrays), 0)
            return jnp.vdot(out, cotangent), out

        return jax.value_and_grad(of, argnums=tuple(range(len(arrays))), has_aux=True)

    ((_, out), gradients), ((_, expected), expected_gradients) = (loss(each)(*arrays) for each in (kernel, plain))
    assert_trees_match((out, *gradients), (expected, *expected_gradients), atol=1e-5, rtol=1e-5)


# queries, columns of the prompt, query and key heads, their dims, how they attend
CASES = {
    "few": (40, 24, 4, 4, 64, AttentionConfig(0.125)),
    "grouped": (130, 96, 4, 2, 80, AttentionConfig(0.1)),
    "one-key-head": (256, 130, 4, 1, 128, AttentionConfig(0.09)),
    "softcap": (128, 128, 2, 1, 64, AttentionConfig(0.3, softcap=2.0)),
    "window": (200, 150, 2, 2, 64, AttentionConfig(0.125, window=70)),
    "blocks": (1030, 200, 1, 1, 64, AttentionConfig(0.125, window=300)),
    "blocks-softcap": (700, 600, 2, 1, 64, AttentionConfig(0.2, softcap=5.0)),
}
LONG = ("one-key-head", "blocks", "blocks-softcap")


def marked(name, kernel):
    """A case with the mark of its time."""
    return pytest.param(name, kernel, marks=pytest.mark.long if name in LONG else pytest.mark.heavy)


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("case", "kernel"), [marked(name, kernel) for name in CASES for kernel in KERNELS])
def test_a_kernel_attends_as_the_plain_form_does(case, kernel):
    T, S, N, K, H, attn = CASES[case]
    if attn.softcap and kernel == "cudnn":
        pytest.skip("cuDNN has no softcap")
    arrays = draw(0, 3, T, N, H), draw(1, 3, T, K, H), draw(2, 3, T, K, H)
    prompts = draw(3, 3, S, K, H), draw(4, 3, S, K, H)
    starts = jnp.array([0, 7, S])  # whole, padded, and no prompt at all

    def behind(attend):
        return lambda q, k, v, *prompts: attend(q, k, v, Prompts(*prompts, starts), attn)

    assert_alike(behind(behind_prompts(kernel)), behind(attention.attend_with_prompt), (*arrays, *prompts), True)
    begins = jnp.array([0, 7, T - 1])
    counts = (jnp.arange(T)[None, :] >= begins[:, None])[..., None, None]

    def alone(attend):
        return lambda q, k, v: attend(q, k, v, begins, attn)

    assert_alike(alone(KERNELS[kernel]), alone(attention.attend), arrays, counts)


@pytest.mark.drawn(3, "fused")
@pytest.mark.heavy
def test_sinks_add_to_the_sums_of_splash_too():
    attn, starts = AttentionConfig(0.125, window=70), jnp.array([0, 7, 24])
    rows = draw(0, 3, 40, 4, 64), draw(1, 3, 40, 2, 64), draw(2, 3, 40, 2, 64)
    prompts = draw(3, 3, 24, 2, 64), draw(4, 3, 24, 2, 64)
    sinks = jnp.array([-2.0, 0.0, 1.0, 3.0])

    def behind(attend):
        return lambda *arrays: attend(*arrays[:3], Prompts(*arrays[3:5], starts), attn, sinks=arrays[5])

    assert_alike(behind(behind_prompts("splash")), behind(attention.attend_with_prompt), (*rows, *prompts, sinks), True)


# -- in the update


def long_rows(num_words):
    """Prompts and completions of more than 128 tokens, and some that are short."""
    rng, rows = np.random.default_rng(0), []
    for group, prompt_length in enumerate((150, 131, 9, 140)):
        prompt = rng.integers(3, num_words, prompt_length).astype(np.int32)
        for length in (300, 20, 60):
            words, mask = rng.integers(3, num_words, length).astype(np.int32), np.ones(length, bool)
            advantages = np.full(length, rng.normal(), np.float32)
            rows.append(Row(group, prompt, words, mask, advantages, np.full(length, -3.0, np.float32)))
    return rows


def after_update(model, attends, **settings):
    args = GRPOConfig(optimizer="sgd", learning_rate=1.0, lr_scheduler_type="constant", entropy_coef=0.01, **settings)
    learner = Learner(model, learner_settings(args), 10)
    learner.execution = replace(learner.execution, attention=attends)
    rows = long_rows(model.config.vocab_size)
    logps = learner.logprobs(learner.policy, rows)[0]
    assert len(next(iter(learner.shapes)).tiles) > 1
    return learner, learner.update(rows).metrics, logps


def assert_same_update(model, attends, reshard=None, **settings):
    plain, of_plain, logps = after_update(model, None, **settings)
    fused, of_fused, fused_logps = after_update(reshard or model, attends, **settings)
    assert_trees_match(logps, fused_logps, atol=1e-5)
    for name in ("loss", "grad_norm", "entropy"):
        assert of_fused[name] == pytest.approx(of_plain[name], rel=1e-5, abs=1e-6), name
    assert_trees_match(*(learner.state.params for learner in (plain, fused)), atol=1e-5, rtol=0)


def a_model(**change):
    model = init_model({**TINY, "max_position_embeddings": 512, **change}, mesh=one_device_mesh())
    return replace(model, params=jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, model.params))


GEMMA = {"model_type": "gemma2", "sliding_window": 100, "query_pre_attn_scalar": 8, "head_dim": 8}
UPDATES = {
    "splash": ({}, {}, None),
    "cudnn": ({}, {}, None),
    "windows-and-softcaps": ({**GEMMA, "attn_logit_softcapping": 5.0}, {}, None),
    "split-heads": ({"num_hidden_layers": 1}, {}, (1, 2, 1, 2, 1)),
    **{way: ({}, {"gradient_checkpointing": way, "scan_layers": True}, None) for way in ("full", "dots", "all_dots")},
}
LONG_UPDATES = ("split-heads", "full", "dots", "all_dots")


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=getattr(pytest.mark, "long" if each in LONG_UPDATES else "heavy")) for each in UPDATES],
)
def test_an_update_by_a_kernel_is_the_same_update(name):
    change, settings, mesh = UPDATES[name]
    model = a_model(**change)
    split = None if mesh is None else reshard(model, make_mesh(mesh))
    kernel = "cudnn" if name == "cudnn" else "splash"
    assert_same_update(model, FusedAttention(kernel, emulated=True), split, **settings)


# -- the rule


CPU = SimpleNamespace(platform="cpu", device_kind="cpu")
TPU = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
A100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0")
H100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100", compute_capability="9.0")
V100 = SimpleNamespace(platform="gpu", device_kind="Tesla V100", compute_capability="7.0")
MI300 = SimpleNamespace(platform="gpu", device_kind="AMD Instinct MI300X", compute_capability="gfx942")
GEMMA2 = {"model_type": "gemma2", "sliding_window": 100, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 50.0}


@pytest.mark.parametrize(
    ("device", "change", "dtype", "kernel"),
    [
        (TPU, {}, "float32", "splash"),
        (TPU, {**GEMMA2, "head_dim": 256}, "bfloat16", "splash"),
        (H100, {}, "bfloat16", "cudnn"),
        (A100, {"head_dim": 128}, "bfloat16", "cudnn"),
        (H100, {"head_dim": 256}, "bfloat16", "cudnn"),
    ],
)
def test_kernels_are_selected_where_there_are_some(device, change, dtype, kernel):
    config = read_config({**TINY, **change})
    for asked in ("auto", "fused"):
        assert select_fused_attention(asked, device, config, jnp.dtype(dtype)) == FusedAttention(kernel)
    assert select_fused_attention("plain", device, config, jnp.dtype(dtype)) is None


@pytest.mark.parametrize(
    ("device", "change", "dtype", "fault"),
    [
        (CPU, {}, "float32", "no fused attention for a cpu device, only for TPUs and NVIDIA GPUs"),
        (MI300, {}, "bfloat16", "no fused attention for AMD Instinct MI300X, only for TPUs and NVIDIA GPUs"),
        (V100, {}, "bfloat16", "needs compute capability 8.0, and Tesla V100 has 7.0"),
        (H100, {}, "float32", "computes in bfloat16, and dtype is float32"),
        (H100, GEMMA2, "bfloat16", "has no softcap, and this model's softcap is 50.0"),
        (
            A100,
            {"head_dim": 256},
            "bfloat16",
            "a head_dim of at most 128 that is a multiple of 8 on NVIDIA A100, and this model's is 256",
        ),
        (H100, {"head_dim": 100}, "bfloat16", "a multiple of 8 on NVIDIA H100, and this model's is 100"),
    ],
)
def test_where_there_is_none_auto_is_plain_and_fused_an_error(device, change, dtype, fault):
    config = read_config({**TINY, **change})
    assert select_fused_attention("auto", device, config, jnp.dtype(dtype)) is None
    with pytest.raises(
        ValueError, match=rf"attn_implementation is 'fused', but .*{fault}; set it to 'auto' or 'plain'"
    ):
        select_fused_attention("fused", device, config, jnp.dtype(dtype))


def test_a_run_is_refused_before_it_starts(tiny_model):
    with pytest.raises(ValueError, match="'fused', but there is no fused attention for a cpu device"):
        Learner(tiny_model, learner_settings(GRPOConfig(attn_implementation="fused")), 1)
    for asked in ("auto", "plain"):
        assert (
            Learner(tiny_model, learner_settings(GRPOConfig(attn_implementation=asked)), 1).execution.attention is None
        )


def test_who_uses_no_kernel_imports_none():
    code = "import sys, groupax.training.learner; assert not [name for name in sys.modules if 'pallas' in name]"
    subprocess.run([sys.executable, "-c", code], check=True)
