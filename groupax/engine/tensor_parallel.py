"""Tensor-parallel decoding: the models whose weights can be sharded, and loading them as shards."""

import os
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from groupax.models.config import ModelConfig
from groupax.models.families import read_config
from groupax.models.flops import find_config
from groupax.models.params import split_dims
from groupax.models.specs import Params
from groupax.models.weights.checkpoint import Model, load_model
from groupax.models.weights.nf4 import is_nf4
from groupax.models.weights.quantize import is_quantized
from groupax.parallel.mesh import decoding_mesh, indivisible, make_mesh
from groupax.storage.folders import resolve_folder

# Dims that may be replicated.
REPLICATED_DIMS = ("vocab",)


def load_sharded(
    name_or_path: str | os.PathLike[str], dtype: Any = None, mesh: Mesh | None = None, tp: int = 1
) -> Model:
    """Loads a model to decode with; each device reads only its shard of the weights from the files.

    Args:
        name_or_path: Folder or hub id of a model or an adapter.
        dtype: Dtype of the weights in memory; None keeps their own.
        mesh: Devices for the weights; None for all devices, of which `tp` neighbours share the weights.
        tp: Number of devices that share the weights.

    Raises:
        ValueError: There is no such model, or its weights cannot be sharded so.
    """
    if mesh is None and tp != 1:
        mesh = decoding_mesh(make_mesh(), tp)
        _check_folder(find_config(str(resolve_folder(name_or_path)))[0], mesh)
    return load_model(name_or_path, dtype, mesh, replicated=REPLICATED_DIMS)


def validate_tp(config: ModelConfig, mesh: Mesh, params: Params, weights: str) -> None:
    """Checks that a model's weights can be sharded over `tp` to decode with.

    Args:
        config: Architecture of the model.
        mesh: Devices to decode on.
        params: The weights.
        weights: Format of the decoding weights (see `Engine`).

    Raises:
        ValueError: They cannot.
    """
    if is_quantized(params) or weights in ("int8", "float8"):
        _refuse_quantized("quantized weights" if is_quantized(params) else f"weights in {weights}", mesh)
    _check_divides(config, mesh)


def indivisible_dims(config: ModelConfig, mesh: Mesh) -> dict[str, int]:
    """Returns the dims, with their sizes, that the mesh cannot shard and tensor-parallel decoding would have to."""
    return {dim: size for dim, size, _ in indivisible(split_dims(config), mesh) if dim not in REPLICATED_DIMS}


def _check_folder(hf_config: Mapping[str, Any], mesh: Mesh) -> None:
    """Checks a model that is not loaded yet, from its `config.json`."""
    if is_nf4(hf_config.get("quantization_config")):
        _refuse_quantized("quantized weights", mesh)
    _check_divides(read_config(hf_config), mesh)


def _refuse_quantized(what: str, mesh: Mesh) -> None:
    raise ValueError(f"{what} are replicated on every device: decode with tp 1 instead of {mesh.shape['tp']}")


def _check_divides(config: ModelConfig, mesh: Mesh) -> None:
    found = indivisible_dims(config, mesh)
    if found:
        dims = " and ".join(f"{dim} ({size})" for dim, size in found.items())
        raise ValueError(
            f"the model's weights cannot be sharded to decode with tp {mesh.shape['tp']}: not divisible by it: "
            f"{dims}; choose a smaller tp, or 1"
        )
