"""The part of Gemma 3 that sees images."""

from collections.abc import Mapping
from typing import Any

from groupax.models.families.vision import SIGLIP_KEYS, siglip_tower, vision_settings
from groupax.models.vision.config import AveragePool, VisionConfig

# Values that a file may leave out.
_TOWER = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "vision_use_head": True,
}


def read_vision(hf: Mapping[str, Any]) -> VisionConfig:
    """Reads SigLIP over a whole image, and a projector from averages of squares of patches (arXiv:2503.19786)."""
    settings = vision_settings(hf, ("siglip_vision_model",), SIGLIP_KEYS | {"vision_use_head"}, _TOWER)
    tower = siglip_tower(settings, has_head=settings["vision_use_head"])
    features = hf.get("mm_tokens_per_image", 256)
    side, patches = int(features**0.5), tower.positions_per_side
    if side < 1 or side**2 != features or patches % side:
        raise ValueError(
            f"config.json has mm_tokens_per_image={features}; groupax supports squares of numbers that divide the "
            f"{patches} patches along a side of an image"
        )
    image_token = hf.get("image_token_index", hf.get("image_token_id", 262144))
    return VisionConfig(
        tower=tower,
        projector=AveragePool(patches // side, tower.norm_eps),
        image_token_id=image_token,
        placeholder_ids=(image_token,),
        text_prefix="model.language_model.",
        sees_whole_images=True,
    )
