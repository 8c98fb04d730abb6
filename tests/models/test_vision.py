"""Models that see images: placement of features, towers and decoders against transformers, folders, adapters."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from groupax import LoRAConfig, add_adapter, init_model, load_model, save_adapter, save_model
from groupax.models.families import VISION_FAMILIES, read_config
from groupax.models.vision.placement import make_image, place_images
from groupax.models.vision.tower import batch_images
from tests.conftest import assert_trees_match

from .test_lora import trained_randomly
from .vision_models import (
    IMAGE,
    config_of,
    our_logits,
    random_prompts,
    torch_logits,
    torch_model,
)

# Changes of the text part, of the part that sees images, and of the whole; and the side of tiles in pixels.
CASES = [
    ("smolvlm", {}, {}, {}, None),
    ("smolvlm", {"attention_bias": True}, {"image_size": 76, "num_hidden_layers": 1}, {"scale_factor": 1}, None),
    ("smolvlm", {"num_key_value_heads": 1}, {"image_size": 25, "hidden_act": "gelu"}, {"scale_factor": 3}, 12),
    ("idefics3", {"head_dim": 16}, {"num_channels": 1, "layer_norm_eps": 1e-2}, {"tie_word_embeddings": True}, None),
    ("idefics3", {"num_hidden_layers": 1, "mlp_bias": True}, {"patch_size": 7, "image_size": 44}, {}, 14),
    ("gemma3", {"sliding_window": 3}, {}, {}, None),
    ("gemma3", {"sliding_window": 64}, {}, {"tie_word_embeddings": False}, None),
    (
        "gemma3",
        {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"image_size": 36, "layer_norm_eps": 1e-2},
        {"mm_tokens_per_image": 9},
        None,
    ),
    ("gemma3", {"query_pre_attn_scalar": 8, "attention_bias": True}, {}, {"mm_tokens_per_image": 1}, None),
    ("qwen2_5_vl", {}, {}, {}, None),
    ("qwen2_5_vl", {"tie_word_embeddings": True}, {"window_size": 8, "fullatt_block_indexes": []}, {}, None),
    (
        "qwen2_5_vl",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mrope_section": [2, 1, 1]}},
        {"spatial_merge_size": 3, "window_size": 30, "hidden_act": "gelu"},
        {},
        None,
    ),
    (
        "qwen2_5_vl",
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
        {"spatial_merge_size": 1, "temporal_patch_size": 1},
        {},
        None,
    ),
    ("qwen2_5_vl", {"num_key_value_heads": 4, "rms_norm_eps": 1e-2}, {"in_channels": 1, "num_heads": 1}, {}, None),
    ("qwen2_vl", {}, {}, {}, None),
    (
        "qwen2_vl",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [1, 1, 2]}},
        {"spatial_merge_size": 3, "temporal_patch_size": 1},
        {"tie_word_embeddings": True},
        None,
    ),
    (
        "qwen2_vl",
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"num_hidden_layers": 4},
        {"hidden_act": "silu", "mlp_ratio": 1},
        {},
        None,
    ),
    ("qwen2_vl", {"num_key_value_heads": 1}, {"hidden_act": "gelu_pytorch_tanh", "num_heads": 6}, {}, None),
    ("qwen2_vl", {"num_hidden_layers": 1}, {"spatial_merge_size": 1, "depth": 1}, {}, None),
    ("qwen3_vl", {}, {}, {}, None),
    ("qwen3_vl", {"attention_bias": True}, {"deepstack_visual_indexes": []}, {"tie_word_embeddings": True}, None),
    (
        "qwen3_vl",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [1, 4, 4]}},
        {"spatial_merge_size": 3, "temporal_patch_size": 1, "num_position_embeddings": 4},
        {},
        None,
    ),
    ("qwen3_vl", {"head_dim": 16}, {"spatial_merge_size": 1, "deepstack_visual_indexes": [0, 1, 2]}, {}, None),
    ("qwen3_vl_moe", {}, {}, {}, None),
    ("qwen3_vl_moe", {"mlp_only_layers": [1]}, {"deepstack_visual_indexes": []}, {"tie_word_embeddings": True}, None),
    ("qwen3_vl_moe", {"decoder_sparse_step": 2, "attention_bias": True}, {"spatial_merge_size": 1}, {}, None),
    ("qwen3_5", {}, {}, {}, None),
    (
        "qwen3_5",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [1, 4, 4]},
            "partial_rotary_factor": 1.0,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
        },
        {"spatial_merge_size": 3, "temporal_patch_size": 1, "num_position_embeddings": 4},
        {},
        None,
    ),
    (
        "qwen3_5",
        {"num_hidden_layers": 2, "full_attention_interval": 2, "layer_types": None},
        {"num_heads": 2},
        {},
        None,
    ),
    ("qwen3_5_moe", {}, {}, {}, None),
    ("qwen3_5_moe", {"num_experts": 7, "num_experts_per_tok": 3}, {}, {"tie_word_embeddings": True}, None),
    ("qwen3_5_moe", {"shared_expert_intermediate_size": 9}, {"spatial_merge_size": 1}, {}, None),
]
FAMILIES = sorted(VISION_FAMILIES)


def a_qwen_image(seed=0, grid=(4, 6)):
    patches = np.random.default_rng(seed).normal(size=(1, grid[0] * grid[1], 96))
    return make_image(patches, grid)


def test_the_tokens_of_an_image_have_positions_in_a_grid_and_later_text_continues_after_its_longer_side():
    config = read_config(config_of("qwen3_vl", {}, {}, {})).vision
    tokens = np.array([5, *[IMAGE] * 6, 6, *[IMAGE] * 2, 7, 8])
    placed = place_images(config, tokens, [a_qwen_image(), a_qwen_image(1, (2, 4))])
    np.testing.assert_array_equal(placed.feature_index, [-1, 0, 1, 2, 3, 4, 5, -1, 6, 7, -1, -1])
    np.testing.assert_array_equal(
        placed.positions,
        [
            [0, 1, 1, 1, 1, 1, 1, 4, 5, 5, 7, 8],
            [0, 1, 1, 1, 2, 2, 2, 4, 5, 5, 7, 8],
            [0, 1, 2, 3, 1, 2, 3, 4, 5, 6, 7, 8],
        ],
    )
    assert placed.position_offset == 9 - len(tokens)


def test_a_prompt_whose_image_tokens_do_not_fit_its_images_is_refused_with_the_numbers():
    config = read_config(config_of("qwen3_vl", {}, {}, {})).vision
    with pytest.raises(ValueError, match=r"has 5 image tokens \(95\), but its 1 images have 6 features \(6\)"):
        place_images(config, np.array([1, *[IMAGE] * 5, 2]), [a_qwen_image()])
    with pytest.raises(ValueError, match=r"has 1 image tokens .* its 0 images have 0 features"):
        place_images(config, np.array([1, IMAGE]), [])
    with pytest.raises(ValueError, match="of image 0 of the prompt are not next to each other"):
        place_images(config, np.array([*[IMAGE] * 3, 1, *[IMAGE] * 3]), [a_qwen_image()])


def test_images_are_told_apart_by_their_pixels_and_grid():
    patches = np.random.default_rng(0).normal(size=(1, 24, 96))
    digests = {make_image(patches, (4, 6)).digest, make_image(patches, (6, 4)).digest}
    digests.add(make_image(patches + 1e-3, (4, 6)).digest)
    assert len(digests) == 3


# -- features


def test_images_that_do_not_fit_a_model_are_refused():
    config = read_config(config_of("smolvlm", {}, {}, {})).vision
    with pytest.raises(ValueError, match="no images to encode"):
        batch_images(config, [])
    with pytest.raises(ValueError, match="larger than the model's table of 4 x 4 positions"):
        batch_images(config, [make_image(np.zeros((1, 36, 48)), (6, 6))])
    with pytest.raises(ValueError, match="24 patches of 96 values in 4 rows and 6 columns does not fit"):
        batch_images(config, [a_qwen_image()])


@pytest.mark.parametrize(
    ("family", "vision", "whole", "message"),
    [
        ("gemma3", {}, {"mm_tokens_per_image": 5}, "mm_tokens_per_image=5; groupax supports squares"),
        ("gemma3", {"vision_use_head": None}, {}, "vision_use_head=true, as it does without this key"),
        ("gemma3", {"hidden_act": "relu"}, {}, "hidden_act='relu'; supported are gelu, gelu_pytorch_tanh"),
        ("smolvlm", {"model_type": "clip"}, {}, "model_type='clip'; supported in a smolvlm model are"),
        ("smolvlm", {"num_attention_heads": 5}, {}, "hidden_size=24, which 5 heads do not divide"),
        ("smolvlm", {"image_size": [16, 32]}, {}, "image_size=\\[16, 32\\]; it must be a whole number"),
        ("smolvlm", {"patch_size": 17}, {}, "patches of 17 pixels, larger than an image"),
        ("smolvlm", {}, {"vision_config": 3}, "vision_config=3; it must be an object"),
        ("qwen2_5_vl", {"window_size": 7}, {}, "window_size=7; it must be at least 8, the pixels along a side"),
        ("qwen3_vl", {"deepstack_visual_indexes": [2, 0]}, {}, "must be increasing layers below its depth of 3"),
        ("qwen3_vl", {"num_position_embeddings": 24}, {}, "supports only squares"),
        ("qwen3_vl", {"rope_parameters": {"rope_type": "yarn"}}, {}, "supports only 'axial'"),
        (
            "qwen3_5",
            {"deepstack_visual_indexes": [1]},
            {},
            r"deepstack_visual_indexes=\[1\]; models of qwen3_5 have none",
        ),
        ("qwen3_vl", {"depth": 9, "deepstack_visual_indexes": [0, 1, 2, 3]}, {}, "to 4 layers of the decoder, which"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(family, vision, whole, message):
    with pytest.raises(ValueError, match=message):
        read_config(config_of(family, {}, vision, whole))


def test_sections_of_qwen_2_vl_must_have_all_pairs_of_a_head():
    rope = {"rope_type": "default", "mrope_section": [2, 1, 2]}
    with pytest.raises(
        ValueError, match=r"mrope_section=\[2, 1, 2\]; it must have three numbers that add up to 4, half"
    ):
        read_config(config_of("qwen2_vl", {"rope_parameters": rope}, {}, {}))


# -- released checkpoints


@pytest.mark.parametrize("is_tied", [True, False])
def test_released_files_of_qwen_2_5_vl_have_the_keys_of_the_text_part_at_the_top(is_tied):
    nested = config_of("qwen2_5_vl", {"rope_parameters": None}, {}, {"tie_word_embeddings": is_tied})
    rope = {"type": "mrope", "mrope_section": [2, 1, 1]}
    text, tower = {**nested["text_config"], "rope_theta": 1e6, "rope_scaling": rope}, nested["vision_config"]
    older = {"in_chans": 3, "spatial_patch_size": 4, "tokens_per_second": 2}
    nested["text_config"] = text
    ids = {"vision_start_token_id": 90, "vision_end_token_id": 91, "vision_token_id": 92}
    flat = {**text, **nested, "vision_config": {**tower, **older}, **ids}
    del flat["text_config"]
    assert read_config(flat) == read_config(nested)
    # transformers 4 says in the text part whether the head is tied
    config = read_config(nested)
    del nested["tie_word_embeddings"]
    assert read_config({**nested, "text_config": {**text, "tie_word_embeddings": is_tied}}) == config


@pytest.mark.drawn(1)
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_5_moe_text"])
def test_released_mixtures_of_qwen_3_5_have_stacked_experts_and_layers_that_predict_ahead(tmp_path, caplog, family):
    hf = config_of("qwen3_5_moe", {}, {}, {})
    hf = {**hf["text_config"], "model_type": family} if family.endswith("text") else hf
    model = init_model(hf, seed=1)
    tensors = load_file(save_model(model, tmp_path / "single") / "model.safetensors")
    released = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    released["mtp.norm.weight"] = np.ones(3)
    for layer in range(3):
        prefix = f"{model.config.prefix}layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([tensors[f"{prefix}.{expert}.{part}_proj.weight"] for expert in range(4)])
            for part in ("gate", "up", "down")
        )
        released |= {f"{prefix}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{prefix}.down_proj": down}
    text = hf.get("text_config", hf)
    text["mtp_num_hidden_layers"] = 1
    again = load_released(tmp_path / "released", hf, released)
    assert "1 of its" in caplog.text
    assert again.hf_config.get("text_config", again.hf_config)["mtp_num_hidden_layers"] == 0
    assert_same_weights(model, again)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("ffn_size", [24, 32, 16])
def test_experts_of_qwen_3_vl_are_read_in_either_order_and_saved_in_that_of_released_models(tmp_path, ffn_size):
    hf = config_of("qwen3_vl_moe", {"moe_intermediate_size": ffn_size}, {}, {})
    model = init_model(hf, seed=1)
    tensors = load_file(save_model(model, tmp_path / "single") / "model.safetensors")
    shapes = {name.rsplit(".", 1)[1]: value.shape for name, value in tensors.items() if ".experts." in name}
    assert shapes == {"gate_up_proj": (4, 32, 2 * ffn_size), "down_proj": (4, ffn_size, 32)}
    assert_same_weights(model, load_model(tmp_path / "single"))
    other = {
        name: value.swapaxes(1, 2) if ".experts." in name and value.shape[1] != value.shape[2] else value
        for name, value in tensors.items()
    }
    assert_same_weights(model, load_released(tmp_path / "other", hf, other))


def load_released(folder, hf, tensors):
    folder.mkdir()
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf))
    return load_model(folder)


def assert_same_weights(model, other):
    assert_trees_match(model.params, other.params)


# -- against transformers, PEFT and bitsandbytes


@pytest.mark.drawn(4)
@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.filterwarnings("error:config.json keys")
@pytest.mark.parametrize(("family", "text", "vision", "whole", "side"), CASES, ids=str)
def test_logits_are_those_of_transformers(tmp_path, family, text, vision, whole, side):
    import torch
    from transformers import AutoModelForImageTextToText

    theirs = torch_model(config_of(family, text, vision, whole))
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    prompts = random_prompts(ours.config.vision, counts=(1, 4, 0, 2), side=side)
    expected = torch_logits(theirs, ours.config.vision, prompts)
    assert_trees_match(our_logits(ours, prompts), expected, atol=1e-4, rtol=0)
    save_model(ours, tmp_path / "ours")
    again, report = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert type(again) is type(theirs)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weights = again.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in theirs.state_dict().items())


ADAPTERS = [
    ("smolvlm", r".*(q_proj|vision_model.*fc1|modality_projection\.proj|out_proj)"),
    ("gemma3", ["q_proj", "down_proj"]),
    ("qwen2_5_vl", r".*(visual.*(qkv|gate_proj|mlp\.0)|layers.*down_proj)"),
    ("qwen2_vl", r".*(visual.*(fc1|attn\.proj|mlp\.2)|q_proj)"),
    ("qwen3_vl", r".*(visual.*(qkv|linear_fc2|attn\.proj)|v_proj)"),
    ("qwen3_vl", "all-linear"),
    ("qwen3_vl_moe", r".*(visual.*(qkv|linear_fc1)|o_proj)"),
    ("qwen3_5", r".*(visual.*qkv|in_proj_z|out_proj|v_proj)"),
]


@pytest.mark.drawn(1)
@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("family", "targets"), ADAPTERS, ids=str)
def test_adapters_are_those_of_peft_both_ways(tmp_path, family, targets):
    from peft import LoraConfig, PeftModel, get_peft_model

    base = torch_model(config_of(family, {}, {}, {}))
    base.save_pretrained(tmp_path / "base")
    model = trained_randomly(add_adapter(load_model(tmp_path / "base"), LoRAConfig(r=2, target_modules=targets)))
    save_adapter(model, tmp_path / "ours")
    prompts = random_prompts(model.config.vision, counts=(1, 2))
    theirs = PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    assert_trees_match(
        our_logits(model, prompts), torch_logits(theirs, model.config.vision, prompts), atol=1e-4, rtol=0
    )
    if targets == "all-linear":  # which is the whole model in PEFT
        return
    fresh = torch_model(config_of(family, {}, {}, {}))
    theirs = get_peft_model(fresh, LoraConfig(r=2, target_modules=targets, init_lora_weights="gaussian")).eval()
    for name, weight in theirs.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.2)
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_model(tmp_path / "theirs", base=tmp_path / "base")
    assert_trees_match(
        our_logits(again, prompts), torch_logits(theirs, model.config.vision, prompts), atol=1e-4, rtol=0
    )
