"""Reading of the parts that see images from `config.json`; those of Idefics 3 and SmolVLM are here."""

import warnings
from collections.abc import Mapping
from typing import Any, get_args

from groupax.core.storage.model_json import VISION, validate
from groupax.core.terminal.printable import short_repr
from groupax.models.vision.config import PixelShuffle, TowerActivation, TowerConfig, VisionConfig

# Keys of a `vision_config` that do not affect the forward pass; older files have some that no model reads.
_METADATA = (
    "_name_or_path architectures attention_dropout dtype in_chans initializer_range max_image_size model_type size "
    "spatial_patch_size tokens_per_second torch_dtype transformers_version"
)
# Values of SigLIP that a file may leave out; families add others.
SIGLIP = {
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_channels": 3,
    "image_size": 224,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


def read_idefics3_vision(hf: Mapping[str, Any]) -> VisionConfig:
    """Reads the part that sees images: SigLIP over each tile of an image, and a pixel shuffle (arXiv:2408.12637)."""
    kinds = ("idefics3_vision", "smolvlm_vision", "idefics3", "smolvlm", "siglip_vision_model")
    defaults = {**SIGLIP, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
    image_token = hf.get("image_token_id", 128257)
    return VisionConfig(
        tower=siglip_tower(vision_settings(hf, kinds, defaults)),
        projector=PixelShuffle(hf.get("scale_factor", 2)),
        image_token_id=image_token,
        placeholder_ids=(image_token,),
        names="idefics3",
        text_prefix="model.text_model.",
    )


def vision_settings(hf: Mapping[str, Any], kinds: tuple[str, ...], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `vision_config` of a parsed `config.json`, checked and with the family's defaults.

    Args:
        kinds: Values that its `model_type` may have.
        defaults: The keys that the family interprets, with the values of those that are missing.

    Raises:
        ValueError: There is none, it is of another kind, or a value is not of its key's kind.
    """
    settings = hf.get("vision_config")
    if not isinstance(settings, Mapping):
        raise ValueError(f"vision_config of config.json is {short_repr(settings)}; it must be an object")
    kind = settings.get("model_type", kinds[0])
    if kind not in kinds:
        raise ValueError(
            f"vision_config of config.json has model_type={short_repr(kind)}; supported in a {hf['model_type']} model "
            f"are {', '.join(kinds)}"
        )
    own = {key: value for key, value in settings.items() if value is not None}
    unknown = sorted(
        key for key, value in own.items() if key not in {*defaults, *_METADATA.split()} and value not in (None, False)
    )
    if unknown:
        warnings.warn(
            f"vision_config of config.json has keys that groupax does not know and ignores: {short_repr(unknown)}",
            stacklevel=5,
        )
    return {**defaults, **validate(own, VISION, "vision_config of config.json")}


def siglip_tower(settings: Mapping[str, Any]) -> TowerConfig:
    """Returns a tower of SigLIP (arXiv:2303.15343): norms before each block, one learned position per patch."""
    return TowerConfig(
        hidden_size=settings["hidden_size"],
        ffn_size=settings["intermediate_size"],
        num_layers=settings["num_hidden_layers"],
        num_heads=settings["num_attention_heads"],
        channels=settings["num_channels"],
        patch_size=settings["patch_size"],
        positions_per_side=settings["image_size"] // settings["patch_size"],
        norm_eps=settings["layer_norm_eps"],
        activation=tower_activation(settings),
    )


def tower_activation(settings: Mapping[str, Any]) -> TowerActivation:
    """Returns the activation of a `vision_config`.

    Raises:
        ValueError: It is not supported.
    """
    activation = settings["hidden_act"]
    if activation not in get_args(TowerActivation):
        supported = ", ".join(get_args(TowerActivation))
        raise ValueError(f"vision_config has hidden_act={short_repr(activation)}; supported are {supported}")
    return activation
