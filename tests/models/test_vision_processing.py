"""From images and text to tokens and patches, against the processors of transformers."""

import numpy as np
import pytest

from groupax.models.families import read_config
from groupax.models.vision.processing import load_image_processor, process_images

from .vision_models import PLACE, a_tokenizer, an_image, an_image_processor, config_of, pixels_of, two_layers

pytest.importorskip("PIL.Image")

FAMILIES = ["smolvlm", "gemma3", "qwen3_vl"]
SIZES = [(37, 61), (16, 16), (90, 21), (64, 64)]


def a_processor(family, folder):
    tokenizer = a_tokenizer(family)
    an_image_processor(family, splits=True).save_pretrained(folder)
    return load_image_processor(folder, read_config(two_layers(family, tokenizer)).vision, tokenizer), tokenizer


def random_images(*sizes):
    return [an_image(number, size) for number, size in enumerate(sizes)]


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_whose_placeholders_and_images_differ_in_number_are_refused(tmp_path, family):
    processor, tokenizer = a_processor(family, tmp_path)
    with pytest.raises(ValueError, match=r"the text has 0 placeholders .* for 1 images"):
        process_images(processor, tokenizer, "none", random_images((16, 16)))
    with pytest.raises(ValueError, match=r"the text has 2 placeholders .* for 1 images"):
        process_images(processor, tokenizer, 2 * PLACE[family], random_images((16, 16)))


def test_a_token_for_a_feature_in_the_text_is_refused(tmp_path):
    processor, tokenizer = a_processor("gemma3", tmp_path)
    with pytest.raises(ValueError, match=r"the prompt has 5 image tokens .* have 4 features"):
        process_images(processor, tokenizer, "<start_of_image> <image_soft_token>", random_images((16, 16)))


def test_folders_that_do_not_say_how_images_are_processed_are_refused(tmp_path):
    processor, tokenizer = a_processor("gemma3", tmp_path)
    with pytest.raises(ValueError, match=r"has no preprocessor_config\.json"):
        load_image_processor(tmp_path / "other", processor.config, tokenizer)
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"width": -1, "what": []}}')
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_image_processor(tmp_path, processor.config, tokenizer)
    (tmp_path / "preprocessor_config.json").write_text('{"do_pan_and_scan": true}')
    with pytest.raises(ValueError, match="groupax shows it whole"):
        load_image_processor(tmp_path, processor.config, tokenizer)
    (tmp_path / "processor_config.json").write_text('{"image_processor": "no"}')
    with pytest.raises(ValueError, match="it must be an object"):
        load_image_processor(tmp_path, processor.config, tokenizer)


def their_processor(family, tokenizer):
    from transformers import Gemma3Processor, Idefics3Processor

    image_processor = an_image_processor(family, splits=True)
    if family == "smolvlm":
        return Idefics3Processor(image_processor, tokenizer, image_seq_len=4)
    return Gemma3Processor(image_processor, tokenizer, image_seq_length=4)


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("family", ["smolvlm", "gemma3"])
def test_tokens_and_pixels_are_those_of_transformers(tmp_path, family):
    processor, tokenizer = a_processor(family, tmp_path)
    images = random_images(*SIZES)
    text = "x".join([*[PLACE[family]] * len(images), " end"])
    tokens, placed = process_images(processor, tokenizer, text, images)
    theirs = their_processor(family, tokenizer)(images=[images], text=[text], return_tensors="np")
    np.testing.assert_array_equal(tokens, theirs["input_ids"][0])
    pixels = theirs["pixel_values"].reshape(-1, *theirs["pixel_values"].shape[-3:])
    np.testing.assert_array_equal(np.concatenate([pixels_of(processor.config, each) for each in placed.images]), pixels)


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("family", "name"), [("qwen2_vl", "Qwen2VL"), ("qwen2_5_vl", "Qwen2_5_VL"), ("qwen3_vl", "Qwen3VL")]
)
def test_patches_and_positions_are_those_of_transformers_qwen(tmp_path, family, name):
    import torch
    import transformers

    processor, tokenizer = a_processor(family, tmp_path)
    images = random_images(*SIZES)
    tokens, placed = process_images(processor, tokenizer, "x".join([*[PLACE[family]] * 4, " end"]), images)
    theirs = processor.processor(images, return_tensors="np")
    np.testing.assert_array_equal(np.concatenate([each.patches[0] for each in placed.images]), theirs["pixel_values"])
    hf = config_of(family, {}, {}, {})
    settings = {key: value for key, value in hf.items() if key != "model_type"}
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**settings))
    types = torch.tensor(tokens == processor.config.image_token_id)[None].int()
    positions, offset = model.get_rope_index(
        torch.tensor(tokens)[None], types, torch.tensor(theirs["image_grid_thw"]), None
    )
    np.testing.assert_array_equal(placed.positions, positions[:, 0])
    assert placed.position_offset == int(offset)
