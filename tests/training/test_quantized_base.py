"""A base in fewer bits, and checkpoints that have it: gradients pass it, and adapters learn on it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from groupax import LoRAConfig, add_adapter, init_model, load_model, save_model
from groupax.models.layers import linear
from groupax.models.weights.casts import dense, is_quantized
from groupax.models.weights.checkpoint import reshard
from groupax.models.weights.mxfp4 import dequantize
from groupax.models.weights.nf4 import Nf4, nf4_bytes, quantization_config, quantize_nf4
from groupax.parallel.mesh import make_mesh
from tests.conftest import TINY, assert_trees_match, one_device_mesh
from tests.models.test_lora import a_base, all_logits, leaves, trained_randomly

from .test_trainer import a_trainer, lines_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized") / "model"
    return save_model(a_base(), folder)


def test_weights_in_fewer_bits_are_not_put_on_a_mesh_that_would_split_them(saved):
    model = load_model(saved, weights="nf4", mesh=make_mesh((4, 1, 1, 1, 1)))
    with pytest.raises(ValueError, match="quantized weights are replicated and cannot be sharded"):
        reshard(model, make_mesh((2, 1, 1, 2, 1)))


@pytest.mark.parametrize("shape", [(64, 172), (5, 26), (1, 2), (512, 1024)])
def test_4_bits_take_about_half_a_byte(shape):
    quantized = quantize_nf4(jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32))
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(quantized))
    assert num_bytes == nf4_bytes(shape)
    assert quantized.shape == shape
    if shape[0] > 8:
        assert num_bytes / np.prod(shape) <= 0.57
    with pytest.raises(ValueError, match="5 x 3 cannot be packed into 4 bits: it has an odd number of columns"):
        quantize_nf4(jnp.zeros((5, 3)))


@pytest.mark.heavy
def test_products_and_their_gradients_are_those_of_the_numbers():
    rng = np.random.default_rng(0)
    weight, x, y = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((24, 64), (7, 64), (7, 24)))
    quantized = quantize_nf4(weight)
    numbers = dense(quantized, jnp.float32)
    assert 0 < np.abs(numbers - weight).max() < 0.5

    def loss(x, weight):
        return jnp.sum(linear(x, weight) * y)

    np.testing.assert_allclose(linear(x, quantized), linear(x, numbers), atol=1e-4)
    np.testing.assert_allclose(jax.grad(loss)(x, quantized), jax.grad(loss)(x, numbers), atol=1e-4)


def test_the_backward_pass_makes_the_numbers_again():
    """16 layers of 512 x 512, compiled and not run: their numbers are 17 MB, their bits 2 MB."""
    quantized = jax.eval_shape(quantize_nf4, jax.ShapeDtypeStruct((512, 512), jnp.float32))

    def loss(x, layers):
        for weight in layers:
            x = jnp.tanh(linear(x, weight))
        return jnp.sum(x)

    x = jax.ShapeDtypeStruct((8, 512), jnp.float32)
    memory = jax.jit(jax.grad(loss)).lower(x, [quantized] * 16).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 6e6


@pytest.mark.heavy
def test_4_bits_on_disk(saved, tmp_path):
    model = load_model(saved, weights="nf4")
    save_model(load_model(saved), tmp_path / "nf4", weights="nf4")
    again = load_model(tmp_path / "nf4")
    assert isinstance(again.params["layers"][0]["q"], Nf4)
    assert_trees_match(leaves(model.params), leaves(again.params))
    save_model(again, tmp_path / "numbers")
    np.testing.assert_allclose(all_logits(load_model(tmp_path / "numbers")), all_logits(model), atol=1e-5)
    config = json.loads((tmp_path / "nf4" / "config.json").read_text())
    config["quantization_config"] |= {"bnb_4bit_quant_type": "fp4"}
    (tmp_path / "nf4" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quantized"):
        load_model(tmp_path / "nf4")
    assert quantization_config("bfloat16")["bnb_4bit_compute_dtype"] == "bfloat16"


@pytest.mark.drawn(2, "learns")
@pytest.mark.heavy
def test_an_adapter_learns_on_a_quantized_base(saved, tmp_path):
    settings = {"lora_r": 8, "learning_rate": 1e-2, "max_steps": 24, "base_weights": "nf4", "beta": 1e-3}
    trainer = a_trainer(tmp_path, model=str(saved), **settings)
    before = leaves(trainer.learner.frozen)
    trainer.train()
    lines = lines_of(tmp_path)
    assert lines[0]["reward"] < 0.3
    assert lines[-1]["reward"] > 0.7
    assert_trees_match(before, leaves(trainer.learner.frozen))
    assert is_quantized(trainer.engine.params["layers"][0]["q"].base), "rollouts decode what is trained"
    assert max(line["rollout/logp_diff_max"] for line in lines) < 1e-5


def test_a_quantized_model_is_not_trained_whole(saved, tmp_path):
    with pytest.raises(ValueError, match="quantized and cannot be trained; train an adapter"):
        a_trainer(tmp_path, model=load_model(saved, weights="nf4"))


@pytest.mark.heavy
def test_an_adapter_on_4_bits_is_merged_into_their_numbers(saved, tmp_path):
    base = load_model(saved, weights="nf4")
    model = trained_randomly(add_adapter(base, LoRAConfig(r=4, modules_to_save=("mlp.up_proj",))))
    assert model.params["layers"][0]["up"].dtype == jnp.float32
    merged = load_model(save_model(model, tmp_path / "merged"))
    np.testing.assert_allclose(all_logits(merged), all_logits(model), atol=1e-5)


# -- checkpoints of gpt-oss


HF = {**TINY, "model_type": "gpt_oss", "hidden_size": 64, "head_dim": 8, "intermediate_size": 32, "sliding_window": 8}
HF |= {"num_local_experts": 3, "num_experts_per_tok": 2, "tie_word_embeddings": False}


def quantized_folder(folder, scales=(118, 128)):
    """A folder with random weights, those of experts as blocks and scales, and these by their names."""
    save_model(init_model(HF, mesh=one_device_mesh()), folder)
    rng, stored = np.random.default_rng(0), load_file(folder / "model.safetensors")
    quantized = {}
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        E, D, F = stored.pop(name).shape
        quantized[f"{name}_blocks"] = rng.integers(0, 256, (E, F, D // 32, 16)).astype(np.uint8)
        quantized[f"{name}_scales"] = rng.integers(*scales, (E, F, D // 32)).astype(np.uint8)
    save_file({**stored, **quantized}, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(settings))
    return quantized


@pytest.mark.heavy
def test_weights_of_4_bits_are_dequantized_as_they_are_read(tmp_path):
    quantized = quantized_folder(tmp_path / "quantized")
    model = load_model(tmp_path / "quantized", mesh=one_device_mesh())
    assert "quantization_config" not in model.hf_config
    for index, layer in enumerate(model.params["layers"]):
        name = f"model.layers.{index}.mlp.experts"
        both, down = (
            dequantize(quantized[f"{name}.{own}_blocks"], quantized[f"{name}.{own}_scales"])
            for own in ("gate_up_proj", "down_proj")
        )
        np.testing.assert_array_equal(layer["expert_gate"], both[:, 0::2])
        np.testing.assert_array_equal(layer["expert_up"], both[:, 1::2])
        np.testing.assert_array_equal(layer["expert_down"], down)
    save_model(model, tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    stored = saved["model.layers.1.mlp.experts.gate_up_proj"]
    assert stored.shape == (3, 64, 64)
    np.testing.assert_array_equal(stored[:, :, 1::2].swapaxes(1, 2), model.params["layers"][1]["expert_up"])


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("part", "damaged", "message"),
    [
        ("scales", None, "no scales"),
        ("scales", np.full((3, 64, 1), 255, np.uint8), "infinite or NaN"),
        ("blocks", np.zeros((3, 64, 1, 8), np.uint8), r"need \[E, O, G, 16\]"),
    ],
)
def test_damaged_weights_of_4_bits_are_refused(tmp_path, part, damaged, message):
    quantized_folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name := f"model.layers.0.mlp.experts.down_proj_{part}"]
    tensors |= {} if damaged is None else {name: damaged}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path, mesh=one_device_mesh())


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_random_blocks_are_what_transformers_makes_of_them():
    torch = pytest.importorskip("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (3, 6, 4, 16)).astype(np.uint8)
    scales = rng.integers(0, 252, (3, 6, 4)).astype(np.uint8)
    theirs = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales)).float().numpy()
    np.testing.assert_array_equal(dequantize(blocks, scales).astype(np.float32).swapaxes(1, 2), theirs)
