"""Loading models with the arguments of EasyDeL."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from groupax.compat import hf
from groupax.compat.easydel.config import CHECKPOINTING, AttentionMechanisms, named
from groupax.compat.fields import native_attention, warn, warn_replicated
from groupax.core.settings.compute import mesh_sizes
from groupax.engine.core import indivisible_dims
from groupax.models.weights.checkpoint import Model, load_model
from groupax.parallel.mesh import RULES, decoding_mesh, make_mesh


def EasyDeLBaseConfigDict(**settings: Any) -> dict[str, Any]:  # noqa: N802 - EasyDeL's name
    """Returns settings of a model's config, for `config_kwargs`."""
    return settings


class EasyDeLModel(hf.CausalLM):
    """A model with the training settings that EasyDeL passes to the model.

    Attributes:
        trainer_settings: Settings of the native trainer.
    """

    def __init__(self, model: Model, trainer_settings: Mapping[str, Any]) -> None:
        super().__init__(model)
        self.trainer_settings = trainer_settings


# Arguments of `from_pretrained` without a warning: weights are put on all devices, matmuls accumulate in float32, and
# safetensors are read without PyTorch.
QUIET = ("auto_shard_model", "precision", "from_torch", "verbose")


class AutoEasyDeLModelForCausalLM:
    """A loader of models with the interface of EasyDeL's class."""

    @staticmethod
    def from_pretrained(
        name_or_path: Any,
        dtype: Any = None,
        param_dtype: Any = None,
        sharding_axis_dims: Sequence[int] | None = None,
        config_kwargs: Mapping[str, Any] | None = None,
        quantization_config: Any = None,
        **inert: Any,
    ) -> EasyDeLModel:
        """Loads a model from a folder or a hub id.

        Args:
            name_or_path: Folder or hub id of a model or an adapter.
            dtype: Dtype of the forward pass in training.
            param_dtype: Dtype of the weights in memory; None keeps the stored one. Trained weights have float32
                masters.
            sharding_axis_dims: Sizes of the mesh axes dp, fsdp, ep, tp and sp; one may be -1. Dims that are not
                divisible stay replicated, as in EasyDeL, with a warning.
            config_kwargs: Settings of the model's config (see `EasyDeLBaseConfigDict`).
            quantization_config: Quantization config, as in transformers.
            inert: Arguments without effect; a warning gives the reason where it matters.

        Raises:
            TypeError: An argument is unknown.
        """
        hf.warn_inert(inert, QUIET, "from_pretrained")
        mesh = None if sharding_axis_dims is None else make_mesh(mesh_sizes(",".join(map(str, sharding_axis_dims))))
        settings, max_positions = config_settings(config_kwargs or {})
        if dtype is not None:
            settings["dtype"] = np.dtype(dtype).name
        weights = hf.base_weights(quantization_config)
        stored = None if param_dtype is None else np.dtype(param_dtype).name
        model = load_model(
            name_or_path, stored, mesh, weights, max_positions=max_positions, replicated=() if mesh is None else RULES
        )
        warn_replicated(model, "sharding_axis_dims")
        tp = model.mesh.shape["tp"]
        if tp > 1 and not indivisible_dims(model.config, decoding_mesh(model.mesh, tp)):
            settings["decoding_tp"] = tp
        return EasyDeLModel(model, settings)


def config_settings(config: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
    """Returns settings of the native trainer, and the longest sequence or None, from a model's `config_kwargs`."""
    config = dict(config)
    lengths = [config.pop(name, None) for name in ("mask_max_position_embeddings", "freq_max_position_embeddings")]
    settings: dict[str, Any] = {}
    if "gradient_checkpointing" in config:
        policy = named(config.pop("gradient_checkpointing"), CHECKPOINTING, "gradient_checkpointing")
        settings["gradient_checkpointing"] = CHECKPOINTING[policy]
    if (dtype := config.pop("kvdtype", None)) is not None:
        settings["kv_cache_dtype"] = np.dtype(dtype).name
    if native_attention(config.pop("attn_mechanism", AttentionMechanisms.AUTO)) != "auto":
        settings["attn_implementation"] = "plain"
    for name, value in config.items():
        reason = "attention weights are computed in float32" if name.startswith("attn_") else "config.json describes it"
        warn(f"config_kwargs {name}={value!r} changes nothing in groupax: {reason}")
    return settings, max((length for length in lengths if length), default=None)
