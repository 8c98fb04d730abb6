"""Weights of 4 bits in checkpoints of gpt-oss (mxfp4)."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from groupax import init_model, load_model, save_model
from groupax.models.weights.mxfp4 import dequantize
from tests.conftest import one_device_mesh

HF = {
    "model_type": "gpt_oss",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "sliding_window": 8,
}


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
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.layers.0.mlp.experts.down_proj_scales"), "no scales"),
        (
            lambda tensors: tensors.update(
                {"model.layers.0.mlp.experts.down_proj_scales": np.full((3, 64, 1), 255, np.uint8)}
            ),
            "infinite or NaN",
        ),
        (
            lambda tensors: tensors.update(
                {"model.layers.0.mlp.experts.down_proj_blocks": np.zeros((3, 64, 1, 8), np.uint8)}
            ),
            r"need \[E, O, G, 16\]",
        ),
    ],
)
def test_damaged_weights_of_4_bits_are_refused(tmp_path, change, message):
    quantized_folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
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
