"""Several adapters of one base, decoded in one batch."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from groupax import Engine, LoRAConfig, SamplingParams, add_adapter, init_model
from groupax.engine.core import with_adapters
from groupax.models.adapted import stack_adapters
from tests.models.test_lora import a_base, trained_randomly

SHAPES = {
    "one": LoRAConfig(r=4, lora_alpha=8),
    "two": LoRAConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"]),
}
PROMPTS = [np.array(ids, np.int32) for ids in ([1, 2, 3], [4, 5, 6, 7, 8], [9], [1, 2, 3])]
PARAMS = SamplingParams(n=2, max_tokens=12, seed=3, temperature=3.0)


def adapters_of(base, seed=0):
    """Adapters of one base with different settings and weights."""
    return {
        name: trained_randomly(add_adapter(base, lora), seed + index)
        for index, (name, lora) in enumerate(SHAPES.items())
    }


def an_engine(model, adapters=None, **settings):
    given = {"kv_bytes": 1 << 24, "chunk_steps": 4, **settings}
    if not adapters:
        return Engine(model.config, model.params, model.mesh, (0,), **given)
    changes = [each.adapter.trained for each in adapters.values()]
    params = stack_adapters(model.params, changes)
    return Engine(model.config, params, model.mesh, (0,), adapters=tuple(adapters), **given)


def together(engine, names=(None, "one", "two"), params=PARAMS):
    """What the prompts become with each adapter, all decoded in one batch."""
    requests = {name: engine.sequences(PROMPTS, params, adapter=name) for name in names}
    session = engine.session()
    for sequences in requests.values():
        session.submit(sequences)
    while session.busy:
        list(session.step())
    return requests


def flat(groups):
    return [sequence for group in groups for sequence in group]


def of_attention():
    base = a_base()
    return base, adapters_of(base)


def of_latent_attention():
    dims = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    hf = {**dims, **sizes, "model_type": "deepseek_v3", "num_hidden_layers": 2, "first_k_dense_replace": 2}
    base = init_model(hf, seed=1)
    return base, {
        name: trained_randomly(add_adapter(base, LoRAConfig(r=rank, target_modules=targets)), rank)
        for name, rank, targets in (
            ("one", 4, ["kv_b_proj", "o_proj"]),
            ("two", 2, ["kv_a_proj_with_mqa", "kv_b_proj"]),
        )
    }


def test_an_adapter_that_would_spoil_other_rows_is_refused():
    base, adapters = of_attention()
    trained = jax.tree.map(lambda x: x * np.nan, adapters["one"].adapter.trained)
    broken = replace(adapters["one"], adapter=replace(adapters["one"].adapter, trained=trained))
    with pytest.raises(ValueError, match="two has weights that are not finite, which would spoil other rows"):
        with_adapters(base, {"one": adapters["one"], "two": broken})


@pytest.mark.drawn(4, "adapters")
@pytest.mark.heavy
@pytest.mark.parametrize("models", [of_attention, of_latent_attention])
def test_rows_of_several_adapters_in_one_batch_are_those_of_each_alone(models):
    base, adapters = models()
    found = together(an_engine(base, adapters))
    for name, model in {None: base, **adapters}.items():
        alone = flat(an_engine(model).generate(PROMPTS, PARAMS))
        assert [each.tokens for each in found[name]] == [each.tokens for each in alone]
        for one, other in zip(found[name], alone, strict=True):
            np.testing.assert_allclose(one.policy_logps, other.policy_logps, atol=1e-5)
    texts = {name: [each.tokens for each in sequences] for name, sequences in found.items()}
    assert texts[None] != texts["one"] != texts["two"]


@pytest.mark.long
def test_stored_beginnings_are_those_of_the_same_adapter():
    base = a_base()
    adapters = adapters_of(base)
    params = replace(PARAMS, n=1, ignore_eos=True)
    engine = an_engine(base, adapters, prefix_bytes=1 << 20)
    [[turn]] = engine.generate(PROMPTS[:1], params, adapter="one")
    longer = [np.array([*turn.prompt, *turn.tokens, 5], np.int32)]
    for name, model in {"two": adapters["two"], None: base, "one": adapters["one"]}.items():
        reused = engine.prefixes.num_reused_tokens
        [[found]] = engine.generate(longer, params, adapter=name)
        [[alone]] = an_engine(model).generate(longer, params)
        assert found.tokens == alone.tokens
        assert (engine.prefixes.num_reused_tokens > reused) == (name == "one")


@pytest.mark.heavy
def test_what_a_batch_cannot_share_is_refused():
    base = a_base(attention_bias=True)
    full = add_adapter(base, LoRAConfig(r=2, bias="all"))
    with pytest.raises(ValueError, match="low-rank changes alone"):
        Engine.of(base, object(), {"full": full})
    with pytest.raises(ValueError, match="another is not an adapter of the same model"):
        Engine.of(base, object(), {"another": add_adapter(a_base(seed=1), LoRAConfig(r=2))})


@pytest.mark.long
def test_sharded_weights_and_fewer_bits():
    base = a_base(num_attention_heads=4, num_key_value_heads=4)
    adapters = adapters_of(base)
    expected = together(an_engine(base, adapters))
    sharded = together(an_engine(base, adapters, tp=2))
    for name, sequences in expected.items():
        assert [each.tokens for each in sharded[name]] == [each.tokens for each in sequences]
    in_half = together(an_engine(base, adapters, weights="bfloat16"))
    assert all(len(each.tokens) for sequences in in_half.values() for each in sequences)


def texts_of(engine, name):
    return [each.tokens for each in flat(engine.generate(PROMPTS, PARAMS, adapter=name))]
