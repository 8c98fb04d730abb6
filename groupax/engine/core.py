"""The weights, devices and memory that sessions decode with."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from groupax.core.settings.compute import DecodingWeights
from groupax.core.storage.folders import resolve_folder
from groupax.engine.cache import num_cached_heads
from groupax.engine.constraints import ConstraintCompiler
from groupax.engine.plan import CHUNK_STEPS, FREE_FRAC, Demand, Plan
from groupax.engine.prefix_cache import PrefixCache
from groupax.models.adapted import stack_adapters
from groupax.models.config import ModelConfig
from groupax.models.families import read_config
from groupax.models.flops import find_config
from groupax.models.lora import as_plain
from groupax.models.params import shard_params, split_dims
from groupax.models.recurrent import empty_state
from groupax.models.specs import Params
from groupax.models.vision.processing import PromptEncoder
from groupax.models.vision.tower import FeatureCache
from groupax.models.weights.casts import bfloat16_params, is_quantized
from groupax.models.weights.checkpoint import Model, load_model
from groupax.models.weights.nf4 import is_nf4
from groupax.parallel.memory import free_memory_bytes
from groupax.parallel.mesh import decoding_mesh, indivisible, make_mesh, num_data_shards, splits_model
from groupax.parallel.runtime import cuda_capability

FEATURE_BYTES = 1 << 30  # host memory for the features of images, unless a cache is given
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineSettings:
    """Settings of an engine's decoding.

    Attributes:
        max_slots: Maximum number of completions decoded at once; the others wait for a free slot.
        chunk_steps: Number of tokens decoded between two visits to the host.
        kv_bytes: Maximum memory for keys and values on a device, in bytes; None allows 80 % of what is free when
            sequences are started. What does not fit waits; if completions become longer than expected, the shortest are
            preempted and sampled again later.
        kv_dtype: Dtype of the cache, or "float8" for float8_e4m3fn; None for the dtype of the weights, on CPU float32.
        prefix_bytes: Host memory for the keys and values of finished sequences, in bytes. Prompts that begin with the
            same tokens, as the next turn of a conversation does, reuse them; 0 stores nothing.
        weights: The weights to decode with: "same" as `params`, or a copy of them in "bfloat16".
        tp: Number of neighbouring devices that share the weights and decode the same rows: each has some of the heads
            with their keys and values, of the feed-forward's columns and of the vocabulary.
        expected: What the largest of many batches needs of the cache, by which the others choose their shapes too, so
            that few programs are compiled; None chooses by each batch alone.
        adapters: Names of the adapters in `params`, if it has several (see `models.adapted`). Sequences of all of
            them and of the base are decoded together.
        record_experts: Whether sequences have the experts that their tokens went through (see `Sequence.experts`).
    """

    max_slots: int = 256
    chunk_steps: int = CHUNK_STEPS
    kv_bytes: int | None = None
    kv_dtype: Any = None
    prefix_bytes: int = 0
    weights: str = "same"
    tp: int = 1
    expected: Demand | None = None
    adapters: tuple[str, ...] = ()
    record_experts: bool = False


class EngineCore:
    """The part of an `Engine` that sessions share, with its arguments and attributes.

    Attributes:
        num_shards: Number of devices along the data axes.
        bytes_per_token: Size of one token's keys and values in all layers, on one of the devices that store them.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        mesh: Mesh,
        eos_ids: tuple[int, ...],
        tokenizer: Any = None,
        features: FeatureCache | None = None,
        **settings: Any,
    ) -> None:
        given = EngineSettings(**settings)
        if config.num_labels:
            raise ValueError(
                f"the model classifies sequences, with {config.num_labels} labels, and has no head to generate text "
                "with; give a causal model"
            )
        if given.chunk_steps < 1:
            raise ValueError(f"chunk_steps must be at least 1, got {given.chunk_steps}")
        if given.record_experts and config.experts is None:
            raise ValueError(
                f"this {config.model_type} model has no experts to record; leave out record_experts (routing_replay in "
                "a run)"
            )
        self.config, self.eos_ids, self.tokenizer = config, eos_ids, tokenizer
        self.max_slots, self.chunk_steps, self.kv_bytes = given.max_slots, given.chunk_steps, given.kv_bytes
        self.expected, self.weights, self.adapters = given.expected, given.weights, tuple(given.adapters)
        self.records_experts = given.record_experts
        self.mesh = decoding_mesh(mesh, given.tp)
        self.num_shards = num_data_shards(self.mesh)
        self._gathers = splits_model(mesh) or given.tp > 1
        if given.tp > 1:
            validate_tp(config, self.mesh, params)
        if self.weights not in get_args(DecodingWeights):
            names = ", ".join(get_args(DecodingWeights))
            raise ValueError(f"weights to decode with must be one of {names}, got {self.weights!r}")
        device, shards = self.mesh.devices.flat[0], self.mesh.shape["tp"]
        self.kv_dtype = cache_dtype(given.kv_dtype, self.weights, params["embed"].dtype, device)
        self.bytes_per_token = token_bytes(config, self.kv_dtype, shards)
        self._limits = plan_for(config, 0, self.kv_dtype, shards, self.max_slots, device.platform == "cpu")
        self._given: Params = params
        self._params: Params | None = None
        self.version = 0
        self.constraints = ConstraintCompiler(tokenizer, config.vocab_size, eos_ids)
        if given.prefix_bytes and config.recurrent is not None:
            logger.warning(
                "prefix_bytes is 0 for %s: layers with a recurrent state keep nothing of a sequence's beginnings, so "
                "that prompts are always computed whole",
                config.model_type,
            )
        self.prefixes = PrefixCache(0 if config.recurrent is not None else given.prefix_bytes)
        self.before_chunk: Callable[[], object] | None = None
        if features is None and config.vision is not None:
            features = FeatureCache(config.vision, FEATURE_BYTES)
        self.features = features
        self.image_encoder: PromptEncoder | None = None  # of prompts with images, if a model's folder has one

    @property
    def params(self) -> Params:
        """The weights that the engine decodes with."""
        if self._params is None:
            given = self._given
            gathered = jax.block_until_ready(shard_params(self.config, self.mesh, given)) if self._gathers else given
            self._params = gathered if self.weights == "same" else bfloat16_params(gathered)
        return self._params

    @params.setter
    def params(self, params: Params) -> None:
        if params is not self._given:  # the same weights need no second copy
            self._given, self._params = params, None
            self.version += 1
            self.prefixes.clear()

    @property
    def vision_params(self) -> Params:
        """The weights that see images, as they were given: the same arrays as a trainer's, never converted."""
        return self._given["vision"]

    def adapter_index(self, adapter: str | None) -> int:
        """Returns the index of an adapter among those that are stacked, -1 for the base.

        Raises:
            ValueError: There is no such adapter.
        """
        if adapter is None:
            return -1
        if adapter not in self.adapters:
            raise ValueError(f"there is no adapter {adapter!r}; the engine has {', '.join(self.adapters) or 'none'}")
        return self.adapters.index(adapter)

    def release(self) -> None:
        """Frees the memory of weights that were gathered or converted; the next decoding creates them again."""
        if self._gathers or self.weights != "same":
            self._params = None

    def plan(self) -> Plan:
        """Returns the limits of the cache: `kv_bytes`, or a fraction of the memory that the weights leave free."""
        allowed = self.kv_bytes
        if allowed is None:
            jax.block_until_ready(self.params)  # gathered and converted weights take their memory first
            allowed = int(FREE_FRAC * free_memory_bytes(self.mesh))
        return replace(self._limits, max_tokens=allowed // self.bytes_per_token)

    def planned_bytes(self) -> int:
        """Returns the most that keys and values of the expected sequences take on a device, at most what is allowed."""
        if self.expected is None:
            return 0
        unlimited = Plan(1 << 62, self.config.num_layers, self.max_slots)
        shape = unlimited.first_shape(self.expected, self.num_shards)
        needed = unlimited.planned_tokens(shape) * self.bytes_per_token
        allowed = int(FREE_FRAC * free_memory_bytes(self.mesh)) if self.kv_bytes is None else self.kv_bytes
        return min(needed, allowed)


# Dims that may be replicated.
REPLICATED_DIMS = ("vocab",)


def load_sharded(
    name_or_path: str | os.PathLike[str], dtype: Any = None, mesh: Mesh | None = None, tp: int = 1
) -> Model:
    """Loads a model to decode with; each device reads only its shard of the weights from the files.

    Without a mesh all devices are used, and `tp` neighbours share the weights.

    Raises:
        ValueError: There is no such model, or its weights cannot be sharded so.
    """
    if mesh is None and tp != 1:
        mesh = decoding_mesh(make_mesh(), tp)
        hf_config = find_config(str(resolve_folder(name_or_path)))[0]
        if is_nf4(hf_config.get("quantization_config")):
            _refuse_quantized(mesh)
        _check_divides(read_config(hf_config), mesh)
    return load_model(name_or_path, dtype, mesh, replicated=REPLICATED_DIMS)


def with_adapters(model: Model, adapters: Mapping[str, Model]) -> Params:
    """Returns the weights of a model with adapters of it, stacked.

    Raises:
        ValueError: An adapter is of another base, has more than low-rank changes, or weights that are not finite: the
            masked ranks of others' rows are multiplied by them too.
    """
    changes, dtype = [], model.params["embed"].dtype
    for name, each in adapters.items():
        if each.adapter is None or each.adapter.frozen is not model.params:
            raise ValueError(
                f"{name} is not an adapter of the same model in memory; load it by load_adapter(model, ...)"
            )
        changes.append(jax.tree.map(lambda x: x.astype(dtype), as_plain(each.adapter).trained))
        if not all(jnp.isfinite(x).all() for x in jax.tree.leaves(changes[-1])):
            raise ValueError(f"{name} has weights that are not finite, which would spoil other rows of its batches")
    return stack_adapters(model.params, changes)


def validate_tp(config: ModelConfig, mesh: Mesh, params: Params) -> None:
    """Checks that a model's weights can be sharded over `tp` to decode with."""
    if is_quantized(params):
        _refuse_quantized(mesh)
    _check_divides(config, mesh)


def indivisible_dims(config: ModelConfig, mesh: Mesh) -> dict[str, int]:
    """Returns the dims, with their sizes, that the mesh cannot shard and tensor-parallel decoding would have to."""
    return {dim: size for dim, size, _ in indivisible(split_dims(config), mesh) if dim not in REPLICATED_DIMS}


def _refuse_quantized(mesh: Mesh) -> None:
    raise ValueError(
        f"quantized weights are replicated on every device: decode with tp 1 instead of {mesh.shape['tp']}"
    )


def _check_divides(config: ModelConfig, mesh: Mesh) -> None:
    if found := indivisible_dims(config, mesh):
        dims = " and ".join(f"{dim} ({size})" for dim, size in found.items())
        raise ValueError(
            f"the model's weights cannot be sharded to decode with tp {mesh.shape['tp']}: not divisible by it: "
            f"{dims}; choose a smaller tp, or 1"
        )


FLOAT8_CAPABILITY = (8, 9)  # the first compute capability of NVIDIA GPUs that convert float8


def cache_dtype(requested: Any, weights: str, dtype: Any, device: Any) -> Any:
    """Returns the dtype of keys and values.

    Args:
        requested: A dtype, or "float8" for float8_e4m3fn; None for the dtype of the decoding weights, on CPU float32:
            to write one column of an array of fewer bits, XLA's CPU backend goes through all of it.

    Raises:
        ValueError: The dtype has no fractions, or the device cannot convert it.
    """
    if requested is None and device.platform == "cpu":
        return jnp.dtype(jnp.float32)
    requested = jnp.float8_e4m3fn if requested == "float8" else requested
    chosen = jnp.dtype(requested or ("bfloat16" if weights == "bfloat16" else dtype))
    if not jnp.issubdtype(chosen, jnp.floating):
        raise ValueError(f"keys and values are fractions, but kv_dtype is {chosen}; use 'float8' for 8 bits")
    capability = cuda_capability(device)
    if chosen.itemsize == 1 and capability is not None and capability < FLOAT8_CAPABILITY:
        raise ValueError(
            f"keys and values in {chosen} need compute capability 8.9, and {device.device_kind} has "
            f"{capability[0]}.{capability[1]}; use kv_dtype 'bfloat16'"
        )
    return chosen


def token_bytes(config: ModelConfig, dtype: Any, tp: int) -> int:
    """Returns the size of one token's keys and values in all layers, on one of the `tp` devices that share them."""
    num_layers = len(config.attention_layers)
    return 2 * num_layers * num_cached_heads(config, tp) * config.head_dim * jnp.dtype(dtype).itemsize // tp


def state_bytes(config: ModelConfig) -> int:
    """Returns the size of a sequence's states in all layers, which each device has of its own slots."""
    if config.recurrent is None:
        return 0
    state = jax.eval_shape(lambda: empty_state(config, 1))
    return (config.num_layers - len(config.attention_layers)) * sum(x.size * x.dtype.itemsize for x in state)


def plan_for(config: ModelConfig, num_bytes: int, dtype: Any, tp: int, max_slots: int, adapts: bool = False) -> Plan:
    """Returns the limits of a cache."""
    size = token_bytes(config, dtype, tp)
    state_tokens = -(-state_bytes(config) // size)
    layers = len(config.attention_layers), config.num_layers - len(config.attention_layers)
    return Plan(num_bytes // size, layers[0], max_slots, adapts, state_tokens=state_tokens, num_recurrent=layers[1])
