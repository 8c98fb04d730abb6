"""The policy under training: what an optimizer step reads and changes."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from groupax.errors import RunError, is_out_of_memory
from groupax.models.adapted import Frozen, joined
from groupax.models.checkpoint import Model
from groupax.models.config import ModelConfig
from groupax.models.execution import execution_on
from groupax.models.flops import activation_bytes_per_token, forward_flops
from groupax.models.fused_attention import fused_for
from groupax.models.quantize import in_dtype, is_quantized
from groupax.models.specs import Params
from groupax.objective.aggregation import Denominators
from groupax.objective.entropy import EntropyState, applied_coef, next_entropy_state
from groupax.objective.masks import top_entropy_threshold
from groupax.objective.metrics import MetricSums
from groupax.parallel.memory import on_devices, on_host
from groupax.parallel.mesh import format_mesh, num_data_shards, splits_model
from groupax.parallel.peak import free_memory_bytes, peak_flops, peak_memory_bytes
from groupax.parallel.transfer import to_host
from groupax.settings.compute import Checkpointing, UpdateSettings
from groupax.settings.fields import like
from groupax.settings.objective import EntropySettings, MaskSettings, ObjectiveSettings, ReferenceSettings
from groupax.settings.optimizer import LearningRateSettings, OptimizerSettings
from groupax.settings.run import RunSettings
from groupax.training.batch import Packed, attention_cost_with, pack
from groupax.training.offload import offloaded
from groupax.training.optimizer import make_optimizer, make_schedule
from groupax.training.packing import Shape
from groupax.training.step import (
    ROUTER_LOSS,
    TrainState,
    across_shards,
    apply_update,
    compute_view,
    init_state,
    micro_step,
    mix,
    norms_and_changes,
    score,
    to_rows,
    zero_totals,
)
from groupax.types import Metrics, Row

# Activations of more tokens fall out of a CPU's caches.
CPU_MICRO_BATCH_TOKENS = 4096
# More make no product faster.
MOST_MICRO_BATCH_TOKENS = 65_536


@dataclass(frozen=True, kw_only=True)
class LearnerSettings(UpdateSettings, ReferenceSettings, MaskSettings):
    """Everything that updates depend on.

    Attributes:
        objective: loss that is minimized.
        entropy: weight of the entropy bonus.
        optimizer: how gradients become updates.
        schedule: learning rate.
        seed: seed of dropout.
    """

    objective: ObjectiveSettings
    entropy: EntropySettings
    optimizer: OptimizerSettings
    schedule: LearningRateSettings
    seed: int = like(RunSettings, "seed")


@dataclass(frozen=True, eq=False)
class Update:
    """What an optimizer step did.

    Attributes:
        metrics: of the step.
        made: False if the loss or a gradient was not finite, and nothing changed.
        logps: of each row's tokens under the policy before the update.
        entropies: of the distributions that those tokens are of, in nats.
        distributions: over what is trained, one number per weight, by name; empty unless they are due.
    """

    metrics: Metrics
    made: bool
    logps: Sequence[np.ndarray]
    entropies: Sequence[np.ndarray]
    distributions: Mapping[str, np.ndarray] = field(default_factory=dict)


class Learner:
    """Master weights, optimizer, reference, and what adapts from step to step.

    Args:
        model: its weights are copied.
        settings: how updates are computed.
        num_steps: of the schedule.
        longest: tokens of the longest prompt and completion that may come; 0 for unknown.

    Attributes:
        state: float32 masters of what is trained, the model's weights or an adapter's, and optimizer state.
        frozen: the base of an adapter in compute dtype; None if everything is trained.
        policy: the weights in compute dtype, which the engine reads.
        reference: the reference's, which of an adapter are the base's; None if `beta` is 0. With `offload_reference`
            they lie on the hosts (see `reference_on_devices`).
        shapes: of the micro-batches so far, which have programs.
        num_updates: optimizer steps that changed the weights.
        entropy: state of the entropy bonus.
        device_lock: Lock held while a program runs, so that no other one on these devices comes between; None for none.
    """

    def __init__(
        self, model: Model, settings: LearnerSettings, num_steps: int, longest: tuple[int, int] = (0, 0)
    ) -> None:
        self.config, self.mesh, self.settings = model.config, model.mesh, settings
        self.schedule = make_schedule(settings.schedule, num_steps)
        self.optimizer = make_optimizer(settings.optimizer, self.schedule)
        platform = model.mesh.devices.flat[0].platform
        self.on_cpu = platform == "cpu"
        self.dtype: Any = compute_dtype(platform, settings.dtype)
        fused = fused_for(settings.attn_implementation, model.mesh.devices.flat[0], model.config, self.dtype)
        self.execution = execution_on(platform, settings.gradient_checkpointing, settings.scan_layers, fused)
        adapter = model.adapter
        if adapter is None and is_quantized(model.params):
            raise ValueError(
                "the weights are quantized and cannot be trained; train an adapter: set lora_r, e.g. to 16"
            )
        self.frozen = adapter and Frozen(in_dtype(adapter.frozen.params, self.dtype), adapter.frozen.scale)
        self.dropout_rate = adapter.config.lora_dropout if adapter else 0.0
        if self.dropout_rate and self.mesh.shape["tp"] > 1:
            raise ValueError(
                f"mesh {format_mesh(self.mesh)}: lora_dropout {self.dropout_rate} is not built for inputs that are "
                "split over tp; set it to 0, or tp to 1"
            )
        self.state: TrainState = init_state(
            adapter.trained if adapter else model.params,
            optimizer=self.optimizer,
            config=self.config,
            mesh=self.mesh,
            offload_optimizer=settings.offload_optimizer,
        )
        self.policy = self._policy()
        self.reference = None
        if settings.objective.beta > 0:
            # small parts of the policy would be lost in fewer bits
            dtype = jnp.float32 if settings.sync_ref_model else self.dtype
            reference = self.frozen.params if self.frozen else compute_view(self.state.params, dtype=dtype)
            self.reference = self._kept(reference)
        self.num_updates = 0
        self.longest = longest
        self.shapes: list[Shape] = []
        self.entropy = EntropyState(settings.entropy.entropy_coef)
        self.device_lock: AbstractContextManager[None] | None = None

    @cached_property
    def micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch on one device: as set, or what fits when the first one is put together."""
        return self.settings.micro_batch_tokens or self._fitting_tokens()

    def restore(self, state: TrainState, reference: Params | None) -> None:
        """Go on from a saved state; the reference stays as it is if there is none."""
        if self.settings.offload_optimizer:
            state = replace(state, opt_state=offloaded(state.params, state.opt_state))
        self.state = state
        self.policy = self._policy()
        self.reference = self.reference if reference is None else self._kept(reference)

    @contextmanager
    def reference_on_devices(self) -> Iterator[Params]:
        """The reference's weights, on the devices for as long as the block runs."""
        assert self.reference is not None, "the config requires beta > 0"
        _ = self.micro_batch_tokens  # what fits is found beside what stays
        yield in_dtype(on_devices(self.reference), self.dtype)

    def _kept(self, reference: Params) -> Params:
        return on_host(reference) if self.settings.offload_reference else reference

    def update(self, rows: Sequence[Row]) -> Update:
        """One optimizer step: the gradient of the objective over the rows, in micro-batches."""
        started_s = time.perf_counter()
        settings = self.settings
        if settings.top_entropy_quantile < 1:
            rows = self._with_policy_masks(rows)
        num_tokens = sum(int(row.mask.sum()) for row in rows)
        num_rows = sum(settings.masked_rows_in_denominator or bool(row.mask.any()) for row in rows)
        counts = Denominators(jnp.float32(max(num_rows, 1)), jnp.float32(max(num_tokens, 1)))
        coef = applied_coef(self.entropy, settings.entropy)
        packed = self._pack(rows)
        trained = self._trained() if self.frozen else self.policy
        totals = zero_totals(trained, config=self.config, settings=settings.objective, mesh=self.mesh)
        scored = []
        for part in packed:
            with self._memory_explained(part), self._turn():
                totals, pair = micro_step(
                    trained,
                    totals,
                    to_rows(part.batch, self.mesh),
                    counts,
                    jnp.float32(coef),
                    self.frozen,
                    self._dropout_key(),
                    config=self.config,
                    settings=settings.objective,
                    mesh=self.mesh,
                    execution=self.execution,
                    dropout_rate=self.dropout_rate,
                )
                if self.device_lock or (self.on_cpu and (self.config.experts or splits_model(self.mesh))):
                    jax.block_until_ready(totals)  # collectives of virtual devices can starve each other in a queue
            scored.append(pair)
        learning_rate = float(np.asarray(self.schedule(self.num_updates)))
        every = settings.weight_distribution_log_steps
        with self._turn():
            totals = across_shards(totals, config=self.config, mesh=self.mesh)
            is_due = every > 0 and (self.num_updates + 1) % every == 0
            before = compute_view(self.state.params, dtype=jnp.float32) if is_due else None
            self.state, grad_norm, made = apply_update(
                self.state,
                totals.grads,
                totals.loss,
                optimizer=self.optimizer,
                config=self.config,
                mesh=self.mesh,
                offload_optimizer=settings.offload_optimizer,
            )
            totals = replace(totals, grads={})  # their memory can go
            self.policy = self._policy()
            loss, sums, grad_norm, made = to_host((totals.loss, totals.metrics, grad_norm, made))
        metrics = {"loss": float(loss), "grad_norm": float(grad_norm), "learning_rate": learning_rate}
        metrics |= _means(sums, num_tokens) | {"update_skipped": float(not made), "loss_tokens": float(num_tokens)}
        if settings.objective.entropy_bonus:
            metrics["entropy_coef"] = coef
            metrics["policy_loss"] = self._policy_loss(metrics, coef)
        if made:
            self.num_updates += 1
            if num_tokens:
                self.entropy = next_entropy_state(self.entropy, settings.entropy, metrics["entropy"])
                if settings.objective.entropy_bonus and settings.objective.metric_definitions == "trl":
                    metrics["entropy_coef"] = self.entropy.coef
            with self._turn():
                self._sync_reference()
        distributions = {} if before is None else self._distributions(before)
        metrics |= _distribution_metrics(distributions)
        metrics |= self._efficiency(packed, rows, time.perf_counter() - started_s)
        logps, entropies = (_by_row(packed, values, rows) for values in zip(*scored, strict=True))
        return Update(metrics, bool(made), logps, entropies, distributions)

    def _policy_loss(self, metrics: Metrics, entropy_coef: float) -> float:
        """The loss of a step without its entropy bonus and without a mixture's load-balancing loss."""
        loss = metrics["loss"] + (entropy_coef * metrics["entropy"] if entropy_coef else 0.0)
        if self.config.experts:
            coef = self.settings.objective.router_aux_loss_coef
            loss -= (self.config.experts.aux_loss_coef if coef is None else coef) * metrics[ROUTER_LOSS]
        return loss

    def _distributions(self, before: Params) -> dict[str, np.ndarray]:
        """The norm of each weight that is trained, and how far it has moved from what it was before."""
        with self._turn():
            norms, changes = to_host(norms_and_changes(before, self.state.params))
        return {"weights/norms": norms, "weights/update_ratios": changes}

    def snapshot(self) -> Params:
        """What is trained, in compute dtype, as it is now: updates leave it alone."""
        if self.frozen is None and self.dtype != jnp.float32:
            return self.policy  # already a copy
        return compute_view(self.state.params, dtype=self.dtype)

    def policy_of(self, snapshot: Params) -> Params:
        """The weights to sample from, of a snapshot."""
        return joined(self.frozen, snapshot)

    def logprobs(self, params: Params, rows: Sequence[Row]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Log-probs of each row's completion tokens under some weights, and the entropies of their distributions."""
        packed = self._pack(rows)
        scored = []
        for part in packed:
            with self._memory_explained(part), self._turn():
                batch = to_rows(part.batch, self.mesh)
                pair = score(
                    params,
                    batch,
                    config=self.config,
                    settings=self.settings.objective,
                    mesh=self.mesh,
                    execution=self.execution,
                )
                scored.append(to_host(pair))
        logps, entropies = zip(*scored, strict=True)
        return _by_row(packed, logps, rows), _by_row(packed, entropies, rows)

    def _with_policy_masks(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with the mask of their top-entropy tokens, by a forward pass of its own over the whole step."""
        entropies = self.logprobs(self.policy, rows)[1]
        counted = [entropy[row.mask] for entropy, row in zip(entropies, rows, strict=True)]
        threshold = top_entropy_threshold(counted, self.settings.top_entropy_quantile)
        return [replace(row, policy_mask=entropy >= threshold) for row, entropy in zip(rows, entropies, strict=True)]

    def _sync_reference(self) -> None:
        settings = self.settings
        if settings.sync_ref_model and self.num_updates % settings.ref_model_sync_steps == 0:
            assert self.reference is not None, "the config requires beta > 0"
            reference = mix(on_devices(self.reference), self.state.params, alpha=settings.ref_model_mixup_alpha)
            self.reference = self._kept(reference)

    def _policy(self) -> Params:
        return joined(self.frozen, self._trained())

    def _trained(self) -> Params:
        """What is trained, in compute dtype: the masters themselves where they have it."""
        return self.state.params if self.dtype == jnp.float32 else compute_view(self.state.params, dtype=self.dtype)

    def _turn(self) -> AbstractContextManager[None]:
        return self.device_lock or nullcontext()

    def _dropout_key(self) -> jax.Array | None:
        """Of the next update, the same for all of its micro-batches."""
        if not self.dropout_rate:
            return None
        return jax.random.fold_in(jax.random.key(self.settings.seed), self.num_updates)

    def _fitting_tokens(self) -> int:
        """Tokens of a micro-batch on one device: what stays in a CPU's caches, or what half of the memory holds."""
        if self.on_cpu:
            return CPU_MICRO_BATCH_TOKENS
        checkpointing = self.settings.gradient_checkpointing
        return fitting_tokens(self.config, self.dtype.itemsize, checkpointing, free_memory_bytes(self.mesh))

    @contextmanager
    def _memory_explained(self, part: Packed) -> Iterator[None]:
        """What to do if the devices run out of memory."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            tokens = part.num_cells // num_data_shards(self.mesh)
            longest = int((part.batch.cells >= 0).sum(axis=1).max())
            advice = (
                f"set micro_batch_tokens (now {self.micro_batch_tokens}) to "
                f"{max(256, min(tokens, self.micro_batch_tokens) // 2)}"
            )
            if longest * 2 > tokens:
                advice = f"one completion alone has {longest} tokens: lower max_completion_length"
            if self.settings.gradient_checkpointing != "full":
                advice += ", or gradient_checkpointing to 'full'"
            raise RunError(
                f"out of memory in a micro-batch of {tokens} tokens per device; {advice}. The devices say:\n{error}"
            ) from error

    def _pack(self, rows: Sequence[Row]) -> list[Packed]:
        packed, self.shapes = pack(
            rows,
            num_data_shards(self.mesh),
            self.micro_batch_tokens,
            self.shapes,
            self.settings.share_prefix,
            self.longest,
            attention_cost_with(self.execution.attention),
        )
        return packed

    def _efficiency(self, packed: list[Packed], rows: Sequence[Row], seconds: float) -> Metrics:
        groups: dict[int, tuple[int, list[int]]] = {}
        for row in rows:
            groups.setdefault(row.group, (len(row.prompt), []))[1].append(len(row.completion))
        flops_per_s = 3.0 * forward_flops(self.config, groups.values()) / seconds  # backward is twice forward
        real = sum(prompt - 1 + sum(lengths) for prompt, lengths in groups.values())
        return {
            "padding_frac": 1.0 - real / sum(part.num_cells for part in packed),
            "micro_batches": float(len(packed)),
            "time/train_s": seconds,
            "train/tokens_per_s": real / seconds,
            "mfu": flops_per_s / peak_flops(self.mesh, self.dtype),
            "memory/peak_bytes": peak_memory_bytes(self.mesh),
        }


def compute_dtype(platform: str, dtype: str) -> Any:
    """That of the forward pass; "auto" is float32 on CPU and bfloat16 elsewhere."""
    default = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(default if dtype == "auto" else dtype)


def fitting_tokens(config: ModelConfig, itemsize: int, checkpointing: Checkpointing, free_bytes: float) -> int:
    """Tokens of a micro-batch on a device that is no CPU: what half of the free memory holds, in steps of 1,024.

    Args:
        config: the model.
        itemsize: bytes of a number of the forward pass.
        checkpointing: what the backward pass computes again.
        free_bytes: of a device, beside weights and optimizer.
    """
    fitting = int(0.5 * free_bytes / activation_bytes_per_token(config, itemsize, checkpointing))
    return max(1024, min(MOST_MICRO_BATCH_TOKENS, fitting // 1024 * 1024))


def _means(metrics: MetricSums, num_tokens: int) -> Metrics:
    """Sums become means over loss tokens, and nothing is known without any; extremes over no rows at all are 0."""
    if not num_tokens:
        return dict.fromkeys((*metrics.sums, *metrics.minima, *metrics.maxima), float("nan"))
    means = {name: float(total) / num_tokens for name, total in metrics.sums.items()}
    minima = {name: 0.0 if value == np.inf else float(value) for name, value in metrics.minima.items()}
    maxima = {name: 0.0 if value == -np.inf else float(value) for name, value in metrics.maxima.items()}
    return means | minima | maxima


def _distribution_metrics(distributions: Mapping[str, np.ndarray]) -> Metrics:
    if not distributions:
        return {}
    norms, changes = distributions["weights/norms"], distributions["weights/update_ratios"]
    return {
        "weights/norm": float(np.sqrt(np.sum(np.square(norms.astype(float))))),
        "weights/update_ratio_mean": float(changes.mean()),
        "weights/update_ratio_max": float(changes.max()),
    }


def _by_row(packed: Sequence[Packed], values: Sequence[Any], rows: Sequence[Row]) -> list[np.ndarray]:
    """What was computed in rectangles, [B, T] each, as the rows had it."""
    result: list[np.ndarray] = [np.zeros(0)] * len(rows)
    for part, rectangle in zip(packed, values, strict=True):
        for index, value in zip(part.rows, to_host(rectangle), strict=True):
            if index >= 0:
                result[index] = value[: len(rows[index].completion)]
    return result
