"""The table of the weights that see images (see `models.specs`). All of them are replicated."""

from dataclasses import dataclass
from typing import Any, Literal

from groupax.models.spec import Spec
from groupax.models.vision.config import AveragePool, PatchMerger, PixelShuffle, TowerConfig, VisionConfig


@dataclass(frozen=True)
class _Names:
    """Names of a tower's modules in a checkpoint; `out` and `fc` are within a layer."""

    prefix: str
    patch: str
    positions: str
    layers: str
    norms: tuple[str, str]
    attention: str
    out: str
    fc: tuple[str, str]


_SIGLIP = {
    "patch": "embeddings.patch_embedding",
    "positions": "embeddings.position_embedding",
    "layers": "encoder.layers",
    "norms": ("layer_norm1", "layer_norm2"),
    "attention": "self_attn",
    "out": "out_proj",
    "fc": ("mlp.fc1", "mlp.fc2"),
}
_QWEN = {
    "patch": "patch_embed.proj",
    "positions": "pos_embed",
    "layers": "blocks",
    "norms": ("norm1", "norm2"),
    "attention": "attn",
    "out": "proj",
    "fc": ("mlp.linear_fc1", "mlp.linear_fc2"),
}
_NAMES: dict[type, _Names] = {
    PixelShuffle: _Names("model.vision_model", **_SIGLIP),
    AveragePool: _Names("model.vision_tower", **_SIGLIP),
    PatchMerger: _Names("model.visual", **_QWEN),
}


_PROJECTORS: dict[type, str] = {
    PixelShuffle: "model.connector.modality_projection",
    AveragePool: "model.multi_modal_projector",
}


def vision_modules(config: VisionConfig) -> list[str]:
    """Returns the modules of a checkpoint whose weights see images."""
    projector = _PROJECTORS.get(type(config.projector))  # Qwen's is a part of the tower
    return [_NAMES[type(config.projector)].prefix, *([projector] if projector else [])]


def vision_specs(config: VisionConfig, text_size: int) -> dict[str, Any]:
    """Returns the specs of a tower and its projector.

    Args:
        config: The part of the model that sees images.
        text_size: Hidden size of the language model.
    """
    names = _NAMES[type(config.projector)]
    return {
        **_tower_specs(config.tower, names),
        "projector": _projector_specs(config, names.prefix, text_size),
    }


def _matrix(name: str, out_size: int, in_size: int, bias: bool = True) -> tuple[Spec, ...]:
    weight = Spec((out_size, in_size), ("vision", "vision"), f"{name}.weight")
    return (weight, _vector(f"{name}.bias", out_size, "zeros")) if bias else (weight,)


def _vector(name: str, size: int, init: Literal["ones", "zeros"]) -> Spec:
    return Spec((size,), (None,), name, init=init)


def _tower_specs(tower: TowerConfig, names: _Names) -> dict[str, Any]:
    D, side = tower.hidden_size, tower.patch_size
    frames = (tower.frames,) if tower.interpolated else ()  # Qwen's patches span frames, even if it is one
    shape = (D, tower.channels, *frames, side, side)
    patch, positions = f"{names.prefix}.{names.patch}", f"{names.prefix}.{names.positions}"
    specs: dict[str, Any] = {
        "patch": Spec(shape, (None,) * len(shape), f"{patch}.weight"),
        "patch_bias": _vector(f"{patch}.bias", D, "zeros"),
        "positions": Spec((tower.positions_per_side**2, D), (None, None), f"{positions}.weight"),
        "layers": [_layer_specs(tower, names, index) for index in range(tower.num_layers)],
    }
    if tower.final_norm:
        specs |= _norm("final_norm", f"{names.prefix}.post_layernorm", D)
    if tower.has_head:
        specs["head"] = _head_specs(tower, f"{names.prefix}.head")
    return specs


def _head_specs(tower: TowerConfig, name: str) -> dict[str, Spec]:
    """Returns the weights of SigLIP's pooling head, which are kept for others that read the checkpoint."""
    D, F = tower.hidden_size, tower.ffn_size
    shapes = {
        "probe": (1, 1, D),
        "attention.in_proj_weight": (3 * D, D),
        "attention.in_proj_bias": (3 * D,),
        "attention.out_proj.weight": (D, D),
        "attention.out_proj.bias": (D,),
        "layernorm.weight": (D,),
        "layernorm.bias": (D,),
        "mlp.fc1.weight": (F, D),
        "mlp.fc1.bias": (F,),
        "mlp.fc2.weight": (D, F),
        "mlp.fc2.bias": (D,),
    }
    return {own: Spec(shape, (None,) * len(shape), f"{name}.{own}") for own, shape in shapes.items()}


def _norm(ours: str, name: str, size: int) -> dict[str, Spec]:
    return {ours: _vector(f"{name}.weight", size, "ones"), f"{ours}_bias": _vector(f"{name}.bias", size, "zeros")}


def _layer_specs(tower: TowerConfig, names: _Names, index: int) -> dict[str, Spec]:
    prefix, D = f"{names.prefix}.{names.layers}.{index}", tower.hidden_size
    attention = f"{prefix}.{names.attention}"
    matrices = {"qkv": (f"{attention}.qkv", 3 * D, D)} if tower.fused_qkv else {}
    if not tower.fused_qkv:
        matrices = {name: (f"{attention}.{name}_proj", D, D) for name in ("q", "k", "v")}
    matrices |= {
        "out": (f"{attention}.{names.out}", D, D),
        "up": (f"{prefix}.{names.fc[0]}", tower.ffn_size, D),
        "down": (f"{prefix}.{names.fc[1]}", D, tower.ffn_size),
    }
    specs = {}
    for ours, theirs in zip(("attention_norm", "mlp_norm"), names.norms, strict=True):
        specs |= _norm(ours, f"{prefix}.{theirs}", D)
    for ours, (name, rows, columns) in matrices.items():
        specs[ours], specs[f"{ours}_bias"] = _matrix(name, rows, columns)
    return specs


def _projector_specs(config: VisionConfig, tower: str, text_size: int) -> Any:
    D, merged = config.tower.hidden_size, config.tower.hidden_size * config.patches_per_feature
    match config.projector:
        case PixelShuffle():
            [projection] = _matrix(f"{_PROJECTORS[PixelShuffle]}.proj", text_size, merged, bias=False)
            return {"projection": projection}
        case AveragePool():
            name = _PROJECTORS[AveragePool]
            return {
                "norm": _vector(f"{name}.mm_soft_emb_norm.weight", D, "zeros"),
                "projection": Spec((D, text_size), (None, None), f"{name}.mm_input_projection_weight"),
            }
        case PatchMerger(_, layers):
            first = _merger_specs(f"{tower}.merger", D, merged, text_size)
            names = [f"{tower}.deepstack_merger_list.{number}" for number in range(len(layers))]
            return {"mergers": [first, *(_merger_specs(name, merged, merged, text_size) for name in names)]}


def _merger_specs(name: str, norm_size: int, merged: int, text_size: int) -> dict[str, Spec]:
    specs = _norm("norm", f"{name}.norm", norm_size)
    specs["up"], specs["up_bias"] = _matrix(f"{name}.linear_fc1", merged, merged)
    specs["down"], specs["down_bias"] = _matrix(f"{name}.linear_fc2", text_size, merged)
    return specs
