"""Weights that devices share to decode with: which can be, and how they get there without ever lying whole on one."""

import os
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from groupax.models.bitsandbytes_format import is_nf4
from groupax.models.checkpoint import Model, load_model
from groupax.models.config import ModelConfig
from groupax.models.families import read_config
from groupax.models.quantize import is_quantized
from groupax.models.specs import Params, split_dims
from groupax.models.summary import find_config
from groupax.parallel.mesh import decoding_mesh, indivisible, make_mesh
from groupax.storage.folders import resolve_folder

# What may stay whole on each of the devices.
MAY_BE_WHOLE = ("vocab",)


def load_sharded(
    name_or_path: str | os.PathLike[str], dtype: Any = None, mesh: Mesh | None = None, tp: int = 1
) -> Model:
    """A model to decode with, each device with its part of the weights from the files on.

    Args:
        name_or_path: a model's folder or hub id, or an adapter's.
        dtype: of the weights in memory; None keeps their own.
        mesh: where to put them; None for all devices, of which so many neighbours share the weights.
        tp: how many devices share them.

    Raises:
        ValueError: there is no such model, or devices cannot share its weights.
    """
    if mesh is None and tp != 1:
        mesh = decoding_mesh(make_mesh(), tp)
        _check_folder(find_config(str(resolve_folder(name_or_path)))[0], mesh)
    return load_model(name_or_path, dtype, mesh, replicated=MAY_BE_WHOLE)


def validate_tp(config: ModelConfig, mesh: Mesh, params: Params, weights: str) -> None:
    """See that devices can share the weights of a model to decode with.

    Args:
        config: the model's architecture.
        mesh: to decode on.
        params: the weights.
        weights: in which form they are decoded with (see `Engine`).

    Raises:
        ValueError: they cannot.
    """
    if is_quantized(params) or weights in ("int8", "float8"):
        _refuse_quantized("quantized weights" if is_quantized(params) else f"weights in {weights}", mesh)
    _check_divides(config, mesh)


def indivisible_dims(config: ModelConfig, mesh: Mesh) -> dict[str, int]:
    """The dims, with their sizes, that keep devices of a mesh from sharing a model's weights to decode with."""
    return {dim: size for dim, size, _ in indivisible(split_dims(config), mesh) if dim not in MAY_BE_WHOLE}


def _check_folder(hf_config: Mapping[str, Any], mesh: Mesh) -> None:
    """The same of a model that is not loaded yet, from its `config.json`."""
    if is_nf4(hf_config.get("quantization_config")):
        _refuse_quantized("quantized weights", mesh)
    _check_divides(read_config(hf_config), mesh)


def _refuse_quantized(what: str, mesh: Mesh) -> None:
    raise ValueError(f"{what} lie whole on every device: decode with tp 1 instead of {mesh.shape['tp']}")


def _check_divides(config: ModelConfig, mesh: Mesh) -> None:
    found = indivisible_dims(config, mesh)
    if found:
        told = ", ".join(f"{dim} ({size})" for dim, size in found.items())
        raise ValueError(
            f"devices cannot share the model's weights to decode with tp {mesh.shape['tp']}, which does not divide "
            f"{told}; choose a smaller tp, or 1"
        )
