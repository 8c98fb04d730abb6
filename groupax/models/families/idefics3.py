"""Idefics 3 and SmolVLM."""

from collections.abc import Mapping
from typing import Any

from groupax.models.families.vision import SIGLIP_KEYS, siglip_tower, vision_settings
from groupax.models.vision.config import PixelShuffle, VisionConfig

# Values that a file may leave out.
_TOWER = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


def read_vision(hf: Mapping[str, Any]) -> VisionConfig:
    """Reads the part that sees images: SigLIP over each tile of an image, and a pixel shuffle (arXiv:2408.12637)."""
    kinds = ("idefics3_vision", "smolvlm_vision", "idefics3", "smolvlm", "siglip_vision_model")
    tower = siglip_tower(vision_settings(hf, kinds, SIGLIP_KEYS, _TOWER))
    image_token = hf.get("image_token_id", 128257)
    return VisionConfig(
        tower=tower,
        projector=PixelShuffle(hf.get("scale_factor", 2)),
        image_token_id=image_token,
        placeholder_ids=(image_token,),
        text_prefix="model.text_model.",
    )
