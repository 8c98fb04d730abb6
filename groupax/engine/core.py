"""The weights, devices and memory that sessions decode with."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.sharding import Mesh

from groupax.constraints import ConstraintCompiler
from groupax.data.prompts import ImageEncoder
from groupax.engine.cache import cache_dtype, plan_for, token_bytes
from groupax.engine.plan import CHUNK_STEPS, FREE_FRAC, Demand, Plan
from groupax.engine.prefix_cache import PrefixCache
from groupax.engine.sequence import Sequence, demand_of
from groupax.engine.tensor_parallel import validate_tp
from groupax.models.config import ModelConfig
from groupax.models.params import shard_params
from groupax.models.specs import Params
from groupax.models.vision.tower import FeatureCache
from groupax.models.weights.quantize import check_decoding_weights, decoding_params
from groupax.parallel.mesh import decoding_mesh, num_data_shards, splits_model
from groupax.parallel.peak import free_memory_bytes

FEATURE_BYTES = 1 << 30  # host memory for the features of images, unless a cache is given
logger = logging.getLogger(__name__)


class EngineCore:
    """The part of an `Engine` that sessions share, with its arguments and attributes."""

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        mesh: Mesh,
        eos_ids: tuple[int, ...],
        max_slots: int = 256,
        chunk_steps: int = CHUNK_STEPS,
        tokenizer: Any = None,
        kv_bytes: int | None = None,
        kv_dtype: Any = None,
        prefix_bytes: int = 0,
        weights: str = "same",
        tp: int = 1,
        expected: Demand | None = None,
        adapters: tuple[str, ...] = (),
        record_experts: bool = False,
        features: FeatureCache | None = None,
    ) -> None:
        if config.num_labels:
            raise ValueError(
                f"the model classifies sequences, with {config.num_labels} labels, and has no head to generate text "
                "with; give a causal model"
            )
        if chunk_steps < 1:
            raise ValueError(f"chunk_steps must be at least 1, got {chunk_steps}")
        if record_experts and config.experts is None:
            raise ValueError(
                f"this {config.model_type} model has no experts to record; leave out record_experts (routing_replay in "
                "a run)"
            )
        self.config = config
        self.records_experts = record_experts
        self.weights = weights
        self.mesh = decoding_mesh(mesh, tp)
        self._gathers = splits_model(mesh) or tp > 1
        if tp > 1:
            validate_tp(config, self.mesh, params, weights)
        self._given: Params = params
        self._params: Params | None = None
        self.version = 0
        self.adapters = tuple(adapters)
        self.adapter_versions: dict[str, int] = {}
        self.eos_ids = eos_ids
        self.max_slots = max_slots
        self.chunk_steps = chunk_steps
        self.tokenizer = tokenizer
        self.constraints = ConstraintCompiler(tokenizer, config.vocab_size, eos_ids)
        self.kv_bytes = kv_bytes
        check_decoding_weights(params, weights)
        self.kv_dtype = cache_dtype(kv_dtype, weights, params["embed"].dtype, self.mesh.devices.flat[0])
        if prefix_bytes and config.recurrent is not None:
            logger.warning(
                "prefix_bytes is 0 for %s: layers with a recurrent state keep nothing of a sequence's beginnings, so "
                "that prompts are always computed whole",
                config.model_type,
            )
            prefix_bytes = 0
        self.prefixes = PrefixCache(prefix_bytes)
        self.before_chunk: Callable[[], object] | None = None
        self.expected = expected
        if features is None and config.vision is not None:
            features = FeatureCache(config.vision, FEATURE_BYTES)
        self.features = features
        self.image_encoder: ImageEncoder | None = None  # of prompts with images, if a model's folder has one

    @property
    def params(self) -> Params:
        """The weights that the engine decodes with."""
        if self._params is None:
            given = self._given
            gathered = jax.block_until_ready(shard_params(self.config, self.mesh, given)) if self._gathers else given
            self._params = decoding_params(self.config, gathered, self.weights)
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

    def version_of(self, adapter: str | None) -> int:
        """Returns the version of the weights that sequences with an adapter are sampled with."""
        return self.version if adapter is None else self.adapter_versions.get(adapter, self.version)

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
        adapts = self.mesh.devices.flat[0].platform == "cpu"
        return plan_for(self.config, allowed, self.kv_dtype, self.mesh.shape["tp"], self.max_slots, adapts)

    def planned_bytes(self) -> int:
        """Returns the most that keys and values of the expected sequences take on a device, at most what is allowed."""
        if self.expected is None:
            return 0
        unlimited = Plan(1 << 62, self.config.num_layers, self.max_slots)
        shape = unlimited.first_shape(self.expected, num_data_shards(self.mesh))
        needed = unlimited.planned_tokens(shape) * self.bytes_per_token
        allowed = int(FREE_FRAC * free_memory_bytes(self.mesh)) if self.kv_bytes is None else self.kv_bytes
        return min(needed, allowed)

    def demand(self, plan: Plan, sequences: Iterable[Sequence]) -> Demand:
        """Returns what these sequences, or those that are expected, need of the cache."""
        demand, expected = demand_of(sequences), plan.conversations or self.expected
        return demand if expected is None else plan.raised(demand, expected)

    @property
    def bytes_per_token(self) -> int:
        """Size of one token's keys and values in all layers, on one of the devices that store them."""
        return token_bytes(self.config, self.kv_dtype, self.mesh.shape["tp"])
