"""Reading of the parts that see images from `config.json`."""

import warnings
from collections.abc import Mapping
from typing import Any, get_args

from groupax.models.vision.config import TowerActivation, TowerConfig
from groupax.storage.model_json import VISION, validate
from groupax.terminal.printable import short_repr

# Keys of a `vision_config` that do not affect the forward pass.
_METADATA = frozenset(
    [
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "dtype",
        "initializer_range",
        "max_image_size",  # of the image processor, in older files
        "model_type",
        "size",  # likewise
        "torch_dtype",
        "transformers_version",
    ]
)
# Keys of a `vision_config` of SigLIP.
SIGLIP_KEYS = frozenset(
    [
        "hidden_act",
        "hidden_size",
        "image_size",
        "intermediate_size",
        "layer_norm_eps",
        "num_attention_heads",
        "num_channels",
        "num_hidden_layers",
        "patch_size",
    ]
)


def vision_settings(
    hf: Mapping[str, Any], kinds: tuple[str, ...], reads: frozenset[str], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the `vision_config` of a parsed `config.json`, checked and with the family's defaults.

    Args:
        hf: Parsed `config.json`.
        kinds: Values that its `model_type` may have.
        reads: Keys that the family interprets.
        defaults: Values of keys that are missing.

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
    unknown = sorted(
        key for key, value in settings.items() if key not in reads | _METADATA and value not in (None, False)
    )
    if unknown:
        warnings.warn(
            f"vision_config of config.json has keys that groupax does not know and ignores: {short_repr(unknown)}",
            stacklevel=5,
        )
    own = {key: value for key, value in settings.items() if value is not None}
    return {**defaults, **validate(own, VISION, "vision_config of config.json")}


def siglip_tower(settings: Mapping[str, Any], **overrides: Any) -> TowerConfig:
    """Returns a tower of SigLIP (arXiv:2303.15343): norms before each block, one learned position per patch."""
    return check_tower(
        TowerConfig(
            hidden_size=settings["hidden_size"],
            ffn_size=settings["intermediate_size"],
            num_layers=settings["num_hidden_layers"],
            num_heads=settings["num_attention_heads"],
            channels=settings["num_channels"],
            patch_size=settings["patch_size"],
            positions_per_side=settings["image_size"] // settings["patch_size"],
            norm_eps=settings["layer_norm_eps"],
            activation=activation_of(settings),
            **overrides,
        )
    )


def activation_of(settings: Mapping[str, Any]) -> TowerActivation:
    """Returns the activation of a `vision_config`.

    Raises:
        ValueError: It is not supported.
    """
    activation = settings["hidden_act"]
    if activation not in get_args(TowerActivation):
        supported = ", ".join(get_args(TowerActivation))
        raise ValueError(f"vision_config has hidden_act={short_repr(activation)}; supported are {supported}")
    return activation


def check_tower(tower: TowerConfig) -> TowerConfig:
    """Returns a tower after checking its sizes.

    Raises:
        ValueError: They do not fit together.
    """
    if tower.hidden_size % tower.num_heads:
        raise ValueError(
            f"vision_config has hidden_size={tower.hidden_size}, which {tower.num_heads} heads do not divide"
        )
    if tower.positions_per_side < 1:
        raise ValueError(f"vision_config has patches of {tower.patch_size} pixels, larger than an image")
    return tower
