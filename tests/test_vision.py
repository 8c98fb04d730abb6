"""Models that see images: placement of features, towers and decoders against transformers, folders, adapters."""

import numpy as np
import pytest

from groupax.models.families import read_config
from groupax.models.vision.placement import image_blocks, make_image, place_images

TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
SIGLIP = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 16,
    "patch_size": 4,
}
IMAGE = 95
QWEN = {
    "model_type": "qwen3_vl",
    "text_config": {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "vision_config": {
        "depth": 3,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_heads": 3,
        "patch_size": 4,
        "out_hidden_size": 32,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 2],
    },
    "image_token_id": IMAGE,
    "video_token_id": 94,
}


def a_qwen_image(seed=0, grid=(4, 6)):
    patches = np.random.default_rng(seed).normal(size=(1, grid[0] * grid[1], 96))
    return make_image(patches, grid)


def test_the_tokens_of_an_image_have_positions_in_a_grid_and_later_text_continues_after_its_longer_side():
    config = read_config(QWEN).vision
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
    config = read_config(QWEN).vision
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
    digests.add(make_image(patches, (4, 6), np.arange(24)[None] < 20).digest)
    assert len(digests) == 4
    assert make_image(patches, (4, 6), np.ones((1, 24), bool)).digest in digests


def test_neighbouring_image_tokens_are_one_block():
    np.testing.assert_array_equal(image_blocks(np.array([-1, 0, 1, -1, 2, -1, -1])), [-1, 0, 0, -1, 1, -1, -1])
    assert image_blocks(np.array([], int)).shape == (0,)
