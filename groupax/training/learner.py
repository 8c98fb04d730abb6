"""The policy under training: the state that an optimizer step reads and changes."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from groupax.core.settings.compute import UpdateSettings, VisionSettings
from groupax.core.settings.fields import like
from groupax.core.settings.objective import EntropySettings, MaskSettings, ObjectiveSettings, ReferenceSettings
from groupax.core.settings.optimizer import LearningRateSettings, OptimizerSettings
from groupax.core.settings.run import RunSettings
from groupax.core.types import Metrics, Row
from groupax.models.adapted import apply_adapter, without_changes
from groupax.models.execution import execution_for
from groupax.models.kernels.fused_attention import select_fused_attention
from groupax.models.specs import Params
from groupax.models.vision.tower import FeatureCache
from groupax.models.weights.casts import cast_unquantized
from groupax.models.weights.checkpoint import Model
from groupax.objective.aggregation import Denominators, MetricSums, denominators, mean_metrics
from groupax.objective.entropy import EntropyState, applied_coef, next_entropy_state, top_entropy_threshold
from groupax.parallel.collectives import on_devices, on_host, to_host, weights_digest
from groupax.parallel.memory import free_memory_bytes
from groupax.parallel.mesh import num_data_shards
from groupax.training.accumulator import GradAccumulator, all_reduce, zero_grads
from groupax.training.images import computed_features, known_features
from groupax.training.memory import UpdateMemory, compute_dtype, efficiency_metrics, explain_out_of_memory
from groupax.training.optimizer import make_optimizer, make_schedule
from groupax.training.packing import MicroBatch, Packed, attention_cost_with, pack, unpack
from groupax.training.shapes import Shape
from groupax.training.state import (
    TrainState,
    cast_params,
    check_dropout,
    ema_update,
    frozen_base,
    init_state,
    offload_state,
    untrained_weights,
)
from groupax.training.step import StepSettings, apply_update, micro_step, policy_loss, score, shard_batch


@dataclass(frozen=True, kw_only=True)
class LearnerSettings(UpdateSettings, ReferenceSettings, MaskSettings, VisionSettings):
    """Everything that updates depend on."""

    objective: ObjectiveSettings  # settings of the loss
    entropy: EntropySettings  # settings of the entropy bonus
    optimizer: OptimizerSettings  # settings of the optimizer
    schedule: LearningRateSettings  # settings of the learning rate
    seed: int = like(RunSettings, "seed")  # seed of dropout


@dataclass(frozen=True, eq=False)
class Update:
    """The result of an optimizer step.

    Attributes:
        metrics: metrics of the step.
        applied: False if the loss or a gradient was not finite, and nothing changed.
        logps: log-probs of each row's tokens under the policy before the update.
        entropies: entropies of the policy's distributions at these tokens, in nats.
    """

    metrics: Metrics
    applied: bool
    logps: Sequence[np.ndarray]
    entropies: Sequence[np.ndarray]


class Learner:
    """Master weights, optimizer, reference, and the state that adapts from step to step.

    Args:
        model: model whose weights are copied.
        settings: how updates are computed.
        num_steps: optimizer steps of the learning rate schedule.
        longest: tokens of the longest prompt and of the longest completion to expect; 0 for unknown.

    Attributes:
        state: float32 master weights of the trained model or adapter, and optimizer state.
        frozen: base weights of an adapter in compute dtype, or the weights that see images if these are not trained;
            None if all weights are trained.
        is_adapter: whether an adapter is trained.
        untrained: the weights that are not trained, as they were loaded; empty for an adapter.
        features: cache of the features of images, which the engine may share; None for a model of text.
        policy: weights in compute dtype, which the engine reads.
        reference: weights of the reference, which for an adapter are its base; None if `beta` is 0. With
            `offload_reference` they are in host memory (see `reference_on_devices`).
        execution: how the programs are executed, with what the backward pass recomputes.
        shapes: shapes of the micro-batches so far, for which there are compiled programs, each with the number of
            updates before its first one.
        num_updates: optimizer steps that changed the weights.
        entropy: state of the entropy bonus.
        device_lock: held while a program runs, so that no other one on these devices comes between.
    """

    def __init__(
        self, model: Model, settings: LearnerSettings, num_steps: int, longest: tuple[int, int] = (0, 0)
    ) -> None:
        self.config, self.mesh, self.settings = model.config, model.mesh, settings
        self.schedule = make_schedule(settings.schedule, num_steps)
        self.optimizer = make_optimizer(settings.optimizer, self.schedule)
        device = model.mesh.devices.flat[0]
        self.on_cpu = device.platform == "cpu"
        self.dtype: Any = compute_dtype(device.platform, settings.dtype)
        fused = select_fused_attention(settings.attn_implementation, device, model.config, self.dtype)
        self.is_adapter, self.untrained = model.adapter is not None, untrained_weights(model, settings)
        self.frozen, self.dropout_rate = frozen_base(model, self.untrained, self.dtype), 0.0
        trained = {name: weight for name, weight in model.params.items() if name not in self.untrained}
        if model.adapter:
            trained, self.dropout_rate = model.adapter.trained, model.adapter.config.lora_dropout
        self.trains_vision = "vision" in trained
        check_dropout(self.dropout_rate, self.mesh)
        vision, cache_bytes = model.config.vision, int(settings.image_cache_gb * 1e9)
        self.features = None if vision is None else FeatureCache(vision, cache_bytes)
        self.state: TrainState = init_state(
            trained,
            optimizer=self.optimizer,
            config=self.config,
            mesh=self.mesh,
            offload_optimizer=settings.offload_optimizer,
        )
        self.policy = apply_adapter(self.frozen, self.trained())
        self.reference = self._initial_reference() if settings.objective.beta > 0 else None
        self.num_updates = 0
        self.longest = longest
        reduce_dtype = settings.fsdp_reduce_dtype
        self.execution = execution_for(device.platform, "none", None, fused, reduce_dtype)
        memory, choice = self.memory(), settings.gradient_checkpointing
        layers = [x for x in jax.tree.leaves(self.policy["layers"]) if isinstance(x, jax.Array)]
        copied_bytes = float(sum(x.addressable_shards[0].data.nbytes for x in layers))
        scans = memory.scans_layers(settings.scan_layers, copied_bytes)
        if choice == "auto":
            memory.check_longest_row()
        checkpointing = memory.checkpointing(choice, settings.micro_batch_tokens)
        self.execution = execution_for(device.platform, checkpointing, scans, fused, reduce_dtype)
        self.num_shards = num_data_shards(self.mesh)
        self.shapes: Mapping[Shape, int] = {}
        self.entropy = EntropyState(settings.entropy.entropy_coef)
        self.device_lock: AbstractContextManager[object] = nullcontext()

    def _initial_reference(self) -> Params:
        # fewer bits would lose the small steps by which sync_ref_model moves the reference
        dtype = jnp.float32 if self.settings.sync_ref_model else self.dtype
        if self.is_adapter:
            assert self.frozen is not None, "the base of an adapter is frozen"
            return self._stored(without_changes(self.frozen))
        return self._stored(apply_adapter(self.frozen, cast_params(self.state.params, dtype=dtype)))

    @cached_property
    def micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch on one device: the setting, or what fits when the first one is packed."""
        return self.settings.micro_batch_tokens or self.memory().fitting_tokens(self.execution.checkpointing)

    def memory(self) -> UpdateMemory:
        """Returns the memory that activations need, and what weights and optimizer state leave free of the devices'."""
        longest, is_fused = -(-sum(self.longest) // self.mesh.shape["sp"]), self.execution.attention is not None
        free = math.inf if self.on_cpu else free_memory_bytes(self.mesh)
        return UpdateMemory(self.config, self.dtype.itemsize, longest, is_fused, free)

    def restore(self, state: TrainState, reference: Params | None) -> None:
        """Continues from a saved state; the reference stays as it is if there is none."""
        if self.settings.offload_optimizer:
            state = replace(state, opt_state=offload_state(state.params, state.opt_state))
        self.state = state
        self.policy = apply_adapter(self.frozen, self.trained())
        self.reference = self.reference if reference is None else self._stored(reference)

    @contextmanager
    def reference_on_devices(self) -> Iterator[Params]:
        """Puts the reference's weights on the devices for the duration of the block."""
        assert self.reference is not None, "the config requires beta > 0"
        _ = self.micro_batch_tokens  # measured while the reference is still offloaded
        yield cast_unquantized(on_devices(self.reference), self.dtype)

    def _stored(self, reference: Params) -> Params:
        return on_host(reference) if self.settings.offload_reference else reference

    def update(self, rows: Sequence[Row]) -> Update:
        """Takes one optimizer step: the gradient of the objective over the rows, in micro-batches."""
        started_s = time.perf_counter()
        num_tokens = sum(int(row.mask.sum()) for row in rows)
        learning_rate = float(np.asarray(self.schedule(self.num_updates)))
        rows, counts, coef = self._prepared(rows)
        packed = self._pack(rows)
        accumulator, scored = self._accumulate(packed, counts, coef, self.dropout_rate)
        loss, sums, grad_norm, applied = self._apply(accumulator)
        metrics = {"loss": float(loss), "grad_norm": float(grad_norm), "learning_rate": learning_rate}
        metrics |= mean_metrics(sums, num_tokens)
        metrics |= {"update_skipped": float(not applied), "loss_tokens": float(num_tokens)}
        if self.settings.objective.entropy_bonus:
            metrics |= {
                "entropy_coef": coef,
                "policy_loss": policy_loss(metrics, coef, self.config, self.settings.objective),
            }
        if applied:
            metrics |= self._advance(metrics["entropy"] if num_tokens else None)
        seconds = time.perf_counter() - started_s
        metrics |= efficiency_metrics(packed, rows, seconds, self.config, self.mesh, self.dtype)
        logps, entropies = (unpack(packed, values, rows) for values in zip(*scored, strict=True))
        return Update(metrics, bool(applied), logps, entropies)

    def measure(self, rows: Sequence[Row]) -> Metrics:
        """Returns the loss of the objective over rows and its metrics, without dropout and without an update.

        It takes the program of updates, whose gradient it discards; what later updates compute does not change.
        """
        shapes = self.shapes
        try:
            rows, counts, coef = self._prepared(rows)
            accumulator, _ = self._accumulate(self._pack(rows), counts, coef, 0.0)
            with self.device_lock:
                accumulator = replace(all_reduce(accumulator, config=self.config, mesh=self.mesh), grads={})
                loss, sums = to_host((accumulator.loss, accumulator.metrics))
        finally:
            self.shapes = shapes
        metrics = {"loss": float(loss), **mean_metrics(sums, sum(int(row.mask.sum()) for row in rows))}
        if self.settings.objective.entropy_bonus:
            metrics["policy_loss"] = policy_loss(metrics, coef, self.config, self.settings.objective)
        return metrics

    def _prepared(self, rows: Sequence[Row]) -> tuple[Sequence[Row], Denominators, float]:
        """Returns rows with their policy masks, the step's denominators, and the weight of the entropy bonus."""
        if self.settings.top_entropy_quantile < 1:
            rows = self._with_policy_masks(rows)
        counts = denominators(rows, self.settings.masked_rows_in_denominator)
        return rows, counts, applied_coef(self.entropy, self.settings.entropy)

    def _accumulate(
        self, packed: Sequence[Packed], counts: Denominators, entropy_coef: float, dropout_rate: float
    ) -> tuple[GradAccumulator, list[Any]]:
        """Returns each device's sums over the micro-batches, and log-probs and entropies of each micro-batch."""
        trained = self.trained() if self.frozen else self.policy
        objective = self.settings.objective
        accumulator = zero_grads(trained, config=self.config, settings=objective, mesh=self.mesh)
        dropout_key = None  # all micro-batches share it
        if dropout_rate:
            with self.device_lock:
                dropout_key = jax.random.fold_in(jax.random.key(self.settings.seed), self.num_updates)
        scored = []
        settings = StepSettings(self.config, objective, self.mesh, self.execution, dropout_rate)
        for part in packed:
            with (
                explain_out_of_memory(part, self.num_shards, self.micro_batch_tokens, self.execution),
                self.device_lock,
            ):
                batch = self._with_features(part, trained, self.trains_vision) if part.images else part.batch
                accumulator, pair = micro_step(
                    trained,
                    accumulator,
                    shard_batch(batch, self.mesh),
                    counts,
                    jnp.float32(entropy_coef),
                    self.frozen,
                    dropout_key,
                    settings=settings,
                )
                # on CPU each queued program would have temporaries of its own, and collectives of several can deadlock
                if self.on_cpu or not isinstance(self.device_lock, nullcontext):
                    jax.block_until_ready(accumulator)
            scored.append(pair)
        return accumulator, scored

    def _apply(self, accumulator: GradAccumulator) -> tuple[Any, MetricSums, Any, Any]:
        """Updates the weights; returns the loss, the metrics, the gradient norm and whether the update was applied."""
        with self.device_lock:
            accumulator = all_reduce(accumulator, config=self.config, mesh=self.mesh)
            self.state, grad_norm, applied = apply_update(
                self.state,
                accumulator.grads,
                accumulator.loss,
                optimizer=self.optimizer,
                config=self.config,
                mesh=self.mesh,
                offload_optimizer=self.settings.offload_optimizer,
            )
            accumulator = replace(accumulator, grads={})  # frees their memory
            self.policy = apply_adapter(self.frozen, self.trained())
            return to_host((accumulator.loss, accumulator.metrics, grad_norm, applied))

    def _advance(self, entropy: float | None) -> Metrics:
        """Adapts what depends on the number of updates; returns metrics that follow from that."""
        settings, metrics = self.settings, {}
        self.num_updates += 1
        if entropy is not None and settings.objective.entropy_bonus:
            self.entropy = next_entropy_state(self.entropy, settings.entropy, entropy)
            if settings.objective.metric_definitions == "trl":
                metrics["entropy_coef"] = self.entropy.coef
        if settings.sync_ref_model and self.num_updates % settings.ref_model_sync_steps == 0:
            assert self.reference is not None, "the config requires beta > 0"
            with self.device_lock:
                on_device = on_devices({name: self.reference[name] for name in self.state.params})
                mixed = ema_update(on_device, self.state.params, alpha=settings.ref_model_mixup_alpha)
                self.reference = self._stored(apply_adapter(self.frozen, mixed))
        return metrics

    def digest(self) -> str:
        """Returns a digest of the trained weights, which does not depend on their sharding."""
        with self.device_lock:
            return weights_digest(self.state.params)

    def snapshot(self) -> Params:
        """Returns the trained weights in compute dtype as they are now; updates do not change them."""
        if self.frozen is None and self.dtype != jnp.float32:
            return self.policy  # already a copy
        return cast_params(self.state.params, dtype=self.dtype)

    def policy_of(self, snapshot: Params) -> Params:
        """Returns the weights of a snapshot in the form that the engine samples from."""
        return apply_adapter(self.frozen, snapshot)

    def logprobs(self, params: Params, rows: Sequence[Row]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Computes log-probs of each row's completion under some weights, and the entropies of their distributions."""
        packed = self._pack(rows)
        settings = StepSettings(self.config, self.settings.objective, self.mesh, self.execution)
        scored = []
        for part in packed:
            with (
                explain_out_of_memory(part, self.num_shards, self.micro_batch_tokens, self.execution),
                self.device_lock,
            ):
                batch = self._with_features(part, params, is_differentiated=False) if part.images else part.batch
                scored.append(to_host(score(params, shard_batch(batch, self.mesh), settings=settings)))
        logps, entropies = zip(*scored, strict=True)
        return unpack(packed, logps, rows), unpack(packed, entropies, rows)

    def _with_policy_masks(self, rows: Sequence[Row]) -> list[Row]:
        """Masks all but the top-entropy tokens, by a separate forward pass over the whole step."""
        entropies = self.logprobs(self.policy, rows)[1]
        counted = [entropy[row.mask] for entropy, row in zip(entropies, rows, strict=True)]
        threshold = top_entropy_threshold(counted, self.settings.top_entropy_quantile)
        return [replace(row, policy_mask=entropy >= threshold) for row, entropy in zip(rows, entropies, strict=True)]

    def trained(self) -> Params:
        """Returns the trained weights in compute dtype: the masters themselves where they have it, until an update."""
        return self.state.params if self.dtype == jnp.float32 else cast_params(self.state.params, dtype=self.dtype)

    def _pack(self, rows: Sequence[Row]) -> list[Packed]:
        cost, share_prefix = attention_cost_with(self.execution.attention), self.settings.share_prefix
        packed, shapes = pack(
            rows,
            self.num_shards,
            self.micro_batch_tokens,
            list(self.shapes),
            share_prefix,
            self.longest,
            cost,
            self.config.vision,
            served=self.num_updates - max(self.shapes.values(), default=self.num_updates),
        )
        self.shapes = {shape: self.shapes.get(shape, self.num_updates) for shape in shapes}
        return packed

    def _with_features(self, packed: Packed, params: Params, is_differentiated: bool) -> MicroBatch:
        """Returns a micro-batch with the features of its images, or with the images if their gradient is needed."""
        assert self.config.vision is not None, "the model sees images"
        if is_differentiated:
            return replace(packed.batch, features=computed_features(self.config.vision, packed.images))
        assert self.features is not None, "the model sees images"
        weights = params if self.trains_vision or self.frozen is None else self.frozen
        return replace(packed.batch, features=known_features(self.features, weights["vision"], packed.images))
