"""Abstract models: shapes, dtypes and shardings in place of arrays, and the programs that they are traced to."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from groupax.core.config import GRPOConfig
from groupax.core.settings.optimizer import BaseWeights
from groupax.models.adapted import apply_adapter
from groupax.models.config import ModelConfig
from groupax.models.execution import Execution, execution_for
from groupax.models.kernels.fused_attention import select_fused_attention
from groupax.models.lora import LoRAConfig, adapter_specs, removed_changes
from groupax.models.params import partition_specs
from groupax.models.specs import Params, Spec, model_specs
from groupax.models.weights.nf4 import quantize_nf4
from groupax.parallel.collectives import HOST, is_on_host
from groupax.runs.build import learner_settings
from groupax.training.memory import UpdateMemory, compute_dtype
from groupax.training.optimizer import make_optimizer, make_schedule
from groupax.training.state import TrainState, state_shardings


class DoesNotFitError(Exception):
    """No device has enough memory for a run's arrays, regardless of its programs.

    Attributes:
        in_rollout: Whether the rollout's weights, keys and values do not fit, rather than the resident arrays.
    """

    def __init__(self, message: str, in_rollout: bool) -> None:
        super().__init__(message)
        self.in_rollout = in_rollout


@dataclass(frozen=True, eq=False)
class Program:
    """A program of a run."""

    name: str
    trace: Callable[[], Any]  # traces the function
    arguments: Mapping[str, Any]  # its arguments by kind; small ones are left out
    runs: int  # number of runs in a rollout and the updates on it
    loop_steps: int = 1  # number of iterations of loops whose ends depend on what they compute
    transferred_bytes: float = 0.0  # bytes to and from the host in one run, for each device
    scans_layers: bool = False  # whether its layers are a loop, so that it compiles quickly whatever their number

    @cached_property
    def traced(self) -> Any:
        """The traced function, to be compiled and counted."""
        return self.trace()


def device_bytes(trees: Mapping[str, Any]) -> float:
    """Returns the bytes of these arrays on each device; those without a sharding are replicated."""
    return sum((_shard_bytes(leaf) for leaf in jax.tree.leaves(dict(trees)) if not is_on_host(leaf)), 0.0)


def host_bytes(trees: Mapping[str, Any]) -> float:
    """Returns the bytes of these arrays in host memory, for each device."""
    return sum((_shard_bytes(leaf) for leaf in jax.tree.leaves(dict(trees)) if is_on_host(leaf)), 0.0)


def _shard_bytes(x: Any) -> float:
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return float(math.prod(shape) * np.dtype(x.dtype).itemsize)


# Optimizer steps of the schedule, which do not affect its program.
_STEPS = 1000


class AbstractModel:
    """The shapes, dtypes and shardings of a model and its optimizer state."""

    def __init__(self, config: ModelConfig, mesh: Mesh, args: GRPOConfig, lora: LoRAConfig | None) -> None:
        if lora and args.offload_reference:
            raise ValueError("offload_reference must be False with an adapter, whose reference is its base")
        self.config, self.mesh, self.args = config, mesh, args
        self.settings = learner_settings(args)
        device = mesh.devices.flat[0]
        self.platform = device.platform
        self.dtype: Any = compute_dtype(self.platform, args.dtype)
        self.fused = select_fused_attention(args.attn_implementation, device, config, self.dtype)
        self.optimizer = make_optimizer(self.settings.optimizer, make_schedule(self.settings.schedule, _STEPS))
        if args.base_weights != "same" and lora is None:
            raise ValueError(
                f"base_weights {args.base_weights!r} quantizes the base of an adapter; set lora_r, e.g. to 16"
            )
        weights = self.on_mesh(_stored(model_specs(config), self.dtype, args.base_weights))
        frozen = {"vision"} & set(weights) if args.freeze_vision_tower and not lora else set()
        specs = {name: spec for name, spec in model_specs(config).items() if name not in frozen}
        trained = _in_dtype(adapter_specs(config, lora) if lora else specs, jnp.float32)
        self.masters = self.on_mesh(trained)
        state = jax.eval_shape(lambda params: TrainState(params, self.optimizer.init(params)), self.masters)
        self.state: Any = jax.tree.map(struct_with, state, state_shardings(config, mesh, state, args.offload_optimizer))
        base = weights if lora else {name: weights[name] for name in frozen}
        if lora and lora.is_pissa:
            removed = jax.eval_shape(partial(removed_changes, lora), _in_dtype(trained, self.dtype))
            base = apply_adapter(base, self.on_mesh(removed))
        self.base_name = "base" if lora else "vision"
        self.frozen = base or None
        # the masters serve as the policy where they have its dtype
        self.policy_name = "masters" if self.dtype == jnp.float32 else "policy"
        self.policy = self.masters if self.dtype == jnp.float32 else self.on_mesh(_in_dtype(trained, self.dtype))
        residents = {"masters": self.state.params, "optimizer": self.state.opt_state}
        residents |= {"policy": self.policy} if self.dtype != jnp.float32 else {}
        residents |= {self.base_name: base} if base else {}
        if args.beta > 0 and not lora:
            host = jax.tree.map(lambda x: struct_with(x, x.sharding.with_memory_kind(HOST)), weights)
            residents["reference"] = host if args.offload_reference else weights
        self.residents: dict[str, Any] = residents
        self.reference = weights
        self.own = {self.policy_name: self.policy} | ({self.base_name: base} if base else {})
        self.dropout_rate = lora.lora_dropout if lora else 0.0

    @property
    def scalar(self) -> jax.ShapeDtypeStruct:
        """Shape of a replicated float32 scalar."""
        return jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(self.mesh, PartitionSpec()))

    def on_mesh(self, weights: Params) -> Params:
        """Returns weights with their shardings on the mesh."""
        return sharded_structs(weights, partition_specs(self.config, self.mesh, weights), self.mesh)

    def execution(self, longest: tuple[int, int], left: float) -> tuple[Execution, int]:
        """Returns the execution settings that the learner chooses, and the tokens of a device's micro-batch.

        Args:
            longest: Tokens of the longest prompt and of the longest completion.
            left: Free bytes of a device.
        """
        args, row = self.args, -(-sum(longest) // self.mesh.shape["sp"])
        memory = UpdateMemory(
            self.config,
            self.dtype.itemsize,
            row,
            is_fused=self.fused is not None,
            free_bytes=math.inf if self.platform == "cpu" else left,
        )
        chosen = memory.checkpointing(args.gradient_checkpointing, args.micro_batch_tokens)
        tokens = args.micro_batch_tokens or memory.fitting_tokens(chosen)
        scans = memory.scans_layers(
            args.scan_layers, device_bytes({"": apply_adapter(self.frozen, self.policy)["layers"]})
        )
        return execution_for(self.platform, chosen, scans, self.fused, args.fsdp_reduce_dtype), tokens


def _stored(specs: Any, dtype: Any, weights: BaseWeights) -> Any:
    """Returns the weights as they are loaded."""

    def stored(spec: Spec) -> Any:
        array = jax.ShapeDtypeStruct(spec.shape, dtype)
        return jax.eval_shape(quantize_nf4, array) if weights == "nf4" and spec.is_layer_matrix else array

    return jax.tree.map(stored, specs)


def _in_dtype(specs: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), specs)


def sharded_structs(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Returns the abstract arrays of a tree, sharded over the mesh by partition specs."""
    return jax.tree.map(lambda x, spec: struct_with(x, NamedSharding(mesh, spec)), tree, specs)


def struct_with(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """Returns the abstract array with another sharding."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
