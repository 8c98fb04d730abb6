"""Layers as a loop: what it gives is what they give one by one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from groupax import init_model
from groupax.models.decoder import PassOptions, forward
from groupax.models.execution import DIRECT, execution_for
from groupax.models.families import read_config
from groupax.models.lora import LoRAConfig
from groupax.models.weights.checkpoint import add_adapter
from tests.conftest import TINY, assert_trees_match, one_device_mesh
from tests.parallel.test_mesh import after_updates

# a first layer that is dense, and windows that alternate; a last layer that is odd
MIXTURE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 5,
    "mlp_only_layers": [0],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "router_aux_loss_coef": 0.5,
}
SLIDING, FULL = "sliding_attention", "full_attention"
ALTERNATING = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, SLIDING],
    "sliding_window": 4,
    "query_pre_attn_scalar": 8,
}


@pytest.mark.parametrize(("change", "compiled"), [(ALTERNATING, 4), (MIXTURE, 2)], ids=["windows", "experts"])
def test_alike_layers_are_compiled_once(change, compiled):
    config = read_config({**TINY, **change})
    params = jax.eval_shape(lambda: init_model({**TINY, **change}, mesh=one_device_mesh()).params)

    def layers_in(execution):
        def states(params):
            tokens = jnp.arange(5)
            return forward(
                config, params, tokens, tokens, lambda attn, cache, q, k, v: (q, cache), options=PassOptions(execution)
            )

        return str(jax.make_jaxpr(lambda params: states(params).hidden)(params)).count("name=layer")

    assert layers_in(DIRECT) == config.num_layers
    assert layers_in(execution_for("cpu", "none", scan_layers=True)) == compiled


@pytest.mark.drawn(1)
@pytest.mark.heavy
@pytest.mark.optimized
@pytest.mark.parametrize(
    ("change", "scale", "settings"),
    [(ALTERNATING, 32, {"gradient_checkpointing": "full"}), (MIXTURE, 4, {"share_prefix": "never"})],
    ids=["windows", "experts"],
)
def test_a_loop_gives_the_gradients_of_single_layers(change, scale, settings):
    # Small weights give small outputs of attention, and the norm behind them multiplies rounding: at a scale of 4 the
    # last bits of the weights alone moved the windows' gradient by 1.4e-5.
    model = init_model({**TINY, **change}, mesh=one_device_mesh())
    model = replace(model, params=jax.tree.map(lambda x: scale * x if x.ndim > 1 else x, model.params))
    assert_same(model, **settings)


@pytest.mark.long
def test_of_adapters_too_with_the_same_inputs_left_out():
    lora = LoRAConfig(r=4, lora_alpha=8, lora_dropout=0.3, modules_to_save=["norm"])
    model = add_adapter(init_model({**TINY, "num_hidden_layers": 4}, mesh=one_device_mesh()), lora)
    ones = jax.tree.map(lambda x: x + 0.1, model.adapter.trained)
    assert_same(replace(model, adapter=replace(model.adapter, trained=ones)))


def assert_same(model, **settings):
    direct, of_direct = after_updates(model, **settings)
    scanned, of_scanned = after_updates(model, scan_layers=True, **settings)
    assert of_scanned["grad_norm"] == pytest.approx(of_direct["grad_norm"], rel=1e-5)
    assert_trees_match(*(learner.state.params for learner in (direct, scanned)), atol=5e-6, rtol=0)
