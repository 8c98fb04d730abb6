"""Attention while decoding: the plain form and the kernels, by pallas' interpreter, agree with a loop over rows."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from groupax import Engine, SamplingParams, init_model
from groupax.engine import decode
from groupax.engine.core import cache_dtype
from groupax.models import attention as decode_attention
from groupax.models.attention import LayerCache, Past, to_cache
from groupax.models.config import AttentionConfig, Chunks
from groupax.models.kernels import triton_attention
from groupax.models.kernels.fused_attention import select_attend_past
from tests.conftest import TINY, one_device_mesh, rest_heavy

FORMS = {
    "plain": decode_attention.attend_past,
    "triton": partial(triton_attention.attend_past, interpret=True),
}


def numpy_attention(attn, past, cache, q, k, v, sinks=None):
    """The result of each row, by its visible columns in the order of its tokens, and the cache with k and v written."""
    prompt_k, prompt_v, keys, values = (np.array(x, np.float64) for x in cache)
    q = np.asarray(q, np.float64)
    out = np.zeros_like(q)
    share, group = len(q) // len(prompt_k), q.shape[1] // keys.shape[1]
    for row, length in enumerate(past.lengths):
        prompt, own = row // share, slice(int(length))
        if length:
            keys[row, :, :, length - 1], values[row, :, length - 1] = np.asarray(k[row]), np.asarray(v[row])
        for head in range(q.shape[1]):
            from_prompt = slice(int(past.prompt_starts[prompt]), None)
            seen_k = [prompt_k[prompt, head // group][:, from_prompt].T, keys[row, head // group][:, own].T]
            seen_v = [prompt_v[prompt, head // group][from_prompt], values[row, head // group][own]]
            num_seen = sum(map(len, seen_k))
            window = attn.window or 10**9
            if isinstance(window, Chunks):
                window = (num_seen - 1) % window.size + 1
            seen_k, seen_v = (np.concatenate(x)[-window:] for x in (seen_k, seen_v))
            if length:
                scores = seen_k @ q[row, head] * attn.scale
                scores = attn.softcap * np.tanh(scores / attn.softcap) if attn.softcap else scores
                weights = np.exp(scores - scores.max())
                sink = 0.0 if sinks is None else np.exp(float(sinks[head]) - scores.max())
                out[row, head] = weights @ seen_v / (weights.sum() + sink)
    return out, keys, values


def draw(B, Q, N, K, H, S, T, dtype=jnp.float32, kv_dtype=None, seed=0):
    keys = iter(jax.random.split(jax.random.key(seed), 7))
    of_cache = ((Q, K, H, S), (Q, K, S, H), (B, K, H, T), (B, K, T, H))
    cache = [jax.random.normal(next(keys), shape).astype(dtype) for shape in of_cache]
    new = [jax.random.normal(next(keys), shape).astype(dtype) for shape in ((B, N, H), (B, K, H), (B, K, H))]
    return LayerCache(*(x.astype(kv_dtype or dtype) for x in cache)), new


def past_of(lengths, starts):
    return Past(jnp.asarray(starts, jnp.int32), jnp.asarray(lengths, jnp.int32))


SHORT, LONG = [1, 2, 0, 17, 33, 60, 5, 9], [200, 131, 130, 132, 0, 1, 64, 199]
# rows, prompts, query heads, key heads, dims, columns of prompts, of rows; lengths, starts
CASES = {
    "ragged": ((8, 2, 4, 2, 64, 70, 64), (SHORT, [0, 69]), {}),
    "long": ((8, 4, 14, 2, 64, 300, 200), (LONG, [3, 299, 300, 128]), {}),
    "padded-dims": ((8, 8, 6, 2, 80, 144, 200), (LONG, range(130, 145, 2)), {}),
    "window": ((8, 2, 8, 1, 32, 260, 200), (LONG, [0, 100]), {"window": 150}),
    "narrow-window": ((8, 1, 8, 8, 96, 130, 200), (LONG, [100]), {"window": 1}),
    "softcap": ((8, 1, 3, 1, 256, 64, 200), (LONG, [0]), {"softcap": 2.0, "window": 31}),
    "share-16": ((32, 2, 14, 2, 64, 300, 128), ([*SHORT, *[0] * 8, *range(1, 17)], [0, 190]), {}),
    "wide-window": ((2, 2, 2, 1, 16, 20, 2100), ([2100, 1], [0, 20]), {"window": 1000}),
    "all-idle": ((8, 2, 2, 1, 16, 20, 32), ([0] * 8, [0, 20]), {}),
    "many-blocks": ((8, 2, 4, 2, 128, 384, 512), ([512, 400, 301, 0, 130, 1, 299, 428], [10, 250]), {}),
}


@pytest.mark.drawn(8)
@pytest.mark.parametrize(("case", "form"), rest_heavy([(case, form) for case in CASES for form in FORMS], quick=6))
def test_each_row_attends_to_its_visible_columns(case, form):
    sizes, past, settings = CASES[case]
    attn, past = AttentionConfig(0.2, **settings), past_of(*past)
    cache, new = draw(*sizes)
    out, written = jax.jit(partial(FORMS[form], attn))(past, cache, *new)
    expected, keys, values = numpy_attention(attn, past, cache, *new)
    live = np.asarray(past.lengths) > 0
    np.testing.assert_allclose(out[live], expected[live], atol=1e-5, rtol=1e-5)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(written.k, keys)
    np.testing.assert_array_equal(written.v, values)


@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("window", [None, 150, Chunks(64)])
def test_rows_attend_with_sinks_to_their_windows_and_chunks(window, by_block):
    attn, past = AttentionConfig(0.2, window=window), past_of(LONG, [0, 100])
    cache, new = draw(8, 2, 4, 2, 32, 260, 200)
    sinks = jnp.array([-3.0, 0.0, 4.0, 30.0])
    out, _ = jax.jit(partial(decode_attention.attend_past, attn, by_block=by_block))(past, cache, *new, sinks)
    expected, _, _ = numpy_attention(attn, past, cache, *new, sinks)
    live = np.asarray(past.lengths) > 0
    np.testing.assert_allclose(out[live], expected[live], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    rest_heavy(
        [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "float8_e4m3fn")]
    ),
)
@pytest.mark.heavy
def test_a_kernel_reads_a_cache_of_another_dtype(dtype, kv_dtype):
    attn, past = AttentionConfig(0.125), past_of(SHORT, [0, 69])
    cache, new = draw(8, 2, 4, 2, 64, 70, 64, jnp.dtype(dtype), jnp.dtype(kv_dtype))
    (out, written), (expected, expected_cache) = (FORMS[form](attn, past, cache, *new) for form in ("triton", "plain"))
    assert out.dtype == dtype
    assert written.k.dtype == kv_dtype
    live = np.asarray(past.lengths) > 0
    wide = [np.asarray(x, np.float32)[live] for x in (out, expected)]
    np.testing.assert_allclose(*wide, atol=0.02 if dtype == "bfloat16" else 1e-5)
    for got, wanted in zip(written, expected_cache, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(wanted, np.float32))


@pytest.mark.drawn(1)
@pytest.mark.heavy
@pytest.mark.parametrize(
    "model_type",
    [
        {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
        {"model_type": "gemma2", "head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 9},
    ],
    ids=lambda each: each["model_type"],
)
def test_decoding_with_the_kernel_agrees_with_the_plain_form(model_type, monkeypatch):
    model = init_model({**TINY, **model_type}, mesh=one_device_mesh())
    prompts = [np.random.default_rng(i).integers(2, 96, length) for i, length in enumerate((1, 9, 17, 30))]
    params = SamplingParams(n=3, max_tokens=21, seed=7)

    def generated(attend_past):
        monkeypatch.setattr(decode, "select_attend_past", lambda device, config, by_block: attend_past)
        decode.decode_chunk.clear_cache()
        engine = Engine(model.config, model.params, model.mesh, eos_ids=(1,), chunk_steps=8)
        return [sequence for group in engine.generate(prompts, params) for sequence in group]

    plain, kernel = (generated(FORMS[form]) for form in ("plain", "triton"))
    decode.decode_chunk.clear_cache()
    assert [each.tokens for each in kernel] == [each.tokens for each in plain]
    for got, wanted in zip(kernel, plain, strict=True):
        np.testing.assert_allclose(got.policy_logps, wanted.policy_logps, atol=1e-5)


def test_keys_beyond_the_range_of_float8_are_its_largest_number():
    large = jnp.array([1e4, -1e4, 1.5], jnp.bfloat16)
    assert to_cache(large, jnp.float8_e4m3fn).astype(jnp.float32).tolist() == [448, -448, 1.5]


def test_dtypes_that_a_cache_cannot_have_are_refused():
    a100 = SimpleNamespace(platform="gpu", compute_capability="8.0", device_kind="NVIDIA A100")
    with pytest.raises(ValueError, match=r"need compute capability 8.9, and NVIDIA A100 has 8.0"):
        cache_dtype("float8", "same", jnp.bfloat16, a100)
    assert cache_dtype("bfloat16", "same", jnp.float32, a100) == jnp.bfloat16
    with pytest.raises(ValueError, match="kv_dtype is int8; use 'float8'"):
        cache_dtype("int8", "same", jnp.bfloat16, jax.devices()[0])


@pytest.mark.parametrize(
    ("platform", "capability", "form"),
    [
        ("cpu", "", decode_attention.attend_past),
        ("tpu", "", decode_attention.attend_past),
        ("gpu", "7.5", decode_attention.attend_past),
        ("gpu", "gfx942", decode_attention.attend_past),
        ("gpu", "8.0", triton_attention.attend_past),
        ("cuda", "12.0", triton_attention.attend_past),
    ],
)
def test_the_form_goes_by_the_device(platform, capability, form):
    selected = select_attend_past(SimpleNamespace(platform=platform, compute_capability=capability))
    assert getattr(selected, "func", selected) is form
